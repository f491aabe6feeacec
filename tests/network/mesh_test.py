#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Meshes over nodes have the same bits as one-node runs with the same declarations, in threads and in processes. The
test also compares the counts of inner and outer collectives, and the memory with the plan. usage: mesh_test.py
RANK_PROGRAM"""
import subprocess

import tap
from job import Clean, Job, check_levels, on_one_process

GROUPS = 4  # bytes of the scenario
STEPS, MICROBATCHES = 3, 2

# name: ranks of nodes, options of all runs, options that only one node needs
MESHES = {
    "2x1 over 2 nodes, HSDP": ([1, 1], {"replicate": 2, "shard": 1}, {}),
    "2x1 over 2 nodes, HFSDP": ([1, 1], {"replicate": 2, "shard": 1, "outer": "hfsdp"}, {}),
    "2x2 over 2 nodes, HSDP": ([2, 2], {"replicate": 2, "shard": 2}, {}),
    "2x2 over 2 nodes, HFSDP": ([2, 2], {"replicate": 2, "shard": 2, "outer": "hfsdp"}, {}),
    "2x2 over 2 nodes, HFSDP, copied": ([2, 2], {"replicate": 2, "shard": 2, "outer": "hfsdp", "mode": "copied"}, {}),
    "1x4 over 2 nodes": ([2, 2], {}, {"ranks_per_host": 2}),
    "1x4 over 2 nodes, against blocks": ([2, 2], {}, {"block": 2}),
    "4x2 over 4 nodes, HSDP": ([2, 2, 2, 2], {"replicate": 4, "shard": 2}, {}),
    "4x2 over 4 nodes, HFSDP": ([2, 2, 2, 2], {"replicate": 4, "shard": 2, "outer": "hfsdp"}, {}),
    "2x2 over 2 nodes, HSDP, quantized": ([2, 2], {"replicate": 2, "shard": 2, "quantized": 1}, {}),
    "2x2 over 2 nodes, HFSDP, quantized, copied": ([2, 2], {"replicate": 2, "shard": 2, "outer": "hfsdp", "quantized": 1,
                                                           "mode": "copied"}, {}),
    "1x4 over 2 nodes, quantized": ([2, 2], {"quantized": 1}, {"ranks_per_host": 2}),
    "2x2 over 2 nodes, HSDP, large messages": ([2, 2], {"replicate": 2, "shard": 2, "wide": 1}, {}),
}


def run(ranks_of_nodes, options):
    with Clean(len(ranks_of_nodes)) as network, Job(network, ranks_of_nodes, options) as job:
        ranks = job.collect(80)
        for rank in ranks:
            assert rank.result and rank.result["status"] == "FSDP_OK", str(rank)
            check_levels(rank.result)
        return [rank.result for rank in ranks]


def expected_counts(options):
    n, k, steps = GROUPS, MICROBATCHES, STEPS
    hsdp = "replicate" in options and "outer" not in options
    hfsdp = "outer" in options
    return {"reduce_scatters": n * k * steps, "outer_all_reduces": n * steps if hsdp else 0,
            "outer_reduce_scatters": 0 if hsdp else n * steps if hfsdp else n * k * steps,
            "outer_all_gathers": 0 if hsdp else n * (steps + 1)}  # the publish after loading gathers too


def same_bits(results, others, what):
    for key in ("weights", "views", "norms"):
        values = {str(result[key]) for result in results + others}
        assert len(values) == 1, f"{what}: {key} {values}"


def check(name):
    ranks_of_nodes, options, alone = MESHES[name]
    options = dict(options, steps=STEPS, microbatches=MICROBATCHES)
    results = run(ranks_of_nodes, options)
    same_bits(results, on_one_process(sum(ranks_of_nodes), dict(options, **alone)), "threads")
    same_bits(results, run([sum(ranks_of_nodes)], dict(options, **alone)), "processes of one node")
    for rank, result in enumerate(results):
        assert result["planned"] == result["allocated"], f"rank {rank}: {result['planned']} {result['allocated']}"
        if ranks_of_nodes[0] > 1:  # otherwise nothing would be reduced within a node
            assert result["counts"] == expected_counts(options), f"rank {rank}: {result['counts']}"
        assert result["outer_sent_bytes"] > 0, f"rank {rank} sent nothing"
    tap.note(f"{name}: {results[0]['counts']}, {results[0]['outer_sent_bytes']} bytes sent by rank 0, "
             f"memory by role {results[0]['planned']}")


# Every second group is on two meshes, of ranks 0 and 2 and of ranks 1 and 3, so that a node has one rank of each. Ranks
# of different meshes have different weights.
def experts():
    for options in ({}, {"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 2, "outer": "hfsdp", "mode": "copied"}):
        options = dict(options, experts=2, steps=STEPS, microbatches=MICROBATCHES)
        results, others = run([2, 2], options), run([4], dict(options, ranks_per_host=2))
        for rank, result in enumerate(results):
            same_bits([result], [others[rank]], f"rank {rank}, {options}")
            assert result["planned"] == result["allocated"], f"rank {rank}: {result['planned']} {result['allocated']}"
            assert result["outer_sent_bytes"] > 0, f"rank {rank} sent nothing"
        assert results[0]["weights"] == results[2]["weights"] != results[1]["weights"], results


# If the blocks changed nothing, those comparisons could not fail.
def blocks_change_bits():
    plain, blocks = on_one_process(4, {}), on_one_process(4, {"block": 2})
    assert plain[0]["weights"] != blocks[0]["weights"], plain[0]["weights"]


# Each rank's own log has the warning.
def dangers_are_logged():
    for threshold, wanted in (("1K", [2]), ("1M", [])):  # FSDP_LOG_WARNING
        with Clean(2) as network, Job(network, [1, 1], {}, environment={"UCX_ZCOPY_THRESH": threshold}) as job:
            for rank in job.collect(80):
                assert rank.result and rank.result["status"] == "FSDP_OK", str(rank)
                levels = [line["level"] for line in rank.lines if f"UCX_ZCOPY_THRESH is '{threshold}'" in line.get("log", "")]
                assert levels == wanted, f"{threshold}: {rank.lines}"


# Every rank gets the same error, and nothing is left open.
def tcp_needs_trust():
    with Clean(2) as network, Job(network, [2, 1], {}, environment={"FSDP_UCX_TCP": ""}) as job:
        results = [rank.result for rank in job.collect(60)]
    assert all(result and result["status"] == "FSDP_UNSUPPORTED" for result in results), results
    assert len({result["text"] for result in results}) == 1, results
    assert "set FSDP_UCX_TCP=trusted on every rank" in results[0]["text"], results[0]["text"]


# ---- variables of TCP ----

def refused(ranks_of_nodes, **job):
    with Clean(len(ranks_of_nodes)) as network, Job(network, ranks_of_nodes, {}, **job) as jobs:
        results = [rank.result for rank in jobs.collect(60)]
    assert all(results), results
    return results


# Every rank names both, in the same words.
def variables_are_the_same_everywhere():
    for name, usual, other in (("FSDP_NET", "tcp", "auto"), ("FSDP_NET_CHECKSUM", "none", "crc32c"),
                               ("FSDP_NET_ENCRYPTION", "off", "on")):
        results = refused([2, 1], environments={2: {name: other}})
        assert {result["status"] for result in results} == {"FSDP_MISMATCH"}, results
        assert len({result["text"] for result in results}) == 1 and results[0]["blamed"] == 2, results
        for word in (f"{name} is '{usual}' on rank 0 (", f"'{other}' on rank 2 ("):
            assert word in results[0]["text"], results[0]["text"]


# The rank with the wrong word reports it, and at once the others report that this rank did.
def wrong_words_are_told():
    for name, value, word in (("FSDP_NET", "rdma", "FSDP_NET is 'rdma': auto, tcp or ucx is expected"),
                              ("FSDP_NET_INTERFACE", "nowhere", "FSDP_NET_INTERFACE is 'nowhere': this host has no such interface"),
                              ("FSDP_NET_INTERFACE", "192.0.2.1", "FSDP_NET_INTERFACE is '192.0.2.1': no interface of this host"),
                              ("FSDP_NET_CHECKSUM", "md5", "FSDP_NET_CHECKSUM is 'md5': none or crc32c is expected"),
                              ("FSDP_NET_ENCRYPTION", "yes", "FSDP_NET_ENCRYPTION is 'yes': off or on is expected")):
        results = refused([2, 1], environments={2: {name: value}})
        assert [result["status"] for result in results] == ["FSDP_PEER_FAILED"] * 2 + ["FSDP_INVALID_ARGUMENT"], results
        assert all(word in result["text"] for result in results), results
        assert all(result["blamed"] == 2 for result in results[:2]), results


def few_descriptors_are_told():
    results = refused([2, 1], under={2: ["prlimit", "--nofile=64"]})
    assert {result["status"] for result in results} == {"FSDP_SYSTEM"}, results
    assert len({result["text"] for result in results}) == 1 and results[0]["blamed"] == 2, results
    for word in ("rank 2 (", "1 for connections to the leaders", "its process may have 64", "ulimit -n"):
        assert word in results[0]["text"], results[0]["text"]


def guards_change_no_bit():
    options = {"replicate": 2, "shard": 2, "outer": "hfsdp", "wide": 1}
    plain = on_one_process(4, options)
    for guards in ({"FSDP_NET_CHECKSUM": "crc32c"}, {"FSDP_NET_ENCRYPTION": "on"}):
        with Clean(2) as network, Job(network, [2, 2], options, environment=guards) as job:
            ranks = job.collect(80)
            for rank in ranks:
                assert rank.result and rank.result["status"] == "FSDP_OK", str(rank)
                check_levels(rank.result)
        same_bits([rank.result for rank in ranks], plain, str(guards))


KNOCK = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); s.send(b'GET / HTTP/1.1' * 20); s.recv(999)"


# A stranger causes only one line in the rank's log, which the rank's context writes.
def strangers_are_logged():
    with Clean(2) as network, Job(network, [1, 1], {"replicate": 2, "shard": 1, "pace": 200, "steps": 8}) as job:
        job.await_training()
        listing = subprocess.run(["ip", "netns", "exec", network.name(1), "ss", "-Hltn"], capture_output=True, text=True, check=True)
        ports = [line.split()[3].rsplit(":", 1)[1] for line in listing.stdout.splitlines()]
        assert ports, "no port is open on node 1"
        for port in ports:
            subprocess.run(["ip", "netns", "exec", network.name(0), "python3", "-c", KNOCK, network.address(1), port], timeout=20)
        ranks = job.collect(80)
        for rank in ranks:
            assert rank.result and rank.result["status"] == "FSDP_OK", str(rank)
        lines = [line for line in ranks[1].lines if "refused a connection for messages" in line.get("log", "")]
        assert len(lines) == 1 and lines[0]["level"] == 2, ranks[1].lines  # FSDP_LOG_WARNING
        assert f"rank 1: refused a connection for messages from {network.address(0)}:" in lines[0]["log"], lines
        assert "what came is not of libfsdp" in lines[0]["log"], lines


TCP_CASES = [("variables are the same everywhere", variables_are_the_same_everywhere), ("wrong words are told", wrong_words_are_told),
             ("few descriptors are told", few_descriptors_are_told), ("guards change no bit", guards_change_no_bit),
             ("strangers are logged", strangers_are_logged)]
# UCX has neither guard, and an explicit choice of UCX is not replaced.
def guards_are_tcp_s():
    for guard in ({"FSDP_NET_CHECKSUM": "crc32c"}, {"FSDP_NET_ENCRYPTION": "on"}):
        results = refused([2, 1], environment=guard)
        assert {result["status"] for result in results} == {"FSDP_UNSUPPORTED"}, results
        assert len({result["text"] for result in results}) == 1, results
        assert "UCX has no FSDP_NET_CHECKSUM and no FSDP_NET_ENCRYPTION" in results[0]["text"], results


# These cases concern UCX alone.
UCX_CASES = [("guards are TCP's", guards_are_tcp_s), ("dangerous settings are logged", dangers_are_logged), ("TCP needs a word of trust", tcp_needs_trust)]
tap.run([(name, lambda name=name: check(name)) for name in MESHES] + [("blocks change bits", blocks_change_bits), ("experts train over nodes", experts)] +
        (UCX_CASES if tap.OVER_UCX else TCP_CASES))
