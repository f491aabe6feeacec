#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Measures a visit of a group (unshard, 12 views, reshard) in each installed language, beside C in the same run.
#
# usage: sh bindings/benchmark/run.sh BUILD_FOLDER [--check]
#The programs take turns, 7 times, and the median of each is printed. --check fails if C++ or Rust take more than 5 %
#longer than C, if Julia takes more than twice as long, or if Python takes more than 10 us. C gets all views of each
#visit by one call, which the other languages need not make.
set -u
cd "$(dirname "$0")/../.." || exit 1
build=$(cd "$1" && pwd) || exit 1
check=${2:-}
LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

rust=
if cargo --version >/dev/null 2>&1; then
  FSDP_LIB_DIR=$build/lib CARGO_TARGET_DIR=$build/bindings/rust \
    cargo build --release --offline --quiet --manifest-path bindings/rust/Cargo.toml -p fsdp --example visit || exit 1
  rust=$build/bindings/rust/release/examples/visit
else
  echo 'rust: skipped: no cargo here'
fi

# Views are looked up by name, whatever makes arrays of them: numpy, or memoryview where it is not there.
python=
measure_python() {
  FSDP_LIBRARY=$build/lib/libfsdp.so PYTHONPATH=$PWD/bindings/python "${PYTHON:-python3}" bindings/benchmark/visit.py
}
if measure_python >"$work/why" 2>&1; then
  python=yes
else
  echo "python: skipped: $(tail -n 1 "$work/why")"
fi

julia=
if sh bindings/julia/julia.sh "$build" --find >"$work/why"; then julia=yes; else echo "julia: skipped: $(cat "$work/why")"; fi

# measure NAME COMMAND...: a number more
measure() {
  name=$1
  shift
  "$@" >>"$work/$name" || exit 1
}
for turn in 1 2 3 4 5 6 7; do
  : "$turn"
  measure c "$build/bindings/benchmark/visit" params
  measure cpp "$build/bindings/benchmark/visit_cpp" index
  [ -z "$rust" ] || measure rust "$rust" index
  measure c-one-by-one "$build/bindings/benchmark/visit" param
  measure c-kept "$build/bindings/benchmark/visit" kept
  measure cpp-by-name "$build/bindings/benchmark/visit_cpp" name
  [ -z "$rust" ] || measure rust-by-name "$rust" name
  [ -z "$python" ] || measure python-by-name measure_python
  [ -z "$julia" ] || measure julia sh bindings/julia/julia.sh "$build" bindings/julia/visit.jl index
  [ -z "$julia" ] || measure julia-by-name sh bindings/julia/julia.sh "$build" bindings/julia/visit.jl name
done

median() { sort -n "$work/$1" | sed -n 4p; }
slow=0
for name in c c-one-by-one c-kept cpp cpp-by-name rust rust-by-name julia julia-by-name python-by-name; do
  [ -f "$work/$name" ] || continue
  percent=$(awk -v a="$(median $name)" -v c="$(median c)" 'BEGIN { printf "%.0f", 100 * a / c }')
  printf '%-14s %6.0f ns  %5d %% of C\n' $name "$(median $name)" "$percent"
  case $name in
    cpp | rust) [ "$percent" -le 105 ] || slow=1 ;;
    julia | julia-by-name) [ "$percent" -le 200 ] || slow=1 ;;
    python-by-name) [ "$(median $name | cut -d. -f1)" -lt 10000 ] || slow=1 ;;
  esac
done
[ "$check" != --check ] || exit $slow
