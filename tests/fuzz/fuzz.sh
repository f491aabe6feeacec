#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fuzzes the parser of the rendezvous' messages, from the corpus that is in the repository, and then the public header: random
# calls with random arguments against a build with AddressSanitizer and UndefinedBehaviorSanitizer.
#
# usage: sh tests/fuzz/fuzz.sh [SECONDS [SEED]]        (default: 60 for both, one beside the other; a seed from the clock)
#
# Exits with 0 if nothing was found, 77 if clang with libFuzzer is not installed and the header's fuzzer found nothing, else
# with an error. A message that failed is then in build-fuzz/; a round of calls that failed is played again by
# `sh tests/fuzz/replay.sh SEED`. Seeds that have found something are in tests/fuzz/corpus/abi and come first.
set -eu
cd "$(dirname "$0")/../.."
seconds=${1:-60}
seed=${2:-$(date +%s)000000}
mkdir -p build-fuzz/corpus

fuzz_messages() (
  echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }' >build-fuzz/probe.cpp
  if ! clang++ -fsanitize=fuzzer,address build-fuzz/probe.cpp -o build-fuzz/probe 2>build-fuzz/probe.log; then
    echo "fuzz: messages skipped: clang++ with -fsanitize=fuzzer does not work here (see build-fuzz/probe.log)"
    return 77
  fi
  clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DFMT_HEADER_ONLY -Ilib -Iinclude \
    tests/fuzz/message_fuzzer.cpp lib/comm/bootstrap/message.cpp lib/comm/bootstrap/frame.cpp lib/base/error.cpp \
    -o build-fuzz/message
  build-fuzz/message -max_total_time="$seconds" -max_len=40000 -rss_limit_mb=512 -print_final_stats=1 \
    -artifact_prefix=build-fuzz/ build-fuzz/corpus tests/fuzz/corpus/message
)

# The sanitizer build of tests/run.sh, or the same one anew; of it only the library and this program.
fuzz_calls() {
  [ -f build-asan/build.ninja ] ||
    meson setup build-asan -Dtests=enabled -Dexamples=disabled -Doptimization=g -Ddebug=false -Dcpp_args=-g1 -Dc_args=-g1 \
      -Db_lundef=false -Dunity=on -Dunity_size=12 -Db_sanitize=address,undefined
  ninja -C build-asan tests/fuzz/abi_fuzzer
  for known in $(sed 's/#.*//' tests/fuzz/corpus/abi/seeds); do
    sh tests/fuzz/replay.sh "$known" >build-fuzz/replay.log 2>&1 || { cat build-fuzz/replay.log; return 1; }
  done
  echo "fuzz: calls from seed $seed"
  sh tests/fuzz/replay.sh "$seed" --seconds "$seconds"
}

fuzz_messages >build-fuzz/message.log 2>&1 &
messages=$!
trap 'kill "$messages" 2>/dev/null || true' EXIT
fuzz_calls
skipped=0
wait "$messages" || skipped=$?
trap - EXIT
cat build-fuzz/message.log
exit "$skipped"
