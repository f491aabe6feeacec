#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Downloads the Debian packages that tests/run_gpu.sh may lack into a folder, to be carried to a machine without network.
# usage: fetch_packages.sh FOLDER   on a Debian or Ubuntu of the same release or older
set -eu
folder=$1
mkdir -p "$folder"
cd "$folder"
# The package whose name contains its version.
libfmt=$(apt-cache depends libfmt-dev | sed -n 's/.*Depends: \(libfmt[0-9]*\)$/\1/p')
apt-get download libfmt-dev "$libfmt" libhwy-dev libhwy1 libxxhash-dev libxxhash0 libssl-dev libgtest-dev \
  libucx-dev libucx0 pkgconf pkgconf-bin libpkgconf3 nlohmann-json3-dev libcli11-dev libopenblas-pthread-dev libopenblas0-pthread libopenblas-dev libgfortran5
du -sh .
