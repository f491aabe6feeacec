#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs one of the checks of libfsdp.jax if a Python has JAX. It installs nothing.
#
# usage: jax.sh SOURCE_ROOT LIBRARY SCRIPT [options of the script...]     PYTHON names Pythons to look for it in
set -u
FSDP_LIBRARY=$(realpath "$2") PYTHONPATH=$1/bindings/python JAX_PLATFORMS=cpu
cd "$1" || exit 1
export FSDP_LIBRARY PYTHONPATH JAX_PLATFORMS
script=$3
shift 3
for python in ${PYTHON:-python3 /usr/bin/python3}; do
  "$python" -c 'import numpy, jax' 2>/dev/null && exec "$python" "tests/peers/$script" "$@"
done
echo '1..0 # SKIP no Python with jax and numpy'
