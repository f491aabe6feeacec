#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: run_test.sh FSDP_RUN
set -u
run=$(realpath "$1")
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/tap.sh"
enter_scratch

job() { capture "$run" "$@"; }

# gone PIDS...: none of them is left after a second (a zombie is gone).
gone() {
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    left=
    for pid in "$@"; do
      case $(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null) in '' | Z*) ;; *) left="$left $pid" ;; esac
    done
    [ -z "$left" ] && return 0
    sleep 0.1
  done
  echo "# still running:$left"
  return 1
}

# ready COUNT: waits until so many lines have come, at most ten seconds.
ready() {
  for _ in $(seq 200); do
    [ "$(wc -l <out)" -ge "$1" ] && return
    sleep 0.05
  done
}

# shellcheck disable=SC2016  # the ranks' shells expand the variables
{
  job -n 2 sh -c 'echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR'
  check "every rank has its variables" equal "$(sort out)" "[0] 0 0 2 2 127.0.0.1
[1] 1 1 2 2 127.0.0.1"
  check "success is 0" equal $status 0

  job -n 3 --no-prefix sh -c 'echo $MASTER_PORT $FSDP_JOB_SECRET'
  check "ranks share port and secret, without prefix" equal "$(sort -u out | wc -l)" 1
  check "the secret has 64 hex digits" equal "$(sed 's/.* //' out | head -1 | tr -d 0-9a-f | wc -c)" 1
  check "the port is a number" equal "$(sed 's/ .*//' out | head -1 | tr -d 0-9)" ""
  first=$out
  job -n 3 --no-prefix sh -c 'echo $MASTER_PORT $FSDP_JOB_SECRET'
  check "another job has another secret" lacks "$out" "$(echo "$first" | sed 's/.* //' | head -1)"

  "$run" -n 1 --no-prefix sh -c 'echo $MASTER_PORT; sleep 1' >one &
  "$run" -n 1 --no-prefix sh -c 'echo $MASTER_PORT; sleep 1' >two
  wait
  check "jobs at the same time have different ports" lacks "$(cat one)" "$(cat two)"

  job -n 1 sh -c 'echo to-out; echo to-err >&2'
  check "stdout stays apart" equal "$out" "[0] to-out"
  check "stderr stays apart" equal "$err" "[0] to-err"

  job -n 11 sh -c 'echo x'
  check "prefixes have one width" contains "$out" "[ 3] x"

  job -n 4 sh -c 'for i in 1 2 3 4 5 6 7 8 9; do printf abc; printf "def\n"; done'
  check "lines are never mixed" equal "$(sed 's/^\[.\] //' out | sort -u)" abcdef
  check "no line is lost" equal "$(wc -l <out)" 36

  job -n 1 printf 'no newline'
  check "an unfinished last line is shown" equal "$out" "[0] no newline"
  job -n 1 sh -c 'yes | head -c 3000000'
  check "much output arrives whole" equal "$(wc -l <out)" 1500000
  job -n 1 cat
  check "standard input is empty" equal "$status$out" 0

  job -n 1 printf 'step 1\rstep 2\r\n'
  check "in a file each progress update is a line" equal "$out" "[0] step 1
[0] step 2"
  if command -v script >/dev/null; then
    script -qefc "'$run' -n 2 sh -c 'printf \"\rstep 1\"; sleep 0.3; printf \"\rstep 2\n\"'" /dev/null >screen </dev/null
    check "on a terminal rank 0 rewrites its line" contains "$(cat -v screen)" '^M^[[K[0] step 1^M^[[K[0] step 2'
    check "on a terminal other ranks show the last state" lacks "$(cat -v screen)" '[1] step 1'
  else
    skip "progress on a terminal" "no script(1)"
  fi

  job -n 1 -- printf '%s|' -n 2 -- --no-prefix
  check "the program's own options are left alone" equal "$out" "[0] -n|2|--|--no-prefix|"

  job -n 3 sh -c 'echo $$; [ $RANK = 1 ] && exit 3; exec sleep 100'
  check "the failing rank's status is returned" equal $status 3
  check "... and named" contains "$err" "rank 1"
  check "... and explained" contains "$err" "exited with status 3"
  # shellcheck disable=SC2046
  check "the other ranks were ended" gone $(sed 's/^....//' out)

  job -n 2 sh -c '[ $RANK = 0 ] && kill -KILL $$; exec sleep 100'
  check "a killed rank gives 128 + signal" equal $status 137
  check "... and the signal is named" contains "$err" "rank 0 (pid"
  check "... with its number" contains "$err" "signal 9"

  job -n 2 --grace 0.3 sh -c 'echo $$; [ $RANK = 0 ] && { sleep 0.3; exit 4; }; trap "" TERM; while :; do sleep 0.1; done'
  check "a rank that ignores SIGTERM is killed" equal $status 4
  # shellcheck disable=SC2046
  check "... for good" gone $(sed 's/^....//' out)

  job -n 2 sh -c 'sleep 100 & echo $!; exit 0'
  check "a clean job succeeds" equal $status 0
  # shellcheck disable=SC2046
  check "children that ranks left behind are ended" gone $(sed 's/^....//' out)

  job -n 2 --timeout 0.3 sh -c 'exec sleep 100'
  check "a timeout gives 124" equal $status 124
  check "... and is explained" contains "$err" "0.3 s"

  for signal in INT TERM; do
    : >out  # what the job before wrote must not count as ready
    "$run" -n 2 sh -c 'trap "echo got; exit 7" '$signal'; echo ready; while :; do sleep 0.1; done' >out 2>err &
    pid=$!
    ready 2
    # A shell starts background jobs with SIGINT ignored; it is forwarded all the same.
    kill -$signal $pid
    wait $pid
    check "SIG$signal is forwarded, the ranks' status returned" equal $? 7
    check "... to every rank" equal "$(grep -c got out)" 2
  done

  : >out
  "$run" -n 2 sh -c 'echo $$; exec sleep 100' >out 2>err &
  pid=$!
  ready 2
  kill -KILL $pid
  wait $pid 2>/dev/null
  # shellcheck disable=SC2046
  check "ranks die with fsdp-run" gone $(sed 's/^....//' out)

  timeout 20 sh -c "'$run' -n 2 yes | head -1" >out 2>err
  check "a reader that goes away ends the job" equal "$(cat out)" "[0] y"

  FSDP_JOB_SECRET_FILE=/nowhere job -n 1 sh -c 'echo "${FSDP_JOB_SECRET_FILE-unset}"'
  check "the job's secret replaces a secret file" equal "$out" "[0] unset"
}

