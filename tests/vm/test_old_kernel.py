"""Debian 12's own kernel lacks calls that ral uses elsewhere: what takes their place, and what is said."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from support.facilities import lacking
from support.login import SECONDS, User, has_ended, wait_until

ABSTRACT = "ral-test-abstract"
LISTEN = f"""
import socket
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0{ABSTRACT}")
listener.listen()
print("ready", flush=True)
listener.accept()[0].sendall(b"reached")
"""
CONNECT = f"""
import socket
peer = socket.socket(socket.AF_UNIX)
peer.connect("\\0{ABSTRACT}")
print(peer.recv(99).decode())
"""
STATUS = """
import os, socket, sys
sys.path.insert(0, "/usr/local/lib/ral/lib/python3.11/site-packages")
from ral_protocol import exits, wire
peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
for message in {"t": "hello", "proto": exits.PROTOCOL, "version": exits.VERSION}, {"t": "status"}:
    peer.sendall(wire.frame(wire.pack(message)))
data = peer.recv(4096)
print(wire.unpack(data[4:]).get("message", "answered"))
"""


def test_this_kernel_is_an_old_one() -> None:
    """Else the tests of this file show nothing."""
    assert lacking("pidfd of a socket peer") is not None
    assert lacking("landlock scopes") is not None
    assert lacking("landlock") is None


def test_doctor_names_what_this_kernel_lacks_and_finds_the_user_manager(user: User) -> None:
    done = user.ral("doctor", "--json")
    assert done.status == 0, done
    found = {line["name"]: line for line in json.loads(done.stdout)}
    assert [name for name, line in found.items() if line["state"] == "problem"] == []
    assert [name for name, line in found.items() if line["state"] == "note"] == ["peers", "landlock"]
    assert "/proc" in found["peers"]["detail"]
    assert "ABI 2," in found["landlock"]["detail"]
    assert "abstract sockets" in found["landlock"]["detail"]
    assert "user manager runs" in found["systemd"]["detail"]
    assert found["runtime directory"]["detail"].startswith(str(user.runtime))
    text = user.ral("doctor").stdout.decode()
    assert text.endswith("Sessions can start.\n")
    for name in ("peers", "landlock"):
        assert f"note     {name} " in text
        assert found[name]["remedy"] in text


def test_doctor_says_who_starts_the_broker_where_there_is_no_manager(unmanaged: User) -> None:
    done = unmanaged.bare("ral doctor --json")
    assert done.status == 0, done
    found = {line["name"]: line for line in json.loads(done.stdout)}
    assert found["systemd"]["state"] == "note"
    assert "ral starts its broker itself" in found["systemd"]["detail"]
    assert found["runtime directory"]["detail"].startswith(f"/tmp/ral-{unmanaged.uid},")


def test_a_start_says_that_abstract_sockets_are_reachable_and_they_are(user: User) -> None:
    """If they were not, the sentence would have to go."""
    (user.project / "listen.py").write_text(LISTEN)
    (user.project / "connect.py").write_text(CONNECT)
    listener = user.start("/usr/bin/python3 listen.py")
    assert listener.line() == b"ready\n"
    done = user.ral("run", "--", "/usr/bin/python3", "connect.py")
    assert done[:2] == (0, b"reached\n"), done
    assert b"Landlock has ABI 2" in done.stderr
    assert b"abstract sockets" in done.stderr
    assert listener.finish().status == 0


def test_signals_stay_inside_without_landlock_too(user: User) -> None:
    """By the pid namespace. Positive control: outside the same number is a process that can be signalled."""
    outside = user.start("echo $$; exec sleep 1000")
    pid = int(outside.line())
    control = user.login(f"kill -0 {pid} && echo reached")
    assert control.stdout == b"reached\n"
    inside = user.ral("run", "-q", "--", "sh", "-c", f"kill -KILL {pid} || echo not there; kill -KILL -1")
    assert b"not there" in inside.stdout, inside
    os.kill(pid, signal.SIGTERM)
    outside.finish()


@pytest.mark.parametrize(
    ("namespaces", "named"),
    [
        ((), "answered"),
        (("--user", "--map-root-user"), "user namespace"),
        (("--user", "--map-root-user", "--mount"), "user namespace"),
        (("--user", "--map-root-user", "--pid", "--fork"), "user namespace"),
    ],
)
def test_a_peer_from_another_namespace_is_refused(
    user: User, namespaces: tuple[str, ...], named: str
) -> None:
    assert user.ral("run", "-q", "--", "true").status == 0
    (user.project / "ask.py").write_text(STATUS)
    prefix = " ".join(("unshare", *namespaces, "--")) if namespaces else ""
    done = user.login(f"{prefix} /usr/bin/python3 -I ask.py {user.runtime}/control.sock")
    assert named in done.stdout.decode(), done


@pytest.mark.parametrize(("namespace", "named"), [("--mount", "other mounts"), ("--pid", "pid namespace")])
def test_a_peer_in_the_users_own_namespace_with_other_mounts_or_pids_is_refused(
    user: User, namespace: str, named: str
) -> None:
    """Only root makes these without a user namespace: a service with PrivateTmp, a container."""
    assert user.ral("run", "-q", "--", "true").status == 0
    (user.project / "ask.py").write_text(STATUS)
    done = subprocess.run(
        ["unshare", namespace, "--fork", "setpriv", f"--reuid={user.uid}", f"--regid={user.uid}",
         "--init-groups", "/usr/bin/python3", "-I", str(user.project / "ask.py"),
         str(user.runtime / "control.sock")],
        capture_output=True, check=False, timeout=SECONDS, cwd="/",
    )  # fmt: skip
    assert named in done.stdout.decode(), done


def test_a_service_with_private_tmp_is_refused_and_told_what_to_do(user: User) -> None:
    assert user.ral("run", "-q", "--", "true").status == 0
    done = subprocess.run(
        ["systemd-run", "--quiet", "--pipe", "--wait", "-p", f"User={user.name}", "-p", "PrivateTmp=yes",
         "-p", f"WorkingDirectory={user.project}", "/usr/local/bin/ral", "run", "-q", "--", "true"],
        capture_output=True, check=False, timeout=SECONDS, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 78, done
    assert b"PrivateTmp" in done.stderr
    assert b"RAL_RUNTIME_DIR" in done.stderr


ATTACH = """
import socket, sys
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.settimeout(10)
peer.connect(sys.argv[1])
peer.send(b"A" + bytes([1, 24, 0, 80, 0, 0, 0, 0, 0]))
print(peer.recv(9)[:2])
"""


def test_the_holder_refuses_a_peer_from_another_namespace(user: User) -> None:
    started = user.ral("run", "-d", "-q", "--", "sh", "-c", "echo secret; sleep 1000")
    session = started.stdout.decode().strip()
    (user.project / "attach.py").write_text(ATTACH)
    ask = f"/usr/bin/python3 -I attach.py {user.runtime}/sessions/{session}.sock"
    assert user.login(ask).stdout == b"b'H\\x00'\n"
    refused = user.login(f"unshare --user --map-root-user {ask}")
    assert b"H" not in refused.stdout, refused
    assert user.login(ask).stdout == b"b'H\\x00'\n"


def test_a_client_that_is_killed_takes_its_session_along(user: User) -> None:
    login = user.start("ral run -q -- sh -c 'trap \"\" HUP TERM; echo ready; while :; do sleep 1; done'")
    assert login.line() == b"ready\n"
    (line,) = user.sessions().values()
    clients = subprocess.run(
        ["pgrep", "-u", user.name, "-f", "ral_client/.*start[.]"], capture_output=True, check=True
    )
    for pid in clients.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    pid_1 = line["pid"]
    assert isinstance(pid_1, int)
    wait_until(lambda: has_ended(pid_1), "pid 1 of the sandbox has ended")
    login.finish()
    assert user.sessions() == {}
