#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: footprint_test.sh FSDP_RUN FOOTPRINT
# Compares the memory that the kernel charges to two ranks with the plan. See footprint.c.
set -u
run=$(realpath "$1")
footprint=$(realpath "$2")
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$(dirname "$0")/../tools/tap.sh"

footprint_of() {
  found=$(timeout 100 "$run" -n 2 "$footprint" "$1" 2>&1)
  footprint_status=$?
  explain "$found"
  return $footprint_status
}
grep -q '^Pss:' /proc/self/smaps 2>/dev/null || {
  skip 'resident memory against the plan' '/proc/self/smaps has no proportional sizes here'
  finish
}
for mode in mapped copied whole; do
  check "resident memory is the plan: $mode" footprint_of $mode
done
finish
