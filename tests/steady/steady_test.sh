#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: steady_test.sh FSDP_RUN TRAIN_GPT HOOKS
# From step 3 on a training process allocates nothing, meets no page fault and opens no descriptor. Counted from
# outside, by HOOKS in front of the whole process: the library and the example together.
set -u
run=$(realpath "$1")
train_gpt=$(realpath "$2")
hooks=$(realpath "$3")
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$here/../tools/tap.sh"
enter_scratch
export OPENBLAS_NUM_THREADS=1
# Progress and JSON are written in every step, so that their cost counts too.
small="--layers 3 --width 64 --heads 4 --context 32 --batch 12 --steps 20 --json out.json --corpus $here"

# train RANKS FLAGS...: as processes, or as threads where RANKS is threads:N. Leaves the hooks' lines in counts.
train() {
  ranks=$1
  shift
  # shellcheck disable=SC2086
  case $ranks in
    threads:*) LD_PRELOAD=$hooks "$train_gpt" --threads "${ranks#threads:}" $small "$@" >log 2>&1 ;;
    *) LD_PRELOAD=$hooks "$run" -n "$ranks" --no-prefix "$train_gpt" $small "$@" >log 2>&1 ;;
  esac || sed 's/^/# /' log
  grep '^steady_hooks: rank' log | sort >counts
}

# quiet PROCESSES STEPS: so many lines, and nothing was counted but steps and page faults.
quiet() {
  expected=$(for _ in $(seq "$1"); do
    echo "steps $2 allocations 0 frees 0 maps 0 descriptors 0 threads 0 open +0"
  done)
  equal "$(sed 's/.*rank [^ ]* //; s/ faults .*//' counts)" "$expected"
}
# The kernel may move a page on its own and have the process fault on it: once, not in each of three runs.
faultless() {
  for _ in 1 2 3; do
    grep -v ' faults 0 ' counts >faulted || return 0
    sed 's/^/# /' faulted
    train "$@"
  done
  return 1
}
planned() { awk '$21 != $23 || !($23 > 0) { print "# " $0; bad = 1 } END { exit bad || NR != 2 }' counts; }
steady() {
  train 2 "$@"
  check "no allocation, no descriptor: $*" quiet 2 18
  check "no page fault: $*" faultless 2 "$@"
  check "the library has what it planned, no more: $*" planned
}

STEADY_FIRST=0 train 2
# shellcheck disable=SC2016
check 'the hooks see what a start costs' awk '
  !($7 > 100 && $9 > 100 && $11 > 10 && $13 > 0 && $15 > 0 && $17 > 0 && $19 > 100) { print "# " $0; bad = 1 }
  END { exit bad || NR != 2 }' counts

for strategy in no_shard optim optim_grads optim_grads_params; do
  for mode in mapped copied; do
    steady --strategy $strategy --unshard $mode
  done
done
steady --microbatches 3
steady --microbatches 3 --reduce-last
steady --recompute --tied
steady --compute-dtype bf16 --reduce-dtype bf16
steady --no-overlap
steady --trace trace.json
# Two ranks of 20 steps end 40: the first may be done with everything while the other ends its last.
export STEADY_FIRST=4 STEADY_LAST=38
# OpenBLAS maps a buffer when for the first time two threads are inside it at once, which may come late: not in each of
# three runs.
quiet_threads() {
  for _ in 1 2 3; do
    train threads:2
    quiet 1 34 && return 0
  done
  return 1
}
check 'no allocation, no descriptor: threads' quiet_threads
check 'no page fault: threads' faultless threads:2
finish
