"""Homes, masks, copies, devices, in real sandboxes made by the broker's own steps from a policy; and the
host afterwards is what it was before."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ral_broker.envelope.explain import State, explain
from ral_broker.envelope.facts import look, observe
from ral_broker.envelope.policy import SYSTEM_RULES, HomeAccess, Rule, SessionPolicy, Text
from ral_broker.envelope.session_plan import SessionPlan, paths_of_interest, session_plan
from ral_broker.errors import Refused
from support.installed import home_dir
from support.planned import Ended, run_plan

pytestmark = [pytest.mark.needs("bubblewrap")]

MODES: tuple[HomeAccess, ...] = ("tmpwrite", "restricted", "read", "write")
SECRET = "s3cret"


class Host:
    """A scratch home with a project in it, and sandboxes for them."""

    def __init__(self, base: Path) -> None:
        self.base, self.home = base, base / "home"
        self.project = self.home / "work" / "proj"
        self.project.mkdir(parents=True)

    def write(self, name: str, content: str = SECRET) -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        return path

    def rules(self, why: str, *names: str) -> tuple[Rule, ...]:
        return tuple(Rule(os.fsencode(self.home / name), why) for name in names)

    async def plan(self, **changes: object) -> SessionPlan:
        home, project = os.fsencode(self.home), os.fsencode(self.project)
        policy = SessionPolicy(
            uid=os.geteuid(), home=home, home_path=home, project=project, cwd=project, session="0123abcd"
        )
        policy = msgspec.structs.replace(policy, **changes)
        return session_plan(policy, await observe(paths_of_interest(policy)))

    async def run(self, script: str, **changes: object) -> Ended:
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "LC_ALL": "C"}
        return await run_plan(await self.plan(**changes), "/bin/sh", "-c", script, env=environment)

    def tree(self) -> dict[str, tuple[int, int, bytes]]:
        """Everything below the scratch directory: inode, mode, content."""
        found = {}
        for directory, names, files in os.walk(self.base):
            for name in (*names, *files):
                path = os.path.join(directory, name)
                status = os.lstat(path)
                content = b""
                if stat.S_ISLNK(status.st_mode):
                    content = os.fsencode(os.readlink(path))
                elif stat.S_ISREG(status.st_mode):
                    content = Path(path).read_bytes()
                found[path] = (status.st_ino, status.st_mode, content)
        return found


@pytest.fixture
def host() -> Iterator[Host]:
    base = Path(tempfile.mkdtemp(prefix=".ral-test-", dir=home_dir()))
    yield Host(base)
    shutil.rmtree(base)


@pytest.mark.parametrize("mode", MODES)
async def test_what_each_home_lets_a_program_do(host: Host, mode: HomeAccess) -> None:
    host.write("notes", "mine")
    host.write(".cache/uv/x")
    (host.project / ".env").write_text(SECRET)
    before = host.tree()
    script = """
    echo "notes $(cat ~/notes 2>/dev/null)"
    (echo x > ~/new) 2>/dev/null && echo made
    (echo y > ~/.cache/uv/new) 2>/dev/null && echo cached
    echo z > built && echo built
    cat .env
    """
    done = await host.run(
        script, home_access=mode, home_writable=host.rules("home_writable", ".cache/uv"),
        blocked=(Rule(os.fsencode(host.project / ".env"), "blocked_files"),),
    )  # fmt: skip
    assert done.stderr == b"", done
    said = done.stdout.decode().split("\n")
    assert SECRET not in done.stdout.decode()
    assert said[0] == ("notes mine" if mode in ("read", "write") else "notes ")
    assert ("made" in said) == (mode in ("tmpwrite", "write"))
    assert "cached" in said
    assert "built" in said
    made = {str(host.home / ".cache/uv/new"), str(host.project / "built")}
    made |= {str(host.home / "new")} if mode == "write" else set()
    after = host.tree()
    assert after.keys() - before.keys() == made
    assert {path: after[path] for path in before} == before


ALWAYS = (".ssh/id", ".aws/credentials", ".gnupg/x")
UNLESS = (".netrc", ".config/gh/hosts.yml", ".docker/config.json", ".kube/config", ".cargo/credentials.toml")


@pytest.mark.parametrize("mode", MODES)
async def test_no_home_shows_credentials_unless_that_very_entry_is_listed(
    host: Host, mode: HomeAccess
) -> None:
    for name in (*ALWAYS, *UNLESS):
        host.write(name, f"{SECRET} {name}\n")
    host.write(".config/other", "shown\n")
    before = host.tree()
    read = "cd ~; cat " + " ".join((*ALWAYS, *UNLESS, ".config/other")) + "; true"
    done = await host.run(read, home_access=mode)
    assert SECRET.encode() not in done.stdout, done
    assert (b"shown" in done.stdout) == (mode in ("read", "write"))
    listed = host.rules("home_readonly", ".netrc", ".config/gh", ".ssh", ".kube/config", ".config/other")
    done = await host.run(read, home_access=mode, home_readonly=listed)
    told = [line for line in done.stdout.decode().splitlines() if SECRET in line]
    assert told == [f"{SECRET} .netrc", f"{SECRET} .config/gh/hosts.yml"]
    assert any(".ssh lies in" in n and "hidden (credentials)" in n for n in done.notices), done.notices
    assert any(".kube/config lies in" in notice for notice in done.notices), done.notices
    assert host.tree() == before


async def test_a_seeded_file_is_a_copy_and_the_hosts_never_changes(host: Host) -> None:
    host.write(".gitconfig", "[user]\n\tname = outside\n")
    (host.base / "elsewhere").write_text("linked\n")
    (host.home / ".linked").symlink_to("../elsewhere")
    before = host.tree()
    seeded = host.rules("home_seeded_files", ".gitconfig", ".linked", ".absent", "work")
    script = """
    cat ~/.gitconfig
    echo changed > ~/.gitconfig.new && mv ~/.gitconfig.new ~/.gitconfig && cat ~/.gitconfig
    test -L ~/.linked || cat ~/.linked
    ls -A ~
    """
    done = await host.run(
        script, home_seeded=seeded, home_readonly=host.rules("home_readonly", ".gitconfig")
    )
    assert done.stdout.decode().split("\n") == [
        "[user]", "\tname = outside", "changed", "linked", ".gitconfig", ".linked", "work", "",
    ]  # fmt: skip
    assert len(done.notices) == 1
    assert "work is no file" in done.notices[0]
    assert host.tree() == before


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_in_the_real_home_a_seeded_file_cannot_be_written(host: Host, mode: HomeAccess) -> None:
    host.write(".gitconfig", "outside")
    before = host.tree()
    script = "(echo x > ~/.gitconfig) 2>/dev/null; mv ~/.gitconfig ~/g 2>/dev/null; cat ~/.gitconfig"
    done = await host.run(
        script, home_access=mode, home_seeded=host.rules("home_seeded_files", ".gitconfig")
    )
    assert done.stdout == b"outside"
    assert host.tree() == before


async def test_a_file_too_large_to_copy_is_refused_by_name(host: Host) -> None:
    path = host.write("big", "x" * (1024 * 1024 + 1))
    with pytest.raises(Refused, match=r"home_seeded_files: .*/big has 1048577 bytes"):
        await host.run("true", home_seeded=host.rules("home_seeded_files", "big"))
    path.write_text("x" * 1024 * 1024)
    done = await host.run("wc -c < ~/big", home_seeded=host.rules("home_seeded_files", "big"))
    assert done.stdout == b"1048576\n"


async def test_what_runs_at_the_next_login_is_read_only_where_the_home_is_writable(host: Host) -> None:
    names = (".bashrc", ".config/systemd/user/x.service", ".config/autostart/x", ".config/environment.d/x")
    for name in names:
        host.write(name, "outside")
    before = host.tree()
    script = "cd ~; for f in {}; do (echo evil > $f) 2>/dev/null; done; mv .config .c 2>/dev/null;".format(
        " ".join(names)
    )
    script += "mkdir -p .config/autostart; (echo evil > .config/autostart/x) 2>/dev/null; true"
    await host.run(script, home_access="write")
    await host.run(script, home_access="tmpwrite", home_writable=host.rules("home_writable", ".config"))
    assert host.tree() == before
    await host.run(script, home_access="write", home_writable=host.rules("home_writable", ".bashrc"))
    assert host.tree().keys() == before.keys()
    assert (host.home / ".bashrc").read_text() == "evil\n"
    assert (host.home / names[1]).read_text() == "outside"


async def test_what_a_program_could_make_to_run_at_the_next_login_is_told(host: Host) -> None:
    host.write(".bashrc", "outside")
    ended = await host.run("true", home_access="write")
    [told] = [text for text in ended.notices if "runs outside at the next login" in text]
    assert f"{host.home}/.config/autostart" in told
    assert f"{host.home}/.bashrc," not in told
    ended = await host.run("true", home_access="tmpwrite")
    assert not [text for text in ended.notices if "login" in text]


@pytest.mark.parametrize("mode", MODES)
async def test_directories_to_write_that_do_not_exist_leave_nothing(host: Host, mode: HomeAccess) -> None:
    before = host.tree()
    listed = host.rules("home_writable", ".cache/tool", ".tool.json")
    done = await host.run("touch ~/.cache/tool/x && echo made; true", home_access=mode, home_writable=listed)
    assert (done.stdout == b"made\n") == (mode == "tmpwrite")
    told = [n for n in done.notices if "mkdir -p" in n]
    assert len(told) == (0 if mode == "tmpwrite" else 1), done.notices
    assert host.tree() == before


async def test_a_blocked_object_is_masked_under_every_name_and_nothing_is_left(host: Host) -> None:
    project = host.project
    (project / "real").mkdir()
    (project / "real" / "key").write_text(SECRET)
    (project / "to-key").symlink_to("real/key")
    (project / "dir").symlink_to("real")
    (project / "secrets").mkdir()
    (project / "secrets" / "x").write_text(SECRET)
    (project / "to-secrets").symlink_to("secrets")
    (project / "dangling").symlink_to("gone/away")
    before = host.tree()
    blocked = tuple(
        Rule(os.fsencode(project / name), "blocked_files")
        for name in ("dir/key", "to-secrets", "dangling", "absent", "absent/below", "to-key")
    )
    script = """
    cat real/key to-key dir/key secrets/x to-secrets/x dangling absent 2>/dev/null
    (echo x > real/key) 2>/dev/null || mv real r2 2>/dev/null || rm -rf secrets 2>/dev/null || echo kept
    """
    done = await host.run(script, blocked=blocked)
    assert done.stdout == b"kept\n", done
    assert host.tree() == before
    control = await host.run("cat dir/key to-secrets/x")
    assert control.stdout.decode() == SECRET * 2


async def test_a_closed_directory_of_the_users_own_is_masked_as_a_whole(host: Host) -> None:
    """Its permissions can be changed from inside; what is blocked in it must not appear then."""
    closed = host.project / "closed"
    closed.mkdir()
    (closed / "key").write_text(SECRET)
    closed.chmod(0)
    try:
        if os.access(closed / "key", os.R_OK):
            pytest.skip("this user's permissions bind nobody")
        script = "chmod 700 closed; cat closed/key; true"
        blocked = (Rule(os.fsencode(closed / "key"), "blocked_files"),)
        assert (await host.run(script, blocked=blocked)).stdout == b""
        assert (await host.run(script)).stdout.decode() == SECRET
    finally:
        closed.chmod(0o700)


async def test_the_whole_host_read_only_still_has_its_own_kernel_files_and_scratch(host: Host) -> None:
    with tempfile.NamedTemporaryFile(prefix=".ral-test-", dir="/tmp") as mark:
        mark.write(SECRET.encode())
        mark.flush()
        script = f"""
        echo x > /dev/null && head -c1 /dev/zero | wc -c && ls /proc/1/status
        cat {mark.name} 2>/dev/null
        echo x > /tmp/mine && echo scratch; (echo x > /etc/x) 2>/dev/null || echo read-only
        ls -A /run | grep -v ral-session | wc -l
        """
        everything = (Rule(b"/", "readonly_mounts"),)
        done = await host.run(script, readonly=everything, writable=(Rule(b"/", "extra_writable_paths"),))
    assert done.stdout == b"1\n/proc/1/status\nscratch\nread-only\n0\n", done
    assert any("is $HOME or an ancestor" in notice for notice in done.notices)


@pytest.mark.parametrize("private", [True, False])
async def test_the_hosts_tmp_and_shared_memory_are_shown_on_request_only(host: Host, private: bool) -> None:
    names = [Path(f"{place}/.ral-test-{os.getpid()}") for place in ("/tmp", "/dev/shm")]
    script = "; ".join(f"echo x > {name}" for name in names)
    try:
        done = await host.run(script, private_tmp=private, private_ipc=private)
        assert done.status == 0, done
        assert [name.exists() for name in names] == [not private] * 2
        assert len(done.notices) == (0 if private else 2)
    finally:
        for name in names:
            name.unlink(missing_ok=True)


async def test_ipc_of_the_host_is_shared_on_request_only(host: Host) -> None:
    here = os.readlink("/proc/self/ns/ipc")
    assert (await host.run("readlink /proc/self/ns/ipc")).stdout.decode().strip() != here
    assert (await host.run("readlink /proc/self/ns/ipc", private_ipc=False)).stdout.decode().strip() == here


@pytest.mark.needs("/dev/fuse")
async def test_a_device_that_is_listed_can_be_used_as_one(host: Host) -> None:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        pytest.skip(f"/dev/fuse: {error.strerror}")
    (host.project / "not-a-device").touch()
    # The session's own /dev can be written: there the open alone would make a file.
    script = "test -e /dev/fuse && exec 5<>/dev/fuse && echo opened"
    done = await host.run(script, devices=(b"/dev/fuse", b"/dev/null", b"/dev/absent", b"/etc/passwd"))
    assert done.stdout == b"opened\n", done
    assert done.notices == ("devices: /etc/passwd is no device and is left out",)
    assert (await host.run(script)).stdout == b""


async def test_texts_replace_files_of_the_system_and_cannot_be_written(host: Host) -> None:
    passwd = b"only:x:%d:%d::/:/bin/sh\n" % (os.getuid(), os.getgid())
    texts = (Text(b"/etc/passwd", passwd, "filter_passwd"), Text(b"/etc/absent-x", b"x", "filter_passwd"))
    done = await host.run("id -un; cat /etc/passwd; (echo x >> /etc/passwd) 2>/dev/null", texts=texts)
    assert done.stdout == b"only\n" + passwd


async def test_a_home_behind_a_link_and_a_link_in_it(host: Host) -> None:
    """/home that is a link to /var/home, and dotfiles that are kept elsewhere."""
    host.write("dots/vimrc", "set nocompatible\n")
    (host.home / ".vimrc").symlink_to("dots/vimrc")
    spelled = host.base / "link"
    spelled.symlink_to("home")
    before = host.tree()
    script = f"cat {spelled}/.vimrc; readlink ~/.vimrc; "
    script += f"(echo x > ~/.vimrc) 2>/dev/null || echo read-only; cd {spelled}/work"
    done = await host.run(
        script,
        home=os.fsencode(spelled), home_readonly=host.rules("home_readonly", ".vimrc"),
    )  # fmt: skip
    assert done == Ended(0, b"set nocompatible\ndots/vimrc\nread-only\n", b"", ())
    assert host.tree() == before


async def test_nested_grants_in_any_order(host: Host) -> None:
    for name in ("a/b/c", "a/keep"):
        (host.base / name).mkdir(parents=True)
    base = os.fsencode(host.base)
    rules = [("writable", base + b"/a"), ("readonly", base + b"/a/b"), ("writable", base + b"/a/b/c")]
    script = f"cd {host.base}/a; for d in . keep b b/c; do (touch $d/x) 2>/dev/null && echo $d; done; "
    script += "mv b q; rm -r b"
    for order in (rules, rules[::-1]):
        chosen: dict[str, tuple[Rule, ...]] = {"writable": (), "readonly": SYSTEM_RULES}
        for kind, path in order:
            chosen[kind] = (*chosen[kind], Rule(path, kind))
        done = await host.run(script, **chosen)
        assert done.stdout.split() == [b".", b"keep", b"b/c"], done
        assert (host.base / "a" / "b" / "c").is_dir()


PROBE = """
for p in "$@"; do
  if test -e "$p" || test -L "$p"; then e=there; else e=gone; fi
  if test -d "$p"; then (touch "$p/.probe") 2>/dev/null && { e=$e-rw; rm -f "$p/.probe"; }
  elif test -f "$p"; then (: >> "$p") 2>/dev/null && e=$e-rw; fi
  echo "$e"
