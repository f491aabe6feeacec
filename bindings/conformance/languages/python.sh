# SPDX-License-Identifier: Apache-2.0
# The interpreter in Python, which needs nothing but Python 3.9. usage: see ../README.md; PYTHON names another one
set -u
python=${PYTHON:-python3}
if [ "$1" = prepare ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 9))' && exit 0
  echo "no Python 3.9 or later"
  exit 77
fi
export FSDP_LIBRARY="$FSDP_BUILD/lib/libfsdp.so" PYTHONPATH="$PWD/bindings/python"
exec "$python" bindings/python/conformance.py "$@"
