#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which transport carries messages between hosts. Whole contexts decide it on two hosts with or without RDMA devices.
The devices are a directory in place of the kernel's, and a libucp that says it uses them (fake_ucp.c). usage:
choice_test.py RANK_PROGRAM FAKE_UCP"""
import os
import subprocess
import sys
import tempfile

import nodes
import tap
from job import Clean, Job, on_one_process

OWN_FOLDER = tempfile.TemporaryDirectory()
MISSING = OWN_FOLDER.name + "/libucp.so"
FAKE_UCP = os.path.realpath(sys.argv[2])
OPTIONS = {"replicate": 3, "shard": 1, "steps": 2, "microbatches": 1, "timeout": 20_000, "heartbeat": 15_000}
RANKS_OF_NODES = [2, 1]
ALL = "rc_mlx5/mlx5_0:1 dc_mlx5/mlx5_0:1 tcp/eth0 self/memory cuda_copy/cuda"
FORCED = b"fake libucp: UCX_TLS=rc,dc,self,cuda: rc_mlx5/mlx5_0:1 dc_mlx5/mlx5_0:1 self/memory cuda_copy/cuda\n"

# The mount namespace keeps the devices of the network, because UCX looks for them.
WITH_DEVICE = ["unshare", "--mount", "sh", "-c", "kept=$(mktemp -d) && mount --bind /sys/class/net $kept && mount -t tmpfs none /sys/class && "
               "mkdir -p /sys/class/net /sys/class/infiniband/mlx5_0 && mount --move $kept /sys/class/net && rmdir $kept && "
               "exec \"$@\"", "sh"]


def check_device(network):
    done = subprocess.run(["ip", "netns", "exec", network.name(0), *WITH_DEVICE, "test", "-d", "/sys/class/net/eth0"],
                          capture_output=True, text=True)
    if done.returncode:
        raise nodes.Unable(f"cannot show an RDMA device: {done.stderr.strip()}")


def run(network, wanted, environment=None, special=None, without=()):
    """The ranks of a job; special: variables of single ranks. without: ranks whose hosts have no device."""
    common = {"FSDP_NET": wanted, "FSDP_LOG": "info", "FSDP_UCX_LIBRARY": FAKE_UCP, "FAKE_UCP_DEVICES": ALL, **(environment or {})}
    devices = {rank: WITH_DEVICE for rank in range(3) if rank not in without}
    variables = {rank: {**common, **(special or {}).get(rank, {})} for rank in range(3)}
    with Job(network, RANKS_OF_NODES, OPTIONS, environments=variables, under=devices) as job:
        return job.collect(60)


def check_line(ranks, words):
    """All of them train to the same bits, and say in one line of FSDP_LOG_INFO what carries their messages, and why."""
    for rank in ranks:
        assert rank.result and rank.result["status"] == "FSDP_OK", str(rank)
        assert rank.result["weights"] == expected[0]["weights"], f"other weights: {rank}"
        lines = [line["log"] for line in rank.lines if "messages between hosts" in line.get("log", "") and line["level"] == 3]
        assert len(lines) == 1 and all(word in lines[0] for word in words), f"{words} in {lines} of {rank}"


def check_refusal(ranks, status, blamed, words):
    for rank in ranks:
        result = rank.result
        assert result and result["status"] == status and result["blamed"] == blamed, str(rank)
        assert all(word in result["text"] for word in words), f"{words}: {rank}"


BY_UCX, BY_TCP = "messages between hosts by UCX", "messages between hosts over TCP"


def all_have_devices(network):
    ranks = run(network, "auto")
    check_line(ranks, [BY_UCX, "all have RDMA (FSDP_NET=tcp for TCP)"])
    for rank in ranks:
        assert FORCED in rank.errors, f"not guarded: {rank}"


def is_tcp(network, rank, why, **settings):
    ranks = run(network, "auto", **settings)
    check_line(ranks, [BY_TCP, f"rank {rank} (", "has no RDMA for UCX", why, "(FSDP_NET=ucx to insist)"])
    return ranks


def one_has_none(network):
    for lacking in (0, 1):
        hosts = [[0, 1], [2]][lacking]
        ranks = is_tcp(network, hosts[0], "no RDMA device in /sys/class/infiniband", without=hosts)
        for rank in ranks:
            assert (b"fake libucp: opened" in rank.errors) == (rank.number not in hosts), f"opened for nothing, or not: {rank}"


def other_versions(network):
    for version in ("2.0.0", "1.12.1"):
        is_tcp(network, 2, f"is version {version}; this library was built with", special={2: {"FAKE_UCP_VERSION": version}})


def library_is_missing(network):
    is_tcp(network, 2, MISSING, special={2: {"FSDP_UCX_LIBRARY": MISSING}})


def device_is_of_no_use(network):
    is_tcp(network, 0, "reaches no other host without TCP", environment={"FAKE_UCP_DEVICES": "tcp/eth0 self/memory"})


def trust_in_tcp(network):
    """UCX's TCP may be trusted, but auto takes the library's TCP all the same."""
    trusted = {"FSDP_UCX_TCP": "trusted"}
    for rank in run(network, "auto", environment=trusted):
        assert FORCED in rank.errors, f"not guarded: {rank}"
    is_tcp(network, 2, "no RDMA device", environment=trusted, without=[2])
    is_tcp(network, 0, "may use TCP here", environment=dict(trusted, UCX_TLS="rc,tcp,self"))


def sums_are_asked_for(network):
    is_tcp(network, 0, "UCX has no FSDP_NET_CHECKSUM", environment={"FSDP_NET_CHECKSUM": "crc32c"})


def tcp_is_asked_for(network):
    ranks = run(network, "tcp")
    check_line(ranks, [BY_TCP, "(FSDP_NET=tcp)"])
    for rank in ranks:
        assert b"fake libucp" not in rank.errors, f"opened for nothing: {rank}"


def ucx_is_asked_for(network):
    check_line(run(network, "ucx"), [BY_UCX, "(FSDP_NET=ucx)"])
    for special, why in ({"FAKE_UCP_VERSION": "1.12.1"}, "is version 1.12.1"), ({"FSDP_UCX_LIBRARY": MISSING}, MISSING):
        ranks = run(network, "ucx", special={2: special})
        check_refusal(ranks, "FSDP_UNSUPPORTED", 2, ["rank 2 (", "as FSDP_NET=ucx asks", why])


def ucx_over_tcp(network):
    """UCX may use TCP only if every rank says that the network is trusted."""
    everywhere = dict(without=[0, 1, 2], environment={"FAKE_UCP_DEVICES": "tcp/eth0 self/memory"})
    check_refusal(run(network, "ucx", **everywhere), "FSDP_UNSUPPORTED", 0, ["may use TCP here", "set FSDP_UCX_TCP=trusted on every rank"])
    some = {rank: {"FSDP_UCX_TCP": "trusted"} for rank in (0, 1)}
    check_refusal(run(network, "ucx", special=some, **everywhere), "FSDP_UNSUPPORTED", 2, ["rank 2 (", "may use TCP here"])
    some[2] = some[0]
    check_line(run(network, "ucx", special=some, **everywhere), [BY_UCX, "(FSDP_NET=ucx)"])


def case(check):
    def run_case():
        global expected
        with Clean(2) as network:
            check_device(network)
            expected = expected or on_one_process(3, OPTIONS)
            check(network)
    return check.__name__.replace("_", " "), run_case


expected = None
tap.run([case(check) for check in (all_have_devices, one_has_none, other_versions, library_is_missing, device_is_of_no_use, trust_in_tcp,
                                   sums_are_asked_for, tcp_is_asked_for, ucx_is_asked_for, ucx_over_tcp)])
