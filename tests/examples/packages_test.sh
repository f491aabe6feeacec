#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: packages_test.sh SOURCE_ROOT
# Tests tools/dev/packages.sh on a made-up system: commands at the front of PATH replace dpkg-query, id, apt-get and
# sudo.
set -u
root=$(realpath "$1")
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$(dirname "$0")/../tools/tap.sh"
enter_scratch

# stub NAME: makes a command, and reads its body from standard input.
stub() {
  { echo '#!/bin/sh'; cat; } >"$work/$1"
  chmod +x "$work/$1"
}
stub dpkg-query <<'S'
for package; do :; done
[ "$package" != absent ] && echo installed
S
stub id <<'S'
echo "${FAKE_ID:-0}"
S
# The stub prints its command and does not run it.
stub apt-get <<'S'
echo "apt-get $*"
[ -z "${FAKE_FAILURE:-}" ]
S
stub sudo <<'S'
echo sudo
exec "$@"
S

# need ARGUMENTS...: runs the script, and sets $out and $status.
need() {
  out=$(PATH=$work:$PATH sh -c '. "$0"; need_packages "$@"' "$root/tools/dev/packages.sh" "$@" 2>&1 </dev/null)
  status=$?
}
unset FAKE_ID FAKE_FAILURE

need present another
check 'nothing is missing: silent' equal "$out" ''
check 'and successful' equal $status 0
need present absent
check 'as root: prints the line' contains "$out" '+ apt-get update && env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends absent'
# The commands that ran follow this line, one per line.
check 'and runs it' contains "$out" 'apt-get update
apt-get install -y --no-install-recommends absent'
check 'successfully' equal $status 0
export FAKE_ID=1000
need absent
check 'another user without a terminal: prints the line' contains "$out" '+ sudo apt-get update'
check 'does not run it' lacks "$out" 'sudo
apt-get'
check 'and fails' equal $status 1
need -y absent
check 'with -y: runs it by sudo' contains "$out" 'sudo
apt-get update
sudo
apt-get install -y --no-install-recommends absent'
check 'and succeeds' equal $status 0
export FAKE_FAILURE=1
need -y absent
check 'a failure of apt-get is one of ours' equal $status 1
finish
