#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libfsdp.torch.shard of modules on the meta device: their values are made or loaded for one group after the other, and
are equal on all ranks.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_initial.py [--mode mapped|copied|debug] [WORD...]

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test Anything
Protocol.
"""

import math
import sys
import tempfile

import torch
from torch import nn
from torch_check import on_ranks, raises, run_cases

RATE, WIDTH = 1e-2, 8


class Angles(nn.Module):
    """Buffers, and no parameters."""

    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.zeros(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        self.angles.copy_(torch.arange(WIDTH) * 0.1)


class Net(nn.Module):
    """An attention, a batch norm, a tied head, and a table of angles."""

    def __init__(self):
        super().__init__()
        self.embed, self.angles = nn.Embedding(16, WIDTH), Angles()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 16)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x) + self.angles.angles
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = x + self.attention(x, x, x)[0]
        return self.head(self.norm(x.flatten(0, 1)))


def on_meta():
    with torch.device("meta"):
        return Net()


torch.manual_seed(0)
BASE = Net()
BASE.norm.running_mean.fill_(0.5)


def train(module, sharded, steps=2):
    losses = []
    for step in range(steps):
        x = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(module(x), x.flatten())
        loss.backward()
        sharded.step(RATE)
        losses.append(loss.item())
    return losses


def on_each(mode, check, ranks=2):
    """check(shard, rank) on the ranks: True, or what is wrong with one of them."""
    found = on_ranks(ranks, mode, lambda context, shard: check(shard, context.rank))
    return next((one for one in found if one is not True), True)


def differs(found, wanted):
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def values_of_reset_parameters(mode):
    """The values are those of torch's own initialization, and the module trains as one with the same values."""

    def check(shard, rank):
        module = on_meta()
        sharded = shard(module, held_groups=5)
        full = sharded.full_state_dict()
        bound = WIDTH**-0.5
        is_made = full["norm.weight"].eq(1).all() and full["norm.running_var"].eq(1).all()
        is_made = is_made and full["attention.out_proj.bias"].eq(0).all()  # the attention runs after its parts
        is_made = is_made and 0.1 < full["layers.1.weight"].abs().max() <= bound
        is_made = is_made and 0.1 < full["head.weight"].abs().max() <= bound  # the head runs after the embedding
        is_made = is_made and torch.equal(module.angles.angles, torch.arange(WIDTH) * 0.1)
        is_tied = module.head.weight is module.embed.weight and torch.equal(full["head.weight"], full["embed.weight"])
        alone = Net()
        alone.load_state_dict(full)
        losses = train(module, sharded), train(alone, shard(alone, held_groups=5))
        return bool(is_made) and is_tied and losses[0] == losses[1] or f"{is_made}, {is_tied}, {losses}"

    return on_each(mode, check)


def one_rank_makes_the_values(mode):
    """Ranks make other values, and all of them get those of rank 0."""

    def check(shard, rank):
        def init(part):
            for param in part.parameters(recurse=False):
                param.fill_(rank + 1)
            for buffer in part.buffers(recurse=False):
                buffer.zero_()

        full = shard(on_meta(), init=init, held_groups=5).full_state_dict()
        wrong = [name for name, _ in Net().named_parameters() if not full[name].eq(1).all()]
        return not wrong and full["norm.running_var"].eq(0).all().item() or str(wrong)

    return on_each(mode, check, ranks=3)


def one_group_is_in_memory(mode):
    """init sees memory of one group at a time, and each part's once."""

    def check(shard, rank):
        module, bytes_now, parts = on_meta(), [], []

        def init(part):
            bytes_now.append(sum(param.untyped_storage().nbytes() for param in module.parameters() if param.stride(-1)))
            parts.append(type(part).__name__)
            for value in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                value.zero_()

        sharded = shard(module, init=init, held_groups=5)
        most = max(sum(4 * param.numel() for _, param in layer.params) for layer in sharded.layers)
        is_once = sorted(parts) == sorted([*["Linear"] * 4, "Embedding", "Angles", "MultiheadAttention",
                                           "NonDynamicallyQuantizableLinear", "BatchNorm1d"])
        return max(bytes_now) == most and is_once or f"{bytes_now}, {most}, {parts}"

    return on_each(mode, check)


