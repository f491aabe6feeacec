#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: train_gpt_test.sh FSDP_RUN TRAIN_GPT
# Trains small models for few steps, and checks what the flags must change and what they must not.
set -u
run=$(realpath "$1")
train_gpt=$(realpath "$2")
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$here/../tools/tap.sh"
enter_scratch
export OPENBLAS_NUM_THREADS=1
small="--layers 2 --width 48 --heads 3 --context 24 --batch 12 --steps 6 --lr 1e-2 --quiet --json out.json --corpus $here"

# train RANKS FLAGS...: trains with processes, or with threads if RANKS is threads:N. The output is in log, and the
# numbers are in out.json. If the run fails, however late, out.json does not exist.
train() {
  ranks=$1
  shift
  rm -f out.json
  # shellcheck disable=SC2086
  case $ranks in
    threads:*) "$train_gpt" --threads "${ranks#threads:}" $small "$@" >log 2>&1 ;;
    *) "$run" -n "$ranks" --no-prefix "$train_gpt" $small "$@" >log 2>&1 ;;
  esac || { sed 's/^/# /' log; rm -f out.json trace.json; }
}

field() { sed -n "s/.*\"$1\": \"\{0,1\}\([^,\"}]*\).*/\1/p" out.json 2>/dev/null; }
# Prints all losses and gradient norms, and the hash of the weights. They are equal only if the runs have the same bits.
numbers() { field loss; field grad_norm; field weights_hash; }
same_bits() { [ -n "$expected" ] && equal "$(numbers)" "$expected"; }

# close_to FILE: the losses of out.json equal those of FILE up to rounding.
close_to() {
  field loss >losses
  [ "$(wc -l <losses)" -eq 6 ] && paste losses "$1" | awk '
    { d = $1 - $2; if (d < 0) d = -d; if (!(d <= 2e-5)) { print "# " $1 " against " $2; bad = 1 } }
    END { exit bad }'
}
falls() { field loss | awk 'NR == 1 { first = $1 } { last = $1 } END { exit !(NR == 6 && last < first - 0.5) }'; }
# state_is LOW HIGH: compute + main + grad + optimizer of every rank, in percent of an unsharded copy.
state_is() {
  tail -n 1 out.json | python3 -c '
import json, sys
low, high = map(float, sys.argv[1:])
end = json.loads(sys.stdin.read())
parts = [100 * sum(rank[role] for role in ("compute", "main", "grad", "optimizer")) / end["unsharded_bytes"]
         for rank in end["role_bytes"]]
print("#", *parts)
sys.exit(not all(low <= part <= high for part in parts))' "$1" "$2"
}

train 1
field loss >single
check 'one rank learns' falls
for ranks in 2 3 threads:4; do
  train $ranks
  check "$ranks ranks see the same global batch as one" close_to single
done
train 2 --microbatches 3
check 'three micro-batches see the same global batch' close_to single
train 2 --microbatches 3 --reduce-last
check 'and so they do reduced once' close_to single

train 2
expected=$(numbers)
check 'the JSON file has a hash' equal "$(field weights_hash | wc -c)" 17
check 'half of the state is on each of two ranks' state_is 50 60
for flags in '' '--strategy no_shard' '--strategy zero1' '--strategy optim_grads' '--strategy zero3' '--unshard copied' \
  '--unshard copied --prefetch 0' '--unshard copied --prefetch 2' '--no-overlap' '--recompute' \
  '--debug-delay-us 2000' '--recompute --unshard copied --debug-delay-us 1000' '--home file:. --home-grads' '--home host'; do
  # shellcheck disable=SC2086
  train 2 $flags
  check "same bits with ${flags:-the same flags}" same_bits
done
train threads:2
check 'same bits with threads' same_bits
train 2 --seed 2
other_bits() { [ -n "$(numbers)" ] && [ "$(numbers)" != "$expected" ]; }
check 'other bits with another seed' other_bits