# shellcheck disable=SC2016
{
  unset FSDP_JOB_SECRET FSDP_JOB_SECRET_FILE FSDP_RENDEZVOUS
  place='echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT $FSDP_RENDEZVOUS $FSDP_JOB_SECRET'
  export FSDP_JOB_SECRET=common
  job -n 2 --nnodes 3 --node-rank 1 --rendezvous tcp://node-a:29500 --no-prefix sh -c "$place"
  check "ranks of several machines are counted through" equal "$(sort out)" \
    "2 0 6 2 node-a 29500 tcp://node-a:29500 common
3 1 6 2 node-a 29500 tcp://node-a:29500 common"
  job -n 1 --nnodes 2 --node-rank 1 --rendezvous file:///shared sh -c 'echo $FSDP_RENDEZVOUS ${MASTER_ADDR-unset}; exit 3'
  check "a shared directory is a rendezvous" equal "$out" "[1] file:///shared unset"
  check "... and errors name the rank of the job" contains "$err" "rank 1 (pid"
  job -n 1 --nnodes 2 --node-rank 2 --rendezvous tcp://a:1 true
  check "a node that is none is a usage error" equal $status 2
  check "... and is named" contains "$err" "--node-rank 2 is outside [0, --nnodes 2)"
  job -n 1 --nnodes 2 true
  check "several machines need a rendezvous" equal $status 2
  check "... which is said" contains "$err" "--rendezvous tcp://HOST:PORT"
  job -n 1 --nnodes 2 --rendezvous tcp://a true
  check "a rendezvous without port is a usage error" equal $status 2
  unset FSDP_JOB_SECRET
  job -n 1 --nnodes 2 --rendezvous tcp://a:1 true
  check "several machines need a common secret" equal $status 2
  check "... which is said" contains "$err" "FSDP_JOB_SECRET_FILE"
  echo secret >secret
  FSDP_JOB_SECRET_FILE=$PWD/secret job -n 1 --nnodes 2 --rendezvous tcp://a:1 --no-prefix \
    sh -c 'cat $FSDP_JOB_SECRET_FILE; echo ${FSDP_JOB_SECRET-unset}'
  check "a secret file is passed on" equal "$out" "secret
unset"
  FSDP_RENDEZVOUS=tcp://elsewhere:1 job -n 1 sh -c 'echo ${FSDP_RENDEZVOUS-unset}'
  check "one machine meets by itself" equal "$out" "[0] unset"

  job -n 2 --max-restarts 2 sh -c 'echo $RANK.$FSDP_RESTART_COUNT; [ $RANK = 1 ] && exit 5; exec sleep 100'
  check "a job that always fails is started so often" equal "$(grep -c '^.1. 1\.' out)" 3
  check "... each time with its number" contains "$out" "[1] 1.2"
  check "... and its status is that of the last" equal $status 5
  check "... and the restarts are counted" contains "$err" "restart 2 of 2"
  job -n 2 --max-restarts 5 sh -c '[ $FSDP_RESTART_COUNT = 2 ] || { [ $RANK = 0 ] && exit 5; exec sleep 100; }'
  check "a job that recovers succeeds" equal $status 0
  check "... and is not started again" lacks "$err" "restart 3 of 5"
  job -n 1 sh -c 'echo x; exit 5'
  check "without --max-restarts nothing is started again" equal "$(wc -l <out)" 1
  job -n 1 --max-restarts 3 --timeout 0.3 sh -c 'exec sleep 100'
  check "a timeout is not a failure to start again from" equal $status 124
  check "... so it does not" lacks "$err" "restart 1"

  : >out
  "$run" -n 2 --max-restarts 3 sh -c 'trap "exit 7" TERM; echo ready; while :; do sleep 0.1; done' >out 2>err &
  pid=$!
  ready 2
  kill -TERM $pid
  wait $pid
  check "who ends a job by a signal does not start it again" lacks "$(cat err)" "restart 1"
  : >out
  "$run" -n 2 --max-restarts 3 sh -c '[ $RANK = 0 ] && { sleep 0.5; exit 5; }
    trap "sleep 1; exit 7" TERM; echo ready; while :; do sleep 0.1; done' >out 2>err &
  pid=$!
  ready 1
  sleep 1
  kill -INT $pid
  wait $pid
  check "... also while the ranks of one that failed are ending" lacks "$(cat err)" "restart 1"
}

job -n 0 true
check "-n 0 is a usage error" equal $status 2
check "... that says so" contains "$err" "Value 0 not in range"
job true
check "without -n it is a usage error" equal $status 2
job -n 2
check "without a program it is a usage error" equal $status 2
check "... that shows how" contains "$err" "no program given"
job -n 2 no-such-program
check "an unknown program gives 127" equal $status 127
check "... and is named" contains "$err" "'no-such-program'"
echo data >not-executable
job -n 2 ./not-executable
check "a file that is no program gives 126" equal $status 126
job --help
check "--help succeeds" equal $status 0
check "... and explains" contains "$out" "MASTER_PORT"
finish
