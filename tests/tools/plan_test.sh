#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: plan_test.sh FSDP_PLAN FSDP_INFO
set -u
plan=$(realpath "$1")
info=$(realpath "$2")
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/tap.sh"
enter_scratch

planned() { capture "$plan" "$@"; }

# value PATH: prints a member of the latest JSON output, such as "rank_bytes.grad".
value() {
  python3 -c '
import json, sys
value = json.load(open("out"))
for key in sys.argv[1].split("."): value = value[key]
print(value)' "$1"
}

check "fsdp-info runs" sh -c "'$info' >info.txt"
check "fsdp-info prints key: value lines" equal "$(grep -vc '^[A-Za-z][^:]*: ' info.txt)" 0
check "fsdp-info names the version" contains "$(grep -i '^version:' info.txt)" "$("$info" --version)"

for rank in 0 1; do
  printf '{"displayTimeUnit": "ns", "traceEvents": [\n{"ph": "X", "pid": %s, "tid": 1, "name": "n", "ts": 123456789012.345, "dur": 0.001},\n{"ph": "i", "pid": %s}\n]}\n' \
    $rank $rank >part$rank
done
capture "$info" trace merged part0 part1
check "fsdp-info merges traces" equal $status 0
check "... to the events of all of them" equal "$(python3 -c '
import json
print([(e["pid"], e.get("ts")) for e in json.load(open("merged"))["traceEvents"]])')" \
  "[(0, 123456789012.345), (0, None), (1, 123456789012.345), (1, None)]"
# unmerged NAME TEXT OUT FILES...: the merge fails with this text.
unmerged() {
  name=$1 text=$2
  shift 2
  capture "$info" trace "$@"
  check "$name" contains "$status $err" "1 fsdp-info: $text"
}
unmerged "a trace is not overwritten where OUT was forgotten" "part0: the file to write exists already" part0 part1
check "... but is as it was" equal "$(grep -c pid part0)" 2
echo '[]' >none
unmerged "what is no trace is named" "none: this is no trace" other part0 none
check "... and nothing was written" [ ! -e other ]
unmerged "what is missing is named" "missing: No such file" other part0 missing
unmerged "so is what cannot be written" "nowhere/merged: No such file" nowhere/merged part0
capture "$info" trace merged
check "a merge needs files" equal $status 2

tiny='--layers 2 --width 64 --heads 4 --vocab 256 --ranks 4'
# shellcheck disable=SC2086
planned $tiny
check "the table is printed" equal $status 0
check "... and the padding" contains "$out" "padding:"
# Reads of each role its name and the last column.
rows=$(sed -n 's/^  \([a-z][a-z0-9() ]*[a-z)]\)  .* \([0-9]*\)$/\1: \2/p' out)
# shellcheck disable=SC2086
planned $tiny --json
check "... with every role and its bytes, as --json has them" equal "$rows" "\
compute weights: $(value rank_bytes.compute)
main weights: $(value rank_bytes.main)
main gradients: $(value rank_bytes.grad)
optimizer state: $(value rank_bytes.optimizer)
gather buffers: $(value rank_bytes.gather)
gradient buffers: $(value rank_bytes.reduce)
control and exchange: $(value rank_bytes.staging)
whole matrices: $(value rank_bytes.matrix)
at home in a file: $(value rank_bytes.home)
total: $(value rank_bytes.total)"
check "... of which most hold something" [ "$(echo "$rows" | grep -c ': [1-9]')" -ge 6 ]

