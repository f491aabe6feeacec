#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: compare_runs_test.sh COMPARE_RUNS
# Tests which runs tests/gpu/compare_runs.py accepts as the same training, with made-up runs of 20 steps.
set -u
compare=$(realpath "$1")
# shellcheck source-path=SCRIPTDIR source=tap.sh
. "$(dirname "$0")/tap.sh"
enter_scratch

# run OUT STEP KEY FACTOR [HASH]: writes a run whose value of that step and key is multiplied by the factor. STEP 0
# changes none.
run() {
  awk -v at="$2" -v key="$3" -v factor="$4" -v hash="${5:-0123}" 'BEGIN {
    for (step = 1; step <= 20; ++step) {
      value["loss"] = 5 - step / 10
      value["grad_norm"] = 3 - step / 20
      if (step == at) value[key] *= factor
      printf "{\"step\": %d, \"loss\": %.17g, \"grad_norm\": %.17g}\n", step, value["loss"], value["grad_norm"]
    }
    printf "{\"weights_hash\": \"%s\"}\n", hash
  }' >"$1.json"
}
# differs TOLERANCE: compares the runs `a` and `b`, and sets $status and $err.
differs() { capture python3 "$compare" --tolerance "$1" a.json b.json; }
# passes TOLERANCE STEP KEY FACTOR: the change is accepted. refuses: the error names step and key.
passes() { run b "$2" "$3" "$4" && differs "$1" && equal "$status" 0 && contains "$out" 'largest relative difference'; }
refuses() {
  run b "$2" "$3" "$4"
  differs "$1"
  equal "$status" 1 && contains "$err" "step $2: $3 "
}

run a 0 loss 1
check 'a run is the same as itself' passes 0 0 loss 1
check 'a norm of step 2 that is wrong by 1e-3 is refused' refuses 1e-5 2 grad_norm 1.001
check '... and one of step 5 by 2e-5' refuses 1e-5 5 grad_norm 1.00002
check 'from step 6 on, norms may be 100 times as far apart' passes 1e-5 6 grad_norm 1.0005
check '... and no further' refuses 1e-5 6 grad_norm 0.998
check '... to the end' refuses 1e-5 20 grad_norm 1.002
check 'a loss that is wrong by 1e-4 at the end is refused' refuses 1e-5 20 loss 1.0001
check 'losses within the tolerance pass' passes 1e-5 20 loss 1.000005
check 'tolerance 0 asks for the same norms, to the end' refuses 0 20 grad_norm 1.000000000001
check '... and the same losses' refuses 0 1 loss 1.000000000001
run b 0 loss 1 4567
differs 0
check '... and the same weights' contains "$err" 'weights 0123 and 4567'
differs 1e-5
check '... which others need not have' equal "$status" 0
run b 0 loss 1
sed -i '20s/"loss": [^,]*/"loss": NaN/' b.json
differs 1e-5
check 'a loss that is no number is refused' contains "$err" 'step 20: loss '
head -n 12 b.json >short && mv short b.json
differs 1e-5
check 'runs of other lengths are refused' contains "$err" 'a.json has 21 lines, b.json 12'
run a 20 loss 2 && run b 20 loss 2
differs 0
check 'a run that has learnt nothing is refused' contains "$err" 'nothing was learnt'
finish
