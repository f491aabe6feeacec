#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libfsdp.torch.shard: a module that is sharded trains as the same module of torch alone, and what is misused is
refused.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_shard.py

Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test Anything Protocol. Not a part of CI: torch
takes a minute to install.
"""

import copy
import gc
import os
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import libfsdp as fsdp
import libfsdp.torch

VOCABULARY, WIDTH, LENGTH, BATCH = 31, 16, 8, 4
number = failed = 0


class Block(nn.Module):
    def __init__(self, recomputes):
        super().__init__()
        self.recomputes = recomputes
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def math(self, x):
        y = self.norm(x)
        x = x + self.mix(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x):
        return checkpoint(self.math, x, use_reentrant=False) if self.recomputes and self.training else self.math(x)


class Tiny(nn.Module):
    """A transformer with a tied embedding, a frozen table and a head that a step may leave unused."""

    def __init__(self, recomputes=False, recomputes_layers=False):
        super().__init__()
        self.recomputes_layers = recomputes_layers
        self.embed, self.place = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.Parameter(torch.randn(LENGTH, WIDTH) / 8, requires_grad=False),
        )
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(3))
        self.norm, self.head, self.unused = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, VOCABULARY, bias=False),
            nn.Linear(WIDTH, 3),
        )
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes_layers else block(x)
        return self.head(self.norm(x))


class Coded(nn.Module):
    """Codes of its own, frozen, and what trains beside them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.codes = nn.Parameter(torch.tensor([0, 7, 128, 255], dtype=torch.uint8), requires_grad=False)

    def forward(self, x):
        return x * self.weight * self.codes


def decodes(module):
    with torch.no_grad():
        return torch.equal(module(torch.ones(4)), torch.tensor([0.0, 7.0, 128.0, 255.0]))


def case(name, passed, told=""):
    global number, failed
    number += 1
    failed += not passed
    print(f"{'ok' if passed else 'not ok'} {number} - {name}{f' # {told}' if told else ''}", flush=True)


def batch(step, part=slice(None)):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))[part]
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(module, step, part=slice(None)):
    inputs, targets = batch(step, part)
    return nn.functional.cross_entropy(module(inputs).flatten(0, 1), targets.flatten())


