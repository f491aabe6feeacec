#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: moe_torch_test.sh FSDP_RUN LIBFSDP
# A small Mixtral with experts on meshes of their own trains as torch alone does. The test is skipped if Python has no
# torch.
set -u
run=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
FSDP_LIBRARY=$(realpath "$2") PYTHONPATH=$here/../../bindings/python OMP_NUM_THREADS=1
export FSDP_LIBRARY PYTHONPATH OMP_NUM_THREADS
python=${FSDP_TORCH_PYTHON:-python3}
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$here/../tools/tap.sh"
if ! "$python" -c 'import numpy, torch' 2>/dev/null; then
  skip 'a Mixtral trains as torch alone' 'no torch in python3 (FSDP_TORCH_PYTHON names another one)'
  finish
fi

# trains RANKS: runs the program, which itself compares losses, norms and weights.
trains() {
  "$run" -n "$1" --no-prefix "$python" "$here/../../bindings/python/examples/moe_torch.py" >"$work/log" 2>&1 &&
    contains "$(cat "$work/log")" "$1 ranks" && contains "$(cat "$work/log")" 'weights differ by at most' && return
  sed 's/^/# /' "$work/log"
  return 1
}
enter_scratch
for ranks in 1 2 4; do
  check "a Mixtral on $ranks ranks trains as torch alone" trains $ranks
done
finish
