"""The loader on real files: which are read, in which order, which are not trusted, what a load costs."""

from __future__ import annotations

import os
import shlex
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from ral_broker import admin
from ral_broker.config import files as files_module
from ral_broker.config.effective import Effective, Problem
from ral_broker.config.load import Loader
from ral_broker.config.parse import Malformed, ParsedFile, Reader
from ral_broker.errors import Refused
from support.own_etc import load as load_with_etc
from support.processes import descendants


class CountingReader(Reader):
    """The real one; keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[bytes]] = []

    async def read(self, contents: object) -> list[ParsedFile | Malformed]:
        assert isinstance(contents, list)
        self.asked.append(contents)
        return await super().read(contents)


class Host:
    """A home with a configuration directory, a project, and a loader for them."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        self.base = directory / "config"
        self.ral = self.base / "ral"
        self.conf_d = self.ral / "conf.d"
        self.project = self.home / "work/p"
        self.project.mkdir(parents=True)
        self.reader = CountingReader()
        self.loader = Loader(os.fsencode(self.home), self.reader)
        self.environment = [b"PATH=/bin", b"XDG_CONFIG_HOME=" + os.fsencode(self.base)]

    def write(self, name: str, text: str) -> Path:
        path = self.ral / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in (path.parent, self.ral):
            parent.chmod(0o755)
        path.write_text(text)
        path.chmod(0o644)
        return path

    async def check(self, **overrides: str) -> tuple[Effective | None, list[Problem]]:
        return await self.loader.check(self.environment, overrides, os.fsencode(self.project), None, b"true")

    async def load(self, **overrides: str) -> Effective:
        return await self.loader.load(self.environment, overrides, os.fsencode(self.project), None, b"true")

    async def refused(self) -> str:
        with pytest.raises(Refused) as caught:
            await self.load()
        return caught.value.message


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    if os.path.lexists(admin.PATH):
        pytest.skip(f"needs a host without {admin.PATH}")
    known = {process.pid for process in descendants()}
    yield Host(tmp_path)
    assert {process.pid for process in descendants()} <= known


async def test_without_any_file_the_defaults_hold_and_no_child_is_started(host: Host) -> None:
    effective = await host.load()
    assert effective.files == ()
    assert effective.warnings == ()
    assert effective.settings.home_access == "tmpwrite"
    assert host.reader.asked == []


async def test_user_file_then_conf_d_in_byte_order(host: Host) -> None:
    line = 'extra_writable_paths = ["~/{}"]\nhome_access = "{}"\n'
    host.write("ral.toml", line.format("u", "restricted"))
    host.write("conf.d/20.toml", line.format("b", "read"))
    host.write("conf.d/10.toml", line.format("a", "write"))
    host.write("conf.d/Z.toml", line.format("Z", "tmpwrite"))
    host.write("conf.d/é.toml", line.format("e", "restricted"))
    host.write("conf.d/05.toml.bak", line.format("c", "write"))
    host.write("conf.d/.00.toml", line.format("hidden", "write"))
    (host.conf_d / "30.toml").mkdir()
    effective = await host.load()
    home = str(host.home)
    assert effective.settings.extra_writable_paths == tuple(f"{home}/{name}" for name in "uabZe")
    assert effective.settings.home_access == "restricted"
    assert effective.files == tuple(
        str(host.ral / name)
        for name in ("ral.toml", "conf.d/10.toml", "conf.d/20.toml", "conf.d/Z.toml", "conf.d/é.toml")
    )
    assert [origin.layer for origin in effective.origins["extra_writable_paths"]] == [
        str(host.ral / "ral.toml"), "conf.d/10.toml", "conf.d/20.toml", "conf.d/Z.toml", "conf.d/é.toml",
    ]  # fmt: skip
    assert effective.warnings == ()
    # One child for all of them.
    assert [len(asked) for asked in host.reader.asked] == [5]


async def test_a_file_for_other_projects_stays_out(host: Host) -> None:
    host.write("conf.d/10.toml", 'private_tmp = false\n[match]\nproject = ["~/work/*"]\n')
    host.write("conf.d/20.toml", 'private_ipc = false\n[match]\nproject = ["~/other/*"]\n')
    effective = await host.load()
    assert (effective.settings.private_tmp, effective.settings.private_ipc) == (False, True)


