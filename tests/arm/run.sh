#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the library, two tools and six programs of unit tests for aarch64 on an x86-64 machine, and runs the tests under
# qemu. Tests of the engine, of networks and of checkpoints are not among them.
#
# usage: sh tests/arm/run.sh [BUILD]      BUILD: default build-arm
#
# Needs, on Debian 12: g++-aarch64-linux-gnu, qemu-user, apt-get with the lists of packages of arm64 (dpkg
# --add-architecture arm64; apt-get update), and what tests/run.sh needs. Libraries for aarch64 are unpacked into BUILD,
# not installed. The last line is "N passed, N failed".
#
# Tests of madvise() are left out, because qemu 7.2 ignores most of its advice: children inherit mappings that they should
# not, and private views keep what was written.
set -eu
cd "$(dirname "$0")/../.."
build=${1:-build-arm}
mkdir -p "$build"
build=$(realpath "$build")
root=$build/root libraries=$build/root/usr/lib/aarch64-linux-gnu
options='-Dcuda=disabled -Ducx=disabled -Dtests=enabled -Dexamples=disabled -Doptimization=1 -Ddebug=false -Dwerror=true'

if [ ! -d "$root" ]; then
  mkdir -p "$build/packages"
  (cd "$build/packages" && apt-get download libfmt-dev:arm64 libfmt9:arm64 libhwy-dev:arm64 libhwy1:arm64 libssl-dev:arm64 \
    libssl3:arm64 libxxhash-dev:arm64 libgtest-dev:arm64 libcli11-dev nlohmann-json3-dev)
  for package in "$build"/packages/*.deb; do dpkg -x "$package" "$root.new"; done
  mv "$root.new" "$root" # an interrupted run leaves no $root
fi
for language in c cpp; do
  echo "${language}_args = ['-isystem', '$root/usr/include', '-isystem', '$root/usr/include/aarch64-linux-gnu']"
  echo "${language}_link_args = ['-L$libraries', '-Wl,-rpath-link,$libraries']"
done >"$build/arguments"
cat >"$build/cross.ini" <<END
[binaries]
c = 'aarch64-linux-gnu-gcc'
cpp = 'aarch64-linux-gnu-g++'
ar = 'aarch64-linux-gnu-gcc-ar'
strip = 'aarch64-linux-gnu-strip'
pkgconfig = 'pkg-config'
[properties]
sys_root = '$root'
pkg_config_libdir = '$libraries/pkgconfig:$root/usr/share/pkgconfig'
[built-in options]
$(cat "$build/arguments")
[host_machine]
system = 'linux'
cpu_family = 'aarch64'
cpu = 'aarch64'
endian = 'little'
END
programs='unit_kernels unit_layout unit_formats unit_host_device unit_worlds unit_host_stream_allocation'
# shellcheck disable=SC2046,SC2086 # several words
{
  [ -f "$build/build.ninja" ] || meson setup "$build" --cross-file "$build/cross.ini" $options >"$build/setup.log" ||
    { tail -n 40 "$build/setup.log"; exit 1; }
  ninja -C "$build" library tools/fsdp-perf tools/fsdp-plan $(printf 'tests/unit/%s ' $programs) >"$build/ninja.log" ||
    { tail -n 40 "$build/ninja.log"; exit 1; }
}

passed=0 failed=0
for program in $programs; do
  log=$build/$program.log
  timeout 600 qemu-aarch64 -L /usr/aarch64-linux-gnu -E "LD_LIBRARY_PATH=$libraries" "$build/tests/unit/$program" \
    --gtest_filter='-*ChildrenDoNotInheritIt:*AreNotInherited:*IsMappedAsTheOtherViewsAre:*GivesBackWhatWasWrittenAlone:*CouldNotBeGivenBack' \
    >"$log" 2>&1 </dev/null || {
    grep '^\[  FAILED  \]' "$log" | sort -u
    grep -q '^\[  FAILED  \]' "$log" || failed=$((failed + 1)) # it ended early
  }
  passed=$((passed + $(grep -c '^\[       OK \]' "$log" || :)))
  failed=$((failed + $(grep -c '^\[  FAILED  \].* ms)$' "$log" || :)))
done
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
