"""Profiles at work: the real agents from their registry, shells, tool caches and sockets, in real sandboxes.

Configuration and profile are found as for a launch, with a scratch home directory in the place of the
account's: what an agent keeps there is nobody's to play with.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ral_broker.config.load import Loader
from ral_broker.config.policy import Found, Place, configuration_paths, expand, session_policy
from ral_broker.config.profiles import built_in, login_warning
from ral_broker.config.settings import Settings
from ral_broker.config.sockets import named_sockets
from ral_broker.envelope.environment import environment_policy, filter_environment
from ral_broker.envelope.policy import Rule, SessionPolicy
from ral_broker.errors import Refused
from support.installed import home_dir
from support.planned import Ended, run_protected

pytestmark = pytest.mark.needs("bubblewrap", "fresh /proc")

AGENTS = {"claude": "@anthropic-ai/claude-code-linux-{}@2.1.332", "codex": "@openai/codex@0.171.0-linux-{}"}
_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}
_INSTALL_SECONDS = 300


@pytest.fixture
def home() -> Iterator[Path]:
    """A scratch home directory, not in /tmp: that is made anew inside."""
    directory = Path(tempfile.mkdtemp(prefix="home-", dir=home_dir()))
    (directory / "project").mkdir()
    yield directory
    shutil.rmtree(directory)


def install(agent: str) -> Path:
    """A directory with the agent's program, named like the agent. Kept between runs, outside of the tree;
    the test is skipped where it cannot be had."""
    package = AGENTS[agent].format(_ARCHITECTURES.get(os.uname().machine, os.uname().machine))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home_dir() / ".cache") / "ral-tests"
    kept = cache / package.replace("/", "_")
    if (kept / agent).exists():
        return kept
    npm = shutil.which("npm", path="/usr/local/bin:/usr/bin:/bin")
    if npm is None:
        pytest.skip("needs npm registry: npm is not installed")
    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="new-", dir=cache))
    try:
        done = subprocess.run(
            [npm, "install", "--prefix", fresh, "--no-audit", "--no-fund", "--ignore-scripts",
             "--fetch-retries=1", package],
            env={**os.environ, "NODE_EXTRA_CA_CERTS": "/etc/ssl/certs/ca-certificates.crt"},
            capture_output=True, text=True, timeout=_INSTALL_SECONDS, stdin=subprocess.DEVNULL, cwd=fresh,
        )  # fmt: skip
        if done.returncode != 0:
            pytest.skip(f"needs npm registry: npm cannot install {package}: {done.stderr[-400:]}")
        [program] = [
            path
            for path in fresh.glob(f"node_modules/**/{agent}")
            if path.is_file() and os.access(path, os.X_OK)
        ]
        program.rename(fresh / agent)
        shutil.rmtree(fresh / "node_modules")
        fresh.rename(kept)
    except subprocess.TimeoutExpired:
        pytest.skip(f"needs npm registry: no answer within {_INSTALL_SECONDS} s")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return kept


@pytest.fixture(scope="module")
def claude() -> Path:
    return install("claude")


@pytest.fixture(scope="module")
def codex() -> Path:
    return install("codex")


def configure(home: Path, text: str, **profiles: str) -> None:
    """The user's files: ral.toml, and profiles by name."""
    directory = home / ".config/ral"
    (directory / "profiles").mkdir(parents=True, exist_ok=True)
    (directory / "ral.toml").write_text(text, encoding="utf-8")
    for name, content in profiles.items():
        (directory / f"profiles/{name}.toml").write_text(content, encoding="utf-8")


