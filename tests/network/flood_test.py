#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Strangers send without end to the ports of a job. No rank reports anything wrong, a cut is named as without
strangers, a job forms, and the library's threads use little processor time. The strangers are in the test's own
namespaces.
usage: flood_test.py RANK_PROGRAM (FSDP_TEST_MANY: floods of 60 s, and of each port)"""
import json
import os
import subprocess
import tempfile
import time

import job as jobs
import nodes
import tap
from job import RANK_PROGRAM, Clean, Job, check_levels

SECONDS = 60 if tap.MANY else 5
DATAGRAMS, CONNECTIONS = 220_000, 3000  # a second
DISTANCE_MS = 50  # one way, for each host but the first: 100 ms to rank 0 and back
STRANGER = 3
MOST_SHARE = 0.25  # of a core
OPTIONS = {"steps": 1_000_000, "microbatches": 1, "pace": 50, "timeout": 60_000}


def ports(network, node, kind):
    """Ports of a node's own address at which it takes datagrams ("-uan") or connections ("-tln")."""
    text = subprocess.run(["ip", "netns", "exec", network.name(node), "ss", "-H", kind], capture_output=True, text=True,
                          check=True).stdout
    places = [word for line in text.splitlines() for word in line.split()[3:4]]
    return {int(place.rpartition(":")[2]) for place in places if place.startswith(network.address(node) + ":")}


def strangers(network, node, at):
    """Connections to these ports from the stranger's address."""
    text = subprocess.run(["ip", "netns", "exec", network.name(node), "ss", "-H", "-tn"], capture_output=True, text=True,
                          check=True).stdout
    ends = [line.split()[3:5] for line in text.splitlines()]
    return sum(int(here.rpartition(":")[2]) in at and there.startswith(network.address(STRANGER) + ":") for here, there in ends)


def start_flood(network, kind, places, rate, seconds):
    text = ",".join(f"{network.address(node)}:{port}" for node, port in places)
    first = ["nice", "-n", "-20"] if tap.MANY else []  # the rate is the requested one, whatever else the machine does
    stranger = network.start(STRANGER, [*first, RANK_PROGRAM, f"flood={text}", f"kind={kind}", f"rate={rate}",
    f"seconds={seconds}"],
                             stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert b"flooding" in stranger.stdout.readline(), "the stranger has not begun"
    return stranger


def end_flood(network, stranger):
    stranger.kill()
    stranger.stdout.close()
    stranger.wait()
    network.processes.remove(stranger)


def threads_seconds(process):
    """Seconds of processor time that each thread of the library in a process has used so far."""
    ticks = {}
    for task in os.listdir(f"/proc/{process.pid}/task"):
        with open(f"/proc/{process.pid}/task/{task}/stat", encoding="utf-8") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name.startswith("fsdp-"):
                ticks[name] = sum(map(int, rest.split()[11:13]))
    assert ticks, "no thread of the library"
    return {name: count / os.sysconf("SC_CLK_TCK") for name, count in ticks.items()}


def share(rank, seconds, before):
    """The fraction of a core that each thread has used since then."""
    now = threads_seconds(rank.process)
    return {name: (now[name] - before.get(name, 0)) / seconds for name in now}


def datagrams(limit_s):
    with Clean(4) as network, Job(network, [1, 1, 1], dict(OPTIONS, heartbeat=limit_s * 1000)) as job:
        job.await_training()
        # No edge of the tree joins nodes 1 and 2, so they reach each other only by datagrams.
        (port,) = ports(network, 1, "-uan")
        before, start = threads_seconds(job.ranks[1].process), time.monotonic()
        stranger = start_flood(network, "datagrams", [(1, port)], DATAGRAMS, SECONDS)
        job.until(lambda: stranger.poll() is not None or any(r.result or not r.open for r in job.ranks), SECONDS + 30, "the flood")
        early = [str(rank) for rank in job.ranks if rank.result or not rank.open]
        assert not early, "over during the flood:\n" + "\n".join(early)
        shares = share(job.ranks[1], time.monotonic() - start, before)
        told = json.loads(stranger.stdout.read())
        end_flood(network, stranger)
        tap.note(f"heartbeat limit {limit_s} s: {told['sent'] / told['seconds']:.0f} datagrams a second for {told['seconds']:.0f} s; "
                 "of a core: " + ", ".join(f"{name} {part:.3f}" for name, part in shares.items()))
        assert sum(shares.values()) < MOST_SHARE, f"the library's threads took {shares} of a core"
        stranger = start_flood(network, "datagrams", [(1, port)], DATAGRAMS, 60)
        network.cut(2)
        cut = time.monotonic()
        try:
            job.until(lambda: all(r.first("failed_at") or not r.open for r in job.ranks), limit_s + 15, "the cut")
        finally:
            network.heal(2)
        for rank in job.collect(40):
            result = rank.result
            assert result and result["status"] == "FSDP_PEER_FAILED" and result["blamed"] == -1, str(rank)
            assert "no contact between" in result["text"] and "(node 2)" in result["text"], str(rank)
            assert result["failed_at"] - cut < jobs.allowed(limit_s + 2), f"named after {result['failed_at'] - cut} s: {rank}"
            check_levels(result)
        end_flood(network, stranger)


class Gate:
    """Holds a process up before it begins."""

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self.folder.name, "gate")
        os.mkfifo(self.path)
        return self

    def __exit__(self, *_):
        self.folder.cleanup()

    def command(self):
        return ["sh", "-c", 'read -r open < "$0" && exec "$@"', self.path]

    def open(self):
        with open(self.path, "w", encoding="utf-8") as file:
            file.write("open\n")


def forming(which):
    """Ranks 0 and 1 wait for rank 2, with their ports open. which: of the ports of rank 0, to which strangers connect."""
    with Clean(4) as network, Gate() as gate:
        for node in (1, 2):
            network.lengthen(node, DISTANCE_MS)
        with Job(network, [1, 1, 1], dict(OPTIONS, steps=3, pace=0), under={2: gate.command()}) as job:
            def found():
                streams, udp = ports(network, 0, "-tln"), ports(network, 0, "-uan")
                kinds = {"rendezvous": {job.port}, "leader": streams & udp, "messages": streams - udp - {job.port}}
                return streams and udp and len(streams) == 3 and kinds[which]
            job.until(found, 20, "the ports of rank 0")
            stranger = start_flood(network, "connections", [(0, port) for port in found()], CONNECTIONS, 120)
            job.until(lambda: strangers(network, 0, found()) >= 100, 20, "the strangers' connections")
            start = time.monotonic()
            gate.open()
            job.await_results(100)
            took = time.monotonic() - start
            for rank in job.collect(20):
                assert rank.result and rank.result["status"] == "FSDP_OK", str(rank)
                check_levels(rank.result)
            end_flood(network, stranger)
            tap.note(f"{CONNECTIONS} connections a second to the {which} port of rank 0: the job formed and ended within {took:.1f} s")


tap.run([(f"datagrams of strangers, heartbeat limit {limit} s", lambda limit=limit: datagrams(limit)) for limit in (2, 8)] +
        [(f"connections of strangers to the {which} port while the job forms", lambda which=which: forming(which))
         for which in (("leader", "rendezvous", "messages") if tap.MANY else ("leader",))])