# near_bytes BYTES WANTED: allows 0.5 % for parts that are always fp32, and for padding.
near_bytes() { awk -v x="$1" -v y="$2" 'BEGIN { d = x / y - 1; exit !(d < 0.005 && d > -0.005) }'; }
small() { planned --layers 4 --width 128 --heads 4 --vocab 512 "$@"; }
# 4 layers x (4 x 128 x 128 + 2 x 128 x 512 + 2 x 128) + 2 x 512 x 128 + 128
small --ranks 1 --strategy no_shard --json
check "parameters are counted" equal "$(value parameter_count)" 918656
check "one rank without sharding is the unsharded copy" equal "$(value rank_bytes.total)" "$(value unsharded_bytes.total)"
# Matrices of a layer of 128: query, key, value and output of 128 x 128, up and down of 512 x 128.
small --ranks 2 --muon --json
check "matrices are dealt to all ranks" equal "$(value matrices.count) $(value matrices.waves) $(value matrices.load_max_over_mean)" "24 1 1.0"
check "... and have no states of AdamW, but a momentum" near_bytes "$(value rank_bytes.optimizer)" $(((4 * 918656 + 4 * 131200) / 2))
small --ranks 2 --muon --matrix-bytes 300k
check "the table shows owners and waves" contains "$out" "rank 0: 12 (1.00)  rank 1: 12 (1.00)"
check "... within the limit" contains "$out" "in 8 waves of at most"
small --ranks 2 --muon --matrix-bytes 1000
check "a matrix above the limit is refused" contains "$status $err" "1 fsdp-plan: "
check "... by name" contains "$err" "matrix_bytes is 1000"
# bf16 weights with main weights and two states of 4 bytes each: 12 of 18 bytes an element.
planned --layers 4 --width 512 --heads 8 --vocab 512 --ranks 2 --json
in_memory=$(($(value rank_bytes.main) + $(value rank_bytes.optimizer)))
planned --layers 4 --width 512 --heads 8 --vocab 512 --ranks 2 --state-home file --main-home file --disk-gbs 2 --json
check "main weights and states can be in a file" near_bytes "$(value rank_bytes.home)" "$in_memory"
check "... and not in memory" equal "$(value rank_bytes.main) $(value rank_bytes.optimizer)" "0 0"
check "... whose traffic takes the disk so long" near_bytes "$(value disk_seconds)" "$(awk -v x="$in_memory" 'BEGIN { print 2 * 2 * x / 2e9 }')"
small --ranks 2 --state-home file --disk-gbs 2
check "the table says how much is in memory" contains "$out" "are in memory, and"
check "... and what the disk takes" contains "$out" "at 2 GB/s for the 2 ranks of a host the disk takes"
planned --layers 4 --width 512 --heads 8 --vocab 512 --ranks 2 --json
in_memory=$(value rank_bytes.grad)
planned --layers 4 --width 512 --heads 8 --vocab 512 --ranks 2 --grad-home file --json
check "main gradients can be in a file" near_bytes "$(value rank_bytes.home)" "$in_memory"
check "... and not in memory" equal "$(value rank_bytes.grad)" 0
small --ranks 2 --grad-home file
check "... and the table says what reads them again" contains "$out" "a norm of gradients reads them once more"
small --ranks 2 --disk-gbs 2
check "a disk without a file is refused" contains "$status $err" "1 fsdp-plan: --disk-gbs needs --state-home file, --main-home file or --grad-home file"
small --ranks 2 --compute-dtype fp32 --main-home file
check "fp32 weights have no main weights for a file" contains "$status $err" "1 fsdp-plan: "
check "... which is said" contains "$err" "no parameter has main weights apart"
printf '{"groups": [{"name": "g", "params": [{"name": "qkv", "shape": [24, 8], "matrix": true, "matrix_splits": [16, 4, 4]}]}]}' >splits.json
planned --model splits.json --ranks 1 --json
check "a model file names matrices and their splits" equal "$(value matrices.count)" 3

small --ranks 2 --json
total=$(value rank_bytes.total) limit=$(value by_parts.max_pending_bytes) by_parts=$(value by_parts.rank_total)
check "a proposed limit for gradients saves a twentieth" [ $((20 * by_parts)) -le $((19 * total)) ]
small --ranks 2
check "... also in the table" contains "$out" "with --max-pending-bytes $limit the total would be "
small --ranks 2 --max-pending-bytes "$limit" --json
check "... and the total with it is as said" equal "$(value rank_bytes.total)" "$by_parts"
check "... without another proposal" lacks "$out" by_parts
planned --layers 48 --width 128 --heads 4 --vocab 512 --ranks 2 --json
check "a model of many layers gets no proposal" lacks "$status $out" by_parts
check "... but a plan" [ "$(value rank_bytes.total)" -gt 0 ]
small --ranks 2 --reduce last --json
check "nor does one that keeps full gradients" lacks "$status $out" by_parts
check "... but a plan" [ "$(value rank_bytes.total)" -gt 0 ]
planned --layers 12 --width 768 --heads 12 --vocab 512 --ranks 2 --state-home file --main-home file --grad-home file --json
check "a limit also saves memory beside a file" [ "$(value by_parts.rank_total)" -lt "$(value rank_bytes.total)" ]

