#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Is another build of libfsdp as fast, and does it train to the same bits?

usage: tools/dev/compare_builds.py speed BEFORE AFTER [--turns N] [--worst PERCENT] [fsdp-perf's options]
       tools/dev/compare_builds.py bits BEFORE AFTER

BEFORE and AFTER are build folders (release, with examples). speed runs fsdp-perf of both builds in turns. Each figure
is divided by the reference of its own run, because machines drift, and the median of these ratios over the turns
counts. Operations with rows that seem slower are measured again, with BEFORE twice in each turn. A row is slower only
if it is below both. bits trains examples/train_gpt in many ways with both, and compares the losses of all steps and the
hash of the last weights.
"""
import argparse
import json
import os
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
    "2 hosts, tcp": ["FSDP_NET=tcp", "--ranks-per-host", "2", "--strategy", "optim_grads_params"],
    "2 hosts, ucx": ["FSDP_NET=ucx", "FSDP_UCX_TCP=trusted", "--ranks-per-host", "2"],
    "HFSDP over 2 hosts": ["--replicas", "2", "--outer", "hfsdp", "--ranks-per-host", "2"],
    "mxfp8": ["--compute-dtype", "bf16", "--quantize", "mxfp8"],
}


def measure(build, options):
    """{operation, size and so on: ratio to the reference, or, without a reference, how many are done in a second}"""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        subprocess.run([build / "tools/fsdp-perf", *options, "--json", file.name], check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in open(file.name)]
    return {(row["op"], row["variant"] + ("" if row["dtype"] in ("", "fp32") else " " + row["dtype"]), row["bytes"]):
            row["ratio"] or 1e6 / row["time_us"] for row in rows if row["time_us"]}


def measure_in_turns(builds, turns, options):
    """{row: [for each build, its ratios in all turns]}; rows that a build lacks are left out."""
    found = [[] for _ in builds]
    for turn in range(turns):
        for i in sorted(range(len(builds)), reverse=turn % 2 == 1):
            found[i].append(measure(builds[i], options))
            print(f"turn {turn + 1} of {turns}: {builds[i]}", file=sys.stderr, flush=True)
    return {row: medians for row in found[0][0]
            if None not in (medians := [median([run[row] for run in runs if row in run]) for runs in found])}


def median(values):
    return statistics.median(values) if values else None


def speed(arguments, options):
    least = 1 - arguments.worst / 100
    rows = measure_in_turns([arguments.before, arguments.after], arguments.turns, options)
    print(f"{'operation':<44}{'bytes':>12}{'before':>14}{'after':>14}{'change':>9}")
    for row, (before, after) in rows.items():
        print(f"{row[0] + ' ' + row[1]:<44}{row[2]:>12}{before:>14.3f}{after:>14.3f}{100 * (after / before - 1):>+8.1f}%")
    seem_worse = [row for row, (before, after) in rows.items() if after < least * before]
    print(f"{len(seem_worse)} of {len(rows)} seem worse by more than {arguments.worst} %", flush=True)
    return confirm(seem_worse, arguments, least) if seem_worse else 0


def confirm(seem_worse, arguments, least):
    """Of a hundred rows some are slower by chance, so these are measured again, beside a comparison of BEFORE with
    itself."""
    operations = [word for op in sorted({row[0] for row in seem_worse}) for word in ("--op", op)]
    again = measure_in_turns([arguments.before, arguments.before, arguments.after], 2 * arguments.turns + 1, operations)
    print(f"{'again':<44}{'bytes':>12}{'before':>14}{'before, too':>14}{'after':>14}{'change':>9}")
    worse = 0
    for row in seem_worse:
        before, too, after = again[row]
        is_worse = after < least * min(before, too)
        worse += is_worse
        print(f"{row[0] + ' ' + row[1]:<44}{row[2]:>12}{before:>14.3f}{too:>14.3f}{after:>14.3f}"
              f"{200 * after / (before + too) - 100:>+8.1f}%{'  worse' if is_worse else ''}")
    print(f"{worse} of {len(again)} are worse by more than {arguments.worst} %")
    return worse


def train(build, way):
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        settings = dict(word.split("=") for word in way if word.startswith("FSDP_"))
        options = [word for word in way if not word.startswith("FSDP_")]
        command = [build / "tools/fsdp-run", "-n", "4", build / "examples/train_gpt", *MODEL, *options, "--json", file.name,
                   "--corpus", Path(__file__).resolve().parents[2] / "LICENSE"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | settings)
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
