#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A step of a small transformer with Muon: libfsdp.torch.Muon beside FSDP2 over gloo, and beside AdamW of libfsdp.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python muon.py [--rounds N] [--steps N] [--layers N]

Each round runs each kind, on two ranks as processes with one thread each, in fp32 and with the same samples:

full_tensor  FSDP2. Each rank gets all updates whole by full_tensor(), orthogonalizes all of them and keeps its rows
dealt        FSDP2. Ranks share the matrices: gather to the owner, orthogonalize, scatter
libfsdp      libfsdp.torch.Muon
adamw        AdamW of libfsdp for all parameters

The table has medians of milliseconds on a rank. "wait" is what a rank waits for the other one: with FSDP2 in barriers
before collectives, with libfsdp the waits that it counts and the comparison of param_groups. "exchange" is the time in
collectives besides. "rest" is forward, backward, sums of gradients, AdamW and all else. By hand; needs torch 2.6.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import torch
from torch import distributed, nn

RANKS, VOCABULARY, WIDTH, LENGTH = 2, 4096, 512, 64
RATE, MOMENTUM, DECAY, OTHER_RATE = 0.02, 0.95, 0.1, 1e-3
KINDS = ("full_tensor", "dealt", "libfsdp", "adamw")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (8, -1)).transpose(0, 1) for part in self.qkv(self.norm1(x)).split(WIDTH, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(0, 1).flatten(1))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.RMSNorm(WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x))[:-1], tokens[1:])


class Shares:
    """Seconds of the step by what they were spent on."""

    def __init__(self):
        self.steps = []

    def begin(self):
        self.now = {"newton_schulz": 0.0, "exchange": 0.0, "wait": 0.0}
        self.start = time.perf_counter()

    def end(self):
        self.now["step"] = time.perf_counter() - self.start
        self.steps.append(self.now)

    @contextlib.contextmanager
    def of(self, name):
        start = time.perf_counter()
        yield
        self.now[name] += time.perf_counter() - start

    def around(self, function, name):
        """The function, timed."""

        def timed(*args, **options):
            with self.of(name):
                return function(*args, **options)

        return timed

    def medians(self):
        later = self.steps[2:]
        return {name: statistics.median(step[name] for step in later) for name in later[0]}


def train(model, step, steps, rank, shares):
    losses = []
    for number in range(steps):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(2 * number + rank))
        shares.begin()
        loss = model(tokens)
        loss.backward()
        step()
        shares.end()
        losses.append(loss.item())
    return losses


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


def orthogonalize(matrix):
    """The iteration of libfsdp.torch, so that both sides spend the same on it."""
    from libfsdp.torch.newton_schulz import orthogonalize

    orthogonalize(matrix[None], (3.4445, -4.775, 2.0315), 5, 1e-7)
    return matrix


class GatheredMuon:
    """Muon over DTensors whose rows are sharded evenly."""

    def __init__(self, params, shares):
        self.params, self.shares = params, shares
        self.buffers = [torch.zeros_like(param.to_local()) for param in params]
        costs, self.owners = [0] * RANKS, {}
        for index, param in sorted(enumerate(params), key=lambda pair: -pair[1].numel()):
            self.owners[index] = costs.index(min(costs))
            costs[self.owners[index]] += min(param.shape) ** 2 * max(param.shape)

    def updates(self):
        for param, buffer in zip(self.params, self.buffers):
            grad = param.grad.to_local()
            yield grad.lerp_(buffer.lerp_(grad, 1 - MOMENTUM), MOMENTUM)

    @torch.no_grad()
    def step(self, is_dealt):
        updates = list(self.updates())
        updates = self.by_owners(updates) if is_dealt else self.on_all(updates)
        for param, update in zip(self.params, updates):
            rows, columns = param.shape
            param.to_local().mul_(1 - RATE * DECAY).add_(update, alpha=-RATE * max(1, rows / columns) ** 0.5)

    def wait(self):
        with self.shares.of("wait"):
            distributed.barrier()

    def on_all(self, updates):
        self.wait()
        for param, update in zip(self.params, updates):
            with self.shares.of("exchange"):
                whole = type(param.data).from_local(update, param.device_mesh, param.placements).full_tensor()
            with self.shares.of("newton_schulz"):
                orthogonalize(whole)
            yield whole.chunk(RANKS)[distributed.get_rank()]

    def by_owners(self, updates):
        rank = distributed.get_rank()
        whole = {index: torch.empty(self.params[index].shape) for index in self.owners if self.owners[index] == rank}
        parts = {index: list(matrix.chunk(RANKS)) for index, matrix in whole.items()}
        self.wait()
        with self.shares.of("exchange"):
            self.all(distributed.gather, updates, parts)
        with self.shares.of("newton_schulz"):
            for matrix in whole.values():
                orthogonalize(matrix)
        self.wait()
        with self.shares.of("exchange"):
            self.all(distributed.scatter, updates, parts)
        return updates

    def all(self, move, updates, parts):
        works = [
            move(update, parts.get(index), self.owners[index], async_op=True) for index, update in enumerate(updates)
        ]
        for work in works:
            work.wait()


