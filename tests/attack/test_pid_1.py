"""What a hostile program can do to pid 1 of its sandbox: nothing that ends it or tells a false end."""

from __future__ import annotations

import os
import re
import resource
import time
from pathlib import Path

import pytest

from ral_broker.envelope.warrant import Warrant, encode
from support.native import (
    Sandbox,
    run,
)
from support.running import ON_TERMINAL, PATH, PYTHON, Running, Typed, python, shell

pytestmark = [pytest.mark.attack, pytest.mark.needs("bubblewrap", "fresh /proc")]


def attack(script: str) -> list[str]:
    """Output lines of a hostile program, which has to end by itself with 77."""
    ran = run(python("import ctypes,os,signal,sys,time\nC=ctypes.CDLL(None,use_errno=True)\n" + script))
    assert ran.status == 77, ran
    return ran.stdout.decode().splitlines()


def test_signals_from_inside_do_not_end_pid_1() -> None:
    script = (
        "for n in range(1,65):\n"
        "  signal.signal(n,signal.SIG_IGN) if n not in (9,19,17,32,33) else None\n"
        "for _ in range(20):\n"
        "  for n in range(1,65): os.kill(1,n)\n"
        "child=os.fork()\n"
        "if not child: time.sleep(100)\n"
        "os.kill(child,9); print('control',os.waitpid(child,0)[1])\n"
        "time.sleep(.2); print(open('/proc/1/stat').read().split()[2] in 'SR'); os._exit(77)\n"
    )
    assert attack(script) == ["control 9", "True"]


PTRACE = (
    "def attach(pid):\n"
    "  C.ptrace.argtypes=[ctypes.c_long]*4; ctypes.set_errno(0)\n"
    "  r=C.ptrace(16,pid,0,0)\n"  # PTRACE_ATTACH
    "  return r, ctypes.get_errno()\n"
    "child=os.fork()\n"
    "if not child:\n"
    "  while True: time.sleep(1)\n"
    "time.sleep(.1)\n"
)


def test_pid_1_cannot_be_traced() -> None:
    script = PTRACE + "print(attach(child)[0]); print(attach(1)); os._exit(77)\n"
    assert attack(script) == ["0", "(-1, 1)"]


def test_nothing_of_pid_1_can_be_read() -> None:
    script = PTRACE + (
        "def tried(pid,name):\n"
        "  path=f'/proc/{pid}/{name}'\n"
        "  try:\n"
        "    if name in ('fd/0','cwd','exe','root','ns/mnt'): os.readlink(path)\n"
        "    else:\n"
        "      f=os.open(path,os.O_RDWR if name=='mem' else os.O_RDONLY)\n"
        "      if name!='mem': os.read(f,1)\n"
        "    return 'open'\n"
        "  except PermissionError: return 'refused'\n"
        "  except OSError: return 'open'\n"
        "names=['environ','mem','fd/0','cwd','exe','root','maps','auxv','ns/mnt','io','syscall','pagemap']\n"
        "names=[n for n in names if os.path.lexists(f'/proc/{child}/{n}')]\n"
        "print({tried(child,n) for n in names if n not in ('syscall',)}, len(names)>8)\n"
        "print({n: r for n in names if (r:=tried(1,n))!='refused'})\n"
        "os._exit(77)\n"
    )
    assert attack(script) == ["{'open'} True", "{}"]


def test_descriptors_of_pid_1_cannot_be_taken() -> None:
    script = PTRACE + (
        "def take(pid,n):\n"
        "  p=os.pidfd_open(pid); ctypes.set_errno(0)\n"
        "  return C.syscall(438,p,n,0)>=0, ctypes.get_errno()\n"  # pidfd_getfd
        "print(take(child,0)); print({take(1,n) for n in (0,1,2,3,4,5,100)}); os._exit(77)\n"
    )
    assert attack(script) == ["(True, 0)", "{(False, 1)}"]


def test_limits_of_pid_1_set_to_nothing_change_nothing() -> None:
    """prlimit(2) asks for the same uid only, so this works; pid 1 needs nothing any more."""
    script = (
        "import resource\n"
        "done=[]\n"
        "for n in range(16):\n"
        "  if n==resource.RLIMIT_CPU: continue\n"
        "  try: resource.prlimit(1,n,(0,0)); done.append(n)\n"
        "  except (PermissionError,ValueError): pass\n"
        "print(len(done)>10)\n"
        "for _ in range(50):\n"
        "  if not os.fork():\n"
        "    if not os.fork(): os._exit(0)\n"
        "    os._exit(0)\n"
        "  os.wait()\n"
        "for n in (10,12,28,15,1): signal.signal(n,signal.SIG_IGN)\n"
        "for n in (10,12,28,15,1)*100: os.kill(1,n)\n"
        "time.sleep(.2); os._exit(77)\n"
    )
    assert attack(script) == ["True"]


