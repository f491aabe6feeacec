#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: test.sh SOURCE_ROOT BUILD_ROOT FSDP_RUN
# What is generated is what abi.json says; every call is reached; the package's tests; the README's program on one rank and two.
set -u
root=$(realpath "$1") build=$(realpath "$2") run=$(realpath "$3")
here=$root/bindings/julia
# shellcheck source-path=SCRIPTDIR source=../../tests/tools/tap.sh
. "$root/tests/tools/tap.sh"
enter_scratch

capture python3 "$here/generate.py" --check
check 'what was generated is what abi.json says' equal "$status $out" '0 '
capture python3 "$here/../complete.py" --calls "$here"/FSDP.jl/src/*.jl
check 'FSDP.jl reaches every call' equal "$status $err" '0 '
capture sh "$here/julia.sh" "$build" --find
if [ $status -eq 77 ]; then
  skip 'the tests in Julia' "$out"
  finish
fi

capture sh "$here/julia.sh" "$build" -t 2 "$here/FSDP.jl/test/runtests.jl"
check 'runtests.jl passes' equal $status 0
[ $status -eq 0 ] || explain "$out" "$err"

sed -n '/^```julia$/,/^```$/{/^```/d;p}' "$here/FSDP.jl/README.md" >train.jl
check "the README's program is of some 30 lines" [ "$(grep -c . train.jl)" -le 36 ]
losses() { sed -n 's/.*: loss //p' out; }
capture sh "$here/julia.sh" "$build" train.jl
check '... and trains on one rank' equal "$status $err" '0 '
losses >one
check '... which learns' awk 'NR == 1 { first = $1 } END { exit !(NR == 3 && $1 < first / 2) }' one
capture "$run" -n 2 --no-prefix -- sh "$here/julia.sh" "$build" train.jl
check '... on two' equal "$status $err" '0 '
losses >two
# Sums are rounded in another order, and steps carry it on.
check '... which are one' sh -c \
  'paste one two | awk "{ d = \$1 - \$2; if (d < 0) d = -d; if (d > 0.01 * \$1) exit 1 } END { exit NR != 3 }"'
finish
