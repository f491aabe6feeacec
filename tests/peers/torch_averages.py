#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Moving averages of libfsdp.torch (EMA, SWA) beside torch.optim.swa_utils.AveragedModel of an unsharded module.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_averages.py [--mode MODE] [WORD...]

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test
Anything Protocol.
"""

import copy
import sys
import tempfile

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn, update_bn
from torch_check import AdamW, on_ranks, raises, run_cases

import libfsdp as fsdp
import libfsdp.torch

RATE, STEPS = 1e-2, 6
KINDS = {"ema": lambda: get_ema_multi_avg_fn(0.9), "swa": get_swa_multi_avg_fn}


class Net(nn.Module):
    """Layers, rows that ranks divide unevenly, buffers, a frozen parameter and a tied head."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(9), nn.Linear(9, 9)
        self.head.weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


torch.manual_seed(0)
BASE = Net()


def rows(step):
    return torch.randn(6, 9, generator=torch.Generator().manual_seed(step))


def functions():
    return {name: make() for name, make in KINDS.items()}


def backward(module, step):
    """All ranks have the same rows, so that the norms' buffers are those of torch alone."""
    loss = module(rows(step)).pow(2).mean()
    loss.backward()
    return loss.item()


def alone():
    """The averages of an unsharded module, in which swa starts in the third step."""
    module = copy.deepcopy(BASE)
    optimizer = AdamW([param for param in module.parameters() if param.requires_grad], RATE)
    models = {name: AveragedModel(module, multi_avg_fn=make()) for name, make in KINDS.items()}
    for step in range(STEPS):
        backward(module, step)
        optimizer.step()
        for name, model in models.items():
            if name == "ema" or step >= 2:
                model.update_parameters(module)
    return models


def train(module, sharded, first=0, last=STEPS):
    losses = []
    for step in range(first, last):
        losses.append(backward(module, step))
        sharded.step(RATE)
        for name, average in sharded.averages.items():
            if name == "ema" or step >= 2:
                average.update()
    return losses


def worst(found, wanted):
    return max((found[name].float() - value.float()).abs().max().item() for name, value in wanted.items())


def shard_it(shard, **options):
    module = copy.deepcopy(BASE)
    return module, shard(module, **{"averages": functions(), **options})


def agree(results):
    return next((found for found in results if found is not True), True)


def equal_those_of_torch(mode, ranks, **options):
    def run(context, shard):
        module, sharded = shard_it(shard, **options)
        train(module, sharded)
        found = {}
        for name, model in alone().items():
            wanted = model.module.state_dict()
            found[name] = worst(sharded.averages[name].full_state_dict(), wanted)
            with sharded.averages[name].shown(), torch.no_grad():
                found[name] = max(found[name], worst(module.state_dict(), wanted))
                module.eval()
                found[name] = max(found[name], (module(rows(9)) - model.module.eval()(rows(9))).abs().max().item())
                module.train()
            if sharded.averages[name].count != model.n_averaged:
                return f"{sharded.averages[name].count} updates, and torch's has {model.n_averaged}"
        return max(found.values()) < 1e-6 or str(found)

    return agree(on_ranks(ranks, mode, run))


def equal_on_replicas(mode):
    def run(context, shard):
        module, sharded = shard_it(shard, mesh=context.create_mesh(shard_size=2))
        train(module, sharded)
        models = alone()
        worsts = [worst(sharded.averages[name].full_state_dict(), models[name].module.state_dict()) for name in models]
        return max(worsts) < 1e-6 or str(worsts)

    return agree(on_ranks(4, mode, run))


def differ_from_the_weights(mode):
    """The comparison would see weights in place of averages."""

    def run(context, shard):
        module, sharded = shard_it(shard)
        train(module, sharded)
        full = sharded.full_state_dict()
        return all(worst(full, model.module.state_dict()) > 1e-3 for model in alone().values())

    return agree(on_ranks(2, mode, run))


def training_goes_on_as_without(mode):
    """After an evaluation, also one that writes the norms' buffers and one that raises, bits are those without it."""

    def run(context, shard):
        plain, sharded = shard_it(shard, averages={})
        wanted = train(plain, sharded), sharded.full_state_dict()
        module, sharded = shard_it(shard)
        losses = train(module, sharded, 0, 4)
        with sharded.averages["swa"].shown():
            update_bn([rows(20)], module)
        try:
            with sharded.averages["ema"].shown():
                raise KeyError
        except KeyError:
            pass
        losses += train(module, sharded, 4)
        full = sharded.full_state_dict()
        return losses == wanted[0] and all(full[name].equal(value) for name, value in wanted[1].items())

    return agree(on_ranks(2, mode, run))


