#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# usage: train_gpt_cuda_test.sh FSDP_RUN TRAIN_GPT TRAIN_GPT_CUDA COMPARE
# Compares train_gpt_cuda on simulated GPUs with train_gpt on the host, with small models and few steps. It checks
# results and order; a real GPU runs the same checks in tests/run_gpu.sh.
set -u
run=$(realpath "$1")
host=$(realpath "$2")
cuda=$(realpath "$3")
compare="python3 $(realpath "$4")"
here=$(cd "$(dirname "$0")" && pwd)
# shellcheck source-path=SCRIPTDIR source=../tools/tap.sh
. "$here/../tools/tap.sh"
enter_scratch
# The test has its own text, because the numbers learnt in three steps depend on every byte of it.
mkdir corpus && seq 1 2000 >corpus/numbers.md
export OPENBLAS_NUM_THREADS=1
small="--layers 2 --width 32 --heads 2 --context 16 --batch 4 --steps 3 --lr 3e-2 --quiet --corpus corpus"

# train OUT COMMAND...: trains. If the run fails, however late, it leaves no numbers.
train() {
  out=$1
  shift
  # shellcheck disable=SC2086
  "$@" $small --json "$out.json" >log 2>&1 || { sed 's/^/# /' log; rm -f "$out.json"; }
}
# within TOLERANCE A B: compares two runs.
within() { $compare --tolerance "$1" "$2.json" "$3.json" >compared 2>&1 || { sed 's/^/# /' compared; return 1; }; }
close() { within 2e-4 host "$1"; }
same() { within 0 "$1" "$2"; }

train host "$host"
train gpu "$cuda"
check 'one rank has the losses of the host' close gpu
train graph "$cuda" --graph
check 'and the same bits as a graph' same gpu graph
train micro "$cuda" --microbatches 2
check 'two micro-batches see the same global batch' close micro
train micro_graph "$cuda" --microbatches 2 --graph
check 'and the same bits as a graph' same micro micro_graph
train staged "$run" -n 2 --no-prefix "$cuda" --transport staging
check 'two ranks that share a GPU have the losses of the host' close staged
train queue env CUDA_DEVICE_MAX_CONNECTIONS=1 "$run" -n 2 --no-prefix "$cuda" --transport staging
check 'and the same bits where all streams share a queue' same staged queue
train threads "$cuda" --threads 2 --transport staging --debug-delay-us 500
check 'and the same bits as threads, with delays' same staged threads
train narrow "$cuda" --threads 2 --transport staging --compute-dtype bf16 --recompute
check 'bf16 weights train' within 0.5 host narrow
train codes "$host" --threads 2 --quantize mxfp8
train cuda_codes "$cuda" --threads 2 --transport staging --quantize mxfp8
check 'MXFP8 weights train' within 0.01 codes cuda_codes
"$cuda" --graph --threads 2 --transport staging $small >log 2>&1
check 'a graph of staged exchanges is refused with the reason' contains "$(cat log)" 'cannot be part of'
"$host" --graph $small >log 2>&1
check 'a graph on the host is refused' contains "$(cat log)" 'need train_gpt_cuda'
finish
