#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Measures tokens/s of train_gpt, and the cost of a training step beyond its compute, beside PyTorch FSDP2, DeepSpeed
# ZeRO-3 and PyTorch alone: tests/benchmark/fsdp2/compare.py.
#
# usage: sh tests/benchmark/fsdp2.sh [BUILD] [options of compare.py...]      BUILD: default build
#
# PYTHON names a Python that has PyTorch 2.6 or newer (default: python3), and DeepSpeed to compare with it. Without
# PyTorch it says so and exits with 77.
set -eu
cd "$(dirname "$0")/../.."
build=build
case ${1:-} in '' | --*) ;; *) build=$1; shift ;; esac
for program in tools/fsdp-run examples/train_gpt; do
  [ -x "$build/$program" ] || { echo "fsdp2.sh: $build/$program is not built" >&2; exit 1; }
done
exec "${PYTHON:-python3}" tests/benchmark/fsdp2/compare.py --build "$(realpath "$build")" "$@"
