#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: train_gpt_resume_test.sh FSDP_RUN TRAIN_GPT
# A training is saved, ended in one of several ways, and continued. Its losses, gradient norms and weights have the same
# bits as those of a training that did not end.
set -u
run=$(realpath "$1")
train_gpt=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$here/../tools/tap.sh"
enter_scratch
export OPENBLAS_NUM_THREADS=1
small="--layers 2 --width 48 --heads 3 --context 24 --batch 12 --steps 60 --lr 1e-2 --quiet --corpus $here"

# train RANKS JSON FLAGS...: trains, and writes the numbers to JSON.
train() {
  ranks=$1 json=$2
  shift 2
  # shellcheck disable=SC2086
  "$run" -n "$ranks" --no-prefix "$train_gpt" $small --json "$json" "$@" >log 2>&1
}
numbers() {
  sed -n 's/{"step": \([0-9]*\), "loss": \([^,]*\), "grad_norm": \([^,]*\),.*/\1 \2 \3/p; s/.*"weights_hash": "\([^"]*\).*/\1/p' "$1"
}
losses() { numbers "$1" | cut -d' ' -f1,2; }
# same_numbers JSON: expects the numbers of the training that did not end: those of 60 steps and the hash of the last
# weights.
same_numbers() {
  numbers "$1" >found
  numbers straight.json >wanted
  equal "$(wc -l <wanted)" 61 && cmp found wanted
}
# await_checkpoint NAME: waits at most 60 s.
await_checkpoint() {
  tries=0
  while [ ! -d "$1" ] && [ $tries -lt 6000 ]; do
    tries=$((tries + 1))
    sleep 0.01
  done
  [ -d "$1" ]
}

# child JOB: prints a rank of the job.
child() { awk '{ print $NF }' "/proc/$1/task/$1/children"; }
# The job is so slow that it still runs when a shell that saw its first checkpoints signals it.
slow='--debug-delay-us 8000'

check 'trains straight on' train 2 straight.json
check 'trains and saves' train 2 saved.json --save a --save-every 20
check '... and computes the same' same_numbers saved.json
check '... and keeps two' equal "$(ls a | tr '\n' ' ')" 'step-0000000040 step-0000000060 '
check 'refuses to begin anew in a folder that has checkpoints' sh -c "! '$train_gpt' --save a --steps 1 --corpus '$here' >log 2>&1"
check '... and says how to go on' contains "$(cat log)" '--resume goes on with the newest'
rm -r a/step-0000000060
check 'goes on' train 2 saved.json --save a --resume
check '... and computes the same' same_numbers saved.json
check 'goes on where nothing was saved yet' train 2 first.json --save none --resume
check '... from the beginning' same_numbers first.json

# With another number of ranks the sums are rounded differently, but the earlier steps are kept unchanged.
rm -r a/step-0000000060
check 'goes on on three ranks' train 3 saved.json --save a --resume --strategy optim
losses saved.json | head -n 40 >kept
losses straight.json | head -n 40 >wanted
check '... after the same steps' cmp kept wanted
check '... to the end' equal "$(losses saved.json | wc -l)" 61

# A rank is killed. The launcher starts the job again, which then resumes by itself.
# shellcheck disable=SC2086
"$run" -n 2 --max-restarts 1 --no-prefix "$train_gpt" $small $slow --json killed.json --save b --save-every 5 --resume >log 2>&1 &
job=$!
await_checkpoint b/step-0000000010
kill -9 "$(child $job)"
wait $job
check 'a job whose rank is killed ends well' equal $? 0
check '... was started again' contains "$(cat log)" 'killed by signal 9'
check '... and computes the same' same_numbers killed.json

# The machine is needed for something else. The work so far is saved, and the rest is done later.
# shellcheck disable=SC2086
"$run" -n 2 --no-prefix "$train_gpt" $small $slow --json asked.json --save c --save-every 5 >log 2>&1 &
job=$!
await_checkpoint c/step-0000000010
kill -TERM "$(child $job)"
wait $job
check 'SIGTERM to one rank ends the job' equal $? 143
check '... which says how to go on' contains "$(cat log)" 'with --resume goes on'
check '... with what it has done saved' equal "$(losses asked.json | tail -n 1 | grep -c .)" 1
check 'goes on another time' train 2 asked.json --save c --resume
check '... and computes the same' same_numbers asked.json
finish
