#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs train_gpt over nodes. Its losses and weights have the same bits as those of threads of one process that add
gradients in the same blocks. usage: gpt_test.py TRAIN_GPT"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

import tap
from job import Clean, fresh_port

TRAIN_GPT = os.path.realpath(sys.argv[1])
EXAMPLES = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "examples"))
MODEL = ("--layers 2 --width 48 --heads 3 --context 24 --batch 16 --steps 4 --lr 1e-2 --quiet --corpus "
         f"{EXAMPLES}").split()
SECONDS = 60  # limit of a run, which usually takes a second

# name: ranks of nodes, flags; threads of the same mesh need these too
MESHES = {
    "2x1 over 2 nodes, HSDP": ([1, 1], "--replicas 2", ""),
    "2x1 over 2 nodes, HFSDP": ([1, 1], "--replicas 2 --outer hfsdp", ""),
    "2x2 over 2 nodes, HSDP": ([2, 2], "--replicas 2", ""),
    "2x2 over 2 nodes, HFSDP": ([2, 2], "--replicas 2 --outer hfsdp", ""),
    "2x2 over 2 nodes, HFSDP, copied": ([2, 2], "--replicas 2 --outer hfsdp --unshard copied --recompute", ""),
    "2x2 over 2 nodes, HSDP, micro-batches": ([2, 2], "--replicas 2 --microbatches 2", ""),
    "1x4 over 2 nodes": ([2, 2], "", "--reduction-block 2"),
    "4x2 over 4 nodes, HSDP": ([2, 2, 2, 2], "--replicas 4", ""),
    "4x2 over 4 nodes, HFSDP": ([2, 2, 2, 2], "--replicas 4 --outer hfsdp", ""),
}


def read_numbers(path):
    *steps, end = [json.loads(line) for line in open(path)]
    return {"losses": [step["loss"] for step in steps], "weights": end["weights_hash"],
            "norms": [step["grad_norm"] for step in steps]}


def command(flags, path):
    return [TRAIN_GPT, *MODEL, *flags.split(), "--json", path]


def in_threads(count, flags, folder):
    path = os.path.join(folder, "threads.json")
    done = subprocess.run(command(f"--threads {count} {flags}", path), capture_output=True, text=True, timeout=SECONDS,
                          env=dict(os.environ, OPENBLAS_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr
    return read_numbers(path)


def over_nodes(ranks_of_nodes, flags, folder):
    """Rank 0 writes the numbers; each rank has a log."""
    path, port = os.path.join(folder, "nodes.json"), fresh_port()
    place = [(node, local) for node, count in enumerate(ranks_of_nodes) for local in range(count)]
    with Clean(len(ranks_of_nodes)) as network:
        ranks = []
        for rank, (node, local) in enumerate(place):
            variables = dict(network.rank_variables(rank, len(place), local, ranks_of_nodes[node], port), OPENBLAS_NUM_THREADS="1")
            with open(os.path.join(folder, f"log.{rank}"), "wb") as log:
                ranks.append(network.start(node, command(flags, path), variables, stdout=log, stderr=subprocess.STDOUT))
        await_success(ranks, folder)
    return read_numbers(path)


def await_success(ranks, folder):
    end = time.monotonic() + SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    codes = [rank.poll() for rank in ranks]
    logs = [f"rank {r}: " + open(os.path.join(folder, f"log.{r}"), errors="replace").read()[-800:] for r in range(len(ranks))]
    assert not any(codes) and None not in codes, f"exit codes {codes} after {SECONDS} s at most\n" + "\n".join(logs)


# Norms are summed shard by shard, and a mesh of one replica has other shards.
def same_sums(numbers, one_replica):
    for key in ("losses", "weights"):
        assert numbers[key] == one_replica[key], f"one replica: {key} {numbers[key]} {one_replica[key]}"


def check(name):
    ranks_of_nodes, flags, blocks = MESHES[name]
    count = sum(ranks_of_nodes)
    with tempfile.TemporaryDirectory(prefix="fsdp-gpt-") as folder:
        numbers = over_nodes(ranks_of_nodes, flags, folder)
        assert len(numbers["losses"]) == 4 and numbers["losses"][-1] < numbers["losses"][0] - 0.3, numbers
        assert numbers == in_threads(count, f"{flags} {blocks}", folder), "threads of the same mesh"
        # Replicas sum these before they sum among each other, but a single replica does not.
        if "--microbatches" not in flags:
            same_sums(numbers, in_threads(count, f"--reduction-block {ranks_of_nodes[0]}", folder))
    tap.note(f"{name}: losses {numbers['losses']}, weights {numbers['weights']}")


# Ranks of both nodes write into one folder. Another job, and threads of one process, continue from it with the same
# bits.
def saved_and_resumed(name):
    ranks_of_nodes, flags, blocks = MESHES[name]
    with tempfile.TemporaryDirectory(prefix="fsdp-gpt-") as folder:
        runs = os.path.join(folder, "runs")
        straight = in_threads(sum(ranks_of_nodes), f"{flags} {blocks}", folder)
        saving = f"{flags} --save {runs} --save-every 2"
        assert over_nodes(ranks_of_nodes, saving, folder) == straight, "saving changed something"
        assert sorted(os.listdir(runs)) == ["step-0000000002", "step-0000000004"], os.listdir(runs)
        shutil.rmtree(os.path.join(runs, "step-0000000004"))
        assert over_nodes(ranks_of_nodes, f"{saving} --resume", folder) == straight, "another job of the same mesh"
        shutil.rmtree(os.path.join(runs, "step-0000000004"))
        resumed = in_threads(sum(ranks_of_nodes), f"{saving} {blocks} --resume", folder)
        assert resumed == straight, "threads that go on with what nodes have saved"


# If the blocks changed nothing, those comparisons could not fail.
def blocks_change_bits():
    with tempfile.TemporaryDirectory(prefix="fsdp-gpt-") as folder:
        plain, blocks = in_threads(4, "", folder), in_threads(4, "--reduction-block 2", folder)
    assert plain["weights"] != blocks["weights"] and plain["losses"] != blocks["losses"], plain


tap.run([(name, lambda name=name: check(name)) for name in MESHES] +
        [(f"saved and gone on with, {name}", lambda name=name: saved_and_resumed(name))
         for name in ("2x2 over 2 nodes, HSDP", "2x2 over 2 nodes, HFSDP")] +
        [("blocks change bits", blocks_change_bits)])
