#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Meshes of GPUs over nodes, NCCL inside each and UCX between them: the bits of host runs, which are those of the
reference; what the log says of the transport; steps that are discarded; a node that dies. GPUs and NCCL are simulated,
in threads of one process for each node. usage: nccl_test.py RANK_PROGRAM NCCL_LIBRARY"""
import os
import signal
import sys
import tempfile

import tap
from job import Clean, Job, allowed, on_one_process

NEAR = 2  # ranks of a node: two addends have the same sum in either order
OWN_FOLDER = tempfile.TemporaryDirectory()
MISSING = OWN_FOLDER.name + "/libnccl.so.2"
NCCL = os.path.realpath(sys.argv[2])
STEPS, MICROBATCHES, GROUPS = 3, 2, 4

HSDP = {"replicate": 2, "shard": 2}
HFSDP = dict(HSDP, outer="hfsdp")
# name: nodes, options of the mesh, options that only one node needs
MESHES = {
    "HSDP over 2 nodes": (2, HSDP, {}),
    "HFSDP over 2 nodes": (2, HFSDP, {}),
    "HSDP over 3 nodes": (3, {"replicate": 3, "shard": 2}, {}),
    "HFSDP over 3 nodes": (3, {"replicate": 3, "shard": 2, "outer": "hfsdp"}, {}),
    "HSDP, bf16 weights": (2, dict(HSDP, dtype="bf16"), {}),
    "HFSDP, bf16 weights": (2, dict(HFSDP, dtype="bf16"), {}),
    "HSDP, large messages": (2, dict(HSDP, wide=1), {}),
    "HFSDP, large messages": (2, dict(HFSDP, wide=1), {}),
    "HSDP of whole models": (2, dict(HSDP, strategy=1), {}),
    "HFSDP of gradients and states": (2, dict(HFSDP, strategy=3), {}),
    "a shard axis over 2 nodes": (2, {}, {"ranks_per_host": 2}),
}


def environment(nccl=NCCL):
    return {"FSDP_TEST_DEVICE": "cuda", "FSDP_NCCL_LIBRARY": nccl, "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "32", "SIMULATED_CUDA": "fair_queues=1"}


def start(network, nodes, options, nccl=NCCL):
    return Job(network, [1] * nodes, dict(options, neighbours=NEAR), environment=environment(nccl))


def outcomes(job, seconds=80):
    """The outcomes of all ranks, in their order."""
    ranks = [rank for process in job.collect(seconds) for rank in told(process)]
    assert [rank["rank"] for rank in ranks] == list(range(len(ranks))), ranks
    return ranks


def told(process):
    line = next((line for line in process.lines if "neighbours" in line), None)
    assert line, str(process)
    return line["neighbours"]


def train(nodes, options, gpus="chosen"):
    options = dict(options, steps=STEPS, microbatches=MICROBATCHES, gpus=gpus)
    with Clean(nodes) as network, start(network, nodes, options) as job:
        ranks = outcomes(job)
    for rank in ranks:
        assert rank["status"] == "FSDP_OK", rank
    return ranks


def uses_nccl(rank):
    return any("NCCL" in line and "memory is registered as" in line for line in rank["log"])


def same_bits(ranks, expected, keys=("weights", "views")):
    for rank, other in zip(ranks, expected):
        for key in keys:
            assert rank[key] == other[key], f"rank {rank['rank']}: other {key}"


def check(name):
    nodes, options, alone = MESHES[name]
    ranks = train(nodes, options)
    expected = on_one_process(nodes * NEAR, dict(options, steps=STEPS, microbatches=MICROBATCHES, **alone))
    same_bits(ranks, expected, ("weights", "views", "norms"))
    for rank, other in zip(ranks, expected):
        assert uses_nccl(rank), f"rank {rank['rank']} has no NCCL: {rank['log']}"
        assert rank["counts"] == other["counts"], f"rank {rank['rank']}: {rank['counts']}, not {other['counts']}"
        assert rank["outer_sent_bytes"] > 0, f"rank {rank['rank']} sent nothing"
        assert rank["planned"] == rank["allocated"], f"rank {rank['rank']}: {rank['planned']} {rank['allocated']}"


def staging_has_the_same_bits():
    for options in (HSDP, HFSDP):
        ranks = train(2, options, "staging")
        assert not any(uses_nccl(rank) for rank in ranks), ranks[0]["log"]
        same_bits(ranks, on_one_process(2 * NEAR, dict(options, steps=STEPS, microbatches=MICROBATCHES)))


# On each host NCCL's communicators wait for calls that a neighbour has not begun, and messages between hosts wait, too.
def a_discarded_step_leaves_nothing():
    for options in (HSDP, HFSDP):
        ranks = train(2, dict(options, discard=1))
        same_bits(ranks, on_one_process(2 * NEAR, dict(options, steps=STEPS, microbatches=MICROBATCHES)))


def a_node_that_dies_is_named():
    options = dict(HSDP, steps=100_000, gpus="chosen")
    with Clean(2) as network, start(network, 2, options) as job:
        job.await_training(60)
        job.pump(0.3)
        job.signal(1, signal.SIGKILL)
        job.until(lambda: job.ranks[0].result or not job.ranks[0].open, 30, "the survivors' end")
        ranks = told(job.ranks[0])
    for rank in ranks:
        assert rank["status"] == "FSDP_PEER_FAILED" and rank["blamed"] in (2, 3), rank
        assert rank["destroy_seconds"] < allowed(10), f"destroyed in {rank['destroy_seconds']} s"


def refused():
    """NCCL is not offered between nodes, whichever library there is."""
    for options in (HSDP, HFSDP, {}):
        with Clean(2) as network, start(network, 2, dict(options, gpus="nccl")) as job:
            ranks = outcomes(job, 20)
        for rank in ranks:
            assert rank["status"] == "FSDP_UNSUPPORTED", rank
            for word in ("FSDP_TRANSPORT_NCCL", "between hosts", "device_transport 0"):
                assert word in rank["text"], rank


def a_node_without_nccl_goes_through_its_host():
    options = dict(HSDP, gpus="chosen", neighbours=NEAR, steps=STEPS, microbatches=MICROBATCHES)
    variables = {node: {"FSDP_NCCL_LIBRARY": MISSING if node else NCCL} for node in range(2)}
    common = {name: value for name, value in environment().items() if name != "FSDP_NCCL_LIBRARY"}
    with Clean(2) as network, Job(network, [1, 1], options, environment=common, environments=variables) as job:
        ranks = outcomes(job)
    for rank in ranks:
        assert rank["status"] == "FSDP_OK", rank
        assert uses_nccl(rank) == (rank["rank"] < NEAR), rank["log"]
        warned = any("without NCCL" in line and MISSING in line for line in rank["log"])
        assert warned == (rank["rank"] >= NEAR), rank["log"]
    same_bits(ranks, on_one_process(2 * NEAR, dict(HSDP, steps=STEPS, microbatches=MICROBATCHES)))


tap.run([(name, lambda name=name: check(name)) for name in MESHES] +
        [("staging has the same bits", staging_has_the_same_bits),
         ("a discarded step leaves nothing", a_discarded_step_leaves_nothing),
         ("a node that dies is named", a_node_that_dies_is_named),
         ("NCCL between nodes is refused", refused),
         ("a node without NCCL goes through its host", a_node_without_nccl_goes_through_its_host)])