small --ranks 2 --json
check "adamw states are half on 2 ranks" sh -c \
  "python3 -c 'import sys; a, b = map(int, sys.argv[1:]); sys.exit(not 0.5 <= a / b < 0.52)' \
  $(value rank_bytes.optimizer) $(value unsharded_bytes.optimizer)"
check "mapped needs no gather pool" equal "$(value rank_bytes.gather)" 0
small --ranks 2 --unshard copied --json
check "copied needs one" sh -c "[ $(value rank_bytes.gather) -gt 0 ]"
gather=$(value rank_bytes.gather)
small --ranks 2 --unshard copied --prefetch 0 --json
check "... that is smaller without prefetch" sh -c "[ $(value rank_bytes.gather) -lt $gather ]"
# In any order there are this many buffers of the largest group's size, but not more than groups.
any() { small --ranks 2 --unshard copied --schedule any "$@" --json; }
any --held-groups 1
one=$(value rank_bytes.gather)
check "in any order one group is held" sh -c "[ $one -gt 0 ]"
any --held-groups 3
check "... or three" equal "$(value rank_bytes.gather)" $((3 * one))
any
check "... or four" equal "$(value rank_bytes.gather)" $((4 * one))
any --held-groups 100
check "... or all" equal "$(value rank_bytes.gather)" $(($(value groups) * one))
small --ranks 2 --held-groups 3
check "held groups of another schedule are refused" contains "$status $err" "1 fsdp-plan: "
check "... which is said" contains "$err" "held_groups is 3, but only FSDP_SCHEDULE_ANY"
small --ranks 2 --optimizer none --json
check "no optimizer, no state" equal "$(value rank_bytes.optimizer)" 0
small --ranks 2 --unshard copied --quantize fp8_block --json
check "codes take less of it than bf16, padding included" sh -c "[ $(value rank_bytes.gather) -lt $((gather * 3 / 4)) ]"
small --ranks 16384 --json
check "16384 ranks are planned" equal "$status$(value ranks)" 016384

# Bytes of an element for AdamW with bf16 weights: weights, main weights, gradients and states. Each of two ranks has
# half of them.
for row in '18 fp32 fp32' '16 split16 fp32' '12.03 fp32 8bit' '10.03 split16 8bit' '14 none fp32' '8.03 none 8bit'; do
  # shellcheck disable=SC2086
  set -- $row
  planned --layers 2 --width 1024 --heads 8 --vocab 4096 --ranks 2 --main "$2" --states "$3" --json
  check "an element has $1 bytes with --main $2 and --states $3" near_bytes "$(value element_bytes)" "$1"
  check "... half of them on each of two ranks" near_bytes "$(python3 -c "print(2 * $(value rank_element_bytes))")" "$1"
done
planned --layers 2 --width 1024 --heads 8 --vocab 4096 --ranks 2 --main split16 --states 8bit
check "... which the table says" contains "$out" "an element of the model: 10.0"
check "... with what was chosen" contains "$out" "bf16 weights, main split16, states 8bit"
small --ranks 2 --optimizer none --states 8bit
check "states of an optimizer that has none are refused" contains "$status $err" "1 fsdp-plan: --states is of"
small --ranks 2 --compute-dtype fp32 --main split16
check "main weights beside fp32 weights are refused" contains "$status $err" "1 fsdp-plan: --main: split16 and none are for"

cat >storage.json <<'JSON'
{"groups": [
  {"name": "a", "main_storage": "split16", "params": [{"name": "a", "shape": [512, 128]}]},
  {"name": "b", "main_storage": "none", "params": [{"name": "b", "shape": [512, 128]}]},
  {"name": "c", "params": [{"name": "c", "shape": [512, 128]}]}]}
JSON
planned --model storage.json --ranks 1 --strategy no_shard --json
check "groups keep main weights as they say" equal "$(value rank_bytes.main)" $((6 * 65536))

