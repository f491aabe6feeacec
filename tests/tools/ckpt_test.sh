#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: ckpt_test.sh FSDP_CKPT FSDP_RUN CHECKPOINT_RANK WEIGHTS
# Tests fsdp-ckpt with checkpoints that ranks (checkpoint_rank.c) load and save, and with Hugging Face folders that
# WEIGHTS (weights.py) writes and compares without the library.
set -u
ckpt=$(realpath "$1")
run=$(realpath "$2")
rank=$(realpath "$3")
weights=$(realpath "$4")
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/tap.sh"
enter_scratch

same() { python3 "$weights" same "$@"; }
# value PATH: prints a member of the latest JSON output, such as "0.name".
value() {
  python3 -c '
import json, sys
value = json.load(open("out"))
for key in sys.argv[1].split("."): value = value[int(key) if key.isdigit() else key]
print(json.dumps(value))' "$1"
}

python3 "$weights" make hf
capture "$ckpt" import hf runs --step 12
check "weights are imported" equal "$status $err" "0 "
check "... which is said" contains "$out" "runs/step-0000000012: 10 tensors"
capture "$ckpt" verify runs
check "... and verified" equal "$status" 0
check "... which is said" contains "$out" "1 checkpoint, 1 file, "
check "... with the verdict" contains "$out" "all as it was written"
capture "$ckpt" consolidate runs back
check "... and are a Hugging Face folder again" equal "$status $err" "0 "
check "... with the same bits" same hf back
capture "$ckpt" consolidate runs parts --max-shard-size 20kB --copy-files hf --json
check "... of several files" equal "$(value files | tr -d '[]",' | wc -w)" "$(find parts -name 'model-*' | wc -l)"
check "... more than one" [ "$(find parts -name 'model-*' | wc -l)" -gt 1 ]
check "... with an index, and the same bits" same hf parts
check "... and with the configuration" cmp hf/config.json parts/config.json
capture "$ckpt" consolidate runs halves --dtype bfloat16
check "... or rounded" same --rounded hf halves

# The imported files have the tensors fused, transposed and tied; the way back restores them.
python3 "$weights" renames >renames.json
capture "$ckpt" import hf fused --renames renames.json
check "renames fuse, turn and share" equal "$status $err" "0 "
check "... as another program does" same --renamed hf fused/step-0000000000
capture "$ckpt" consolidate fused split --renames renames.json
check "... and the way back splits and turns back" same hf split
echo '[{"theirs": "a", "ours": "b", "transposd": true}]' >bad.json
capture "$ckpt" consolidate fused other --renames bad.json
check "a mistyped member names those that are known" contains "$status $err" \
  "1 fsdp-ckpt: bad.json: /0/transposd is true, not a member that is known (theirs, ours, from_row, to_row, row_count, transposed)"
echo '[{"theirs": "q.*", "ours": "layers.*.qkv"}, {"theirs": "k.*", "ours": "layers.*.qkv", "to_row": 9999}]' >bad.json
capture "$ckpt" consolidate fused other --renames bad.json
check "renames that do not fit are told" contains "$status $err" '1 fsdp-ckpt: rows 72 to 9999 of "layers.0.qkv" go'
check "... and leave nothing" [ ! -e other ]

# Ranks load these checkpoints and save new ones.
# ranks COUNT: loads runs, and saves to mineCOUNT.
ranks() { "$run" -n "$1" "$rank" load runs "mine$1" "values$1" >log 2>&1 || { explain "$(tail -n 5 log)"; false; }; }
for count in 1 3; do
  check "$count of ranks load what was imported, and save it" ranks $count
  check "... with the same bits" python3 "$weights" values hf values$count
done
mv mine3 mine
capture "$ckpt" ls mine
check "they are listed" equal "$status" 0
check "... with their numbers" contains "$(tr -s ' ' <out)" "step-0000000002 2 1 3 1 "
check "... and their state" contains "$out" "whole"
capture "$ckpt" ls mine --json
check "... also for machines" equal "$(value 0.name) $(value 0.ranks) $(value 0.whole)" '"step-0000000002" 3 true'
check "... and how many tensors are of which type" equal "$(value 0.types.F32) $(value 0.types.F64) $(value 0.tensors)" "30 10 40"
capture "$ckpt" consolidate mine model
check "their weights are one folder" equal "$status $err" "0 "
check "... with the bits that once were imported" same hf model

