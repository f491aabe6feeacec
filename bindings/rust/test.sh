#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: test.sh LIBRARY FSDP_RUN SCRATCH_FOLDER
# The crates: what is generated is what abi.json says, cargo test without a network, the README's program on two ranks, packages.
set -u
library=$(realpath "$1") run=$(realpath "$2") here=$(realpath "$(dirname "$0")")
# shellcheck source-path=SCRIPTDIR source=../../tests/tools/tap.sh
. "$here/../../tests/tools/tap.sh"
CARGO_TARGET_DIR=$3
FSDP_LIB_DIR=$(dirname "$library") LD_LIBRARY_PATH=$(dirname "$library") RUST_BACKTRACE=0
export CARGO_TARGET_DIR FSDP_LIB_DIR LD_LIBRARY_PATH RUST_BACKTRACE
mkdir -p "$CARGO_TARGET_DIR"
CARGO_TARGET_DIR=$(realpath "$CARGO_TARGET_DIR")
enter_scratch

capture python3 "$here/generate.py" --check
check 'what was generated is what abi.json says' equal "$status $err" '0 '
capture python3 "$here/../complete.py" "$here"/fsdp/src/*.rs
check 'the safe crate reaches every call and constant' equal "$status $err" '0 '
if ! cargo --version >/dev/null 2>&1; then
  skip 'cargo test' 'no cargo here'
  finish
fi

# cargo_test PACKAGE: a line for each of its tests.
cargo_test() {
  capture cargo test --offline --manifest-path "$here/Cargo.toml" -p "$1"
  check "cargo test of $1" equal $status 0
  [ $status -eq 0 ] || explain "$out" "$err"
  grep -h '^test .* ok$' out | sed 's/^test \(.*\) \.\.\. ok$/\1/' >names
  while read -r name; do check "$1: $name" true; done <names
}
cargo_test fsdp-sys
cargo_test fsdp

capture cargo build --offline --manifest-path "$here/Cargo.toml" -p fsdp --example train
check 'the example builds' equal $status 0
for ranks in 1 2; do
  capture "$run" -n $ranks --no-prefix "$CARGO_TARGET_DIR/debug/examples/train"
  check "... and trains on $ranks" equal "$status $err" '0 '
  check '... each of which learns the weight' equal "$(grep -c '^w\[0\] = \(0\.9\|1\.0\)[0-9]$' out)" "$ranks"
done

# A tiny GPT beside the same math unsharded. torch, JAX and MLX find these losses, too, for its weights and its text
# (tests/peers/frameworks.sh).
# Optimized, which takes less time than running it would.
capture cargo rustc --offline --manifest-path "$here/Cargo.toml" -p fsdp --example gpt -- -C opt-level=1
check 'the GPT builds' equal "$status" 0
[ $status -eq 0 ] || explain "$err"
capture "$run" -n 2 --no-prefix "$CARGO_TARGET_DIR/debug/examples/gpt"
check '... and trains on two ranks as unsharded' equal "$status $err" '0 '
# is_loss STEP WANTED TOLERANCE
is_loss() {
  awk -v "step=step $1:" -v "wanted=$2" -v "far=$3" '
    index($0, step) == 1 { found = 1; d = $4 - wanted }
    END { exit !found || d < -far || d > far }' out
}
check '... from the first loss of other frameworks' is_loss 1 5.6068188 1e-5
check '... to their last' is_loss 5 4.8584647 1e-4
explain "$out"

# An older cargo packages no crates that depend on each other before the first is published.
# Cargo keeps what it unpacked by version, so a home that has seen another fsdp-sys of this version would build with that one.
capture env CARGO_HOME="$PWD/cargo-home" cargo package --workspace --offline --allow-dirty --manifest-path "$here/Cargo.toml"
if [ $status -ne 0 ] && contains "$err" 'no matching package named `fsdp-sys` found' >/dev/null; then
  skip 'the crates make packages' 'this cargo looks for fsdp-sys in a registry'
else
  check 'the crates make packages that build' equal $status 0
  [ $status -eq 0 ] || explain "$err"
fi
finish
