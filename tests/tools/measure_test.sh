#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: measure_test.sh MEASURE
# Tests which tables tools/dev/measure.py writes, with programs that write made-up numbers in place of fsdp-perf and
# fsdp2.sh.
set -u
measure=$(realpath "$1")
# shellcheck source-path=SCRIPTDIR source=tap.sh
. "$(dirname "$0")/tap.sh"
enter_scratch

# In each run, the program reports more than in the run before.
cat >perf <<'END'
#!/bin/sh
runs=$(($(cat runs 2>/dev/null || echo 0) + 1))
echo $runs >runs
while [ "$1" != --json ]; do shift; done
machine="made up, kernels ${KERNELS:-AVX3_DL}"
for variant in "back to back" "after computing"; do
  printf '{"op": "reduce", "variant": "%s", "bytes": 4096, "reduce_us": %s, "machine": "%s"}\n' "$variant" $runs "$machine"
done >"$2"
printf '{"op": "%s", "variant": "%s", "dtype": "%s", "bytes": %s, "ratio": 0.%s, "ns_per_tensor": %s, "machine": "%s"}\n' \
  adamw kernel fp32 16777216 5$runs null "$machine" \
  adamw kernel none 268435456 6$runs null "$machine" \
  adamw '10,000 small tensors' fp32 2560000 1 1$runs.2 "$machine" \
  quantize fp8_block '128 x 128' 16777216 7$runs null "$machine" >>"$2"
END
chmod +x perf
# In each run, train_gpt makes 1 token more a second than in the run before, and DeepSpeed is not there.
cat >trainings <<'END'
runs=$(($(cat runs 2>/dev/null || echo 0) + 1))
echo $runs >runs
echo "$1" >build
[ -z "${SKIPPED:-}" ] || { echo 'skipped: no PyTorch'; exit 77; }
while [ "$1" != --json ]; do shift; done
median='"step_s": 0.2, "compute_s": 0.1, "optimizer_half_s": 0.005'
cat >"$2" <<JSON
{"parameters": 5136000,
  "libfsdp": {"median": {$median, "beyond_compute_s": 0.01}, "memory": {"peak_rss_mib": 207, "sum_pss_mib": 323}},
  "fsdp2": {"median": {$median, "beyond_compute_s": 0.04}, "memory": {"peak_rss_mib": 963, "sum_pss_mib": 1486}},
  "trainings": [
  {"title": "train_gpt", "tokens_per_s": [500$runs], "ratio": []},
  {"title": "FSDP2", "tokens_per_s": [4000], "ratio": [1.2$runs]},
  {"title": "ZeRO-3", "tokens_per_s": [], "ratio": []}]}
JSON
END
# The raw socket is twice as fast in each run.
cat >namespaces <<'END'
runs=$(($(cat runs 2>/dev/null || echo 0) + 1))
echo $runs >runs
echo "$1 $2" >started
while [ "$1" != --json ]; do shift; done
for bytes in 64 65536; do
  printf '{"op": "outer", "variant": "TCP", "bytes": %s, "time_us": %s, "ratio": 0.5, "machine": "made up, kernels AVX2"}\n' \
    $bytes $((bytes / 64 * runs))
done >"$2"
END
mkdir docs
cat >docs/performance.md <<'END'
before
<!-- measured: reduce AVX-512 -->
old
<!-- end -->
after
END
row='| one after the other | 1.00 / 2.00 / 3.00 |'

capture python3 "$measure" --perf ./perf --only reduce --runs 3
check 'a table has the least, the median and the greatest of all runs' contains "$out" "$row"
check '... says its machine' contains "$out" 'AVX-512: made up, kernels AVX3_DL.'
check '... and changes no document without --write' contains "$(cat docs/performance.md)" old

rm runs
capture python3 "$measure" --perf ./perf --only reduce --runs 3 --write docs
document=$(cat docs/performance.md)
check 'the old table of this name and kind is gone' lacks "$document" old
check '... and the new one is in its place' contains "$document" "$row"
check '... between the same text' equal "$(sed -n '1p;$p' docs/performance.md)" 'before
after'

rm runs
KERNELS=AVX2 capture python3 "$measure" --perf ./perf --only reduce --runs 1 --write docs
document=$(cat docs/performance.md)
check 'a machine of another kind gets a table of its own' contains "$document" '| one after the other | 1.00 |'
check '... beside the first one' contains "$document" "$row"

