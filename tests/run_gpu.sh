#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds libfsdp with CUDA on a machine with a GPU and runs what only a GPU can show.
#
# usage: sh tests/run_gpu.sh [--packages FOLDER] [--python PYTHON] [STAGE]...
#   --packages FOLDER  where the system lacks libraries: a folder of .deb files (tools/dev/fetch_packages.sh fills one), which
#                      are unpacked there, not installed
#   --python PYTHON    a Python with torch, for the torch examples, NCCL and cuBLAS; default: python3
#   STAGE              without any, all of them, in this order:
#     build     configures and builds build-gpu/; works without a GPU, and the others need it
#     device    streams, events, memory, lanes, captures
#     kernels   the kernels' code and their bits
#     train     the GPT of the examples and torch's layers against runs on the host; ranks that share the GPU
#     nccl      NCCL alone, and under the GPT, eager and as a graph
#     perf      GB/s of the kernels, what marks in streams and launches of NCCL cost, the step beside torch's FSDP2
#     sanitize  compute-sanitizer over the kernels and a training run
#
# A stage stays below 10 minutes, one test of it below LIMIT seconds (300). It needs nvcc, a C++ compiler, Meson and
# ninja. The last line is "N passed, N failed, N skipped"; logs stay in build-gpu/. Status: 0 all that ran passed, 1 something
# failed, 77 nothing could run, 2 wrong usage.
set -u
cd "$(dirname "$0")/.." || exit 1

known='build device kernels train nccl perf sanitize'
packages='' python=python3 stages='' limit=${LIMIT:-300}
while [ $# -gt 0 ]; do
  case $1 in
    --packages | --python)
      [ $# -gt 1 ] || { echo "tests/run_gpu.sh: $1 needs a value" >&2; exit 2; }
      [ "$1" = --packages ] && packages=$2 || python=$2
      shift
      ;;
    build | device | kernels | train | nccl | perf | sanitize) stages="$stages $1" ;;
    *) echo "tests/run_gpu.sh: unknown argument '$1' (known: --packages FOLDER, --python PYTHON, $known)" >&2; exit 2 ;;
  esac
  shift
done
[ -n "$packages" ] && [ ! -d "$packages" ] && { echo "tests/run_gpu.sh: no folder $packages" >&2; exit 2; }

passed=0 failed=0 skipped=0 no_gpu=''
report() {
  printf '\n%s passed, %s failed, %s skipped\n' "$passed" "$failed" "$skipped"
  [ $failed -gt 0 ] && exit 1
  [ $passed -gt 0 ] || exit 77
  exit 0
}
fail() {
  echo "FAILED  $*"
  failed=$((failed + 1))
}
skip() {
  echo "skipped $*"
  skipped=$((skipped + 1))
}

# check NAME COMMAND...: one test, of LIMIT seconds at most; status 77 is skipped.
check() {
  name=$1
  shift
  timeout -k 10 "$limit" "$@" >build-gpu/check.log 2>&1
  status=$?
  case $status in
    0) passed=$((passed + 1)); echo "ok      $name" ;;
    77) skip "$name: $(tail -n 1 build-gpu/check.log)" ;;
    124 | 137) fail "$name: not done after $limit s"; tail -n 40 build-gpu/check.log ;;
    *) fail "$name (status $status)"; tail -n 40 build-gpu/check.log ;;
  esac
}

# The same for what cannot run without a GPU.
on_gpu() {
  if [ -n "$no_gpu" ]; then skip "$1: $no_gpu"; else check "$@"; fi
}

