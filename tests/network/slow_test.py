#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Networks that are slow, and full of the job's own messages: ranks wait for each other for seconds, and nobody may be
called dead, stopped, cut off or out of step for it. usage: slow_test.py RANK_PROGRAM ucx|no-ucx (FSDP_TEST_MANY: slower)"""
import time

import tap
from job import Clean, Job, check_levels, on_one_process

RANKS_OF_NODES = [2, 2]
RATE, STEPS = ("4mbit", 4) if tap.MANY else ("20mbit", 2)
# 1,048,576 parameters: 2 MiB of compute weights and 4 MiB of gradients.
OPTIONS = {"wide": 1, "heartbeat": 3000, "timeout": 60_000, "microbatches": 1}
MESHES = {
    "HSDP": {"replicate": 2, "shard": 2},
    "HFSDP": {"replicate": 2, "shard": 2, "outer": "hfsdp"},
    "a shard axis over hosts": {},
    "a shard axis over hosts, copied": {"mode": "copied"},
}


def train_slowly(name):
    options = dict(OPTIONS, **MESHES[name], steps=STEPS)
    expected = on_one_process(4, dict(options, ranks_per_host=2))
    with Clean(2) as network, Job(network, RANKS_OF_NODES, dict(options, pace=200)) as job:
        job.await_training()
        network.slow_down(RATE)
        slowed = time.monotonic()
        for rank in job.collect(120):
            assert rank.result and rank.result["status"] == "FSDP_OK", f"at {RATE}/s: {rank}"
            assert rank.result["weights"] == expected[rank.number]["weights"], f"other weights: {rank}"
            assert rank.result["norms"] == expected[rank.number]["norms"], f"other norms: {rank}"
            check_levels(rank.result)
        tap.note(f"{name}: {STEPS} steps took {time.monotonic() - slowed:.1f} s at {RATE}/s")


tap.run([(f"{name} over a network of {RATE}/s", lambda name=name: train_slowly(name)) for name in MESHES])
