#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: test.sh SOURCE_ROOT FSDP_RUN TRAIN LIBRARY
# The README's program on 1 and 2 ranks; every call is reached; no warning, with each compiler that is here.
set -u
root=$(realpath "$1") run=$(realpath "$2") train=$(realpath "$3") library=$(realpath "$4")
here=$root/bindings/cpp
# shellcheck source-path=SCRIPTDIR source=../../tests/tools/tap.sh
. "$root/tests/tools/tap.sh"
LD_LIBRARY_PATH=$(dirname "$library")
export LD_LIBRARY_PATH
enter_scratch

capture python3 "$here/../complete.py" --calls "$here"/fsdp/*.hpp
check 'fsdp.hpp reaches every call' equal "$status $err" '0 '
sed -n '/^```cpp$/,/^```$/{/^```/d;p}' "$here/README.md" >readme.cpp
check "the README's program is examples/train.cpp" equal "$(cat readme.cpp)" "$(sed 1d "$here/examples/train.cpp")"
check '... of 30 lines' [ "$(grep -c . readme.cpp)" -le 30 ]
for ranks in 1 2; do
  capture "$run" -n $ranks --no-prefix "$train"
  check "... which trains on $ranks" equal "$status $err" '0 '
  check '... each of which learns the weight' equal "$(grep -c '^w\[0\] = \(0\.9\|1\.0\)[0-9]$' out)" "$ranks"
done

# Compiles each header alone, and all headers with the template instances of the tests.
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wold-style-cast -Wnon-virtual-dtor -Werror'
for compiler in g++ clang++; do
  if ! $compiler --version >/dev/null 2>&1; then
    skip "$compiler gives no warning" "no $compiler here"
    continue
  fi
  for header in "$here"/fsdp/*.hpp; do printf '#include "%s"\n' "$header"; done >all.cpp
  # shellcheck disable=SC2086
  capture $compiler -std=c++17 $warnings -I"$root/include" -I"$here" -fsyntax-only all.cpp "$here"/tests/*.cpp
  check "$compiler gives no warning" equal "$status $err" '0 '
  # shellcheck disable=SC2086
  capture $compiler -std=c++20 $warnings -I"$root/include" -I"$here" -fsyntax-only all.cpp "$here/examples/train.cpp"
  check '... nor in C++20' equal "$status $err" '0 '
done
for header in "$here"/fsdp/*.hpp; do
  capture g++ -std=c++17 -I"$root/include" -fsyntax-only -x c++ -include "$header" /dev/null
  check "$(basename "$header") includes what it needs" equal "$status $err" '0 '
done
# A std::span can be made from fsdp::span.
printf '#include <fsdp.hpp>\n#include <span>\nstd::span<const float> f(fsdp::Weights &w) { return w.get<float>(0); }\n' >span.cpp
capture g++ -std=c++20 -I"$root/include" -I"$here" -fsyntax-only span.cpp
check 'fsdp::span converts to std::span' equal "$status $err" '0 '
finish