# On these meshes the sums have the same bits if gradients are added in the same blocks. Norms are summed shard by
# shard, and these meshes have different shards.
sums() { field loss; field weights_hash; }
same_sums() { [ -n "$expected" ] && equal "$(sums)" "$expected"; }
other_sums() { [ -n "$(sums)" ] && [ "$(sums)" != "$expected" ]; }
train 4 --replicas 2
expected=$(sums)
check 'two replicas see the same global batch as one rank' close_to single
check 'each has half of the state on each of its ranks' state_is 50 60
train 4 --replicas 2 --outer hfsdp
check 'same sums with replicas that shard the rest among them' same_sums
check '... of which each rank has a quarter, and half of the weights' state_is 37 41
train 4 --reduction-block 2
check 'same sums with one replica that adds in blocks' same_sums
check '... and a quarter of the state on each rank' state_is 25 30
train 4 --ranks-per-host 2
check 'same sums with hosts of two ranks' same_sums
check '... whose ranks keep what they sum on the host' state_is 31 35
train threads:4 --replicas 2 --outer hfsdp --ranks-per-host 2 --microbatches 3 --unshard copied
expected=$(sums)
train 4 --replicas 2 --microbatches 3
check 'same sums with three micro-batches' same_sums
train 4 --microbatches 3
check 'other sums without blocks' other_sums

train 2 --strategy ddp
check 'ddp keeps all of the state' state_is 100 120
for flags in '--tied' '--norm rmsnorm --tied --recompute' '--compute-dtype bf16' '--compute-dtype bf16 --reduce-dtype bf16' \
  '--clip 0 --weight-decay 0'; do
  # shellcheck disable=SC2086
  train 2 $flags
  check "learns with $flags" falls
  expected=$(numbers)
  # shellcheck disable=SC2086
  train threads:2 $flags --unshard copied
  check "same bits copied with $flags" same_bits
done
# near_narrow: expects the last loss within 2 % of the loss with bf16 weights.
near_narrow() {
  field loss | tail -n 1 | awk -v narrow="$narrow" '{ d = $1 / narrow - 1; exit !(d < 0.02 && d > -0.02) }'
}
wide='--width 64 --heads 4'  # MXFP8 needs multiples of 32
# shellcheck disable=SC2086
train 2 $wide --compute-dtype bf16
narrow=$(field loss | tail -n 1)
for flags in '--quantize mxfp8' '--quantize fp8_block' '--quantize fp8'; do
  # shellcheck disable=SC2086
  train 2 $wide $flags
  check "learns with $flags" falls
  check "... as with bf16 weights" near_narrow
  expected=$(numbers)
  # shellcheck disable=SC2086
  train threads:2 $wide $flags --unshard copied --recompute
  check "same bits copied and recomputed with $flags" same_bits
done
# Main weights and states take fewer bytes. An element of a matrix has 18, 16, 12.03, 10.03, 14 and 8.03 bytes (with
# gradients).
train 2 $wide --compute-dtype bf16
plain=$(numbers)
for flags in '--main split16' '--states 8bit' '--main split16 --states 8bit' '--main none' '--main none --states 8bit'; do
  # shellcheck disable=SC2086
  train 2 $wide --compute-dtype bf16 $flags
  check "learns with $flags" falls
  check "... as with fp32 beside them" near_narrow
  check "... with half of the state on each rank" state_is 50 60
  expected=$(numbers)
  [ "$flags" = '--main split16' ] || check '... and other bits' [ "$expected" != "$plain" ]
  # shellcheck disable=SC2086
  train threads:2 $wide --compute-dtype bf16 $flags --unshard copied --strategy zero1
  check "same bits copied and sharded otherwise with $flags" same_bits
  # shellcheck disable=SC2086
  train 2 $wide --compute-dtype bf16 $flags --home file:.
  check "same bits at home in a file with $flags" same_bits
