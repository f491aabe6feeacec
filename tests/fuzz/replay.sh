#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Plays one round of the header's fuzzer again, in the build with sanitizers that fuzz.sh has left. With --seconds N it
# plays all rounds that follow, too.
#
# usage: sh tests/fuzz/replay.sh SEED [--seconds N]
set -eu
cd "$(dirname "$0")/../.."
seed=$1
shift
[ $# -gt 0 ] || set -- --rounds 1
abi=$PWD/bindings/abi/abi.json program=$PWD/build-asan/tests/fuzz/abi_fuzzer
mkdir -p build-fuzz
cd build-fuzz
exec env ASAN_OPTIONS=halt_on_error=1:abort_on_error=1:handle_sigill=1 "$program" "$abi" --seed "$seed" "$@"
