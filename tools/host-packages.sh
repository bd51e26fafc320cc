#!/bin/sh
# Installs what building and running ral needs from the distribution, if anything of it is missing. Prints the command
# before it runs it; as an ordinary user through sudo.
set -eu

packages='bubblewrap gcc libc6-dev make pkg-config libsystemd-dev libseccomp2 python3 python3-dev python3-venv'

if ! command -v dpkg-query >/dev/null; then
    missing=''
    for tool in bwrap gcc pkg-config python3; do
        command -v "$tool" >/dev/null || missing="$missing $tool"
    done
    [ -z "$missing" ] && exit 0
    echo "ral: missing here:$missing; install what Debian calls $packages" >&2
    exit 1
fi

missing=''
for package in $packages; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || :) in
        installed) ;;
        *) missing="$missing $package" ;;
    esac
done
[ -z "$missing" ] && exit 0

as_root=''
if [ "$(id -u)" -ne 0 ]; then
    as_root='sudo '
    if ! command -v sudo >/dev/null; then
        echo "ral: missing here:$missing; as root: apt-get install$missing" >&2
        exit 1
    fi
fi
install() {
    echo "+ ${as_root}apt-get install -y --no-install-recommends$missing" >&2
    # shellcheck disable=SC2086  # lists of words
    ${as_root}env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
}
update() {
    echo "+ ${as_root}apt-get update" >&2
    ${as_root}apt-get update -qq
}

# Lists that are missing or too old name packages that the archive does not have.
if ls /var/lib/apt/lists/*_Packages* >/dev/null 2>&1; then
    install || { update && install; }
else
    update && install
fi
