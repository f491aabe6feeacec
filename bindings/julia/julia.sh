#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs Julia with FSDP.jl over a library that was built here. usage: julia.sh BUILD_FOLDER ARGUMENTS_OF_JULIA...
# With --find instead of arguments: says why there is no Julia that can, with status 77. JULIA names another one than julia.
set -u
build=$(cd "$1" && pwd) || exit 1
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
julia=${JULIA:-julia}
# Compiled packages of Julia go into the build folder.
FSDP_LIBRARY=$build/lib/libfsdp.so JULIA_LOAD_PATH=$root/bindings/julia:@stdlib JULIA_DEPOT_PATH=$build/bindings/julia
export FSDP_LIBRARY JULIA_LOAD_PATH JULIA_DEPOT_PATH
# Idle threads of Julia spin for 4 seconds, during which others may have no processor; 0.1 ms is enough.
export JULIA_THREAD_SLEEP_THRESHOLD=100000
# Some builds of Julia have a libunwind with functions of the C++ runtime's names, which end a process that throws.
LD_PRELOAD=libgcc_s.so.1${LD_PRELOAD:+:$LD_PRELOAD}
[ -e "$build/bindings/julia/libmore_threads.so" ] && LD_PRELOAD=$LD_PRELOAD:$build/bindings/julia/libmore_threads.so
if [ "${1:-}" = --find ]; then
  command -v "$julia" >/dev/null || { echo 'no julia here'; exit 77; }
  version=$("$julia" --startup-file=no -e 'print(VERSION); exit(VERSION >= v"1.5" ? 0 : 1)') ||
    { echo "Julia ${version:-of this machine} is too old: 1.5 is needed"; exit 77; }
  "$julia" --startup-file=no -e 'f(x) = error(x); try f("") catch end' 2>/dev/null ||
    { echo 'this Julia cannot throw an exception: its libunwind does not fit'; exit 77; }
  exit 0
fi
export LD_PRELOAD
exec "$julia" --startup-file=no "$@"
