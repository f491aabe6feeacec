#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Exchanges checkpoints between libfsdp, safetensors and PyTorch; see tests/peers/peers.py.
#
# usage: sh tests/peers/peers.sh [BUILD] [--quick]      BUILD: default build-tests
#
# --quick tests safetensors alone, as CI does. Otherwise PyTorch (CPU is enough) is installed, too, which takes a
# minute, and 5 GB while it runs. PYTHON names a Python that has them already. Without one they are installed in a
# temporary folder. pip's own variables choose the source (PIP_INDEX_URL=https://download.pytorch.org/whl/cpu is
# smaller). If that fails, the script says so and skips.
set -u
cd "$(dirname "$0")/../.." || exit 1
build=build-tests quick=
for argument; do
  case $argument in
    --quick) quick=1 ;;
    -*) echo "peers.sh: unknown argument '$argument' (known: --quick)" >&2; exit 2 ;;
    *) build=$argument ;;
  esac
done
for program in tools/fsdp-run tools/fsdp-ckpt tests/tools/checkpoint_rank; do
  [ -x "$build/$program" ] || { echo "peers.sh: $build/$program is not built" >&2; exit 1; }
done
modules='numpy safetensors' also=
[ -n "$quick" ] || { modules="$modules torch"; also=--torch; }

has_modules() { "$1" -c "import $(echo "$modules" | tr ' ' ',')" 2>/dev/null; }

skip() {
  echo "1..0 # SKIP $1"
  exit 0
}

python=${PYTHON:-python3}
# install PIP...: installs with a Python's pip.
install() {
  # shellcheck disable=SC2086  # a list of words
  "$@" install --quiet --retries 1 --timeout 15 $modules >"$place/log" 2>&1 ||
    skip "pip cannot install $modules: $(tail -n 1 "$place/log")"
}

if ! has_modules "$python"; then
  place=$(mktemp -d)
  trap 'rm -rf "$place"' EXIT
  # A separate venv would take longer.
  if "$python" -m pip --version >"$place/log" 2>&1; then
    export PIP_TARGET="$place/modules" PYTHONPATH="$place/modules"
    install "$python" -m pip
  else
    "$python" -m venv "$place/venv" >"$place/log" 2>&1 || skip "no venv can be made: $(tail -n 1 "$place/log")"
    python=$place/venv/bin/python
    install "$python" -m pip
  fi
fi
"$python" tests/peers/peers.py "$(realpath "$build")" $also