async def inside(
    home: Path,
    *command: str,
    profile: str | None = None,
    caller: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> Ended:
    """Run a command as ``ral run [--profile PROFILE] -- COMMAND`` in ``home``/project would."""
    variables = {
        "PATH": f"{path}:/usr/bin:/bin" if path else "/usr/bin:/bin",
        "TERM": "xterm",
        **(caller or {}),
    }
    environment = [os.fsencode(f"{name}={value}") for name, value in variables.items()]
    project, home_path = os.fsencode(home / "project"), os.fsencode(home)
    loader = Loader(home_path)
    effective = await loader.load(environment, {}, project, profile, os.fsencode(command[0]))
    chosen = effective.profile
    protected = chosen.protected_files if chosen is not None else ()
    sockets, warnings = named_sockets(
        chosen.sockets if chosen is not None else (),
        {os.fsencode(name): os.fsencode(value) for name, value in variables.items()},
    )
    place = Place(
        uid=os.geteuid(), home=home_path, home_path=home_path, project=project, cwd=project,
        session="0123abcd", hidden=(), installation=(), pins=(), fresh_proc=True,
    )  # fmt: skip
    found = Found(
        protected=tuple(
            Rule(expand(name, home=home_path, base=home_path), "protected_files") for name in protected
        )
    )
    policy = session_policy(
        effective.settings, place, found, configuration_paths({}, home_path, effective.files),
        share_network=True,
    )  # fmt: skip
    allowed = [name.decode() for socket_ in sockets for name in socket_.variables]
    rules, _ = environment_policy(Widened(effective.settings, tuple(allowed)), Settings.__struct_fields__)
    entries, _ = filter_environment(
        environment,
        home=home_path,
        user=b"u",
        project=project,
        session="0123abcd",
        cwd=project,
        policy=rules,
    )
    changes = {name: getattr(policy, name) for name in SessionPolicy.__struct_fields__ if name != "project"}
    changes["readonly"] = (*policy.readonly, *(Rule(socket_.path, socket_.why) for socket_ in sockets))
    ended = await run_protected(
        home / "project",
        *command,
        env={os.fsdecode(e.partition(b"=")[0]): os.fsdecode(e.partition(b"=")[2]) for e in entries},
        protect=False,
        **changes,
    )
    return ended._replace(notices=(*effective.warnings, *warnings, *ended.notices))


class Widened:
    """Settings with more variables that are let in."""

    def __init__(self, settings: Settings, allowed: tuple[str, ...]) -> None:
        self.blocked_env_vars = settings.blocked_env_vars
        self.blocked_env_patterns = settings.blocked_env_patterns
        self.allowed_env_vars = (*settings.allowed_env_vars, *allowed)
        self.hide_from_sandbox = settings.hide_from_sandbox
        self.sandbox_env = settings.sandbox_env


def listing(directory: Path) -> dict[str, bytes | None]:
    """Every name below a directory, with the content of files."""
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }


# Every profile.


@pytest.mark.parametrize("name", sorted(built_in()))
@pytest.mark.parametrize("mode", ["tmpwrite", "restricted", "read", "write"])
async def test_what_does_not_exist_yet_leaves_nothing_on_the_host(home: Path, name: str, mode: str) -> None:
    configure(home, f'home_access = "{mode}"')
    before = listing(home)
    ended = await inside(home, "sh", "-c", "cd && find . >/dev/null; echo fine", profile=name)
    assert (ended.status, ended.stdout) == (0, b"fine\n"), ended
    assert listing(home) == before


async def test_a_profile_that_is_broken_starts_nothing_and_is_named_with_its_line(home: Path) -> None:
    configure(home, "", mine="commands = ['true']\n\nhome_writeable = ['.x']\n")
    with pytest.raises(Refused, match=r"/profiles/mine\.toml:3: home_writeable: .* home_writable\?"):
        await inside(home, "true")
    configure(home, "", mine="commands = [\n")
    with pytest.raises(Refused, match=r"/profiles/mine\.toml:\d"):
        await inside(home, "true")


async def test_others_must_not_be_able_to_write_a_profile(home: Path) -> None:
    configure(home, "", mine="home_writable = ['.x']")
    (home / ".config/ral/profiles/mine.toml").chmod(0o666)
    with pytest.raises(Refused, match=r"mine\.toml: others can write it"):
        await inside(home, "true", profile="mine")


async def test_a_users_profile_extends_one_that_is_shipped(home: Path) -> None:
    for name in (".more", ".cache/pip"):
        (home / name).mkdir(parents=True)
    configure(home, "", mine='extends = ["pip"]\ncommands = ["sh"]\nhome_writable = [".more"]')
    ended = await inside(home, "sh", "-c", "touch ~/.more/a ~/.cache/pip/b")
    assert ended.status == 0, ended
    assert (home / ".more/a").exists()
    assert (home / ".cache/pip/b").exists()


async def test_nothing_inside_changes_a_profile(home: Path) -> None:
    configure(home, 'home_writable = [".config"]', mine="home_writable = ['.x']")
    before = listing(home)
    script = "echo >>~/.config/ral/profiles/mine.toml; mv ~/.config/ral ~/.config/r2; touch ~/.config/ok"
    ended = await inside(home, "sh", "-c", script, profile="mine")
    assert b"Read-only file system" in ended.stderr
    (home / ".config/ok").unlink()
    assert listing(home) == before


