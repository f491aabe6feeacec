#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libfsdp.torch.Muon beside a plain Muon of whole matrices and torch.optim.Muon, with the same summed gradients.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_muon.py [--mode MODE] [WORD...]

MODE: mapped, copied or debug; default: all three.

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test
Anything Protocol.
"""

import copy
import hashlib
import itertools
import math
import sys
import tempfile
from unittest import mock

import torch
from torch import nn, optim
from torch_check import on_ranks, raises, run_cases
from torch_plain_muon import (
    ADAMW_RATE,
    BASE,
    MATRICES,
    Alone,
    Block,
    Net,
    PlainMuon,
    backward,
    cut,
    loss_of,
    splits_of,
)

import libfsdp as fsdp
import libfsdp.torch
from libfsdp.torch import Muon
from libfsdp.torch.matrices import find_matrices


def train(module, sharded, context, alone, steps):
    for step in steps:
        backward(module, context, step)
        sharded.finish()
        alone.take(sharded, step).step()
        sharded.step()


def first(found):
    return next((each for each in found if each not in (True, "", None)), True)


# -- the formulas -----------------------------------------------------------------------------------------------------

KINDS = {
    "the usual one": ({}, {}),
    "without Nesterov": ({"nesterov": False, "momentum": 0.8}, {"nesterov": False, "momentum": 0.8}),
    "of 3 iterations and no decay": ({"ns_steps": 3, "weight_decay": 0.0}, {"ns_steps": 3, "weight_decay": 0.0}),
    "of other numbers": 2 * ({"ns_coefficients": (2.0, -1.5, 0.5), "eps": 0.05},),
    "of match_rms_adamw": (
        {"adjust_lr_fn": "match_rms_adamw"},
        {"ratio": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5},
    ),
    "of spectral_unclamped": (
        {"adjust_lr_fn": "spectral_unclamped"},
        {"ratio": lambda rows, columns: (rows / columns) ** 0.5},
    ),
}


def muon(**options):
    return Muon(**{"lr": 0.05, "adamw": {"lr": ADAMW_RATE}, "splits": splits_of, **options})


def muon_equals_a_plain_one(kind, mode, ranks, **model):
    """Fp32 on both sides; 6 steps leave differences of rounding alone."""
    ours, plain = KINDS[kind]

    def rank(context, shard):
        module, alone = copy.deepcopy(BASE), Alone(lambda params: PlainMuon(params, 0.05, cut, **plain))
        sharded = shard(module, optimizer=muon(**ours), **model)
        train(module, sharded, context, alone, range(6))
        return alone.differs(sharded)

    return first(on_ranks(ranks, mode, rank))


TWO_DIMENSIONS = {name for name in MATRICES if "experts" not in name}


def muon_in_bfloat16_has_the_bits_of_torchs(adjust, mode, ranks):
    """torch's iterates in bfloat16, and knows neither stacks nor splits."""

    def rank(context, shard):
        options = {"lr": 0.05, "momentum": 0.9, "adjust_lr_fn": adjust}
        alone = Alone(lambda params: optim.Muon(list(params.values()), **options), TWO_DIMENSIONS)
        module = copy.deepcopy(BASE)
        ours = muon(dtype=torch.bfloat16, matrices=lambda name, param: name in TWO_DIMENSIONS, splits=None, **options)
        sharded = shard(module, optimizer=ours)
        train(module, sharded, context, alone, [0, 1, 2])
        return alone.differs(sharded, TWO_DIMENSIONS)

    return first(on_ranks(ranks, mode, rank))


def on_grid(grad):
    """The sum of such gradients is exact."""
    return (grad * 2**22).round() / 2**22


def weights_of(context, shard, **model):
    """The hash of all weights after 4 steps of 12 samples, each of which is a pass of its own."""
    module = copy.deepcopy(BASE)
    for param in module.parameters():
        param.register_hook(on_grid)
    sharded = shard(module, optimizer=muon(), grad_op=fsdp.GradOp.SUM, max_pending_groups=8, **model)
    for step in range(4):
        for sample in range(context.rank, 12, context.world_size):
            loss_of(module, step, sample).backward()
        sharded.step()
    state = sharded.full_state_dict()
    return hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest()


def weights_have_the_same_bits_on_any_ranks(mode):
    def replicas(context, shard):
        return weights_of(context, shard, mesh=context.create_mesh(replicate_size=2))

    found = {ranks: on_ranks(ranks, mode, weights_of) for ranks in (1, 2, 3, 4)}
    found["2 replicas"] = on_ranks(4, mode, replicas)
    return len(set(itertools.chain(*found.values()))) == 1 or f"{found}"


