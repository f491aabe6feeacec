#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: muon_torch_test.sh FSDP_RUN LIBFSDP
# A tiny GPT trains with libfsdp.torch.Muon as with torch alone, and its weights have the same bits on any number of
# ranks. The test is skipped if Python has no torch.
set -u
run=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
FSDP_LIBRARY=$(realpath "$2") PYTHONPATH=$here/../../bindings/python OMP_NUM_THREADS=1
export FSDP_LIBRARY PYTHONPATH OMP_NUM_THREADS
python=${FSDP_TORCH_PYTHON:-python3}
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$here/../tools/tap.sh"
if ! "$python" -c 'import numpy, torch' 2>/dev/null; then
  skip 'a GPT trains by Muon as torch alone' 'no torch in python3 (FSDP_TORCH_PYTHON names another one)'
  finish
fi

# trains RANKS [REPLICAS]: runs the program, which itself compares losses and weights with those of torch alone.
trains() {
  if "$run" -n "$1" --no-prefix "$python" "$here/../../bindings/python/examples/muon_torch.py" ${2:+"$2"} >log 2>&1 &&
    contains "$(cat log)" "$1 ranks"; then
    tail -1 log >"weights.$1.${2:-1}"
    return
  fi
  sed 's/^/# /' log
  return 1
}
has_bits_of_one() { [ -s weights.1.1 ] && grep -q '^weights [0-9a-f]\{16\}$' weights.1.1 && cmp -s weights.1.1 "$1"; }
enter_scratch
check 'a GPT on one rank trains by Muon as torch alone' trains 1
for ranks in 2 3 4; do
  check "a GPT on $ranks ranks trains by Muon as torch alone" trains $ranks
  check "its weights have the bits of one rank's ($ranks ranks)" has_bits_of_one weights.$ranks.1
done
check 'two replicas of two ranks train by Muon as torch alone' trains 4 2
check "their weights have the bits of one rank's" has_bits_of_one weights.4.2
finish