@pytest.mark.parametrize("variable", ["RAL_CONF", "SANDBOX_CONF"])
async def test_another_user_file_may_be_named_and_conf_d_is_read_all_the_same(
    host: Host, variable: str
) -> None:
    host.write("ral.toml", "private_ipc = false")
    host.write("conf.d/10.toml", "private_tmp = false")
    named = host.write("other/x.conf", "filter_passwd = false")
    host.environment.append(f"{variable}={named}".encode())
    settings = (await host.load()).settings
    assert (settings.private_ipc, settings.private_tmp, settings.filter_passwd) == (True, False, False)
    host.environment[-1] = f"{variable}=".encode()
    assert not (await host.load()).settings.private_ipc


async def test_a_named_file_that_is_not_there_refuses(host: Host) -> None:
    host.environment += [b"RAL_CONF=/nonexistent/x.toml", b"SANDBOX_CONF=/etc/passwd"]
    message = await host.refused()
    assert message.startswith("/nonexistent/x.toml: there is no such file, and RAL_CONF names it")
    host.environment[-2] = b"RAL_CONF=x.toml"
    assert "RAL_CONF=x.toml is no absolute path" in await host.refused()


async def test_of_two_variables_with_one_name_the_first_counts_as_for_getenv(host: Host) -> None:
    host.environment += [b"RAL_CONF=/nonexistent/a", b"RAL_CONF=/nonexistent/b"]
    assert "/nonexistent/a" in await host.refused()


async def test_a_relative_xdg_directory_is_ignored(host: Host) -> None:
    host.environment = [b"XDG_CONFIG_HOME=config"]
    host.ral = host.home / ".config/ral"
    host.write("ral.toml", "private_tmp = false")
    assert not (await host.load()).settings.private_tmp


async def test_every_problem_of_every_file_is_found(host: Host) -> None:
    host.write("ral.toml", 'typo = 1\nprivate_tmp = "x"\n')
    host.write("conf.d/10.toml", "x =\n")
    host.write("conf.d/20.toml", "\nhome_access = 1\n")
    effective, problems = await host.check(PRIVATE_TMP="perhaps")
    assert effective is None
    assert [(os.path.basename(p.file), p.line, p.key) for p in problems] == [
        ("10.toml", 1, None),
        ("ral.toml", 1, "typo"),
        ("ral.toml", 2, "private_tmp"),
        ("20.toml", 2, "home_access"),
        ("environment PRIVATE_TMP", None, "private_tmp"),
    ]
    message = await host.refused()
    assert message.startswith(f"{host.conf_d}/10.toml:1: Invalid value; mend the file")
    assert message.endswith("(3 more: run ral config check)")


async def test_warnings_are_told_and_do_not_refuse(host: Host) -> None:
    host.write("ral.toml", '\nextra_writable_paths = ["~", "~/x"]\n')
    effective = await host.load()
    (warning,) = effective.warnings
    assert warning.startswith(f"{host.ral}/ral.toml:2: extra_writable_paths: User config: ")
    assert "is $HOME or an ancestor" in warning
    assert effective.settings.extra_writable_paths == (f"{host.home}/x",)


# What is read.


async def test_links_are_followed_as_dotfile_managers_make_them(host: Host, tmp_path: Path) -> None:
    (tmp_path / "dotfiles/ral").mkdir(parents=True)
    real = tmp_path / "dotfiles/ral/ral.toml"
    real.write_text("private_tmp = false")
    real.chmod(0o644)
    host.base.mkdir()
    (host.base / "ral").symlink_to(tmp_path / "dotfiles/ral")
    assert not (await host.load()).settings.private_tmp
    (host.base / "ral").unlink()
    host.ral.mkdir()
    (host.ral / "ral.toml").symlink_to(real)
    assert not (await host.load()).settings.private_tmp


@pytest.mark.parametrize("where", ["ral.toml", "conf.d/10.toml"])
@pytest.mark.parametrize(
    ("mode", "words"), [(0o664, "others can write it; run chmod go-w"), (0o646, "others can write it")]
)
async def test_a_file_that_others_can_write_is_refused(
    host: Host, where: str, mode: int, words: str
) -> None:
    path = host.write(where, "private_tmp = false")
    path.chmod(mode)
    message = await host.refused()
    assert message.startswith(f"{path}: ")
    assert words in message
    path.chmod(0o600)
    assert not (await host.load()).settings.private_tmp


@pytest.mark.parametrize("directory", ["ral", "conf_d"])
async def test_a_directory_that_others_can_write_is_refused(host: Host, directory: str) -> None:
    host.write("ral.toml", "")
    host.write("conf.d/10.toml", "")
    path: Path = getattr(host, directory)
    os.chmod(path, 0o775)
    message = await host.refused()
    assert message.startswith(f"{path}: others can write it")
    os.chmod(path, 0o755)
    await host.load()


