# SPDX-License-Identifier: Apache-2.0
# The interpreter over the crate fsdp. usage: see ../README.md
set -u
target=$FSDP_BUILD/bindings/rust
if [ "$1" = prepare ]; then
  cargo --version >/dev/null 2>&1 || { echo "no cargo here"; exit 77; }
  FSDP_LIB_DIR=$FSDP_BUILD/lib CARGO_TARGET_DIR=$target \
    cargo build --offline --manifest-path bindings/rust/Cargo.toml -p fsdp --example conformance
  exit
fi
exec "$target/debug/examples/conformance" "$@"
