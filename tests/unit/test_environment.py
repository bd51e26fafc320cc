"""What of the caller's environment a session's program sees."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ral_broker.config.settings import Settings
from ral_broker.envelope.environment import (
    DEFAULT,
    EnvironmentPolicy,
    environment_policy,
    filter_environment,
)

HOME, USER, PROJECT, CWD, SESSION = b"/home/u", b"u", b"/home/u/p", b"/home/u/p/sub", "0a1b2c3d"
OURS = {
    b"HOME": HOME,
    b"USER": USER,
    b"LOGNAME": USER,
    b"PWD": CWD,
    b"RAL_SESSION": SESSION.encode(),
    b"RAL_PROJECT_DIR": PROJECT,
}


def run(*entries: bytes, policy: EnvironmentPolicy = DEFAULT) -> tuple[dict[bytes, bytes], int]:
    kept, blocked = filter_environment(
        entries, home=HOME, user=USER, project=PROJECT, session=SESSION, cwd=CWD, policy=policy
    )
    split = [entry.partition(b"=")[::2] for entry in kept]
    assert len(dict(split)) == len(split), "a name appears twice"
    return dict(split), blocked


def inherited(*entries: bytes, policy: EnvironmentPolicy = DEFAULT) -> dict[bytes, bytes]:
    return {name: value for name, value in run(*entries, policy=policy)[0].items() if name not in OURS}


def test_an_empty_environment_gets_ours_only() -> None:
    assert run() == (OURS, 0)


def test_ours_replace_the_callers_and_come_last() -> None:
    kept, _ = filter_environment(
        [b"HOME=/tmp/evil", b"PWD=/", b"RAL_SESSION=ffffffff", b"A=1", b"USER=root"],
        home=HOME, user=USER, project=PROJECT, session=SESSION, cwd=CWD,
    )  # fmt: skip
    assert kept[0] == b"A=1"
    assert dict(entry.partition(b"=")[::2] for entry in kept) == {b"A": b"1", **OURS}


@pytest.mark.parametrize(
    "entry",
    [
        b"PATH=/usr/bin:relative:",
        b"TERM=xterm",
        b"LANG=C.UTF-8",
        b"EMPTY=",
        b"EQUALS=a=b=c",
        b"LD_LIBRARY_PATH=/opt/lib",
        b"BASH_FUNC_f%%=() { :; }",
        b"NOT_UTF8=\xff\xfe",
        b"\xff=1",
        b"EDITOR=vi",
        b"TOKEN=is no suffix",
    ],
)
def test_ordinary_variables_are_kept_unchanged(entry: bytes) -> None:
    name, _, value = entry.partition(b"=")
    assert inherited(entry) == {name: value}


@pytest.mark.parametrize(
    "name",
    [
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_PAT",
        "NPM_TOKEN",
        "SSH_AUTH_SOCK",
        "PGPASSWORD",
        "MY_DB_PASSWORD",
        "myPassword1",
        "DATABASE_URL",
        "KUBECONFIG",
        "DBUS_SESSION_BUS_ADDRESS",
        "GEMINI_API_KEY",
        "SIGNING_PRIVATE_KEY",
        "X_CREDENTIALS",
        "DOCKER_HOST",
        "CI_JOB_JWT",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "KRB5CCNAME",
    ],
)
def test_secrets_are_held_back_and_counted(name: str) -> None:
    kept, blocked = run(name.encode() + b"=hunter2", b"A=1")
    assert blocked == 1
    assert kept == {b"A": b"1", **OURS}


def test_the_count_is_of_secrets_and_not_of_what_is_pointless() -> None:
    _, blocked = run(b"DISPLAY=:0", b"OLDPWD=/", b"RAL_CONF=/x", b"A_TOKEN=1", b"B_TOKEN=1", b"A_TOKEN=2")
    assert blocked == 2


def test_agents_keep_the_keys_they_log_in_with() -> None:
    assert inherited(b"ANTHROPIC_API_KEY=k", b"OPENAI_API_KEY=k") == {
        b"ANTHROPIC_API_KEY": b"k",
        b"OPENAI_API_KEY": b"k",
    }


def test_a_pattern_minds_case_unless_it_says_otherwise() -> None:
    policy = msgspec.structs.replace(
        DEFAULT, blocked_names=frozenset(), blocked_patterns=(b"*_KEY", b"*pass*/i")
    )
    assert inherited(b"A_KEY=1", b"a_key=1", b"MYPASS=1", b"passage=1", policy=policy) == {b"a_key": b"1"}


def test_a_pattern_matches_whole_names_of_any_bytes() -> None:
    policy = msgspec.structs.replace(DEFAULT, blocked_patterns=(b"\xe9*", b"X?", b"[AB]1"))
    assert set(inherited(b"\xe9t\xe9=1", b"X1=1", b"X12=1", b"AX1=1", b"A1=1", b"C1=1", policy=policy)) == {
        b"X12", b"AX1", b"C1",
    }  # fmt: skip


def test_without_patterns_only_names_are_blocked() -> None:
    policy = msgspec.structs.replace(DEFAULT, blocked_patterns=())
    assert set(inherited(b"AWS_X=1", b"GITHUB_PAT=1", policy=policy)) == {b"AWS_X"}


def test_allowed_beats_blocked_and_pointless_but_not_hidden() -> None:
    policy = msgspec.structs.replace(
        DEFAULT,
        allowed=frozenset({b"AWS_PROFILE", b"DISPLAY", b"HOME_ACCESS"}),
        hidden=frozenset({b"HOME_ACCESS"}),
    )
    given_ = (b"AWS_PROFILE=p", b"DISPLAY=localhost:10", b"HOME_ACCESS=write")
    assert set(inherited(*given_, policy=policy)) == {b"AWS_PROFILE", b"DISPLAY"}


def test_hidden_beats_even_our_markers_but_not_path() -> None:
    policy = msgspec.structs.replace(DEFAULT, hidden=frozenset({b"RAL_PROJECT_DIR", b"PATH"}))
    kept, blocked = run(b"PATH=/bin", policy=policy)
    assert blocked == 0
    assert set(kept) == {b"PATH", *OURS} - {b"RAL_PROJECT_DIR"}


@pytest.mark.parametrize(
    "name", ["RAL_RUNTIME_DIR", "RAL_CONF", "RAL_ANYTHING", "SANDBOX_CONF", "PRIVATE_TMP", "SANDBOX_ACTIVE"]
)
def test_settings_of_ral_do_not_reach_the_program(name: str) -> None:
    assert run(name.encode() + b"=x") == (OURS, 0)


@pytest.mark.parametrize(
    "entry",
    [b"XDG_RUNTIME_DIR=/run/user/1000", b"DISPLAY=:0", b"WAYLAND_DISPLAY=wayland-0", b"TMUX=/tmp/t,1,0",
     b"OLDPWD=/", b"NOTIFY_SOCKET=@x", b"LISTEN_FDS=1"],
)  # fmt: skip
def test_what_leads_nowhere_inside_is_dropped(entry: bytes) -> None:
    assert run(entry) == (OURS, 0)


@pytest.mark.parametrize(
    ("value", "stays"),
    [(b"/tmp", True), (b"/tmp/", True), (b"/var/tmp", True), (PROJECT, True), (PROJECT + b"/tmp", True),
     (b"/tmp/user/1000", False), (b"/scratch", False), (PROJECT + b"2", False), (b"", False)],
)  # fmt: skip
@pytest.mark.parametrize("name", [b"TMPDIR", b"TMP", b"TEMP"])
def test_a_temporary_directory_must_exist_inside(name: bytes, value: bytes, stays: bool) -> None:
    assert (name in inherited(name + b"=" + value)) is stays


def test_entries_without_a_name_are_dropped_and_the_first_of_two_stays() -> None:
    assert inherited(b"NOEQUALS", b"", b"=", b"=value", b"A=first", b"A=second") == {b"A": b"first"}


_NAMES = st.binary(min_size=1, max_size=12).filter(lambda name: b"=" not in name and b"\0" not in name)
_ENTRIES = st.lists(st.tuples(_NAMES, st.binary(max_size=8)).map(lambda pair: pair[0] + b"=" + pair[1]))


@given(_ENTRIES)
def test_nothing_is_invented_and_order_stays(entries: list[bytes]) -> None:
    kept, blocked = filter_environment(
        entries, home=HOME, user=USER, project=PROJECT, session=SESSION, cwd=CWD
    )
    mine = [entry for entry in kept if entry.partition(b"=")[0] not in OURS]
    iterator = iter(entries)
    assert all(entry in iterator for entry in mine), "an entry is new or out of order"
    assert 0 <= blocked <= len(entries) - len(mine)
    again, blocked_again = filter_environment(
        kept, home=HOME, user=USER, project=PROJECT, session=SESSION, cwd=CWD
    )
    assert (again, blocked_again) == (kept, 0)


def of(**values: tuple[str, ...]) -> tuple[EnvironmentPolicy, tuple[str, ...]]:
    settings = msgspec.convert(values, Settings)
    return environment_policy(settings, Settings.__struct_fields__)


def test_the_default_settings_are_the_default_policy() -> None:
    assert of() == (DEFAULT, ())


def test_the_lists_of_the_settings_add_to_those_built_in() -> None:
    policy, warnings = of(
        blocked_env_vars=("INTERNAL_URL",),
        blocked_env_patterns=("*secretish*/i", "CORP_*"),
        hide_from_sandbox=("HOSTALIASES",),
    )
    assert warnings == ()
    kept, blocked = run(
        b"INTERNAL_URL=u", b"MySecretIsh=1", b"SECRETISH=2", b"CORP_X=1", b"corp_y=1", b"HOSTALIASES=h",
        b"GITHUB_PAT=p", b"A_TOKEN=t", b"SANDBOX_CONF=c",
        policy=policy,
    )  # fmt: skip
    assert kept == {b"corp_y": b"1", **OURS}
    assert blocked == 6


def test_allowed_names_beat_both_block_lists_but_not_hidden_ones() -> None:
    policy, _ = of(
        allowed_env_vars=("GITHUB_PAT", "AWS_PROFILE", "CORP_X", "DISPLAY", "SANDBOX_CONF"),
        blocked_env_vars=("CORP_X",),
    )
    given_ = (b"GITHUB_PAT=p", b"AWS_PROFILE=q", b"CORP_X=x", b"DISPLAY=:0", b"SANDBOX_CONF=c")
    assert set(inherited(*given_, policy=policy)) == {b"GITHUB_PAT", b"AWS_PROFILE", b"CORP_X", b"DISPLAY"}


def test_a_list_of_allowed_names_that_leaves_an_agents_key_out_blocks_it() -> None:
    policy, _ = of(allowed_env_vars=())
    assert run(b"ANTHROPIC_API_KEY=k", policy=policy) == (OURS, 1)


def test_an_empty_list_takes_nothing_out_of_what_is_hidden_by_default() -> None:
    policy, _ = of(hide_from_sandbox=())
    assert run(b"SANDBOX_CONF=/c", b"HOME_ACCESS=write", policy=policy) == (OURS, 0)


def test_path_cannot_be_hidden() -> None:
    policy, warnings = of(hide_from_sandbox=("PATH", "X"))
    assert [warning for warning in warnings if "'PATH' ignored" in warning] == list(warnings)
    assert len(warnings) == 1
    assert inherited(b"PATH=/bin", b"X=1", policy=policy) == {b"PATH": b"/bin"}


def test_sandbox_env_sets_what_it_may_and_says_what_it_does_not() -> None:
    policy, warnings = of(
        sandbox_env=("A=1", "PATH=/x", "_B=1", "SANDBOX_X=1", "HOME_ACCESS=write", "NOEQ", "GITHUB_PAT=x")
    )
    assert [warning.partition(":")[0] for warning in warnings] == [
        f"sandbox_env entry '{name}' ignored"
        for name in ("_B", "SANDBOX_X", "HOME_ACCESS", "NOEQ", "GITHUB_PAT")
    ]
    assert inherited(b"PATH=/usr/bin:/bin", b"A=0", b"B=2", policy=policy) == {
        b"PATH": b"/x:/usr/bin:/bin", b"A": b"1", b"B": b"2",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("9X=1", "letters"),
        ("A-B=1", "letters"),
        ("=1", "letters"),
        ("CAFÉ=1", "letters"),
        ("A B=1", "letters"),
        ("PRIVATE_TMP=no", "setting"),
        ("EXTRA_WRITABLE_PATHS=/", "setting"),
        ("CHAPERON_X=1", "ral's own"),
        ("LANDLOCK_X=1", "ral's own"),
        ("NETWORK_X=1", "ral's own"),
        ("RAL_SESSION=00000000", "ral's own"),
        ("HOME=/tmp", "itself"),
        ("PWD=/", "itself"),
        ("HIDDEN=1", "hide_from_sandbox"),
        ("MY_TOKEN=1", "allowed_env_vars"),
        ("PATH=", "no directory"),
        ("N=a\0b", "NUL"),
    ],
)
def test_entries_of_sandbox_env_that_are_ignored(entry: str, reason: str) -> None:
    policy, warnings = of(sandbox_env=(entry,), hide_from_sandbox=("HIDDEN",))
    assert (policy.extra, policy.search) == ((), ())
    [warning] = warnings
    assert warning.startswith(f"sandbox_env entry '{entry.partition('=')[0]}' ignored: ")
    assert reason in warning


def test_a_warning_does_not_tell_the_value() -> None:
    _, warnings = of(sandbox_env=("MY_TOKEN=hunter2",))
    assert "hunter2" not in warnings[0]


def test_a_name_that_is_blocked_but_allowed_may_be_set() -> None:
    policy, warnings = of(sandbox_env=("MY_TOKEN=1",), allowed_env_vars=("MY_TOKEN",))
    assert (warnings, inherited(b"MY_TOKEN=2", policy=policy)) == ((), {b"MY_TOKEN": b"1"})


def test_the_last_of_two_entries_counts_and_every_path_goes_in_front() -> None:
    policy, _ = of(sandbox_env=("A=1", "A=2=3", "PATH=/x:/y", "PATH=/z"))
    assert inherited(b"PATH=/bin", policy=policy) == {b"A": b"2=3", b"PATH": b"/x:/y:/z:/bin"}


@pytest.mark.parametrize("caller", [(), (b"PATH=",)])
def test_without_a_path_of_the_callers_the_usual_one_follows(caller: tuple[bytes, ...]) -> None:
    policy, _ = of(sandbox_env=("PATH=/x",))
    assert inherited(*caller, policy=policy) == {b"PATH": b"/x:/usr/local/bin:/usr/bin:/bin"}


@pytest.mark.parametrize("setting", ["blocked_env_vars", "allowed_env_vars", "hide_from_sandbox"])
def test_a_name_that_can_match_nothing_is_told(setting: str) -> None:
    _, warnings = of(**{setting: ("A=1", "")})
    assert len(warnings) == 2
    assert all(warning.startswith(f"{setting} entry '") for warning in warnings)


_WORDS = st.lists(
    st.sampled_from(
        ["PATH", "HOME", "A", "A_TOKEN", "RAL_SESSION", "SANDBOX_CONF", "GITHUB_PAT", "TERM", "DISPLAY",
         "_X", "PWD", "HOME_ACCESS", "*", "A*", "*token*/i", "[", "", "=", "PATH=/x", "A=1", "TERM=t",
         "HOME=/", "A_TOKEN=1", "SANDBOX_CONF=/c", "N=\0"]
    )
    | st.text(max_size=6),
    max_size=6,
).map(tuple)  # fmt: skip


@given(blocked=_WORDS, patterns=_WORDS, allowed=_WORDS, hide=_WORDS, extra=_WORDS, entries=_WORDS)
def test_nothing_hidden_and_no_secret_gets_in_whatever_the_settings(
    blocked: tuple[str, ...],
    patterns: tuple[str, ...],
    allowed: tuple[str, ...],
    hide: tuple[str, ...],
    extra: tuple[str, ...],
    entries: tuple[str, ...],
) -> None:
    policy, _ = of(
        blocked_env_vars=blocked, blocked_env_patterns=patterns, allowed_env_vars=allowed,
        hide_from_sandbox=hide, sandbox_env=extra,
    )  # fmt: skip
    caller = [b"PATH=/bin", b"A_TOKEN=s", b"GITHUB_PAT=s", b"SANDBOX_CONF=s", b"RAL_X=s", b"TERM=t"]
    caller += [entry.encode() for entry in entries]
    inside, _ = run(*caller, policy=policy)
    hidden = (DEFAULT.hidden | {name.encode() for name in hide}) - {b"PATH"}
    assert not hidden & inside.keys()
    assert {name for name in inside if name.startswith(b"RAL_")} <= OURS.keys()
    secret = {b"A_TOKEN", b"GITHUB_PAT", *(name.encode() for name in blocked)} - OURS.keys() - {b"PATH"}
    assert not (secret & inside.keys()) - {name.encode() for name in allowed}
    assert all(OURS[name] == inside[name] for name in OURS.keys() & inside.keys())
    assert all(b"\0" not in value for _, value in policy.extra)
