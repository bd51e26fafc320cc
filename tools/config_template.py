"""Prints client/ral_client/ral.toml.in, the template of `ral config init`, from the settings themselves."""

from __future__ import annotations

import sys
import textwrap

from ral_broker.config.document import EXPECTED, toml_text
from ral_broker.config.settings import SETTINGS, Settings

WIDTH = 80
HEAD = """\
# Configuration of ral: what a session shows, and what it may do.
#
# Every setting is below, commented out, with its default. Remove the "# " in
# front of one to set it. Then `ral config check` says what is wrong with the
# file, `ral config show` prints what holds and where it comes from, and
# `ral explain PATH` says why a path is visible inside, or not.
#
# A list here adds to the defaults and to what the administrator set; under
# [replace], at the end of the file, it takes their place.
# Files named *.toml in the directory conf.d beside this file are read after it,
# in the order of their names; ral.toml(5) has the rest.
#
# Paths are absolute or begin with ~/. Those of the home_* lists count from your
# home directory, those of project_protected_paths from the project.
"""
TAIL = """\

## Tables come last: what stands below one belongs to it. As an example:
##   [replace]
##   home_readonly = [".bashrc", ".vimrc"]
"""
SECTIONS = {
    "Home directory": "home_access home_readonly home_writable home_seeded_files",
    "Paths": "extra_writable_paths denied_writable_paths blocked_files extra_blocked_paths readonly_mounts "
    "allowed_project_parents materialize_blocked_files cleanup_materialized_blocked_files",
    "Project": "protect_project project_protected_paths trust_project_config",
    "Profiles": "enabled_agents suppress_agent_warnings",
    "Environment": "allowed_env_vars blocked_env_vars blocked_env_patterns hide_from_sandbox sandbox_env "
    "sandbox_modules",
    "Devices, and what is private": "devices devices_blacklist bind_dev_pts private_tmp private_ipc "
    "filter_passwd",
    "Network": "network_filter_mode network_filter_fallback network_mail_block network_blocklist "
    "network_blocklist_except",
}
REST = "Limits and mechanisms"
EXAMPLES = {"sandbox_nproc_limit": "4096"}
"""Where the default is that nothing is set."""


def explained(name: str) -> list[str]:
    """The comment above a setting."""
    setting = SETTINGS[name]
    text = setting.doc[0].upper() + setting.doc[1:] + "."
    if EXPECTED[name].words:
        text += f" {EXPECTED[name].sentence().capitalize()}."
    if name in EXAMPLES:
        text += " Not set by default."
    if setting.admin_only:
        text += " Only the administrator's file may set it."
    if setting.state == "refused":
        text += " Cannot be changed in this version."
    return textwrap.wrap(text, WIDTH, initial_indent="## ", subsequent_indent="## ", break_on_hyphens=False)


def assigned(name: str) -> list[str]:
    """A setting and its default, commented out."""
    default = getattr(Settings(), name)
    line = f"# {name} = {EXAMPLES.get(name) or toml_text(default)}"
    if len(line) <= WIDTH:
        return [line]
    items = textwrap.wrap(
        " ".join(f"{toml_text(item)}," for item in default),
        WIDTH, initial_indent="#   ", subsequent_indent="#   ", break_on_hyphens=False,
    )  # fmt: skip
    return [f"# {name} = [", *items, "# ]"]


def template() -> str:
    """The whole file."""
    sections = {title: names.split() for title, names in SECTIONS.items()}
    placed = {name for names in sections.values() for name in names}
    sections[REST] = [name for name in SETTINGS if name not in placed]
    lines = []
    for title, names in sections.items():
        lines += ["", f"## {title}"]
        for name in names:
            lines += ["", *explained(name), *assigned(name)]
    return HEAD + "\n".join(lines) + "\n" + TAIL


if __name__ == "__main__":
    sys.stdout.write(template())
