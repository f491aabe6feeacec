#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: compile_alone.sh INCLUDE_DIR SOURCE
# Compiles the public header in every language standard that it promises, with every compiler that is installed.
# -Wpadded checks the rule that public structs have no implicit padding.
set -u
include=$1
source=$2
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/../tools/tap.sh"
warnings='-Wall -Wextra -Wpedantic -Wpadded -Werror'
compilers=0
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# refuse COMPILER LANGUAGE STANDARD: FSDP_ARRAY accepts an array but no pointer, because a pointer's count is unknown.
refuse() {
  echo '#include <fsdp.h>
#ifdef TAKES_POINTER
uint64_t take(const fsdp_param *p, uint64_t n, uint64_t s); uint64_t f(const fsdp_param *p); uint64_t f(const fsdp_param *p) { return take(FSDP_ARRAY(p)); }
#else
uint64_t take(const fsdp_param *p, uint64_t n, uint64_t s); uint64_t f(void); uint64_t f(void) { fsdp_param p[2] = {FSDP_PARAM_INIT, FSDP_PARAM_INIT}; return take(FSDP_ARRAY(p)); }
#endif' >"$folder/array.c"
  check "$1 $3 takes FSDP_ARRAY of an array" "$1" -x "$2" -std="$3" $warnings -Wno-missing-field-initializers -I"$include" -fsyntax-only "$folder/array.c"
  check "$1 $3 refuses FSDP_ARRAY of a pointer" fails "$1" -x "$2" -std="$3" -DTAKES_POINTER -I"$include" -fsyntax-only "$folder/array.c"
}
fails() { ! "$@" 2>"$folder/log"; }

# run COMPILER STANDARD: checks the values that the macros write.
run() {
  # shellcheck disable=SC2086
  check "$1 $2 makes a program of it" "$1" -std="$2" $warnings -DWITH_MAIN -I"$include" -o "$folder/declared" "$source"
  check "$1 $2: sizes and descriptors are right" "$folder/declared"
}

# try COMPILER LANGUAGE STANDARD
try() {
  # shellcheck disable=SC2086
  check "$1 $3" "$1" -x "$2" -std="$3" $warnings -I"$include" -fsyntax-only "$source"
}

for pair in gcc:g++ clang:clang++; do
  cc=${pair%:*}
  cxx=${pair#*:}
  if command -v "$cc" >/dev/null; then
    compilers=$((compilers + 1))
    for standard in c99 c11 c17; do try "$cc" c $standard; done
    refuse "$cc" c c99
    run "$cc" c99
  fi
  if command -v "$cxx" >/dev/null; then
    for standard in c++11 c++17 c++20; do try "$cxx" c++ $standard; done
    refuse "$cxx" c++ c++11
  fi
done
check "a compiler was found" [ $compilers -gt 0 ]
finish
