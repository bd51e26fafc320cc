"""Hosts that are laid out in other ways: links, file systems, accounts. Each is made in a mount namespace of
its own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hostile import PYTHON, run_group
from support.installed import home_dir, python_path, ral_path, session_environment

pytestmark = pytest.mark.needs("bubblewrap")

# Runs in the made host: a broker, and clients that run one command each.
HOST = """
import json, os, subprocess, sys
env, python, ral, project, commands = json.loads(sys.argv[1])
serve = [python, "-I", "-m", "ral_broker", "run"]
broker = subprocess.Popen(serve, env=env, cwd="/", stderr=subprocess.PIPE)
while b"serves" not in broker.stderr.readline(): assert broker.poll() is None
ended = [subprocess.run([ral, *command], env=env, cwd=project, stdin=subprocess.DEVNULL, capture_output=True)
         for command in commands]
broker.terminate(); broker.communicate()
print(json.dumps([[d.returncode, d.stdout.decode(), d.stderr.decode()] for d in ended]))
"""

NEW_ROOT = """
mkdir "$S/root"; mount -t tmpfs tmpfs "$S/root"; cd "$S/root"
for d in usr etc home dev proc sys tmp var run root work opt; do
    [ -d /$d ] || continue
    mkdir $d; mount --rbind /$d $d
