#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds libfsdp and trains the example; alone enough on a fresh Debian 12 or Ubuntu 24.04.
#
# usage: sh examples/run.sh [-y] [-n RANKS] [options of train_gpt...]
#   -y        install missing packages without asking
#   -n RANKS  processes to train with; default 2
#
# A build folder that is already there is used as it is; else build/ is made.
set -eu
cd "$(dirname "$0")/.."

yes='' ranks=2
while [ $# -gt 0 ]; do
  case $1 in
    -y) yes=-y ;;
    -n) ranks=${2:?'-n needs a number of ranks'}; shift ;;
    *) break ;;
  esac
  shift
done

. tools/dev/packages.sh
# shellcheck disable=SC2086
need_packages $yes g++ meson ninja-build pkg-config libfmt-dev libhwy-dev libxxhash-dev libssl-dev libopenblas-dev \
  libcli11-dev nlohmann-json3-dev

log=build/example-build.log
mkdir -p build
run_logged() {
  "$@" >>"$log" 2>&1 </dev/null || { tail -n 60 "$log"; echo "examples/run.sh: the build failed; the whole log: $log" >&2; exit 1; }
}
: >"$log"
echo "== build (log: $log)"
[ -f build/build.ninja ] || run_logged meson setup build --buildtype=release
run_logged ninja -C build tools/fsdp-run examples/train_gpt

# Behind fsdp-run the program's output is a pipe: only we know whether a person is watching.
progress=
[ -t 1 ] && progress=--in-place
echo "+ build/tools/fsdp-run -n $ranks --no-prefix build/examples/train_gpt --sample $*"
# shellcheck disable=SC2086
exec build/tools/fsdp-run -n "$ranks" --no-prefix build/examples/train_gpt --sample $progress "$@"
