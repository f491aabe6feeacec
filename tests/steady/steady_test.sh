#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: steady_test.sh FSDP_RUN TRAIN_GPT HOOKS
# From step 3 on a training process allocates nothing, has no page fault and opens no descriptor. HOOKS, loaded in front
# of the process, counts this for the library and the example together. judge.py handles long waits on a busy machine.
# If it cannot judge a run, the program is run again.
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
most_runs=20

# train COUNTS RANKS FLAGS...: trains with processes, or with threads if RANKS is threads:N. Leaves the hooks' lines in
# COUNTS, or no lines if the run failed.
train() {
  counts=$1
  ranks=$2
  shift 2
  : >"$counts"
  # shellcheck disable=SC2086
  case $ranks in
    threads:*) LD_PRELOAD=$hooks "$train_gpt" --threads "${ranks#threads:}" $small "$@" >log 2>&1 ;;
    *) LD_PRELOAD=$hooks "$run" -n "$ranks" --no-prefix "$train_gpt" $small "$@" >log 2>&1 ;;
  esac || { sed 's/^/# /' log; return; }
  grep '^steady_hooks: rank' log >"$counts"
}

# said WHAT PROCESSES STEPS: judge.py reports this of all runs so far.
said() { python3 "$here/judge.py" "$@" run.*; }
# is_open WHAT PROCESSES STEPS: judge.py says that another run is needed.
is_open() {
  said "$@" >judged
  [ $? -eq 3 ]
}
# steady RANKS PROCESSES STEPS FLAGS...
steady() {
  ranks=$1 processes=$2 steps=$3
  shift 3
  rm -f run.*
  for number in $(seq $most_runs); do
    train "run.$number" "$ranks" "$@"
    is_open counts "$processes" "$steps" || is_open faults "$processes" "$steps" || break
  done
  [ "$number" -eq 1 ] || echo "# $number runs: $ranks $*"
  check "no allocation, no descriptor: $ranks $*" said counts "$processes" "$steps"
  check "no page fault: $ranks $*" said faults "$processes" "$steps"
}
steady_processes() {
  steady 2 2 18 "$@"
  check "the library has what it planned, no more: $*" said memory 2 18
}

# These cases test the hooks themselves, and judge.py.
STEADY_FIRST=0 train start 2
# shellcheck disable=SC2016
check 'the hooks see what a start costs' awk '
  $5 == 1 && $9 > 100 && $11 > 100 && $13 > 10 && $15 > 0 && $17 > 0 && $19 > 0 && $21 > 100 { ++starts }
  $5 == 1 { print "# " $0 }
  END { exit starts != 2 || NR != 40 }' start
# step NUMBER MS ALLOCATIONS FAULTS ALLOCATED
step() {
  echo "steady_hooks: rank 0 step $1 ms $2 allocations $3 frees 0 maps 0 descriptors 0 threads 0 open 0 faults $4" \
    "allocated $5 planned 8"
}
# judges STATUS WHAT: judges the files run.*, of one process with two steps.
judges() {
  said "$2" 1 2 >judged
  equal $? "$1"
}
{ step 3 9 1 0 8; step 4 9 0 0 8; } >run.1
check 'an allocation of a quick step counts' judges 1 counts
{ step 3 100 1 2 8; step 4 100 0 0 8; } >run.1
check 'one of a slow step does not, but another run must show the step' judges 3 counts
check 'so it is with a page fault' judges 3 faults
{ step 3 100 0 0 8; step 4 100 1 1 8; } >run.2
check '... which it does' judges 0 counts
check '... for both' judges 0 faults
for number in 1 2 3; do { step 3 9 0 1 8; step 4 9 0 0 8; } >run.$number; done
check 'three runs with a page fault count' judges 1 faults
{ step 3 9 0 0 8; step 4 9 0 0 9; } >run.1
check 'memory beyond the plan counts' judges 1 memory
step 3 9 0 0 8 >run.1
check 'a step without a line counts' judges 1 counts

for strategy in no_shard optim optim_grads optim_grads_params; do
  for mode in mapped copied; do
    steady_processes --strategy $strategy --unshard $mode
  done
done
steady_processes --microbatches 3
steady_processes --microbatches 3 --reduce-last
steady_processes --recompute --tied
steady_processes --compute-dtype bf16 --reduce-dtype bf16
steady_processes --no-overlap
steady_processes --trace trace.json
# Two ranks of 20 steps end 40 steps. The first rank may have finished while the other one ends its last step. The end
# of a rank's step before last is at most five ends back.
export STEADY_FIRST=4 STEADY_LAST=38 STEADY_SPAN=5
steady threads:2 1 34
finish