# meson_tests SUITE [OPTION...]: programs that say themselves what they skip.
meson_tests() {
  suite=$1
  shift
  rm -f build-gpu/meson-logs/testlog.json  # of an earlier run
  timeout -k 10 580 meson test -C build-gpu --no-rebuild --print-errorlogs --suite "$suite" "$@"
  counts=$("$python" tests/count.py build-gpu/meson-logs/testlog.json $?)
  # shellcheck disable=SC2086
  set -- ${counts:-0 1 0}
  passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

# --- what is found where ---

# Once: packages are unpacked without their scripts, so what pkg-config says must point into the folder, and links to libraries
# that are not in it must point to the system's.
unpack() {
  rm -rf "$root.part"
  for deb in "$packages"/*.deb; do
    dpkg-deb -x "$deb" "$root.part" || { fail "unpacking $deb"; report; }
  done
  find "$root.part" -name '*.pc' -exec sed -i "s|=/usr\$|=$root/usr|; s|=/usr/|=$root/usr/|" {} +
  find "$root.part" -name '*.so' -type l ! -exec test -e {} \; -print | while read -r link; do
    target=$(basename "$(readlink "$link")")
    for place in "/usr/lib/$triplet" "/lib/$triplet" /usr/lib64; do
      [ -e "$place/$target" ] && ln -sfn "$place/$target" "$link" && break
    done
  done
  mv "$root.part" "$root"
}

use_packages() {
  root=$(realpath "$packages")/root
  triplet=$(gcc -print-multiarch 2>/dev/null)
  triplet=${triplet:-$(uname -m)-linux-gnu}
  [ -d "$root" ] || unpack
  libraries=$root/usr/lib/$triplet
  export PKG_CONFIG_PATH="$libraries/pkgconfig:$libraries/openblas-pthread/pkgconfig:$root/usr/share/pkgconfig:$root/usr/lib/pkgconfig"
  export CPATH="$root/usr/include:$root/usr/include/$triplet${CPATH:+:$CPATH}"
  export LIBRARY_PATH="$libraries:$libraries/openblas-pthread${LIBRARY_PATH:+:$LIBRARY_PATH}"
  # After the system's own: only what it lacks is taken from here.
  export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/lib/$triplet:/lib/$triplet:$libraries:$libraries/openblas-pthread"
  export CMAKE_PREFIX_PATH="$root/usr"
  command -v pkg-config >/dev/null || PATH=$PATH:$root/usr/bin
}

# The first file that matches in Python's packages.
in_wheels() {
  "$python" -c 'import glob, sys
print(next((p for d in sys.path for p in sorted(glob.glob(d + "/" + sys.argv[1]))), ""))' "$1" 2>/dev/null
}

# Tools of a virtual environment are beside its Python; those of CUDA where its installer puts them.
find_tools() {
  beside=$(dirname "$("$python" -c 'import sys; print(sys.executable)' 2>/dev/null || echo /usr/bin/python3)")
  PATH=$PATH:$beside:/usr/local/cuda/bin:/usr/local/nvidia/bin
  for tool in nvcc meson ninja c++ timeout; do
    command -v $tool >/dev/null || { fail "$tool is not in PATH ($PATH)"; report; }
  done
}

# Where the toolkit lacks cuBLAS, torch's wheels have it, under its full name alone.
use_wheels_cublas() {
  toolkit=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")
  [ -e "$toolkit/include/cublas_v2.h" ] && return
  header=$(in_wheels 'nvidia/*/include/cublas_v2.h') library=$(in_wheels 'nvidia/*/lib/libcublas.so.1[0-9]')
  if [ -z "$header" ] || [ -z "$library" ]; then return; fi
  mkdir -p build-gpu-cublas/include build-gpu-cublas/lib
  for file in "$(dirname "$header")"/cublas*.h; do ln -sf "$file" build-gpu-cublas/include/; done
  ln -sf "$library" build-gpu-cublas/lib/libcublas.so
  export CPATH="$PWD/build-gpu-cublas/include${CPATH:+:$CPATH}" LIBRARY_PATH="$PWD/build-gpu-cublas/lib${LIBRARY_PATH:+:$LIBRARY_PATH}"
  cublas=$(dirname "$library")
  export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$cublas"
}

# NCCL lies where torch's wheel put it, unless FSDP_NCCL_LIBRARY names another.
find_nccl() {
  [ -n "${FSDP_NCCL_LIBRARY:-}" ] && return
  found=$(in_wheels 'nvidia/nccl/lib/libnccl.so.2')
  [ -n "$found" ] && export FSDP_NCCL_LIBRARY="$found"
}

# The version's number as NCCL writes it (22809, 23003); nothing where it cannot be asked.
nccl_version() {
  "$python" -c 'import ctypes, os
version = ctypes.c_int()
ctypes.CDLL(os.environ.get("FSDP_NCCL_LIBRARY") or "libnccl.so.2").ncclGetVersion(ctypes.byref(version))
print(version.value)' 2>/dev/null
}

# Before 2.30.3 NCCL refuses ranks that share a GPU.
two_may_share() {
  version=$(nccl_version)
  [ "${version:-0}" -ge 23003 ]
}

# --- stages ---

stage_build() {
  if [ ! -f build-gpu/build.ninja ]; then
    meson setup build-gpu -Dunity=off -Dcuda=enabled -Dnccl=enabled -Dtests=enabled -Dexamples=auto >build-gpu-setup.log 2>&1 ||
      { tail -n 40 build-gpu-setup.log; fail 'configure build-gpu'; report; }
    mv build-gpu-setup.log build-gpu/setup.log
    sed -n '/train_gpt\|CUDA  *:\|NCCL  *:\|UCX  *:/p' build-gpu/setup.log
  fi
  # What the stages run, and nothing else: the time is the machine's.
  all=$(ninja -C build-gpu -t targets all | sed -n 's/^\([^:]*\): .*LINKER.*/\1/p')
  wanted=$(echo "$all" | grep -E '^(lib/libfsdp\.so\.[0-9.]*|tools/(fsdp-info|fsdp-run|fsdp-perf)|examples/train_gpt(_cuda)?|tests/gpu/.*|tests/engine/engine_training)$')
  # shellcheck disable=SC2086
  ninja -C build-gpu $wanted >build-gpu/compile.log 2>&1 ||
    { grep -A5 -m 3 'FAILED' build-gpu/compile.log; tail -n 20 build-gpu/compile.log; fail 'build build-gpu'; report; }
  passed=$((passed + 1))
  echo 'ok      build'
  check 'fsdp-info runs' build-gpu/tools/fsdp-info
  cat build-gpu/check.log
}

stage_device() { meson_tests gpu gpu_device; }

stage_kernels() {
  meson_tests gpu gpu-kernels
  meson_tests cuda
}

# The example against the host's run of the same model, against itself, and as a graph.
# A text of its own: how far two orders of additions are apart after 20 steps depends on it, from 1e-7 to more than 1e-5 of a
# loss over files of this repository. Of this one it is 1.4e-6 on the host, of norms 9e-8 in five steps and 7e-6 in all.
corpus=build-gpu/corpus
small="--layers 2 --width 128 --heads 4 --context 64 --batch 16 --steps 20 --lr 3e-3 --quiet --corpus $corpus"
run=build-gpu/tools/fsdp-run
cuda=build-gpu/examples/train_gpt_cuda
# gpt NAME OUT COMMAND...
gpt() {
  name=$1 out=build-gpu/$2.json
  shift 2
  rm -f "$out"
  # shellcheck disable=SC2086
  on_gpu "$name" "$@" $small --json "$out"
}
compare() {
  name=$1
  shift
  if [ -z "$no_gpu" ]; then
    for file in "$3" "$4"; do
      [ -s "$file" ] || { fail "$name: a run left nothing to compare"; return; }
    done
  fi
  on_gpu "$name" "$python" tests/gpu/compare_runs.py "$@"
}
have_gpt() {
  mkdir -p $corpus && seq 1 20000 >$corpus/numbers.md
  [ -x $cuda ] && [ -x build-gpu/examples/train_gpt ] && return
  skip 'train_gpt_cuda: not built (cuBLAS or a BLAS is missing)'
  return 1
}

# engine TRANSPORT FILTER: the engine's own tests, their streams and memory on the GPU.
engine() {
  on_gpu "the engine over $1" env FSDP_TEST_DEVICE=cuda "FSDP_TEST_TRANSPORT=$1" \
    "LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$cuda_lib" build-gpu/tests/engine/engine_training "--gtest_filter=$2"
}

stage_train() {
  engine staging 'Training.AllStrategies*:Training.MixedTypes*:Training.GroupsOf*:Training.ReduceOn*:Training.Forced*'
  if have_gpt; then
    gpt 'train_gpt on the host' host build-gpu/examples/train_gpt
    gpt 'train_gpt_cuda, one rank' gpu $cuda
    compare '... has the losses of the host' --tolerance 1e-5 build-gpu/host.json build-gpu/gpu.json
    gpt '... again' again $cuda
    compare '... has the same bits' --tolerance 0 build-gpu/gpu.json build-gpu/again.json
    for ranks in 2 4; do  # processes: threads of one that share a GPU wait for each other's calls
      gpt "$ranks ranks that share the GPU, staged" staged$ranks $run -n $ranks --no-prefix $cuda --transport staging
      compare '... have the losses of the host' --tolerance 1e-5 build-gpu/host.json build-gpu/staged$ranks.json
      gpt '... again' staged_again $run -n $ranks --no-prefix $cuda --transport staging
      compare '... have the same bits' --tolerance 0 build-gpu/staged$ranks.json build-gpu/staged_again.json
    done
  fi
  if "$python" -c 'import torch' 2>/dev/null; then
    on_gpu "torch's layers" env FSDP_TORCH_PYTHON="$python" FSDP_TORCH_DEVICE=cuda \
      sh tests/examples/torch_layers_test.sh $run build-gpu/lib/libfsdp.so
  else
    skip "torch's layers: no torch in $python"
  fi
}

stage_nccl() {
  meson_tests gpu gpu-nccl
  have_gpt || return
  forced='--force-communication --transport nccl'
  [ -s build-gpu/host.json ] || gpt 'train_gpt on the host' host build-gpu/examples/train_gpt
  # shellcheck disable=SC2086
  {
    gpt 'one rank, communication forced over NCCL' nccl $cuda $forced
    compare '... has the losses of the host' --tolerance 1e-5 build-gpu/host.json build-gpu/nccl.json
    gpt '... with delays at every event edge' delays $cuda $forced --debug-delay-us 2000
    compare '... has the same bits' --tolerance 0 build-gpu/nccl.json build-gpu/delays.json
    gpt '... as a graph' graph $cuda $forced --graph
    compare '... has the same bits' --tolerance 0 build-gpu/nccl.json build-gpu/graph.json
  }
  if ! two_may_share; then
    skip "2 ranks that share the GPU over NCCL: its version is ${version:-not known}, and sharing needs 23003 (2.30.3) or later"
    return
  fi
  gpt '2 ranks that share the GPU over NCCL' shared env NCCL_MULTI_RANK_GPU_ENABLE=1 $run -n 2 --no-prefix $cuda --transport nccl
  compare '... have the losses of the host' --tolerance 1e-5 build-gpu/host.json build-gpu/shared.json
}

stage_perf() {
  on_gpu 'GB/s of the kernels' build-gpu/tests/gpu/kernels/gpu_kernel_bench
  [ -n "$no_gpu" ] || cat build-gpu/check.log
  on_gpu 'what marks in streams cost' build-gpu/tests/gpu/kernels/gpu_mark_bench
  [ -n "$no_gpu" ] || cat build-gpu/check.log
  if two_may_share; then
    on_gpu 'what launches of NCCL cost' build-gpu/tests/gpu/gpu_launch_bench
    [ -n "$no_gpu" ] || cat build-gpu/check.log
  else
    skip "what launches of NCCL cost: its version is ${version:-not known}"
  fi
  if "$python" -c 'import torch' 2>/dev/null; then
    on_gpu "a step beside torch's FSDP2" env FSDP_LIBRARY="$PWD/build-gpu/lib/libfsdp.so" "$python" examples/torch_layers/compare_fsdp2.py
    [ -n "$no_gpu" ] || tail -n 20 build-gpu/check.log
  else
    skip "a step beside torch's FSDP2: no torch in $python"
  fi
}

stage_sanitize() {
  if ! command -v compute-sanitizer >/dev/null; then
    skip 'compute-sanitizer: not installed'
    return
  fi
  # Errors that CUDA's calls return are the library's to handle.
  for tool in memcheck racecheck initcheck synccheck; do
    on_gpu "compute-sanitizer $tool" compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 \
      build-gpu/tests/gpu/kernels/gpu_kernels '--gtest_filter=-*Every*:*Large*'
  done
  have_gpt || return
  # shellcheck disable=SC2086
  on_gpu 'compute-sanitizer memcheck, a training run' compute-sanitizer --report-api-errors no --error-exitcode 9 $cuda $small --steps 3
}

# --- the run ---

find_tools
[ -n "$packages" ] && use_packages
use_wheels_cublas
find_nccl
cuda_lib=$(dirname "$(dirname "$(realpath "$(command -v nvcc)")")")/lib64
# The fewer streams share a queue of CUDA's, the less waits that need not.
export CUDA_DEVICE_MAX_CONNECTIONS=32
# Seconds: ranks that wait for each other say so before a test's limit ends them.
export FSDP_TIMEOUT="${FSDP_TIMEOUT:-60}"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo 'nvidia-smi lists no GPU'
"$python" -c 'import torch; print("torch", torch.__version__)' 2>/dev/null || echo "no torch in $python"
echo "NCCL: ${FSDP_NCCL_LIBRARY:-as the loader finds it}"

for stage in ${stages:-$known}; do
  before_passed=$passed before_failed=$failed before_skipped=$skipped
  printf '\n== %s\n' "$stage"
  if [ "$stage" != build ]; then
    [ -x build-gpu/tools/fsdp-info ] || { fail "$stage: build-gpu/ is not built: sh tests/run_gpu.sh build"; continue; }
    case $(build-gpu/tools/fsdp-info 2>&1) in *'no GPU'*) no_gpu='no GPU' ;; esac
  fi
  case $stage in
    build) stage_build ;;
    device) stage_device ;;
    kernels) stage_kernels ;;
    train) stage_train ;;
    nccl) stage_nccl ;;
    perf) stage_perf ;;
    sanitize) stage_sanitize ;;
  esac
  echo "$stage: $((passed - before_passed)) passed, $((failed - before_failed)) failed, $((skipped - before_skipped)) skipped"
done
report
