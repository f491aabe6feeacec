#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds libfsdp and runs every test; alone enough on a fresh Debian 12 or Ubuntu 24.04.
#
# usage: sh tests/run.sh [-y] [--sanitizers | --long] [--werror]
#   -y            install missing packages without asking
#   --sanitizers  instead: unit and engine tests under AddressSanitizer and ThreadSanitizer, and fuzzing; of the plain
#                 build it makes the engine tests alone, and runs them over the libraries with sanitizers
#   --long        the plain build, file by file, and its tests with the long counts: hours (docs/testing.md)
#   --werror      warnings are errors (always so when CI is set)
#
# The last line is "N passed, N failed" or "N passed, N failed, N skipped", summed over all builds. A build that fails
# counts as one failure. Logs stay in build-*/meson-logs/. Meson uses ccache by itself where it is installed.
set -u
cd "$(dirname "$0")/.." || exit 1

# A timeout finds a hang, and measures nothing: the times in the meson.build files are those of idle machines.
yes='' stages=plain patience=4 werror=false
[ -n "${CI:-}" ] && werror=true
for argument; do
  case $argument in
    -y) yes=-y ;;
    --sanitizers) stages=sanitizers ;;
    --long)
      stages=long patience=30
      export FSDP_TEST_MANY=1 FSDP_TEST_ALL_CASTS=1 FSDP_TEST_DEATHS=100 ;;
    --werror) werror=true ;;
    *) echo "tests/run.sh: unknown argument '$argument' (known: -y --sanitizers --long --werror)" >&2; exit 2 ;;
  esac
done

passed=0 failed=0 skipped=0
started=$(date +%s)

# configure DIRECTORY OPTIONS...
configure() {
  directory=$1
  shift
  if [ -f "$directory/build.ninja" ]; then
    meson configure "$directory" "$@"
  else
    meson setup "$directory" "$@"
  fi
}

# run_logged LOG COMMAND...: shows the end of the log if the command fails.
run_logged() {
  log=$1
  shift
  "$@" >"$log" 2>&1 </dev/null && return 0
  tail -n 80 "$log"
  return 1
}

fail_build() {
  echo "FAILED: $1 (whole log: $2)"
  failed=$((failed + 1))
}

# prepare DIRECTORY MESON_OPTIONS...: which build and run_tests ask for.
prepare() {
  directory=$1
  shift
  mkdir -p "$directory"
  printf '== %s: configure\n' "$directory"
  rm -f "$directory/prepared" "$directory/early.log"
  run_logged "$directory/configure.log" configure "$directory" -Dtests=enabled -Dwerror=false "$@" ||
    { fail_build "configure $directory" "$directory/configure.log"; return; }
  : >"$directory/prepared"
}

clock=$(mktemp)
# note_time WHAT SINCE: a line of the table at the end, with what the commands that ended since the line before have taken of
# the processors.
table='  wall  processor
' used=0
note_time() {
  # In a shell of its own, as $() is, times knows no children.
  times >"$clock"
  now_used=$(sed -n '2s/[ms]/ /gp' "$clock" | awk '{ printf "%d", 60 * $1 + $2 + 60 * $3 + $4 }')
  table="$table$(printf '%4d s %8d s  %s' $(($(date +%s) - $2)) $((now_used - used)) "$1")
"
  used=$now_used
}

# build_early LOG COMMAND...: builds in the time that tests leave idle; stop_early ends that, done or not. In the session of
# the tests: each session may have a share of the processor to itself, and within one the idle get what is left.
early=
build_early() {
  early_what="${1%/*}: built beside the tests above" early_began=$(date +%s)
  idle='nice -n 19'
  chrt -i 0 true 2>/dev/null && idle='chrt -i 0'
  # shellcheck disable=SC2086,SC2016  # a command and its words; the inner shell expands the rest
  $idle sh -c 'log=$1 build=
    shift
    end() { [ -z "$build" ] || { kill "$build"; wait "$build"; }; exit 143; }
    trap end TERM
    "$@" >>"$log" 2>&1 &
    build=$!
    wait "$build"' early "$@" </dev/null &
  early=$!
}

stop_early() {
  [ -n "$early" ] || return 0
  kill "$early" 2>/dev/null
  finish_early
}
finish_early() {
  wait "$early"
  early=
  note_time "$early_what" "$early_began"
}
trap 'stop_early; rm -f "$clock"' EXIT
trap 'exit 130' HUP INT TERM

# build DIRECTORY TARGETS...
build() {
  directory=$1
  shift
  [ -f "$directory/prepared" ] || return
  printf '\n== %s: build\n' "$directory"
  began=$(date +%s)
  run_logged "$directory/compile.log" ninja -C "$directory" "$@" ||
    { rm "$directory/prepared"; fail_build "build $directory" "$directory/compile.log"; return; }
  touch "$directory/early.log"
  cat "$directory/early.log" "$directory/compile.log" | grep -c 'warning:' | sed '/^0$/d; s/$/ compiler warnings/'
  note_time "$directory: build" "$began"
}