def make(path: Path, what: str) -> None:
    if what == "fifo":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "dangling": "/nonexistent", "proc": "/proc/self/mem"}[what])


@pytest.mark.parametrize("what", ["fifo", "directory", "device", "dangling"])
async def test_what_is_no_file_is_refused_at_once_and_not_opened(host: Host, what: str) -> None:
    host.ral.mkdir(parents=True)
    host.ral.chmod(0o755)
    make(host.ral / "ral.toml", what)
    begun = time.monotonic()
    message = await host.refused()
    assert time.monotonic() - begun < 2
    assert message.startswith(f"{host.ral}/ral.toml: ")
    assert "no regular file" in message or "link to nothing" in message


@pytest.mark.parametrize(("what", "told"), [("fifo", True), ("device", True), ("directory", False)])
async def test_in_conf_d_what_is_no_file_is_left_out(host: Host, what: str, told: bool) -> None:
    host.write("conf.d/10.toml", "private_tmp = false")
    make(host.conf_d / "20.toml", what)
    effective = await host.load()
    assert not effective.settings.private_tmp
    assert [f"{host.conf_d}/20.toml: is no regular file; ignored"] * told == list(effective.warnings)


async def test_a_dangling_link_in_conf_d_is_not_taken_for_absent(host: Host) -> None:
    host.write("conf.d/10.toml", "")
    make(host.conf_d / "20.toml", "dangling")
    assert "20.toml: it is a symbolic link to nothing" in await host.refused()


async def test_a_file_that_cannot_be_read_refuses(host: Host) -> None:
    path = host.write("ral.toml", "")
    path.chmod(0)
    assert "it cannot be read: Permission denied" in await host.refused()
    host.ral.chmod(0)
    try:
        assert "Permission denied" in await host.refused()
    finally:
        host.ral.chmod(0o755)


