#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: hardening.sh LIBRARY OBJECTS optimized|plain|sanitized TOOL...
# Checks how the library is linked: how much memory of threads it needs, and which settings make its errors harder to
# exploit.
set -u
library=$(realpath "$1")
objects=$(realpath "$2")
optimized=$3
shift 3
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/../tools/tap.sh"

imports=$(nm -D --undefined-only "$library" | sed 's/.* //; s/@.*//')
segments=$(readelf -lW "$library")
dynamic=$(readelf -dW "$library")
named() { echo "$imports" | grep -E "$1"; }

# glibc ends the process if it has no memory for a thread_local object or its destructor. The objects are checked,
# because CUDA's static runtime has some of its own.
symbols=$(nm "$objects" 2>/dev/null)
check "the objects are the library's" contains "$symbols" " T fsdp_create_context"
of_threads=' (U __tls_get_addr|U __cxa_thread_atexit|[bBdDuU] __tls_guard)'
check "no thread_local memory" equal "$(echo "$symbols" | grep -E "$of_threads" | sort -u)" ""
check "... also not beside what CUDA has" equal "$(readelf -sW "$library" | awk '$4 == "TLS" && $8 !~ /^libcudart/ { print $8 }')" ""

check "all symbols are bound when it is loaded" contains "$dynamic" "BIND_NOW"
check "... and then read-only" contains "$segments" "GNU_RELRO"
check "the stack is not executable" equal "$(echo "$segments" | awk '$1 == "GNU_STACK" { print $7 }')" RW
check "no text is relocated" lacks "$dynamic" TEXTREL
if [ "$optimized" = sanitized ]; then
  skip "the stack is guarded" "this build has a sanitizer"
else
  check "the stack is guarded" equal "$(named '^__stack_chk_fail$')" __stack_chk_fail
fi
if [ "$optimized" = optimized ]; then
  check "functions of the C library know sizes" [ "$(named '^__[a-z]+_chk$' | grep -cv stack_chk)" -gt 0 ]
else
  skip "functions of the C library know sizes" "this build is not optimized, or has a sanitizer"
fi
for tool in "$@"; do
  check "$(basename "$tool") lies anywhere in memory" contains "$(readelf -hW "$tool")" "DYN"
done
finish