cat >model.json <<'JSON'
{"groups": [
  {"name": "embedding", "strategy": "no_shard", "params": [{"name": "embedding", "shape": [512, 128]}]},
  {"name": "layer.{}", "repeat": 3, "params": [
    {"name": "layer.{}.w", "shape": [128, 128], "dtype": "fp32"},
    {"name": "layer.{}.frozen", "shape": [128], "frozen": true}]}]}
JSON
planned --model model.json --ranks 2 --json
check "a model file is read" equal "$status" 0
check "... with its repeats" equal "$(value groups) $(value parameter_tensors) $(value parameter_count)" "4 7 115072"

# stack ROWS: prints how much a stack of experts pads on 16 ranks if rows lie in this many dimensions.
stack() {
  printf '{"groups": [{"name": "g", "params": [{"name": "p", "shape": [8, 2048, 7168], "row_dimensions": %s}]}]}' "$1" >stack.json
  planned --model stack.json --ranks 16 --json
}
stack 1
check "a stack on more ranks than matrices doubles" equal "$(value padding_count)" $((8 * 2048 * 7168))
stack 2
check "... unless ranks divide its matrices" equal "$(value padding_count)" 0
stack 4
check "... in dimensions that it has" contains "$err" "row_dimensions is 4, but must be at most 3"

# With two pieces a layer, the pool has one of each kind instead of two layers.
layers() { planned --layers 4 --width 256 --heads 4 --ffn 1024 --vocab 64 --unshard copied --json "$@"; }
layers
whole=$(value rank_bytes.gather)
layers --by-piece
check "pieces need less room than layers" test "$(value rank_bytes.gather)" -lt "$whole"
check "... and are told" equal "$(value pieces.count)" 8
layers --by-piece --schedule interleaved
check "... with an order of their own" contains "$err" "--schedule"

# There are 512 x 512 codes and 4 x 4 fp32 scales. The part of the page behind them belongs to no rank, and is counted
# for the first one.
quantized() {
  printf '{"groups": [{"name": "g", "params": [{"name": "p", "shape": %s, "quantization": "%s"}]}]}' "$1" "${2:-fp8_block}" >quantized.json
  planned --model quantized.json --ranks 2 --unshard copied --prefetch 0 --json
}
quantized '[512, 512]'
check "codes and scales at rest" equal "$(value rank_bytes.compute)" $(((262144 + 64) / 2 + 4096 - 64))
check "... and gathered" equal "$(value rank_bytes.gather)" $((262144 + 512))
check "... beside fp32 main weights" equal "$(value rank_bytes.main)" $((4 * 262144 / 2))
quantized '[512, 512]' mxfp8
check "MXFP8 keeps two forms" equal "$(value rank_bytes.compute)" $((262144 + 8192))
check "... and gathers them one after the other" equal "$(value rank_bytes.gather)" $((262144 + 8192))
check "... each with its scales" equal "$(value plane_bytes.row) $(value plane_bytes.row_scale) $(value plane_bytes.column) $(value plane_bytes.column_scale)" \
  "262144 8192 262144 8192"
planned --model quantized.json --ranks 2
check "... which the table names" contains "$out" "plane column_scale"
frozen() {
  printf '{"groups": [{"name": "g", "params": [{"name": "p", "shape": [512, 512], "frozen": true, %s}]}]}' "$1" >frozen.json
  planned --model frozen.json --ranks 2 --unshard copied --prefetch 0 --json
}
frozen '"quantization": "mxfp8"'
check "a frozen base is codes and scales" equal "$(value rank_bytes.compute)" $((262144 + 8192))
check "... and nothing else" equal "$(value rank_bytes.main) $(value rank_bytes.optimizer) $(value rank_bytes.grad)" "0 0 0"
frozen '"dtype": "uint8"'
check "bytes are bytes" equal "$(value rank_bytes.compute)" $((262144 / 2))
quantized '[512]'
check "what cannot be quantized is refused" contains "$status $err" "1 fsdp-plan: "
check "... by name and number" contains "$err" "parameter 'p' of group 'g': FSDP_QUANTIZE_FP8_BLOCK needs a matrix, 2 dimensions or more, but it has 1"