async def test_sizes_and_numbers_have_limits(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    path = host.write("ral.toml", "#" * ((1 << 20) + 1))
    assert f"{path}: it is larger than 1048576 bytes" in await host.refused()
    path.write_text("#" * (1 << 20))
    await host.load()
    for number in range(3):
        host.write(f"conf.d/{number}.toml", "# xxx")
    monkeypatch.setattr(files_module, "MAX_TOTAL", (1 << 20) + 14)
    assert "all files together" in await host.refused()
    monkeypatch.setattr(files_module, "MAX_TOTAL", (1 << 20) + 15)
    await host.load()
    for number in range(3, 513):
        host.write(f"conf.d/{number}.toml", "")
    assert "it holds 513 files; at most 512 are read" in await host.refused()


async def test_what_does_not_answer_is_given_up(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.write("ral.toml", "")
    monkeypatch.setattr(files_module, "READ_SECONDS", 0.2)
    ended = trio.Event()
    token = trio.lowlevel.current_trio_token()

    def dead(path: str) -> bytes:
        time.sleep(1)
        trio.from_thread.run_sync(ended.set, trio_token=token)
        return b""

    monkeypatch.setattr(files_module, "_read_file", dead)
    begun = time.monotonic()
    assert "did not answer within 0.2 seconds" in await host.refused()
    assert time.monotonic() - begun < 0.9
    await ended.wait()


# Cost, and what is remembered.


async def test_unchanged_content_is_not_read_twice_and_changed_content_is(host: Host) -> None:
    path = host.write("ral.toml", "private_tmp = false")
    host.write("conf.d/10.toml", "private_ipc = false")
    await host.load()
    await host.load()
    assert [len(asked) for asked in host.reader.asked] == [2]
    before = path.stat()
    path.write_text("private_tmp = true ")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert (await host.load()).settings.private_tmp
    assert [len(asked) for asked in host.reader.asked] == [2, 1]
    path.write_text("private_tmp = false")
    assert not (await host.load()).settings.private_tmp
    assert len(host.reader.asked) == 2


async def test_loads_at_the_same_time_share_one_child(host: Host) -> None:
    host.write("ral.toml", "private_tmp = false")
    results: list[Effective] = []

    async def one() -> None:
        results.append(await host.load())

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(one)
    assert [len(asked) for asked in host.reader.asked] == [1]
    assert len(results) == 20
    assert all(effective == results[0] for effective in results)


async def test_a_load_that_is_given_up_leaves_no_child(host: Host) -> None:
    host.write("ral.toml", "a = [" + "{b = 1}," * 100_000 + "]")
    known = {process.pid for process in descendants()}
    with trio.move_on_after(0.1) as scope:
        await host.load()
    assert scope.cancelled_caught
    assert {process.pid for process in descendants()} <= known
    host.write("ral.toml", "private_tmp = false")
    assert not (await host.load()).settings.private_tmp


async def test_a_malformed_file_is_remembered_as_such(host: Host) -> None:
    host.write("ral.toml", "x =")
    assert await host.refused() == await host.refused()
    assert len(host.reader.asked) == 1


async def test_what_is_remembered_is_bounded(host: Host) -> None:
    for number in range(20):
        await host.loader.parse(b"a = 1 #%d" % number + b"x" * 500_000, "x")
    assert host.loader._size <= 4 << 20
    assert sum(map(len, host.loader._parsed)) == host.loader._size


# Links of the host.


async def test_links_in_paths_are_followed_before_anything_is_compared(host: Host) -> None:
    (host.home / "real").mkdir()
    (host.home / "link").symlink_to("real")
    (host.home / "me").symlink_to(".")
    (host.home / "gone").symlink_to("real/not-there")
    host.write(
        "ral.toml",
        'denied_writable_paths = ["~/real"]\nextra_writable_paths = ["~/link/x", "~/gone", "~/me", '
        '"~/fine"]\n'
        'home_writable = ["link", "fine"]\n',
    )
    effective = await host.load()
    assert effective.settings.extra_writable_paths == (f"{host.home}/fine",)
    assert effective.settings.home_writable == ("fine",)
    assert len(effective.warnings) == 4


async def test_a_project_and_a_home_that_are_no_text(host: Host, tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/h\xff"
    os.makedirs(odd + b"/p\n\xfe")
    host.write("ral.toml", 'blocked_files = [".env", "~/x"]\nextra_writable_paths = ["~", "out"]\n')
    loader = Loader(odd)
    effective = await loader.load(host.environment, {}, odd + b"/p\n\xfe", None, b"true")
    assert [os.fsencode(path) for path in effective.settings.blocked_files] == [
        odd + b"/p\n\xfe/.env",
        odd + b"/x",
    ]
    assert [os.fsencode(path) for path in effective.settings.extra_writable_paths] == [odd + b"/p\n\xfe/out"]
    assert all(warning.isprintable() for warning in effective.warnings)
    assert all(o.value.isprintable() for origins in effective.origins.values() for o in origins)


async def test_nothing_is_evaluated_and_nothing_is_made(host: Host) -> None:
    victim = host.home / "pwn"
    host.write("ral.toml", f"extra_writable_paths = ['$(touch {victim})', '`touch {victim}`']")
    assert "extra_writable_paths" in await host.refused()
    assert not victim.exists()
    host.write(
        "ral.toml",
        'home_writable = [".cache/new"]\nblocked_files = ["~/none"]\nextra_writable_paths = ["~/n"]',
    )
    before = sorted(path for path in host.home.rglob("*"))
    await host.load()
    assert sorted(path for path in host.home.rglob("*")) == before


# Profiles.


async def test_a_profile_is_a_layer_and_one_that_is_not_there_refuses(host: Host) -> None:
    host.write(
        "profiles/tool.toml",
        'commands = ["tool"]\nhome_writable = [".tool"]\nallowed_env_vars = ["TOOL_KEY"]\n',
    )
    overrides: dict[str, str] = {}
    arguments = host.environment, overrides, os.fsencode(host.project)
    named = await host.loader.load(*arguments, "tool", b"true")
    chosen = await host.loader.load(*arguments, None, b"tool")
    assert named.profile is not None
    assert named.settings == chosen.settings
    assert ".tool" in named.settings.home_writable
    assert named.files == (str(host.ral / "profiles/tool.toml"),)
    assert named.origins["home_writable"][0].layer == "profile tool"
    assert (await host.loader.load(*arguments, None, b"./tool")).profile is None
    with pytest.raises(Refused, match="there is no profile other"):
        await host.loader.load(*arguments, "other", b"true")
    host.write("ral.toml", "[replace]\nenabled_agents = []")
    assert (await host.loader.load(*arguments, None, b"tool")).profile is None


# The administrator's file. In a mount namespace of its own.

FILE = admin.PATH


def written(text: str) -> str:
    return f"printf %s {shlex.quote(text)} >{FILE}"


@pytest.mark.root
@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (written('allowed_project_parents = "/data"'), "an array of strings is expected"),
        (written('allowed_project_parents = ["data"]'), "is no absolute path"),
        (written('allowed_project_parents = [""]'), "is empty"),
        (written('allowed_project_parents = ["$(id)"]'), "a shell would expand"),
        (written("private_tmp = "), "Invalid value"),
        (written('alowed_project_parents = ["/"]'), "no setting has this name"),
        (written('mount_guard = "kill"'), "this version has no mount guard"),
        (written("private_tmp = true") + f"; chown 65534 {FILE}", "chown root"),
        (written("private_tmp = true") + f"; chmod 664 {FILE}", "chmod go-w"),
        (written("private_tmp = true") + f"; chmod 646 {FILE}", "chmod go-w"),
        (written("private_tmp = true") + "; chmod 777 /etc/ral", "others than root can write"),
        (written("private_tmp = true") + "; chown 65534 /etc/ral", "others than root can write"),
        (f"mkdir {FILE}", "a file of root's"),
        (f"mkfifo {FILE}", "a file of root's"),
        (f"ln -s /dev/zero {FILE}", "a file of root's"),
        (f"ln -s /nothing {FILE}", "link to nothing"),
        (f"head -c 2000000 /dev/zero >{FILE}", "larger than"),
        (f"printf '\\377' >{FILE}", "not UTF-8"),
    ],
)
def test_an_administrators_file_that_cannot_be_trusted_or_meant_refuses(prepare: str, words: str) -> None:
    loaded = load_with_etc(prepare)
    assert loaded.values is None
    assert len(loaded.errors) == 1
    assert loaded.errors[0].startswith(f"{FILE}:")
    assert words in loaded.errors[0]


@pytest.mark.root
def test_an_administrators_file_pins_whatever_the_user_does(tmp_path: Path) -> None:
    """The control of the refusals, and the pins through every layer."""
    user = tmp_path / "x.toml"
    user.write_text(
        'private_tmp = false\nextra_writable_paths = ["/srv/x/y", "/srv/z"]\n[replace]\nblocked_files = []'
    )
    conf_d = tmp_path / "ral/conf.d"
    conf_d.mkdir(parents=True)
    (conf_d / "10.toml").write_text('private_tmp = false\nallowed_project_parents = ["/srv/p", "/opt"]\n')
    loaded = load_with_etc(
        written(
            'allowed_project_parents = ["/srv"]\ndenied_writable_paths = ["/srv/x"]\nprivate_tmp = true\n'
            'blocked_files = ["/etc/secret"]\nallow_root_session = false\n'
        ),
        environment={"RAL_CONF": str(user), "XDG_CONFIG_HOME": str(tmp_path)},
        overrides={"PRIVATE_TMP": "false"},
    )
    assert loaded.errors == []
    assert loaded.values is not None
    assert loaded.values["private_tmp"] is True
    assert loaded.values["extra_writable_paths"] == ["/srv/z"]
    assert loaded.values["blocked_files"] == ["/etc/secret"]
    assert loaded.values["allowed_project_parents"] == ["/srv/p"]
    assert loaded.values["allow_root_session"] is False
    assert loaded.files == [FILE, str(user), str(conf_d / "10.toml")]
    labels = [w.lower() for w in loaded.warnings if ": private_tmp: " in w]
    assert [
        label in text
        for label, text in zip(
            ("user config", "project config", "launch override (env/cli)"), labels, strict=True
        )
    ] == [True] * 3
    assert len(loaded.warnings) == 6


@pytest.mark.root
def test_no_variable_moves_the_administrators_file() -> None:
    names = ("RAL_CONF", "SANDBOX_CONF", "XDG_CONFIG_HOME", "HOME", "XDG_CONFIG_DIRS", "RAL_ADMIN_CONF")
    for name in names:
        environment = {name: "/dev/null"} if not name.endswith("_CONF") else {name: "/etc/hostname.toml"}
        loaded = load_with_etc(
            written('home_access = "read"') + "; : >/etc/hostname.toml", environment=environment
        )
        assert loaded.values is not None
        assert loaded.values["home_access"] == "read"


@pytest.mark.root
def test_a_file_of_another_ordinary_user_is_refused(tmp_path: Path) -> None:
    user = tmp_path / "x.toml"
    user.write_text("private_tmp = false")
    os.chown(user, 65534, 65534)
    loaded = load_with_etc("", environment={"RAL_CONF": str(user)})
    assert "belongs to another user (uid 65534)" in loaded.errors[0]
    os.chown(user, 0, 0)
    assert load_with_etc("", environment={"RAL_CONF": str(user)}).values is not None
    assert stat.S_IMODE(user.stat().st_mode) == 0o644
