#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The wheel of bindings/python for systems with glibc 2.28 and newer, built in the container that manylinux_2_28 names.
#
# usage: sh tools/packaging/manylinux.sh [FOLDER]     where the wheel is put (default: dist)
# CONTAINER is docker or podman (default: whichever runs here), IMAGE the container's name. It needs the network: headers of
# dependencies are older there, or missing, and are taken from their releases. Without a container that runs: status 77.
set -eu
cd "$(dirname "$0")/../.."
image=${IMAGE:-quay.io/pypa/manylinux_2_28_x86_64}
folder=${1:-dist}
for container in ${CONTAINER:-docker podman} ''; do
  [ -z "$container" ] || ! "$container" info >/dev/null 2>&1 || break
done
[ -n "$container" ] || { echo 'manylinux.sh: skipped: neither docker nor podman runs containers here'; exit 77; }
mkdir -p "$folder"

exec "$container" run --rm -i -v "$PWD:/source:ro" -v "$(realpath "$folder"):/dist" "$image" sh -eu <<'INSIDE'
export PATH=/opt/python/cp311-cp311/bin:$PATH
pip install --quiet 'meson>=1.0' ninja cmake
dnf install -y -q perl-IPC-Cmd perl-Data-Dumper ucx-devel || dnf install -y -q perl-IPC-Cmd perl-Data-Dumper

# get NAME REPOSITORY TAG: its sources in /build/NAME
get() { git clone -q --depth 1 --branch "$3" "https://github.com/$2" "/build/$1"; }
get fmt fmtlib/fmt 10.2.1
get highway google/highway 1.2.0
get json nlohmann/json v3.11.3
get xxhash Cyan4973/xxHash v0.8.2
get openssl openssl/openssl openssl-3.0.15
build_cmake() {
  cmake -S "/build/$1" -B "/build/$1/build" -DCMAKE_INSTALL_PREFIX=/usr/local -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DBUILD_SHARED_LIBS=OFF -DBUILD_TESTING=OFF "$2" >/dev/null
  cmake --build "/build/$1/build" -j "$(nproc)" --target install >/dev/null
}
build_cmake fmt -DFMT_TEST=OFF
build_cmake highway -DHWY_ENABLE_TESTS=OFF
build_cmake json -DJSON_BuildTests=OFF
make -s -C /build/xxhash install PREFIX=/usr/local
(cd /build/openssl && ./Configure -fPIC no-shared no-tests --prefix=/usr/local --libdir=lib linux-x86_64 >/dev/null &&
  make -s -j "$(nproc)" build_generated libcrypto.a libcrypto.pc && cp libcrypto.a /usr/local/lib && mkdir -p /usr/local/lib/pkgconfig &&
  cp libcrypto.pc /usr/local/lib/pkgconfig && cp -r include/openssl /usr/local/include)

export PKG_CONFIG_PATH=/usr/local/lib/pkgconfig:/usr/local/share/pkgconfig
cp -r /source /build/libfsdp
rm -rf /build/libfsdp/build*
export CFLAGS='-include /build/libfsdp/tools/packaging/glibc_2_28.h' CXXFLAGS='-include /build/libfsdp/tools/packaging/glibc_2_28.h'
pip wheel --quiet --no-deps --no-index --wheel-dir /build/wheel /build/libfsdp/bindings/python
ls /build/wheel | grep 'manylinux_2_\([0-9]\|1[0-9]\|2[0-8]\)_' || { echo "not for glibc 2.28: $(ls /build/wheel)"; exit 1; }
cp /build/wheel/*.whl /dist

# In an empty environment two ranks meet.
python -m venv /build/venv
/build/venv/bin/pip install --quiet --no-index /build/wheel/*.whl
/build/venv/bin/python -c 'import libfsdp; print(libfsdp.__version__, libfsdp.run_local(2, lambda context: context.world_size))'
INSIDE
