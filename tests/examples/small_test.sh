#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: small_test.sh FSDP_RUN EXAMPLES_FOLDER
# Compares each example's output with expected/NAME.txt. The output is sorted, because ranks may print in any order.
set -u
run=$(realpath "$1")
examples=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$here/../tools/tap.sh"

# output COMMAND...: prints the sorted output, and a line with the status if that is not 0.
output() {
  {
    "$@" 2>&1
    status=$?
    [ $status -eq 0 ] || echo "status $status"
  } | LC_ALL=C sort
}

for name in hello_rank shard_and_gather own_optimizer flat_step frozen_base fused pipeline_1f1b; do
  check "$name with 2 processes" equal "$(output "$run" -n 2 --no-prefix "$examples/$name")" "$(cat "$here/expected/$name.txt")"
done
check 'hello_rank with 2 threads' equal "$(output "$examples/hello_rank" 2)" "$(cat "$here/expected/hello_rank.txt")"
# On one rank, and on more ranks than divide anything, only the last line is the same. ends_well COMMAND...: expects
# that line, and status 0.
ends_well() {
  found=$(output "$@")
  lacks "$found" 'status ' && contains "$found" "$last"
}
for name in shard_and_gather own_optimizer flat_step frozen_base fused pipeline_1f1b; do
  last=$(grep "^$name: ok, ." "$here/expected/$name.txt") || echo "# no last line in expected/$name.txt"
  [ $name = pipeline_1f1b ] || check "$name alone" ends_well "$examples/$name"
  check "$name with 3 processes" ends_well "$run" -n 3 --no-prefix "$examples/$name"
done
# In debug mode a layer that keeps a view too long reads NaN.
kept=$(output "$run" -n 2 --debug --no-prefix "$examples/fused" --keep)
check 'debug mode shows a view that is kept too long' equal "$kept" \
  'fused: while it was held the weight was -1.250, after the reshard the view shows NaN'
# A training that is saved and continued ends with the same last digits as one without a break.
enter_scratch
for name in own_optimizer frozen_base; do
  steps=150
  [ $name = frozen_base ] && steps=400
  expected=$(output "$run" -n 2 --no-prefix "$examples/$name" "$name-straight" $steps)
  first=$(output "$run" -n 2 --no-prefix "$examples/$name" "$name" 60)
  check "$name is saved" equal "$first" "$name: saved after step 60"
  check "... as that step" equal "$(ls "$name")" step-0000000060
  check '... and goes on' equal "$(output "$run" -n 2 --no-prefix "$examples/$name" "$name" $steps)" "$expected"
  check '... as it would have' contains "$expected" "$name: ok, "
done
# The model's folder was written by another library. Any number of ranks gives the logits that check.py computes without
# the library.
source=$here/../../examples/load_hf
check 'make_folder.py makes a folder' python3 "$source/make_folder.py" gpt2
"$run" -n 1 --no-prefix "$examples/load_hf" gpt2 5 17 42 95 0 >logits 2>&1
logits_are_right() {
  python3 "$source/check.py" gpt2 logits 5 17 42 95 0 >checked 2>&1
  status=$?
  sed 's/^/# /' checked
  return $status
}
check 'load_hf computes the right logits' logits_are_right
expected=$(cat logits)
for ranks in 2 3; do
  check "... the same on $ranks ranks" equal "$("$run" -n $ranks --no-prefix "$examples/load_hf" gpt2 5 17 42 95 0 2>&1)" "$expected"
done
rm gpt2/model-00002-of-00002.safetensors
check 'load_hf names the file that is missing' contains "$("$run" -n 2 --no-prefix "$examples/load_hf" gpt2 5 2>&1)" \
  'gpt2/model-00002-of-00002.safetensors: cannot be opened: No such file'
finish
