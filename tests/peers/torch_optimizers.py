#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch over the shards of libfsdp.torch.shard, beside the same optimizer on whole parameters with the
same summed gradients: equal weights bit for bit. Also schedulers, groups and checkpoints.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_optimizers.py [--mode MODE] [WORD...]

MODE: mapped, copied or debug; default: all three.

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test
Anything Protocol.
"""

import copy
import functools
import math
import pickle
import sys
import tempfile
import warnings

import torch
from torch import nn
from torch_check import on_ranks, raises, run_cases

import libfsdp as fsdp

optim = torch.optim


class Net(nn.Module):
    """Layers whose rows do not divide evenly, a tied head, a frozen layer, and a layer that some steps do not use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 13), nn.Linear(13, 7), nn.Linear(7, 7)])
        self.norm, self.head, self.rare = nn.LayerNorm(7), nn.Linear(7, 13), nn.Linear(7, 7)
        self.head.weight = self.layers[0].weight
        self.layers[2].bias.requires_grad_(False)

    def forward(self, x, is_rare=False):
        x = x + self.layers[1](torch.tanh(self.layers[0](x)))
        x = self.norm(self.layers[2](x))
        return self.head(self.rare(x) if is_rare else x)


torch.manual_seed(0)
BASE = Net()


def inputs(step, rank):
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(module, context, step, factor=1.0):
    loss = module(inputs(step, context.rank), is_rare=step % 3 == 2).pow(2).mean() * factor
    loss.backward()
    return loss


class Alone:
    """Whole parameters, with the gradients that libfsdp has summed, for one of torch's optimizers."""

    def __init__(self, make, options, groups=None):
        module = copy.deepcopy(BASE)
        self.params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        given = list(self.params.values())
        if groups:
            given = [{"params": [param], **groups(name, param)} for name, param in self.params.items()]
        self.optimizer = make(given, **options)

    def take(self, sharded, step):
        """Collective. What no rank has a gradient for stays without one, as with torch."""
        for name, param in self.params.items():
            grad = sharded.read_grad(name).reshape(param.shape)
            param.grad = None if name.startswith("rare") and step % 3 != 2 else grad
        return self

    def differs(self, sharded, exact=True):
        """The name of a parameter that differs from the sharded module's, or "". Collective."""
        state, found = sharded.full_state_dict(), ""
        for name, param in self.params.items():
            equal = torch.equal if exact else functools.partial(torch.allclose, rtol=1e-5, atol=1e-7)
            if not found and not equal(state[name], param.detach()):
                found = f"{name} differs by {(state[name] - param.detach()).abs().max():.1e}"
        return found


def train(module, sharded, context, alone, steps):
    for step in steps:
        backward(module, context, step)
        sharded.finish()
        alone.take(sharded, step).optimizer.step()
        sharded.step()


KINDS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    "SGD, Nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (optim.Adam, {"lr": 0.01}),
    "Adam, foreach": (optim.Adam, {"lr": 0.01, "foreach": True}),
    "Adam, fused": (optim.Adam, {"lr": 0.01, "fused": True}),
    "AdamW, amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0}),
    "Adamax": (optim.Adamax, {"lr": 0.01}),
    "ASGD": (optim.ASGD, {"lr": 0.01, "t0": 2}),
    "NAdam": (optim.NAdam, {"lr": 0.01}),
    "RAdam": (optim.RAdam, {"lr": 0.01}),
    "RMSprop": (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Rprop": (optim.Rprop, {"lr": 0.01}),
}


def is_exact(kind):
    """torch's fused kernels round the last elements of a row otherwise than the others."""
    return "fused" not in kind


def optimizer_equals_torch(kind, mode, ranks):
    make, options = KINDS[kind]

    def rank(context, shard):
        module, alone = copy.deepcopy(BASE), Alone(make, options)
        sharded = shard(module, optimizer=make, optimizer_options=options)
        train(module, sharded, context, alone, range(7))
        return alone.differs(sharded, is_exact(kind))

    return next(filter(None, on_ranks(ranks, mode, rank)), True)


