#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libfsdp.torch.shard: modules of every shape, and steps as torch's users write them, train as they do by torch alone.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_shard.py [--mode mapped|copied|debug] [WORD...]

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test Anything
Protocol.
"""

import sys
import threading
import time

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from torch_check import MODES, Report, compare, difference, on_ranks, read_options, train_sharded

import libfsdp as fsdp

WIDTH, BATCH, RATE = 8, 4, 1e-2


def data_of(step, rank):
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


class Box:
    """An output that no walk over containers looks into."""

    def __init__(self, h):
        self.h = h


CONTAINERS = {
    "tensor": (lambda h: h, lambda value: value),
    "dict": (lambda h: {"h": h}, lambda value: value["h"]),
    "list": (lambda h: [h], lambda value: value[0]),
    "nested tuple": (lambda h: ((h, 1), None), lambda value: value[0][0]),
    "object": (Box, lambda value: value.h),
}


class Block(nn.Module):
    def __init__(self, container="tensor", recomputes=None):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.put, self.get = CONTAINERS[container]
        self.recomputes = recomputes  # None, or use_reentrant of a checkpoint

    def math(self, h):
        return h + self.down(torch.tanh(self.up(h)))

    def forward(self, value):
        h = self.get(value)
        return self.put(self.math(h) if self.recomputes is None else checkpoint(self.math, h, use_reentrant=self.recomputes))


class Stack(nn.Module):
    """order: of the layers; recomputes: None, or use_reentrant of a checkpoint around each layer."""

    def __init__(self, count=5, container="tensor", order=None, recomputes=None, inner=None, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Block(container, inner) for _ in range(count))
        self.put, self.get = CONTAINERS[container]
        self.order, self.recomputes = order or range(count), recomputes
        if tied:
            self.head.weight = self.first.weight

    def forward(self, x):
        value = self.put(self.first(x))
        for index in self.order:
            layer = self.layers[index]
            value = layer(value) if self.recomputes is None else checkpoint(layer, value, use_reentrant=self.recomputes)
        return self.head(self.norm(self.get(value)))


class Dropped(Stack):
    """Layers that a step leaves out."""

    step = 0

    def forward(self, x):
        x = self.first(x)
        for index, layer in enumerate(self.layers):
            if (self.step + index) % 3:
                x = layer(x)
        return self.head(self.norm(x))


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = (nn.ModuleList(Block() for _ in range(3)) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def encode(self, x):
        for layer in self.left:
            x = layer(x)
        return self.norm(x)

    def forward(self, x):
        y = x
        for layer in self.right:
            y = layer(y)
        return self.encode(x) * y


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.policy, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.policy(h), self.value(h)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            y = layer(x)
            y += 0.5
            x = y.mul_(0.9)
        return self.last(x)


class Borrows(nn.Module):
    """Weights of layers, used outside of them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return linear(x, self.layers[0].weight) + self.layers[2].bias