done
"""


@pytest.mark.parametrize("mode", MODES)
async def test_an_explanation_says_what_a_program_finds(host: Host, mode: HomeAccess) -> None:
    for name in (".ssh/id", ".bashrc", ".config/gh/x", ".cache/x", "docs/x", ".gitconfig", "work/proj/.env"):
        host.write(name)
    (host.home / "link").symlink_to("docs")
    changes: dict[str, object] = {
        "home_access": mode,
        "home_writable": host.rules("home_writable", ".cache", "work/other"),
        "home_seeded": host.rules("home_seeded_files", ".gitconfig"),
        "home_readonly": host.rules("home_readonly", ".bashrc"),
        "blocked": (Rule(os.fsencode(host.project / ".env"), "blocked_files"),),
    }
    names = (
        ".ssh", ".ssh/id", ".bashrc", ".config/gh", ".config/gh/x", ".cache", ".cache/x", "docs", "docs/x",
        "link", ".gitconfig", "work/proj", "work/proj/.env", "nothing", ".",
    )  # fmt: skip
    paths = [str(host.home / name) for name in names] + ["/usr", "/usr/bin/sh", "/tmp", "/run", "/nowhere"]
    planned = await host.plan(**changes)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(host.home)}
    done = await run_plan(planned, "/bin/sh", "-c", PROBE, "sh", *paths, env=environment)
    may: dict[State, set[str]] = {
        "writable": {"there-rw"}, "read-only": {"there"}, "masked": {"there", "gone"}, "absent": {"gone"},
        "own": {"there", "there-rw", "gone"},
    }  # fmt: skip
    for text, found in zip(paths, done.stdout.decode().split(), strict=True):
        path = os.fsencode(text)
        facts = {path: look(path)}
        resolved = facts[path].resolved
        if resolved is not None:
            facts[resolved] = look(resolved)
        said = explain(planned.plan, facts, path)
        if said.state == "writable" and "does not exist" in said.sentence:
            assert found == "gone"
        else:
            assert found in may[said.state], (text, found, said)
        assert text in said.sentence