# refuses JSON TEXT: refuses such a model file with this text.
refuses() {
  echo "$1" >bad.json
  planned --model bad.json
  equal "$status" 1 && contains "$err" "$2"
}
check "no JSON at all" refuses '{"groups": [' "bad.json is not JSON"
check "no groups" refuses '{}' "groups: is missing"
check "a shape that is no array" refuses '{"groups": [{"name": "g", "params": [{"name": "p", "shape": 3}]}]}' \
  "groups[0].params[0].shape: must be an array"
check "a negative size" refuses '{"groups": [{"name": "g", "params": [{"name": "p", "shape": [-3]}]}]}' \
  "groups[0].params[0].shape[0]: must be a whole number"
check "an unknown member" refuses '{"groups": [{"name": "g", "parms": [], "params": []}]}' 'unknown member "parms"'
check "an unknown strategy" refuses '{"groups": [{"name": "g", "strategy": "zero9", "params": []}]}' \
  "groups[0].strategy: must be one of no_shard, optim"
check "no mesh" refuses '{"groups": [{"name": "g", "meshes": 0, "params": []}]}' \
  "groups[0].meshes: must be 1 or more"
check "meshes that do not divide the ranks" refuses '{"groups": [{"name": "g", "meshes": 3, "params": []}]}' \
  "group 'g': 8 ranks are not a multiple of 3 meshes"
check "what the library refuses" refuses \
  '{"groups": [{"name": "g", "params": [{"name": "p", "shape": [1]}, {"name": "p", "shape": [1]}]}]}' INVALID_ARGUMENT

planned --width 100 --heads 7
check "heads that do not divide the width" contains "$status $err" "1 fsdp-plan: --width 100 is not a multiple"
# Padding differs a little between divisors.
near() { [ $((($1 - $2) * ($1 - $2))) -le $(($2 / 20 * ($2 / 20))) ] || { echo "# $1 is not near $2"; false; }; }
# bytes ROLE: prints the bytes of the rank shown.
bytes() { python3 -c 'import json, sys; print(json.load(open("out"))["rank_bytes"][sys.argv[1]])' "$1"; }
planned --json --layers 2 --width 256 --heads 4 --vocab 512 --ranks 16 --replicate 2
hsdp=$(bytes optimizer)
planned --json --layers 2 --width 256 --heads 4 --vocab 512 --ranks 16 --replicate 2 --outer optim
check "replicas that shard optimizer state hold half of it each" near $((2 * $(bytes optimizer))) "$hsdp"
planned --json --layers 2 --width 256 --heads 4 --vocab 512 --ranks 16
host=$(bytes compute)
planned --json --layers 2 --width 256 --heads 4 --vocab 512 --ranks 16 --ranks-per-host 8
check "hosts of a shard axis hold the compute weights once each" near "$(bytes compute)" $((2 * host))
check "... and divide optimizer state by all ranks" near $((2 * $(bytes optimizer))) "$hsdp"
# Dense layers on all ranks, and 128 experts in 64 meshes: each rank has its share of two experts.
cat > experts.json <<END
{"groups": [
  {"name": "dense.{}", "repeat": 4, "params": [{"name": "dense.{}.w", "shape": [4096, 4096]}]},
  {"name": "experts.{}", "repeat": 4, "meshes": 64,
   "params": [{"name": "experts.{}.w", "shape": [2, 4096, 4096], "row_dimensions": 2}]}]}
END
experts() { planned --json --model experts.json --ranks "$@"; }
experts 16384
check "16,384 ranks in 64 meshes of experts are planned" equal $((4 * 4096 * 4096 * 8 / 4096 * (1 + 2 * 64 / 4))) \
  "$(bytes optimizer)"
experts 1024 --ranks-per-host 8
check "... on several hosts" equal "$(bytes optimizer)" $((4 * 4096 * 4096 * 8 / 1024 * (1 + 2 * 64)))
planned --ranks 16 --ranks-per-host 3
check "hosts that cut the shard axis unevenly are refused" equal $status 1
check "... which is said" contains "$err" "unevenly"
planned --ranks 3 --replicate 2
check "replicas that do not divide the ranks" contains "$status $err" \
  "1 fsdp-plan: --ranks 3 is not a multiple of --replicate 2"
planned --strategy zero9
check "an unknown strategy on the command line" equal $status 2
check "... is named" contains "$err" "zero9"
finish
