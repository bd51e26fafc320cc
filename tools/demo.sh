#!/bin/sh
# tools/demo.sh RAL: what a sandboxed program can and cannot do, shown with a scratch project in the home directory of
# whoever runs this. Ends nonzero where something is not as it is said to be. Leaves nothing behind.
set -u
case $1 in
    /*) ral=$1 ;;
    *) ral=$PWD/$1 ;;
esac
home=$(getent passwd "$(id -u)" | cut -d: -f6)
project=$(mktemp -d "$home/ral-demo.XXXXXX") || exit 1
credential=$project.credential
# A broker of its own, so that one which is running already is left alone.
RAL_RUNTIME_DIR=$project.run
export RAL_RUNTIME_DIR
session=''
clean() {
    [ -z "$session" ] || "$ral" kill "$session" >/dev/null 2>&1
    "$ral" broker stop >/dev/null 2>&1
    rm -rf "$project" "$credential" "$RAL_RUNTIME_DIR"
}
trap clean EXIT
trap 'exit 130' INT TERM HUP
mkdir -m 0700 "$RAL_RUNTIME_DIR"
umask 077
echo 'token = swordfish' >"$credential"
cd "$project" || exit 1

say() { printf '\n%s\n' "$*"; }
# Shows a command of the sandbox as the user would type it, then its output and status.
sandboxed() {
    printf '$ ral run -q -- sh -c '\''%s'\''\n' "$1"
    output=$("$ral" run -q -- sh -c "$1" 2>&1 </dev/null)
    status=$?
    [ -z "$output" ] || printf '%s\n' "$output"
    printf '[status %s]\n' "$status"
}
wrong() {
    printf '\nral: the demonstration failed: %s\n' "$*" >&2
    exit 1
}

say "1. A program in a sandbox works on the project, $project:"
sandboxed 'echo "written from inside" >hello.txt'
[ "$status" -eq 0 ] || wrong "the program could not write in the project"
printf '$ cat hello.txt        # outside\n'
cat hello.txt || wrong "what it wrote is not in the project"

say '2. Everything else it can only read:'
sandboxed 'echo mine >/usr/bin/ral-demo'
[ "$status" -ne 0 ] && [ ! -e /usr/bin/ral-demo ] || wrong "a write to /usr/bin was not refused"

say "3. The rest of the home directory is not there. Outside there is a credential:"
printf '$ cat %s\n' "$credential"
cat "$credential"
sandboxed "cat $credential"
[ "$status" -ne 0 ] || wrong "the credential could be read"
sandboxed 'ls -A ~'
case $output in
    *credential* | *.ssh*) wrong "the home directory is visible" ;;
esac

say '4. It sees its own processes only:'
sandboxed 'ls -d /proc/[0-9]*'
case $output in
    *"/proc/$$"*) echo '(This host masks /proc, so processes are listed; ral doctor says so. Nothing of them can be opened.)' ;;
esac

say '5. A session in the background:'
printf '$ ral run -q -d -- sleep 60; ral sessions\n'
session=$("$ral" run -q -d -- sleep 60) || wrong "a detached session did not start"
"$ral" sessions || wrong "the sessions could not be listed"
printf '$ ral kill %s\n' "$session"
"$ral" kill "$session" || wrong "the session could not be ended"
session=''

say 'What this host enforces, and what it does not:'
printf '$ ral doctor\n'
"$ral" doctor || :