def checkpoint_goes_on(kind, mode, ranks, then):
    """2 steps, a checkpoint, 6 further steps by another number of ranks: as 8 steps of torch's. The first 2 steps leave
    a layer unchanged, which then has no states."""
    make, options = KINDS[kind]
    alone_after = {}

    with tempfile.TemporaryDirectory() as folder:

        def save(context, shard):
            module, alone = copy.deepcopy(BASE), Alone(make, options)
            sharded = shard(module, optimizer=make, optimizer_options=options)
            train(module, sharded, context, alone, range(2))
            differs = alone.differs(sharded, is_exact(kind))
            for group in (*sharded.optimizer.param_groups, *alone.optimizer.param_groups):
                group["lr"] *= 0.5
            sharded.save(folder)
            alone_after[context.rank] = alone
            return differs

        def go_on(context, shard):
            alone = copy.deepcopy(alone_after[0])
            module = copy.deepcopy(BASE)
            sharded = shard(module, optimizer=make, optimizer_options=options)
            if sharded.load(folder).step != 2:
                return "another step"
            train(module, sharded, context, alone, range(2, 8))
            return alone.differs(sharded, is_exact(kind))

        found = on_ranks(ranks, mode, save) + on_ranks(then, mode, go_on)
    return next(filter(None, found), True)


# -- groups and schedulers --------------------------------------------------------------------------------------------


def groups_of(name, param):
    return {"weight_decay": 0.0, "lr": 0.02} if param.dim() < 2 else {}


def param_groups_and_schedulers_work(mode, ranks):
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}

    def schedules(optimizer):
        warmup = optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        return optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [3])

    def rank(context, shard):
        module, alone = copy.deepcopy(BASE), Alone(optim.SGD, options, groups_of)
        sharded = shard(module, optimizer=optim.SGD, optimizer_options=options, optimizer_groups=groups_of)
        if len(sharded.optimizer.param_groups) != 2 or not isinstance(sharded.optimizer, optim.SGD):
            return "no two groups"
        pair = schedules(sharded.optimizer), schedules(alone.optimizer)
        for step in range(6):
            train(module, sharded, context, alone, [step])
            for schedule in pair:
                schedule.step()
        return alone.differs(sharded)

    with warnings.catch_warnings():  # one for all threads; a scheduler warns if it sees no optimizer.step()
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The epoch parameter")
        return next(filter(None, on_ranks(ranks, mode, rank)), True)


def optimizer_step_and_closure_work(mode, ranks):
    def rank(context, shard):
        module, alone = copy.deepcopy(BASE), Alone(optim.SGD, {"lr": 0.1})
        sharded = shard(module, optimizer=lambda params: optim.SGD(params, lr=0.1))
        for step in range(4):
            sharded.optimizer.zero_grad()

            def closure():
                loss = backward(module, context, step)
                sharded.finish()
                alone.take(sharded, step)
                return loss

            if not sharded.optimizer.step(closure) > 0:
                return "no loss"
            alone.optimizer.step()
            sharded.optimizer.zero_grad(set_to_none=False)
        return alone.differs(sharded)

    return next(filter(None, on_ranks(ranks, mode, rank)), True)


def adamw_of_torch_is_the_librarys(mode, ranks):
    """The class, a scheduler and the options of step() give the same bits."""
    options = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}

    def rank(context, shard):
        modules = [copy.deepcopy(BASE) for _ in range(2)]
        plain = shard(modules[0], no_decay=lambda name, param: param.dim() < 2)
        classed = shard(
            modules[1],
            optimizer=optim.AdamW,
            optimizer_options=options,
            optimizer_groups=lambda name, param: {"weight_decay": 0.0} if param.dim() < 2 else {},
        )
        schedule = optim.lr_scheduler.ExponentialLR(classed.optimizer, 0.5)
        for step in range(4):
            for module in modules:
                backward(module, context, step)
            plain.step(0.02 * 0.5**step, beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1)
            classed.step()
            schedule.step()
        found, wanted = classed.full_state_dict(), plain.full_state_dict()
        return all(torch.equal(found[name], wanted[name]) for name in wanted) and bool(classed.model.info)

    return all(on_ranks(ranks, mode, rank)) or "other weights"


def adamw_of_torch_is_near_torchs(betas, eps, mode, ranks):
    """It decays all parameters, as torch's does. (The library counts steps for the model, not for each parameter.)"""
    options = {"lr": 0.02, "betas": betas, "eps": eps, "weight_decay": 0.5}

    def rank(context, shard):
        module, alone = copy.deepcopy(BASE), Alone(optim.AdamW, options)
        sharded = shard(module, optimizer=optim.AdamW, optimizer_options=options)
        train(module, sharded, context, alone, range(2))
        return alone.differs(sharded, exact=False)

    return next(filter(None, on_ranks(ranks, mode, rank)), True)


