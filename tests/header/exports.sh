#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: exports.sh INCLUDE_DIR LIBRARY
# Checks that the header declares exactly the names that the library exports.
set -u
include=$(realpath "$1")
library=$(realpath "$2")
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/../tools/tap.sh"
enter_scratch

# After comments and macros are removed, "name(" is a declaration; a hook's type is "(*name)(".
${CC:-cc} -E -P "$include/fsdp.h" | grep -o 'fsdp_[a-z0-9_]*(' | tr -d '(' | LC_ALL=C sort -u >declared
# A marks the symbol of the version node itself.
nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | LC_ALL=C sort -u >exported

check "the header declares functions" [ "$(wc -l <declared)" -gt 40 ]
check "only fsdp_* is exported" equal "$(grep -v '^fsdp_' exported)" ""
check "every declared function is exported" equal "$(LC_ALL=C comm -23 declared exported)" ""
check "every exported function is declared" equal "$(LC_ALL=C comm -13 declared exported)" ""
check "every export carries its release's version" equal \
  "$(nm -D --defined-only "$library" | awk '$2 != "A" && $3 !~ /@@FSDP_[0-9.]+$/ { print $3 }')" ""
finish
