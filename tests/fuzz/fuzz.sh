#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fuzzes the parsers of the rendezvous' messages, of frames between hosts and of a checkpoint's files, and what leaders of
# hosts say to each other, from the corpora that are in the repository. Then it fuzzes the public header: random calls with
# random arguments against a build with AddressSanitizer and UndefinedBehaviorSanitizer.
#
# usage: sh tests/fuzz/fuzz.sh [SECONDS [SEED]]        (default: 60, parsers beside calls; a seed from the clock)
#        sh tests/fuzz/fuzz.sh --build                 (the parsers only, so that a later run finds them)
#
# Exits with 0 if nothing was found, 77 if clang with libFuzzer is not installed and the header's fuzzer found nothing, else
# with an error. A message that failed is then in build-fuzz/; a round of calls that failed is played again by
# `sh tests/fuzz/replay.sh SEED`. Seeds that have found something are in tests/fuzz/corpus/abi and come first.
set -eu
cd "$(dirname "$0")/../.."
build_only=0
[ "${1:-}" = --build ] && { build_only=1; shift; }
seconds=${1:-60}
seed=${2:-$(date +%s)000000}
mkdir -p build-fuzz

# build_parser NAME SOURCES...: builds build-fuzz/NAME, unless it is newer than all files that it could depend on.
build_parser() {
  name=$1
  shift
  [ -f "build-fuzz/$name" ] && [ -z "$(find lib include tests/fuzz -newer "build-fuzz/$name" -name '*.[ch]*' | head -n 1)" ] && return
  clang++ -std=c++20 -gline-tables-only -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Ilib -Iinclude \
    -DFSDP_VERSION_TEXT='"fuzzed"' \
    "tests/fuzz/${name}_fuzzer.cpp" "$@" lib/base/error.cpp -lfmt -o "build-fuzz/$name.new"
  mv "build-fuzz/$name.new" "build-fuzz/$name"
}

build_parsers() {
  echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char *, unsigned long) { return 0; }' >build-fuzz/probe.cpp
  if ! clang++ -fsanitize=fuzzer,address build-fuzz/probe.cpp -o build-fuzz/probe 2>build-fuzz/probe.log; then
    echo "fuzz: parsers skipped: clang++ with -fsanitize=fuzzer does not work here (see build-fuzz/probe.log)"
    return 77
  fi
  build_parser message lib/membership/join/message.cpp lib/membership/verdict.cpp lib/membership/wire/frame.cpp \
    lib/membership/wire/secret.cpp lib/base/text.cpp -lcrypto
  build_parser link lib/transport/message/tcp/link.cpp lib/transport/message/tcp/tls.cpp lib/base/crc32c.cpp lib/base/settings.cpp
  build_parser checkpoint lib/checkpoint/format/*.cpp lib/base/text.cpp
  # The leader is compiled as one unit, which takes a third of the time. The fuzzer provides the leader's clock and
  # digests.
  for file in lib/membership/tree/*.cpp lib/membership/liveness/control.cpp \
    lib/membership/liveness/failure_detector.cpp lib/membership/liveness/waits.cpp lib/membership/liveness/watch.cpp \
    lib/membership/wire/*.cpp lib/membership/verdict.cpp lib/base/fd.cpp lib/base/mapping.cpp lib/base/text.cpp; do
    echo "#include \"${file#lib/}\""
  done >build-fuzz/leader_unit.cpp
  build_parser leader -include tests/fuzz/leader_stand_ins.h tests/fuzz/leader_scene.cpp build-fuzz/leader_unit.cpp -lcrypto
}

# fuzz_parser NAME SECONDS LONGEST: runs a parser. A finding must not exit with 77, libFuzzer's own status, because 77
# means skipped here.
fuzz_parser() {
  mkdir -p "build-fuzz/corpus-$1"
  "build-fuzz/$1" -seed=$((seed / 1000000 % 4294967295 + 1)) -max_total_time="$2" -max_len="$3" -rss_limit_mb=1024 -print_final_stats=1 \
    -error_exitcode=1 -timeout_exitcode=1 -artifact_prefix=build-fuzz/ "build-fuzz/corpus-$1" "tests/fuzz/corpus/$1"
}

fuzz_parsers() (
  build_parsers
  fuzz_parser message $((seconds / 4)) 40000
  fuzz_parser link $((seconds / 4)) 4096
  fuzz_parser checkpoint $((seconds / 4)) 4000
  fuzz_parser leader $((seconds / 4)) 4000
)

# Uses the sanitizer build of tests/run.sh, or configures the same build anew. Only the library and this program are
# built.
fuzz_calls() {
  [ -f build-asan/build.ninja ] ||
    meson setup build-asan -Dtests=enabled -Dexamples=disabled -Doptimization=g -Ddebug=false \
      "-Dcpp_args=['-g1','-D_GLIBCXX_ASSERTIONS','-fsanitize-undefined-trap-on-error']" "-Dc_args=['-g1','-fsanitize-undefined-trap-on-error']" \
      -Db_lundef=false -Dunity=on -Dunity_size=40 -Db_sanitize=address,undefined
  ninja -C build-asan tests/fuzz/abi_fuzzer
  for known in $(sed 's/#.*//' tests/fuzz/corpus/abi/seeds); do
    sh tests/fuzz/replay.sh "$known" >build-fuzz/replay.log 2>&1 || { cat build-fuzz/replay.log; return 1; }
  done
  echo "fuzz: calls from seed $seed"
  sh tests/fuzz/replay.sh "$seed" --seconds "$seconds"
}

if [ $build_only -eq 1 ]; then
  build_parsers
  exit
fi

fuzz_parsers >build-fuzz/parsers.log 2>&1 &
parsers=$!
trap 'kill "$parsers" 2>/dev/null || true' EXIT
fuzz_calls
skipped=0
wait "$parsers" || skipped=$?
trap - EXIT
cat build-fuzz/parsers.log
exit "$skipped"