# -- which parameters, and how they come ------------------------------------------------------------------------------


def named(module, layers=None):
    layers = list(libfsdp.torch.find_layers(module)) if layers is None else layers
    found = find_matrices(module, layers)
    return {name for name, param in module.named_parameters() if param in found}


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.head.weight = self.tokens.weight


def hidden_layers_are_found():
    body = nn.ModuleDict({"tokens": nn.Embedding(3, 4), "layers": nn.ModuleList(Block() for _ in range(2))})
    frozen = copy.deepcopy(BASE)
    frozen.layers[0].requires_grad_(False)
    mlp = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)))
    plain = nn.ModuleDict({"up": nn.Linear(3, 4), "middle": nn.Linear(4, 4), "down": nn.Linear(4, 2)})
    plain["tokens"] = nn.Embedding(3, 4)
    shared = nn.Sequential(nn.EmbeddingBag(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    shared[1].weight = shared[0].weight
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 4), nn.Linear(4, 2))
    wanted = [
        (BASE, MATRICES),
        (Tied(), MATRICES),
        (body, {name for name in MATRICES if ".2." not in name}),
        (frozen, {name for name in MATRICES if ".0." not in name}),
        (mlp, {"0.weight", "2.weight"}),
        (plain, {"up.weight", "middle.weight"}),
        (shared, {"2.weight"}),
        (convolutions, {"2.weight"}),
    ]
    return first([named(module) == names or f"{sorted(named(module))}" for module, names in wanted])


def chosen_parameters_are_matrices(mode, ranks):
    """The program is asked for trained parameters of two or more dimensions, and may choose embeddings, too."""

    def rank(context, shard):
        module = copy.deepcopy(BASE)
        module.layers[0].gate.requires_grad_(False)
        sharded = shard(module, optimizer=Muon(matrices=lambda name, param: asked.add(name) or "norm" not in name))
        backward(module, context, 2)
        sharded.step()
        waves = sharded.model.matrix_plan()["waves"]
        return {matrix["name"] for wave in waves for matrix in wave["matrices"]}

    asked, wanted = set(), {name for name, param in BASE.named_parameters() if param.dim() >= 2}
    wanted.remove("layers.0.gate.weight")
    found = on_ranks(ranks, mode, rank)
    return (asked == wanted and all(each == wanted for each in found)) or f"asked for {asked}, found {found}"


def equal_matrices_come_together(mode, ranks):
    """A single rank has a stack of four at once, as a tensor over the library's memory."""
    seen, orthogonalize = [], libfsdp.torch.muon.orthogonalize

    def watch(view, *options):
        seen.append((tuple(view.shape), view.dtype))
        orthogonalize(view, *options)

    def rank(context, shard):
        sharded = shard(module := copy.deepcopy(BASE), optimizer=muon(dtype=torch.bfloat16))
        backward(module, context, 2)
        sharded.step()
        return [matrix["owner"] for wave in sharded.model.matrix_plan()["waves"] for matrix in wave["matrices"]]

    with mock.patch("libfsdp.torch.muon.orthogonalize", watch):
        owners = on_ranks(ranks, mode, rank)[0]
    shapes, dtypes = zip(*seen)
    counted = sum(shape[0] for shape in shapes) == 3 * (3 + 4 + 1) == len(owners) and set(owners) == set(range(ranks))
    return (counted and (ranks > 1 or (4, 6, 15) in shapes) and set(dtypes) == {torch.bfloat16}) or f"{seen} {owners}"


def matrices_have_a_momentum_and_no_moments(mode, ranks):
    def rank(context, shard):
        sizes = {True: 0, False: 0}
        for name, param in BASE.named_parameters():
            sizes[name in MATRICES] += param.numel()
        sharded = shard(copy.deepcopy(BASE), optimizer=muon())
        found = sum(sharded.model.role_bytes(fsdp.Role.OPTIMIZER, each) for each in range(ranks))
        plain = shard(copy.deepcopy(BASE), optimizer=fsdp.Optimizer.ADAMW)
        all_moments = sum(plain.model.role_bytes(fsdp.Role.OPTIMIZER, each) for each in range(ranks))
        return found < all_moments - 2 * sizes[True] or f"{found} bytes, {all_moments} with AdamW, {sizes}"

    return first(on_ranks(ranks, mode, rank))


# -- as an optimizer of torch -----------------------------------------------------------------------------------------


