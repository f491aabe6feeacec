#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: perf_test.sh FSDP_PERF
# Numbers measured on a loaded machine mean nothing, so the test checks only that fsdp-perf measures, checks and writes
# what it says.
set -u
perf=$(realpath "$1")
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/tap.sh"
enter_scratch

# lines EXPRESSION: evaluates Python with `lines`, the JSON lines written last.
lines() {
  python3 -c '
import json, sys
lines = [json.loads(line) for line in open("out.jsonl")]
print(eval(sys.argv[1]))' "$1"
}

# measure_sizes OPTIONS...: the options include -b, -e and -f.
measure_sizes() {
  rm -f out.jsonl
  timeout 300 "$perf" -p 3 -w 1 --json out.jsonl "$@" >out 2>err
  status=$?
}
measure() {
  measure_sizes -b 4K -e 64K -f 16 "$@"
}

measure -n 2 -c --depth 3 --width 16 --plot out.svg
check "everything is measured on 2 processes" equal $status 0
check "... every operation" equal "$(lines 'sorted({line["op"] for line in lines})')" \
  "['adamw', 'all_gather', 'all_reduce', 'barrier', 'layout', 'reduce', 'reduce_scatter', 'step', 'unshard', 'unshard_reshard']"
check "... with the promised keys" equal "$(lines 'all({"op", "ranks", "bytes", "dtype", "time_us", "algbw_gbs", "busbw_gbs", "ref_gbs", "ratio", "pairs", "wrong", "peer", "peer_ratio"} <= set(line) for line in lines)')" True
check "... nothing wrong in what was checked" equal "$(lines '{line["wrong"] for line in lines if line["wrong"] is not None}')" '{0}'
collectives='("all_gather", "reduce_scatter", "all_reduce")'
check "... every collective was checked" equal "$(lines '{line["wrong"] for line in lines if line["op"] in '"$collectives"'}')" '{0}'
check "... AdamW on all that weights and states are kept in" equal "$(lines 'sorted({line["dtype"] for line in lines if line["op"] == "adamw"})')" \
  "['8-bit, bf16 out', '8-bit, none', '8-bit, split16', 'fp32', 'fp32, bf16 out', 'none', 'split16']"
check "... every time is positive" equal "$(lines 'all(line["time_us"] > 0 for line in lines)')" True
check "... every ratio is positive" equal "$(lines '{line["ratio"] > 0 for line in lines if line["op"] == "all_gather"}')" '{True}'
check "... mapped unshards move nothing" equal "$(lines '{line["bytes_moved"] for line in lines if line["variant"] == "mapped" and line["op"] == "unshard"}')" '{0.0}'
check "... copied ones move all" equal "$(lines '{line["bytes_moved"] == line["bytes"]
  for line in lines if line["variant"] == "copied" and line["op"] == "unshard"}')" '{True}'
check "the plot is XML with a curve" sh -c "python3 -c 'import xml.dom.minidom as x; assert x.parse(\"out.svg\").getElementsByTagName(\"polyline\")'"

measure -n 3 --threads -c --op all_gather,reduce_scatter,unshard
check "ranks as threads" equal $status 0
check "... nothing wrong in what was checked" equal "$(lines '{line["wrong"] for line in lines if line["op"] in '"$collectives"'}')" '{0}'
check "... as many as asked for" equal "$(lines '{line["ranks"] for line in lines}')" '{3}'

# sizes: prints each size, and how often it was measured for one kind of line.
sizes() {
  lines 'sorted({(line["bytes"], sum(other["bytes"] == line["bytes"] and other["op"] == line["op"] and other["variant"] == line["variant"] and other["dtype"] == line["dtype"] for other in lines)) for line in lines})'
}
measure_sizes -n 2 -c -b 64 -e 256 -f 2 --op all_gather,reduce_scatter,all_reduce,unshard
check "the smallest size" equal $status 0
check "... every size is a multiple of 64 bytes a rank, and measured once" equal "$(sizes)" '[(128, 1), (256, 1)]'
measure_sizes -n 9 --threads -c -b 64 -e 64 --op all_gather,unshard
check "... also where it is less than a word for each rank" equal "$status$(sizes)" '0[(576, 1)]'