def eight_bit_adamw_has_param_groups(mode, ranks):
    def rank(context, shard):
        module = copy.deepcopy(BASE)
        sharded = shard(module, optimizer=fsdp.Optimizer.ADAMW_8BIT, optimizer_options={"lr": 0.5})
        before = sharded.full_state_dict()["norm.weight"]
        sharded.optimizer.param_groups[0]["lr"] = 0.0
        backward(module, context, 0)
        sharded.step()
        stayed = torch.equal(before, sharded.full_state_dict()["norm.weight"])
        sharded.optimizer.param_groups[0]["lr"] = 0.5
        backward(module, context, 1)
        sharded.step()
        return stayed and not torch.equal(before, sharded.full_state_dict()["norm.weight"])

    return all(on_ranks(ranks, mode, rank)) or "the rate has no effect"


def freezing_stops_a_parameter(mode, ranks):
    options = {"lr": 0.1, "momentum": 0.9}

    def rank(context, shard):
        module = copy.deepcopy(BASE)
        sharded = shard(module, optimizer=optim.SGD, optimizer_options=options)
        backward(module, context, 0)
        sharded.step()
        module.layers[1].requires_grad_(False)
        before = sharded.full_state_dict()
        backward(module, context, 1)
        sharded.step()
        after = sharded.full_state_dict()
        name, other = "layers.1.weight", "layers.0.weight"
        return torch.equal(before[name], after[name]) and not torch.equal(before[other], after[other])

    return all(on_ranks(ranks, mode, rank)) or "a frozen parameter moved"