def both_groups_follow_schedules(mode, ranks):
    """Each group has its lr, which a schedule changes; 0 stops its parameters."""

    def rank(context, shard):
        sharded = shard(module := copy.deepcopy(BASE), optimizer=muon(weight_decay=0.5))
        matrices, others = sharded.optimizer.param_groups
        counts = [len(group["params"]) for group in (matrices, others)]
        if sum(counts) != len(sharded.shards()) or (matrices["lr"], others["lr"]) != (0.05, ADAMW_RATE):
            return f"{counts}, {matrices['lr']}, {others['lr']}"
        states = [sharded.optimizer.state[param]["momentum_buffer"] for param in matrices["params"]]
        if any(state.shape != param.shape for state, param in zip(states, matrices["params"])):
            return "no momentum_buffer in the optimizer's state"
        rates = [lambda step: float(step != 1), lambda step: float(step != 2)]
        schedule, before = optim.lr_scheduler.LambdaLR(sharded.optimizer, rates), sharded.full_state_dict()
        for step, stopped in enumerate([set(), MATRICES, set(before) - MATRICES]):
            backward(module, context, 2)
            sharded.optimizer.step()
            schedule.step()
            after = sharded.full_state_dict()
            same = {name for name in after if torch.equal(after[name], before[name])}
            if same != stopped:
                return f"step {step} leaves {sorted(same)}"
            before = after
        return True

    return first(on_ranks(ranks, mode, rank))


def scaler_and_clipping_change_nothing_else(mode, ranks):
    """A loss that is scaled by a power of two and a step that is skipped leave the bits of plain steps that clip."""

    def run(context, shard, scaler):
        sharded = shard(module := copy.deepcopy(BASE), optimizer=muon())
        norms = []
        for step in range(4):
            if scaler is None and step == 1:
                continue
            loss = loss_of(module, step, context.rank)
            if scaler is None:
                loss.backward()
                norms.append(float(sharded.clip_grad_norm_(0.1)))
                sharded.optimizer.step()
                continue
            scaler.scale(loss * (math.inf if step == 1 and context.rank == ranks - 1 else 1)).backward()
            scaler.unscale_(sharded.optimizer)
            norms.append(float(sharded.clip_grad_norm_(0.1)))
            scaler.step(sharded.optimizer)
            scaler.update()
        return sharded.full_state_dict(), norms

    def rank(context, shard):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        found, norms = run(context, shard, scaler)
        wanted, wanted_norms = run(context, shard, None)
        if scaler.get_scale() != 512.0 or norms.pop(1) != math.inf or norms != wanted_norms or min(norms) < 0.1:
            return f"scale {scaler.get_scale()}, norms {norms}, {wanted_norms}"
        return next((f"{name} differs" for name in wanted if not torch.equal(found[name], wanted[name])), True)

    return first(on_ranks(ranks, mode, rank))


def checkpoint_goes_on(mode, ranks, then):
    """The momentum is saved by its name, and so are both param_groups."""
    alone_after = {}

    with tempfile.TemporaryDirectory() as folder:

        def save(context, shard):
            module, alone = copy.deepcopy(BASE), Alone(lambda params: PlainMuon(params, 0.05, cut))
            sharded = shard(module, optimizer=muon())
            train(module, sharded, context, alone, range(2))
            for group in sharded.optimizer.param_groups:
                group["lr"] *= 0.5
            alone.muon.lr, alone.adamw.rate = 0.025, ADAMW_RATE / 2
            sharded.save(folder)
            alone_after[context.rank] = alone
            group = next(layer.group for layer in sharded.layers if layer.name == "layers.0")
            saved = torch.from_numpy(group.read_state("layers.0.experts", "momentum_buffer"))
            if not torch.allclose(saved, alone.muon.buffers["layers.0.experts"], rtol=1e-5, atol=1e-7):
                return "another momentum"
            return alone.differs(sharded)

        def go_on(context, shard):
            module, alone = copy.deepcopy(BASE), copy.deepcopy(alone_after[0])
            sharded = shard(module, optimizer=muon(lr=9.0))
            if sharded.load(folder).step != 2:
                return "another step"
            train(module, sharded, context, alone, range(2, 5))
            return alone.differs(sharded)

        def load_another(context, shard):
            sharded = shard(copy.deepcopy(BASE), optimizer=optim.Adagrad)
            return raises(lambda: sharded.load(folder), "the checkpoint is of Muon, and", "Adagrad")

        return first(on_ranks(ranks, mode, save) + on_ranks(then, mode, go_on) + on_ranks(1, mode, load_another))


