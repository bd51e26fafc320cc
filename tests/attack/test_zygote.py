"""Orders that the zygote must not carry out, and what a program inside can do about a mask."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.changes import (
    MASK_DIRECTORY,
    MASK_FILE,
    S_HOST,
    S_NAMESPACE,
    S_ORDER,
    S_OWNER,
    Answer,
    Driven,
    Waiting,
    item,
    listed,
)
from support.hostile import PRELUDE, decode
from support.native import SEALS

pytestmark = [pytest.mark.attack, pytest.mark.needs("bubblewrap")]

DONE = Answer(0, 0, [(0, 0)])


@pytest.fixture
def driven() -> Iterator[Driven]:
    with Driven() as zygote:
        yield zygote


@pytest.fixture
def secret(project: Path) -> Path:
    path = project / "secret"
    path.write_text("SECRET")
    return path


def mask(path: Path, operation: int = MASK_FILE) -> bytes:
    return listed(item(os.fsencode(path) + b"\0", operation))


def namespace_of(pid: int | str, name: str = "mnt") -> int:
    return os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)


# -------------------------------------------------------------------------------- whose mounts


def test_the_hosts_own_mounts_are_never_changed(driven: Driven, secret: Path) -> None:
    own = namespace_of("self")
    assert driven.order(own, mask(secret)) == Answer(S_HOST, errno.EPERM, [])
    os.close(own)
    assert secret.read_text() == "SECRET"
    with Waiting(secret.parent, f"cat {secret}") as waiting:
        assert driven.order(waiting.namespace, mask(secret)) == DONE, "the control"
        assert waiting.run() == b""
    assert secret.read_text() == "SECRET"


@pytest.mark.parametrize("name", ["user", "pid", "net", "file", "socket"])
def test_what_is_no_mount_namespace_is_refused(driven: Driven, secret: Path, name: str) -> None:
    with Waiting(secret.parent, "true") as waiting:
        if name in ("user", "pid", "net"):
            lent = namespace_of(waiting.init_pid, name)
        else:
            lent = os.open(secret, os.O_PATH) if name == "file" else os.dup(waiting.sandbox.lease.fileno())
        answer = driven.order(lent, mask(secret))
        os.close(lent)
        assert answer is not None
        assert (answer.stage, answer.results) == (S_NAMESPACE, [])
        assert driven.order(waiting.namespace, mask(secret)) == DONE, "the control"


@pytest.mark.root
@pytest.mark.parametrize(("uid", "answer"), [(65534, (S_OWNER, errno.EPERM)), (0, None)])
def test_another_users_namespace_is_refused(
    driven: Driven, tmp_path: Path, uid: int, answer: tuple[int, int] | None
) -> None:
    """Root could enter anybody's; the control is one that root made."""
    target = tmp_path / "target"
    target.touch()
    for directory in target.parents[:3]:
        directory.chmod(0o755)
    with subprocess.Popen(
        ["unshare", "--user", "--map-current-user", "--mount", "sh", "-c", "echo made; cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        user=uid,
        group=uid,
        extra_groups=[],
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"made\n"
        lent = namespace_of(other.pid)
        got = driven.order(lent, mask(target))
        os.close(lent)
        assert other.stdin is not None
        other.stdin.close()
    assert got == (DONE if answer is None else Answer(*answer, []))


BELOW = """
import os, sys
sys.path.insert(0, sys.argv[1])
from support.changes import Driven, listed, item
lent = int(sys.argv[2])
with Driven() as driven:
    print(*driven.order(lent, listed(item(b"/usr\\0", 2)))[:2])
"""


def test_a_namespace_of_nobody_below_us_is_refused(project: Path) -> None:
    """A zygote in a user namespace of its own, lent the mounts that the namespace above owns."""
    tests = str(Path(__file__).parents[1])
    own = namespace_of("self")
    done = subprocess.run(
        ["unshare", "--user", "--map-current-user", "--mount", sys.executable, "-c", BELOW, tests, str(own)],
        stdout=subprocess.PIPE,
        pass_fds=[own],
        timeout=30,
    )
    os.close(own)
    assert done.stdout.split() == [b"%d" % S_OWNER, b"%d" % errno.EPERM]


# -------------------------------------------------------------------------------- what is there


def test_a_destination_that_was_swapped_is_refused(driven: Driven, secret: Path) -> None:
    project = secret.parent
    status = secret.stat()
    identified = listed(
        item(os.fsencode(secret) + b"\0", flags=1, device=status.st_dev, inode=status.st_ino)
    )
    decoy = project / "decoy"
    decoy.write_text("DECOY")
    with Waiting(project, f"cat {secret} {decoy}") as waiting:
        secret.rename(project / "elsewhere")
        secret.symlink_to("decoy")
        assert driven.order(waiting.namespace, identified) == Answer(0, 0, [(8, errno.ELOOP)])
        assert driven.order(waiting.namespace, mask(secret)) == Answer(0, 0, [(8, errno.ELOOP)])
        secret.unlink()
        secret.write_text("another")
        assert driven.order(waiting.namespace, identified) == Answer(0, 0, [(9, errno.ESTALE)])
        (project / "elsewhere").rename(secret)
        assert driven.order(waiting.namespace, identified) == DONE, "the control"
        assert waiting.run() == b"DECOY"


def test_no_link_leads_out_of_the_session(driven: Driven, secret: Path) -> None:
    """Neither a link nor one of proc(5), which would lead to mounts of another namespace."""
    (secret.parent / "link").symlink_to("/")
    with Waiting(secret.parent, "true") as waiting:
        for path in (
            b"/proc/1/root/etc/passwd",
            b"/proc/1/cwd",
            os.fsencode(secret.parent) + b"/link/etc/passwd",
        ):
            answer = driven.order(waiting.namespace, listed(item(path + b"\0")))
            assert answer == Answer(0, 0, [(8, errno.ELOOP)]), path
        assert driven.order(waiting.namespace, listed(item(b"/etc/passwd\0"))) == DONE, "the control"


# -------------------------------------------------------------------------------- crooked orders

CROOKED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "short": lambda _: b"ral-changes/1",
    "no items": lambda _: listed(),
    "magic": lambda path: listed(item(path), magic=b"ral-changes/2"),
    "magic's padding": lambda path: listed(item(path), magic=b"ral-changes/1\0\0x"),
    "size too large": lambda path: listed(item(path), size=1),
    "size too small": lambda path: listed(item(path), size=-1),
    "a byte more": lambda path: listed(item(path), size=-1) + b"\0",
    "count too large": lambda path: listed(item(path), count=2),
    "count too small": lambda path: listed(item(path), item(path), count=1),
    "count without end": lambda path: listed(item(path), count=0xFFFFFFFF),
    "too many": lambda path: listed(*[item(path)] * 4097),
    "too long": lambda path: listed(*[item(b"/" + b"x" * 4000 + b"\0")] * 2200),
    "operation 0": lambda path: listed(item(path, 0)),
    "operation 3": lambda path: listed(item(path, 3)),
    "flag": lambda path: listed(item(path, flags=2)),
    "word": lambda path: listed(item(path, zero=1)),
    "inode without flag": lambda path: listed(item(path, inode=1)),
    "device without flag": lambda path: listed(item(path, device=1)),
    "no NUL": lambda path: listed(item(path[:-1])),
    "two NUL": lambda path: listed(item(path + b"\0")),
    "NUL inside": lambda path: listed(item(path[:3] + b"\0" + path[4:])),
    "no path": lambda _: listed(item(b"")),
    "empty path": lambda _: listed(item(b"\0")),
    "path too long": lambda _: listed(item(b"/" + b"x" * 4095 + b"\0")),
    "path past the end": lambda path: listed(item(path)[:-1], size=0),
    "header past the end": lambda path: listed(item(path), item(path)[:20]),
    "root": lambda _: listed(item(b"/\0")),
    "relative": lambda path: listed(item(path[1:])),
    "two slashes": lambda path: listed(item(b"/" + path)),
    "slash inside": lambda path: listed(item(path.replace(b"/secret", b"//secret"))),
    "slash at the end": lambda path: listed(item(path[:-1] + b"/\0")),
    "dot": lambda path: listed(item(path.replace(b"/secret", b"/./secret"))),
    "dot at the end": lambda path: listed(item(path[:-1] + b"/.\0")),
    "two dots": lambda path: listed(item(b"/usr/.." + path)),
    "two dots at the end": lambda path: listed(item(path[:-1] + b"/..\0")),
}


@pytest.mark.parametrize("kind", CROOKED)
def test_a_list_that_is_not_exact_is_refused_as_a_whole(driven: Driven, secret: Path, kind: str) -> None:
    path = os.fsencode(secret) + b"\0"
    with Waiting(secret.parent, f"cat {secret}") as waiting:
        answer = driven.order(waiting.namespace, CROOKED[kind](path))
        assert answer is not None
        assert (answer.stage, answer.results) == (S_ORDER, [])
        assert waiting.run() == b"SECRET", "nothing of it was done"


def test_a_sound_item_before_a_crooked_one_is_not_done_either(driven: Driven, secret: Path) -> None:
    path = os.fsencode(secret) + b"\0"
    with Waiting(secret.parent, f"cat {secret}") as waiting:
        answer = driven.order(waiting.namespace, listed(item(path), item(b"usr\0", MASK_DIRECTORY)))
        assert answer == Answer(S_ORDER, errno.EBADMSG, [])
        assert waiting.run() == b"SECRET"


@pytest.mark.parametrize("missing", [0x1, 0x2, 0x4, 0x8])
def test_a_list_that_could_still_change_is_refused(driven: Driven, secret: Path, missing: int) -> None:
    with Waiting(secret.parent, "true") as waiting:
        assert driven.order(waiting.namespace, mask(secret), seals=SEALS & ~missing) == Answer(
            S_ORDER, errno.EPERM, []
        )


def test_a_list_that_is_no_memory_file_is_refused(driven: Driven, secret: Path, tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(mask(secret))
    with Waiting(secret.parent, "true") as waiting, open(tmp_path / "list", "rb") as plain:
        lent = os.dup(waiting.namespace)
        # In the place of the list comes a plain file, and the list itself is one too many.
        answer = driven.order(lent, mask(secret), more=[plain.fileno()])
        os.close(lent)
        assert answer is None
        assert driven.order(waiting.namespace, mask(secret)) == DONE


ORDERS: dict[str, tuple[bytes | None, int, int]] = {
    "short": (struct.pack("<II", 1, 1000), 0, 0),
    "long": (struct.pack("<IIQ", 1, 1000, 0) + b"\0", 0, 0),
    "very long": (b"\1" * 100_000, 0, 0),
    "version": (struct.pack("<IIQ", 2, 1000, 0), 0, 0),
    "no time": (struct.pack("<IIQ", 1, 0, 0), 0, 0),
    "too much time": (struct.pack("<IIQ", 1, 60_001, 0), 0, 0),
    "word": (struct.pack("<IIQ", 1, 1000, 1 << 63), 0, 0),
    "two descriptors": (None, 0, 1),
    "one descriptor": (None, 0, 2),
    "no descriptor": (None, 0, 3),
    "four descriptors": (None, 1, 0),
    "as many as there is room for": (None, 13, 0),
    "more than there is room for": (None, 14, 0),
    "as many as can be sent": (None, 250, 0),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_an_order_that_is_none_is_dropped_with_its_descriptors(
    driven: Driven, secret: Path, kind: str
) -> None:
    packet, more, fewer = ORDERS[kind]
    with Waiting(secret.parent, f"cat {secret}") as waiting:
        extra = [waiting.namespace] * more
        assert driven.order(waiting.namespace, mask(secret), packet=packet, more=extra, fewer=fewer) is None
        # Answered in order: when the second answer is there, the first order is through.
        assert driven.order(waiting.namespace, listed(item(b"/etc/passwd\0"))) == DONE
        assert sorted(os.listdir(f"/proc/{driven.pid}/fd")) == ["0", "1", "2", "3"]
        assert waiting.run() == b"SECRET"


def test_noise_neither_ends_it_nor_does_anything(secret: Path) -> None:
    sound = mask(secret)
    with Driven() as driven, Waiting(secret.parent, f"cat {secret}") as waiting:

        @given(st.integers(0, len(sound) - 1), st.integers(1, 255))
        def changed(where: int, bits: int) -> None:
            content = bytearray(sound)
            content[where] ^= bits
            answer = driven.order(waiting.namespace, bytes(content))
            assert answer is not None
            assert answer != DONE, (where, bits)

        @given(st.binary(max_size=64), st.integers(0, 3))
        def noise(packet: bytes, fewer: int) -> None:
            assert driven.order(waiting.namespace, sound, packet=packet or b"x", fewer=fewer) is None

        noise()
        assert Path(f"/proc/{driven.pid}").exists()
        changed()
        assert driven.order(waiting.namespace, sound) == DONE


# -------------------------------------------------------------------------------- from inside

LOOK = (
    PRELUDE
    + """
place = PLACE
file, directory, parent = place + b"/secret", place + b"/hidden", place
fd, plain = os.open(directory, os.O_PATH), os.open(file, os.O_RDONLY)
def text(path): return tried(lambda: open(path, "rb").read().decode())
reads = {}
for way in (b"", b"/proc/self/root", b"/proc/1/root", b"/proc/self/cwd/../../../../.."):
    reads[way.decode()] = [text(way + file), text(way + directory + b"/below")]
reads["up and down"] = [text(directory + b"/../secret"), text(directory + b"/../hidden/below")]
reads["handle"] = [text(b"/proc/self/fd/%d" % plain), text(b"/proc/self/fd/%d/below" % fd)]
tell(reads=reads)
"""
)
UNDO = (
    LOOK
    + """
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC = 1, 2, 4, 32, 4096, 8192, 16384
MNT_DETACH, AT_FDCWD = 2, -100
found = {}
def c(name, *arguments):
    "What a function of the C library returns, or the name of its error."
    ctypes.set_errno(0)
    result = getattr(libc, name)(*arguments)
    return result if result >= 0 else errno.errorcode[ctypes.get_errno()]
def mount(source, target, flags): return c("mount", source, target, None, flags, None)
for name, path in (("file", file), ("directory", directory)):
    found["umount " + name] = c("umount", path)
    found["detach " + name] = c("umount2", path, MNT_DETACH)
    found["remount " + name] = mount(None, path, MS_REMOUNT | MS_BIND)
    found["remount all " + name] = mount(None, path, MS_REMOUNT)
    found["setattr " + name] = call(442, AT_FDCWD, path, 0, struct.pack("=QQQQ", 0, 1, 0, 0), 32)
    found["bind " + name] = mount(path, b"/tmp", MS_BIND)
    found["move " + name] = mount(path, b"/tmp", MS_MOVE)
    found["open_tree " + name] = call(428, AT_FDCWD, path, 1)
    found["fspick " + name] = call(433, AT_FDCWD, path, 0)
    found["chmod " + name] = tried(os.chmod, path, 0o777)
    found["rename " + name] = tried(os.rename, path, place + b"/away")
    found["chown " + name] = tried(os.chown, path, os.getuid(), -1)
    found["utime " + name] = tried(os.utime, path)
    found["setxattr " + name] = tried(os.setxattr, path, "user.x", b"x")
found["move_mount"] = call(429, fd, b"", AT_FDCWD, b"/tmp", 4)
found["bind parent"] = mount(parent, b"/tmp", MS_BIND)
found["bind parent with all"] = mount(parent, b"/tmp", MS_BIND | MS_REC)
found["tmpfs"] = c("mount", b"x", b"/tmp", b"tmpfs", 0, None)
found["fsopen"] = call(430, b"tmpfs", 0)
found["pivot_root"] = c("pivot_root", parent, parent)
found["chroot"] = tried(os.chroot, parent)
found["user namespace"] = c("unshare", 0x10000000)
found["mount namespace"] = c("unshare", 0x20000)
found["rename parent"] = tried(os.rename, parent, parent + b"2")
found["write file"] = tried(os.open, file, os.O_WRONLY)
found["truncate"] = tried(os.truncate, file, 1)
found["unlink"] = tried(os.unlink, file)
found["rmdir"] = tried(os.rmdir, directory)
found["link"] = tried(os.link, file, place + b"/linked")
found["create"] = tried(os.open, directory + b"/new", os.O_WRONLY | os.O_CREAT, 0o600)
found["create through handle"] = tried(lambda: os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
found["write through proc"] = tried(os.open, b"/proc/self/fd/%d" % plain, os.O_WRONLY)
found["by handle"] = c("open_by_handle_at", fd, struct.pack("=II", 8, 1) + bytes(8), 0)
ns = tried(os.open, "/proc/1/ns/mnt", os.O_RDONLY)
found["namespace of pid 1"] = ns if isinstance(ns, str) else c("setns", ns, 0)
tell(undone=found)
up = sorted(os.listdir(directory + b"/.."))
tell(lists=os.listdir(directory), up=[n.decode() for n in up],
     shown=sorted(set(l.split()[4] for l in open("/proc/self/mountinfo") if " ral-mask " in l)))
"""
)


def test_a_program_inside_can_neither_take_a_mask_away_nor_look_under_it(
    driven: Driven, secret: Path
) -> None:
    project = secret.parent
    hidden = project / "hidden"
    hidden.mkdir()
    (hidden / "below").write_text("SECRET")
    script = UNDO.replace("PLACE", repr(os.fsencode(project)))
    order = listed(item(os.fsencode(secret) + b"\0"), item(os.fsencode(hidden) + b"\0", MASK_DIRECTORY))
    with Waiting(project, script, hostile=True) as waiting:
        assert driven.order(waiting.namespace, order) == Answer(0, 0, [(0, 0), (0, 0)])
        said = waiting.run()
    found = decode(said)
    assert b"SECRET" not in said, said
    undone, reads = found["undone"], found["reads"]
    assert isinstance(undone, dict)
    assert isinstance(reads, dict)
    assert reads.pop("/proc/1/root") == ["EACCES", "EACCES"]
    assert [pair for pair in reads.values() if pair != ["", "ENOENT"]] == []
    assert {what: result for what, result in undone.items() if not isinstance(result, str)} == {}
    assert len(undone) > 40
    assert found["lists"] == []
    assert found["up"] == ["hidden", "secret"], (
        "the way up is the project's, not that of the file system in memory"
    )
    assert found["shown"] == [str(hidden), str(secret)]
    # The control: without masks the same ways lead to both, and what needs no privilege is allowed.
    with Waiting(project, LOOK.replace("PLACE", repr(os.fsencode(project))), hostile=True) as waiting:
        reads = decode(waiting.run())["reads"]
    assert isinstance(reads, dict)
    assert [way for way, pair in reads.items() if pair != ["SECRET", "SECRET"]] == ["/proc/1/root"]
    with Waiting(project, script, hostile=True) as waiting:
        freed = decode(waiting.run())["undone"]
    assert isinstance(freed, dict)
    allowed = {what for what, result in freed.items() if not isinstance(result, str)}
    assert allowed >= {"chmod file", "rename file", "chmod directory", "utime directory"}
