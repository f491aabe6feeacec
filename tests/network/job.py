# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks on their own nodes: starts the rank program, reads its lines, and says what it has left behind."""
import glob
import json
import os
import selectors
import signal
import subprocess
import sys
import time

import nodes

RANK_PROGRAM = os.path.realpath(sys.argv[1])
_port = 29500


class Hang(Exception):
    pass


def fresh_port():
    global _port
    _port += 1
    return _port


def words(options):
    return [f"{name}={value}" for name, value in options.items()]


class Rank:
    def __init__(self, number, node, process):
        self.number, self.node, self.process = number, node, process
        self.lines, self.rest, self.open = [], b"", True
        self.errors = b""

    def first(self, key):
        return next((line[key] for line in self.lines if key in line), None)

    @property
    def result(self):
        """Its last line; None if it died before it wrote one."""
        return next((line for line in self.lines if "status" in line or "cases" in line), None)

    def __str__(self):
        told = {k: v for k, v in (self.result or {}).items() if k in ("status", "blamed", "text", "stage", "failed_at")}
        printed = self.errors.decode(errors="replace")
        if len(printed) > 2000:
            printed = printed[:1000] + " ... " + printed[-1000:]
        return f"rank {self.number} (node {self.node}): {told or self.lines} exit {self.process.poll()} {printed}"


