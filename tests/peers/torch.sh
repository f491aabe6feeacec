#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs one of the checks of libfsdp.torch if a Python has torch. It installs nothing, because torch takes minutes to
# install.
#
# usage: torch.sh SOURCE_ROOT LIBRARY SCRIPT [options of the script...]     PYTHON names Pythons to look for it in
set -u
FSDP_LIBRARY=$(realpath "$2") PYTHONPATH=$1/bindings/python
cd "$1" || exit 1
export FSDP_LIBRARY PYTHONPATH
script=$3
shift 3
for python in ${PYTHON:-python3 /usr/bin/python3}; do
  "$python" -c 'import numpy, torch, torch.autograd.graph as g; g.increment_version' 2>/dev/null &&
    exec "$python" "tests/peers/$script" "$@"
done
echo '1..0 # SKIP no Python with torch 2.6 or later and numpy'