mkdir files
measure -n 2 -c --op save,load --dir files
check "saves and loads" equal $status 0
check "... each size of both, and what one rank has saved" equal "$(lines 'sorted((line["op"], line["variant"], line["ref"].startswith("load"), line["bytes"]) for line in lines)')" \
  "[('load', '', False, 4092), ('load', '', False, 65532), ('load', \"of 1 rank's files\", False, 4092), ('load', \"of 1 rank's files\", False, 65532), ('load', \"of 1 rank's files\", True, 4092), ('load', \"of 1 rank's files\", True, 65532), ('save', '', False, 4092), ('save', '', False, 65532)]"
check "... nothing wrong in what came back" equal "$(lines '{line["wrong"] for line in lines if line["variant"] == ""}')" '{0}'
check "... the file system is named" equal "$(lines '{line["dtype"] in ("disk", "tmpfs") for line in lines}')" '{True}'
check "... loads read what they want, and little more" equal "$(lines 'all(line["read_over_wanted"] >= 1 for line in lines if line["op"] == "load")')" True
check "... and leave nothing" equal "$(ls files)" ""
measure -n 2 -c --op step --depth 4 --width 512 --compute 20
check "main gradients that bypass the caches are right" equal "$status$(lines '{(line["op"], line["wrong"]) for line in lines}')" "0{('step', 0)}"
check "... beside compute that takes longer than 1.2 times the communication" equal "$(lines '{line["time_us"] > 10 * line["communication_us"] for line in lines}')" '{True}'
measure -n 2 --op step_save --dir files --depth 2 --width 64
check "a step with a save under way, and the same step" equal "$status$(lines '{(line["op"], line["ref"]) for line in lines}')" "0{('step_save', 'the same step')}"
measure_sizes -b 4M -e 4M -f 4 -n 2 --op step_home --dir files
check "a step with states in a file, and the same traffic" equal "$status$(lines '{(line["op"], line["ref"]) for line in lines}')" "0{('step_home', 'the same reads and writes')}"
check "... which leaves nothing" equal "$(ls files)" ""
measure -n 2 --op save --dir nowhere
check "a folder that is not there is a usage error" equal $status 2

measure -n 2 -c --op quantize
check "planes of 8 bits" equal "$status$(lines 'sorted({(line["variant"], line["wrong"]) for line in lines})')" \
  "0[('fp8', 0), ('fp8_block', 0), ('mxfp8', 0)]"

# With more than 64 hosts some reach rank 0 through others.
measure --op join --hosts 70 --ranks-per-host 18
check "hosts join, and one that was killed is named by all others" equal "$status$(lines 'sorted({line["variant"].split(", ")[1] for line in lines})')" \
  "0['agree', 'all-gather', 'close', 'inner killed', 'join', 'leaf killed']"
check "... jobs of 2, 8, 32 hosts and the largest" equal "$(lines '[line["ranks"] for line in lines if line["variant"].endswith("join")]')" '[36, 144, 576, 1260]'
check "... with at most 65 connections in the tree, 37 in the circles and those of the ranks themselves" \
  equal "$(lines 'all(line["connections"] <= 65 + 37 + 4 for line in lines if line["variant"].endswith("join"))')" True
measure --op join,barrier
check "joining makes jobs of its own" equal $status 2

measure -n 1 --op unshard_reshard,all_gather
check "one rank has no peers to gather from" equal "$status$(lines '{line["op"] for line in lines}')" "0{'unshard_reshard'}"

measure --op nonsense
check "an unknown operation is a usage error" equal $status 2
check "... that lists the known ones" contains "$(cat err)" all_gather
measure_sizes -b 1M -e 1K
check "sizes upside down are a usage error" equal $status 2
check "... that names them" contains "$(cat err)" "sizes from 1048576 to 1024 bytes"
"$perf" -n 2 --op barrier -p 3 --json none/out.jsonl >out 2>err
check "a file that cannot be written fails the run" equal $? 1
check "... and is named" contains "$(cat err)" none/out.jsonl
finish
