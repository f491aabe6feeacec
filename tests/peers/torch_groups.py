#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The groups that libfsdp.torch.shard makes of a module, and the options of groups and parameters: each module trains
sharded as it does alone.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_groups.py [--mode mapped|copied|debug] [WORD...]

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test Anything
Protocol.
"""

import copy
import logging
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_check import compare, on_ranks, raises, run_cases

import libfsdp as fsdp

RATE, STEPS, WIDTH = 1e-2, 3, 8


class Net(nn.Module):
    """An embedding, blocks under names, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second", "third", "fourth")})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)
        self.recomputes = False

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks.values():
            x = x + torch.tanh(checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x))
        return self.head(self.norm(x))


torch.manual_seed(0)
BASE = Net()


def net():
    """Made anew in each thread, a net would have other values on each rank: threads share the generator."""
    return copy.deepcopy(BASE)


def step_of(module, step, rank):
    x = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank))
    loss = nn.functional.cross_entropy(module(x).flatten(0, 1), x.roll(1, 1).flatten())
    loss.backward()
    return loss.detach()


def names_of(sharded):
    return [layer.name for layer in sharded.layers]


def train(module, sharded, steps=STEPS, rank=0):
    losses = []
    for step in range(steps):
        losses.append(float(step_of(module, step, rank)))
        sharded.step(RATE)
    return losses


def on_each(mode, check, ranks=2, **options):
    """check(shard) on the ranks: True, or what is wrong with one of them."""
    found = on_ranks(ranks, mode, lambda context, shard: check(shard), **options)
    return next((one for one in found if one is not True), True)


# -- groups -----------------------------------------------------------------------------------------------------------

LAYERS = {
    "several modules": [["embed", "head"], ["norm"], ["blocks.first", "blocks.second"], "blocks.third"],
    "all modules in one group": [["embed", "blocks.first", "blocks.second", "blocks.third", "blocks.fourth", "norm", "head"]],
    "modules by name": ["blocks.second", "head"],
}


def trains_with(layers, recomputes):
    def case(mode):
        module = net()
        module.recomputes = recomputes
        return compare(module, step_of, STEPS, RATE, mode, ranks=2, layers=layers, held_groups=4) or True

    return case


def names_of_several_modules(mode):
    def check(shard):
        module = net()
        found = names_of(shard(module, layers=[["embed", module.head], module.blocks.first]))
        return found == ["root", "embed+head", "blocks.first"] or str(found)

    return on_each(mode, check)


def what_modules_of_a_group_share_is_in_the_group(mode):
    def check(shard):
        module = net()
        module.head.weight = module.embed.weight
        sharded = shard(module, layers=[["embed", "head"], "norm"])
        found = [(layer.name, [name for name, _ in layer.params]) for layer in sharded.layers]
        return found[1] == ("embed+head", ["embed.weight", "head.bias"]) or str(found)

    return on_each(mode, check)


def several_modules_are_gathered_once(mode):
    """A group of two modules is unsharded until both have run, and no longer."""

    def check(shard):
        module, held = net(), []
        sharded = shard(module, layers=[["blocks.first", "blocks.second"]], held_groups=4)
        for block in module.blocks.values():
            block.register_forward_hook(lambda *_: held.append(sharded.layers[1].holds))
        module(torch.zeros(1, 1, dtype=torch.long))
        return held == [1, 0, 0, 0] or str(held)

    return on_each(mode, check)


def a_group_outlasts_an_exception(mode):
    def check(shard):
        module = net()
        sharded = shard(module, layers=[["blocks.first", "blocks.second"]], held_groups=4)
        hook = module.blocks.first.register_forward_hook(lambda *_: 1 / 0)
        found = raises(lambda: step_of(module, 0, 0), "ZeroDivisionError")
        hook.remove()
        is_free = all(layer.holds == 0 for layer in sharded.layers)
        alone = shard(net(), layers=[["blocks.first", "blocks.second"]], held_groups=4)
        losses = train(module, sharded), train(alone.module, alone)
        return found is True and is_free and losses[0] == losses[1] or f"{found}, {is_free}, {losses}"

    return on_each(mode, check)


def a_group_of_several_modules_is_shown(mode):
    def check(shard):
        module = net()
        before = module.head.weight.detach().clone()
        sharded = shard(module, layers=[["embed", "head"]])
        with sharded.unsharded(module.embed):
            return torch.equal(module.head.weight, before)

    return on_each(mode, check)


def named_children_are_groups(mode):
    def check(shard):
        module = nn.Module()
        module.body, module.tail = nn.Linear(2, 2), nn.Linear(2, 2)
        outer = nn.Module()
        outer.model = module
        alone = nn.Linear(2, 2)
        found = [names_of(shard(each)) for each in (outer, alone, net())]
        blocks = [f"blocks.{name}" for name in ("first", "second", "third", "fourth")]
        return found == [["model.body", "model.tail"], ["root"], ["root", *blocks]] or str(found)

    return on_each(mode, check)


def the_log_tells_the_groups(mode):
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("libfsdp")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        on_each(mode, lambda shard: bool(shard(net(), layers=[["embed", "head"]])))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    found = [text for text in told if text.startswith("group 'embed+head'")]
    return found == ["group 'embed+head': 3 parameters, 272 elements"] or str(told)


WRONG_LAYERS = {
    "a name that is not there": (["nothing"], ("'nothing'", "does not contain")),
    "a number": ([3], ("layers has 3", "a module")),
    "an empty list": ([[]], ("empty list",)),
    "a module twice": ([["embed", "head"], "head"], ("'head' twice", "one group")),
    "a foreign module": ([[nn.Linear(1, 1)]], ("layers has Linear",)),
}


def refuses(layers, words):
    return lambda mode: on_each(mode, lambda shard: raises(lambda: shard(net(), layers=layers), *words), ranks=1)


def cases(mode):
    for name, layers in LAYERS.items():
        for recomputes in (False, True):
            yield f"{name}{', recomputed' if recomputes else ''}", trains_with(layers, recomputes)
    for case in (
        names_of_several_modules,
        what_modules_of_a_group_share_is_in_the_group,
        several_modules_are_gathered_once,
        a_group_outlasts_an_exception,
        a_group_of_several_modules_is_shown,
        named_children_are_groups,
        the_log_tells_the_groups,
    ):
        yield case.__name__.replace("_", " "), case
    for name, (layers, words) in WRONG_LAYERS.items():
        yield f"layers with {name}", refuses(layers, words)


def named_cases(mode):
    for name, case in cases(mode):
        yield f"{name} ({mode})", lambda case=case: case(mode)


if __name__ == "__main__":
    sys.exit(run_cases(named_cases))
