#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: nvtx_test.sh TRACE_TEST LISTENER
# Which ranges an NVTX tool gets from programs that keep a trace, and from one that does not.
set -u
program=$(realpath "$1")
listener=$(realpath "$2")
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/../tools/tap.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# hears FILTER: runs these cases; what the tool was told is in log.
hears() {
  rm -f "$work/log"
  NVTX_INJECTION64_PATH=$listener NVTX_LISTENER_LOG=$work/log TEST_TMPDIR=$work "$program" --gtest_filter="$1" >"$work/out" 2>&1 ||
    sed 's/^/# /' "$work/out"
  touch "$work/log"
}
count() { grep -c "$1" "$work/log"; }

hears Trace.MappedWeightsNeedNoGatherLane
check 'calls are ranges that name their group' [ "$(count '^push libfsdp: unshard layer.1$')" -eq 4 ]
check 'calls without a group are, too' [ "$(count '^push libfsdp: step_adamw$')" -eq 2 ]
check 'every range ends' equal "$(count '^push')" "$(count '^pop$')"
hears CallerSpans.SpansOfTheCallerNest
check "the caller's own spans are ranges" equal "$(head -n 4 "$work/log" | tr '\n' ';')" \
  'push libfsdp: step;push libfsdp: forward;pop;push libfsdp: backward;'
hears TraceWriting.WithoutTheFlagThereIsNothingToWrite
check 'without a trace there are no ranges' equal "$(count .)" 0
finish