class Twice(nn.Module):
    """A layer whose gradients come in two parts: by itself, and from a checkpoint that runs a backward pass of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = checkpoint(self.layers[0], self.layers[1](x), use_reentrant=True)
        x = self.layers[0](self.layers[2](x))
        return checkpoint(self.layers[2], x, use_reentrant=True)


class Functional(nn.Module):
    """Its children are used by functions, and never called."""

    def __init__(self):
        super().__init__()
        for number in range(6):
            self.add_module(f"linear{number}", nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        for linear in self.children():
            x = torch.tanh(nn.functional.linear(x, linear.weight, linear.bias))
        return x


def frozen():
    module = Stack()
    for part in (module.first, module.layers[1], module.layers[3].up):
        part.requires_grad_(False)
    return module


def mixed():
    """bfloat16 layers between fp32 ones."""

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH).to(torch.bfloat16)

        def forward(self, x):
            return x + self.inner(x.bfloat16()).float()

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Cast(), nn.Tanh(), Cast(), nn.Linear(WIDTH, WIDTH))


# -- steps ------------------------------------------------------------------------------------------------------------


def loss_of(module, x):
    found = module(x)
    return (found[0] if isinstance(found, tuple) else found).pow(2).mean()


def one(module, step, rank):
    module.step = step
    loss = loss_of(module, data_of(step, rank))
    loss.backward()
    return loss.detach()


def several_backwards(module, step, rank):
    total = 0.0
    for part in range(3):
        loss = loss_of(module, data_of(step, rank) + part) / 3
        loss.backward()
        total += loss.item()
    return total


def two_forwards_one_backward(module, step, rank):
    x = data_of(step, rank)
    loss = (loss_of(module, x) - loss_of(module, -x)).pow(2)
    loss.backward()
    return loss.detach()


def two_forwards_two_backwards(module, step, rank):
    first, second = loss_of(module, data_of(step, rank)), loss_of(module, -data_of(step, rank))
    first.backward()
    second.backward()
    return (first + second).detach()


def retained(module, step, rank):
    loss = loss_of(module, data_of(step, rank))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def penalty(module, step, rank):
    x = data_of(step, rank).requires_grad_()
    y = module(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.pow(2).mean() + (grad.norm() - 1).pow(2)
    loss.backward()
    return loss.detach()


def grads_of_inputs(module, step, rank):
    x = data_of(step, rank).requires_grad_()
    (grad,) = torch.autograd.grad(module(x).sum(), x)
    loss = loss_of(module, x.detach())
    loss.backward()
    return (loss + grad.sum()).detach()


def grads_of_params(module, step, rank):
    """torch.autograd.grad hands gradients to the program, and none to libfsdp."""
    loss = loss_of(module, data_of(step, rank))
    grads = torch.autograd.grad(loss, [param for param in module.parameters() if param.requires_grad])
    one(module, step, rank)
    return sum(grad.sum() for grad in grads).detach()


def looked_at(module, step, rank):
    with torch.no_grad():
        seen = module(data_of(step, rank)).sum()
    loss = loss_of(module, data_of(step, rank))
    with torch.no_grad():
        seen += module(data_of(step, rank)).sum()
    loss.backward()
    return (loss + seen).detach()


def parts_alone(module, step, rank):
    x = data_of(step, rank)
    loss = module.encode(x).pow(2).mean() + module.norm(module.right[1](x)).mean()
    loss.backward()
    return loss.detach()


CASES = {
    "children that are not called": (Functional, one),
    **{f"layers that give and take: {kind}": (lambda kind=kind: Stack(container=kind), one) for kind in CONTAINERS},
    "a tied head": (lambda: Stack(tied=True), one),
    "a checkpoint in each layer": (lambda: Stack(inner=False), one),
    "a reentrant checkpoint in each layer": (lambda: Stack(inner=True), one),
    "a checkpoint in each layer, dicts": (lambda: Stack(inner=False, container="dict"), one),
    "a checkpoint in each layer, objects": (lambda: Stack(inner=False, container="object"), one),
    "a checkpoint around each layer": (lambda: Stack(recomputes=False), one),
    "a reentrant checkpoint around each layer": (lambda: Stack(recomputes=True), one),
    "layers inside and outside of a reentrant checkpoint": (Twice, one),
    "layers in reverse": (lambda: Stack(order=[4, 3, 2, 1, 0]), one),
    "a layer that is not used": (lambda: Stack(8, order=[0, 1, 2, 3, 4, 5, 7]), one),
    "layers that are used twice": (lambda: Stack(order=[0, 1, 1, 2, 0, 3, 4]), one),
    "layers that some steps leave out": (Dropped, one),
    "an output that the loss does not use": (Heads, one),
    "two towers": (Towers, one),
    "operations in place": (InPlace, one),
    "weights of a layer outside of it": (Borrows, one),
    "frozen parameters": (frozen, one),
    "dtypes side by side": (mixed, one),
    "several backward passes": (Stack, several_backwards),
    "several backward passes, recomputed": (lambda: Stack(recomputes=True), several_backwards),
    "two forwards, one backward": (Stack, two_forwards_one_backward),
    "two forwards, two backwards": (Stack, two_forwards_two_backwards),
    "retain_graph": (Stack, retained),
    "a gradient penalty": (Stack, penalty),
    "autograd.grad of inputs": (Stack, grads_of_inputs),
    "autograd.grad of parameters": (Stack, grads_of_params),
    "forwards without gradients between": (Stack, looked_at),
    "parts of the module alone": (Towers, parts_alone),
}


# -- what a comparison does not show ----------------------------------------------------------------------------------


class Exchange(torch.autograd.Function):
    """An all-to-all: each rank waits for the other one, forward and backward."""

    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        barrier.wait(20)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.barrier.wait(20)
        return grad.clone(), None


class Experts(nn.Module):
    """Expert layers behind exchanges. Rank 1 computes the last ones, and its loss does not use them."""

    def __init__(self, barrier):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(10))
        self.barrier = barrier

    def forward(self, x, rank):
        for index, layer in enumerate(self.layers):
            y = torch.tanh(layer(x))
            x = y.detach() + x if rank == 1 and index >= 5 else y + x
            x = Exchange.apply(x, self.barrier)
        return x


def train_with_exchanges(mode, kind, late_seconds=0):
    """Three steps of a module whose ranks wait for each other; rank 0 is late with its backward passes."""
    barrier = threading.Barrier(2)

    def rank(context, shard):
        module = kind(barrier)
        sharded = shard(module)
        for step in range(3):
            loss = module(data_of(step, context.rank), context.rank).pow(2).mean()
            if context.rank == 0:
                time.sleep(late_seconds)
            loss.backward()
            sharded.step(RATE)
        return True

    return all(on_ranks(2, mode, rank))


def waits_for_no_peer(mode):
    """A rank that is ahead with its gradients goes on to where the other one waits for it."""
    return train_with_exchanges(mode, Experts)


class Unused(nn.Module):
    """Rank 0 leaves layers out, and is late; the other one waits for it in an exchange between the first layers."""

    def __init__(self, barrier):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(10))
        self.barrier = barrier

    def forward(self, x, rank):
        x = torch.tanh(self.layers[0](x))
        x = Exchange.apply(x, self.barrier)
        for layer in self.layers[8:] if rank == 0 else self.layers[1:]:
            x = x + torch.tanh(layer(x))
        return x


def waits_for_no_peer_with_layers_that_are_not_used(mode):
    """A layer without gradients is reported without a wait, too."""
    return train_with_exchanges(mode, Unused, late_seconds=1)


def agrees_on_late_gradients_of_one_group(mode):
    """A gradient that comes when its layer was not used in a forward pass, on one rank alone."""

    def rank(context, shard):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        sharded = shard(module, layers=[])
        if context.rank == 0 and not sharded.hides_weights:
            module[0].weight.pow(2).sum().backward()
        else:
            module(data_of(0, context.rank)).pow(2).mean().backward()
        sharded.step(RATE)
        return sharded.full_state_dict()["0.weight"]

    found = on_ranks(2, mode, rank)
    return torch.equal(*found) or "ranks have other weights"


def adopts_order(mode):
    """Ranks that have seen the groups in another order reduce them in it from the next step on."""

    def rank(context, shard):
        module = Stack(order=[4, 3, 2, 1, 0])
        sharded = shard(module)
        orders = []
        for step in range(2):
            orders.append([layer.name for layer in sharded.passes.order])
            one(module, step, context.rank)
            sharded.step(RATE)
        return orders

    before, after = on_ranks(2, mode, rank)[0]
    layers = [f"layers.{index}" for index in range(5)]
    return (before == [*reversed(layers), "root"] and after == [*layers, "root"]) or f"{before}, then {after}"


def keeps_order_that_one_rank_saw(mode):
    def rank(context, shard):
        module = Stack(order=[4, 3, 2, 1, 0] if context.rank else None)
        sharded = shard(module)
        for step in range(2):
            one(module, step, context.rank)
            sharded.step(RATE)
        return [layer.name for layer in sharded.passes.order]

    found = on_ranks(2, mode, rank)
    return found[0] == found[1] == [*(f"layers.{index}" for index in reversed(range(5))), "root"] or str(found)


def gathers_ahead_in_the_order_of_the_last_step(mode):
    """Copied weights of the next layer are gathered while one computes; nothing is where weights do not move."""

    def rank(context, shard):
        module = Stack()
        sharded = shard(module)
        counts = []
        for step in range(3):
            one(module, step, context.rank)
            sharded.step(RATE)
            counts.append(sharded.model.stats.prefetches)
        return counts

    first, second, third = on_ranks(2, mode, rank)[0]
    if mode != "copied":
        return third == 0 or f"{third} gathers ahead"
    # Forward each of the five layers but the first; fewer of them backward, where buffers still have the last ones.
    return third - second == second - first >= 4 or f"gathers ahead by then: {first}, {second}, {third}"


def reduces_nothing_without_gradients(mode):
    def rank(context, shard):
        module = Stack()
        sharded = shard(module)
        x = data_of(0, 0).requires_grad_()
        torch.autograd.grad(module(x).sum(), x)
        before = sharded.model.stats.reduces
        one(module, 0, context.rank)
        after = sharded.model.stats.reduces
        sharded.step(RATE)
        return before, after, sharded.model.stats.reduces

    found = on_ranks(2, mode, rank)[0]
    return found == (0, 6, 6) or f"reduces before, after, at the end: {found}"


def in_bf16(module, step, rank):
    loss = loss_of(module, data_of(step, rank).bfloat16())
    loss.backward()
    return loss.detach()


def keeps_main_weights_and_states_in_fewer_bytes(mode):
    """In two halves every bit is that of fp32; rounded, or with states of 8 bits, a module trains nearly alike."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, WIDTH)).bfloat16()
    losses, weights = train_sharded(module, in_bf16, 4, RATE, mode, ranks=2)
    split, rounded, codes = (
        {"main_storage": fsdp.MainStorage.SPLIT16},
        {"main_storage": fsdp.MainStorage.NONE, "rounding_seed": 1},
        {"optimizer": fsdp.Optimizer.ADAMW_8BIT},
    )
    for options, limit in ((split, 0.0), (rounded, 0.05), (codes, 0.05), ({**split, **codes}, 0.05)):
        found, values = train_sharded(module, in_bf16, 4, RATE, mode, ranks=2, **options)
        by_loss, by_weight = difference(found, losses), difference(values.values(), weights.values())
        if by_loss > limit or by_weight > limit:
            return f"{options}: losses differ by {by_loss:.1e}, weights by {by_weight:.1e}"
    return True


