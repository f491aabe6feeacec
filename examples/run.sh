#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds libfsdp and trains the example; alone enough on a fresh Debian 12 or Ubuntu 24.04.
#
# usage: sh examples/run.sh [-y] [--cuda] [-n RANKS] [options of train_gpt...]
#   -y        install missing packages without asking
#   --cuda    train on GPUs (train_gpt_cuda); then the GPU kernels are compiled, too, which needs the CUDA toolkit
#   -n RANKS  processes to train with; default 2
#
# It builds only what the example needs, in build-example/ or, with --cuda, in build-example-cuda/.
set -eu
cd "$(dirname "$0")/.."

yes='' ranks=2 program=train_gpt build=build-example cuda=disabled
while [ $# -gt 0 ]; do
  case $1 in
    -y) yes=-y ;;
    --cuda) program=train_gpt_cuda build=build-example-cuda cuda=enabled ;;
    -n) ranks=${2:?'-n needs a number of ranks'}; shift ;;
    *) break ;;
  esac
  shift
done

. tools/dev/packages.sh
# shellcheck disable=SC2086
need_packages $yes g++ meson ninja-build pkg-config libfmt-dev libhwy-dev libxxhash-dev libssl-dev libopenblas-dev \
  libcli11-dev nlohmann-json3-dev

mkdir -p "$build"
log=$build/build.log
: >"$log"
# Behind a pipe train_gpt cannot see whether a person is watching; this script can.
in_place=
[ -t 1 ] && in_place=--in-place

# show_progress: copies its input to the log; on a terminal it keeps the last step, such as [12/50], in view.
show_progress() {
  while IFS= read -r line; do
    printf '%s\n' "$line" >>"$log"
    case $in_place$line in --in-place\[*/*\]*) printf '\r%s] ' "${line%%]*}" ;; esac
  done
  [ -z "$in_place" ] || printf '\r                \r'
}

# run_logged COMMAND...: shows the end of the log if the command fails.
run_logged() {
  { "$@" 2>&1 </dev/null || printf '\nexamples/run.sh: %s failed\n' "$1"; } | show_progress
  tail -n 1 "$log" | grep -q "^examples/run.sh: " || return 0
  tail -n 60 "$log" >&2
  echo "examples/run.sh: the build failed; the whole log: $log" >&2
  exit 1
}

echo "== build (log: $log)"
# The library's kernels and train_gpt are optimized, the kernels for this machine alone. The rest has -Og, which compiles fast.
[ -f "$build/build.ninja" ] || run_logged meson setup "$build" -Doptimization=g -Ddebug=false -Dhost_targets=native \
  -Dtests=disabled -Dexamples=enabled "-Dcuda=$cuda"
run_logged ninja -C "$build" tools/fsdp-run "examples/$program"

echo "+ $build/tools/fsdp-run -n $ranks --no-prefix $build/examples/$program --sample $*"
# shellcheck disable=SC2086
exec "$build/tools/fsdp-run" -n "$ranks" --no-prefix "$build/examples/$program" --sample $in_place "$@"
