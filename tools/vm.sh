#!/bin/sh
# tools/vm.sh PYTHON [pytest argument…]: boots a Debian 12 with systemd as PID 1 and its own kernel (6.1), in which ral
# is installed as `make install` does it, and runs tests/vm/run there. No KVM is needed. Without arguments everything
# that runs there; with arguments pytest gets those instead, as root in the machine: tests/vm -k journal.
#
# The base system is made once for each list of packages and kept in RAL_VM_CACHE (/var/cache/ral-vm); remove that
# directory to have it made anew. One run at a time; the machine has no network. The last run leaves its console, its
# journal and JUnit files in results/ there.
set -eu
umask 022
python=$1
shift
here=$(cd "$(dirname -- "$0")/.." && pwd -P)
cache=${RAL_VM_CACHE:-/var/cache/ral-vm}
# What a user of ral has installed, then what the tests need.
packages=linux-image-cloud-amd64,systemd-sysv,dbus-user-session,libpam-systemd,bubblewrap,python3,libseccomp2
packages=$packages,passwd,login,procps,util-linux,gcc,libc6-dev,git,strace,tmux
suite=bookworm
minutes=20

die() {
    echo "ral: the virtual machine was not run: $*" >&2
    exit 1
}
[ "$(id -u)" -eq 0 ] || die "its image is made by root; run: sudo make test-vm"
[ "$(uname -m)" = x86_64 ] || die "its kernel is for x86_64, and this is $(uname -m)"

missing=''
for package in e2fsprogs make mmdebstrap qemu-system-x86; do
    case $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || :) in
        installed) ;;
        *) missing="$missing $package" ;;
    esac
done
if [ -n "$missing" ]; then
    echo "+ apt-get install -y --no-install-recommends$missing" >&2
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null || {
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
    }
fi

# The tree has set-user-id programs of another system: nobody but root is to reach them.
mkdir -p "$cache"
chmod 0700 "$cache"
exec 9>"$cache/lock"
flock --nonblock 9 || die "another run uses $cache"
work=$cache/work
rm -rf "$work"
trap 'rm -rf "$work"' EXIT
mkdir "$work"

# Only what a machine without other hardware needs, or unpacking it takes a processor without KVM longer than the rest
# of its start. A machine-id, or the first start would enable every unit there is.
base=$cache/base-$( (echo "$suite $packages"; sed -n '/^make_base/,/^}/p' "$0") | sha256sum | cut -c 1-16)
make_base() {
    mmdebstrap --quiet --variant=minbase --format=directory --include="$packages" \
        --aptopt='Acquire::Languages "none"' \
        --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        --essential-hook='mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/usr/share/initramfs-tools/modules.d"' \
        --essential-hook='echo MODULES=list >"$1/etc/initramfs-tools/conf.d/ral"' \
        --essential-hook='printf "%s\n" virtio_pci virtio_blk ext4 >"$1/usr/share/initramfs-tools/modules.d/ral"' \
        --customize-hook='tr -d - </proc/sys/kernel/random/uuid >"$1/etc/machine-id"' \
        --customize-hook='echo ral-vm >"$1/etc/hostname"; echo "127.0.0.1 localhost ral-vm" >"$1/etc/hosts"' \
        "$suite" "$1"
}
if [ ! -d "$base" ]; then
    echo "+ mmdebstrap $suite" >&2
    rm -rf "$cache"/base-*
    make_base "$work/base"
    mv "$work/base" "$base"
fi
# Compiled modules and the interpreter's name in the environment are for one version.
version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
[ -x "$base/usr/bin/$version" ] || die "$suite has no $version; run: make test-vm PYTHON=/usr/bin/python3.11"

mkdir "$work/src" "$work/root"
tar -C "$here" --exclude=./.git --exclude=./.venv --exclude=__pycache__ --exclude='./.*_cache' \
    --exclude=./helpers/ral_helpers/trampoline --exclude=./helpers/ral_helpers/holder -cf - . |
    tar -C "$work/src" --no-same-owner -xf -
chmod -R a+rX "$work/src"
echo "+ make install" >&2
make -s -C "$work/src" install PYTHON="$python" DESTDIR="$work/root" >&2

wanted=$("$python" --version; "$python" "$here/tools/requirements.py" test)
if [ ! -f "$cache/site/requirements.txt" ] || [ "$(cat "$cache/site/requirements.txt")" != "$wanted" ]; then
    echo "+ pip install (test)" >&2
    rm -rf "$cache/site"
    "$python" "$here/tools/requirements.py" test >"$work/wanted.txt"
    "$work/root/usr/local/lib/ral/bin/python" -m pip install -qq --disable-pip-version-check --no-input \
        --target "$cache/site" -r "$work/wanted.txt"
    printf '%s\n' "$wanted" >"$cache/site/requirements.txt"
fi

# A copy that shares its files with the base: none of them may be written to, only replaced.
echo "+ mke2fs; qemu-system-x86_64" >&2
cp -al "$base" "$work/tree"
cp -a --remove-destination "$work/root/." "$work/tree/"
mkdir -p "$work/tree/opt/ral-test"
mv "$work/src" "$work/tree/opt/ral-test/src"
cp -al "$cache/site" "$work/tree/opt/ral-test/site"
for argument in "$@"; do
    printf '%s\0' "$argument"
done >"$work/tree/opt/ral-test/arguments"
install -m 0644 "$here/tests/vm/ral-test.service" "$work/tree/etc/systemd/system/ral-test.service"
ln -s ../ral-test.service "$work/tree/etc/systemd/system/multi-user.target.wants/ral-test.service"
mke2fs -q -t ext4 -O ^has_journal -d "$work/tree" "$work/disk" 4G
cp "$work"/tree/boot/vmlinuz-* "$work/vmlinuz"
cp "$work"/tree/boot/initrd.img-* "$work/initrd"
rm -rf "$work/tree" "$work/root"
truncate -s 256M "$work/answer"

results=$cache/results
rm -rf "$results"
mkdir "$results"
# Not KVM by itself where there is one: nested in another virtual machine it may be there and not work. Its processors
# work for real: other users of this one go first.
nice -n 10 timeout --foreground --kill-after=10 "$((minutes * 60))" qemu-system-x86_64 \
    -accel "${RAL_VM_ACCEL:-tcg,thread=multi}" -cpu max -smp 2 -m 1536 -nodefaults -no-user-config -no-reboot -display none \
    -kernel "$work/vmlinuz" -initrd "$work/initrd" \
    -append 'root=/dev/vda rw console=ttyS0 quiet loglevel=3 mitigations=off systemd.show_status=no
        systemd.mask=serial-getty@ttyS0.service systemd.mask=apt-daily.timer systemd.mask=apt-daily-upgrade.timer' \
    -drive "file=$work/disk,if=virtio,format=raw,cache=unsafe" \
    -drive "file=$work/answer,if=virtio,format=raw,cache=unsafe" \
    -serial stdio </dev/null 9>&- | sed -u 's,\r$,,' | tee "$results/console.txt"

tar -C "$results" -xf "$work/answer" 2>/dev/null || :
if [ ! -f "$results/status" ]; then
    echo "ral: the virtual machine ended, or was ended after $minutes minutes, without a result;" \
        "see $results/console.txt" >&2
    exit 1
fi
exit "$(cat "$results/status")"