def freezing_and_scaled_rates_hold(mode, ranks):
    def rank(context, shard):
        sharded = shard(
            module := copy.deepcopy(BASE), optimizer=muon(), no_decay=lambda name, param: "layers.1." in name
        )
        backward(module, context, 2)
        sharded.step()
        module.layers[0].experts.requires_grad_(False)
        groups = {layer.name: layer.group for layer in sharded.layers}
        groups["layers.2"].set_param_lr_scale("layers.2.experts", 0.5)
        before = sharded.full_state_dict()
        backward(module, context, 2)
        sharded.finish()
        update = {}
        for name in ("layers.1.experts", "layers.2.experts"):
            momentum = torch.from_numpy(groups[name[:8]].read_state(name, "momentum_buffer"))
            momentum = 0.95 * momentum + 0.05 * sharded.read_grad(name)
            whole = 0.05 * sharded.read_grad(name) + 0.95 * momentum
            update[name] = torch.stack([PlainMuon.orthogonal(each) for each in whole])
        sharded.step()
        after = sharded.full_state_dict()
        wanted = before["layers.1.experts"] - 0.05 * update["layers.1.experts"]
        if not torch.allclose(after["layers.1.experts"], wanted, atol=1e-5):
            return "no_decay has no effect"
        wanted = (1 - 0.025 * 0.1) * before["layers.2.experts"] - 0.025 * update["layers.2.experts"]
        if not torch.allclose(after["layers.2.experts"], wanted, atol=1e-5):
            return "lr_scale has no effect"
        return torch.equal(before["layers.0.experts"], after["layers.0.experts"]) or "a frozen matrix moved"

    return first(on_ranks(ranks, mode, rank))


def rank_without_shards_takes_part(mode, ranks):
    """A matrix of one row: one rank has all of it."""

    def rank(context, shard):
        module = nn.Linear(3, 1, bias=False)
        nn.init.constant_(module.weight, 1.0)
        sharded = shard(module, optimizer=Muon(lr=0.5, weight_decay=0.0, matrices=lambda name, param: True))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(module(torch.ones(1, 3)).sum()).backward()
        scaler.step(sharded.optimizer)
        scaler.update()
        sharded.save(folder)
        sharded.load(folder)
        return sharded.full_state_dict()["weight"].sum().item()

    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(ranks, mode, rank)
    return (len(set(found)) == 1 and 1.9 < found[0] < 2.5) or f"weights {found}"


# -- what is refused --------------------------------------------------------------------------------------------------

SPLIT16 = fsdp.MainStorage.SPLIT16
REFUSED = {
    "torch's Muon": (("Muon", "whole tensors", "libfsdp.torch.Muon"), {"optimizer": getattr(optim, "Muon", None)}),
    "no matrix": (("no parameter", "matrices="), {"optimizer": Muon(matrices=lambda name, param: False)}),
    "optimizer_options": (
        ("optimizer_options", "Muon(lr="),
        {"optimizer": Muon(), "optimizer_options": {"lr": 0.1}},
    ),
    "optimizer_groups": (("optimizer_groups",), {"optimizer": Muon(), "optimizer_groups": lambda name, param: {}}),
    "rows that do not add up": (
        ("layers.0.qkv.weight", "add up to 14 rows"),
        {"optimizer": Muon(splits=lambda name, param: [7, 7] if "qkv" in name else None)},
    ),
    "main_storage of the model": (
        ("main_storage", "fp32 weights", "layers.0.experts"),
        {"optimizer": Muon(), "main_storage": SPLIT16},
    ),
    "main_storage of a group": (
        ("main_storage of group 'layers.1'", "layers.1.experts"),
        {
            "optimizer": Muon(),
            "group_options": lambda name, layer: {"main_storage": SPLIT16} if name == "layers.1" else {},
        },
    ),
    "matrices above matrix_bytes": (
        ("layers.0.experts", "matrix_bytes is 64"),
        {"optimizer": Muon(), "matrix_bytes": 64},
    ),
}
WRONG = {
    "lr": -1.0,
    "momentum": -0.1,
    "weight_decay": -0.1,
    "ns_coefficients": (1.0, 2.0),
    "ns_steps": 100,
    "adjust_lr_fn": "none",
    "dtype": torch.float16,
    "adamw": {"lr": 0.1, "amsgrad": True},
}


def refused(words, **options):
    def rank(context, shard):
        return raises(lambda: shard(copy.deepcopy(BASE), **options), *words)

    return on_ranks(1, "mapped", rank)[0]


