#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Saving and loading as many bytes by libfsdp, torch.save and PyTorch's distributed checkpoint, in turns on one folder.

usage: python3 tests/peers/torch_speed.py BUILD DIR [--mebibytes N] [--rounds N]

Two ranks, each with a process, hold half of the bytes each, as one float32 tensor of theirs. Every save ends when its files are on the
disk (fsync), every load begins with files that are in no page cache. Needs a Python with PyTorch. By hand; results: docs/performance.md.
"""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing

RANKS = 2


def each_file(folder):
    return [path for path in pathlib.Path(folder).rglob("*") if path.is_file()]


def bring_to_disk(files):
    """On the disk, and out of the page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


class Timed:
    """Seconds from when all ranks begin to when the last one is through."""

    def __init__(self):
        self.seconds = {}

    def __call__(self, name, body):
        dist.barrier()
        start = time.monotonic()
        body()
        dist.barrier()
        self.seconds.setdefault(name, []).append(time.monotonic() - start)


def save_each(folder, rank, weights):
    file = f"{folder}/rank-{rank}.pt"
    torch.save({"w": weights}, file)
    bring_to_disk([file])


def load_each(folder, rank, weights):
    found = torch.load(f"{folder}/rank-{rank}.pt", weights_only=True)
    weights.copy_(found["w"])


def save_distributed(folder, rank, weights):
    dcp.save({f"w{rank}": weights}, checkpoint_id=folder)
    if rank == 0:
        bring_to_disk(each_file(folder))


def run_rank(rank, folder, count, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK=str(rank), WORLD_SIZE=str(RANKS))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    weights, timed = torch.rand(count), Timed()
    kept = weights.clone()
    for name, save, load in (("torch.save", save_each, load_each),
                             ("dcp", save_distributed, lambda f, r, w: dcp.load({f"w{r}": w}, checkpoint_id=f))):
        place = f"{folder}/{name}"
        if rank == 0:
            os.makedirs(place)
        timed(f"{name} save", lambda: save(place, rank, weights))
        weights.zero_()
        timed(f"{name} load", lambda: load(place, rank, weights))
        assert torch.equal(weights, kept), f"{name}: other weights came back"
    if rank == 0:
        pathlib.Path(results).write_text(json.dumps(timed.seconds))
    dist.destroy_process_group()


def run_torch(folder, mebibytes):
    place = f"{folder}/torch-speed-{os.getpid()}"
    os.makedirs(place)
    try:
        torch.multiprocessing.spawn(run_rank, (place, (mebibytes << 20) // 4 // RANKS, f"{place}/results"), RANKS)
        return json.loads(pathlib.Path(f"{place}/results").read_text())
    finally:
        shutil.rmtree(place)


def run_ours(build, folder, mebibytes):
    """Median of three, as fsdp-perf measures, and what its reference took: direct I/O of the same bytes."""
    lines = pathlib.Path(folder, f"fsdp-speed-{os.getpid()}.jsonl")
    try:
        subprocess.run([f"{build}/tools/fsdp-perf", "--op", "save,load", "-b", f"{mebibytes}M", "-n", str(RANKS), "--pairs", "3",
                        "--dir", folder, "--json", lines], check=True, stdout=subprocess.DEVNULL)
        found = {}
        for line in map(json.loads, lines.read_text().splitlines()):
            if line["variant"] == "":
                found[f"libfsdp {line['op']}"] = [1e-6 * line["time_us"]]
                found[f"direct I/O {line['op']}"] = [1e-6 * line["ref_us"]]
        return found
    finally:
        lines.unlink(missing_ok=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build")
    parser.add_argument("folder")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    seconds = {}
    for number in range(given.rounds):
        for found in (run_ours(given.build, given.folder, given.mebibytes), run_torch(given.folder, given.mebibytes)):
            for name, some in found.items():
                seconds.setdefault(name, []).extend(some)
        print(f"round {number + 1} of {given.rounds}", flush=True)
    print(f"{given.mebibytes} MiB, {RANKS} ranks, torch {torch.__version__}, medians of {given.rounds}")
    for name in sorted(seconds, key=lambda name: (name.split()[-1], statistics.median(seconds[name]))):
        median = statistics.median(seconds[name])
        print(f"{name:18} {1e3 * median:9.1f} ms {given.mebibytes / 1024 / median:7.2f} GiB/s")


if __name__ == "__main__":
    main()
