# SPDX-License-Identifier: Apache-2.0
"""Nodes for tests: network namespaces of this machine, each with an address of its own, joined by a bridge that lies in a
namespace of its own too, so that nothing of the machine's network is touched. Needs root and `ip` (iproute2).

A cut takes a node's port off the bridge: packets vanish, and neither end is told. Healing puts it back.
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time


def missing():
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    if not shutil.which("ip"):
        return "needs ip (package iproute2)"
    name = f"fsdp{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "this machine does not allow network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def _ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


class Unable(Exception):
    """The kernel lacks what a case needs."""


class Nodes:
    """with Nodes(2) as nodes: nodes.start(1, ["program"], {"RANK": "1"})"""

    def __init__(self, count):
        self.count = count
        self.prefix = f"fsdp{os.getpid()}"
        self.hub = f"{self.prefix}-hub"
        self.processes = []
        handle, self.secret = tempfile.mkstemp(prefix="fsdp-secret-")
        os.write(handle, os.urandom(16).hex().encode())
        os.close(handle)

    def name(self, node):
        return f"{self.prefix}-{node}"

    def address(self, node):
        return f"10.77.0.{node + 1}"

    def __enter__(self):
        try:
            _ip("netns", "add", self.hub)
            _ip("-n", self.hub, "link", "add", "br0", "type", "bridge")
            _ip("-n", self.hub, "link", "set", "br0", "up")
            for node in range(self.count):
                self._add(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, node):
        name = self.name(node)
        _ip("netns", "add", name)
        _ip("-n", self.hub, "link", "add", f"port{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", self.hub, "link", "set", f"port{node}", "master", "br0", "up")
        self._bring_up(node)
        _ip("-n", name, "link", "set", "lo", "up")

    def _bring_up(self, node):
        """The kernel marks a device as running some time after the device was set up. Until then UCX refuses it."""
        name = self.name(node)
        _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        end = time.monotonic() + 10
        while not {"UP", "UNKNOWN"} & set(_ip("-n", name, "-o", "link", "show", "dev", "eth0").split()):
            if time.monotonic() > end:
                raise RuntimeError(f"eth0 of node {node} is not running 10 s after it was set up")
            time.sleep(0.01)

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()
        for name in [self.name(node) for node in range(self.count)] + [self.hub]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        if os.path.exists(self.secret):
            os.unlink(self.secret)

    def cut(self, node):
        _ip("-n", self.hub, "link", "set", f"port{node}", "nomaster")

    def heal(self, node):
        _ip("-n", self.hub, "link", "set", f"port{node}", "master", "br0")

    def slow_down(self, rate):
        """Makes all that nodes send wait in a queue of a third of a second; a full queue drops packets."""
        for node in range(self.count):
            if not shutil.which("tc"):
                raise Unable("needs tc (package iproute2)")
            queue = ["tbf", "rate", rate, "burst", "32kb", "latency", "300ms"]
            done = subprocess.run(["tc", "-n", self.name(node), "qdisc", "add", "dev", "eth0", "root", *queue],
                                  capture_output=True, text=True)
            if done.returncode:
                raise Unable(f"tc {' '.join(queue)}: {done.stderr.strip()}")

    def lengthen(self, node, milliseconds):
        """Makes the node's cable long: what it sends and what it gets arrives so much later. Call it before anything
        has begun there."""
        name = self.name(node)
        _ip("-n", self.hub, "link", "del", f"port{node}")  # removes the other end, too
        cable = subprocess.Popen([sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "delay.py"), self.hub,
                                  f"port{node}", name, "eth0", str(milliseconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE, start_new_session=True)
        self.processes.append(cable)
        if cable.stdout.readline() != b"ready\n":
            raise Unable(f"a long cable: {cable.communicate()[1].decode().strip()}")
        _ip("-n", self.hub, "link", "set", f"port{node}", "master", "br0", "up")
        self._bring_up(node)

    def start(self, node, command, environment=None, **options):
        """A process on a node, a group of its own. UCX, where FSDP_NET asks for it, uses TCP, as between machines: the
        namespaces share a kernel, and UCX would find the shared memory that machines do not have."""
        variables = dict(os.environ, FSDP_JOB_SECRET_FILE=self.secret)
        if os.environ.get("FSDP_NET") == "ucx":
            variables.update(UCX_TLS="tcp,self", UCX_NET_DEVICES="eth0", FSDP_UCX_TCP="trusted")
        variables.update(environment or {})
        process = subprocess.Popen(["ip", "netns", "exec", self.name(node), *command], env=variables, start_new_session=True,
                                   **options)
        self.processes.append(process)
        return process

    def rank_variables(self, rank, world, local_rank, local_world, port=29500):
        return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_world),
                "MASTER_ADDR": self.address(0), "MASTER_PORT": str(port)}