def resume_bit_for_bit(mode, ranks, other):
    """Saved by one number of ranks, loaded by another."""
    with tempfile.TemporaryDirectory() as folder:

        def first(context, shard):
            module, sharded = shard_it(shard)
            train(module, sharded, 0, 4)
            sharded.save(folder)
            return {name: average.full_state_dict() for name, average in sharded.averages.items()}

        def second(context, shard):
            module, sharded = shard_it(shard)
            sharded.load(folder)
            loaded = {name: average.full_state_dict() for name, average in sharded.averages.items()}
            losses = train(module, sharded, 4)
            last = {name: average.full_state_dict() for name, average in sharded.averages.items()}
            return loaded, losses, last, {name: average.count for name, average in sharded.averages.items()}

        def whole(context, shard):
            module, sharded = shard_it(shard)
            losses = train(module, sharded)[4:]
            return losses, {name: average.full_state_dict() for name, average in sharded.averages.items()}

        saved = on_ranks(ranks, mode, first)[0]
        loaded, losses, last, counts = on_ranks(other, mode, second)[0]
        same_ranks = on_ranks(other, mode, whole)[0]
    if not all(loaded[name][key].equal(value) for name in KINDS for key, value in saved[name].items()):
        return "what was loaded is not what was saved"
    if counts != {"ema": STEPS, "swa": STEPS - 2}:
        return f"the numbers of updates are {counts}"
    if ranks != other:
        return all(worst(last[name], same_ranks[1][name]) < 1e-6 for name in KINDS) or "the end differs"
    is_equal = all(last[name][key].equal(value) for name in KINDS for key, value in same_ranks[1][name].items())
    return (is_equal and losses == same_ranks[0]) or "the end has other bits"


def a_checkpoint_without_averages(mode):
    """With the flags of a load they begin anew, and a model without averages loads a checkpoint that has some."""
    with tempfile.TemporaryDirectory() as folder:

        def run(context, shard):
            module, sharded = shard_it(shard, averages={})
            train(module, sharded, 0, 2)
            sharded.save(folder)
            other, with_averages = shard_it(shard)
            train(other, with_averages, 0, 4)
            told = raises(lambda: with_averages.load(folder), "average.ema", "libfsdp.LoadFlag.ALLOW_MISSING")
            with_averages.load(folder, flags=fsdp.LoadFlag.ALLOW_MISSING)
            counts = {average.count for average in with_averages.averages.values()}
            with_averages.averages["ema"].update()
            is_weights = worst(with_averages.averages["ema"].full_state_dict(), with_averages.full_state_dict()) == 0
            train(other, with_averages, 2, 4)
            with_averages.save(folder)
            unexpected = raises(lambda: sharded.load(folder), "average.ema", "libfsdp.LoadFlag.ALLOW_UNEXPECTED")
            sharded.load(folder, flags=fsdp.LoadFlag.ALLOW_UNEXPECTED)
            is_loaded = worst(sharded.full_state_dict(), with_averages.full_state_dict()) == 0
            is_right = told is unexpected is True and counts == {0} and is_weights and is_loaded
            return is_right or f"{told}, {unexpected}, {counts}, {is_weights}, {is_loaded}"

        return agree(on_ranks(2, mode, run))


def what_cannot_be_done_is_told(mode):
    def run(context, shard):
        module, sharded = shard_it(shard)
        ema = sharded.averages["ema"]
        told = [raises(ema.full_state_dict, "'ema'", "no update", "update()")]
        train(module, sharded, 0, 5)
        with sharded.averages["swa"].shown():
            words = "the average 'swa' now", "leave `with average.shown():`"
            told += [
                raises(lambda: module(rows(0)), *words, "torch.no_grad()"),
                raises(lambda: sharded.step(RATE), *words, "sharded.step()"),
                raises(ema.update, *words),
                raises(ema.full_state_dict, *words),
                raises(lambda: sharded.save("nowhere"), *words, "sharded.save()"),
                raises(lambda: sharded.load_full_state_dict(sharded.full_state_dict()), *words),
                raises(lambda: module.load_state_dict(BASE.state_dict()), *words),
            ]
        sharded.discard()
        before = sharded.full_state_dict()
        with sharded.averages["swa"].shown():
            sharded.discard()
            told.append(worst(sharded.full_state_dict(), before) == 0)
        told.append(worst(sharded.full_state_dict(), before) == 0)
        if context.rank == 0:
            ema.update()
        told.append(raises(ema.full_state_dict, "'ema'", "5 to 6 updates") if context.world_size > 1 else True)
        return told == [True] * len(told) or str(told)

    return agree(on_ranks(2, mode, run))


