#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks are killed at random moments, also while the job forms and while it ends. All other ranks learn in time which
rank died. No rank hangs, and nothing is left behind. The survivors train on in a new job in the same processes.
usage: kill_test.py RANK_PROGRAM (FSDP_TEST_MANY: 200 kills)"""
import collections
import os
import random
import signal
import statistics
import tempfile

import job as jobs
import nodes
import tap
from job import Clean, Job, check_levels, fresh_port

STAGES = ["bootstrap", "seal", "load", "forward", "backward", "finish", "step", "close", "destroy", "start"]
ENDING = ("close", "destroy", "done")
KILLS = 200 if tap.MANY else 10
RANKS_OF_NODES = [2, 2]
SEED = int(os.environ.get("FSDP_TEST_SEED", "20261121"))

MESHES = [{"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 2, "outer": "hfsdp"}, {},
          {"replicate": 2, "shard": 2, "wide": 1}]

longest, killed_in, timeouts, logged = 0.0, collections.Counter(), 0, collections.Counter()
restarts = []  # seconds from a kill until a survivor trains in its new job: detection, destruction, context, seal, weights


def again(job, victim):
    """The new job of the surviving ranks."""
    port, of = fresh_port(), [r for r in range(len(job.place)) if r != victim]
    options = {}
    for rank in of:
        variables = job.variables(rank, of, port)
        options[rank] = {"again": ",".join(f"{k}={v}" for k, v in variables.items()), "again_replicate": len(of)}
    return options


class Places:
    """The ranks' data in the form that Job keeps, before the job is made."""

    def __init__(self, network, ranks_of_nodes):
        self.network = network
        self.place = [node for node, count in enumerate(ranks_of_nodes) for _ in range(count)]

    variables = Job.variables


def check_survivor(rank, dead, killed_at, killed_in):
    global longest, timeouts
    result = rank.result
    assert result and rank.process.poll() == 0, f"died too: {rank}"
    check_levels(result)
    if killed_in in ENDING and result["status"] == "FSDP_OK":
        return
    late = result["failed_at"] - killed_at
    assert result["destroy_seconds"] < jobs.allowed(LIMIT_S), f"destroyed in {result['destroy_seconds']} s: {rank}"
    if killed_in in ("start", "bootstrap") and result["status"] == "FSDP_TIMEOUT":
        # The victim had not announced its rank, this rank came after rank 0 had gone, or it had given up.
        timeouts += 1
        assert result["blamed"] in dead or "has not found rank 0" in result["text"], str(rank)
        assert late < jobs.allowed(TIMEOUT_S + LIMIT_S), f"{late} s: {rank}"
    else:
        assert result["status"] == "FSDP_PEER_FAILED", str(rank)
        assert result["blamed"] in dead, str(rank)
        assert late < jobs.allowed(LIMIT_S), f"{late} s: {rank}"
        longest = max(longest, late)
    if "again" in result:
        assert result["again"]["status"] == "FSDP_OK", f"{result['again']} after {rank}"
        restarts.append([line["training"] for line in rank.lines if "training" in line][-1] - killed_at)


TIMEOUT_S = 3
LIMIT_S = 5  # the library promises 1 or 2, but test machines delay threads; far below the limit of silence


def kill_once(network, trial, draw):
    stage = STAGES[trial % len(STAGES)]
    victim = draw.randrange(4)
    steps = draw.randrange(5) if STAGES.index(stage) >= STAGES.index("forward") else 0
    early = stage in ("start", "bootstrap")
    delay_us = 0 if trial % 3 == 0 else draw.randrange(150_000 if early else 4_000)
    ends = stage in ("close", "destroy")
    options = dict(MESHES[trial % len(MESHES)], steps=steps if ends else 1_000_000, microbatches=1,
                   timeout=TIMEOUT_S * 1000 if early else 20_000, heartbeat=15_000)
    # Ranks of a job that is still forming may wait for the timeout or not, so they would miss each other in a new job.
    special = again(Places(network, RANKS_OF_NODES), victim) if not (early or ends) else {}
    special[victim] = {"die": f"{stage}:{steps}:{delay_us}"}
    what = f"kill {trial}: rank {victim} in {stage} after {steps} steps and {delay_us} us"
    with Job(network, RANKS_OF_NODES, options, special) as job:
        try:
            ranks = job.collect(TIMEOUT_S + 30)
            killed = ranks[victim].first("killed_in")
            assert killed, f"the victim lives: {ranks[victim]}"
            killed_in[killed] += 1
            dead = {victim}
            for rank in ranks:
                if rank.number not in dead:
                    logged.update(line.split(b"]", 2)[-1].strip() for line in rank.errors.splitlines())
                    check_survivor(rank, dead, ranks[victim].first("killed_at"), killed)
        except Exception as error:
            raise AssertionError(f"{what}:\n{error}\n" + "\n".join(map(str, job.ranks))) from error


def kills():
    draw = random.Random(SEED)
    failures = []
    with Clean(len(RANKS_OF_NODES)) as network:
        for trial in range(KILLS):
            try:
                kill_once(network, trial, draw)
            except AssertionError as error:
                failures.append(str(error))
                tap.note(error)
    tap.note(f"{KILLS} kills (seed {SEED}): {dict(killed_in)}; the slowest report {longest * 1e3:.0f} ms after the kill, "
             f"worst scheduling delay {Job.worst_delay * 1e3:.0f} ms; {timeouts} reports were timeouts")
    if restarts:
        tap.note(f"{len(restarts)} restarts: from the kill until a survivor trains in a new job over both hosts "
                 f"{statistics.median(restarts) * 1e3:.0f} ms in the middle, {max(restarts) * 1e3:.0f} ms at most")
    for line, count in logged.most_common(5):
        tap.note(f"{count} times a survivor printed: {line.decode(errors='replace')}")
    assert not failures, f"{len(failures)} of {KILLS} kills failed"


def core_dump(network, victim):
    """A rank that crashes holds all its connections until its core is written."""
    options = {"replicate": 2, "shard": 2, "steps": 1_000_000, "microbatches": 1, "timeout": 60_000, "heartbeat": 30_000}
    with tempfile.TemporaryDirectory() as folder:
        with Job(network, RANKS_OF_NODES, options, {victim: {"die": "backward:3:0", "core": folder}}) as job:
            others = [rank for rank in job.ranks if rank.number != victim]
            job.until(lambda: all(r.result or not r.open for r in others), LIMIT_S + 30, f"the core of rank {victim}")
            if why := job.ranks[victim].first("unable"):
                raise nodes.Unable(why)
            job.signal(victim, signal.SIGKILL)
            job.collect(20)
            killed_at = job.ranks[victim].first("killed_at")
            for rank in others:
                result = rank.result
                assert result and result["status"] == "FSDP_PEER_FAILED" and result["blamed"] == victim, str(rank)
                assert f"rank {victim} (pid " in result["text"] and result["text"].endswith(") is dumping core"), str(rank)
                assert result["failed_at"] - killed_at < jobs.allowed(LIMIT_S), str(rank)
                check_levels(result)
            return max(rank.result["failed_at"] for rank in others) - killed_at


def core_dumps():
    with Clean(len(RANKS_OF_NODES)) as network:
        times = [core_dump(network, victim) for victim in (0, 2, 3)]
    tap.note("named by all after " + ", ".join(f"{t * 1e3:.0f} ms" for t in times))


tap.run([("core dumps of leaders and of a rank", core_dumps), (f"{KILLS} kills", kills)])
