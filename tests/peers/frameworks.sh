#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Trains the same tiny GPT in every installed framework (examples/README.md, tiny_gpt), sharded on two ranks and
# unsharded, and prints one table. It fails if a sharded run differs from its framework alone, or if frameworks differ.
#
# usage: sh tests/peers/frameworks.sh [BUILD]       BUILD: default build-tests
#
# PYTHON names Pythons that have torch, jax or mlx (default python3), LIBTORCH a folder with libtorch (default: that of
# torch's wheel), CXX a compiler, JULIA a Julia. Missing frameworks are skipped with the reason, and nothing is
# installed.
set -u
cd "$(dirname "$0")/../.." || exit 1
build=$(realpath "${1:-build-tests}") here=$PWD
for file in tools/fsdp-run lib/libfsdp.so; do
  [ -e "$build/$file" ] || { echo "frameworks.sh: $build/$file is not built" >&2; exit 1; }
done
export FSDP_LIBRARY="$build/lib/libfsdp.so" PYTHONPATH="$here/bindings/python"
export FSDP_LIB_DIR="$build/lib" LD_LIBRARY_PATH="$build/lib" JAX_PLATFORMS=cpu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

skip() { printf '%-10s skipped: %s\n' "$1" "$2"; }

# train NAME COMMAND...: runs the command on two ranks, and leaves its output in $work/NAME.
train() {
  name=$1
  shift
  "$build/tools/fsdp-run" -n 2 --no-prefix "$@" >"$work/$name" 2>"$work/$name.err" && return
  printf '%-10s failed:\n' "$name"
  cat "$work/$name" "$work/$name.err"
  failed=1
}

# compile NAME COMMAND...: compiles, or says why it cannot.
compile() {
  name=$1
  shift
  "$@" >"$work/compiler" 2>&1 && return
  printf '%-10s does not compile:\n' "$name"
  tail -n 20 "$work/compiler"
  failed=1
  return 1
}

# python_with MODULE: prints the first Python that has the module and numpy.
python_with() {
  for python in ${PYTHON:-python3}; do
    "$python" -c "import numpy, $1" 2>/dev/null && echo "$python" && return
  done
}

train_python() {
  python=$(python_with "$2")
  if [ -n "$python" ]; then
    train "$1" "$python" "bindings/python/examples/gpt_$1.py"
  else
    skip "$1" "no Python in '${PYTHON:-python3}' has numpy and $2"
  fi
}

train_libtorch() {
  libtorch=${LIBTORCH:-}
  if [ -z "$libtorch" ]; then
    python=$(python_with torch)
    [ -n "$python" ] && libtorch=$("$python" -c 'import torch; print(torch.__path__[0])')
  fi
  [ -f "$libtorch/include/torch/csrc/api/include/torch/torch.h" ] ||
    { skip libtorch "no headers of libtorch: neither in LIBTORCH nor in a wheel of torch"; return; }
  compile libtorch "${CXX:-c++}" -std=c++20 -O1 -Iinclude -Ibindings/cpp -isystem "$libtorch/include" \
    -isystem "$libtorch/include/torch/csrc/api/include" bindings/cpp/examples/gpt_libtorch/main.cpp \
    -o "$work/gpt_libtorch" -L"$build/lib" -lfsdp -L"$libtorch/lib" \
    -Wl,-rpath,"$libtorch/lib" -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 &&
    train libtorch "$work/gpt_libtorch"
}

train_rust() {
  cargo --version >/dev/null 2>&1 || { skip rust 'no cargo here'; return; }
  compile rust cargo build --offline --target-dir "$work/cargo" --manifest-path bindings/rust/Cargo.toml -p fsdp \
    --example gpt &&
    train rust "$work/cargo/debug/examples/gpt"
}

train_julia() {
  [ -f bindings/julia/julia.sh ] || { skip julia 'bindings/julia/julia.sh is not there'; return; }
  reason=$(sh bindings/julia/julia.sh "$build" --find) || { skip julia "$reason"; return; }
  train julia sh bindings/julia/julia.sh "$build" bindings/julia/FSDP.jl/examples/gpt/main.jl
}

train_python torch torch
train_python jax jax
train_python jax_layers jax
train_python mlx mlx.core
train_libtorch
train_rust
train_julia

# Each run has a row. A run that failed above has no last line, or has printed the difference.
set --
for name in torch jax jax_layers mlx libtorch rust julia; do
  [ -s "$work/$name" ] && set -- "$@" "$work/$name"
done
[ $# -gt 0 ] || { echo 'frameworks.sh: no framework is here'; exit 77; }
awk '
  function finish() {
    if (framework == "") return
    printf "%-20s %.7f %.7f  %.1e %.1e %.1e  %s\n", framework, loss[1], loss[5], differs[1], later, weights, ranks
    if (ranks == "" || differs[1] > 1e-5 || later > 1e-4 || weights > 1e-4) failed = 1
    count++
    for (step = 1; step <= 5; ++step) {
      if (count == 1 || loss[step] < least[step]) least[step] = loss[step]
      if (count == 1 || loss[step] > most[step]) most[step] = loss[step]
    }
  }
  function larger(a, b) { return a > b ? a : b }
  BEGIN {
    print "                                          from the framework alone"
    print "framework            loss 1    loss 5     loss 1  all     weights  bytes a rank: state (of one copy), in all"
  }
  FNR == 1 { finish(); framework = $1 " " $2; sub(/,$/, "", framework); ranks = ""; later = 0 }
  /^step/ {
    step = $2 + 0; loss[step] = $4 + 0
    differs[step] = loss[step] > $6 ? loss[step] - $6 : $6 - loss[step]
    later = larger(later, differs[step])
  }
  /^weights differ/ { weights = $NF + 0 }
  /^rank/ { ranks = ranks sprintf("%s %d (%.0f %%), %d  ", $2, $4, 100 * $4 / $7, $8) }
  END {
    finish()
    for (step = 1; step <= 5; ++step) all = larger(all, most[step] - least[step])
    printf "%d frameworks: first losses differ by at most %.1e, all losses by %.1e\n", count, most[1] - least[1], all
    exit failed || most[1] - least[1] > 1e-5 || all > 1e-4
  }' "$@" || failed=1
[ $failed -eq 0 ] || echo 'frameworks.sh: a framework differs or has failed'
exit $failed
