"""The user database of a session names the system's accounts and the user, and nobody else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ral_broker.envelope.passwd import GROUP, NSSWITCH, PASSWD, Account, filter_accounts

USERS = b"""\
root:$6$salt$hash:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin
# a comment:x:5:5:::
_apt:x:999:65534::/nonexistent:/usr/sbin/nologin
alice:x:1000:1000:Alice A,,,:/home/alice:/bin/bash
bob:x:1001:1001:Bob \xff\xfe:/home/bob:/bin/zsh
short:x:3:3::
long:x:4:4::::x:y
odd:x:x5:5::/:/bin/sh
minus:x:-2:5::/:/bin/sh
+@admins::::::
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin"""
GROUPS = b"""\
root:x:0:
sudo:x:27:alice,bob,root
nogroup:x:65534:
alice:x:1000:
bob:x:1001:
build:x:2000:alice,bob
others:x:2001:alice
bad:x:12
"""
SWITCH = b"# c\npasswd:  files ldap [NOTFOUND=return] sss\n group:sss\ninitgroups: sss\nhosts: files dns\n\n"


def files(**changes: object) -> dict[bytes, bytes]:
    given_: dict[str, object] = {
        "passwd": USERS, "group": GROUPS, "nsswitch": SWITCH, "uid": 1001, "gids": {1001, 2000},
    }  # fmt: skip
    texts = filter_accounts(**(given_ | changes))  # type: ignore[arg-type]
    assert {text.why for text in texts} <= {"filter_passwd"}
    return {text.path: text.content for text in texts}


def test_users_are_the_systems_and_the_own_one() -> None:
    lines = files()[PASSWD].splitlines()
    assert [line.split(b":")[0] for line in lines] == [b"root", b"daemon", b"_apt", b"bob", b"nobody"]
    assert b"bob:x:1001:1001:Bob \xff\xfe:/home/bob:/bin/zsh" in lines
    assert b"hash" not in files()[PASSWD]


def test_groups_are_the_systems_and_the_own_ones_and_name_nobody_else() -> None:
    assert files()[GROUP].splitlines() == [
        b"root:x:0:", b"sudo:x:27:bob,root", b"nogroup:x:65534:", b"bob:x:1001:", b"build:x:2000:bob",
    ]  # fmt: skip


def test_users_and_groups_come_from_the_files_alone() -> None:
    assert files()[NSSWITCH] == b"passwd: files\ngroup: files\n# c\nhosts: files dns\n"
    assert files(nsswitch=b"")[NSSWITCH] == b"passwd: files\ngroup: files\n"


def test_a_user_of_a_directory_service_gets_a_record() -> None:
    account = Account(b"carol", 5000, b"Carol:C\n", b"/home/carol", b"/bin/bash")
    own = files(uid=70000, gids={5000, 5001}, account=account, groups=[(b"staff\n:", 5001), (b"no", 9)])
    assert own[PASSWD].splitlines()[-1] == b"carol:x:70000:5000:Carol_C_:/home/carol:/bin/bash"
    assert own[GROUP].splitlines()[-1] == b"staff__:x:5001:"
    assert b"no:x:9" not in own[GROUP]


def test_a_user_whom_nobody_knows_gets_the_number_for_a_name() -> None:
    own = files(uid=70000, gids={70001}, home=b"/home/x")
    assert own[PASSWD].splitlines()[-1] == b"70000:x:70000:70001::/home/x:/bin/sh"
    assert files(uid=70000, gids=())[PASSWD].splitlines()[-1] == b"70000:x:70000:70000::/:/bin/sh"


def test_root_is_in_the_file_already() -> None:
    assert files(uid=0, gids={0})[PASSWD].count(b":0:0:") == 1


def test_a_file_that_the_host_has_not_is_not_made() -> None:
    assert set(files(nsswitch=None)) == {PASSWD, GROUP}
    assert files(passwd=None, group=None, nsswitch=None) == {}


line = st.one_of(
    st.binary(max_size=40), st.lists(st.binary(max_size=6), min_size=4, max_size=8).map(b":".join)
)
noise = st.lists(line, max_size=12).map(b"\n".join)


@given(noise, noise, st.integers(0, 2**32 - 2), st.binary(max_size=8))
def test_whatever_the_files_hold_the_records_are_well_formed_and_the_user_is_there(
    users: bytes, groups: bytes, uid: int, name: bytes
) -> None:
    account = Account(name, 100, name, name, name)
    own = files(passwd=users, group=groups, uid=uid, gids={7}, account=account, groups=[(name, 7)])
    records = [record.split(b":") for record in own[PASSWD].split(b"\n")[:-1]]
    assert {len(record) for record in records} == {7}
    assert uid in {int(record[2]) for record in records}
    assert all(int(r[2]) < 1000 or int(r[2]) in (uid, 65534) for r in records)
    assert {len(record.split(b":")) for record in own[GROUP].split(b"\n")[:-1]} <= {4}
