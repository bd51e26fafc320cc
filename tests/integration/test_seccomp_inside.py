"""Every rule of the filter attacked inside a real sandbox, and the tools that must go on working under it.

Many refused calls would fail for lack of a capability as well, with the same EPERM. So each is made three
times: under the session's filter, under the same rules with an errno that no kernel code answers with (which
shows that it was the rule that answered), and without a filter (which shows that the call is a real one and
does not answer that).
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from ral_broker import syscalls
from ral_broker.envelope import seccomp
from ral_broker.envelope.seccomp import RULES, compile_program, session_programs

pytestmark = pytest.mark.needs("bubblewrap", "gcc")

MARK = errno.ENOTNAM
"""Used by nothing in the kernel."""
MARKED = compile_program([msgspec.structs.replace(rule, error=MARK) for rule in RULES], os.uname().machine)
SIGSYS_STATUS = 159
X86 = platform.machine() == "x86_64"

MAKE_CALL = r"""
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv) {
    unsigned long a[7] = {0};
    for (int i = 1; i < argc && i < 8; i++) a[i - 1] = strtoul(argv[i], 0, 0);
    long r = syscall(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
    printf("%d\n", r < 0 ? errno : 0);
    return 0;
}
"""

# Types one letter into its own terminal and reads it back as a program that trusts its input would.
INJECT = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>
int main(int argc, char **argv) {
    unsigned long request = strtoul(argv[1], 0, 0);
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    if (master < 0 || grantpt(master) || unlockpt(master)) return 90;
    if (setsid() < 0) { if (fork()) return 91; setsid(); }
    int slave = open(ptsname(master), O_RDWR);
    struct termios t;
    tcgetattr(slave, &t);
    t.c_lflag &= ~(ICANON | ECHO);
    tcsetattr(slave, TCSANOW, &t);
    char letter = 'x', got = 0;
    if (syscall(SYS_ioctl, slave, request, &letter) < 0) { printf("%d\n", errno); return 0; }
    fcntl(slave, F_SETFL, O_NONBLOCK);
    if (read(slave, &got, 1) == 1 && got == 'x') printf("typed\n"); else printf("nothing\n");
    return 0;
}
"""

FOREIGN = r"""
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int argc, char **argv) {
    long r;
    if (!strcmp(argv[1], "i386"))
        __asm__ volatile("int $0x80" : "=a"(r) : "a"(20L) : "memory", "r8", "r9", "r10", "r11");
    else if (!strcmp(argv[1], "x32"))
        r = syscall(0x40000000 | 39);
    else
        r = getpid();
    printf("%s\n", r == getpid() ? "answered" : "refused");
    return 0;
}
"""


class Inside(Protocol):
    """Run a command in a sandbox that shows the whole host and has a filter, or none."""

    def __call__(
        self, command: Sequence[str], program: bytes | None, *, nested: bool = False
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("seccomp")
    programs = {"make_call": MAKE_CALL, "inject": INJECT} | ({"foreign": FOREIGN} if X86 else {})
    for name, source in programs.items():
        (directory / f"{name}.c").write_text(source)
        subprocess.run(
            ["gcc", "-O1", "-o", directory / name, directory / f"{name}.c"], check=True, timeout=60
        )
    return directory


@pytest.fixture
def inside(tools: Path, tmp_path: Path) -> Inside:
    def run(
        command: Sequence[str], program: bytes | None, *, nested: bool = False
    ) -> subprocess.CompletedProcess[str]:
        options = ["--unshare-user", "--unshare-pid", "--cap-drop", "ALL"]
        # Uid 0 inside could not be mapped into a further namespace without CAP_SETFCAP (user_namespaces(7)).
        options += ["--uid", "65534", "--gid", "65534"] if nested else ["--disable-userns"]
        options += ["--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        for directory in (tools, tmp_path):
            options += ["--bind", str(directory), str(directory)]
        options += [
            "--chdir",
            str(tmp_path),
            "--setenv",
            "HOME",
            str(tmp_path),
            "--setenv",
            "LC_ALL",
            "C.UTF-8",
        ]
        fds = [] if program is None else [syscalls.sealed_memfd("filter", program)]
        try:
            for fd in fds:
                options += ["--add-seccomp-fd", str(fd)]
            return subprocess.run(
                ["bwrap", *options, "--", *command],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        finally:
            for fd in fds:
                os.close(fd)

    return run


def number_of(name: str) -> int | None:
    library = seccomp.load_library()
    number = int(library.resolve_syscall(library.system_arch(), name))
    if number == -1:
        return seccomp._NEWER[name]
    return number if number >= 0 else None


def attacks() -> list[tuple[str, tuple[int, ...], int]]:
    """Each call of each rule with harmless arguments that the rule speaks of, and the errno of the rule."""
    high = 1 << 32
    special: dict[str, tuple[tuple[int, ...], ...]] = {
        "clone": ((0x10000011,), (high | 0x10000011,)),
        "unshare": ((0x10000000,), (high | 0x10000000,)),
        "ioctl": (
            (0, 0x5412),
            (0, 0x541C),
            (0, high | 0x5412),
            (0, high | 0x541C),
            (0, high * 0xFFFF | 0x5412),
        ),
        "socket": tuple(
            (family, 1, 0) for family in (15, 17, 21, 29, 30, 31, 38, 40, 42, 44, 46, high | 40, high | 1)
        ),
        "socketpair": ((30, 1, 0, 0), (high | 1, 1, 0, 0)),
    }
    return [
        (name, arguments, rule.error)
        for rule in RULES
        for name in rule.syscalls
        if number_of(name) is not None
        for arguments in special.get(name, ((0, 0, 0, 0, 0),))
    ]


@pytest.mark.attack
@pytest.mark.parametrize(
    ("name", "arguments", "error"), attacks(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_call_of_the_table_is_refused_by_its_rule(
    inside: Inside,
    tools: Path,
    name: str,
    arguments: tuple[int, ...],
    error: int,
) -> None:
    command = [str(tools / "make_call"), str(number_of(name)), *map(str, arguments)]
    (session,) = session_programs()
    refused, marked, free = (inside(command, program) for program in (session, MARKED, None))
    assert (refused.returncode, refused.stdout) == (0, f"{error}\n"), refused
    assert (marked.returncode, marked.stdout) == (0, f"{MARK}\n"), marked
    assert f"{MARK}\n" not in free.stdout, free


@pytest.mark.attack
@pytest.mark.parametrize("request_", [0x5412, 0x100005412])
def test_no_text_is_typed_into_a_terminal(inside: Inside, tools: Path, request_: int) -> None:
    command = ["sh", "-c", f"{tools}/inject {request_:#x}"]
    assert inside(command, session_programs()[0]).stdout == f"{errno.EPERM}\n"
    free = inside(command, None).stdout
    legacy = Path("/proc/sys/dev/tty/legacy_tiocsti")
    if not legacy.exists() or legacy.read_text() == "1\n":
        assert free == "typed\n"
    else:
        assert free == f"{errno.EIO}\n"


@pytest.mark.attack
@pytest.mark.skipif(not X86, reason="i386 and x32 are ABIs of x86-64")
@pytest.mark.parametrize("abi", ["i386", "x32"])
def test_a_call_by_a_foreign_abi_kills(inside: Inside, tools: Path, abi: str) -> None:
    command = [str(tools / "foreign"), abi]
    killed = inside(command, session_programs()[0])
    assert (killed.returncode, killed.stdout) == (SIGSYS_STATUS, "")
    free = inside(command, None)
    # A kernel without this ABI answers ENOSYS to x32, and SIGSEGV to int 0x80; either way not SIGSYS.
    assert free.stdout in {"answered\n", "refused\n"} or free.returncode == 139
    native = inside([str(tools / "foreign"), "native"], session_programs()[0])
    assert native.stdout == "answered\n"


@pytest.mark.attack
def test_a_nested_sandbox_needs_nested_userns(
    inside: Inside,
) -> None:
    command = ["bwrap", "--unshare-user", "--ro-bind", "/", "/", "echo", "nested"]
    assert inside(command, session_programs(nested_userns=True)[0], nested=True).stdout == "nested\n"
    refused = inside(command, session_programs()[0], nested=True)
    assert refused.stdout == ""
    assert refused.returncode == 1


PYTHON_THREADS = """
import multiprocessing, subprocess, threading
threads = [threading.Thread(target=lambda: subprocess.run(["true"], check=True)) for _ in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
with multiprocessing.get_context("fork").Pool(2) as pool: print(sum(pool.map(abs, [-1, -2])))
"""
PYTHON_SOCKETS = """
import socket
server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
socket.create_connection(server.getsockname()); socket.socketpair(); socket.socket(socket.AF_INET6)
print(len(socket.if_nameindex()) > 0)
"""
NODE = """
require("child_process").execSync("true");
new (require("worker_threads").Worker)("console.log(1+1)", {eval: true});
"""
GIT = """
git init -q r; cd r; echo a > f; git add f
git -c user.name=n -c user.email=e commit -qm message; git gc -q; git log --format=%s
"""
TMUX = """
export TERM=xterm
tmux -S ./s -f /dev/null new-session -d 'echo inside > out; sleep 5'
for i in $(seq 50); do [ -s out ] && break; sleep 0.1; done
cat out; tmux -S ./s kill-server
"""
GDB = """
printf 'int main(void) { return 7; }' > d.c; gcc -g -o d d.c
gdb -q -batch -nx -ex 'break main' -ex run -ex continue ./d > log 2>&1
grep -o -e 'Breakpoint 1, main' -e 'exited with code 07' log
"""

WORKS = {
    "bash": ("bash", "echo a | tr a b; (exit 3); echo $?; read x < <(echo sub); echo $x", "b\n3\nsub\n"),
    "git": ("git", GIT, "message\n"),
    "gcc": ("gcc", "echo 'int main(void){return 42;}' > m.c && gcc m.c -o m; ./m; echo $?", "42\n"),
    "make": ("make", "printf 'all: a b\\na b:\\n\\t@echo done\\n' > Makefile; make -s -j2", "done\ndone\n"),
    "threads": ("python3", f"python3 -c '{PYTHON_THREADS}'", "3\n"),
    "sockets": ("python3", f"python3 -c '{PYTHON_SOCKETS}'", "True\n"),
    "strace": ("strace", "strace -f -qq -e trace=execve sh -c 'true; /bin/true' 2>&1 | grep -c exec", "2\n"),
    "gdb": ("gdb", GDB, "Breakpoint 1, main\nexited with code 07\n"),
    "node": ("node", f"node -e '{NODE}'", "2\n"),
    "npm": ("npm", "npm --version | grep -c '^[0-9]'", "1\n"),
    "go": ("go", "printf 'package main\\nfunc main(){println(7)}' > m.go && go run m.go 2>&1", "7\n"),
    "tmux": ("tmux", TMUX, "inside\n"),
    "script": ("script", "script -qec 'tty | grep -c pts' /dev/null | tr -d '\\r'", "1\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKS)
def test_a_tool_works_under_the_filter(inside: Inside, name: str) -> None:
    program, script, expected = WORKS[name]
    if shutil.which(program, path="/usr/local/bin:/usr/bin:/bin") is None:
        pytest.skip(f"{program} is not installed")
    done = inside(["env", "PATH=/usr/local/bin:/usr/bin:/bin", "bash", "-c", script], session_programs()[0])
    assert done.stdout == expected, done