# run_tests DIRECTORY NAME MESON_TEST_ARGUMENTS...: adds to passed, failed and skipped.
logs=
run_tests() {
  directory=$1
  name=$2
  shift 2
  [ -f "$directory/prepared" ] || return
  printf '== %s: %s tests\n' "$directory" "$name"
  # Without CUDA there is no simulated GPU, for one. What no stage runs is found at the end.
  meson test -C "$directory" --no-rebuild --list "$@" >/dev/null 2>&1 ||
    { echo "== $directory: there are none in this build"; return; }
  began=$(date +%s)
  rm -f "$directory/meson-logs/$name.json"
  logs="$logs $directory/meson-logs/$name.json"
  $launcher meson test -C "$directory" --no-rebuild --print-errorlogs --logbase "$name" "$@" </dev/null
  test_status=$?
  counts=$(python3 tests/count.py "$directory/meson-logs/$name.json" "$test_status")
  # shellcheck disable=SC2086
  set -- ${counts:-0 1 0}
  echo "== $directory: $1 passed, $2 failed, $3 skipped"
  passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
  note_time "$directory: $name tests, $1 passed, $2 failed, $3 skipped" "$began"
}

# Those that wait for most of their time: many at once. Over simulated GPUs half of the time is waiting.
run_waiting_tests() {
  directory=$1
  shift
  run_tests "$directory" waiting --suite waiting --suite waiting-ranks --num-processes $(($(nproc) * 4)) "$@"
  run_tests "$directory" simulated --suite simulated --no-suite waiting-ranks --num-processes $(($(nproc) * 2)) "$@"
}

# The others, of which some measure times: on a processor each.
run_busy_tests() {
  directory=$1
  shift
  run_tests "$directory" busy --no-suite waiting --no-suite waiting-ranks --no-suite simulated "$@"
}

# run_library_tests DIRECTORY NAME MESON_TEST_ARGUMENTS...: what runs the library's code in its own process, for sanitizers,
# which see nothing in others. They measure no times: some wait while others compute.
run_library_tests() {
  directory=$1
  name=$2
  shift 2
  if [ -f "$directory/prepared" ] && ! meson test -C "$directory" --no-rebuild --list "$@" >/dev/null 2>&1; then
    fail_build "find the tests of $name" "$directory/meson-logs"
    return
  fi
  run_tests "$directory" "$name" --num-processes $(($(nproc) * 3)) --timeout-multiplier 4 "$@"
}

# Each stage picks its tests by their suites; this finds a test that no stage picks.
find_left_out() {
  printf '\n== tests that no stage ran\n'
  # shellcheck disable=SC2086  # a list of files
  if python3 tests/left_out.py $logs; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
}

need_fuzzers() {
  # libFuzzer is in a package of clang's own version.
  runtime=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/libclang-rt-\1-dev/p')
  # shellcheck disable=SC2086  # may be empty
  need_packages $yes clang $runtime
  mkdir -p build-fuzz
}

# A third of a minute of parsers beside as much of calls, from a seed that stays: what fails here has been broken by a change. Other
# seeds are for campaigns (docs/testing.md). Counted as skipped where clang cannot do the parsers.
fuzz() {
  printf '\n== fuzz\n'
  began=$(date +%s)
  sh tests/fuzz/fuzz.sh 20 20261125000000 >build-fuzz/fuzz.log 2>&1 </dev/null
  case $? in
    0) passed=$((passed + 1)); grep -e '^Done' -e ' calls in ' build-fuzz/fuzz.log ;;
    77) skipped=$((skipped + 1)); grep -e 'skipped' -e ' calls in ' build-fuzz/fuzz.log ;;
    *) tail -n 80 build-fuzz/fuzz.log; fail_build fuzz build-fuzz/fuzz.log ;;
  esac
  note_time 'fuzz' "$began"
}

report() {
  used=0
  note_time 'in all' "$started"
  printf '\n%s' "$table"
  line="$passed passed, $failed failed"
  [ $skipped -gt 0 ] && line="$line, $skipped skipped"
  printf '\n%s\n' "$line"
  [ $failed -eq 0 ] && [ $passed -gt 0 ]
  exit
}

. tools/dev/packages.sh
# shellcheck disable=SC2086
need_packages $yes g++ meson ninja-build pkg-config libfmt-dev libhwy-dev libxxhash-dev libssl-dev libopenblas-dev \
  libcli11-dev nlohmann-json3-dev libgtest-dev libbenchmark-dev libucx-dev iproute2 strace abigail-tools python3 python3-pycparser ||
  { fail_build 'install the packages' 'see above'; report; }

