#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a program of the plain build, which has none of the library's code in it, over the library of the build with
# AddressSanitizer or ThreadSanitizer.
#
# usage: sh tests/over_sanitizer.sh SANITIZED_BUILD PROGRAM [ARGUMENTS...]        (meson test --wrapper)
set -eu
library=$(cd "$1" && pwd)/lib/libfsdp.so.1
shift
# The runtime comes first, then the library, which by its soname is taken for that of the program's run path.
runtime=$(ldd "$library" | sed -n "s/.*lib[at]san.* => \(.*\) (.*/\1/p")
preload=${runtime:?$library is built with neither AddressSanitizer nor ThreadSanitizer}:$library
# The loader goes on without what it cannot preload, and a plain test would pass.
case $(LD_PRELOAD=$preload LD_TRACE_LOADED_OBJECTS=1 "$1" | grep -F -e libfsdp -e "$runtime") in
  *"$runtime "*"$library "*libfsdp*) wrong=1 ;;
  *"$runtime "*"$library "*) wrong=0 ;;
  *) wrong=1 ;;
esac
[ $wrong -eq 0 ] || { echo "over_sanitizer.sh: $1 would not run over $library and $runtime" >&2; exit 1; }
exec env "LD_PRELOAD=$preload" "$@"
