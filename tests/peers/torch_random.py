#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random small modules, trained by libfsdp.torch.shard on two ranks and by torch alone: the same losses and weights.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_random.py [--seed N] [--count N] [--mode MODE]

A module has layers of random math, with outputs in dicts, lists and tuples, layers that are used twice, in another order
or not at all, checkpoints of both kinds around any of them, few buffers or many, operations in place, tied and frozen parameters; a step has a random pattern of
forward and backward passes. MODE is mapped, copied or debug; default: each in turn. Needs torch; ranks are threads.
Reports in the Test Anything Protocol; a failure names the seed, with which --count 1 shows it alone.
"""

import argparse
import contextlib
import os
import random
import sys

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from torch_check import MODES, compare

WIDTH, BATCH, STEPS, RANKS, RATE, EPSILON = 6, 3, 3, 2, 0.02, 0.01
ACTIVATIONS = (torch.tanh, torch.sigmoid, torch.sin, lambda x: x.exp().clamp(max=3), nn.functional.gelu)


class Layer(nn.Module):
    """y of x, of the same shape, in a container."""

    def __init__(self, choice):
        super().__init__()
        self.container = choice.choice(("tensor", "tensor", "dict", "list", "tuple", "nested", "object"))
        self.kind = choice.choice(("linear", "gated", "norm", "deep", "bias", "matrix", "unused", "split"))
        self.activation = choice.randrange(len(ACTIVATIONS))
        self.checkpoint = choice.choice((None, None, None, False, True))
        self.in_place = choice.random() < 0.3
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=choice.random() < 0.5)
        self.norm, self.scale = nn.LayerNorm(WIDTH), nn.Parameter(torch.randn(WIDTH) / 3)
        if choice.random() < 0.3:
            for part in choice.sample([self.a, self.b, self.norm], choice.randrange(1, 4)):
                part.requires_grad_(False)

    def math(self, x):
        act = ACTIVATIONS[self.activation]
        if self.kind == "linear":
            y = act(self.a(x))
        elif self.kind == "gated":
            y = torch.sigmoid(self.a(x)) * self.b(x)
        elif self.kind == "norm":
            y = self.norm(x) * self.scale
        elif self.kind == "deep":
            y = self.b(act(self.a(self.norm(x))))
        elif self.kind == "bias":  # a branch that does not come from x
            y = x + act(self.scale).expand_as(x) * self.b.weight.sum(0)
        elif self.kind == "matrix":  # weights as values of operations
            y = x @ (self.a.weight @ self.b.weight.t()) / 4
        elif self.kind == "unused":
            self.b(x)
            y = self.a(x)
        else:
            left, right = self.a(x).chunk(2, -1)
            y = torch.cat([right, left * self.scale[: WIDTH // 2]], -1)
        if self.in_place:
            y = y + 0.1
            y.mul_(0.9).add_(x)
        return y if self.in_place else x + y / 2

    def forward(self, value):
        x = find_tensor(value)
        if self.checkpoint is not None and self.training:
            y = checkpoint(self.math, x, use_reentrant=self.checkpoint)
        else:
            y = self.math(x)
        return wrap(y, self.container)


class Box:
    def __init__(self, y):
        self.y = y


def wrap(y, container):
    return {
        "tensor": lambda: y,
        "dict": lambda: {"y": y, "name": "layer"},
        "list": lambda: [y, None],
        "tuple": lambda: (3, y),
        "nested": lambda: {"all": [(y, 1), {}]},
        "object": lambda: Box(y),
    }[container]()


def find_tensor(value):
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Box):
        return value.y
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return next((found for found in map(find_tensor, values) if found is not None), None)


class Model(nn.Module):
    def __init__(self, choice):
        super().__init__()
        count = choice.randrange(1, 6)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer(choice) for _ in range(count))
        self.norm, self.spare = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        if choice.random() < 0.3:
            self.last.weight = self.first.weight
        if choice.random() < 0.2 and count > 1:
            self.layers[-1].a.weight = self.layers[0].a.weight
        order = list(range(count))
        if choice.random() < 0.3:
            choice.shuffle(order)
        self.order = order + [choice.randrange(count) for _ in range(choice.randrange(3))]
        self.dropped = choice.randrange(count) if choice.random() < 0.4 else None  # in every other step
        self.outer = choice.choice((None, None, None, False, True))
        # a checkpoint around the layers from one on to the end, each of which may come again
        self.region = choice.choice((None, None, False, True)), choice.randrange(len(self.order))
        self.has_two_outputs = choice.random() < 0.3
        self.borrows = choice.random() < 0.2  # weights of a layer, outside of it
        self.step = 0

    def run(self, order, x):
        for index in order:
            if index == self.dropped and self.step % 2:
                continue
            layer = self.layers[index]
            if self.outer is not None and self.training and layer.container == "tensor":
                x = checkpoint(layer, x, use_reentrant=self.outer)
            else:
                x = find_tensor(layer(x))
        return x

    def forward(self, x):
        reentrant, begin = self.region
        if reentrant is None or not self.training:
            x = self.run(self.order, self.first(x))
        else:
            x = self.run(self.order[:begin], self.first(x))
            x = checkpoint(self.run, self.order[begin:], x, use_reentrant=reentrant)
        if self.borrows:
            x = x + nn.functional.linear(x, self.layers[0].b.weight)
        y = self.last(self.norm(x))
        return (y, self.spare(x)) if self.has_two_outputs else y


def loss_of(model, data):
    return find_tensor((model(data),)).pow(2).mean()


def retained(model, data):
    loss = loss_of(model, data)
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return loss


def accumulated(model, data):
    total = 0.0
    for part in range(3):
        loss = loss_of(model, data + part) / 3
        loss.backward()
        total = total + loss.detach()
    return total


def one(model, data):
    loss = loss_of(model, data)
    loss.backward()
    return loss


def offloaded(model, data):
    with save_on_cpu():
        loss = loss_of(model, data)
    loss.backward()
    return loss


def two_forwards(model, data):
    loss = loss_of(model, data) - loss_of(model, data - 1).tanh()
    loss.backward()
    return loss


def apart(model, data):
    first, second = loss_of(model, data), loss_of(model, data + 2)
    first.backward()
    second.backward()
    return first + second


def looked_at(model, data):
    with torch.no_grad():
        seen = loss_of(model, data)
    loss = loss_of(model, data)
    with torch.no_grad():
        seen += loss_of(model, data)
    loss.backward()
    return loss + seen


def inputs_alone(model, data):
    wanted = (data + 1).requires_grad_()
    (found,) = torch.autograd.grad(loss_of(model, wanted), wanted)
    loss = loss_of(model, data)
    loss.backward()
    return loss + found.sum()


def penalized(model, data):
    wanted = (data + 1).requires_grad_()
    loss = loss_of(model, wanted)
    (found,) = torch.autograd.grad(loss, wanted, create_graph=True)
    loss = loss + found.pow(2).sum()
    loss.backward()
    return loss


def a_part(model, data):
    loss = loss_of(model, data) + find_tensor((model.layers[0](data),)).mean()
    loss.backward()
    return loss


PATTERNS = (one, one, retained, offloaded, accumulated, two_forwards, apart, looked_at, inputs_alone, a_part)


def choose_pattern(choice, model):
    # autograd.grad does not go through checkpoints that run backward passes of their own.
    reentrant = True in (model.outer, model.region[0]) or any(layer.checkpoint is True for layer in model.layers)
    known = [one, accumulated, offloaded, two_forwards, apart, looked_at, a_part] if reentrant else [*PATTERNS, penalized]
    return choice.choice(known)


def data_of(step, rank):
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def try_one(seed, mode):
    """What is wrong with the module of this seed; "" if nothing."""
    torch.manual_seed(seed)
    choice = random.Random(seed)
    model = Model(choice)
    pattern = choose_pattern(choice, model)

    def step_of(model, step, rank):
        model.step = step
        return pattern(model, data_of(step, rank)).detach()

    # In evaluation and in forward passes the root, a layer, and one that is borrowed are in use at once.
    held_groups = choice.choice((3, 4, 9))
    wrong = compare(model, step_of, STEPS, RATE, mode, EPSILON, RANKS, held_groups=held_groups)
    return wrong and f"{pattern.__name__}: {wrong}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--mode", choices=MODES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    modes, failed = [options.mode] if options.mode else MODES, 0
    for seed in range(options.seed, options.seed + options.count):
        mode = modes[seed % len(modes)]
        with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):
            wrong = try_one(seed, mode)
        if wrong:
            failed += 1
            print(f"# seed {seed}, {mode}: {wrong}", flush=True)
    print(f"{'not ok' if failed else 'ok'} 1 - {options.count} random modules from seed {options.seed} on train as torch alone")
    print("1..1")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
