#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: syscall_test.sh FSDP_RUN RESIDENT
# Unshard and reshard of a group with resident weights make no system call on the calling thread.
set -u
run=$(realpath "$1")
resident=$(realpath "$2")
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$(dirname "$0")/../tools/tap.sh"
enter_scratch

strace -f -o trace true 2>log || {
  skip 'system calls of resident groups' "strace does not work here: $(head -n 1 log)"
  finish
}

# between MARKED: lists the system calls of each thread between its two markers. MARKED threads must have written both
# markers and made no calls. A call that another thread interrupts has a second line, which does not count as a call.
between() {
  awk -v marked="$1" '
    /write\(-1, "begin pairs"/ { inside[$1] = 1; next }
    /write\(-1, "end pairs"/ { ended += inside[$1]; inside[$1] = 0; next }
    inside[$1] && !/<\.\.\. write resumed>/ { print "# " $0; ++calls }
    END { printf "# %d threads, %d system calls\n", ended, calls; exit !(ended == marked && calls == 0) }' trace
}

# silent RANKS COMMAND...
silent() {
  ranks=$1
  shift
  timeout 60 strace -f -o trace "$@" >log 2>&1 || { sed 's/^/# /' log; return 1; }
  between "$ranks"
}

for mode in mapped held whole; do
  check "alone, $mode" silent 1 "$resident" 100000 $mode
  check "2 threads, $mode" silent 2 "$resident" 100000 $mode 2
  check "2 processes, $mode" silent 2 "$run" -n 2 "$resident" 100000 $mode
done

# This case tests the count itself with made-up traces.
begin='write(-1, "begin pairs", 11) = -1' end='write(-1, "end pairs", 9) = -1'
printf '%s\n' "7 $begin" '8 futex(0) = 0' "7 $end" '7 futex(0) = 0' >trace
check 'calls of other threads and times do not count' between 1
printf '%s\n' "7 $begin" '7 futex(0) = 0' "7 $end" >trace
check 'a call between the markers does' equal "$(between 1 | tail -n 1)" '# 1 threads, 1 system calls'
finish