def as_fsdp2(kind, rank, steps, layers, shares):
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    model = Model(layers)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    matrices = [param for param in model.layers.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if not any(param is matrix for matrix in matrices)]
    muon, adamw = GatheredMuon(matrices, shares), torch.optim.AdamW(others, OTHER_RATE, weight_decay=0.0)

    def step():
        muon.step(kind == "dealt")
        adamw.step()
        model.zero_grad()

    losses = train(model, step, steps, rank, shares)
    distributed.destroy_process_group()
    return losses


# -- libfsdp ----------------------------------------------------------------------------------------------------------


def as_libfsdp(kind, rank, steps, layers, shares):
    import libfsdp as fsdp
    import libfsdp.torch

    with fsdp.Context() as context:
        model = Model(layers)
        if kind == "adamw":
            sharded = libfsdp.torch.shard(model, context, optimizer_options={"lr": OTHER_RATE})
            return train(model, sharded.step, steps, rank, shares)
        muon = libfsdp.torch.Muon(lr=RATE, momentum=MOMENTUM, weight_decay=DECAY, adamw={"lr": OTHER_RATE})
        sharded = libfsdp.torch.shard(model, context, optimizer=muon)
        watch(sharded, shares)
        return train(model, sharded.step, steps, rank, shares)


def watch(sharded, shares):
    """Times the calls of Muon's part of the step."""
    from libfsdp import matrices
    from libfsdp.torch import muon

    def exchange(function):
        def timed(*args, **options):
            before = sharded.model.stats.wait_ns
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                waited = 1e-9 * (sharded.model.stats.wait_ns - before)
                shares.now["wait"] += waited
                shares.now["exchange"] += time.perf_counter() - start - waited

        return timed

    matrices.Matrices.__init__ = exchange(matrices.Matrices.__init__)
    matrices.Matrices.__next__ = exchange(matrices.Matrices.__next__)
    muon.orthogonalize = shares.around(muon.orthogonalize, "newton_schulz")
    muon.MuonSteps.compare_groups = shares.around(muon.MuonSteps.compare_groups, "wait")


# -- all of them, in turns --------------------------------------------------------------------------------------------


def rank_main(options):
    torch.set_num_threads(1)
    shares = Shares()
    run = as_libfsdp if options.kind in ("libfsdp", "adamw") else as_fsdp2
    losses = run(options.kind, options.rank, options.steps, options.layers, shares)
    print(json.dumps(dict(losses=losses, **shares.medians())), flush=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(kind, options):
    environment = dict(os.environ, WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, __file__, "--kind", kind, "--steps", str(options.steps), "--layers", str(options.layers)]
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)),
        )
        for rank in range(RANKS)
    ]
    return [json.loads(rank.communicate()[0].strip().splitlines()[-1]) for rank in ranks]


def report(found):
    columns = ("step", "newton_schulz", "exchange", "wait")
    print(f"{'':12}" + "".join(f"{name:>15}" for name in (*columns, "rest")))
    for kind, rounds in found.items():
        ranks = [rank for each in rounds for rank in each]
        row = [1e3 * statistics.median(rank[name] for rank in ranks) for name in columns]
        print(f"{kind:12}" + "".join(f"{number:15.1f}" for number in (*row, row[0] - sum(row[1:]))))
    losses = {kind: [loss for rank in rounds[0] for loss in rank["losses"]] for kind, rounds in found.items()}
    for kind in ("dealt", "libfsdp"):
        differ = max(abs(a - b) for a, b in zip(losses["full_tensor"], losses[kind]))
        print(f"losses of {kind} and full_tensor differ by at most {differ:.1e}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--kind", choices=KINDS)
    options = parser.parse_args()
    if options.rank is not None:
        return rank_main(options)
    found = {}
    for _ in range(options.rounds):
        for kind in KINDS:
            found.setdefault(kind, []).append(launch(kind, options))
    print(f"torch {torch.__version__}, {options.layers} layers of width {WIDTH}, load {os.getloadavg()[0]:.1f}")
    report(found)


if __name__ == "__main__":
    main()
