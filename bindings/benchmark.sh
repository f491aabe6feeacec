#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What a visit of a group costs (unshard, 12 views, reshard) in each language that is built, in one run, beside C.
# usage: sh bindings/benchmark.sh [BUILD_FOLDER]     (default: build-tests, else build)
set -u
cd "$(dirname "$0")/.." || exit 1
build=build
[ -d build-tests ] && build=build-tests
build=$(cd "${1:-$build}" && pwd) || exit 1
export LD_LIBRARY_PATH="$build/lib" FSDP_LIBRARY="$build/lib/libfsdp.so" PYTHONPATH="$PWD/bindings/python"

# measure LANGUAGE MOST_US COMMAND...: 0 for no limit of its own.
failed=0
measure() {
  language=$1 most=$2
  shift 2
  found=$("$@" | sed -n 's/^visit_us //p')
  [ -n "$found" ] || { echo "$language: cannot be measured"; failed=1; return; }
  printf '%-8s %8.3f us\n' "$language" "$found"
  awk "BEGIN { exit $most == 0 || $found <= $most ? 0 : 1 }" || { echo "$language: more than $most us"; failed=1; }
}
measure c 0 "$build/bindings/conformance/c/visit_benchmark"
measure python 10 "${PYTHON:-python3}" bindings/python/benchmark.py
exit $failed
