#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: run_gpu_test.sh RUN_GPU
# Tests which steps tests/run_gpu.sh skips, and with which reason. Stand-ins replace everything that it runs.
set -u
script=$(realpath "$1")
# shellcheck source-path=SCRIPTDIR source=tap.sh
. "$(dirname "$0")/tap.sh"
enter_scratch
mkdir -p tests bin build-gpu/tools build-gpu/examples
cp "$script" tests/run_gpu.sh

# stand_in FILE: creates a program that succeeds and writes the file that --json names.
stand_in() {
  cat >"$1" <<'END'
#!/bin/sh
while [ $# -gt 0 ]; do
  [ "$1" = --json ] && echo '{}' >"$2"
  shift
done
END
  chmod +x "$1"
}
for tool in bin/nvcc bin/meson bin/ninja bin/c++ build-gpu/tools/fsdp-info build-gpu/tools/fsdp-run \
  build-gpu/examples/train_gpt build-gpu/examples/train_gpt_cuda; do
  stand_in $tool
done
# This stand-in for Python reports the version of NCCL, and counts without tests.
cat >bin/python <<'END'
#!/bin/sh
case "$*" in
  *ncclGetVersion*) [ -n "$NCCL_VERSION" ] && echo "$NCCL_VERSION" ;;
  *count.py*) echo 1 0 0 ;;
esac
END
chmod +x bin/python
# run_nccl VERSION
run_nccl() { capture env "PATH=$PWD/bin:$PATH" NCCL_VERSION="$1" sh tests/run_gpu.sh --python "$PWD/bin/python" nccl; }

run_nccl 22809
check 'an NCCL whose ranks share no GPU skips that' contains "$out" \
  'skipped 2 ranks that share the GPU over NCCL: its version is 22809, and sharing needs 23003 (2.30.3) or later'
check '... and fails nothing' equal "$status" 0
run_nccl 23003
check 'one whose ranks do runs it' contains "$out" 'ok      2 ranks that share the GPU over NCCL'
check '... all of it' contains "$out" '0 failed, 0 skipped'
run_nccl ''
check 'one that cannot be asked skips it' contains "$out" 'its version is not known'
finish