def an_export_has_the_buffers_of_the_evaluation(mode):
    """Made inside, as the guide shows; one that is made afterwards has the buffers of the training."""

    def run(context, shard):
        module, sharded = shard_it(shard)
        train(module, sharded)
        ema, plain = sharded.averages["ema"], copy.deepcopy(BASE)
        with ema.shown(), torch.no_grad():
            update_bn([rows(20), rows(21)], module)
            wanted = module.eval()(rows(9))
            weights = sharded.full_state_dict()
        plain.load_state_dict(weights)
        after = ema.full_state_dict()
        differs = worst(after, {name: value for name, value in weights.items() if name == "norm.running_var"})
        apart = (plain.eval()(rows(9)) - wanted).abs().max().item()
        return (apart < 1e-5 < 1e-3 < differs) or f"{apart}, {differs}"

    return agree(on_ranks(2, mode, run))


class Interrupt(BaseException):
    """As KeyboardInterrupt, which ends a thread with a rank."""


class Interrupted(torch.overrides.TorchFunctionMode):
    """Ends the copy of this number with an exception, before or after it has copied."""

    def __init__(self, number, is_after):
        super().__init__()
        self.left, self.is_after = number, is_after

    def __torch_function__(self, function, types, args=(), kwargs=None):
        is_copy = function is torch.Tensor.copy_
        self.left -= is_copy
        ends = is_copy and self.left == 0
        found = None if ends and not self.is_after else function(*args, **(kwargs or {}))
        if ends:
            raise Interrupt
        return found


def an_exchange_is_whole_or_undone(mode):
    """Ends it at each of its copies. discard() is all that a program has to call."""

    def run(context, shard):
        module, sharded = shard_it(shard)
        train(module, sharded, 0, 3)
        ema, ends = sharded.averages["ema"], 0
        weights, average = sharded.full_state_dict(), ema.full_state_dict()
        for number in range(1, 100):
            for is_after in (False, True):
                interrupted = Interrupted(number, is_after)
                try:
                    with interrupted, ema.shown():
                        pass
                except Interrupt:
                    ends += 1
                sharded.discard()
                if worst(sharded.full_state_dict(), weights) or worst(ema.full_state_dict(), average):
                    return f"after {ends} interruptions in copy {number} the weights or the average are others"
            if interrupted.left > 0:
                break
        train(module, sharded, 3)
        return ends >= 2 * 8 * len(sharded.shards()) or f"{ends} interruptions"

    return agree(on_ranks(1, mode, run))


