#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds libfsdp with CUDA on a machine with a GPU and runs what only a GPU can show.
#
# usage: sh tests/run_gpu.sh [--packages FOLDER] [--python PYTHON] [--quick]
#   --packages FOLDER  where the system lacks libraries: a folder of .deb files (tools/dev/fetch_packages.sh fills one), which
#                      are unpacked there, not installed
#   --python PYTHON    a Python with torch, for the torch examples and its NCCL; default: python3
#   --quick            leave out compute-sanitizer and the benchmarks
#
# It needs nvcc, a C++ compiler, Meson and ninja. The last line is "N passed, N failed, N skipped"; logs stay in build-gpu/.
set -u
cd "$(dirname "$0")/.." || exit 1

packages='' python=python3 quick=0
while [ $# -gt 0 ]; do
  case $1 in
    --packages) packages=$2; shift ;;
    --python) python=$2; shift ;;
    --quick) quick=1 ;;
    *) echo "tests/run_gpu.sh: unknown argument '$1' (known: --packages FOLDER --python PYTHON --quick)" >&2; exit 2 ;;
  esac
  shift
done

passed=0 failed=0 skipped=0
report() {
  printf '\n%s passed, %s failed, %s skipped\n' "$passed" "$failed" "$skipped"
  [ $failed -eq 0 ] && [ $passed -gt 0 ]
  exit
}
give_up() {
  echo "FAILED: $*"
  failed=$((failed + 1))
  report
}

# check NAME COMMAND...: one test; status 77 is skipped.
check() {
  name=$1
  shift
  "$@" >build-gpu/check.log 2>&1
  case $? in
    0) passed=$((passed + 1)); echo "ok      $name" ;;
    77) skipped=$((skipped + 1)); echo "skipped $name: $(tail -n 1 build-gpu/check.log)" ;;
    *) failed=$((failed + 1)); echo "FAILED  $name"; tail -n 40 build-gpu/check.log ;;
  esac
}