def test_flood_of_processes_and_signals_keeps_the_lease_in_force() -> None:
    script = (
        "import os,signal\n"
        "for n in (10,12,28,15,1,2,3,18,20): signal.signal(n,signal.SIG_IGN)\n"
        "print('up',flush=True)\n"
        "for _ in range(2):\n"
        "  if not os.fork():\n"
        "    while True:\n"
        "      if not os.fork():\n"
        "        if not os.fork(): os._exit(0)\n"
        "        os._exit(0)\n"
        "      os.wait()\n"
        "while True:\n"
        "  for n in (10,12,28,17): os.kill(1,n)\n"
    )
    with Running(python(script)) as running:
        assert running.line() == b"up"
        time.sleep(0.5)
        assert not running.sandbox.ended(0)
        running.sandbox.lease.close()
        assert running.sandbox.ended(1)


def test_program_without_processes_left_cannot_stop_its_end() -> None:
    script = (
        "import os,time\n"
        "n=0\n"
        "try:\n"
        "  while n<400:\n"
        "    if not os.fork():\n"
        "      time.sleep(1000)\n"
        "    n+=1\n"
        "except BlockingIOError: print('exhausted',flush=True)\n"
        "os._exit(77)\n"
    )
    argv = (PYTHON.encode(), b"-I", b"-c", script.encode())
    limits = ((resource.RLIMIT_NPROC, 60, 60),)
    ran = run(encode(Warrant(argv=argv, environment=(PATH,), limits=limits)))
    assert ran.status == 77
    if os.getuid() != 0:
        assert ran.stdout == b"exhausted\n"


def test_program_cannot_report_an_end_and_go_on() -> None:
    """Ends of others, of the leading thread, of a parent in between: none is the program's."""
    script = (
        "import threading\n"
        "print('begin',flush=True)\n"
        # an orphan that ends with a status of its own
        "if not os.fork():\n"
        "  if not os.fork(): time.sleep(.1); os._exit(3)\n"
        "  os._exit(0)\n"
        "os.wait(); time.sleep(.3)\n"
        # traced by pid 1, which knows nothing of it
        "if not os.fork():\n"
        "  if not os.fork():\n"
        "    time.sleep(.1); C.ptrace(0,0,0,0); os.kill(os.getpid(),9)\n"
        "  os._exit(0)\n"
        "os.wait(); time.sleep(.3)\n"
        "os.kill(1,17); time.sleep(.1)\n"
        "def last():\n"
        "  time.sleep(.5); print('last',flush=True); os._exit(77)\n"
        "threading.Thread(target=last).start()\n"
        # only the leading thread ends: exit, not exit_group
        "C.syscall({'x86_64':60}.get(os.uname().machine,93),0)\n"
    )
    assert attack(script) == ["begin", "last"]


def test_program_that_asks_to_be_traced_is_still_ended_by_the_lease() -> None:
    script = (
        "import ctypes,os,time\nprint('up',flush=True)\n"
        "ctypes.CDLL(None).ptrace(0,0,0,0)\nos.kill(os.getpid(),10)\nwhile True: time.sleep(1)\n"
    )
    with Running(python(script)) as running:
        assert running.line() == b"up"
        time.sleep(0.2)
        assert not running.sandbox.ended(0)
        running.sandbox.lease.close()
        assert running.sandbox.ended(1)


def test_giving_up_the_terminal_does_not_confuse_pid_1() -> None:
    script = (
        "import fcntl,os,termios,time\n"
        "print('up',flush=True)\n"
        "fcntl.ioctl(0,termios.TIOCNOTTY)\n"
        "if not os.fork():\n"
        "  os.setsid()\n"
        "  try: fcntl.ioctl(0,termios.TIOCSCTTY,1)\n"
        "  except PermissionError: print('not stolen',flush=True)\n"
        "  os._exit(0)\n"
        "os.wait(); os.closerange(0,3); time.sleep(.3); os._exit(12)\n"
    )
    with Sandbox(python(script, terminals=ON_TERMINAL)) as sandbox:
        typed = Typed(sandbox)
        typed.expect(rb"up.*not stolen")
        assert sandbox.wait() == 12


@pytest.mark.root
def test_pid_1_keeps_nothing_of_the_caller() -> None:
    """Pid 1 is not dumpable: its descriptors are root's to see."""
    with Running(shell("echo up; exec sleep 100")) as running:
        assert running.line() == b"up"
        pids = Path(f"/proc/{running.sandbox.pid}/task/{running.sandbox.pid}/children").read_text().split()
        links = {os.readlink(f"/proc/{pids[0]}/fd/{name}") for name in os.listdir(f"/proc/{pids[0]}/fd")}
        pipe = os.readlink(f"/proc/self/fd/{running.out.read_end}")
        assert pipe not in links
        assert {re.sub(r"\d+", "N", link) for link in links} == {
            "/dev/null", "/memfd:errors (deleted)", "socket:[N]", "anon_inode:[signalfd]"
        }  # fmt: skip