done
refused() { train 1 "$@" && contains "$(cat log)" "train_gpt: $text"; }
text='--home takes host or file:DIRECTORY, not file:'
check 'what --home takes is said' refused --home file:
text='--home-grads needs --home'
check 'what --home-grads needs is said' refused --home-grads
text='--main takes one of fp32|split16|none, not half'
check 'what --main takes is said' refused --main half
text='--states takes one of fp32|8bit, not 4bit'
check 'what --states takes is said' refused --states 4bit
text='--main split16 and none need --compute-dtype bf16'
check 'fp32 weights are their own main weights' refused --main split16
train 2 --quantize mxfp8
check 'what does not fit is refused by name' contains "$(cat log)" "parameter 'layers.0.attention.qkv.weight' of group 'layers.0': FSDP_QUANTIZE_MXFP8 needs"
# trace_shows RANKS: trace.json is JSON, has every rank as a process, and shows the parts of a step in each.
trace_shows() {
  python3 -m json.tool trace.json >/dev/null && python3 - "$1" <<'EOF'
import json, sys
events = [e for e in json.load(open("trace.json"))["traceEvents"] if e["ph"] != "M"]
ranks = sorted({e["pid"] for e in events})
assert ranks == list(range(int(sys.argv[1]))), ranks
for rank in ranks:
    names = [e["name"] for e in events if e["pid"] == rank]
    for name, count in (("step", 6), ("forward block", 12), ("backward block", 12), ("step_adamw", 6), ("finish_grads", 6)):
        assert names.count(name) == count, (rank, name, names.count(name))
    kinds = {e["cat"] for e in events if e["pid"] == rank}
    assert kinds >= {"call", "user", "collective", "instant"}, kinds
begins = [min(e["ts"] for e in events if e["pid"] == rank and e["name"] == "step") for rank in ranks]
assert max(begins) - min(begins) < 10e6, begins  # all ranks use one clock
EOF
}
for ranks in 2 threads:3; do
  train $ranks --trace trace.json --unshard copied
  check "a trace has all of $ranks ranks" trace_shows "${ranks#threads:}"
  check 'the parts of a trace are gone' equal "$(ls trace.json*)" trace.json
done
train 2 --sample 20 --prefetch 2
check 'prints a sample' contains "$(cat log)" '--- end ---'
"$run" -n 2 --no-prefix "$train_gpt" --layers 1 --width 16 --heads 2 --context 8 --batch 4 --steps 2 --corpus "$here" >log 2>&1
check 'prints the version' contains "$(cat log)" 'libfsdp 0.'
check 'prints the table of memory' contains "$(cat log)" 'state of one copy'

# refuses MESSAGE FLAGS...: expects status 2 and the message.
refuses() {
  message=$1
  shift
  "$train_gpt" "$@" >log 2>&1
  equal $? 2 && contains "$(cat log)" "$message"
}
check 'refuses an unknown flag' refuses '--laers is not an option' --laers 3
check 'refuses a word for a number' refuses '--layers takes a whole number, not many' --layers many
check 'refuses zero heads' refuses '--heads must be at least 1' --heads 0
check 'refuses a missing value' refuses '--width needs a value' --width --tied
check 'refuses an unknown strategy' refuses '--strategy takes one of no_shard|' --strategy zero4
check 'refuses heads that do not divide' refuses '--heads must divide --width' --width 10 --heads 3
trace_refused() {
  "$train_gpt" --trace nowhere/trace --steps 0 --corpus "$here" --quiet >log 2>&1
  equal $? 1 && contains "$(cat log)" 'nowhere/trace' && contains "$(cat log)" 'No such file'
}
check 'refuses a trace that cannot be written before it trains' trace_refused
check 'refuses a corpus that is not there' refuses 'nowhere: No such file' --corpus "$PWD/nowhere"
# mesh_refused MESSAGE FLAGS...: expects status 1 and the library's message.
mesh_refused() {
  message=$1
  shift
  "$train_gpt" --threads 4 --steps 0 --corpus "$here" --quiet "$@" >log 2>&1
  equal $? 1 && contains "$(cat log)" "$message"
}
check 'refuses replicas that do not divide the ranks' mesh_refused 'replicate_size 3' --replicas 3
check 'refuses blocks that do not divide the shards' mesh_refused 'reduction_block_size 3' --reduction-block 3
check 'refuses hosts of unequal size' mesh_refused 'lies unevenly on its hosts' --ranks-per-host 3
check 'refuses to shard over replicas that are not there' mesh_refused 'the mesh has one' --outer hfsdp
# kernels_of OPTIONS...: prints what OpenBLAS names its kernels under `env` with these options.
kernels_of() {
  env "$@" OPENBLAS_VERBOSE=2 "$train_gpt" --steps 0 --corpus "$here" --quiet 2>&1 | sed -n 's/^Core: //p' | tail -n 1
}
newer_kernels() { case $(kernels_of -u OPENBLAS_CORETYPE) in Prescott | "") false ;; esac; }
if grep -qw avx2 /proc/cpuinfo && [ "$(kernels_of OPENBLAS_CORETYPE=Prescott)" = Prescott ]; then
  check 'takes newer kernels than OpenBLAS has for a processor that it does not know' newer_kernels
fi
check 'refuses a batch that does not divide' refuses 'does not divide by 3 ranks x 1 micro-batches' --threads 3 --batch 16
finish
