#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Networks that are cut silently. If a cut heals before the limit, training goes on with the same bits. Otherwise both
sides name the link, and no rank, in time. After the cut has healed, all ranks train on in a new job of the same
processes.
usage: cut_test.py RANK_PROGRAM (FSDP_TEST_MANY: 40 cuts)"""
import os
import random
import time

import job as jobs
import tap
from job import Clean, Job, check_levels, fresh_port, on_one_process

LIMIT_S = 3.0
RANKS_OF_NODES = [2, 2]
OPTIONS = {"replicate": 2, "shard": 2, "heartbeat": int(LIMIT_S * 1000), "microbatches": 1}
CUTS = 30 if tap.MANY else 3
STEPS = 300  # longer than the driver can be delayed before it cuts
SEED = int(os.environ.get("FSDP_TEST_SEED", "7"))
# A long cut interrupts reduces and publishes on streams, large ones too, while callers wait for them.
LONG = [{}, {"outer": "hfsdp", "wide": 1}, {"wide": 1}, {"outer": "hfsdp"}, {"replicate": 0, "shard": 0, "wide": 1}]


def healed_cut(network, node, seconds, expected):
    with Job(network, RANKS_OF_NODES, dict(OPTIONS, steps=STEPS, pace=10)) as job:
        job.await_training()
        time.sleep(0.2)
        network.cut(node)
        try:
            time.sleep(seconds)
            assert not any(rank.result for rank in job.ranks), "over during the cut"
        finally:
            network.heal(node)
        for rank in job.collect(60):
            assert rank.result and rank.result["status"] == "FSDP_OK", f"cut for {seconds} s: {rank}"
            assert rank.result["weights"] == expected[0]["weights"], f"other weights: {rank}"
            assert rank.result["norms"] == expected[0]["norms"], f"other norms: {rank}"
            check_levels(rank.result)


def forming_cut(network, node, delay, seconds):
    """Cuts the network for less than any limit while the ranks meet, connect and exchange for the first time. The job
    forms. Returns whether any rank had come this far before the cut."""
    with Job(network, RANKS_OF_NODES, dict(OPTIONS, heartbeat=15_000, steps=5)) as job:
        time.sleep(delay)
        network.cut(node)
        time.sleep(seconds)
        job.pump(0)
        formed = any(rank.first("training") for rank in job.ranks)
        network.heal(node)
        for rank in job.collect(60):
            assert rank.result and rank.result["status"] == "FSDP_OK", f"cut for {seconds} s after {delay} s: {rank}"
            check_levels(rank.result)
        return not formed


def lasting_cut(network, node, seconds, options):
    """Cuts after this many seconds of training. Returns the time until both sides had named the link. All ranks train
    on afterwards."""
    special, port = {}, fresh_port()
    place = [n for n, count in enumerate(RANKS_OF_NODES) for _ in range(count)]
    for rank, at in enumerate(place):
        local = rank - place.index(at)
        variables = network.rank_variables(rank, len(place), local, RANKS_OF_NODES[at], port)
        special[rank] = {"again": ",".join(f"{k}={v}" for k, v in variables.items()), "again_replicate": 2}
    with Job(network, RANKS_OF_NODES, dict(OPTIONS, steps=1_000_000, **options), special) as job:
        job.await_training()
        time.sleep(seconds)
        network.cut(node)
        cut = time.monotonic()
        try:
            job.until(lambda: all(r.first("failed_at") or not r.open for r in job.ranks), LIMIT_S + 15, "the cut")
        finally:
            network.heal(node)
        slowest = 0
        for rank in job.collect(40):
            result = rank.result
            assert result and result["status"] == "FSDP_PEER_FAILED", str(rank)
            assert result["blamed"] == -1, f"a rank is blamed: {rank}"
            assert "no contact between" in result["text"] and "the network between them is cut" in result["text"], str(rank)
            assert result["destroy_seconds"] < jobs.allowed(3), f"destroyed in {result['destroy_seconds']} s: {rank}"
            assert result["again"]["status"] == "FSDP_OK", f"{result['again']} after {rank}"
            check_levels(result)
            slowest = max(slowest, result["failed_at"] - cut)
        assert slowest > LIMIT_S - 0.5, f"named after {slowest} s"
        assert slowest < jobs.allowed(LIMIT_S + 2), f"named after {slowest} s"
        return slowest


def healed_cuts():
    draw = random.Random(SEED)
    expected = on_one_process(4, dict(OPTIONS, steps=STEPS))
    with Clean(2) as network:
        for trial in range(CUTS // 3):
            healed_cut(network, trial % 2, draw.uniform(0.3, LIMIT_S * 0.6), expected)


def forming_cuts():
    draw, count = random.Random(SEED), max(2, CUTS // 3)
    with Clean(2) as network:
        # Starting takes about a tenth of a second, and forming as long.
        delays = [0.04 + 0.16 * trial / count for trial in range(count)]
        met = sum(forming_cut(network, trial % 2, delay, draw.uniform(2.2, 5)) for trial, delay in enumerate(delays))
        # A driver that is held up cuts too late. Then the cut is tried again, earlier.
        while met == 0 and count < 10:
            count += 1
            met += forming_cut(network, count % 2, max(0, 0.04 * (8 - count) / 8), draw.uniform(2.2, 5))
    assert met > 0, "no cut met a job that formed"
    tap.note(f"{met} of {count} cuts met the job while it formed")


def lasting_cuts():
    times, draw = [], random.Random(SEED)
    with Clean(2) as network:
        for trial in range(CUTS - CUTS // 3):
            times.append(lasting_cut(network, 1 - trial % 2, draw.uniform(0, 0.5), LONG[trial % len(LONG)]))
    tap.note(f"{len(times)} cuts (seed {SEED}) longer than {LIMIT_S} s, named by both sides after " + ", ".join(f"{t:.2f}" for t in times))


tap.run([(f"{CUTS // 3} cuts shorter than the limit", healed_cuts),
         ("cuts while the job forms", forming_cuts),
         (f"{CUTS - CUTS // 3} cuts longer than the limit", lasting_cuts)])