def main():
    options, report = read_options(), Report()
    others = [waits_for_no_peer, waits_for_no_peer_with_layers_that_are_not_used, agrees_on_late_gradients_of_one_group,
              adopts_order, keeps_order_that_one_rank_saw, reduces_nothing_without_gradients, gathers_ahead_in_the_order_of_the_last_step,
              keeps_main_weights_and_states_in_fewer_bytes]
    for mode in options.modes:
        for name, (make, step_of) in CASES.items():
            for ranks in (1, 2) if mode == "copied" else (2,):
                if all(word in name for word in options.words):
                    wrong = compare(make(), step_of, 4, RATE, mode, ranks=ranks, epsilon=1e-4)
                    report.case(f"{name} ({mode}, {ranks} rank{'s' if ranks > 1 else ''})", not wrong, wrong)
        for check in others:
            name = check.__name__.replace("_", " ")
            if all(word in name for word in options.words):
                report.run(f"{name} ({mode})", lambda check=check, mode=mode: check(mode))
    strategies = [fsdp.Strategy.NO_SHARD, fsdp.Strategy.OPTIM, fsdp.Strategy.OPTIM_GRADS]
    for strategy in [] if options.words else strategies:
        for step_of in (one, several_backwards):
            wrong = compare(Stack(), step_of, 4, RATE, "mapped", ranks=2, epsilon=1e-4, strategy=strategy)
            report.case(f"strategy {strategy.name}, {step_of.__name__}", not wrong, wrong)
    for mode in [] if options.words else MODES:  # a layer's gradients do not fit at once
        for name, module in (("layers", Stack()), ("layers that some steps leave out", Dropped())):
            wrong = compare(module, several_backwards, 4, RATE, mode, ranks=2, epsilon=1e-4, max_pending_bytes=4096)
            report.case(f"max_pending_bytes, {name} ({mode})", not wrong, wrong)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
