#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks are stopped. If the stop is shorter than the heartbeat limit, nothing happens and no bit changes. If it is
longer, all other ranks name the stopped ranks in time, and these learn it when they go on. usage: stop_test.py
RANK_PROGRAM (FSDP_TEST_MANY: 100 stops)"""
import random
import signal
import time

import job as jobs
import tap
from job import Clean, Job, check_levels, on_one_process

LIMIT_S = 2.0
RANKS_OF_NODES = [2, 2]
OPTIONS = {"replicate": 2, "shard": 2, "heartbeat": int(LIMIT_S * 1000), "microbatches": 1}
STOPS = 100 if tap.MANY else 4
SEED = 7


def short_stop(network, victim, seconds, expected):
    """expected: outcomes of the job without a stop."""
    with Job(network, RANKS_OF_NODES, dict(OPTIONS, steps=STEPS, pace=10)) as job:
        job.await_training()
        job.signal(victim, signal.SIGSTOP)
        time.sleep(seconds)
        assert not any(rank.result for rank in job.ranks), "over before the stop was"
        job.signal(victim, signal.SIGCONT)
        for rank in job.collect(40):
            assert rank.result and rank.result["status"] == "FSDP_OK", f"{victim} stopped for {seconds} s: {rank}"
            assert rank.result["weights"] == expected[0]["weights"], f"other weights: {rank}"
            assert rank.result["norms"] == expected[0]["norms"], f"other norms: {rank}"
            check_levels(rank.result)


def long_stop(network, victim):
    """Returns how long it took until all others had named the victim."""
    with Job(network, RANKS_OF_NODES, dict(OPTIONS, steps=1_000_000)) as job:
        job.await_training()
        stopped = job.signal(victim, signal.SIGSTOP)
        others = [rank for rank in job.ranks if rank.number != victim]
        job.until(lambda: all(r.result or not r.open for r in others), LIMIT_S + 20, f"the stop of rank {victim}")
        job.signal(victim, signal.SIGCONT)
        job.collect(20)
        slowest = 0
        for rank in job.ranks:
            result = rank.result
            assert result and result["status"] == "FSDP_PEER_FAILED", f"rank {victim} stopped: {rank}"
            assert result["blamed"] == victim, f"rank {victim} stopped: {rank}"
            assert "it is stopped or its host is overloaded" in result["text"], str(rank)
            check_levels(result)
            if rank.number == victim:
                continue
            slowest = max(slowest, result["failed_at"] - stopped)
        assert slowest > LIMIT_S - 0.5, f"named after {slowest} s"
        assert slowest < jobs.allowed(LIMIT_S + 2), f"named after {slowest} s"
        return slowest


STEPS = 200  # longer than the driver can be delayed before it stops a rank


def short_stops():
    draw = random.Random(SEED)
    expected = on_one_process(4, dict(OPTIONS, steps=STEPS))
    with Clean(2) as network:
        for trial in range(STOPS // 2):
            short_stop(network, trial % 4 if trial > 1 else 3 * trial, draw.uniform(0.3, LIMIT_S * 0.6), expected)


def long_stops():
    times = []
    with Clean(2) as network:
        for trial in range(STOPS - STOPS // 2):
            victim = [2, 1, 0, 3][trial % 4]  # leaders are 0 and 2
            times.append(long_stop(network, victim))
    tap.note(f"{len(times)} stops longer than {LIMIT_S} s, named by all after " + ", ".join(f"{t:.2f}" for t in times))


tap.run([(f"{STOPS // 2} stops shorter than the limit", short_stops),
         (f"{STOPS - STOPS // 2} stops longer than the limit", long_stops)])
