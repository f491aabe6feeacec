#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: compile_alone.sh INCLUDE_DIR SOURCE
# The public header as every language standard that it promises, with every compiler that is here. -Wpadded holds the
# rule that public structs have no implicit padding.
set -u
include=$1
source=$2
# shellcheck source-path=SCRIPTDIR
. "$(dirname "$0")/../tools/tap.sh"
warnings='-Wall -Wextra -Wpedantic -Wpadded -Werror'
compilers=0

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
  fi
  if command -v "$cxx" >/dev/null; then
    for standard in c++11 c++17 c++20; do try "$cxx" c++ $standard; done
  fi
done
check "a compiler was found" [ $compilers -gt 0 ]
finish
