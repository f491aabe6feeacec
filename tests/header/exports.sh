#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: exports.sh INCLUDE_DIR LIBRARY
# What the header declares and what the library exports is the same list of names.
set -u
include=$1
library=$2
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/../tools/tap.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Without comments and macros, "name(" is a declaration; a hook's type is "(*name)(".
${CC:-cc} -E -P "$include/fsdp.h" | grep -o 'fsdp_[a-z0-9_]*(' | tr -d '(' | LC_ALL=C sort -u >"$work/declared"
# A is the version node's own symbol.
nm -D --defined-only "$library" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' | LC_ALL=C sort -u >"$work/exported"

check "the header declares functions" [ "$(wc -l <"$work/declared")" -gt 40 ]
check "only fsdp_* is exported" equal "$(grep -v '^fsdp_' "$work/exported")" ""
check "every declared function is exported" equal "$(LC_ALL=C comm -23 "$work/declared" "$work/exported")" ""
check "every exported function is declared" equal "$(LC_ALL=C comm -13 "$work/declared" "$work/exported")" ""
check "every export carries its release's version" equal \
  "$(nm -D --defined-only "$library" | awk '$2 != "A" && $3 !~ /@@FSDP_[0-9.]+$/ { print $3 }')" ""
finish