cp -r mine hurt
shard=hurt/step-0000000002/shard-00002-model-00001-of-00001.safetensors
python3 "$weights" flip "$shard" -100
capture "$ckpt" ls hurt
check "a flipped bit is not seen by a list" contains "$out" whole
capture "$ckpt" verify hurt
check "... but by verify" equal "$status" 1
check "... which names file and bytes" contains "$out" "$shard: bytes 4096 to "
check "... and tensors" contains "$out" ', of "'
check "... and counts" contains "$out" "1 damaged"
capture "$ckpt" verify hurt --json
check "... also for machines" equal "$status $(value damages.0.file)" "1 \"$shard\""
capture "$ckpt" consolidate hurt/step-0000000002 wrong
check "it is not consolidated" contains "$status $err" "1 fsdp-ckpt: $shard: bytes 4096 to "
check "... nor in part" equal "$(find . -name wrong -o -name '.tmp-*' | wc -l)" 0
rm "$shard"
capture "$ckpt" ls hurt
check "a lost file is told by the list" contains "$out" "$shard: is missing"
check "... and by its exit status" equal "$status" 1
echo '{' >hurt/step-0000000002/checkpoint.json
capture "$ckpt" ls hurt --json
check "... and a damaged manifest" contains "$(value 0.problem)" "checkpoint.json"
capture "$ckpt" verify hurt
check "... for which verify fails" equal "$status" 1

capture "$ckpt" consolidate runs back
check "nothing is overwritten" contains "$status $err" "1 fsdp-ckpt: back: is there already"
capture "$ckpt" import hf runs --step 12
check "... nor a checkpoint" contains "$status $err" "1 fsdp-ckpt: runs/step-0000000012: is there already"
capture "$ckpt" consolidate hf new
check "weights are no checkpoint" contains "$status $err" "1 fsdp-ckpt: hf: is no checkpoint"
capture "$ckpt" verify nowhere
check "what is missing is named" contains "$status $err" "1 fsdp-ckpt: nowhere: cannot be opened"
mkdir empty
capture "$ckpt" verify empty
check "an empty folder is not verified" contains "$status $out" "1 0 checkpoints"
capture "$ckpt" consolidate runs new --dtype fp8
check "an unknown type names those that are known" contains "$status $err" "fp8 not in {float32,bfloat16,float16}"
capture "$ckpt" consolidate runs new --max-shrad-size 3
check "a mistyped option names those that are known" contains "$status $err" \
  "known are --help --dtype --max-shard-size --renames --copy-files --json"
capture "$ckpt" consolidat runs new
check "a mistyped command names those that are known" contains "$status $err" "known are ls verify consolidate import"

# A tensor of 256 MiB is copied and transposed. The program itself takes some 20 MiB.
python3 "$weights" large big.safetensors
peak() { python3 "$weights" peak "$@"; }
# below MIB COMMAND...: the command needs less memory than this.
below() {
  limit=$1
  shift
  used=$(peak "$@") || return 1
  [ "$used" -lt $((limit * 1024)) ] || { explain "it took $used KiB"; return 1; }
}
check "memory does not grow with tensors: import" below 80 "$ckpt" import big.safetensors big
check "... consolidate" below 80 "$ckpt" consolidate big big-out --dtype bfloat16
echo '[{"theirs": "*", "ours": "*", "transposed": true}]' >turn.json
check "... transposed" below 112 "$ckpt" consolidate big big-turned --renames turn.json
check "... verify" below 50 "$ckpt" verify big

# killed SIGNAL: stops the command in the middle, when a file shows that it has begun. A command that ended earlier is
# started again. Sets $status.
killed() {
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf big-out
    "$ckpt" consolidate big big-out --renames turn.json >out 2>err &
    child=$!
    until [ -n "$(find . -path './.tmp-*/model.safetensors' -size +0 2>err2)" ]; do
      kill -0 $child 2>/dev/null || break
      sleep 0.01
    done
    kill "-$1" $child 2>/dev/null
    wait $child 2>/dev/null
    status=$?
    [ $status -ne 0 ] && return 0
  done
  explain "it always ended before"
  return 1
}
check "SIGTERM comes in the middle" killed TERM
check "... and ends it" equal "$status" 143
check "... with words" contains "$(cat err)" "ended by a signal"
check "nothing is under the name" [ ! -e big-out ]
check "... nor under another" equal "$(find . -name '.tmp-*' | wc -l)" 0
check "SIGKILL comes in the middle" killed KILL
check "nothing is under the name then" [ ! -e big-out ]
check "... but what was begun" equal "$(find . -name '.tmp-*' | wc -l)" 1
capture "$ckpt" consolidate big big-out
check "the next one goes well" equal "$status $err" "0 "
check "... and takes that away" equal "$(find . -name '.tmp-*' | wc -l)" 0
finish
