#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: moe_test.sh FSDP_RUN MOE
# Experts on meshes of their own compute the same bits as one rank with all experts.
set -u
run=$(realpath "$1")
moe=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$here/../tools/tap.sh"
enter_scratch

# run_to OUT COMMAND...: runs the command. If it fails, however late, it leaves no numbers.
run_to() {
  out=$1
  shift
  "$@" >"$out" 2>log || { sed 's/^/# /' log; rm -f "$out"; }
}
lines() { cat "$1" 2>/dev/null; }
same_lines() { [ -s one ] && equal "$(lines "$1")" "$(lines one)"; }
learns() {
  awk '/^step/ { n += 1; last = $4; if (n == 1) first = $4 } END { exit !(n == 20 && first > 4 && last < 0.5) }' "$1"
}
uses_all_experts() { awk '/^tokens/ { n = NF - 4; for (i = 5; i <= NF; ++i) if ($i < 100) n = 0 } END { exit n != 4 }' "$1"; }

run_to one "$moe" --ranks 1
check 'one rank learns' learns one
check '... with all four experts' uses_all_experts one
for ranks in 2 4; do
  run_to threads "$moe" --ranks $ranks
  check "$ranks threads, each with a half of the experts, print the same" same_lines threads
  run_to dense "$moe" --ranks $ranks --expert-parallel 1
  check "$ranks threads, each with all experts, print the same" same_lines dense
done
run_to processes "$run" -n 4 --no-prefix "$moe"
check '4 processes print the same' same_lines processes

# A checkpoint has whole stacks of experts, which other ranks divide differently.
run_to before "$moe" --ranks 4 --steps 12 --save saved
weights() { lines "$1" | grep '^weights'; }
same_end() { [ -n "$(weights "$1")" ] && equal "$(lines "$1" | grep '^step 20'; weights "$1")" "$(grep '^step 20' one; weights one)"; }
for rest in '1' '2' '4 --expert-parallel 1' '4'; do
  # shellcheck disable=SC2086
  run_to after "$moe" --load saved --steps 8 --ranks $rest
  check "a checkpoint of 4 ranks goes on with --ranks $rest" same_end after
done

# refuses MESSAGE FLAGS...: expects status 2 and the message.
refuses() {
  message=$1
  shift
  "$moe" "$@" >log 2>&1
  equal $? 2 && contains "$(cat log)" "$message"
}
check 'refuses ranks that do not share the parts' refuses 'ranks 3, expert-parallel 2' --ranks 3
check 'refuses more parts of the experts than ranks' refuses 'ranks 1, expert-parallel 2' --ranks 1 --expert-parallel 2
check 'refuses an unknown option' refuses 'usage: moe' --experts 3
finish
