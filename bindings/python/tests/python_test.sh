#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The package's tests. usage: python_test.sh SOURCE_ROOT BUILD_ROOT     PYTHON names another one than the first that has
# numpy
set -u
cd "$1" || exit 1
export FSDP_LIBRARY="$2/lib/libfsdp.so" FSDP_RUN="$2/tools/fsdp-run" PYTHONPATH="$1/bindings/python"
found=
for python in ${PYTHON:-python3 /usr/bin/python3}; do
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null || continue
  [ -n "$found" ] || found=$python
  "$python" -c 'import numpy' 2>/dev/null && found=$python && break
done
[ -n "$found" ] || { echo '1..0 # SKIP no Python 3.9 or later'; exit 0; }
exec "$found" bindings/python/tests/run.py
