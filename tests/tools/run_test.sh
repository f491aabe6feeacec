#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: run_test.sh FSDP_RUN DOOMED_RANK
set -u
run=$(realpath "$1")
doomed_rank=$(realpath "$2")
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/tap.sh"
enter_scratch

# Ranks that sleep have nothing to report, so most cases do not wait for it.
job() { capture "$run" --grace-seconds 0.1 "$@"; }

# gone COUNT PIDS...: there are COUNT processes, and none of them is left after ten seconds (a zombie is gone).
gone() {
  count=$1
  shift
  equal $# "$count" || return 1
  for _ in $(seq 100); do
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

# ready COUNT: waits at most ten seconds until this many lines have arrived.
ready() {
  for _ in $(seq 200); do
    [ "$(wc -l <out)" -ge "$1" ] && return
    sleep 0.05
  done
}

# said TEXT: waits at most ten seconds until the text is in the file err.
said() {
  for _ in $(seq 200); do
    grep -qF -e "$1" err && return
    sleep 0.05
  done
}

# The ranks' shells use these functions, which wait at most ten seconds. come NAME: waits until another rank has made
# that file. dead FILE: waits until the process with the number in the file is gone or a zombie. announced: waits until
# fsdp-run has written to the file err that it waits for the remaining ranks. They do not end before it has seen the
# first one's end.
cat >helpers <<'HELPERS'
come() {
  for _ in $(seq 200); do
    [ -e "$1" ] && return
    sleep 0.05
  done
}
dead() {
  for _ in $(seq 200); do
    [ -s "$1" ] && break
    sleep 0.05
  done
  for _ in $(seq 200); do
    case $(sed 's/.*) //' "/proc/$(cat "$1")/stat" 2>/dev/null) in '' | Z*) return ;; esac
    sleep 0.05
  done
}
announced() {
  for _ in $(seq 200); do
    grep -q 'to report and end' err && return
    sleep 0.05
  done
}
HELPERS

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

  "$run" -n 1 --no-prefix sh -c '. ./helpers; echo $MASTER_PORT; touch begun; come over' >one &
  "$run" -n 1 --no-prefix sh -c '. ./helpers; come begun; echo $MASTER_PORT; touch over' >two
  wait
  check "a job has a port" [ -s two ]
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
  if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
    # Rank 1 ends its line when rank 0 has ended, so that it does not come between rank 0's two.
    cat >progress <<'PROGRESS'
. ./helpers
[ $RANK = 0 ] && echo $$ >zero
printf "\rstep 1"
[ $RANK = 0 ] && for _ in $(seq 200); do
  grep -q "step 1" screen && break
  sleep 0.05