# unpack FOLDER: its .deb files into FOLDER/root, and tells compilers and loaders of it.
unpack() {
  root=$(realpath "$1")/root
  if [ ! -d "$root" ]; then
    for deb in "$1"/*.deb; do
      dpkg-deb -x "$deb" "$root" || give_up "unpacking $deb"
    done
  fi
  triplet=$(gcc -print-multiarch 2>/dev/null)
  libraries=$root/usr/lib/${triplet:-x86_64-linux-gnu}
  # What pkg-config says must point into the folder.
  find "$root" -name '*.pc' -exec sed -i "s|^prefix=/usr\$|prefix=$root/usr|; s|=/usr/|=$root/usr/|" {} +
  export PKG_CONFIG_PATH="$libraries/pkgconfig:$root/usr/share/pkgconfig:$root/usr/lib/pkgconfig"
  export CPATH="$root/usr/include" LIBRARY_PATH="$libraries" LD_LIBRARY_PATH="$libraries:${LD_LIBRARY_PATH:-}"
  export CMAKE_PREFIX_PATH="$root/usr"
}

# Ranks that are threads of one process and share a GPU wait for each other's streams, which CUDA else puts into few queues.
export CUDA_DEVICE_MAX_CONNECTIONS=32
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || give_up 'no GPU: nvidia-smi does not list one'
[ -n "$packages" ] && unpack "$packages"
"$python" -c 'import torch; print("torch", torch.__version__)' 2>/dev/null || echo "no torch in $python"

if [ ! -f build-gpu/build.ninja ]; then
  meson setup build-gpu -Dcuda=enabled -Dnccl=enabled -Dtests=enabled -Dexamples=auto >/dev/null ||
    { tail -n 40 build-gpu/meson-logs/meson-log.txt; give_up 'configure build-gpu'; }
fi
ninja -C build-gpu >build-gpu/compile.log 2>&1 || { tail -n 40 build-gpu/compile.log; give_up 'build build-gpu'; }
build-gpu/tools/fsdp-info || give_up 'fsdp-info does not run'

# NCCL lies where torch's wheel put it, unless somebody says otherwise.
if [ -z "${FSDP_NCCL_LIBRARY:-}" ]; then
  found=$("$python" -c 'import glob, sys; print(next(iter(p for d in sys.path for p in glob.glob(d + "/nvidia/nccl/lib/libnccl.so.2")), ""))' 2>/dev/null)
  [ -n "$found" ] && export FSDP_NCCL_LIBRARY="$found"
fi
echo "NCCL: ${FSDP_NCCL_LIBRARY:-as the loader finds it}"

meson test -C build-gpu --no-rebuild --print-errorlogs --suite gpu --suite cuda
counts=$(python3 tests/count.py build-gpu/meson-logs/testlog.json $?)
# shellcheck disable=SC2086
set -- ${counts:-0 1 0}
passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))

# The example against the host's run of the same model, against itself, and as a graph.
small='--layers 2 --width 128 --heads 4 --context 64 --batch 16 --steps 20 --lr 3e-3 --quiet --corpus tests'
gpt() {
  out=$1
  shift
  # shellcheck disable=SC2086
  "$@" $small --json "build-gpu/$out.json"
}
compare() { "$python" tests/gpu/compare_runs.py "$@"; }
run=build-gpu/tools/fsdp-run
cuda=build-gpu/examples/train_gpt_cuda
if [ -x $cuda ] && [ -x build-gpu/examples/train_gpt ]; then
  check 'train_gpt on the host' gpt host build-gpu/examples/train_gpt
  check 'train_gpt_cuda, one rank' gpt gpu $cuda
  check '... has the losses of the host' compare --tolerance 1e-4 build-gpu/host.json build-gpu/gpu.json
  check '... again' gpt again $cuda
  check '... has the same bits' compare --tolerance 0 build-gpu/gpu.json build-gpu/again.json
  check '... with communication forced over NCCL' gpt nccl $cuda --force-communication --transport nccl
  check '... has the losses of the host' compare --tolerance 1e-4 build-gpu/host.json build-gpu/nccl.json
  check '... with delays at every event edge' gpt delays $cuda --force-communication --transport nccl --debug-delay-us 2000
  check '... has the same bits' compare --tolerance 0 build-gpu/nccl.json build-gpu/delays.json
  check '... as a graph' gpt graph $cuda --force-communication --transport nccl --graph
  check '... has the same bits' compare --tolerance 0 build-gpu/nccl.json build-gpu/graph.json
  for ranks in 2 4; do
    check "$ranks ranks that share the GPU, staged" gpt staged$ranks $run -n $ranks --no-prefix $cuda --transport staging
    check '... have the losses of the host' compare --tolerance 1e-4 build-gpu/host.json build-gpu/staged$ranks.json
    check '... again' gpt staged_again $run -n $ranks --no-prefix $cuda --transport staging
    check '... have the same bits' compare --tolerance 0 build-gpu/staged$ranks.json build-gpu/staged_again.json
  done
  NCCL_MULTI_RANK_GPU_ENABLE=1
  export NCCL_MULTI_RANK_GPU_ENABLE
  check '2 ranks that share the GPU over NCCL' gpt shared $run -n 2 --no-prefix $cuda --transport nccl
  check '... have the losses of the host' compare --tolerance 1e-4 build-gpu/host.json build-gpu/shared.json
  unset NCCL_MULTI_RANK_GPU_ENABLE
else
  echo 'skipped train_gpt_cuda: not built (cuBLAS or a BLAS is missing)'
  skipped=$((skipped + 1))
fi

check "torch's layers" env FSDP_TORCH_PYTHON="$python" FSDP_TORCH_DEVICE=cuda sh tests/examples/torch_layers_test.sh $run build-gpu/lib/libfsdp.so

if [ $quick -eq 0 ]; then
  if command -v compute-sanitizer >/dev/null && [ -x $cuda ]; then
    # shellcheck disable=SC2086
    for tool in memcheck racecheck initcheck synccheck; do
      check "compute-sanitizer $tool" compute-sanitizer --tool $tool --error-exitcode 9 --kernel-name regex=fsdp build-gpu/tests/gpu/gpu_kernels
    done
    # shellcheck disable=SC2086
    check 'compute-sanitizer memcheck, a training run' compute-sanitizer --error-exitcode 9 $cuda $small --steps 3
  else
    echo 'skipped compute-sanitizer: not installed'
    skipped=$((skipped + 1))
  fi
  meson test -C build-gpu --no-rebuild --benchmark --verbose --suite gpu 2>/dev/null | sed -n '/GB\/s/p'
  [ -n "${FSDP_NCCL_LIBRARY:-}" ] && FSDP_LIBRARY=$PWD/build-gpu/lib/libfsdp.so "$python" examples/torch_layers/compare_fsdp2.py
fi
report