def wrong_options_are_named():
    return first([raises(lambda: Muon(**{name: value}), f"Muon: {name} is {value!r}") for name, value in WRONG.items()])


def group_without_matrices_may_have_another_storage():
    def rank(context, shard):
        options = {"group_options": lambda name, layer: {"main_storage": SPLIT16} if name == "root" else {}}
        sharded = shard(module := copy.deepcopy(BASE).bfloat16(), optimizer=muon(), **options)
        before, scaler = sharded.full_state_dict(), torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(loss_of(module, 2, context.rank)).backward()
        scaler.step(sharded.optimizer)
        after = sharded.full_state_dict()
        return next((f"{name} stays" for name in before if torch.equal(before[name], after[name])), True)

    return first(on_ranks(2, "mapped", rank))


def ranks_that_set_other_options_are_told(mode, ranks):
    def rank(context, shard):
        sharded = shard(module := copy.deepcopy(BASE), optimizer=muon())
        before = sharded.full_state_dict()
        for group, key in itertools.product((0, 1), ("lr", "weight_decay")):
            own = sharded.optimizer.param_groups[group]
            kept, own[key] = own[key], 0.25 * (1 + context.rank)
            backward(module, context, 2)
            if (found := raises(sharded.step, "param_groups of ranks differ")) is not True:
                return found
            sharded.discard()
            own[key] = kept
        after = sharded.full_state_dict()
        backward(module, context, 2)
        sharded.step()
        return all(torch.equal(before[name], after[name]) for name in before) or "a refused step changed weights"

    return first(on_ranks(ranks, mode, rank))


def ranks_of_another_dtype_are_told(mode, ranks):
    def rank(context, shard):
        dtype = torch.bfloat16 if context.rank == 0 else None
        sharded = shard(module := copy.deepcopy(BASE), optimizer=muon(dtype=dtype))
        backward(module, context, 2)
        found = raises(sharded.step, "sharded.step()", "another source, target or dtype")
        sharded.discard()
        return found

    return first(on_ranks(ranks, mode, rank))


def cases(mode):
    for kind in KINDS if mode == "mapped" else ["the usual one"]:
        for ranks in (1, 2, 3):
            name = f"Muon {kind} equals a plain one ({mode}, {ranks} ranks)"
            yield name, lambda: muon_equals_a_plain_one(kind, mode, ranks)
    yield f"weights have the same bits on any ranks ({mode})", lambda: weights_have_the_same_bits_on_any_ranks(mode)
    for ranks in (1, 2, 3):
        tail = f"({mode}, {ranks} ranks)"
        if hasattr(optim, "Muon"):
            for adjust in ("original", "match_rms_adamw"):
                name = f"Muon in bfloat16 has the bits of torch's, {adjust} {tail}"
                yield name, lambda: muon_in_bfloat16_has_the_bits_of_torchs(adjust, mode, ranks)
        for function in (
            chosen_parameters_are_matrices,
            equal_matrices_come_together,
            matrices_have_a_momentum_and_no_moments,
            both_groups_follow_schedules,
            scaler_and_clipping_change_nothing_else,
            freezing_and_scaled_rates_hold,
            rank_without_shards_takes_part,
        ):
            yield f"{function.__name__.replace('_', ' ')} {tail}", lambda: function(mode, ranks)
    for ranks, then in ((1, 3), (3, 2)):
        name = f"checkpoint of {ranks} ranks goes on ({mode}, {then} ranks)"
        yield name, lambda: checkpoint_goes_on(mode, ranks, then)
    yield f"ranks that set other options are told ({mode})", lambda: ranks_that_set_other_options_are_told(mode, 2)
    yield f"ranks of another dtype are told ({mode})", lambda: ranks_of_another_dtype_are_told(mode, 2)
    if mode == "mapped":
        whole = {"strategy": fsdp.Strategy.NO_SHARD}
        name = "groups that every rank holds whole equal a plain Muon"
        yield name, lambda: muon_equals_a_plain_one("the usual one", mode, 2, group_options=lambda *of: whole)
        yield "hidden layers are found", hidden_layers_are_found
        yield "wrong options are named", wrong_options_are_named
        yield "a group without matrices may have another storage", group_without_matrices_may_have_another_storage
        for name, (words, options) in REFUSED.items():
            if options["optimizer"]:
                yield f"shard refuses {name}", lambda: refused(words, **options)


if __name__ == "__main__":
    sys.exit(run_cases(cases))
