#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libfsdp.torch.shard with experts on meshes of their own: they train as one torch module that has all experts.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_experts.py [--mode mapped|copied|debug] [WORD...]

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test Anything
Protocol.
"""

import copy
import sys
import tempfile

import torch
from torch import nn
from torch_check import Report, difference, message_of, on_ranks, read_options, train_alone

WIDTH, BATCH, RATE, STEPS, RANKS, HALVES = 8, 4, 1e-2, 4, 4, 2


class Named(nn.ModuleDict):
    """Experts under their numbers, which a rank keeps when it drops the others."""

    def __init__(self):
        super().__init__({str(number): nn.Linear(WIDTH, WIDTH) for number in range(HALVES)})

    def keep(self, number):
        del self[str(1 - number)]

    def forward(self, x, number):
        return self[str(number)](x)


class Stack(nn.Module):
    """Experts in one parameter, of which a rank keeps a box."""

    def __init__(self):
        super().__init__()
        self.weight, self.first = nn.Parameter(torch.randn(HALVES, WIDTH, WIDTH) / WIDTH), 0

    def keep(self, number):
        self.weight, self.first = nn.Parameter(self.weight.detach()[number : number + 1].clone()), number

    def forward(self, x, number):
        return x @ self.weight[number - self.first]


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.experts = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, number):
        for dense, experts in zip(self.dense, self.experts):
            x = x + torch.tanh(dense(x))
            x = x if number is None else x + experts(x, number)
        return self.head(x)


def step_of(module, step, rank, idle=()):
    """Rank r has data for the experts r % 2; in the steps that `idle` names the first experts have none."""
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    number = None if step in idle and rank % HALVES == 0 else rank % HALVES
    loss = (module(x, number) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    return loss.detach()


def boxes(net):
    """The boxes of stacks: this rank's part of the tensor of all experts."""
    firsts = {experts.weight: experts.first for experts in net.experts if isinstance(experts, Stack)}

    def box(name, param):
        return ((HALVES, WIDTH, WIDTH), (firsts[param], 0, 0)) if param in firsts else None

    return box


def shard_half(net, context, shard, **options):
    """Shards a module that keeps the experts of this rank, with their mesh."""
    half = context.rank % HALVES
    mesh = context.create_mesh(ranks=range(half, context.world_size, HALVES))
    for experts in net.experts:
        experts.keep(half)
    return shard(
        net,
        layers=[*net.dense, *net.experts],
        boxes=boxes(net),
        row_dimensions=lambda name, param: 2 if param.dim() == 3 else 1,
        group_options=lambda name, layer: {"mesh": mesh} if layer in list(net.experts) else {},
        **options,
    )


def train_half(context, shard, whole, idle, folder=None):
    net, losses = copy.deepcopy(whole), []
    sharded = shard_half(net, context, shard)
    for step in range(STEPS):
        losses.append(float(step_of(net, step, context.rank, idle)))
        sharded.step(RATE)
    if folder:
        sharded.save(folder)
    return losses, sharded.full_state_dict()


def find_difference(found, wanted):
    """The largest difference of the ranks' weights; a rank of a stack has a part of a parameter."""
    worst = 0.0
    for rank, state in enumerate(found):
        for name, value in state.items():
            whole = wanted[name]
            half = rank % HALVES
            part = whole[half : half + 1] if value.shape != whole.shape else whole
            worst = max(worst, difference([value], [part]))
    return worst


def trains(kind, mode, idle=()):
    whole = Net(kind)
    alone, wanted = train_alone(whole, lambda *what: step_of(*what, idle), STEPS, RATE, ranks=RANKS)
    results = on_ranks(RANKS, mode, lambda *made: train_half(*made, whole, idle))
    losses = [loss for losses in zip(*(losses for losses, _ in results)) for loss in losses]
    by_loss, by_weight = difference(losses, alone), find_difference([state for _, state in results], wanted)
    return (by_loss < 1e-5 and by_weight < 1e-4) or f"losses differ by {by_loss:.1e}, weights by {by_weight:.1e}"


def clips(mode):
    """The norm is that of the module with all experts, the same on every rank."""
    whole = Net(Named)
    alone = copy.deepcopy(whole)
    for rank in range(RANKS):
        step_of(alone, 0, rank)
    norm = sum(float((param.grad / RANKS).square().sum()) for param in alone.parameters()) ** 0.5

    def rank(context, shard):
        net = copy.deepcopy(whole)
        sharded = shard_half(net, context, shard)
        step_of(net, 0, context.rank)
        return sharded.step(RATE, max_norm=norm / 2)

    found = on_ranks(RANKS, mode, rank)
    return (len(set(found)) == 1 and abs(found[0] - norm) < 1e-5 * norm) or f"norms {found}, not {norm}"


def is_loaded(kind, mode, ranks):
    """What four ranks have saved, other ranks load, each with all experts."""
    whole = Net(kind)
    with tempfile.TemporaryDirectory() as folder:
        saved = on_ranks(RANKS, mode, lambda *made: train_half(*made, whole, (), folder))

        def rank(context, shard):
            sharded = shard(copy.deepcopy(whole), row_dimensions=lambda name, param: 2 if param.dim() == 3 else 1)
            sharded.load(folder)
            return sharded.full_state_dict()

        loaded = on_ranks(ranks, mode, rank)[0]
    worst = find_difference([state for _, state in saved], loaded)
    return worst == 0 or f"weights differ by {worst:.1e}"


def refuses_stacks_without_boxes(mode):
    whole = Net(Stack)

    def rank(context, shard):
        def shard_without(*net, boxes, **options):
            return shard(*net, **options)

        return message_of(lambda: shard_half(copy.deepcopy(whole), context, shard_without))

    found = on_ranks(RANKS, mode, rank)
    words = ("Mismatch", "'experts.0.weight'", "no box (global_shape)")
    return all(word in message for message in found for word in words) or str(found)


def main():
    options, report = read_options(), Report()
    cases = []
    for mode in options.modes:
        for kind in (Named, Stack):
            name = f"{mode}: {kind.__name__.lower()} experts"
            cases.append((f"{name} train as one module", lambda kind=kind, mode=mode: trains(kind, mode)))
            for ranks in (1, 3):
                cases.append((f"{name} are loaded by {ranks}", lambda k=kind, m=mode, n=ranks: is_loaded(k, m, n)))
        name = f"{mode}: named experts without data keep their weights"
        cases.append((name, lambda mode=mode: trains(Named, mode, (1, 3))))
        cases.append((f"{mode}: one norm of all experts clips", lambda mode=mode: clips(mode)))
    cases.append(("stacks without boxes are refused", lambda: refuses_stacks_without_boxes("mapped")))
    for name, case in cases:
        if all(word in name for word in options.words):
            report.run(name, case)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
