#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: muon_test.sh FSDP_RUN MUON
# Muon over sharded matrices computes the same bits as one rank.
set -u
run=$(realpath "$1")
muon=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$here/../tools/tap.sh"
enter_scratch

# run_to OUT RANKS ARGUMENTS...: runs the program. If it fails, however late, it leaves no numbers.
run_to() {
  out=$1 ranks=$2
  shift 2
  "$run" -n "$ranks" --no-prefix "$muon" "$@" >"$out" 2>log || { sed 's/^/# /' log; rm -f "$out"; }
}
same() { [ -s "$1" ] && cmp -s "$1" "$2"; }
learns() { awk '/^step/ { last = $4; if (!n++) first = $4 } END { exit !(n == 4 && last < first / 4) }' "$1"; }

# These numbers come from a separate program that runs the iteration in double precision.
check 'Newton-Schulz has the numbers of the contract' equal "$("$muon" orthogonalize | head -1)" '0.29193 0.58752 -0.02985'
for way in '' whiten; do
  # shellcheck disable=SC2086
  run_to one 1 $way
  check "one rank learns ($way)" learns one
  for ranks in 2 3 4; do
    # shellcheck disable=SC2086
    run_to many $ranks $way
    check "$ranks ranks print the same ($way)" same many one
  done
done
check 'what is not an argument is refused' [ "$("$muon" nothing >/dev/null 2>&1; echo $?)" = 2 ]
finish