def rank_without_shards_takes_part(mode, ranks):
    """One element on several ranks: most own nothing."""

    def rank(context, shard):
        module = nn.Linear(1, 1, bias=False)
        nn.init.constant_(module.weight, 2.0)
        options = {"optimizer_options": {"lr": 0.5, "momentum": 0.5}, "optimizer_groups": groups_of}
        sharded = shard(module, optimizer=optim.SGD, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(module(torch.ones(1, 1)).sum()).backward()
        scaler.step(sharded.optimizer)
        scaler.update()
        sharded.save(folder)
        sharded.load(folder)
        module(torch.ones(1, 1)).sum().backward()
        sharded.step()
        return sharded.full_state_dict()["weight"].item()

    with tempfile.TemporaryDirectory() as folder:
        found = on_ranks(ranks, mode, rank)
    return found == [2.0 - 0.5 - 0.75] * ranks or f"weights {found}"


# -- what is refused --------------------------------------------------------------------------------------------------


class Norms(optim.SGD):
    """Divides by the norm of the whole gradient, as LARS does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / float(param.grad.norm()))


def refused(words, **options):
    def rank(context, shard):
        return raises(lambda: shard(copy.deepcopy(BASE), **options), *words)

    return on_ranks(1, "mapped", rank)[0]


REFUSED = {
    "Muon": (("Muon", "whole tensors", "2D"), {"optimizer": getattr(optim, "Muon", None)}),
    "LBFGS": (("LBFGS", "whole tensors", "loss several times"), {"optimizer": optim.LBFGS}),
    "Adafactor": (("Adafactor", "whole tensors", "row_var"), {"optimizer": getattr(optim, "Adafactor", None)}),
    "an optimizer of norms": (
        ("Norms", "whole tensors", "differs from its step of the whole"),
        {"optimizer": Norms, "optimizer_options": {"lr": 0.1}},
    ),
    "an instance": (
        ("SGD of parameters that libfsdp will own", "pass its class"),
        {"optimizer": optim.SGD([nn.Parameter(torch.zeros(1))])},
    ),
    "another callable": (("made a dict", "torch.optim"), {"optimizer": lambda params: {}}),
    "no_decay": (
        ("no_decay", "optimizer_groups"),
        {"optimizer": optim.SGD, "no_decay": lambda name, param: True},
    ),
    "main_storage": (
        ("main_storage of the model", "fp32 weights"),
        {"optimizer": optim.SGD, "main_storage": fsdp.MainStorage.SPLIT16},
    ),
    "main_storage of a group": (
        ("main_storage of group 'layers.0'", "fp32 weights"),
        {
            "optimizer": optim.SGD,
            "group_options": lambda name, layer: (
                {"main_storage": fsdp.MainStorage.SPLIT16} if name == "layers.0" else {}
            ),
        },
    ),
    "groups of the library's AdamW": (
        ("optimizer_groups", "'lr'", "weight_decay=0"),
        {"optimizer": optim.AdamW, "optimizer_groups": lambda name, param: {"lr": 0.1}},
    ),
    "groups without an optimizer": (("optimizer_groups", "optimizer="), {"optimizer_groups": groups_of}),
    "options that AdamW lacks": (("optimizer_options", "momentum"), {"optimizer_options": {"momentum": 0.9}}),
}


def mistakes_are_named(mode, ranks):
    def rank(context, shard):
        module = copy.deepcopy(BASE)
        sharded = shard(module, optimizer=optim.SGD, optimizer_options={"lr": 0.1})
        optimizer = sharded.optimizer
        backward(module, context, 0)
        optimizer.step()
        grad = optimizer.param_groups[0]["params"][0].grad
        tries = [
            (lambda: sharded.step(0.1), "step(lr=)", "param_groups"),
            (lambda: sharded.step(beta1=0.1), "step(beta1=)", "param_groups"),
            (optimizer.state_dict, "sharded.save"),
            (lambda: optimizer.load_state_dict({}), "sharded.load"),
            (lambda: optimizer.add_param_group({"params": []}), "optimizer_groups"),
            (lambda: pickle.dumps(optimizer), "sharded.save"),
            (lambda: grad.norm(), "part of the gradient of", "clip_grad_norm_"),
            (lambda: nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0), "clip_grad_norm_"),
            (lambda: sharded.clip_grad_norm_(0.0), "max_norm is 0.0"),
            (lambda: sharded.clip_grad_norm_(1.0, 0), "norm_type is 0"),
            (lambda: sharded.clip_grad_value_(-1.0), "clip_value is -1.0"),
        ]
        found = [raises(*each) for each in tries]
        backward(module, context, 0)
        found.append(raises(optimizer.zero_grad, "zero_grad", "sharded.discard()"))
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + context.rank)
        found.append(ranks == 1 or raises(optimizer.step, "param_groups of ranks differ", "lr"))
        sharded.discard()
        optimizer.param_groups[0]["lr"] = 0.1
        backward(module, context, 0)
        optimizer.step()
        return next((each for each in found if each is not True), "")

    return next(filter(None, on_ranks(ranks, mode, rank)), True)


def step_without_a_rate_is_named(mode, ranks):
    def rank(context, shard):
        sharded = shard(copy.deepcopy(BASE))
        return sharded.optimizer is None and raises(sharded.step, "needs lr")

    return all(each is True for each in on_ranks(ranks, mode, rank))


def loading_another_optimizer_is_named(mode, ranks):
    with tempfile.TemporaryDirectory() as folder:

        def rank(context, shard):
            module = copy.deepcopy(BASE)
            sharded = shard(module, optimizer=optim.Adagrad)
            sharded.save(folder, step=1)
            others = [
                (dict(optimizer=optim.Adadelta), "Adagrad", "Adadelta"),
                (dict(optimizer=optim.Adagrad, optimizer_groups=groups_of), "1 param_groups", "optimizer 2"),
            ]
            return [
                raises(lambda: shard(copy.deepcopy(BASE), **options).load(folder), *words) for options, *words in others
            ]

        found = sum(on_ranks(ranks, mode, rank), [])
    return next((each for each in found if each is not True), True)


def states_before_a_step_are_saved(mode, ranks):
    """Adagrad makes its states before the first step."""
    options = {"lr": 0.1, "initial_accumulator_value": 4.0}
    with tempfile.TemporaryDirectory() as folder:

        def rank(context, shard):
            module, alone = copy.deepcopy(BASE), Alone(optim.Adagrad, options)
            sharded = shard(module, optimizer=optim.Adagrad, optimizer_options=options)
            sharded.save(folder, step=1)
            sharded.load(folder)
            train(module, sharded, context, alone, range(2))
            return alone.differs(sharded)

        return next(filter(None, on_ranks(ranks, mode, rank)), True)


class Counts(optim.SGD):
    """Counts steps in a Python number, and after the steps that shard() tries keeps one thing more."""

    def step(self, closure=None):
        super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["count"] = count = self.state[param].get("count", 0) + 1
            if count > 3:
                self.state[param]["late"] = torch.zeros_like(param)


def states_of_the_programs_optimizers_are_kept_or_named(mode, ranks):
    with tempfile.TemporaryDirectory() as folder:

        def rank(context, shard):
            module = nn.Linear(3, 50)
            sharded = shard(module, optimizer=Counts, optimizer_options={"lr": 0.0})
            for count in range(4):
                module(torch.ones(1, 3)).sum().backward()
                if count == 3:
                    return raises(sharded.step, "'late'", "cannot save")
                sharded.step()
                sharded.save(folder)
                sharded.load(folder)
                own = sharded.optimizer.state.values()
                if any(state["count"] != count + 1 or type(state["count"]) is not int for state in own):
                    return "another count"

        found = on_ranks(ranks, mode, rank)
    return next((each for each in found if each is not True), True)


class Many(nn.Module):
    """300 parameters, of which the last is used only if asked for."""

    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList(nn.Parameter(torch.full((3,), float(index))) for index in range(300))

    def forward(self, uses_all):
        return sum(param.sum() for param in list(self.params)[: None if uses_all else -1])


def many_parameters_are_saved(mode, ranks):
    """More single numbers than ranks agree on at once."""
    with tempfile.TemporaryDirectory() as folder:

        def rank(context, shard):
            module = Many()
            sharded = shard(module, optimizer=optim.Adam)
            for count in range(2):
                module(count == 1).backward()
                sharded.step()
            sharded.save(folder)
            sharded.optimizer.state.clear()
            sharded.load(folder)
            own = zip(sharded.steps.shards, sharded.steps.params)
            return {shard.name: int(sharded.optimizer.state[param]["step"]) for shard, param in own}

        found = on_ranks(ranks, mode, rank)
    steps = {name: step for own in found for name, step in own.items()}
    return steps == {f"params.{index}": 1 if index == 299 else 2 for index in range(300)} or f"{steps}"


def checkpoint_without_numbers_begins_anew(mode, ranks):
    """What another program has saved has no param_groups: a warning, and states as torch makes them."""
    with tempfile.TemporaryDirectory() as folder:

        def rank(context, shard):
            options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
            module, alone = copy.deepcopy(BASE), Alone(optim.SGD, options)
            sharded = shard(module, optimizer=optim.SGD, optimizer_options=options)
            train(module, sharded, context, alone, range(2))
            sharded.model.save(folder)
            sharded.load(folder)
            alone.optimizer.state.clear()
            train(module, sharded, context, alone, range(2, 4))
            return alone.differs(sharded)

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = next(filter(None, on_ranks(ranks, mode, rank)), True)
        return found if "begin anew" in str([each.message for each in told]) else "no warning"


def cases(mode):
    for kind in KINDS if mode == "mapped" else ("SGD, momentum", "NAdam"):
        for ranks in (1, 2, 3):
            yield f"{kind} equals torch's ({mode}, {ranks} ranks)", lambda: optimizer_equals_torch(kind, mode, ranks)
        for ranks, then in ((1, 3), (3, 2)):
            name = f"{kind} goes on from a checkpoint of {ranks} ranks ({mode}, {then} ranks)"
            yield name, lambda: checkpoint_goes_on(kind, mode, ranks, then)
    for ranks in (1, 2, 3):
        tail = f"({mode}, {ranks} ranks)"
        for function in (
            param_groups_and_schedulers_work,
            optimizer_step_and_closure_work,
            adamw_of_torch_is_the_librarys,
            eight_bit_adamw_has_param_groups,
            freezing_stops_a_parameter,
            rank_without_shards_takes_part,
            mistakes_are_named,
            step_without_a_rate_is_named,
            loading_another_optimizer_is_named,
            checkpoint_without_numbers_begins_anew,
            states_before_a_step_are_saved,
            states_of_the_programs_optimizers_are_kept_or_named,
            many_parameters_are_saved,
        ):
            yield f"{function.__name__.replace('_', ' ')} {tail}", lambda: function(mode, ranks)
        for betas, eps in (((0.9, 0.999), 1e-8), ((0.0, 0.9), 1e-8), ((0.9, 0.0), 1e-8), ((0.9, 0.9), 0.0)):
            name = f"AdamW of betas {betas} and eps {eps} is near torch's {tail}"
            yield name, lambda: adamw_of_torch_is_near_torchs(betas, eps, mode, ranks)
    if mode == "mapped":
        for name, (words, options) in REFUSED.items():
            yield f"shard refuses {name}", lambda: refused(words, **options)


if __name__ == "__main__":
    sys.exit(run_cases(cases))
