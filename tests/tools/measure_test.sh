#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: measure_test.sh MEASURE
# Tests which tables tools/dev/measure.py writes, with a program that prints made-up lines in place of fsdp-perf.
set -u
measure=$(realpath "$1")
# shellcheck source-path=SCRIPTDIR source=tap.sh
. "$(dirname "$0")/tap.sh"
enter_scratch

# In each run, the program reports 1 us more than in the run before.
cat >perf <<'END'
#!/bin/sh
runs=$(($(cat runs 2>/dev/null || echo 0) + 1))
echo $runs >runs
while [ "$1" != --json ]; do shift; done
machine="made up, kernels ${KERNELS:-AVX3_DL}"
for variant in "back to back" "after computing"; do
  printf '{"op": "reduce", "variant": "%s", "bytes": 4096, "reduce_us": %s, "machine": "%s"}\n' "$variant" $runs "$machine"
done >"$2"
END
chmod +x perf
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

capture python3 "$measure" --perf ./perf --only short --write docs
check 'a table without a marker in the document is an error' contains "$err" 'no marker "<!-- measured: short'
capture python3 "$measure" --perf false --only reduce
check 'a measurement that fails is an error' contains "$err" 'status 1'
capture python3 "$measure" --only nonsense
check 'an unknown table is an error' contains "$err" "no table 'nonsense'"
finish
