#!/usr/bin/env python3
"""Take each security check out, one at a time, and see that a test notices.

A line of broker/ral_broker that holds a wall ends in ``# wall``. WALLS names for each the tests that fall
without it. The tool copies the installation to a scratch environment, so that broker, client and tests are
the changed ones; first every test named here has to pass unchanged.

    tools/walls.py [--as USER] [TEXT…]    only walls whose file or line contains one of TEXT

As root the tests marked root run as root and the others as USER (ral-test); as an ordinary user the former
are left out. Takes some minutes. Exit status 0: every wall that was tried is missed.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))
from support.processes import become_subreaper, descendants, end, reap  # noqa: E402 - not installed

MARK = "  # wall"
ROOMS = ("ral_broker", "ral_client", "ral_helpers", "ral_protocol")


class Wall(NamedTuple):
    """One check. ``line`` is its source line, stripped and without the mark; ``without`` what replaces it
    (None: an ``if`` that is never true, else nothing); ``root``: its tests are root's."""

    file: str
    line: str
    tests: tuple[str, ...]
    without: str | None = None
    root: bool = False


def _wall(file: str, line: str, *tests: str, without: str | None = None, root: bool = False) -> Wall:
    return Wall(file, line, tests, without, root)


_CHILD = "tests/attack/test_config_child.py::"
_LAYERS = "tests/unit/test_config_merge.py::"
_LOADER = "tests/integration/test_config_loader.py::"
_CROOKED = "tests/attack/test_crooked_requests.py::"
_DOOR = "tests/integration/test_door.py::"
_PLAN = "tests/unit/test_session_plan.py::"
_EDGES = "tests/unit/test_plan_walls.py::"
_OPENED = "tests/integration/test_opened.py::"
_PLANTED = "tests/attack/test_planted_records.py::"
_PROBES = "tests/attack/test_probes.py::"
_PARENTS = "tests/attack/test_renamed_parents.py::"
_ROOT = "tests/attack/test_root_session.py::"
_ADMIN = _ROOT + "test_an_admins_file_that_forbids_it_or_cannot_be_trusted_refuses_the_session"
_RUN = "tests/integration/test_run.py::"
_SWAP = "tests/attack/test_swapped_source.py::"
_MANY = "tests/unit/test_many_masks.py::"
_PROTECT = "tests/unit/test_project_protection.py::"
_GIT = "tests/attack/test_hostile_git.py::"
_LIES = _GIT + "test_a_git_file_that_lies_makes_nothing_writable"
_USERS = "tests/unit/test_passwd.py::"
_DEVICES = "tests/unit/test_devices.py::"
_ZYGOTE = "tests/integration/test_zygote.py::"