class Running(nn.Module):
    """Puts other tensors in the place of its buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(9, 9)
        self.register_buffer("mean", torch.zeros(9))
        self.register_buffer("last", None)

    def forward(self, x):
        self.mean, self.last = self.mean * 0.9 + x.mean(0).detach() * 0.1, x.detach()
        return self.linear(x) + self.mean


def buffers_that_a_forward_replaces_are_those_of_before(mode):
    def run(context, shard):
        module = Running()
        sharded = shard(module, averages=functions())
        train(module, sharded, 0, 3)
        before, last = module.mean, module.last = module.mean, None
        values = before.clone()
        with sharded.averages["ema"].shown(), torch.no_grad():
            module(rows(9))
            if module.mean.equal(values) or module.last is None:
                return "the forward pass has not replaced them"
        return (module.mean is before and before.equal(values) and module.last is last) or "they are others"

    return agree(on_ranks(1, mode, run))


def a_parameter_that_was_frozen_begins_with_its_weight(mode):
    """Its job had no average of it."""
    with tempfile.TemporaryDirectory() as folder:

        def run(context, shard):
            module = copy.deepcopy(BASE)
            module.layers[2].weight.requires_grad_(False)
            first = shard(module, averages=functions())
            train(module, first, 0, 4)
            first.save(folder)
            module, sharded = shard_it(shard)
            train(module, sharded, 0, 3)
            sharded.load(folder, flags=fsdp.LoadFlag.ALLOW_MISSING)
            for name, average in sharded.averages.items():
                wanted = first.averages[name].full_state_dict()
                if average.count != first.averages[name].count or worst(average.full_state_dict(), wanted):
                    return f"{name} has {average.count} updates, {worst(average.full_state_dict(), wanted)} beside"
            train(module, sharded, 4)
            found, weights = sharded.averages["ema"].full_state_dict(), sharded.full_state_dict()
            distance = (found["layers.2.weight"] - weights["layers.2.weight"]).abs().max().item()
            return 1e-4 < distance < 0.1 or f"afterwards it is {distance} from the weight"

        return agree(on_ranks(2, mode, run))


def a_function_has_lists_of_its_own(mode):
    """What it does with the lists changes no average."""

    def clear(averages, weights, count):
        torch._foreach_lerp_(averages, weights, 0.1)
        averages.clear()
        weights.clear()

    def run(context, shard):
        module, sharded = shard_it(shard, averages={"ema": get_ema_multi_avg_fn(0.9), "cleared": clear})
        train(module, sharded, 2)
        found, wanted = (sharded.averages[name].full_state_dict() for name in ("cleared", "ema"))
        return worst(found, wanted) == 0 or f"they differ by {worst(found, wanted)}"

    return agree(on_ranks(1, mode, run))


def assign(averages, weights, count):
    for index, weight in enumerate(weights):
        averages[index] = averages[index] * 0.9 + weight * 0.1


def caller_of(name, param):
    return {"optimizer": fsdp.Optimizer.CALLER} if name == "layers.1.weight" else {}


EMA = {"averages": {"ema": get_ema_multi_avg_fn()}}
REFUSED = {
    "a function of single tensors": ({"averages": {"ema": get_ema_avg_fn(0.9)}}, ("'ema'", "in place")),
    "a number": ({"averages": {"ema": 0.999}}, ("'ema'", "get_ema_multi_avg_fn(0.999)")),
    "a function that assigns": ({"averages": {"ema": assign}}, ("'ema'", "in place", "no change of the tensor")),
    "a parameter of another optimizer": ({**EMA, "param_options": caller_of}, ("averages", "'layers.1.weight'")),
    "a name with a dot": ({"averages": {"a.b": get_ema_multi_avg_fn()}}, ("'a.b'", "letters")),
    "Muon": ({**EMA, "optimizer": libfsdp.torch.Muon()}, ("not offered with Muon",)),
    "main weights that are not fp32": ({**EMA, "main_storage": fsdp.MainStorage.SPLIT16}, ("averages", "main_storage")),
}
STRATEGIES = ("NO_SHARD", "OPTIM", "OPTIM_GRADS")
OPTIONS = {
    "in bf16": {"param_dtype": torch.bfloat16},
    "with SGD of torch": {"optimizer": torch.optim.SGD, "optimizer_options": {"lr": 0.1, "momentum": 0.9}},
}


def refused(options, words):
    def run(context, shard):
        return raises(lambda: shard(copy.deepcopy(BASE), **options), *words)

    return on_ranks(1, "mapped", run)[0]


def averages_of(mode, options):
    """The EMA of the main weights, by hand from full_state_dict()."""

    def run(context, shard):
        module = nn.Sequential(*(nn.Linear(9, 9) for _ in range(3)))
        module.load_state_dict({f"{i}.{n}": v for i in range(3) for n, v in BASE.layers[i].state_dict().items()})
        sharded = shard(module, averages=functions(), **options)
        wanted, ema = None, sharded.averages["ema"]
        for step in range(4):
            module(rows(step)).float().pow(2).mean().backward()
            sharded.step() if sharded.optimizer else sharded.step(RATE)
            ema.update()
            full = sharded.full_state_dict()
            wanted = {name: value if wanted is None else wanted[name].lerp(value, 0.1) for name, value in full.items()}
        found = worst(ema.full_state_dict(), wanted)
        return found < 1e-6 or f"they differ by {found:.1e}"

    return agree(on_ranks(2, mode, run))


def cases(mode):
    for ranks in (1, 2, 3):
        yield f"averages equal those of torch on {ranks} ranks ({mode})", lambda n=ranks: equal_those_of_torch(mode, n)
    for strategy in STRATEGIES:
        name = f"averages equal those of torch with strategy {strategy} ({mode})"
        yield name, lambda s=strategy: equal_those_of_torch(mode, 2, strategy=fsdp.Strategy[s])
    yield f"averages equal those of torch on two replicas ({mode})", lambda: equal_on_replicas(mode)
    for ranks, other in ((2, 2), (2, 3), (3, 1)):
        name = f"averages of {ranks} ranks resume bit for bit on {other} ({mode})"
        yield name, lambda ranks=ranks, other=other: resume_bit_for_bit(mode, ranks, other)
    for case in (
        differ_from_the_weights,
        training_goes_on_as_without,
        a_checkpoint_without_averages,
        what_cannot_be_done_is_told,
        an_export_has_the_buffers_of_the_evaluation,
        an_exchange_is_whole_or_undone,
        buffers_that_a_forward_replaces_are_those_of_before,
        a_parameter_that_was_frozen_begins_with_its_weight,
        a_function_has_lists_of_its_own,
    ):
        yield f"{case.__name__.replace('_', ' ')} ({mode})", lambda case=case: case(mode)
    for name, options in OPTIONS.items():
        case = lambda options=options: averages_of(mode, options)  # noqa: E731
        yield f"averages {name} are those of the main weights ({mode})", case
    if mode == "mapped":
        for name, (options, words) in REFUSED.items():
            yield f"shard refuses averages: {name}", lambda options=options, words=words: refused(options, words)


if __name__ == "__main__":
    sys.exit(run_cases(cases))
