#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: installed_test.sh SOURCE_ROOT BUILD_ROOT
# The program in the README, compiled and run as the README says, from a prefix into which the build was installed.
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
finish
