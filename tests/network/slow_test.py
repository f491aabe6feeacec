#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Networks are slow and full of the job's own messages, so that ranks wait for each other for seconds. No rank may be
called dead, stopped, cut off or out of step because of that. usage: slow_test.py RANK_PROGRAM (FSDP_TEST_MANY:
slower)"""
import time

import tap
from job import Clean, Job, check_levels, on_one_process

RANKS_OF_NODES = [2, 2]
MBIT, STEPS = (4, 4) if tap.MANY else (20, 2)
# 1,048,576 parameters in fp32. Each node sends at least half of the sums of their gradients.
LEAST_S = STEPS * (1 << 20) * 4 * 8 / 2 / (MBIT * 1e6)
OPTIONS = {"wide": 1, "heartbeat": 3000, "timeout": 60_000, "microbatches": 1, "steps": STEPS}
MESHES = {
    "HSDP": {"replicate": 2, "shard": 2},
    "HFSDP": {"replicate": 2, "shard": 2, "outer": "hfsdp"},
    "a shard axis over hosts": {},
    "a shard axis over hosts, copied": {"mode": "copied"},
}


def train_slowly(name):
    options = dict(OPTIONS, **MESHES[name])
    expected = on_one_process(4, dict(options, ranks_per_host=2))
    with Clean(2) as network:
        network.slow_down(f"{MBIT}mbit")
        with Job(network, RANKS_OF_NODES, options) as job:
            job.await_training(120)
            began = time.monotonic()
            ranks = job.collect(180)
        seconds = time.monotonic() - began
        for rank in ranks:
            assert rank.result and rank.result["status"] == "FSDP_OK", str(rank)
            assert rank.result["weights"] == expected[rank.number]["weights"], f"other weights: {rank}"
            assert rank.result["views"] == expected[rank.number]["views"], f"other weights were read: {rank}"
            assert rank.result["norms"] == expected[rank.number]["norms"], f"other norms: {rank}"
            check_levels(rank.result)
        assert seconds > LEAST_S, f"{seconds} s: the network was not slow"
        tap.note(f"{name}: {STEPS} steps took {seconds:.1f} s at {MBIT} Mbit/s")


tap.run([(f"{name} over a network of {MBIT} Mbit/s", lambda name=name: train_slowly(name)) for name in MESHES])
