#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The Debian source package of what is committed, and its binary packages where they can be built:
#   libfsdp1      the shared library
#   libfsdp-dev   headers of C and C++, libfsdp.a, what pkg-config and CMake ask for
#   fsdp-tools    fsdp-run, fsdp-info, fsdp-plan, fsdp-ckpt, fsdp-perf and their man pages
#
# usage: sh tools/packaging/debian.sh [-S] [FOLDER]
#   -S       the source package alone
#   FOLDER   where everything is written (default: build-debian)
# DEBFULLNAME and DEBEMAIL name its maintainer. A second run in the same folder goes on with the build.
set -eu
cd "$(dirname "$0")/../.."
root=$PWD
what=all
[ "${1:-}" != -S ] || { what=-S; shift; }
folder=${1:-build-debian}
version=$(sed -n "s/^  version: '\(.*\)',$/\1/p" meson.build)
soversion=$(sed -n "s/^soversion = '\(.*\)'$/\1/p" meson.build)
maintainer="${DEBFULLNAME:-libfsdp maintainers} <${DEBEMAIL:-libfsdp@localhost}>"
. tools/dev/packages.sh
need_packages git dpkg-dev debhelper meson ninja-build pkg-config libfmt-dev libhwy-dev libxxhash-dev libssl-dev libucx-dev \
  libcli11-dev nlohmann-json3-dev python3

mkdir -p "$folder"
cd "$folder"
tree=libfsdp-$version
if [ ! -d "$tree" ]; then
  git -C "$root" archive --prefix="$tree/" HEAD | gzip -n >"libfsdp_$version.orig.tar.gz"
  tar xf "libfsdp_$version.orig.tar.gz"
fi
mkdir -p "$tree/debian/source"
cd "$tree/debian"
echo '3.0 (quilt)' >source/format

cat >control <<END
Source: libfsdp
Section: libs
Priority: optional
Maintainer: $maintainer
Build-Depends: debhelper-compat (= 13), libcli11-dev, libfmt-dev, libhwy-dev, libssl-dev (>= 3.0), libucx-dev,
 libxxhash-dev, meson (>= 1.0), ninja-build, nlohmann-json3-dev, pkg-config, python3
Standards-Version: 4.6.2
Rules-Requires-Root: no

Package: libfsdp$soversion
Architecture: linux-any
Multi-Arch: same
Pre-Depends: \${misc:Pre-Depends}
Depends: \${misc:Depends}, \${shlibs:Depends}
Recommends: libucx0
Description: fully sharded data parallel training as a library
 libfsdp keeps a model's parameters, gradients and optimizer state sharded over
 ranks, for programs that train in C or in any language that calls C.
 .
 libucx0 is opened where a job has several hosts.

Package: libfsdp-dev
Section: libdevel
Architecture: linux-any
Multi-Arch: same
Depends: libfsdp$soversion (= \${binary:Version}), libhwy-dev, libssl-dev, \${misc:Depends}
Suggests: fsdp-tools
Description: fully sharded data parallel training as a library: headers
 libfsdp keeps a model's parameters, gradients and optimizer state sharded over
 ranks, for programs that train in C or in any language that calls C.
 .
 This package has the headers of C and C++, what pkg-config and CMake ask for,
 and a static library. It needs libhwy-dev and libssl-dev: of what fsdp.pc names
 for the static library, pkg-config wants to see all for the shared one, too.

Package: fsdp-tools
Section: science
Architecture: linux-any
Depends: \${misc:Depends}, \${shlibs:Depends}
Description: starts, plans, measures and looks into sharded training jobs
 fsdp-run starts the ranks of a job, fsdp-plan computes what they will hold in
 memory, fsdp-perf measures how fast bytes move, fsdp-info compares traces and
 flight records of ranks, fsdp-ckpt verifies and converts checkpoints.
END

cat >changelog <<END
libfsdp ($version-1) unstable; urgency=medium

  * Packaged from the tree; CHANGELOG.md says what is in it.

 -- $maintainer  $(git -C "$root" log -1 --format=%cD)
END

cat >copyright <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: libfsdp

Files: *
Copyright: The libfsdp authors
License: Apache-2.0

License: Apache-2.0
 On Debian systems the text of the license is in /usr/share/common-licenses/Apache-2.0.
END

printf '%s\n' "usr/lib/*/libfsdp.so.*" >"libfsdp$soversion.install"
printf '%s\n' usr/include 'usr/lib/*/libfsdp.so' 'usr/lib/*/libfsdp.a' 'usr/lib/*/pkgconfig' 'usr/lib/*/cmake' >libfsdp-dev.install
printf '%s\n' usr/bin 'usr/lib/*/fsdp' usr/share/man >fsdp-tools.install
printf '%s\n' README.md docs/bindings.md docs/contracts docs/guides >libfsdp-dev.docs

# Tests are run from the tree (sh tests/run.sh); CUDA is not in Debian's main. In large units, since most of the compiler's time goes
# into headers.
cat >rules <<'END'
#!/usr/bin/make -f
export DEB_BUILD_MAINT_OPTIONS = hardening=+all optimize=-lto
%:
	dh $@ --buildsystem=meson
override_dh_auto_configure:
	dh_auto_configure -- -Dtests=disabled -Dexamples=disabled -Dcuda=disabled
override_dh_makeshlibs:
	dh_makeshlibs -V
END
chmod +x rules
cd ..
# The source package before anything is compiled in the tree. -nc: what an earlier run has compiled stays.
[ -f "../libfsdp_$version-1.dsc" ] || dpkg-buildpackage -S -us -uc -d -nc
[ "$what" = -S ] || dpkg-buildpackage -b -us -uc -nc -j"${JOBS:-$(nproc)}"
ls -l ../*.dsc ../*.deb 2>/dev/null || ls -l ../*.dsc
