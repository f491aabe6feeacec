#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The wheel, installed into an empty venv, trains. usage: wheel_test.sh SOURCE_ROOT [LIBRARY]
# If LIBRARY is given, it is packed. Otherwise the library is built as for users, which takes minutes.
set -u
root=$1
[ $# -lt 2 ] || { FSDP_WHEEL_LIBRARY=$(realpath "$2") && export FSDP_WHEEL_LIBRARY; }
unset FSDP_LIBRARY PYTHONPATH
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

skip() {
  echo "1..0 # SKIP $1"
  exit 0
}
number=0
report() {
  number=$((number + 1))
  if [ "$1" -eq 0 ]; then echo "ok $number - $2"; else
    echo "not ok $number - $2"
    sed 's/^/# /' "$work/log"
    exit 1
  fi
}

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null || skip 'no Python 3.9 or later'
"$python" -m venv "$work/venv" >"$work/log" 2>&1 || skip "no venv can be made: $(tail -n 1 "$work/log")"
python=$work/venv/bin/python
# No index: neither the build nor the package needs anything.
"$python" -m pip wheel --no-deps --no-index --disable-pip-version-check --wheel-dir "$work/dist" \
  "$root/bindings/python" >"$work/log" 2>&1
report $? 'pip wheel'
ls "$work/dist" >"$work/log"
grep -q '^libfsdp-[0-9.]*-py3-none-\(manylinux_2_[0-9]*\|linux\)_[a-z0-9_]*\.whl$' "$work/log"
report $? "is named $(cat "$work/log")"
"$python" -m pip install --no-index --disable-pip-version-check "$work"/dist/*.whl >"$work/log" 2>&1
report $? 'pip install into an empty venv'
unzip -l "$work"/dist/*.whl >"$work/log" 2>&1 || "$python" -m zipfile -l "$work"/dist/*.whl >"$work/log"
grep -q 'libfsdp/torch/sharded.py' "$work/log"
report $? 'has the packages inside of it'
cp "$root/bindings/python/tests/helper.py" "$work"
cat >"$work/train.py" <<'PROGRAM'
import libfsdp as fsdp
from helper import flat, small_model, train

def rank(context):
    model, group = small_model(context)
    with model:
        for _ in range(5):
            train(model, group, lr=0.5)
        return flat(group.read_param("b")), fsdp.lib.path

weights, path = fsdp.run_local(2, rank)[0]
assert all(abs(found - (wanted - 2.5)) < 1e-4 for found, wanted in zip(weights, (1, 2, 3, 4))), weights
assert "site-packages" in path, path
PROGRAM
(cd "$work" && "$python" train.py) >"$work/log" 2>&1
report $? 'five steps of two ranks'
echo "1..$number"