WALLS = (
    # Who may ask.
    _wall("peers.py", "if peer.uid != os.geteuid():",
          _CROOKED + "test_another_user_who_reaches_the_socket_is_not_served", root=True),
    _wall("peers.py", "if _namespace(peer, name, request) != own[name]:",
          _DOOR + "test_a_peer_in_a_user_namespace_of_its_own_is_refused",
          _DOOR + "test_a_peer_that_sees_other_mounts_is_refused_with_the_likely_cause"),
    _wall("frames.py", "wanted = socket.MSG_CMSG_CLOEXEC",
          _DOOR + "test_every_descriptor_of_the_broker_is_closed_on_exec", without="wanted = 0"),
    _wall("control.py", "if len(fds) and not isinstance(request, Run | Config | Explain):",
          _CROOKED + "test_a_request_that_takes_no_descriptors_gets_none"),
    # What of the caller's environment gets in.
    _wall("envelope/environment.py", "if name in ours or name in hidden or name.startswith(_OWN_PREFIX):",
          "tests/unit/test_environment.py::test_settings_of_ral_do_not_reach_the_program"),
    _wall("envelope/environment.py", "if is_secret(name):",
          "tests/unit/test_environment.py::test_secrets_are_held_back_and_counted"),
    # What a request brings.
    _wall("sessions/caller.py", "syscalls.seal(untrusted_fd)",
          _CROOKED + "test_a_payload_that_cannot_be_sealed",
          _CROOKED + "test_a_payload_is_sealed_before_it_is_read"),
    _wall("sessions/caller.py", "if size > MAX_PAYLOAD:",
          _CROOKED + "test_a_payload_that_is_too_large_is_not_read"),
    _wall("sessions/caller.py", "if stat.S_ISDIR(mode):",
          _CROOKED + "test_descriptors_that_open_more_than_a_stream[directory]"),
    _wall("sessions/caller.py", "if stat.S_ISBLK(mode):",
          _CROOKED + "test_a_block_device_is_no_stream", root=True),
    _wall("sessions/caller.py", "if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH:",
          _CROOKED + "test_descriptors_that_open_more_than_a_stream[path]"),
    _wall("sessions/caller.py", "if syscalls.filesystem_type(fd) in _KERNEL_HANDLES:",
          _CROOKED + "test_descriptors_that_open_more_than_a_stream[namespace]"),
    _wall("sessions/caller.py", "if os.isatty(fd):", _CROOKED + "test_a_terminal_that_is_called_none"),
    _wall("sessions/launch.py",
          "told = admin.check_root_session(settings.allow_root_session) if os.geteuid() == 0 else ()",
          _ROOT + "test_an_admins_file_that_forbids_it_or_cannot_be_trusted_refuses_the_session[forbidden]",
          without="told = ()", root=True),
    _wall("sessions/caller.py", "if real != untrusted_path:",
          _CROOKED + "test_a_name_and_a_handle_that_are_not_the_same_directory"),
    _wall("sessions/caller.py", "if not stat.S_ISDIR(mode):", _CROOKED + "test_a_project_that_is_a_file"),
    # The object, not the name.
    _wall("envelope/opened.py",
          "if operation.identity is not None and identity_of(handle) != operation.identity:",
          _SWAP + "test_another_object_at_the_name_is_refused_and_named"),
    _wall("envelope/opened.py",
          "return syscalls.openat2(AT_FDCWD, path, flags, syscalls.RESOLVE_NO_SYMLINKS | cached)",
          _SWAP + "test_a_symbolic_link_on_the_way_is_refused_in_fixed_words",
          without="return syscalls.openat2(AT_FDCWD, path, flags, cached)"),
    _wall("envelope/opened.py",
          "fd = syscalls.openat2(AT_FDCWD, self._path, self._flags, syscalls.RESOLVE_NO_SYMLINKS)",
          _CROOKED + "test_the_slow_open_follows_no_link_either",
          without="fd = syscalls.openat2(AT_FDCWD, self._path, self._flags, 0)"),
    _wall("envelope/opened.py", "if not node or status.st_rdev != device:",
          _OPENED + "test_a_device_is_the_one_that_was_seen"),
    _wall("envelope/opened.py", "if not stat.S_ISREG(status.st_mode):",
          _OPENED + "test_a_copy_is_of_a_file_that_is_not_large"),
    _wall("envelope/opened.py", "if status.st_size > MAX_COPY:",
          _OPENED + "test_a_copy_is_of_a_file_that_is_not_large"),
    _wall("sessions/launch.py", "if Identity(status.st_dev, status.st_ino) != prepared.cwd_identity:",
          _SWAP + "test_the_working_directory_is_the_object_that_the_caller_stands_in_or_nothing"),
    _wall("syscalls.py", "if fcntl.fcntl(fd, F_GET_SEALS) & ALL_SEALS != ALL_SEALS:",
          _CROOKED + "test_seals_that_do_not_hold_are_noticed"),
    _wall("syscalls.py",
          "if os.fstat(fd).st_size != len(content) or os.pread(fd, len(content) + 1, 0) != content:",
          _CROOKED + "test_a_memory_file_that_is_written_to_before_its_seals_are_on_is_thrown_away"),
    # What a session shows and hides.
    _wall("config/policy.py", "yield Rule(path, PINNED)",
          "tests/unit/test_config_policy.py::"
          "test_what_the_administrator_shows_read_only_is_never_made_writable",
          without="yield from ()"),
    _wall("sessions/preparation.py", "if facts[name].identity != identity_of(fd):",
          _CROOKED + "test_a_directory_of_the_brokers_own_that_moves_during_the_plan_refuses"),
    _wall("sessions/preparation.py",
          "if not stat.S_ISSOCK(status.st_mode) or "
          "Identity(status.st_dev, status.st_ino) != fact.identity:",
          _EDGES + "test_only_the_socket_that_was_seen_is_passed"),
    _wall("config/policy.py",
          "protected=(*(Rule(path, CONFIGURATION) for path in configuration), *found.protected),",
          _EDGES + "test_the_configuration_that_was_read_is_protected",
          without="protected=found.protected,"),
    _wall("config/policy.py", 'denied_writable=rules("denied_writable_paths"),',
          _EDGES + "test_denied_paths_reach_the_builder", without="denied_writable=(),"),
    _wall("envelope/checks.py", "if is_under(spelling, project):",
          _PLAN + "test_a_project_that_is_the_home_or_above_it_is_refused"),
    _wall("envelope/checks.py", "if is_under(place, project):",
          _PLAN + "test_a_project_that_holds_what_other_programs_share_is_refused",
          _PARENTS + "test_a_project_that_holds_what_other_programs_share_is_refused"),
    _wall("envelope/checks.py", "if is_under(project, place):",
          _PLAN + "test_a_project_in_a_file_system_of_the_kernel_is_refused"),
    _wall("envelope/checks.py", "if hider is not None:",
          _PLAN + "test_a_project_inside_the_brokers_directory_is_refused"),
    _wall("envelope/checks.py", "if any(is_under(project, place) for place in names_of(rule, facts)):",
          _EDGES + "test_a_project_in_what_stays_read_only_is_refused"),
    _wall("envelope/checks.py", "if secret is not None:",
          _EDGES + "test_nothing_in_what_is_hidden_is_shown"),
    _wall("envelope/checks.py", "if resolved in self._run:",
          _EDGES + "test_the_directories_of_sockets_are_shown_to_nobody"),
    _wall("envelope/checks.py", 'if kernel is not None and (writable or kernel != b"/sys"):',
          _EDGES + "test_the_kernels_own_file_systems_are_not_for_settings_to_show"),
    _wall("envelope/checks.py", "if self.is_planted(rule.path, resolved):",
          _EDGES + "test_a_link_that_a_program_could_have_made_shows_nothing_elsewhere"),
    _wall("envelope/checks.py", "if is_under(policy.home_path, place) or is_under(policy.home, place):",
          _EDGES + "test_no_setting_makes_the_home_writable"),
    _wall("envelope/checks.py", "if denied is not None:",
          _EDGES + "test_what_is_denied_is_not_writable_even_if_it_does_not_answer"),
    _wall("envelope/coverage.py",
          "if link.path in holding or (shown is not None and shown.is_host()):",
          _EDGES + "test_no_link_is_made_in_what_the_host_shows"),
    _wall("envelope/home_plan.py", "if secret is not None:",
          _EDGES + "test_nothing_in_what_is_hidden_is_shown"),
    _wall("envelope/home_plan.py",
          "elif rule.path not in made and _is_free(rule.path, grants, links):",
          _EDGES + "test_nothing_is_made_in_a_home_that_is_the_hosts", without="elif True:"),
    _wall("envelope/masks.py", "yield from (Rule(path, OWN) for path in policy.hidden)",
          _PLAN + "test_the_brokers_directory_is_masked_where_the_project_shows_it",
          _RUN + "test_the_brokers_directory_is_masked_even_inside_the_project"),
    _wall("envelope/masks.py",
          'yield from (Rule(home + b"/" + name, CREDENTIALS) for name in ALWAYS_HIDDEN)',
          _EDGES + "test_no_setting_shows_what_is_always_hidden"),
    _wall("envelope/masks.py", 'yield Rule(home + b"/" + name, CREDENTIALS)',
          _PLAN + "test_credentials_inside_the_project_are_masked_and_the_shape_decides"),
    _wall("envelope/masks.py", "yield from policy.credentials",
          _EDGES + "test_credentials_that_a_profile_names_are_masked"),
    _wall("envelope/masks.py", "yield from (Rule(path, ROOT_ONLY) for path in ROOT_HIDDEN)",
          _ROOT + "test_files_that_only_root_may_read_are_not_there_to_be_read", root=True),
    _wall("envelope/masks.py", "yield Rule(path, SOCKETS)",
          _EDGES + "test_sockets_in_a_shared_tmp_are_masked_unless_named"),
    _wall("envelope/masks.py", "yield from policy.blocked",
          _PLAN + "test_no_denied_object_stays_visible"),
    _wall("envelope/masks.py",
          "if facts.get(rule.path, ABSENT).silent and grant is not None and grant.is_host():",
          _EDGES + "test_what_is_to_be_hidden_and_does_not_answer_refuses_where_it_would_be_shown"),
    _wall("envelope/kernel_plan.py",
          'dest=b"/proc", source=b"/proc", writable=False, required=True, layer="kernel",',
          "tests/attack/test_masked_proc.py",
          without='dest=b"/proc", source=b"/proc", writable=True, required=True, layer="kernel",'),
    _wall("envelope/kernel_plan.py", "yield from shifted(hidden, fact.resolved, SHARED_MEMORY)",
          _EDGES + "test_shared_memory_of_the_host_is_masked_like_everything_else"),
    _wall("envelope/kernel_plan.py", "for path in ROOT_READ_ONLY:",
          _ROOT + "test_no_file_of_the_kernel_can_be_opened_for_writing", root=True,
          without="for path in ():"),
    _wall("envelope/kernel_plan.py", "for path in ROOT_MASKED:",
          _EDGES + "test_root_does_not_read_what_the_kernel_tells_root", without="for path in ():"),
    _wall("envelope/kernel_plan.py",
          'if fact.device is None or not is_under(fact.resolved, b"/dev"):',
          _EDGES + "test_only_a_device_below_dev_is_shown_as_one",
          without="if fact.device is None:"),
    _wall("envelope/protect.py",
          "rules = [(Rule(path, INSTALLATION), True) for path in policy.installation]",
          _PLAN + "test_the_installation_is_read_only_where_the_project_holds_it",
          without="rules: list[tuple[Rule, bool]] = []"),
    _wall("envelope/protect.py", "rules += [(rule, True) for rule in home_protected(policy)]",
          _EDGES + "test_what_runs_at_the_next_login_is_not_written"),
    _wall("envelope/protect.py",
          "rules += [(rule, False) for rule in (*policy.protected, *policy.denied_writable)]",
          _EDGES + "test_what_is_protected_is_read_only_above_and_below_every_grant"),
    _wall("envelope/protect.py",
          "rules += [(rule, False) for rule in seeds_on_host(policy, facts, grants)]",
          _EDGES + "test_a_seeded_file_of_a_home_that_is_writable_is_not_written"),
    _wall("envelope/protect.py",
          'if rule.why == CONFIGURATION and outer is not None and outer.kind == "writable":',
          _EDGES + "test_the_configuration_of_the_next_session_cannot_be_made_inside"),
    _wall("envelope/protect.py",
          'if fact.silent and outer is not None and outer.kind == "writable":',
          _EDGES + "test_what_is_protected_and_does_not_answer_refuses_where_it_would_be_writable"),
    _wall("envelope/session_plan.py", "grants |= anchors(grants, guarded)",
          _EDGES + "test_what_holds_something_protected_cannot_be_renamed",
          _PARENTS + "test_a_directory_above_the_brokers_own_cannot_be_renamed_for_a_decoy"),
    _wall("envelope/session_plan.py", "rule = Rule(path, grants.pop(path).why)",
          _EDGES + "test_no_scratch_directory_is_made_below_what_the_host_shows",
          without="rule = Rule(path, grants[path].why)"),
    _wall("envelope/session_plan.py",
          'yield Pinned(dest=path, pin=pin, layer="protect", why="the broker executes this file")',
          _PLAN + "test_a_pin_is_laid_over_its_own_name_wherever_it_is_visible", without="yield from ()"),
    _wall("envelope/session_plan.py", 'yield ReadOnly(dest=home.path, layer="final", why=home.why)',
          _EDGES + "test_an_empty_home_that_is_restricted_is_closed_after_everything_in_it"),
    _wall("envelope/session_plan.py", 'yield ReadOnly(dest=b"/", layer="final", why=why)',
          _RUN + "test_the_system_is_read_only_and_the_project_is_not"),
    # What bwrap and the trampoline are told.
    _wall("envelope/options.py", 'options.append(b"--disable-userns")',
          _PROBES + "test_p17_no_user_namespace_can_be_made_inside",
          "tests/attack/test_options.py::test_every_namespace_and_filter_is_asked_for"),
    _wall("envelope/options.py", 'b"--cap-drop", b"ALL",',
          _ROOT + "test_p15_no_capability_inside", root=True, without=""),
    _wall("envelope/options.py", 'options += [b"--add-seccomp-fd", b"%d" % slots.SECCOMP[number]]',
          _PROBES + "test_p14_nothing_can_be_typed_into_the_callers_terminal"),
    _wall("sessions/launch.py", "scoped = self._equipment.ruleset_fd is not None",
          _PROBES + "test_p18_sockets_of_the_host_are_out_of_reach", without="scoped = False"),
    # Masks that are attached after everything else.
    _wall("sessions/many.py", "free = dest not in holding and not _is_covered(dest, followed)",
          _MANY + "test_a_mask_that_something_follows_at_above_or_below_it_keeps_its_place",
          without="free = True"),
    _wall("sessions/many.py", "if isinstance(operation, Mask) and free and not is_under(plan.cwd, dest):",
          _MANY + "test_one_that_holds_the_working_directory_keeps_its_place",
          without="if isinstance(operation, Mask) and free:"),
    _wall("sessions/many.py",
          "changes = [MaskAt(mask.dest, mask.directory, mask.identity) for mask in masks]",
          _ZYGOTE + "test_a_launch_is_refused_if_another_object_is_there_than_was_planned",
          without="changes = [MaskAt(mask.dest, mask.directory) for mask in masks]"),
    _wall("sessions/many.py", "if outcome.stage:",
          _ZYGOTE + "test_a_launch_is_refused_unless_every_mask_holds"),
    _wall("zygote.py", "if stage or error or results != count:",
          _ZYGOTE + "test_an_answer_that_leaves_changes_out_is_none"),
    # What git obeys in a project, and what of its data outside is believed to be the project's.
    _wall("envelope/protection.py", 'yield look.project + b"/.git"',
          _PROTECT + "test_the_git_file_of_the_project_is_protected_but_a_link_is_not_followed_as_a_whole"),
    _wall("envelope/protection.py", 'yield from (directory.path + b"/" + part for part in REPOSITORY_PARTS)',
          _PROTECT + "test_a_repository"),
    _wall("envelope/protection.py", 'yield from (directory.path + b"/" + part for part in WORKTREE_PARTS)',
          _PROTECT + "test_a_worktree_outside_of_its_repository"),
    _wall("envelope/protection.py", "yield from directory.pointers",
          _PROTECT + "test_submodules_of_the_project"),
    _wall("envelope/protection.py", "yield from directory.hooks",
          _PROTECT + "test_what_the_configuration_leads_to"),
    _wall("envelope/protection.py", "yield from directory.includes",
          _PROTECT + "test_what_the_configuration_leads_to"),
    _wall("envelope/protection.py", "if is_under(home, path):",
          _PROTECT + "test_some_places_are_never_made_writable_by_what_a_project_says"),
    _wall("envelope/protection.py", "if is_under(path, place):",
          _PROTECT + "test_some_places_are_never_made_writable_by_what_a_project_says"),
    _wall("envelope/protection.py", "if any(is_under(place, path) for place in _SHARED_PLACES):",
          _PROTECT + "test_some_places_are_never_made_writable_by_what_a_project_says"),
    _wall("envelope/git_tree.py", "if self._steps > _QUICK_STEPS or self._bytes > _QUICK_BYTES:",
          _GIT + "test_much_work_is_not_done_where_it_would_stop_the_broker"),
    _wall("envelope/git_tree.py", "if not stat.S_ISREG(status.st_mode) or status.st_size > limit:",
          _GIT + "test_nothing_is_taken_from_what_is_no_file"),
    _wall("envelope/git_tree.py", "if number == limit:", _GIT + "test_a_directory_is_listed_up_to_a_limit"),
    _wall("envelope/git_look.py", "if self._room == 0:",
          _GIT + "test_as_many_as_are_looked_at_are_protected_one_by_one"),
    _wall("envelope/outside.py", "if any(is_under(git, root) for root in roots):",
          _LIES + "[admin_in_the_project_beside_what_it_wants]"),
    _wall("envelope/outside.py", "if not is_git_directory(tree, common_fd):",
          _LIES + "[a_worktree_of_no_repository]"),
    _wall("envelope/outside.py", "if {os.fstat(fd).st_uid for fd in (git_fd, common_fd)} != {os.geteuid()}:",
          _GIT + "test_a_repository_of_another_user_is_not_made_writable", root=True),
    _wall("envelope/outside.py",
          'if not same or canonical_name(git_fd).split(b"/")[-2] != b"worktrees":',
          _LIES + "[common_elsewhere]", _LIES + "[common_through_a_link]"),
    _wall("envelope/outside.py", "if fd is None or not here or _identity(fd) != _identity(pointer_fd):",
          _LIES + "[a_worktree_of_somebody_else]", _LIES + "[a_hard_link_of_a_worktrees_file]"),
    _wall("envelope/outside.py", "if not found:",
          _LIES + "[not_a_submodule_there]", _LIES + "[a_submodule_of_nothing]"),
    _wall("envelope/outside.py",
          "if fd is None or _identity(fd) != _identity(project_fd) or canonical_name(fd) != project:",
          _LIES + "[a_submodule_elsewhere]"),
    _wall("envelope/outside.py", "yield entry",
          _GIT + "test_a_directory_dressed_as_a_repository_is_hidden_but_for_gits_own"),
    # Which users and devices a session knows of.
    _wall("envelope/passwd.py",
          "if (_kept(int(number)) or int(number) == uid) and _NUMBER.fullmatch(gid):",
          _USERS + "test_users_are_the_systems_and_the_own_one", without="if True:"),
    _wall("envelope/passwd.py", 'return re.sub(rb"[:\\n\\0]", b"_", untrusted_field)',
          _USERS + "test_a_user_of_a_directory_service_gets_a_record", without="return untrusted_field"),
    _wall("envelope/passwd.py", "if _kept(int(number)) or int(number) in gids:",
          _USERS + "test_groups_are_the_systems_and_the_own_ones_and_name_nobody_else",
          without="if True:"),
    _wall("envelope/passwd.py", 'known = [member for member in members.split(b",") if member in names]',
          _USERS + "test_groups_are_the_systems_and_the_own_ones_and_name_nobody_else",
          without='known = members.split(b",")'),
    _wall("envelope/devices.py",
          'if parts[:2] != [b"", b"dev"] or len(parts) < 3 or {b"", b".", b".."} & set(parts[2:]):',
          _DEVICES + "test_a_name_that_is_not_below_dev_is_refused"),
    _wall("envelope/devices.py", "if _is_named(name, denied) or _is_named(real, denied):",
          _DEVICES + "test_the_blacklist_wins_and_says_so_once"),
    _wall("envelope/devices.py", 'if not real.startswith(_DEV + b"/"):',
          _DEVICES + "test_a_link_is_judged_by_what_it_leads_to"),
    _wall("envelope/devices.py", "if stat.S_ISBLK(status.st_mode):",
          _DEVICES + "test_block_devices_are_never_shown"),
    _wall("envelope/devices.py", "if not stat.S_ISCHR(status.st_mode):",
          _DEVICES + "test_a_link_is_judged_by_what_it_leads_to"),
    _wall("envelope/devices.py", "if status.st_rdev in numbers:",
          _DEVICES + "test_a_second_node_of_a_blacklisted_device_is_that_device", root=True),
    # The directories of the broker's own.
    _wall("runtime.py",
          "flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC",
          _PLANTED + "test_a_runtime_directory_that_others_could_use_is_refused_with_a_sentence[link]",
          without="flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC"),
    _wall("runtime.py", "if status.st_uid != os.geteuid() or status.st_mode & 0o077:",
          _PLANTED + "test_a_runtime_directory_that_others_could_use_is_refused_with_a_sentence[group]"),
    _wall("runtime.py", "flags |= os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK",
          _PLANTED + "test_a_planted_file_of_the_brokers_own_is_refused_with_a_sentence_or_replaced",
          without="flags |= os.O_CREAT | os.O_CLOEXEC"),
    _wall("runtime.py", "if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():",
          _PLANTED + "test_a_planted_file_of_the_brokers_own_is_refused_with_a_sentence_or_replaced"),
    _wall("runtime.py",
          "if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != 0:",
          _PLANTED + "test_a_planted_file_of_the_brokers_own_is_refused_with_a_sentence_or_replaced"),
    # Records.
    _wall("sessions/records.py",
          "flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC",
          _PLANTED + "test_what_lies_in_the_way_of_an_end_does_not_stop_the_broker",
          without="flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC"),
    _wall("sessions/records.py", "if record.id + RECORD == name and record.uid == os.geteuid():",
          _PLANTED + "test_a_record_with_one_wrong_field_is_ignored", without="if True:"),
    _wall("sessions/records.py", "own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()",
          _PLANTED + "test_a_record_of_another_users_is_ignored", root=True, without="own = True"),
    _wall("sessions/records.py", "if not own or status.st_size > MAX_RECORD:",
          _PLANTED + "test_a_record_that_is_too_large_is_not_decoded"),
    _wall("sessions/records.py", "flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK",
          _PLANTED + "test_what_is_no_file_neither_stops_the_broker_nor_is_followed",
          without="flags = os.O_RDONLY | os.O_CLOEXEC"),
    _wall("sessions/records.py",
          "flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK",
          _PLANTED + "test_what_is_no_file_neither_stops_the_broker_nor_is_followed",
          without="flags = os.O_RDONLY | os.O_CLOEXEC"),
    _wall("sessions/records.py", "if not stat.S_ISREG(os.fstat(fd).st_mode):",
          _PLANTED + "test_a_session_whose_status_file_is_no_file_any_more_is_ended"),
    _wall("sessions/adopt.py", "if record.host != records.host_name():",
          _PLANTED + "test_a_record_of_another_host_is_neither_believed_nor_pruned"),
    _wall("sessions/adopt.py", "if not records.is_same_process(mark) or _has_ended(pidfd):",
          _PLANTED + "test_a_pid_that_was_given_to_another_process_is_not_the_sessions"),
    _wall("sessions/lineage.py", "if len(numbers) < 2 or numbers[-1] != 1:",
          _PLANTED + "test_each_word_of_a_lineage_counts[no init]"),
    _wall("sessions/lineage.py", 'if not os.readlink(b"/proc/%d/exe" % pid).endswith(_TRAMPOLINES):',
          _PLANTED + "test_a_record_that_names_the_sandbox_of_another_program_kills_nothing"),
    _wall("sessions/lineage.py", "if any(found[name] == own[name] for name in own):",
          _PLANTED + "test_each_word_of_a_lineage_counts[own namespaces]"),
    _wall("sessions/lineage.py",
          'if (found["mnt"], found["user"]) != (record.mount_namespace, record.user_namespace):',
          _PLANTED + "test_a_record_that_lies_about_a_real_session_does_not_end_it[mount_namespace]",
          _PLANTED + "test_a_record_that_lies_about_a_real_session_does_not_end_it[user_namespace]"),
    _wall("sessions/lineage.py", "if parent != record.monitor.pid:",
          _PLANTED + "test_a_record_that_lies_about_a_real_session_does_not_end_it[monitor]"),
    _wall("sessions/lineage.py", "elif _runs_bwrap(parent):",
          _PLANTED + "test_a_record_that_lies_about_a_real_session_does_not_end_it[gone]"),
    _wall("sessions/lineage.py", 'if struct.unpack("=I", owner)[0] != os.geteuid():',
          _PLANTED + "test_a_sandbox_of_another_users_is_not_believed"),
    # Configuration: the answer of the child that reads it, the files of a user, the pins.
    _wall("config/parse.py", "if size > MAX_ANSWER:", _CHILD + "test_a_flood_is_cut_off"),
    _wall("config/parse.py", "if len(answers) != len(contents):",
          _CHILD + "test_an_answer_that_is_none_is_refused"),
    _wall("config/parse.py",
          "if not 1 <= len(entry.path) <= _MAX_DEPTH or type(entry.value) is not _KINDS[entry.kind]:",
          _CHILD + "test_an_answer_that_is_none_is_refused"),
    _wall("config/parse.py", "if not 0 <= untrusted_line <= last_line:",
          _CHILD + "test_an_answer_that_is_none_is_refused"),
    _wall("config/parse.py", "if path[-1] in table:", _CHILD + "test_an_answer_that_is_none_is_refused"),
    _wall("config/files.py", "if status.st_uid not in (0, os.geteuid()):",
          _LOADER + "test_a_file_of_another_ordinary_user_is_refused", root=True),
    _wall("config/files.py", "if status.st_mode & 0o022 and not sticky:",
          _LOADER + "test_a_file_that_others_can_write_is_refused"),
    _wall("config/files.py", "if not stat.S_ISREG(status.st_mode):",
          _LOADER + "test_what_is_no_file_is_refused_at_once_and_not_opened[fifo]"),
    _wall("config/merge.py", "return not weaker", _LAYERS + "test_an_administrators_true_stays",
          without="return True"),
    _wall("config/merge.py", "self.lists[name] = dict.fromkeys(pinned, self._admin)",
          _LAYERS + "test_what_the_administrator_enforces_comes_back_with_a_warning",
          without="self.lists[name] = {}"),
    _wall("config/merge.py",
          "if trusted or (canonical is not None and baseline.above(canonical) is not None):",
          _LAYERS + "test_parents_are_compared_with_every_link_followed", without="if True:"),
    _wall("config/merge.py", "del self.lists[name][entry]",
          _LAYERS + "test_nothing_denied_becomes_writable_in_any_spelling"),
    # The administrator's file.
    _wall("admin.py", "if above.st_uid != 0 or above.st_mode & 0o022:",
          _ADMIN + "[a directory that others may write]", root=True),
    _wall("admin.py", "if not stat.S_ISREG(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:",
          _ADMIN + "[foreign]", _ADMIN + "[writable by others]", root=True),
)  # fmt: skip


