#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: flight_test.sh FSDP_INFO
# Tests the output of fsdp-info flight for the records of several ranks, and for files that are no records.
set -u
info=$(realpath "$1")
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/tap.sh"
enter_scratch

flight() { capture "$info" flight "$@"; }

# record RANK WORLD ERROR COLLECTIVES [CALL]: writes a file rRANK. Times are in ns before 10^10.
record() {
  cat >"r$1" <<END
{"fsdp_flight": 1, "version": "0.1.0", "rank": $1, "world_size": $2, "host": "node", "pid": 1$1,
"monotonic_ns": 10000000000, "unix_ns": 1790000000000000000,
$3"calls_lost": 0, "calls": [
{"entry": 7, "call": "${5:-fsdp_reduce_grad}", "group": "a", "state": "started", "at_ns": 6800000000, "waited_ns": 0}
],
"collectives_lost": 0, "collectives": [
$4
]}
END
}

# entry SEQUENCE NUMBER WHAT GROUP BYTES STATE AT
entry() {
  printf '{"entry": %s, "sequence": "%s", "round": 3, "number": %s, "what": "%s", "group": "%s", "bytes": %s, ' \
    "$2" "$1" "$2" "$3" "$4" "$5"
  printf '"state": "%s", "call_entry": 7, "enqueued_ns": %s, "started_ns": 0, "ended_ns": 0}' "$6" "$7"
}

blames() { printf '"error": {"status": %s, "rank": %s, "message": "it is rank %s"},' "$1" "$2" "$2"; }
reduces="reduces of model 0"
done0=$(entry "$reduces" 0 reduce_scatter head 64 completed 1000)

# Ranks 0, 2 and 3 are at layer.3, rank 1 at another group.
for rank in 0 1 2 3; do
  group=layer.3
  [ $rank = 1 ] && group=layer.2
  record $rank 4 "$(blames 7 1)" "$done0, $(entry "$reduces" 1 reduce_scatter $group 4096 started 500000$rank)"
done
flight r3 r1 r0 r2
check "a divergence is found" equal $status 0
check "... where" contains "$out" "number 1 of the reduces of model 0, round 3"
check "... with what most called" contains "$out" "ranks 0, 2, 3 called reduce_scatter of 'layer.3' (4096 bytes)"
check "... and what one did" contains "$out" "rank 1 called reduce_scatter of 'layer.2' (4096 bytes)"
check "... and whom they blame" contains "$out" "Rank 1 is to blame, say ranks 0-3."

# Rank 1 never reached the second collective. It is in another sequence, at a later place.
record 1 4 "$(blames 9 1)" "$done0, $(entry values 0 fsdp_all_reduce_values '' 8 started 9000000)" fsdp_all_reduce_values
flight r0 r1 r2 r3
check "a rank that never came is found" equal $status 0
check "... where it first was missed" contains "$out" "number 1 of the reduces"
check "... and what it did last" contains "$out" \
  "rank 1 never came to it; its last call was fsdp_all_reduce_values of 'a', 3.2 s before, still inside"

# The model has ranks 0 and 1 only; rank 2 has no part in it.
for rank in 0 1 2; do record $rank 3 "" "$done0"; done
record 0 3 "" "$done0, $(entry "$reduces on ranks 0-1" 0 reduce_scatter expert 64 started 5000000)"
flight r0 r1 r2
check "who is not of a model's ranks is not missed" contains "$out" "rank 1 never came to it"
check "... where one that is has not come" lacks "$out" "rank 2 never came"

# Rank 2 has no file. The files of the others are at the same place.
record 1 4 "$(blames 8 2)" "$done0, $(entry "$reduces" 1 reduce_scatter layer.3 4096 started 5000002)"
record 0 4 "$(blames 8 2)" "$done0, $(entry "$reduces" 1 reduce_scatter layer.3 4096 started 5000002)"
record 3 4 "$(blames 8 2)" "$done0, $(entry "$reduces" 1 reduce_scatter layer.3 4096 started 5000002)"
flight r0 r1 r3
check "a rank without a file is named" contains "$out" "3 of 4 ranks have a flight record; missing: rank 2"
check "... and blamed" contains "$out" "Rank 2 is to blame, say ranks 0, 1, 3."
check "... which is an answer" equal $status 0
check "ranks that called the same have not parted" lacks "$out" "parted"

record 0 2 "" "$done0"
record 1 2 "" "$done0"
flight r0 r1
check "ranks that agree are an answer" equal $status 0
check "... that says so" contains "$out" "The ranks agree"
record 1 2 '"error": {"status": 13, "rank": -1, "message": "?"},' "$done0"
flight r0 r1
check "a failure that nothing explains is none" equal $status 1

# refused NAME WHAT: the file `bad` is refused by name.
refused() {
  flight r0 bad
  check "$1 is refused" equal $status 2
  check "... by name" contains "$err" "fsdp-info flight: bad: $2"
}
head -c 300 r1 >bad
refused "a torn file" "it is no JSON, or torn"
printf '{"traceEvents": []}' >bad
refused "a foreign file" "this is no flight record"
: >bad
refused "an empty file" "it is no JSON, or torn"
head -c 100000 /dev/zero | tr '\0' '[' >bad
refused "a nested file" "it is nested too deeply"
head -c 65536 /dev/urandom >bad
refused "noise" "it is"
sed 's/"rank": 1,/"rank": 2,/' r1 >bad
refused "a rank that cannot be" "it is of rank 2 of 2"
cp r0 bad
refused "a rank twice" "it is of rank 0, as is r0"
sed 's/"world_size": 2/"world_size": 3/' r1 >bad
refused "another job" "it is of a job of 3 ranks"
rm bad
refused "a missing file" "No such file"
mkdir bad
refused "a folder" "it is no regular file"
printf '{"fsdp_flight": 1, "rank": 1, "world_size": 2, "host": "\\u001b[31m", "monotonic_ns": 18446744073709551615, ' >hostile
printf '"calls": [{"entry": -1, "at_ns": 1e40, "call": 5}, 7, "x"], "collectives": [{"round": 18446744073709551615}]}' >>hostile
flight r0 hostile
check "what has the wrong type is passed over" equal $((status < 2)) 1
check "... and no control character is printed" lacks "$out" "$(printf '\033')"
flight
check "without a file it is a usage error" equal $status 2
finish
