#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: torch_layers_test.sh FSDP_RUN LIBFSDP
# torch's layers over libfsdp's memory train as torch alone does. The test is skipped if Python has no torch. With
# FSDP_TORCH_DEVICE=cuda the ranks share a GPU.
set -u
run=$(realpath "$1")
FSDP_LIBRARY=$(realpath "$2")
export FSDP_LIBRARY OMP_NUM_THREADS=1
here=$(cd "$(dirname "$0")" && pwd)
python=${FSDP_TORCH_PYTHON:-python3}
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$here/../tools/tap.sh"
enter_scratch

# This part needs no torch: the calls that make a model accept the example's structures.
declare_model() {
  PYTHONPATH="$here/../../examples/torch_layers" "$python" - <<'EOF'
import ctypes as c
import libfsdp as fsdp
library = fsdp.Library()
context, model, group, param = c.c_void_p(), c.c_void_p(), c.c_void_p(), (fsdp.Param * 1)()
library.call("fsdp_create_context", c.byref(fsdp.ContextOptions(world_size=1)), c.byref(context))
library.call("fsdp_create_model", context, c.byref(fsdp.ModelOptions(reduce_dtype=fsdp.FLOAT32)), c.byref(model))
param[0].__init__(name=b"layer.weight", shape=(c.c_uint64 * 2)(8, 4), dimension_count=2, dtype=fsdp.FLOAT32)
library.call("fsdp_create_group", model, b"layer", param, c.c_uint64(1), c.c_uint64(c.sizeof(fsdp.Param)), None, c.byref(group))
library.call("fsdp_seal_model", model)
library.call("fsdp_publish_weights", model, None)
library.call("fsdp_unshard", group, fsdp.EVAL, c.c_uint32(0), None)
tensor = fsdp.Tensor()
library.call("fsdp_get_param", group, c.c_uint64(0), fsdp.EVAL, c.byref(tensor))
assert tensor.element_count == 32, tensor.element_count
library._calls.fsdp_destroy_model(model)
library._calls.fsdp_destroy_context(context)
EOF
}
check "the example's structures are the library's" declare_model
if ! "$python" -c 'import torch' 2>/dev/null; then
  skip 'torch alone trains' 'no torch in python3 (FSDP_TORCH_PYTHON names another one)'
  finish
fi
train="$python $here/../../examples/torch_layers/train.py --device ${FSDP_TORCH_DEVICE:-cpu} --layers 2 --width 64 --heads 4 --context 32 --batch 8 --steps 8"

# agree A B TOLERANCE: compares the losses and norms of two runs.
agree() {
  "$python" - "$@" <<'EOF'
import json, sys
a, b = ([json.loads(line) for line in open(name)] for name in sys.argv[1:3])
assert len(a) == len(b) == 8, (len(a), len(b))
for x, y in zip(a, b):
    for key in ("loss", "grad_norm"):
        assert abs(x[key] - y[key]) <= float(sys.argv[3]) * abs(x[key]), (key, x, y)
assert b[-1]["loss"] < b[0]["loss"] - 0.3, b
EOF
}

# run_to OUT COMMAND...: runs the command. If it fails, however late, it leaves no numbers.
run_to() {
  out=$1
  shift
  "$@" --json "$out" >log 2>&1 || { sed 's/^/# /' log; rm -f "$out"; }
}
# shellcheck disable=SC2086
{
  run_to plain.json $train --plain
  check 'torch alone trains' [ -s plain.json ]
  run_to one.json $train
  check 'one rank trains as torch alone' agree plain.json one.json 1e-5
  run_to forced.json $train --force
  check 'and so with communication in a world of one' agree plain.json forced.json 1e-5
  run_to two.json "$run" -n 2 --no-prefix $train
  check 'and two ranks' agree plain.json two.json 1e-5
  run_to narrow.json "$run" -n 2 --no-prefix $train --dtype bfloat16
  check 'bfloat16 weights and math come close' agree plain.json narrow.json 2e-2
}
finish