class Job:
    """ranks_of_nodes: [2, 1] is two ranks on node 0 and one on node 1. special: options of single ranks; environments: variables of
    single ranks; under: commands that start single ranks."""
    worst_delay = 0.0  # the machine adds this to every time measured here

    def __init__(self, network, ranks_of_nodes, options, special=None, environment=None, environments=None, under=None):
        self.network, self.ranks = network, []
        self.place = [node for node, count in enumerate(ranks_of_nodes) for _ in range(count)]
        self.port = fresh_port()
        self.selector = selectors.DefaultSelector()
        for rank, node in enumerate(self.place):
            own = dict(options, **(special or {}).get(rank, {}))
            variables = dict(self.variables(rank, range(len(self.place)), self.port), **(environment or {}),
                             **(environments or {}).get(rank, {}))
            process = network.start(node, [*(under or {}).get(rank, []), RANK_PROGRAM, *words(own)], variables, stdin=subprocess.PIPE,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self._add(Rank(rank, node, process))

    def _add(self, rank):
        self.ranks.append(rank)
        os.set_blocking(rank.process.stdout.fileno(), False)
        os.set_blocking(rank.process.stderr.fileno(), False)
        self.selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
        self.selector.register(rank.process.stderr, selectors.EVENT_READ, None)

    def variables(self, rank, of, port):
        """The launcher's variables for a job of these ranks."""
        of = list(of)
        here = [r for r in of if self.place[r] == self.place[rank]]
        return dict(self.network.rank_variables(of.index(rank), len(of), here.index(rank), len(here), port),
                    MASTER_ADDR=self.network.address(self.place[of[0]]))

    def _hear(self, rank):
        data = rank.process.stdout.read(1 << 16)
        if not data:
            rank.open = False
            self.selector.unregister(rank.process.stdout)
            return
        *lines, rank.rest = (rank.rest + data).split(b"\n")
        rank.lines += [json.loads(line) for line in lines if line.startswith(b"{")]
        rank.errors += b"".join(line + b"\n" for line in lines if not line.startswith(b"{"))  # UCX logs to stdout

    def pump(self, seconds):
        before = time.monotonic()
        events = self.selector.select(seconds)
        if not events:
            Job.worst_delay = max(Job.worst_delay, time.monotonic() - before - seconds)
        for key, _ in events:
            if key.data:
                self._hear(key.data)
                continue
            data = key.fileobj.read(1 << 16)
            if not data:
                self.selector.unregister(key.fileobj)
            for rank in self.ranks:
                if rank.process.stderr is key.fileobj:
                    rank.errors += data or b""

    def until(self, condition, seconds, what):
        """`seconds` is enough on an idle machine; eight times as long is allowed, since the limit only finds hangs."""
        seconds *= 8
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise Hang(f"{what} took more than {seconds} s:\n" + "\n".join(map(str, self.ranks)))
            self.pump(0.01)

    def await_training(self, seconds=30):
        self.until(lambda: all(r.first("training") or r.result or not r.open for r in self.ranks), seconds, "the start")
        early = [str(r) for r in self.ranks if not r.first("training")]
        if early:
            raise AssertionError("\n".join(early))

    def await_results(self, seconds):
        """Every rank's last line, or its end."""
        self.until(lambda: all(r.result or not r.open for r in self.ranks), seconds, "the job")

    def collect(self, seconds):
        self.await_results(seconds)
        for rank in self.ranks:
            rank.process.stdin.close()
        self.until(lambda: not any(r.open for r in self.ranks), 20, "the end of the processes")
        for rank in self.ranks:
            rank.process.wait(20)
        return self.ranks

    def signal(self, rank, number):
        os.kill(self.ranks[rank].process.pid, number)
        return time.monotonic()

    def close(self):
        for rank in self.ranks:
            if rank.process.poll() is None:
                os.kill(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            for pipe in (rank.process.stdin, rank.process.stdout, rank.process.stderr):
                pipe.close()
            if rank.process in self.network.processes:
                self.network.processes.remove(rank.process)
        self.selector.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def allowed(seconds):
    """The time limit. It is longer on a machine that wakes processes late."""
    return seconds + (0 if Job.worst_delay < 0.05 else 10 * Job.worst_delay)


def on_one_process(count, options):
    """Runs the same job as threads; returns one outcome per rank."""
    done = subprocess.run([RANK_PROGRAM, *words(dict(options, threads=count))], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise AssertionError(done.stderr)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["difference"] == "", f"not what the reference computes: {result['difference']}"
    return result["ranks"]


def sockets_left(network):
    """Sockets of all nodes that belong to a process or still wait for one."""
    left = []
    for node in range(network.count):
        for kind in ("-tan", "-uan", "-xan"):
            text = subprocess.run(["ip", "netns", "exec", network.name(node), "ss", "-H", kind], capture_output=True,
                                  text=True, check=True).stdout
            left += [f"node {node}: {line}" for line in text.splitlines()
                     if not line.startswith(("TIME-WAIT", "FIN-WAIT", "LAST-ACK", "CLOSING", "SYN-RECV")) and
                     (kind != "-xan" or "@fsdp-" in line)]
    return left


def shared_memory():
    return set(glob.glob("/dev/shm/*"))


def namespaces():
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines() if line.startswith(f"fsdp{os.getpid()}-")}


class Clean:
    """with Clean(count) as network: makes nodes, and checks at the end what the job has left behind."""

    def __init__(self, count):
        self.network = nodes.Nodes(count)

    def __enter__(self):
        self.memory = shared_memory()
        return self.network.__enter__()

    def __exit__(self, kind, *rest):
        left = None
        if kind is None:
            end = time.monotonic() + 5
            while (left := sockets_left(self.network)) and time.monotonic() < end:
                time.sleep(0.1)
        self.network.__exit__(kind, *rest)
        if kind is None:
            assert not left, "sockets are left: " + "; ".join(left)
            assert not namespaces(), f"namespaces are left: {namespaces()}"
            named = {path for path in shared_memory() - self.memory if "fsdp" in path or "ucx" in path}
            assert not named, f"shared memory is left: {named}"


def check_levels(result):
    """What a rank held before its first job and after each job. Some of its mappings stay: UCX's library and freed
    heaps."""
    after, before = result["after"], result["before"]
    assert after["threads"] == before["threads"] == 1, f"threads {before['threads']} -> {after['threads']}"
    assert sorted(after["files"]) == sorted(before["files"]), f"descriptors {before['files']} -> {after['files']}"
    if "after_again" in result:
        again = result["after_again"]
        assert again["threads"] == 1, f"threads after the second job: {again['threads']}"
        assert sorted(again["files"]) == sorted(before["files"]), f"descriptors {before['files']} -> {again['files']}"
        assert again["mappings"] <= after["mappings"] + 16, f"mappings {after['mappings']} -> {again['mappings']}"