def marked(package: Path) -> list[tuple[str, str]]:
    """Return (file, line) of every marked line below ``package``, as WALLS names them."""
    found: list[tuple[str, str]] = []
    for path in sorted(package.rglob("*.py")):
        for line in path.read_text().splitlines():
            if line.rstrip().endswith(MARK):
                name = path.relative_to(package).as_posix()
                found.append((name, line.strip().removesuffix(MARK.strip()).rstrip()))
    return found


def taken_down(source: str, wall: Wall) -> str:
    """Return ``source`` without the wall. ValueError if its line is not there exactly once."""
    lines = source.splitlines()
    at = [n for n, line in enumerate(lines) if line.strip() == wall.line + MARK]
    if len(at) != 1:
        raise ValueError(f"{wall.file}: {wall.line!r} is there {len(at)} times")
    indent = lines[at[0]][: len(lines[at[0]]) - len(lines[at[0]].lstrip())]
    replacement = wall.without
    if replacement is None:
        keyword = wall.line.split(" ", 1)[0]
        replacement = f"{keyword} False:" if keyword in ("if", "elif") else "pass"
    lines[at[0]] = indent + replacement
    return "\n".join(lines) + "\n"


class Scratch:
    """An environment with copies of the packages, of the tests and of the launcher."""

    def __init__(self, directory: Path, account: str) -> None:
        self.directory, self.account = directory, account
        directory.chmod(0o755)
        subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", directory / "venv"], check=True)
        self.bin = directory / "venv" / "bin"
        (self.site,) = (directory / "venv" / "lib").glob("python3*/site-packages")
        installed = Path(sysconfig.get_path("purelib"))
        (self.site / "others.pth").write_text(f"{installed}\n")
        for room in ROOMS:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree((installed / room).resolve(), self.site / room, ignore=ignored)
        launcher = Path(os.environ.get("RAL_TEST_BIN") or sysconfig.get_path("scripts"), "ral").resolve()
        shutil.copy(launcher, self.bin / "ral")
        self.source = directory / "src"
        shutil.copytree(ROOT / "tests", self.source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", self.source)

    def run(self, tests: tuple[str, ...], *, root: bool, stop: bool = True) -> tuple[int, str]:
        """Run tests; status of pytest and its last line."""
        entry = pwd.getpwuid(0) if root else pwd.getpwnam(self.account)
        command = [str(self.bin / "python"), "-m", "pytest", "-p", "no:cacheprovider", "-q", *tests]
        command += ["-x"] if stop else []
        if entry.pw_uid != os.geteuid():
            become = ["setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--init-groups"]
            command = [*become, *command]
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": entry.pw_dir,
            "USER": entry.pw_name, "LOGNAME": entry.pw_name, "PYTHONDONTWRITEBYTECODE": "1",
            "RAL_TEST_BIN": str(self.bin),
        }  # fmt: skip
        done = subprocess.run(
            command, cwd=self.source, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        # A test that fell may have left its broker or a sandbox.
        end(descendants())
        reap(set())
        lines = done.stdout.strip().splitlines()
        return done.returncode, done.stdout if not stop else (lines[-1] if lines else "")


def main() -> int:
    """Try the walls and print a line for each."""
    parser = argparse.ArgumentParser(description="Take each security check out and see that a test notices.")
    parser.add_argument(
        "--as", dest="account", default="ral-test" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())[0]
    )
    parser.add_argument("text", nargs="*")
    options = parser.parse_args()
    walls = [w for w in WALLS if not options.text or any(t in w.file or t in w.line for t in options.text)]
    if os.geteuid() != 0:
        print(f"not tried, needs root: {sum(w.root for w in walls)}")
        walls = [w for w in walls if not w.root]
    missed = 0
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="ral-walls-", dir="/var/tmp") as name:
        scratch = Scratch(Path(name), options.account)
        for root in (False, True):
            tests = tuple(dict.fromkeys(t for w in walls if w.root == root for t in w.tests))
            status, said = scratch.run(tests, root=root, stop=False) if tests else (0, "")
            if status != 0:
                print(f"{said}\nunchanged, these tests must pass", file=sys.stderr)
                return 2
        for wall in walls:
            path = scratch.site / "ral_broker" / wall.file
            whole = path.read_text()
            before = time.monotonic()
            path.write_text(taken_down(whole, wall))
            try:
                fell = [scratch.run((test,), root=wall.root)[0] == 1 for test in wall.tests]
            finally:
                path.write_text(whole)
            verdict = "missed" if any(fell) else "NOT MISSED"
            missed += any(fell)
            seconds = time.monotonic() - before
            print(f"{verdict:10}  {seconds:5.1f} s  {wall.file:26}  {wall.line}", flush=True)
    print(f"{missed} of {len(walls)} walls are missed by a test when they are gone")
    return 0 if missed == len(walls) else 1


if __name__ == "__main__":
    sys.exit(main())
