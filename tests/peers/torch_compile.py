#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""torch.compile of a module that libfsdp.torch.shard shards: it trains as torch alone, or an error says what to do.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_compile.py [--mode MODE] [WORD...]

WORD: only cases whose name has it, such as eager or inductor. The inductor needs a C++ compiler, and minutes if nothing
is cached. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test Anything Protocol.
"""

import copy
import os
import shutil
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_check import difference, on_ranks, raises, run_cases, train_alone

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
RATE, STEPS, RANKS = 1e-2, 3, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.saves = False

    def forward(self, x):
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.saves else self.mlp(x))

    def mlp(self, x):
        return self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """More layers than there are buffers for copied weights; the first one is used twice."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 16)

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = layer(x)
        return self.head(x)


torch.manual_seed(0)
BASE = Net()


def rows(step, rank):
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(RANKS * step + rank))


def loss_of(module, step, rank):
    return module(rows(step, rank)).pow(2).mean()


def step_of(module, step, rank):
    loss = loss_of(module, step, rank)
    loss.backward()
    return loss.item()


# -- what is compiled -------------------------------------------------------------------------------------------------


def each_layer(module, **options):
    for layer in module.layers:
        layer.compile(**options)


def each_layer_replaced(module, **options):
    for index, layer in enumerate(module.layers):
        module.layers[index] = torch.compile(layer, **options)


def each_forward(module, **options):
    for layer in module.layers:
        layer.forward = torch.compile(layer.forward, **options)


def parts_of_layers(module, **options):
    for layer in module.layers:
        layer.up.compile(**options)


def functions_of_layers(module, **options):
    for layer in module.layers:
        layer.mlp = torch.compile(layer.mlp, **options)
        layer.saves = True


def the_whole_module(module, **options):
    module.compile(**options)


AFTER = [each_layer, each_layer_replaced, each_forward, parts_of_layers, functions_of_layers, the_whole_module]


# -- checks -----------------------------------------------------------------------------------------------------------


def train(module, sharded, rank):
    losses = []
    for step in range(STEPS):
        losses.append(step_of(module, step, rank))
        with torch.no_grad():
            losses.append(loss_of(module, step, rank).item())
        sharded.step(RATE)
    return losses


def trains_as_alone(mode, compile_it, is_before=False, held_groups=3, **options):
    """Losses and weights are those of torch alone, uncompiled."""
    torch._dynamo.reset()
    losses, weights = train_alone(BASE, step_of, STEPS, RATE, ranks=RANKS)

    def run(context, shard):
        module = copy.deepcopy(BASE)
        if is_before:  # and used before: what is compiled must not outlast shard()
            compile_it(module, **options)
            loss_of(module, 0, 0).backward()
            module.zero_grad()
        sharded = shard(module, held_groups=held_groups)
        if not is_before:
            compile_it(module, **options)
        return train(module, sharded, context.rank), sharded.full_state_dict()

    found = on_ranks(RANKS, mode, run)
    if any(own[0::2] != own[1::2] and difference(own[0::2], own[1::2]) > 1e-5 for own, _ in found):
        return "losses in torch.no_grad() are others"
    by_loss = difference([loss for pair in zip(*(own[0::2] for own, _ in found)) for loss in pair], losses)
    full = {name.replace("_orig_mod.", ""): value for name, value in found[0][1].items()}
    by_weight = difference([full[name] for name in weights], weights.values())
    return max(by_loss, by_weight) < 1e-5 or f"losses differ by {by_loss:.1e}, weights by {by_weight:.1e}"


def a_checkpoint_around_compiled_functions_is_an_error(mode, backend):
    """With copied weights torch says that the second forward saved other tensors."""
    torch._dynamo.reset()

    def run(context, shard):
        module = copy.deepcopy(BASE)
        sharded = shard(module, held_groups=3)
        functions_of_layers(module, backend=backend)
        told = raises(lambda: step_of(module, 0, 0), "CheckpointError")
        sharded.discard()
        return told

    return on_ranks(1, mode, run)[0]


def compiled_functions_cannot_read_gradients(mode, backend):
    """Before the step they would be zeros."""
    torch._dynamo.reset()

    def run(context, shard):
        module = copy.deepcopy(BASE)
        sharded = shard(module)
        step_of(module, 0, 0)
        norm = torch.compile(lambda params: sum(param.grad.sum() for param in params), backend=backend)
        told = raises(lambda: norm(list(module.layers.parameters())), "sharded.step(lr")
        sharded.discard()
        return told

    return on_ranks(1, mode, run)[0]


def fullgraph_of_hooks_is_refused(mode, backend):
    torch._dynamo.reset()

    def run(context, shard):
        module = copy.deepcopy(BASE)
        shard(module)
        module.layers[1].compile(backend=backend, fullgraph=True)
        return raises(lambda: loss_of(module, 0, 0), "libfsdp unshards weights in hooks", "without fullgraph")

    return on_ranks(1, mode, run)[0]


def export_is_refused(mode):
    def run(context, shard):
        module = copy.deepcopy(BASE)
        sharded = shard(module)
        words, inputs = "sharded.full_state_dict()", (rows(0, 0),)
        told = [raises(lambda: torch.export.export(module, inputs, strict=strict), words) for strict in (True, False)]
        sharded.discard()
        return told == [True] * 2 or str(told)

    return on_ranks(1, mode, run)[0]


def modules_that_are_compiled_before_are_refused(mode):
    def run(context, shard):
        told = []
        for compile_it in (each_layer, each_layer_replaced, the_whole_module):
            module = copy.deepcopy(BASE)
            compile_it(module, backend="eager")
            told.append(raises(lambda: shard(module), "torch.compile", "after shard()", "layer.compile()"))
        return told == [True] * 3 or str(told)

    return on_ranks(1, mode, run)[0]


def cases(mode):
    backends = ["eager", "aot_eager"] + (["inductor"] if shutil.which("g++") or shutil.which("clang++") else [])
    for backend in backends:
        fails = mode != "mapped" and backend != "eager"
        for compile_it in AFTER[: 4 if fails else 5] + AFTER[5:]:
            options = {"held_groups": 8 if compile_it is the_whole_module else 3, "backend": backend}
            name = f"{compile_it.__name__.replace('_', ' ')}, compiled after shard by {backend} ({mode})"
            yield name, lambda c=compile_it, o=options: trains_as_alone(mode, c, **o)
        name = f"each forward, compiled whole after shard by {backend} ({mode})"
        yield name, lambda b=backend: trains_as_alone(mode, each_forward, backend=b, fullgraph=True)
        for compile_it in (each_forward,) if fails else (each_forward, functions_of_layers):
            name = f"{compile_it.__name__.replace('_', ' ')}, compiled and used before shard by {backend} ({mode})"
            yield name, lambda c=compile_it, b=backend: trains_as_alone(mode, c, is_before=True, backend=b)
        if fails:
            name = f"a checkpoint around compiled functions is an error by {backend} ({mode})"
            yield name, lambda b=backend: a_checkpoint_around_compiled_functions_is_an_error(mode, b)
        name = f"compiled functions cannot read gradients by {backend} ({mode})"
        yield name, lambda b=backend: compiled_functions_cannot_read_gradients(mode, b)
        name = f"fullgraph of a layer's hooks is refused by {backend} ({mode})"
        yield name, lambda b=backend: fullgraph_of_hooks_is_refused(mode, b)
    for case in (export_is_refused, modules_that_are_compiled_before_are_refused):
        yield f"{case.__name__.replace('_', ' ')} ({mode})", lambda case=case: case(mode)


if __name__ == "__main__":
    sys.exit(run_cases(cases))