launcher=
# Large units are the default of the project. Debug information is a third of the compiler's time.
units='-Ddebug=false -Dunity=on -Dunity_size=80'
# gold links programs of this size in half of the time of the usual linker, and comes with it in binutils.
command -v ld.gold >/dev/null && export CC_LD=gold CXX_LD=gold
# GCC collects its garbage whenever there is a third more than 128 MiB: 6 % of its time, which half a GiB saves.
roomy="'--param=ggc-min-heapsize=524288',"
echo | c++ --param=ggc-min-heapsize=524288 -x c++ -fsyntax-only - 2>/dev/null || roomy=

# shellcheck disable=SC2086  # lists of words
# -O1 takes half of the compiler's time of -O2, and the wheel has it; the kernels have -O2. The long run has the default.
prepare_plain() { prepare build-tests -Dexamples=enabled "-Dwerror=$werror" -Doptimization=1 $units "-Dcpp_args=[$roomy]"; }

run_plain_tests() {
  run_waiting_tests build-tests --timeout-multiplier $patience
  # Nothing runs beside these: some measure times.
  run_busy_tests build-tests --timeout-multiplier $patience
  find_left_out
}

# -Og and line tables keep the reports readable and are fast enough for two cores.
prepare_sanitizers() {
  sanitized="-Dexamples=disabled -Doptimization=g -Db_lundef=false $units"
  kernels=$PWD/build-tests/lib/device/cuda  # no sanitizer sees what runs on a GPU
  # A check of UndefinedBehaviorSanitizer that fails is an illegal instruction, which AddressSanitizer reports with its frames:
  # the texts that each check would have take a quarter of the compiler's time, and half of every program.
  # A call for each access that AddressSanitizer looks at, in place of its instructions, saves a tenth of the compiler's time.
  called="'--param=asan-instrumentation-with-call-threshold=0',"
  [ -n "$roomy" ] || called=
  # _GLIBCXX_ASSERTIONS: the standard library alone sees a read behind the end of a vector that has room.
  # shellcheck disable=SC2086
  prepare build-asan $sanitized "-Dkernel_objects=$kernels" -Db_sanitize=address,undefined \
    "-Dc_args=['-g1','-fsanitize-undefined-trap-on-error']" \
    "-Dcpp_args=[$roomy$called'-g1','-D_GLIBCXX_ASSERTIONS','-fsanitize-undefined-trap-on-error']"
  # shellcheck disable=SC2086
  prepare build-tsan $sanitized "-Dkernel_objects=$kernels" -Db_sanitize=thread -Dc_args=-g1 \
    "-Dcpp_args=[$roomy'-g1','-D_GLIBCXX_ASSERTIONS']"
}

run_address_tests() {
  # Frames that an exception leaves stay on the heap for a while and are looked through for a free one: a small heap, or tests of
  # a million errors take ten times as long.
  export ASAN_OPTIONS=halt_on_error=1:abort_on_error=1:handle_sigill=1:detect_stack_use_after_return=1:max_uar_stack_size_log=16
  build build-asan unit-tests tests/fuzz/abi_fuzzer
  build_early build-tsan/early.log ninja -j "$(nproc)" -C build-tsan threaded-tests
  run_library_tests build-asan unit --suite unit
  # Programs of the public header alone: those of the plain build over this library. (Meson adds the wrapper's name to the
  # log's.)
  [ ! -f build-asan/prepared ] || run_library_tests build-tests over-asan-sh --logbase over-asan --suite engine \
    --wrapper "sh '$PWD/tests/over_sanitizer.sh' '$PWD/build-asan'"
  stop_early
}

run_thread_tests() {
  export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:suppressions=$PWD/tests/tsan.supp"
  # Older ThreadSanitizers cannot place their shadow memory where the kernel randomizes addresses a lot.
  setarch -R true 2>/dev/null && launcher='setarch -R'
  # Calls and their errors: programs of the plain build, too. They wait for most of their time, which the others' build takes.
  build build-tsan library
  build_early build-tsan/early.log ninja -j "$(nproc)" -C build-tsan threaded-tests
  [ ! -f build-tsan/prepared ] || run_library_tests build-tests over-tsan-sh --logbase over-tsan --suite over-tsan \
    --wrapper "sh '$PWD/tests/over_sanitizer.sh' '$PWD/build-tsan'"
  stop_early
  build build-tsan threaded-tests
  need_fuzzers
  build_early build-fuzz/early.log sh tests/fuzz/fuzz.sh --build
  run_library_tests build-tsan library --suite unit --suite engine --no-suite one-thread --no-suite over-tsan
  finish_early
}

case $stages in
  plain)
    prepare_plain
    build build-tests all
    run_plain_tests
    ;;
  long)
    prepare build-tests -Dexamples=enabled "-Dwerror=$werror" -Ddebug=false -Dunity=off
    build build-tests all
    run_plain_tests
    ;;
  sanitizers)
    prepare_plain
    prepare_sanitizers
    build build-tests engine-tests
    run_address_tests
    run_thread_tests
    fuzz
    ;;
esac
report