def train_alone(module, steps):
    module, losses = copy.deepcopy(module), []
    names = [param for param in module.parameters() if param.requires_grad]
    groups = [
        {
            "params": [param for param in names if (param.dim() < 2) == no_decay],
            "weight_decay": 0.0 if no_decay else 0.1,
        }
        for no_decay in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for step in range(steps):
        loss = loss_of(module, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(names, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach() for name, param in module.named_parameters()}


def train_sharded(module, steps, world_size, microbatches=1, **options):
    def rank(context):
        mine = copy.deepcopy(module)
        sharded = libfsdp.torch.shard(mine, context, **options)
        losses = []
        for step in range(steps):
            total = 0.0
            size = BATCH // world_size // microbatches
            for micro in range(microbatches):
                first = (context.rank * microbatches + micro) * size
                with sharded.accumulate() if micro + 1 < microbatches else open(os.devnull):
                    loss = loss_of(mine, step, slice(first, first + size))
                    loss.backward()
                total += loss.item() / microbatches
            sharded.step(0.01, max_norm=1.0, scale=1 / microbatches, weight_decay=0.1)
            losses.append(context.all_reduce_values(total, fsdp.ValueOp.MEAN))
        state, shares = sharded.full_state_dict(), sharded.model.role_bytes()
        del mine
        sharded.close()
        return losses, state, shares

    return fsdp.run_local(world_size, rank)


def comparable(state, is_sharded):
    """Without what the two do not compute alike: the bias of keys, whose gradient is rounding noise (a softmax does not
    see it) that AdamW makes steps of; and what no gradient came for, which torch's AdamW passes over and libfsdp's sees
    zeros for: it decays."""
    left = dict(state)
    for name in state:
        if name.endswith("in_proj_bias"):
            left[name] = torch.cat([state[name][:WIDTH], state[name][2 * WIDTH :]])
    if not is_sharded:
        left["unused.weight"] = left["unused.weight"] * (1 - 0.01 * 0.1) ** 5
    return left


def largest_difference(found, wanted):
    return max((found[name].float() - wanted[name].float()).abs().max().item() for name in wanted if name in found)


def compare(name, module, world_size, **options):
    losses, state = train_alone(module, 5)
    results = train_sharded(module, 5, world_size, **options)
    differ = max(abs(a - b) for a, b in zip(losses, results[0][0]))
    first = abs(losses[0] - results[0][0][0])
    weights = largest_difference(comparable(results[0][1], True), comparable(state, False))
    same = all(largest_difference(state, results[0][1]) == 0 for _, state, _ in results)
    is_whole = set(results[0][1]) == set(state)
    case(
        name,
        first < 1e-5 and differ < 1e-4 and weights < 1e-4 and same and is_whole,
        f"first loss differs by {first:.1e}, losses by {differ:.1e}, weights by {weights:.1e}; "
        f"{results[0][2]} bytes a rank",
    )


def refused(error, text, function):
    try:
        function()
    except error as caught:
        return text in str(caught)
    return False


def in_one_rank(module, function, **options):
    def rank(context):
        mine = copy.deepcopy(module)
        sharded = libfsdp.torch.shard(mine, context, **options)
        return function(mine, sharded)

    return fsdp.run_local(1, rank)[0]


def recovers(module, sharded):
    """An exception in the middle of a forward, and one in the middle of a backward."""

    class Spoilt(Exception):
        pass

    def spoil(*_):
        raise Spoilt

    wanted = None
    for place in ("forward", "backward"):
        layer = module.blocks[1]
        hook = layer.register_forward_hook(spoil) if place == "forward" else layer.register_full_backward_hook(spoil)
        if not refused(Spoilt, "", lambda: loss_of(module, 0).backward()):
            return False
        hook.remove()
        sharded.discard()
        loss = loss_of(module, 0)
        wanted = loss.item() if wanted is None else wanted
        if loss.item() != wanted:
            return False
        sharded.discard()
    loss_of(module, 0).backward()
    sharded.step(0.01)
    return loss_of(module, 0).item() < wanted


def main():
    torch.manual_seed(1)
    torch.set_num_threads(1)
    plain, recomputing = Tiny(), Tiny(recomputes=True)
    for world_size in (1, 2, 4):
        compare(f"{world_size} ranks", plain, world_size)
    compare("copied weights", plain, 2, unshard_mode=fsdp.UnshardMode.COPIED)
    compare("recomputing", recomputing, 2, unshard_mode=fsdp.UnshardMode.COPIED)
    compare(
        "recomputing whole layers, whose hooks run again",
        Tiny(recomputes_layers=True),
        2,
        unshard_mode=fsdp.UnshardMode.COPIED,
    )
    compare("two micro-batches", plain, 2, microbatches=2)
    for strategy in (fsdp.Strategy.NO_SHARD, fsdp.Strategy.OPTIM, fsdp.Strategy.OPTIM_GRADS):
        compare(f"strategy {strategy.name}", plain, 2, strategy=strategy)
    half = Tiny().to(torch.bfloat16)
    losses, _ = train_alone(half.float(), 5)
    found = train_sharded(half.to(torch.bfloat16), 5, 2)[0][0]
    case("bfloat16", max(abs(a - b) for a, b in zip(losses, found)) < 0.1, f"{losses[-1]:.3f} and {found[-1]:.3f}")
    case("an exception leaves a model that trains on", in_one_rank(plain, recovers))
    case("eval without gradients", in_one_rank(plain, lambda module, sharded: evaluates(module)))
    case("a frozen parameter of bytes", in_one_rank(Coded(), lambda module, sharded: decodes(module)))
    case(
        "a compiled module is refused",
        refused(
            TypeError,
            "torch.compile",
            lambda: in_one_rank(nn.Sequential(torch.compile(nn.Linear(2, 2))), lambda *_: None),
        ),
    )
    case("DLPack both ways, and given back", fsdp.run_local(1, exchanges)[0])
    os.environ["FSDP_DEBUG"] = "1"

    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            with torch.no_grad():
                self.weight.mul_(2)
            return x * self.weight

    case(
        "a write into weights is refused by name",
        in_one_rank(Writes(), lambda module, sharded: refused(RuntimeError, "mul_", lambda: module(torch.ones(4)))),
    )
    print(f"1..{number}")
    return failed


def exchanges(context):
    """A view of the library's memory as a tensor of torch, a tensor of torch as a gradient."""
    gc.collect()  # modules of earlier cases, whose parameters are views, too
    exported = fsdp.tensor.dlpack._exported
    before = len(exported)
    with context.create_model() as model:
        group = model.create_group("layer", [fsdp.Param("w", (3, 4)), fsdp.Param("h", (4,), fsdp.Dtype.BFLOAT16)])
        model.seal()
        group.load_param("w", torch.arange(12.0).reshape(3, 4))
        group.load_param("h", torch.arange(4.0).bfloat16())
        model.publish_weights()
        with group.unsharded():
            views = {name: torch.from_dlpack(view) for name, view in group.tensors().items()}
            addresses = [views[name].data_ptr() == view.address for name, view in group.tensors().items()]
            same = torch.equal(views["w"], torch.arange(12.0).reshape(3, 4)) and torch.equal(
                views["h"], torch.arange(4.0).bfloat16()
            )
        held = len(exported) - before
        del views
        if not (all(addresses) and same and held == 2 and len(exported) == before):
            return False
        group.put_grad("w", torch.full((3, 4), 2.0, requires_grad=True))
        group.put_grad("h", torch.ones(4, dtype=torch.bfloat16))
        is_refused = refused(ValueError, "contiguous", lambda: group.put_grad("w", torch.ones(4, 3).t()))
        group.reduce_grad()
        model.finish_grads()
        grads = {shard.name: shard.main_grad.tolist() for shard in model.shards()}
        model.discard_step()
        return is_refused and grads == {"w": [2.0] * 12, "h": [1.0] * 4}


def evaluates(module):
    module.eval()
    with torch.no_grad():
        return loss_of(module, 3).item() > 0


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
