#!/bin/sh
# tools/test.sh PYTHON [pytest argument…]: the whole test suite against an installed wheel.
#
# As root: nearly all of it as the ordinary account ral-test (made if there is none), then the tests marked `root` as
# root. As an ordinary user: everything but those. The tree is copied and the environment made outside the checkout,
# which another account may be unable to read (below /root) or which is hidden in sandboxes (below /tmp).
set -eu
umask 022
python=$1
shift
here=$(cd "$(dirname -- "$0")/.." && pwd -P)
account=ral-test

if [ "$(id -u)" -eq 0 ]; then
    base=/var/lib/$account
    getent passwd "$account" >/dev/null || useradd --create-home --shell /bin/sh --comment 'ral test suite' "$account"
else
    base=${XDG_CACHE_HOME:-$HOME/.cache}/$account
    account=$(id -un)
    if [ "${CI:-}" = true ]; then
        echo "ral: tests not run: CI needs root, or the tests marked root would be left out" >&2
        exit 1
    fi
fi

mkdir -p "$base"
exec 9>"$base/lock"
flock --nonblock 9 || {
    echo "ral: tests not run: another run uses $base" >&2
    exit 1
}

rm -rf "$base/src" "$base/dist"
mkdir -p "$base/src"
tar -C "$here" --exclude=./.git --exclude=./.venv --exclude=__pycache__ --exclude='./.*_cache' \
    --exclude=./helpers/ral_helpers/trampoline --exclude=./helpers/ral_helpers/holder -cf - . |
    tar -C "$base/src" --no-same-owner -xf -
chmod -R a+rX "$base/src"

sh "$here/tools/venv.sh" "$base/venv" "$python" runtime test lint build
echo "+ pip wheel; pip install ral-*.whl" >&2
"$base/venv/bin/python" -m pip wheel -qq --disable-pip-version-check --no-deps --no-build-isolation \
    --wheel-dir "$base/dist" "$base/src"
"$base/venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --no-index --force-reinstall \
    "$base"/dist/ral-*.whl

# run ACCOUNT MARKED [pytest argument…]: with a session's environment of that account, nothing of ours. The tree belongs
# to whoever runs this script, so pytest and Python write nothing into it.
run() {
    run_as=$1
    run_marked=$2
    shift 2
    run_home=$(getent passwd "$run_as" | cut -d: -f6)
    set -- env -i PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 TERM="${TERM:-dumb}" SHELL=/bin/sh \
        HOME="$run_home" USER="$run_as" LOGNAME="$run_as" PYTHONDONTWRITEBYTECODE=1 \
        HYPOTHESIS_STORAGE_DIRECTORY="$run_home/.cache/ral-hypothesis" RAL_TEST_BIN="$base/venv/bin" \
        CI="${CI:-}" RAL_SANDBOX_MUST_WORK="${RAL_SANDBOX_MUST_WORK:-}" \
        "$base/venv/bin/python" -m pytest -p no:cacheprovider -m "$run_marked" "$@"
    [ "$(id -un)" = "$run_as" ] || set -- setpriv --reuid="$run_as" --regid="$(id -g "$run_as")" --init-groups "$@"
    (cd "$base/src" && exec "$@" 9>&-)
}

status=0
echo "+ pytest -m 'not root' as $account" >&2
run "$account" 'not root' "$@" || status=$?
if [ "$(id -u)" -ne 0 ]; then
    echo "ral: not run: the tests marked root; they need: sudo make test" >&2
elif grep -rqE 'pytest\.mark\.root\b' "$base/src/tests" --include='test_*.py'; then
    echo "+ pytest -m root as root" >&2
    run root root "$@" || {
        root_status=$?
        # 5: no test was selected, which is right where arguments selected others.
        [ "$root_status" -eq 5 ] && [ $# -gt 0 ] || status=$root_status
    }
else
    echo "ral: no test is marked root" >&2
fi
exit "$status"