# Shells.


async def test_a_shell_reads_its_start_files_and_writes_none(home: Path) -> None:
    (home / ".bashrc").write_text("alias greet='echo from the start file'\n")
    (home / ".bash_history").write_text("export TOKEN=hunter2\n")
    configure(home, "")
    before = listing(home)
    script = "shopt -s expand_aliases; . ~/.bashrc\ngreet; echo >>~/.bashrc; cat ~/.bash_history; echo done"
    ended = await inside(home, "bash", "-c", script)
    assert ended.stdout == b"from the start file\ndone\n"
    assert b".bashrc: Read-only file system" in ended.stderr
    assert listing(home) == before


@pytest.mark.parametrize("mode", ["read", "write"])
async def test_the_history_of_a_shell_is_empty_where_the_home_is_shown(home: Path, mode: str) -> None:
    for name in (".bash_history", ".zsh_history"):
        (home / name).write_text("export TOKEN=hunter2\n")
    configure(home, f'home_access = "{mode}"')
    script = "cat ~/.bash_history ~/.zsh_history; echo x >>~/.bash_history; echo done"
    before = listing(home)
    ended = await inside(home, "bash", "-c", script)
    assert ended.stdout == b"done\n", ended
    assert listing(home) == before
    without = await inside(home, "bash", "-c", script, profile="none")
    assert without.stdout == b"export TOKEN=hunter2\n" * 2 + b"done\n"
    assert (listing(home) == before) is (mode == "read")


# Caches of tools.


@pytest.mark.parametrize("name", ["npm", "cargo", "pip", "go"])
async def test_a_cache_is_kept_by_its_profile_and_ends_with_the_session_without(
    home: Path, name: str
) -> None:
    caches = built_in()[name].lists["home_writable"]
    script = "cd && for cache; do mkdir -p $cache && echo x >$cache/new || exit; done; echo fine"
    ended = await inside(home, "sh", "-c", script, "sh", *caches, profile=name)
    assert (ended.status, ended.stdout) == (0, b"fine\n"), ended
    assert os.listdir(home) == ["project"], "what is not there is kept nowhere"
    for cache in caches:
        (home / cache).mkdir(parents=True)
    for chosen, kept in (("none", False), (name, True)):
        ended = await inside(home, "sh", "-c", script, "sh", *caches, profile=chosen)
        assert (ended.status, ended.stdout) == (0, b"fine\n"), ended
        assert {(home / cache / "new").exists() for cache in caches} == {kept}


# Claude Code.

EDITORS: dict[str, str] = {
    "sed": "sed -i s/dark/light/ {}",
    "perl": "perl -i -pe s/dark/light/ {}",
    "atomic": "sed s/dark/light/ {0} >{0}.new && mv {0}.new {0}",
    "in place": "sed s/dark/light/ {0} >/tmp/new && cat /tmp/new >{0}",
}
if shutil.which("vim", path="/usr/bin"):
    EDITORS["vim"] = "vim -es -u NONE -c %s/dark/light/ -c wq {}"

LOGIN = {"claudeAiOauth": {"accessToken": "sk-ant-oat01-x", "refreshToken": "sk-ant-ort01-x",
                           "expiresAt": 4102444800000, "scopes": ["user:inference"]}}  # fmt: skip


@pytest.fixture
def claude_home(home: Path, claude: Path) -> Path:
    """A home directory with what Claude Code keeps, and its program shown inside."""
    configure(home, f'readonly_mounts = ["{claude}"]')
    for name in ("projects", "skills"):
        (home / ".claude" / name).mkdir(parents=True)
    (home / ".claude/settings.json").write_text('{"theme": "dark"}\n')
    (home / ".claude.json").write_text('{"mcpServers": {"outside": {"command": "/bin/true", "args": []}}}')
    return home


@pytest.mark.slow
async def test_claude_runs_by_its_name(claude_home: Path, claude: Path) -> None:
    home = claude_home
    before = listing(home)
    version = await inside(home, "claude", "--version", path=claude)
    assert (version.status, version.stdout) == (0, b"2.1.332 (Claude Code)\n"), version
    usage = await inside(home, "claude", "--help", path=claude)
    assert usage.status == 0
    assert usage.stdout.startswith(b"Usage: claude")
    assert listing(home) == before


