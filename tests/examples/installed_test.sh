#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: installed_test.sh SOURCE_ROOT BUILD_ROOT
# Installs the build into a prefix, and compiles and runs the README's program as the README says. Then it follows the
# tutorial.
set -u
root=$(realpath "$1") build=$(realpath "$2")
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$(dirname "$0")/../tools/tap.sh"
enter_scratch

capture meson install -C "$build" --no-rebuild --destdir "$work/stage"
check 'the build is installed' equal $status 0
prefix=$(find "$work/stage" -name fsdp.h -path '*/include/*' | sed 's,/include/fsdp.h$,,')
package=$(find "$work/stage" -name fsdp.pc)
check '... with the header' [ -n "$prefix" ]
check '... and a file for pkg-config' [ -n "$package" ]

sed -n '/^#include <fsdp.h>$/,/^```$/{/^```/d;p}' "$root/README.md" >train.c
check 'the README has a program' contains "$(cat train.c)" 'int main(void)'
PKG_CONFIG_PATH=$(dirname "$package")
PKG_CONFIG_SYSROOT_DIR=$work/stage
LD_LIBRARY_PATH=$(find "$prefix" -name libfsdp.so -exec dirname {} \;)
export PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR LD_LIBRARY_PATH
# shellcheck disable=SC2046
capture cc -std=c11 -Wall -Wextra -Werror train.c $(pkg-config --cflags --libs fsdp) -o train
check '... that compiles with the installed header and library' equal "$status $err" '0 '
capture "$prefix/bin/fsdp-run" -n 2 ./train
check '... and runs on two ranks' equal "$status $err" '0 '
check '... each of which learns the weight' equal "$(sed 's/^.*w\[0\] = \(0\.9\|1\.0\)[0-9]$/close to 1/' out)" \
  "$(printf 'close to 1\nclose to 1')"

# Prints lines of the tutorial's expected output, without the rank and without parts that differ from run to run.
tutorial=$root/docs/tutorial.md
capture "$prefix/bin/fsdp-run" -n 2 --log info ./train
for line in "$(grep -o 'rank 0 of 2: 2 ranks as processes of one host' "$tutorial")" "$(grep -o 'sealed a model of .*' "$tutorial")"; do
  check "the log says what the tutorial shows: $line" contains "$err" "${line:-a line of the tutorial}"
done

mistake=$(sed -n 's/.*put `\(if (getenv("RANK").*;\)` before.*/\1/p' "$tutorial")
check 'the tutorial has a mistake' contains "$mistake" dimension_count
sed "s/^\( *\)\(check(fsdp_create_group.*\)/\1$mistake\n\1\2/" train.c >mistake.c
# shellcheck disable=SC2046
capture cc -std=c11 -Wall -Wextra -Werror mistake.c $(pkg-config --cflags --libs fsdp) -o mistake
check '... that compiles' equal "$status $err" '0 '
capture "$prefix/bin/fsdp-run" -n 2 ./mistake
check '... and fails' [ "$status" -ne 0 ]
text=$(tr -s ' \n' ' ' <"$tutorial")
for words in "FSDP_MISMATCH: fsdp_seal_model: model 0: ranks declared it differently; the first difference is: rank 0 has" \
  "parameter 'weight' of group 'layer': shape [4, 8]" "rank 1 has parameter 'weight' of group 'layer': shape [4],"; do
  check "the tutorial shows: $words" contains "$text" "$words"
  check '... and both ranks say it' equal "$(grep -cF "$words" err)" 2
done
finish