done
"""
ENTER_ROOT = """
mkdir old; /usr/sbin/pivot_root . old; cd /; umount -l /old; rmdir /old
"""


class Host:
    """A scratch directory, and what happens in a host that a shell script makes of it."""

    def __init__(self, scratch: Path, runtime: Path) -> None:
        self.scratch, self._runtime = scratch, runtime
        self.env = session_environment(runtime)

    def account(self, home: Path | str) -> str:
        """A script that gives the user another home directory in passwd."""
        lines = []
        for line in Path("/etc/passwd").read_text().splitlines():
            fields = line.split(":")
            if fields[2] == str(os.getuid()):
                fields[5] = str(home)
            lines.append(":".join(fields))
        (self.scratch / "passwd").write_text("\n".join(lines) + "\n")
        return 'mount --bind "$S/passwd" /etc/passwd\n'

    def run(
        self, prepare: str, project: Path, *scripts: str, uid: int | None = None
    ) -> list[tuple[int, str, str]]:
        """Run each shell script in a session of ``project``: (status, stdout, stderr)."""
        commands = [["run", "-q", "--", "sh", "-c", script] for script in scripts]
        description = [self.env, str(python_path()), str(ral_path()), str(project), commands]
        own = f"unshare --user --map-user={os.getuid() if uid is None else uid} --map-group={os.getgid()}"
        enter = [
            "unshare", "--user", "--map-root-user", "--mount", "sh", "-ec",
            f'S={self.scratch}\n{prepare}\nexec {own} "$@"', "sh",
        ]  # fmt: skip
        done = run_group([*enter, *PYTHON, HOST, json.dumps(description)])
        assert done.returncode == 0, done
        return [tuple(ended) for ended in json.loads(done.stdout)]


@pytest.fixture
def host(runtime: Path) -> Iterator[Host]:
    scratch = Path(tempfile.mkdtemp(prefix="ral-t-host-", dir=home_dir()))
    (scratch / "project").mkdir()
    yield Host(scratch, runtime)
    shutil.rmtree(scratch)


OWN_ETC = 'cp -a /etc "$S/etc" 2>/dev/null || true; rm -f "$S/etc/resolv.conf"\n'
WORKS = "echo x >new && cat new && ls /usr/bin/env >/dev/null"


def test_resolv_conf_leads_into_run(host: Host) -> None:
    prepare = (
        OWN_ETC + 'ln -s ../run/systemd/resolve/stub-resolv.conf "$S/etc/resolv.conf"\n'
        "mount -t tmpfs tmpfs /run; mkdir -p /run/systemd/resolve; echo secret >/run/other\n"
        'echo nameserver 127.0.0.53 >/run/systemd/resolve/stub-resolv.conf; mount --bind "$S/etc" /etc\n'
    )
    [ended] = host.run(prepare, host.scratch / "project", "cat /etc/resolv.conf; ls /run")
    assert ended[:2] == (0, "nameserver 127.0.0.53\nral-session\nsystemd\n"), ended


def test_there_is_no_resolv_conf(host: Host) -> None:
    [ended] = host.run(OWN_ETC + 'mount --bind "$S/etc" /etc\n', host.scratch / "project", WORKS)
    assert ended[:2] == (0, "x\n"), ended


@pytest.mark.parametrize("mode", ["tmpwrite", "read"])
def test_the_home_is_reached_through_a_link(host: Host, mode: str) -> None:
    real, link = host.scratch / "var-home/u", host.scratch / "home"
    (real / "p").mkdir(parents=True)
    (real / ".ssh").mkdir()
    (real / ".ssh/id").write_text("S")
    (real / ".vimrc").write_text("V\n")
    link.symlink_to("var-home")
    host.env |= {"HOME_ACCESS": mode}
    script = f"echo $HOME; pwd -P; echo x >new; cat ~/.vimrc; cat {link}/u/.ssh/id {real}/.ssh/id; true"
    [ended] = host.run(host.account(link / "u"), link / "u/p", script)
    assert ended[:2] == (0, f"{link}/u\n{real}/p\nV\n"), ended
    assert (real / "p/new").exists()


OVERLAY = """
mkdir "$S/o"; mount -t tmpfs tmpfs "$S/o"; cd "$S/o"; mkdir low up work; echo l >low/l
mount -t overlay overlay -o lowerdir=low,upperdir=up,workdir=work "$S/project"; cd /
"""


@pytest.mark.parametrize(
    "prepare",
    [
        'mount -t tmpfs tmpfs "$S/project"',
        'mkdir "$S/other"; mount --bind "$S/other" "$S/project"',
        OVERLAY,
    ],
    ids=["tmpfs", "bind mount", "overlay"],
)
def test_the_project_is_a_file_system_of_its_own(host: Host, prepare: str) -> None:
    [ended] = host.run(prepare + "\n", host.scratch / "project", WORKS)
    assert ended[:2] == (0, "x\n"), ended


def test_the_home_is_a_file_system_of_its_own(host: Host) -> None:
    home = host.scratch / "home"
    home.mkdir()
    prepare = 'mount -t tmpfs tmpfs "$S/home"; mkdir "$S/home/p"; echo V >"$S/home/.vimrc"\n' + host.account(
        home
    )
    [ended] = host.run(prepare, home / "p", WORKS + "; cat ~/.vimrc")
    assert ended[:2] == (0, "x\nV\n"), ended


def test_an_account_without_an_entry_in_passwd(host: Host) -> None:
    home = host.scratch / "home"
    home.mkdir()
    host.env |= {"HOME": str(home)}
    script = "id -un; id -u; echo $HOME; echo x >new; ls -A ~"
    [ended] = host.run("", host.scratch / "project", script, uid=54321)
    assert ended[:2] == (0, f"54321\n54321\n{home}\n"), ended


@pytest.mark.parametrize("merged", [True, False])
def test_usr_is_merged_or_not_and_nix_and_linuxbrew_are_there(host: Host, merged: bool) -> None:
    layout = "for d in bin sbin lib lib64; do [ -e /usr/$d ] || continue; "
    layout += "ln -s usr/$d $d; done\n" if merged else "mkdir $d; mount --rbind /usr/$d $d; done\n"
    trees = (
        "mkdir -p nix/store/x; echo N >nix/store/x/n\n"
        # A directory of homes in memory, with this account's and that of linuxbrew.
        'umount -l home; mkdir -p home/linuxbrew/.linuxbrew "home/${HOME#/home/}"\n'
        'echo B >home/linuxbrew/.linuxbrew/b; mount --rbind "$HOME" "home/${HOME#/home/}"\n'
    )
    script = (
        "test -L /bin && echo link; cat /nix/store/x/n /home/linuxbrew/.linuxbrew/b; "
        "echo x 2>/dev/null >/nix/new || echo refused; ls /lib64 | head -1"
    )
    [ended] = host.run(NEW_ROOT + layout + trees + ENTER_ROOT, host.scratch / "project", script)
    assert ended[0] == 0, ended
    lines = ended[1].splitlines()
    assert ("link" in lines) == merged
    assert {"N", "B", "refused"} <= set(lines)
