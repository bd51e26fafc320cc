"""The plan builder is the security of a session: what is shown, hidden, and in which order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ral_broker.envelope import slots
from ral_broker.envelope.facts import ABSENT, PathFact
from ral_broker.envelope.options import is_lent, render_options
from ral_broker.envelope.plan import (
    Bind,
    Dev,
    Mask,
    Pinned,
    Proc,
    ReadOnly,
    Symlink,
    Tmpfs,
    is_under,
    shown_names,
)
from ral_broker.envelope.session_plan import (
    CREDENTIAL_NAMES,
    ROOT_HIDDEN,
    ROOT_READ_ONLY,
    SYSTEM_PATHS,
    paths_of_interest,
    plan_session,
)
from ral_broker.errors import Refused
from support.policies import HOME, PROJECT, blocked, directory, index, link, policy, regular, usual


def test_order_is_system_scratch_home_project_kernel_final() -> None:
    plan = plan_session(policy(), usual())
    order = [
        index(plan, Bind, b"/usr"), index(plan, Symlink, b"/bin"), index(plan, Tmpfs, b"/tmp"),
        index(plan, Tmpfs, b"/run"), index(plan, Tmpfs, HOME), index(plan, Bind, PROJECT),
        index(plan, Proc, b"/proc"), index(plan, Dev, b"/dev"), index(plan, Symlink, b"/run/ral-session"),
        index(plan, ReadOnly, b"/"),
    ]  # fmt: skip
    assert order == sorted(order)
    assert order[-1] == len(plan.operations) - 1


def test_only_the_project_is_a_writable_bind() -> None:
    plan = plan_session(policy(), usual())
    assert [o.dest for o in plan.operations if isinstance(o, Bind) and o.writable] == [PROJECT]


@pytest.mark.parametrize("project", [HOME, b"/home", b"/"])
def test_a_project_that_is_the_home_or_above_it_is_refused(project: bytes) -> None:
    with pytest.raises(Refused, match="home directory or an ancestor"):
        plan_session(policy(project=project, cwd=project), usual() | {project: directory(project)})


def test_a_project_above_the_real_home_is_refused_when_the_home_is_spelled_otherwise() -> None:
    with pytest.raises(Refused, match="home directory or an ancestor"):
        plan_session(policy(home_path=b"/var/home/u", project=b"/var/home"), usual())


@pytest.mark.parametrize("project", [b"/proc/1", b"/dev/shm/x", b"/sys/x"])
def test_a_project_in_a_file_system_of_the_kernel_is_refused(project: bytes) -> None:
    with pytest.raises(Refused, match="gets anew"):
        plan_session(policy(project=project), usual())


@pytest.mark.parametrize(
    "project", [b"/tmp", b"/var/tmp", b"/run", b"/run/user/1000", b"/run/user", b"/var", b"/dev/shm"]
)
def test_a_project_that_holds_what_other_programs_share_is_refused(project: bytes) -> None:
    with pytest.raises(Refused, match=r"sockets|gets anew"):
        plan_session(policy(project=project, cwd=project), usual() | {project: directory(project)})


def test_a_directory_of_its_own_in_tmp_is_a_project() -> None:
    project = b"/tmp/p"
    plan = plan_session(policy(project=project, cwd=project), usual() | {project: directory(project)})
    assert index(plan, Bind, project) > index(plan, Tmpfs, b"/tmp")


@pytest.mark.parametrize("name", [b".ssh", b".aws/deep", b".config/gh"])
def test_a_project_among_credentials_is_refused_for_that_reason(name: bytes) -> None:
    project = HOME + b"/" + name
    with pytest.raises(Refused, match="which is hidden"):
        plan_session(policy(project=project, cwd=project), usual() | {project: directory(project)})


def test_a_project_inside_the_brokers_directory_is_refused() -> None:
    with pytest.raises(Refused, match="hidden"):
        plan_session(policy(project=b"/run/user/1000/ral/x", hidden=(b"/run/user/1000/ral",)), usual())


def test_the_brokers_directory_is_masked_where_the_project_shows_it() -> None:
    hidden = PROJECT + b"/runtime"
    plan = plan_session(policy(hidden=(hidden,)), usual() | {hidden: directory(hidden)})
    at = index(plan, Mask, hidden)
    assert at > index(plan, Bind, PROJECT)
    mask = plan.operations[at]
    assert isinstance(mask, Mask)
    assert mask.directory


def test_credentials_inside_the_project_are_masked_and_the_shape_decides() -> None:
    project = HOME + b"/.config"
    facts = usual() | {
        project: directory(project),
        HOME + b"/.config/gh": directory(HOME + b"/.config/gh"),
        HOME + b"/.config/op": regular(HOME + b"/.config/op"),
    }
    plan = plan_session(policy(project=project, cwd=project), facts)
    masks = {o.dest: o.directory for o in plan.operations if isinstance(o, Mask)}
    assert masks == {HOME + b"/.config/gh": True, HOME + b"/.config/op": False}


def test_a_credential_that_is_a_link_into_a_shown_place_is_masked_at_its_end() -> None:
    facts = usual() | {HOME + b"/.aws": link(b"/etc/aws", b"/etc/aws")}
    plan = plan_session(policy(), facts)
    assert [o.dest for o in plan.operations if isinstance(o, Mask)] == [b"/etc/aws"]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_denied_path_is_masked_over_the_project(kind: str) -> None:
    env = PROJECT + b"/.env"
    fact = regular(env) if kind == "file" else directory(env)
    plan = plan_session(policy(blocked=blocked(env)), usual() | {env: fact})
    mask = plan.operations[index(plan, Mask, env)]
    assert isinstance(mask, Mask)
    assert mask.directory == (kind == "directory")


def test_a_denied_path_that_is_absent_appears_nowhere_in_the_options() -> None:
    env = PROJECT + b"/.env"
    plan = plan_session(policy(blocked=blocked(env)), usual())
    assert env not in render_options(plan, plan.operations, seccomp=0)


def test_a_denied_dangling_link_starts_and_leaves_nothing() -> None:
    env = PROJECT + b"/.env"
    plan = plan_session(
        policy(blocked=blocked(env)), usual() | {env: link(b"gone", PROJECT + b"/gone", "absent")}
    )
    assert not [o for o in plan.operations if isinstance(o, Mask)]


def test_a_denied_link_masks_what_it_reaches() -> None:
    env = PROJECT + b"/.env"
    facts = usual() | {env: link(b"real", PROJECT + b"/real", "file")}
    plan = plan_session(policy(blocked=blocked(env)), facts)
    assert [o.dest for o in plan.operations if isinstance(o, Mask)] == [PROJECT + b"/real"]


def test_the_installation_is_read_only_where_the_project_holds_it() -> None:
    venv = PROJECT + b"/.venv"
    plan = plan_session(policy(installation=(venv, b"/opt/x")), usual() | {venv: directory(venv)})
    bind = plan.operations[index(plan, Bind, venv)]
    assert isinstance(bind, Bind)
    assert not bind.writable
    assert index(plan, Bind, venv) > index(plan, Bind, PROJECT)


def test_a_pin_is_laid_over_its_own_name_wherever_it_is_visible() -> None:
    plan = plan_session(policy(pins=(("bwrap", b"/usr/bin/bwrap"), ("holder", b"/srv/x"))), usual())
    assert [o.dest for o in plan.operations if isinstance(o, Pinned)] == [b"/usr/bin/bwrap"]


def test_root_gets_the_kernels_switches_read_only_after_proc() -> None:
    facts = usual() | {p: directory(p) for p in ROOT_READ_ONLY} | {p: regular(p) for p in ROOT_HIDDEN}
    plan = plan_session(policy(uid=0, home=b"/root", home_path=b"/root"), facts)
    for path in ROOT_READ_ONLY:
        assert index(plan, Bind, path) > index(plan, Proc, b"/proc")
    assert index(plan, Mask, b"/etc/shadow") > index(plan, Bind, b"/etc")


def test_a_host_that_refuses_a_fresh_proc_gets_its_own_bound_after_every_other_bind() -> None:
    plan = plan_session(policy(fresh_proc=False), usual())
    assert index(plan, Bind, b"/proc") > index(plan, Bind, PROJECT)


def test_a_resolver_file_below_run_brings_its_directory() -> None:
    facts = usual() | {
        b"/etc/resolv.conf": link(
            b"../run/systemd/resolve/stub.conf", b"/run/systemd/resolve/stub.conf", "file"
        )
    }
    plan = plan_session(policy(), facts)
    assert index(plan, Bind, b"/run/systemd/resolve") > index(plan, Tmpfs, b"/run")


def test_unmerged_usr_is_bound_and_a_link_elsewhere_is_followed_once() -> None:
    facts = usual() | {b"/bin": directory(b"/bin"), b"/opt": link(b"/data/opt", b"/data/opt")}
    plan = plan_session(policy(), facts)
    assert isinstance(plan.operations[index(plan, Bind, b"/bin")], Bind)
    opt = plan.operations[index(plan, Symlink, b"/opt")]
    assert isinstance(opt, Symlink)
    assert opt.target == b"/data/opt"
    assert isinstance(plan.operations[index(plan, Bind, b"/data/opt")], Bind)


def test_a_home_behind_a_link_is_made_at_its_real_name_with_the_link() -> None:
    project = b"/var/home/u/p"
    plan = plan_session(
        policy(home_path=b"/var/home/u", project=project), usual() | {project: directory(project)}
    )
    assert index(plan, Symlink, HOME) > index(plan, Tmpfs, b"/var/home/u")


def test_mount_slots_follow_the_options_without_a_gap() -> None:
    facts = usual() | {PROJECT + b"/.env": regular(PROJECT + b"/.env")}
    plan = plan_session(
        policy(blocked=blocked(PROJECT + b"/.env"), pins=(("bwrap", b"/usr/bin/bwrap"),)), facts
    )
    options = render_options(plan, plan.operations, seccomp=2)
    numbers = [int(options[i + 1]) for i, o in enumerate(options) if o in (b"--bind-fd", b"--ro-bind-fd")]
    assert numbers == list(range(slots.MOUNTS, slots.MOUNTS + sum(map(is_lent, plan.operations))))
    assert b"--bind" not in options
    assert b"--ro-bind" not in options


def test_the_builder_asks_for_every_name_it_looks_up() -> None:
    asked: set[bytes] = set()

    class Recorder(dict[bytes, PathFact]):
        def get(self, key: bytes, default: object = None) -> PathFact:
            asked.add(key)
            return super().get(key, ABSENT)

    wanted = policy(
        uid=0, home=b"/root", home_path=b"/root", blocked=blocked(b"/x/y"), installation=(b"/z",)
    )
    facts = Recorder(usual())
    plan_session(wanted, facts)
    assert asked <= set(paths_of_interest(wanted))


paths = st.lists(st.sampled_from([b"a", b"b", b"bb", b".env"]), min_size=1, max_size=4).map(
    lambda p: b"/" + b"/".join(p)
)


@given(paths, paths, paths)
def test_names_of_a_source_are_exactly_those_that_a_bind_reaches(
    source: bytes, dest: bytes, wanted: bytes
) -> None:
    bind = Bind(dest=dest, source=source, writable=True, layer="project", why="")
    names = list(shown_names((bind,), wanted))
    if is_under(wanted, source):
        assert names == [dest + wanted[len(source) :]]
    else:
        assert names == []


@given(st.lists(paths, max_size=6), paths)
def test_no_denied_object_stays_visible(denied: list[bytes], project: bytes) -> None:
    """Whatever is denied and exists under a bind, a mask lies on it or above it, after every bind."""
    project = b"/home/u" + project
    names = tuple(project + d for d in denied)
    facts = usual() | {project: directory(project)} | {n: directory(n) for n in names}
    plan = plan_session(policy(project=project, cwd=project, blocked=blocked(*names)), facts)
    last_bind = max(i for i, o in enumerate(plan.operations) if isinstance(o, Bind))
    masks = [o.dest for i, o in enumerate(plan.operations) if isinstance(o, Mask) and i > last_bind]
    for name in names:
        assert any(is_under(name, mask) for mask in masks)


def test_lists_name_absolute_normal_paths() -> None:
    for path in (*SYSTEM_PATHS, *ROOT_HIDDEN, *(HOME + b"/" + n for n in CREDENTIAL_NAMES)):
        assert path.startswith(b"/")
        assert b"//" not in path