@pytest.mark.slow
async def test_claude_sees_whether_it_is_logged_in(claude_home: Path, claude: Path) -> None:
    home = claude_home
    out = await inside(home, "claude", "auth", "status", path=claude)
    assert (out.status, json.loads(out.stdout)["loggedIn"]) == (1, False)
    key = {"ANTHROPIC_API_KEY": "sk-ant-api03-x"}
    by_key = await inside(home, "claude", "auth", "status", path=claude, caller=key)
    assert json.loads(by_key.stdout)["loggedIn"] is True, by_key
    (home / ".claude/.credentials.json").write_text(json.dumps(LOGIN))
    logged_in = await inside(home, "claude", "auth", "status", path=claude)
    assert (logged_in.status, json.loads(logged_in.stdout)["loggedIn"]) == (0, True), logged_in
    without = await inside(home, "claude", "auth", "status", path=claude, profile="none")
    assert json.loads(without.stdout)["loggedIn"] is False


@pytest.mark.slow
async def test_claude_configures_a_copy_of_its_settings(claude_home: Path, claude: Path) -> None:
    home = claude_home
    before = listing(home)
    script = (
        "claude mcp get outside >/dev/null && claude mcp add -s user inside -- /bin/false && "
        "claude mcp remove -s user outside && cat ~/.claude.json"
    )
    ended = await inside(home, "sh", "-c", script, profile="claude", path=claude)
    assert ended.status == 0, ended
    servers = json.loads(ended.stdout[ended.stdout.index(b"{") :])["mcpServers"]
    assert list(servers) == ["inside"]
    assert listing(home) == before


@pytest.mark.slow
async def test_claude_keeps_conversations_and_a_renewed_login(claude_home: Path, claude: Path) -> None:
    home = claude_home
    credentials = home / ".claude/.credentials.json"
    credentials.write_text(json.dumps(LOGIN))
    script = (
        "echo x >~/.claude/projects/talk; printf new >~/.claude/.credentials.json; touch ~/.claude/other"
    )
    ended = await inside(home, "sh", "-c", script, profile="claude", path=claude)
    assert ended.status == 0, ended
    assert (home / ".claude/projects/talk").read_text() == "x\n"
    assert credentials.read_text() == "new"
    assert not (home / ".claude/other").exists()


@pytest.mark.parametrize("editor", EDITORS)
async def test_an_editor_saves_the_settings_of_claude_inside_and_changes_nothing_outside(
    home: Path, editor: str
) -> None:
    (home / ".claude").mkdir()
    (home / ".claude/settings.json").write_text('{"theme": "dark"}\n')
    before = listing(home)
    script = f"cd && {EDITORS[editor].format('.claude/settings.json')}; cat .claude/settings.json"
    ended = await inside(home, "sh", "-c", script, profile="claude")
    assert (ended.status, ended.stdout) == (0, b'{"theme": "light"}\n'), ended
    assert listing(home) == before


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize(
    "name", [".claude/settings.json", ".claude/CLAUDE.md", ".claude.json", ".claude/hooks/h"]
)
async def test_what_claude_would_run_outside_is_read_only_where_the_home_is_shown(
    home: Path, mode: str, name: str
) -> None:
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    (home / name).write_text("{}")
    configure(home, f'home_access = "{mode}"')
    before = listing(home)
    script = f"echo bad >~/{name}; mv ~/{name} ~/{name}2; rm -rf ~/{name}"
    ended = await inside(home, "sh", "-c", script, profile="claude")
    assert b"Read-only file system" in ended.stderr
    assert listing(home) == before


# Codex.


@pytest.fixture
def codex_home(home: Path, codex: Path) -> Path:
    """A home directory with what Codex keeps, and its program shown inside."""
    configure(home, f'readonly_mounts = ["{codex}"]')
    (home / ".codex/rules").mkdir(parents=True)
    (home / ".codex/config.toml").write_text("[features]\nshell_snapshot = true\n")
    return home


@pytest.mark.slow
async def test_codex_runs_by_its_name(codex_home: Path, codex: Path) -> None:
    home = codex_home
    version = await inside(home, "codex", "--version", path=codex)
    assert (version.status, version.stdout) == (0, b"codex-cli 0.171.0\n"), version
    usage = await inside(home, "codex", "--help", path=codex)
    assert usage.status == 0
    assert usage.stdout.startswith(b"Codex CLI")


