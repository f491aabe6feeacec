#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Is another build of libfsdp as fast, and does it train to the same bits?

usage: tools/dev/compare_builds.py speed BEFORE AFTER [--turns N] [--worst PERCENT] [fsdp-perf's options]
       tools/dev/compare_builds.py bits BEFORE AFTER

BEFORE and AFTER are build folders (release, with examples). speed runs their fsdp-perf in turns: what counts of each
figure is the median over the turns of its ratio to the reference of its own run, since machines drift. bits trains
examples/train_gpt ten ways with both, and compares the losses of all steps and the hash of the last weights.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = ["--layers", "2", "--width", "64", "--heads", "2", "--context", "32", "--batch", "16", "--steps", "12", "--quiet"]
WAYS = {
    "no shard": ["--strategy", "no_shard"],
    "optim": ["--strategy", "optim"],
    "optim, grads": ["--strategy", "optim_grads"],
    "all, mapped": ["--strategy", "optim_grads_params", "--unshard", "mapped"],
    "all, copied": ["--strategy", "optim_grads_params", "--unshard", "copied"],
    "bf16, reduced in bf16": ["--compute-dtype", "bf16", "--reduce-dtype", "bf16"],
    "four micro-batches, last": ["--microbatches", "4", "--reduce-last"],
    "recomputed, tied": ["--recompute", "--tied"],
    "2 replicas": ["--replicas", "2"],
    "2 hosts": ["--ranks-per-host", "2"],
}


def measure(build, options):
    """{operation, size and so on: ratio to the reference, or where it has none how many are done in a second}"""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        subprocess.run([build / "tools/fsdp-perf", *options, "--json", file.name], check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in open(file.name)]
    return {(row["op"], row["variant"] + ("" if row["dtype"] in ("", "fp32") else " " + row["dtype"]), row["bytes"]):
            row["ratio"] or 1e6 / row["time_us"] for row in rows if row["time_us"]}


def speed(arguments, options):
    found = {"before": [], "after": []}
    for turn in range(arguments.turns):
        for name, build in (("before", arguments.before), ("after", arguments.after))[:: 1 if turn % 2 else -1]:
            found[name].append(measure(build, options))
            print(f"turn {turn + 1} of {arguments.turns}: {name}", file=sys.stderr, flush=True)
    worse = 0
    print(f"{'operation':<44}{'bytes':>12}{'before':>14}{'after':>14}{'change':>9}")
    for key in found["before"][0]:
        values = [statistics.median(run[key] for run in found[name] if key in run) if any(key in run for run in found[name]) else None
                  for name in found]
        if None in values:
            continue
        change = 100 * (values[1] / values[0] - 1)
        worse += change < -arguments.worst
        print(f"{key[0] + ' ' + key[1]:<44}{key[2]:>12}{values[0]:>14.3f}{values[1]:>14.3f}{change:>+8.1f}%")
    print(f"{worse} of {len(found['before'][0])} are worse by more than {arguments.worst} %")
    return worse


def train(build, way):
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        command = [build / "tools/fsdp-run", "-n", "4", build / "examples/train_gpt", *MODEL, *way, "--json", file.name,
                   "--corpus", Path(__file__).resolve().parents[2] / "LICENSE"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in open(file.name)]
    losses = [row["loss"] for row in rows if "loss" in row and "step" in row]
    hashes = [value for row in rows for key, value in row.items() if "hash" in key]
    assert len(losses) == 12 and hashes, rows[-1]
    return losses, hashes


def bits(arguments, _):
    differ = 0
    for name, way in WAYS.items():
        before, after = train(arguments.before, way), train(arguments.after, way)
        differ += before != after
        print(f"{name:<28}{after[1][0]:>20}  {'equal' if before == after else f'differ: {before} {after}'}", flush=True)
    print(f"{differ} of {len(WAYS)} differ")
    return differ


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "bits"])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--worst", type=float, default=3.0)
    arguments, options = parser.parse_known_args()
    sys.exit(1 if {"speed": speed, "bits": bits}[arguments.what](arguments, options) else 0)


main()