done
[ $RANK = 1 ] && dead zero
printf "\rstep 2\n"
PROGRESS
    script -qefc "'$run' -n 2 --grace-seconds 20 sh ./progress" /dev/null >screen </dev/null
    check "on a terminal rank 0 rewrites its line" contains "$(cat -v screen)" '^M^[[K[0] step 1^M^[[K[0] step 2'
    check "on a terminal other ranks show the last state" lacks "$(cat -v screen)" '[1] step 1'
    check "... and that one" contains "$(cat -v screen)" '[1] step 2'
  else
    skip "progress on a terminal" "no script(1), or no terminal that it can make"
  fi

  job -n 1 -- printf '%s|' -n 2 -- --no-prefix
  check "the program's own options are left alone" equal "$out" "[0] -n|2|--|--no-prefix|"

  job -n 3 sh -c '. ./helpers; echo $$; touch up.$RANK; [ $RANK = 1 ] && { come up.0; come up.2; exit 3; }
    exec sleep 100'
  check "the failing rank's status is returned" equal $status 3
  check "... and named" contains "$err" "rank 1"
  check "... and explained" contains "$err" "exited with status 3"
  check "all ranks were there" equal "$(wc -l <out)" 3
  # shellcheck disable=SC2046
  check "the other ranks were ended" gone 3 $(sed 's/^....//' out)

  job -n 2 sh -c '[ $RANK = 0 ] && kill -KILL $$; exec sleep 100'
  check "a killed rank gives 128 + signal" equal $status 137
  check "... and the signal is named" contains "$err" "rank 0 (pid"
  check "... with its number" contains "$err" "signal 9"

  job -n 2 --kill-seconds 0.3 sh -c '. ./helpers; echo $$; [ $RANK = 0 ] && { come deaf; exit 4; }
    trap "" TERM; touch deaf; while :; do sleep 0.1; done'
  check "a rank that ignores SIGTERM is killed" equal $status 4
  check "... of two" equal "$(wc -l <out)" 2
  # shellcheck disable=SC2046
  check "... for good" gone 2 $(sed 's/^....//' out)

  # Ranks whose peer has died write their last lines; they are not ended while they write.
  capture "$run" -n 3 --grace-seconds 30 sh -c '. ./helpers; [ $RANK = 1 ] && exit 3; announced; echo done; exit 1'
  check "ranks that are left may end by themselves" equal "$(grep -c done out)" 2
  check "... and the first one's status stays" equal $status 3
  check "... and the wait is announced" contains "$err" "the other 2 have 30 s to report and end (--grace-seconds)"
  before=$(date +%s%N)
  capture "$run" -n 2 --grace-seconds 1 sh -c '[ $RANK = 1 ] && exit 3; trap "exit 9" TERM; while :; do sleep 0.1; done'
  check "who does not end is ended" equal $status 3
  check "... after the grace period" [ $(($(date +%s%N) - before)) -ge 1000000000 ]
  check "... which is said" contains "$err" "1 rank(s) did not end by themselves within 1 s; ending them"
  : >out
  : >err
  before=$(date +%s)
  "$run" -n 2 --grace-seconds 60 sh -c '[ $RANK = 1 ] && exit 3; exec sleep 100' >out 2>err &
  pid=$!
  said "to report and end (--grace-seconds)"
  kill -TERM $pid
  wait $pid
  check "a signal in the grace period leaves the status" equal $? 3
  check "... and ends it" [ $(($(date +%s) - before)) -lt 40 ]

  # While fsdp-run is stopped, ranks end in an order that only the kernel can tell it.
  : >out
  "$run" -n 3 sh -c '. ./helpers; echo $$ >pid.$RANK; echo ready; come stopped; [ $RANK = 1 ] && exit 3; dead pid.1
    [ $RANK = 0 ] && exit 1; kill -ABRT $$' >out 2>err &
  pid=$!
  ready 3
  kill -STOP $pid
  touch stopped
  # shellcheck source=/dev/null
  (. ./helpers && for rank in 0 1 2; do dead pid.$rank; done)
  kill -CONT $pid
  wait $pid
  check "the status is that of the rank that ended first" equal $? 3
  check "... and that rank is named" contains "$(cat err)" "rank 1 (pid"
  capture "$run" -n 2 --grace-seconds 30 sh -c '. ./helpers; [ $RANK = 0 ] && { echo $$ >failed; exit 1; }
    dead failed; sleep 0.3; kill -KILL $$'
  check "whom somebody killed is the cause, however late its end is seen" equal $status 137
  check "... and is named" contains "$err" "rank 1 (pid"

  capture "$run" -n 3 sh -c '. ./helpers; [ $RANK = 1 ] && exit 3; announced; exit 1'
  check "without a word the wait is of 5 s" contains "$err" "have 5 s to report and end (--grace-seconds)"
  # The command of docs/guides/debugging-a-hang.md.
  mkdir flight
  FSDP_FLIGHT_DIRECTORY=$PWD/flight capture "$run" -n 4 "$doomed_rank" 2
  check "a killed rank of a job gives 137" equal $status 137
  check "... and every survivor leaves its flight record" equal "$(cd flight && echo *)" \
    "flight-0.json flight-1.json flight-3.json"

  job -n 2 sh -c 'sleep 100 & echo $!; exit 0'
  check "a clean job succeeds" equal $status 0
  # shellcheck disable=SC2046
  check "children that ranks left behind are ended" gone 2 $(sed 's/^....//' out)

  job -n 2 --timeout 0.3 sh -c 'exec sleep 100'
  check "a timeout gives 124" equal $status 124
  check "... and is explained" contains "$err" "0.3 s"

  for signal in INT TERM; do
    : >out  # output of the previous job must not count as ready
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
  check "ranks die with fsdp-run" gone 2 $(sed 's/^....//' out)

  # This holds for any first rank. A job that goes on would end by the timeout, with status 124.
  timeout 30 sh -c "'$run' -n 2 yes | head -1" >out 2>err
  check "a reader that goes away ends the job" equal $? 0
  check "... and has read a line" equal "$(sed 's/^\[[01]\] //' out)" y

  FSDP_JOB_SECRET_FILE=$PWD/nowhere job -n 1 sh -c 'echo "${FSDP_JOB_SECRET_FILE-unset}"'
  check "the job's secret replaces a secret file" equal "$out" "[0] unset"
}

# shellcheck disable=SC2016
{
  unset FSDP_LOG FSDP_DEBUG FSDP_TRACE FSDP_TIMEOUT
  help='echo ${FSDP_LOG-unset} ${FSDP_DEBUG-unset} ${FSDP_TRACE-unset} ${FSDP_TIMEOUT-unset}'
  job -n 1 --log info --debug --trace traces --wait-timeout 20 sh -c "$help"
  check "ranks get --log, --debug, --trace and --wait-timeout" equal "$out" "[0] info 1 $PWD/traces 20"
  check "... and the trace's directory is made" [ -d traces ]
  job -n 1 sh -c "$help"
  check "... and nothing of it unless it is given" equal "$out" "[0] unset unset unset unset"
  FSDP_LOG=debug FSDP_TIMEOUT=7 job -n 1 sh -c "$help"
  check "... but what the environment has stays" equal "$out" "[0] debug unset unset 7"
  FSDP_LOG=debug job -n 1 --log error sh -c 'echo $FSDP_LOG'
  check "... unless an option says otherwise" equal "$out" "[0] error"
  job -n 1 --log loud true
  check "a level that is none is a usage error" equal $status 2
  check "... which names those there are" contains "$err" "warning"
  job -n 1 --wait-timeout 0 true
  check "no seconds to wait is a usage error" equal $status 2
  echo data >a-file
  job -n 1 --trace a-file true
  check "a trace directory that is a file is a usage error" equal $status 2
  check "... which is named" contains "$err" "a-file"
  capture "$run" -n 2 --grace-seconds 30 --trace lives "$doomed_rank" 0
  check "a job leaves its traces" contains "$(cd lives && echo *)" "trace-1.json"
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
  check "who ends a job by a signal gets the ranks' status" equal $? 7
  check "... and does not start it again" equal "$(grep -c ready out) $(grep -c 'restart 1' err)" '2 0'
  : >out
  : >err
  "$run" -n 2 --max-restarts 3 --grace-seconds 30 sh -c '. ./helpers; [ $RANK = 0 ] && { come trapped; exit 5; }
    trap "sleep 1; exit 7" TERM; echo trapped; touch trapped; while :; do sleep 0.1; done' >out 2>err &
  pid=$!
  said "to report and end (--grace-seconds)"
  kill -INT $pid
  wait $pid
  check "... also while the ranks of one that failed are ending" equal $? 5
  check "... of which there is no further one" equal "$(grep -c 'trapped' out) $(grep -c 'restart 1' err)" '1 0'
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
