#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: freeze_abi.sh RELEASE BUILD
# Stores what a release promises in tests/abi/frozen/RELEASE: its header and abi.json, and a client as source and as a
# program linked with the library in BUILD. Run it once, when RELEASE is made; tests/abi/frozen_test.sh checks every
# later library against it.
set -eu
cd "$(dirname "$0")/../.."
release=$1
build=$2
folder=tests/abi/frozen/$release
[ ! -e "$folder" ] || { echo "freeze_abi.sh: $folder exists: a release is frozen once" >&2; exit 1; }
mkdir -p "$folder"
cp include/fsdp.h bindings/abi/abi.json "$folder"
{
  echo "/* SPDX-License-Identifier: Apache-2.0 */"
  echo "/* A client of libfsdp $release, frozen: it trains in a world of one and with two ranks, and names every call. */"
  echo '#define _POSIX_C_SOURCE 200809L'
  sed -n '/^#include </p; /^#include "fsdp.h"/s/"fsdp.h"/<fsdp.h>/p' tests/abi/check.h
  sed '1,/^#include "fsdp.h"/d; /^#endif/d' tests/abi/check.h
  sed '/SPDX-License/d; /^#define _POSIX_C_SOURCE/d; /^#include "check.h"/d; s/^int main(void)/static int run_lifecycle(void)/' tests/abi/lifecycle.c
  echo '/* A library that lacks one of them is not started with this program. */'
  echo 'static void (*const every_call[])(void) = {'
  sed -n 's/^    \(fsdp_[a-z0-9_]*\);/    (void (*)(void))\1,/p' lib/fsdp.map
  echo '};'
  echo 'int main(void) {'
  echo '  for (size_t i = 0; i < sizeof every_call / sizeof *every_call; ++i) CHECK(every_call[i] != NULL);'
  echo '  return run_lifecycle();'
  echo '}'
} >"$folder/client.c"
cc -std=c99 -O1 -s -I"$folder" "$folder/client.c" -o "$folder/client-$(uname -m)" -L"$build/lib" -lfsdp -lpthread -lm -Wl,-z,now
ls -l "$folder"