def values_of_a_state_dict(mode):
    def check(shard, rank):
        module = on_meta()
        state = BASE.state_dict()
        del state["head.weight"]  # its other name is there
        sharded = shard(module, init=state, held_groups=5)
        wrong = differs(sharded.full_state_dict(), BASE.state_dict())
        is_filled = torch.equal(module.angles.angles, BASE.angles.angles)
        is_finite = all(map(math.isfinite, train(module, sharded)))
        return not wrong and is_filled and is_finite or str(wrong)

    return on_each(mode, check)


def values_of_a_checkpoint(mode):
    def check(shard, rank):
        first = Net()
        first.load_state_dict(BASE.state_dict())
        sharded = shard(first, held_groups=5)
        train(first, sharded)
        folder = f"{FOLDER.name}/{mode}"
        sharded.save(folder)
        module = on_meta()
        again = shard(module, init=folder, held_groups=5)
        wrong = differs(again.full_state_dict(), sharded.full_state_dict())
        if again.model.stats.step != 0:
            return "init has loaded the optimizer's states"
        other = shard(on_meta(), init=folder, held_groups=5, optimizer=torch.optim.SGD, optimizer_options={"lr": RATE})
        wrong += differs(other.full_state_dict(), sharded.full_state_dict())
        again.load(folder)
        losses = train(module, again), train(first, sharded)
        return not wrong and losses[0] == losses[1] or f"{wrong}, {losses}"

    return on_each(mode, check)


def values_in_param_dtype(mode):
    def check(shard, rank):
        sharded = shard(on_meta(), init=BASE.state_dict(), param_dtype=torch.bfloat16, held_groups=5)
        return not differs(sharded.full_state_dict(), BASE.state_dict())

    return on_each(mode, check)


class Fills(nn.Module):
    """Its reset_parameters() fills a child, which is in another group."""

    def __init__(self, reset=True):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.register_buffer("table", torch.zeros(3), persistent=False)
        if reset:
            self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.layers[0].weight.fill_(3.0)
            self.table.fill_(2.0)


class Mixed(Fills):
    """With a parameter of its own."""

    def __init__(self):
        super().__init__(reset=False)
        self.scale = nn.Parameter(torch.zeros(2))
        self.reset_parameters()

    def reset_parameters(self):
        super().reset_parameters()
        nn.init.ones_(self.scale)
        nn.init.normal_(self.layers[1].weight, mean=100.0)


def a_parent_fills_its_children(mode):
    def check(shard, rank):
        found = []
        for kind in (Fills, Mixed):
            module = made(kind)
            full = shard(module, held_groups=3).full_state_dict()
            is_kept = full["layers.0.weight"].eq(3).all() and 0 < full["layers.1.bias"].abs().max() < 1
            found.append(bool(is_kept and module.table.eq(2).all()))
        is_last = full["scale"].eq(1).all() and full["layers.1.weight"].min() > 50
        with torch.device("meta"):
            attention, whole = nn.MultiheadAttention(WIDTH, 2), nn.Transformer(WIDTH, 2, 1, 1, 2 * WIDTH)
        attention = shard(attention, layers=["out_proj"]).full_state_dict()
        whole = shard(whole, held_groups=3).full_state_dict()["encoder.layers.0.linear1.weight"].abs().max()
        is_xavier = WIDTH**-0.5 < whole <= 0.5  # Linear itself stays below WIDTH**-0.5
        found += [bool(is_last), attention["out_proj.bias"].eq(0).all().item(), bool(is_xavier)]
        return found == [True] * 5 or str(found)

    return on_each(mode, check)


def given_values_stay(mode):
    """A part whose parameters have values gets only those of its buffer."""

    def check(shard, rank):
        module = made(Mixed)
        state = {name: torch.full(value.shape, 7.0) for name, value in module.state_dict().items()}
        module.load_state_dict(state, assign=True)
        full = shard(module, held_groups=3).full_state_dict()
        return not differs(full, state) and module.table.eq(2).all().item() or str(full)

    return on_each(mode, check)