rm runs
capture python3 "$measure" --perf ./perf --only adamw --runs 2
check 'AdamW has a table of its kernels' contains "$out" '| 2 ranks, x ref | 16 MiB | 256 MiB |'
check '... with a row for each kind of state' contains "$out" '| none | - | 0.61 / 0.61 / 0.62 |'
check '... and the time of an additional small tensor' contains "$out" '| each of 10,000 tensors of 64 elements | 11 / 12 / 12 ns more |  |'
rm runs
capture python3 "$measure" --perf ./perf --only quantize --runs 1
check 'quantization has a table, too' contains "$out" '| FP8 blocks | 0.71 |'

if [ "$(id -u)" = 0 ]; then
  rm runs
  capture python3 "$measure" --perf ./perf --namespaces ./namespaces --only hosts --runs 3
  check 'sums between hosts have a table with bytes and KiB' contains "$out" '| 2 hosts, x ref; us | 64 B | 64 KiB |'
  check '... with ratios and times' contains "$out" '| TCP | 0.50; 1 / 2 / 3 | 0.50; 1024 / 2048 / 3072 |'
  check '... of the same fsdp-perf, at full speed' equal "$(cat started)" './perf 0'
fi

# The program that stands for fsdp-perf counts its runs in the same file.
echo 0 >runs
capture python3 "$measure" --perf ./perf --trainings ./trainings --only tokens --runs 3
head='| GPT of 5.14 M parameters | tokens/s | train_gpt, times as fast |'
check 'trainings have a table of tokens a second' contains "$out" "$head"
check '... with the least, the median and the greatest' contains "$out" '| train_gpt | 5001 / 5003 / 5005 | - |'
check '... and of the ratios of each run' contains "$out" '| FSDP2 | 4000 | 1.21 / 1.23 / 1.25 |'
check '... without figures of a program that is not there' contains "$out" '| ZeRO-3 | - | - |'
check '... for the machine that fsdp-perf names' contains "$out" '<!-- measured: tokens AVX-512 -->'
check '... and of the build of fsdp-perf' equal "$(cat build)" "$(dirname "$PWD")"
capture python3 "$measure" --perf ./perf --trainings ./trainings --only sharding --runs 1
check 'what sharding costs has a table' contains "$out" '| 2 ranks of one thread | libfsdp | FSDP2 | ZeRO-3 |'
check '... of times' contains "$out" '| 5.14 M parameters: step - compute, ms | 10.0 | 40.0 | - |'
check '... of ratios' contains "$out" "| 5.14 M parameters: libfsdp's, divided by it | - | 0.250 | - |"
check '... and of memory' contains "$out" '| 5.14 M parameters: both ranks, proportional, MiB | 323 | 1486 | - |'
SKIPPED=1 capture python3 "$measure" --perf ./perf --trainings ./trainings --only tokens,reduce --runs 1
check 'a table for which a program is missing is left out' lacks "$out" tokens
check '... with the reason' contains "$err" 'skipped: no PyTorch'
check '... and the name of the table' contains "$err" "table 'tokens' is left out"
check '... and the other tables are there' contains "$out" 'measured: reduce AVX-512'
printf '%s\n' '<!-- measured: tokens AVX-512 -->' old '<!-- end -->' >>docs/performance.md
capture python3 "$measure" --perf ./perf --trainings ./trainings --only tokens --runs 1 --write docs
check 'the table of tokens is written into the document' contains "$(cat docs/performance.md)" '| FSDP2 | 4000 |'
check '... in place of the old one' lacks "$(cat docs/performance.md)" old

capture python3 "$measure" --perf ./perf --only short --write docs
check 'a table without a marker in the document is an error' contains "$err" 'no marker "<!-- measured: short'
capture python3 "$measure" --perf false --only reduce
check 'a measurement that fails is an error' contains "$err" 'status 1'
echo 'exit 3' >trainings
capture python3 "$measure" --perf ./perf --trainings ./trainings --only tokens
check '... also if trainings fail' contains "$err" 'status 3'
capture python3 "$measure" --only nonsense
check 'an unknown table is an error' contains "$err" "no table 'nonsense'"
finish
