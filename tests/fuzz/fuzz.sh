#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fuzzes the parser of the rendezvous' messages, from the corpus that is in the repository.
#
# usage: sh tests/fuzz/fuzz.sh [SECONDS]        (default: 60)
#
# Exits with 0 if nothing was found, 77 if clang with libFuzzer is not installed, else with an error; the input that
# failed is then in build-fuzz/.
set -eu
cd "$(dirname "$0")/../.."
seconds=${1:-60}
mkdir -p build-fuzz/corpus
echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }' >build-fuzz/probe.cpp
if ! clang++ -fsanitize=fuzzer,address build-fuzz/probe.cpp -o build-fuzz/probe 2>build-fuzz/probe.log; then
  echo "fuzz: skipped: clang++ with -fsanitize=fuzzer does not work here (see build-fuzz/probe.log)"
  exit 77
fi
clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DFMT_HEADER_ONLY -Ilib -Iinclude \
  tests/fuzz/message_fuzzer.cpp lib/comm/bootstrap/message.cpp lib/comm/bootstrap/frame.cpp lib/base/error.cpp \
  -o build-fuzz/message
build-fuzz/message -max_total_time="$seconds" -max_len=40000 -rss_limit_mb=512 -print_final_stats=1 \
  -artifact_prefix=build-fuzz/ build-fuzz/corpus tests/fuzz/corpus/message