def init_that_fills_a_child(mode):
    """It is told: the child is in another group."""

    def check(shard, rank):
        told = []
        for fill in (nn.init.ones_, nn.init.normal_):

            def init(part):
                for value in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                    value.zero_()
                if isinstance(part, Mixed):
                    fill(part.layers[0].weight)

            told.append(raises(lambda: shard(made(Mixed), init=init, held_groups=3), "another" if fill is nn.init.normal_
                               else "'layers.0.weight'", "of this one"))
        return told == [True, True] or str(told)

    return on_each(mode, check, ranks=1)


def shard_after_an_error(mode):
    """The second shard() makes the values."""

    def check(shard, rank):
        found = []
        for options, spoil in (({"init": {}}, None), ({"init": f"{FOLDER.name}/nothing"}, None), ({}, 1.0)):
            with torch.device("meta"):
                module = nn.Sequential(nn.Embedding(4, 4, max_norm=spoil), nn.BatchNorm1d(4), nn.Linear(4, 4))
            told = raises(lambda: shard(module, **options))
            is_back = all(value.is_meta for value in (*module.parameters(), *module.buffers()))
            module[0].max_norm = None
            full = shard(module, held_groups=4).full_state_dict()
            found.append(told != "no exception" and is_back and full["2.weight"].abs().max() > 0)
        return all(found) or str(found)

    return on_each(mode, check)


def a_checkpoint_without_a_buffer(mode):
    def check(shard, rank):
        folder = f"{FOLDER.name}/plain-{mode}"
        shard(nn.Sequential(nn.Linear(2, 2))).save(folder)
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(2, 2))
            module.register_buffer("table", torch.zeros(3))
        return raises(lambda: shard(module, init=folder), "'table'", "checkpoint", folder)

    return on_each(mode, check, ranks=1)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))


def made(kind):
    with torch.device("meta"):
        return kind()


WRONG = {
    "a module without reset_parameters": (lambda shard: shard(made(Odd)), ("Odd ''", "'scale'", "init=")),
    "a state dict without a name": (
        lambda shard: shard(made(Odd), init={"scale": torch.zeros(2)}),
        ("'linear.weight'",),
    ),
    "a state dict without a buffer": (
        lambda shard: shard(on_meta(), init={k: v for k, v in BASE.state_dict().items() if "running_var" not in k}),
        ("'norm.running_var'",),
    ),
    "a state dict of another shape": (
        lambda shard: shard(made(Odd), init={**Odd().state_dict(), "scale": torch.zeros(3)}),
        ("(3,) for 'scale'", "(2,)"),
    ),
    "a number as init": (lambda shard: shard(made(Odd), init=3), ("init is 3", "folder")),
    "init for a module with values": (lambda shard: shard(Odd(), init={}), ("init is for", "torch.device('meta')")),
    "an ignored parameter on meta": (
        lambda shard: shard(made(Odd), ignored_params=lambda name, param: name == "scale"),
        ("'scale'", "ignored", "before shard()"),
    ),
}


def refuses(call, words):
    return lambda mode: on_each(mode, lambda shard, rank: raises(lambda: call(shard), *words), ranks=1)


def cases(mode):
    for case in (
        values_of_reset_parameters,
        one_rank_makes_the_values,
        one_group_is_in_memory,
        values_of_a_state_dict,
        values_of_a_checkpoint,
        values_in_param_dtype,
        a_parent_fills_its_children,
        given_values_stay,
        init_that_fills_a_child,
        shard_after_an_error,
        a_checkpoint_without_a_buffer,
    ):
        yield f"{case.__name__.replace('_', ' ')} ({mode})", lambda case=case: case(mode)
    for name, (call, words) in WRONG.items():
        yield f"shard refuses {name} ({mode})", lambda call=call, words=words: refuses(call, words)(mode)


FOLDER = tempfile.TemporaryDirectory()

if __name__ == "__main__":
    sys.exit(run_cases(cases))
