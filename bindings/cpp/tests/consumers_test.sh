#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: consumers_test.sh SOURCE_ROOT BUILD_ROOT
# The README's program in a project of each kind that says it wants libfsdp, and run.
set -u
root=$(realpath "$1") build=$(realpath "$2")
# shellcheck source-path=SCRIPTDIR source=../../../tests/tools/tap.sh
. "$root/tests/tools/tap.sh"
enter_scratch

capture meson install -C "$build" --no-rebuild --destdir "$work/stage"
check 'the build is installed' equal $status 0
prefix=$(find "$work/stage" -name fsdp.hpp -path '*/include/fsdp.hpp' | sed 's,/include/fsdp.hpp$,,')
libraries=$(find "$prefix" -name libfsdp.so -exec dirname {} \;)
check '... with fsdp.hpp beside fsdp.h' [ -f "$prefix/include/fsdp.h" ]

# runs LIBRARIES PROGRAM: ... and trains on two ranks
runs() {
  LD_LIBRARY_PATH=$1 capture "$build/tools/fsdp-run" -n 2 --no-prefix "$2"
  check '... and trains' equal "$status $err $(grep -c '^w\[0\] = ' out)" '0  2'
}
# consumer NAME: an empty project with the program
consumer() {
  mkdir -p "$work/$1" && cp "$root/bindings/cpp/examples/train.cpp" "$work/$1" && cd "$work/$1" || exit 1
}

consumer pkgconfig
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name fsdp.pc)") PKG_CONFIG_SYSROOT_DIR=$work/stage
export PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR
# shellcheck disable=SC2046
capture c++ -std=c++17 -Wall -Wextra -Werror train.cpp $(pkg-config --cflags --libs fsdp) -o train
check 'pkg-config: it compiles' equal "$status $err" '0 '
runs "$libraries" ./train

# A C program links libfsdp.a in place of libfsdp.so: it needs no C++ compiler, and no libfsdp at run time.
mkdir "$work/static" && cd "$work/static" || exit 1
sed -n '/^```c$/,/^```$/{/^```/d;p}' "$root/README.md" | sed -n '/^#include <fsdp.h>$/,$p' >train.c
# shellcheck disable=SC2046
capture cc -std=c11 -Wall -Wextra -Werror train.c $(pkg-config --static --cflags --libs fsdp | sed 's/-lfsdp /-l:libfsdp.a /') -o train
check 'pkg-config --static: a program in C links' equal "$status $err" '0 '
capture ldd train
check '... without libfsdp.so' lacks "$out" libfsdp
LD_LIBRARY_PATH='' capture "$build/tools/fsdp-run" -n 2 --no-prefix ./train
check '... and trains' equal "$status $err $(grep -c '^w\[0\] = 1\.0' out)" '0  2'

consumer meson_installed
printf 'project("consumer", "cpp", default_options: "cpp_std=c++17")\nexecutable("train", "train.cpp", dependencies: dependency("fsdp"))\n' |
  tr '"' "'" >meson.build
capture sh -c 'meson setup build && ninja -C build'
check 'Meson, installed: it builds' equal $status 0
runs "$libraries" build/train
unset PKG_CONFIG_PATH PKG_CONFIG_SYSROOT_DIR

# A build would compile all of libfsdp. The test asks only whether the library and its headers are found.
consumer meson_subproject
mkdir subprojects && ln -s "$root" subprojects/fsdp
printf 'project("consumer", "cpp", default_options: "cpp_std=c++17")\nexecutable("train", "train.cpp", dependencies: dependency("fsdp", fallback: "fsdp"))\n' |
  tr '"' "'" >meson.build
capture sh -c 'meson setup build --force-fallback-for=fsdp -Dfsdp:tests=disabled -Dfsdp:examples=disabled -Dfsdp:cuda=disabled &&
  ninja -C build train.p/train.cpp.o'
check 'Meson, as a subproject: it is found and the program compiles' equal $status 0
[ $status -eq 0 ] || explain "$out" "$err"

if ! cmake --version >/dev/null 2>&1; then
  skip 'find_package and FetchContent' 'no cmake here'
  finish
fi

# cmake_project LINE...: what says where fsdp::fsdp comes from
cmake_project() {
  { printf 'cmake_minimum_required(VERSION 3.16)\nproject(consumer CXX)\nset(CMAKE_CXX_STANDARD 17)\n'
    printf '%s\n' "$@"
    printf 'add_executable(train train.cpp)\ntarget_link_libraries(train fsdp::fsdp)\n'; } >CMakeLists.txt
}

consumer find_package
cmake_project 'find_package(fsdp 0.2 REQUIRED)'
capture sh -c "cmake -B build -DCMAKE_PREFIX_PATH='$prefix' && cmake --build build"
check 'find_package: it builds' equal $status 0
[ $status -eq 0 ] || explain "$out" "$err"
runs '' build/train
for version in 0.1 0.3 1.0; do
  cmake_project "find_package(fsdp $version REQUIRED)"
  capture cmake -B "other-$version" -DCMAKE_PREFIX_PATH="$prefix"
  check "... which says that it is not $version" contains "$err" 'version: 0.2.0'
done
rm "$libraries"/libfsdp.so.1
cmake_project 'find_package(fsdp REQUIRED)'
capture cmake -B lacking -DCMAKE_PREFIX_PATH="$prefix"
check '... or that the library is gone' contains "$err" 'libfsdp.so.1 is not there'

# The existing build stands for the one that FetchContent would make.
consumer fetch_content
cmake_project 'include(FetchContent)' "FetchContent_Declare(fsdp SOURCE_DIR $root)" 'FetchContent_MakeAvailable(fsdp)'
capture sh -c "cmake -B build -DFSDP_MESON_BUILD='$build' && cmake --build build"
check 'FetchContent: it builds' equal $status 0
[ $status -eq 0 ] || explain "$out" "$err"
runs '' build/train
finish
