#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds libfsdp and runs every test; alone enough on a fresh Debian 12 or Ubuntu 24.04.
#
# usage: sh tests/run.sh [-y] [--quick] [--werror]
#   -y        install missing packages without asking
#   --quick   leave out the sanitizer builds and the fuzzing
#   --werror  warnings are errors (always so when CI is set)
#
# The last line is "N passed, N failed" or "N passed, N failed, N skipped", summed over all builds. A build that fails
# counts as one failure. Logs stay in build-*/meson-logs/. Meson uses ccache by itself where it is installed.
set -u
cd "$(dirname "$0")/.." || exit 1

yes='' quick=0 werror=false
[ -n "${CI:-}" ] && werror=true
for argument; do
  case $argument in
    -y) yes=-y ;;
    --quick) quick=1 ;;
    --werror) werror=true ;;
    *) echo "tests/run.sh: unknown argument '$argument' (known: -y --quick --werror)" >&2; exit 2 ;;
  esac
done

passed=0 failed=0 skipped=0

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

# prepare DIRECTORY MESON_OPTIONS...: as for build_and_test, which needs it.
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

# build_early DIRECTORY...: builds library-tests in the time that tests leave idle; stop_early ends that, done or not. In the
# session of the tests: each session may have a share of the processor to itself, and within one the idle get what is left.
early=
build_early() {
  idle='nice -n 19'
  chrt -i 0 true 2>/dev/null && idle='chrt -i 0'
  # shellcheck disable=SC2086,SC2016  # a command and its words; the inner shell expands the rest
  $idle sh -c 'build=
    end() { [ -z "$build" ] || { kill "$build"; wait "$build"; }; exit 143; }
    trap end TERM
    for directory; do
      ninja -j "$(nproc)" -C "$directory" library-tests >>"$directory/early.log" 2>&1 &
      build=$!
      wait "$build" || exit
    done' early "$@" </dev/null &
  early=$!
}

stop_early() {
  [ -n "$early" ] || return 0
  kill "$early" 2>/dev/null
  wait "$early"
  early=
}
trap 'stop_early' EXIT
trap 'exit 130' HUP INT TERM

# build_and_test DIRECTORY "MESON TEST ARGUMENTS" TARGET [DIRECTORIES TO BUILD EARLY]: adds to passed, failed and skipped.
build_and_test() {
  directory=$1
  arguments=$2
  target=$3
  shift 3
  [ -f "$directory/prepared" ] || return
  printf '\n== %s: build\n' "$directory"
  rm -f "$directory/meson-logs/testlog.json"
  started=$(date +%s)
  run_logged "$directory/compile.log" ninja -C "$directory" "$target" ||
    { fail_build "build $directory" "$directory/compile.log"; return; }
  touch "$directory/early.log"
  cat "$directory/early.log" "$directory/compile.log" | grep -c 'warning:' | sed '/^0$/d; s/$/ compiler warnings/'
  built=$(date +%s)
  printf '== %s: test (built in %s s)\n' "$directory" $((built - started))
  [ $# -eq 0 ] || build_early "$@"
  # shellcheck disable=SC2086  # lists of words
  $launcher meson test -C "$directory" --no-rebuild --print-errorlogs $arguments </dev/null
  test_status=$?
  stop_early
  counts=$(python3 tests/count.py "$directory/meson-logs/testlog.json" "$test_status")
  # shellcheck disable=SC2086
  set -- ${counts:-0 1 0}
  echo "== $directory: $1 passed, $2 failed, $3 skipped (tested in $(($(date +%s) - built)) s)"
  passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}

# Sixty seconds of libFuzzer; skipped, and counted so, where clang cannot do it.
fuzz() {
  printf '\n== fuzz\n'
  # libFuzzer is in a package of clang's own version.
  runtime=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/libclang-rt-\1-dev/p')
  # shellcheck disable=SC2086  # may be empty
  need_packages $yes clang $runtime
  mkdir -p build-fuzz
  sh tests/fuzz/fuzz.sh 60 >build-fuzz/fuzz.log 2>&1 </dev/null
  case $? in
    0) passed=$((passed + 1)); grep 'Done' build-fuzz/fuzz.log ;;
    77) skipped=$((skipped + 1)); cat build-fuzz/fuzz.log ;;
    *) tail -n 80 build-fuzz/fuzz.log; fail_build fuzz build-fuzz/fuzz.log ;;
  esac
}

report() {
  line="$passed passed, $failed failed"
  [ $skipped -gt 0 ] && line="$line, $skipped skipped"
  printf '\n%s\n' "$line"
  [ $failed -eq 0 ] && [ $passed -gt 0 ]
  exit
}

. tools/dev/packages.sh
# shellcheck disable=SC2086
need_packages $yes g++ meson ninja-build pkg-config libfmt-dev libhwy-dev libxxhash-dev libssl-dev libopenblas-dev \
  libcli11-dev nlohmann-json3-dev libgtest-dev libbenchmark-dev libucx-dev iproute2 strace python3 ||
  { fail_build 'install the packages' 'see above'; report; }

launcher=
# Without debug information, which is a third of the compiler's time.
prepare build-tests -Dexamples=enabled "-Dwerror=$werror" -Ddebug=false
if [ $quick -eq 1 ]; then
  build_and_test build-tests '' all
else
  # Only the tests that run the library's code inside their own process: sanitizers see nothing in others. -Og
  # and line tables keep their reports readable and are fast enough for two cores. The library in large units: most of
  # the compiler's time goes into headers. The first build shows that each file includes what it needs.
  sanitized='-Dexamples=disabled -Doptimization=g -Ddebug=false -Dcpp_args=-g1 -Dc_args=-g1 -Db_lundef=false -Dunity=on -Dunity_size=12'
  # One more than cores: a good part of their time is waiting.
  suites="--suite unit --suite engine --timeout-multiplier 4 --num-processes $(($(nproc) + 1))"
  # shellcheck disable=SC2086
  prepare build-asan $sanitized -Db_sanitize=address,undefined
  # shellcheck disable=SC2086
  prepare build-tsan $sanitized -Db_sanitize=thread
  # Nothing beside these: some of them measure times, and UCX 1.13 ends processes more often where ranks wake up late.
  build_and_test build-tests '' all

  export ASAN_OPTIONS=halt_on_error=1:abort_on_error=1:detect_stack_use_after_return=1
  export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
  build_and_test build-asan "$suites" library-tests build-tsan

  export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:suppressions=$PWD/tests/tsan.supp"
  # Older ThreadSanitizers cannot place their shadow memory where the kernel randomizes addresses a lot.
  setarch -R true 2>/dev/null && launcher='setarch -R'
  build_and_test build-tsan "$suites" library-tests

  fuzz
fi
report
