#!/bin/sh
# tools/venv.sh DIR PYTHON GROUP…: a virtual environment with the requirements GROUP… of pyproject.toml. One that has
# them already is left as it is.
set -eu
umask 022
dir=$1
python=$2
shift 2
here=$(dirname -- "$0")

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || {
    echo "ral: $python is $("$python" --version); ral needs 3.11 to 3.13: make … PYTHON=/usr/bin/python3.13" >&2
    exit 1
}
wanted=$("$python" --version; "$python" "$here/requirements.py" "$@")
[ -f "$dir/requirements.txt" ] && [ "$(cat "$dir/requirements.txt")" = "$wanted" ] && exit 0

echo "+ $python -m venv $dir; pip install ($*)" >&2
"$python" -m venv --clear "$dir"
"$python" "$here/requirements.py" "$@" >"$dir/wanted.txt"
"$dir/bin/python" -m pip install -qq --disable-pip-version-check --no-input --use-pep517 \
    -r "$dir/wanted.txt"
rm "$dir/wanted.txt"
printf '%s\n' "$wanted" >"$dir/requirements.txt"