@pytest.mark.slow
async def test_codex_sees_whether_it_is_logged_in_and_renews_the_login(
    codex_home: Path, codex: Path
) -> None:
    home = codex_home
    out = await inside(home, "codex", "login", "status", path=codex)
    assert (out.status, out.stderr) == (1, b"Not logged in\n"), out
    login = "echo sk-inside | codex login --with-api-key && codex login status"
    ended = await inside(home, "sh", "-c", login, profile="codex", path=codex)
    assert ended.status == 0, ended
    # By a rename over the file: only a directory that is writable as a whole lets that happen.
    assert json.loads((home / ".codex/auth.json").read_text())["OPENAI_API_KEY"] == "sk-inside"
    logged_in = await inside(home, "codex", "login", "status", path=codex)
    assert logged_in.status == 0, logged_in
    assert b"API key configured" in logged_in.stderr
    without = await inside(home, "codex", "login", "status", path=codex, profile="none")
    assert without.status == 1


@pytest.mark.slow
async def test_codex_reads_its_configuration_and_cannot_change_it(codex_home: Path, codex: Path) -> None:
    home = codex_home
    (home / ".codex/config.toml").write_text('[mcp_servers.outside]\ncommand = "/bin/true"\n')
    before = (home / ".codex/config.toml").read_bytes()
    listed = await inside(home, "codex", "mcp", "list", path=codex)
    assert listed.status == 0, listed
    assert b"outside" in listed.stdout
    added = await inside(home, "codex", "mcp", "add", "inside", "--", "/bin/false", path=codex)
    assert added.status == 1
    assert b"failed to persist config" in added.stderr
    assert (home / ".codex/config.toml").read_bytes() == before


async def test_what_codex_would_run_outside_says_why_it_cannot_be_written(home: Path) -> None:
    (home / ".codex/rules").mkdir(parents=True)
    (home / ".codex/config.toml").write_text("dark\n")
    before = listing(home)
    written = await inside(
        home, "sh", "-c", "cd ~/.codex; echo x >config.toml; echo x >rules/new", profile="codex"
    )
    assert written.stderr.count(b"Read-only file system") == 2
    for script in ("sed -i s/dark/light/ config.toml", "mv config.toml c2", "mv rules r2"):
        replaced = await inside(home, "sh", "-c", f"cd ~/.codex; {script}", profile="codex")
        assert b"Device or resource busy" in replaced.stderr, replaced
    assert listing(home) == before


# Credentials and sockets.


async def test_a_credential_that_does_not_reach_an_agent_is_told(home: Path) -> None:
    configure(home, "[replace]\nallowed_env_vars = []")
    loader = Loader(os.fsencode(home))
    effective = await loader.load([], {}, os.fsencode(home / "project"), None, b"codex")
    assert effective.profile is not None
    rules, _ = environment_policy(effective.settings, Settings.__struct_fields__)
    told = login_warning(effective.profile, {b"OPENAI_API_KEY"}, rules, marker_exists=False, suppressed=())
    assert told is not None
    assert "run codex login outside" in told


CONNECT = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\ns.send(b'hello')"


async def test_one_socket_is_reached_and_its_neighbour_is_not(home: Path) -> None:
    directory = home / "run"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as wanted, socket.socket(socket.AF_UNIX) as neighbour:
        wanted.bind(str(directory / "agent"))
        neighbour.bind(str(directory / "other"))
        wanted.listen()
        neighbour.listen()
        configure(home, "", mine='sockets = ["$SSH_AUTH_SOCK"]')
        caller = {"SSH_AUTH_SOCK": str(directory / "agent")}

        async def reach(name: str, profile: str) -> Ended:
            path = f"{directory}/{name}"
            return await inside(home, "python3", "-Ic", CONNECT, path, profile=profile, caller=caller)

        reached = await reach("agent", "mine")
        assert reached.status == 0, reached
        wanted.settimeout(5)
        connection, _ = wanted.accept()
        with connection:
            assert connection.recv(16) == b"hello"
        for name, profile in (("other", "mine"), ("agent", "none")):
            refused = await reach(name, profile)
            assert b"FileNotFoundError" in refused.stderr, refused
        told = await inside(
            home, "sh", "-c", "echo $SSH_AUTH_SOCK; rm $SSH_AUTH_SOCK", profile="mine", caller=caller
        )
        assert told.stdout == f"{directory}/agent\n".encode()
        assert (directory / "agent").is_socket()
        silent = await inside(home, "sh", "-c", "echo $SSH_AUTH_SOCK", profile="none", caller=caller)
        assert silent.stdout == b"\n"
