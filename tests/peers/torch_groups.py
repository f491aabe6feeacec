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
import tempfile

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_check import AdamW, compare, on_ranks, raises, run_cases

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


BLOCKS = [f"blocks.{name}" for name in ("first", "second", "third", "fourth")]


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
    "all modules in one group": [
        ["embed", "blocks.first", "blocks.second", "blocks.third", "blocks.fourth", "norm", "head"]
    ],
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


class Weighted(nn.Module):
    """A parametrized layer and a list of layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.layers = nn.ModuleList(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2))


def default_groups(mode):
    """Elements of lists are groups; children, elements of a ModuleDict and the lists of a parametrization are not."""

    def check(shard):
        body = nn.ModuleDict({"embed": nn.Linear(2, 2), "layers": nn.ModuleList([nn.Linear(2, 2)])})
        two = nn.Module()
        two.body, two.tail = nn.Linear(2, 2), nn.Linear(2, 2)
        found = [names_of(shard(each)) for each in (two, nn.Linear(2, 2), net(), body, Weighted())]
        return found == [["root"]] * 3 + [["root", "layers.0"], ["root", "layers.0", "layers.1"]] or str(found)

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


# -- options of groups and parameters ---------------------------------------------------------------------------------


def a_resident_group_stays_gathered(mode):
    """It does from its forward to the end of the backward pass, with the same losses. If buffers run out it is given
    back."""

    def check(shard):
        losses, held, first = [], [], "blocks.first"
        for residents in ((), (first,), (first, "blocks.second", "blocks.third")):
            module, flags = net(), {"flags": fsdp.GroupFlag.RESIDENT}
            options = {"prefetch_depth": 0, "group_options": lambda name, layer: flags if name in residents else {}}
            sharded = shard(module, held_groups=3, layers=BLOCKS, **options)
            losses.append(train(module, sharded))
            module(torch.zeros(1, 1, dtype=torch.long))  # without a backward pass
            held.append(next(layer.holds for layer in sharded.layers if layer.name == first))
            sharded.load_full_state_dict(sharded.full_state_dict())
        is_held = held == [0, 1, 1 if mode == "mapped" else 0]
        return losses[0] == losses[1] == losses[2] and is_held or f"{losses}, {held}"

    return on_each(mode, check)


def parameters_have_options(mode):
    """LR_ZERO of one parameter: it stays, and others do not."""

    def check(shard):
        module = net()
        stays = {"flags": fsdp.ParamFlag.LR_ZERO}
        sharded = shard(module, param_options=lambda name, param: stays if name == "head.weight" else None)
        before = sharded.full_state_dict()
        train(module, sharded)
        after = sharded.full_state_dict()
        moved = [name for name in before if not torch.equal(before[name], after[name])]
        return len(moved) == len(before) - 1 and "head.weight" not in moved or str(moved)

    return on_each(mode, check)


def gradients_are_synchronized_together(mode):
    """A part cannot leave a sum out. With reduce_policy all gradients are exchanged once a step."""

    def check(shard):
        losses = []
        for policy in (fsdp.ReducePolicy.EACH, fsdp.ReducePolicy.LAST):
            module = net()
            sharded = shard(module, reduce_policy=policy)
            for step in range(STEPS):
                losses += [float(step_of(module, 10 * step + number, 0)) for number in range(3)]
                sharded.step(RATE)
        told = raises(lambda: sharded.set_requires_gradient_sync(False), "ReducePolicy.LAST", "requires_grad_(False)")
        half = len(losses) // 2
        is_near = all(abs(a - b) < 1e-5 for a, b in zip(losses[:half], losses[half:]))
        return told is True and is_near or f"{told}, {losses}"

    return on_each(mode, check)


# -- dtypes -----------------------------------------------------------------------------------------------------------


def train_in_bfloat16():
    """By torch alone: weights in bfloat16 of main weights in fp32, which are not rounded at first."""
    module = net().bfloat16()
    optimizer, losses = AdamW(module.parameters(), RATE), []
    for param, exact in zip(module.parameters(), net().parameters()):
        optimizer.main[param] = exact.detach().clone()
    for step in range(STEPS):
        losses.append(float(step_of(module, step, 0)))
        optimizer.step()
    return losses, dict(zip((name for name, _ in module.named_parameters()), optimizer.main.values()))


def weights_in_param_dtype(mode):
    losses, weights = train_in_bfloat16()

    def check(shard):
        module = net()
        sharded = shard(module, param_dtype=torch.bfloat16)
        start = sharded.full_state_dict()
        exact = all(torch.equal(start[name], value) for name, value in net().state_dict().items())
        found, ends = train(module, sharded), sharded.full_state_dict()
        by_loss = max(abs(a - b) for a, b in zip(found, losses))
        by_weight = max((ends[name] - weights[name]).abs().max().item() for name in weights)
        is_near = by_loss < 1e-6 and by_weight < 1e-6
        return exact and is_near or f"initial values are exact: {exact}; losses {by_loss:.1e}, weights {by_weight:.1e}"

    return on_each(mode, check, ranks=1)


def dtypes_of_outputs_and_grads(mode):
    def check(shard):
        module, seen = net(), []
        sharded = shard(module, param_dtype=torch.bfloat16, output_dtype=torch.float32, reduce_dtype=torch.float32)
        module.blocks.first.register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
        seen.append(module(torch.zeros(2, 3, dtype=torch.long)).dtype)
        train(module, sharded)
        return seen[:2] == [torch.bfloat16, torch.float32] or str(seen)

    return on_each(mode, check)


def inputs_are_cast(mode):
    """Those of each layer, and of the module, by position and by name; integers stay."""

    class Takes(nn.Linear):
        def forward(self, x, *, scale, index):
            seen.append((x.dtype, scale["a"].dtype, index.dtype))
            return super().forward(x) * scale["a"]

    class Casting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.head = nn.ModuleList([Takes(WIDTH, WIDTH)]), nn.Linear(WIDTH, 1)

        def forward(self, x):
            scale = {"a": torch.ones(WIDTH, dtype=torch.float64)}
            seen.append(x.dtype)
            return self.head(self.layers[0](x.float(), scale=scale, index=torch.zeros(1, dtype=torch.long)))

    seen, base = [], Casting()
    half = torch.bfloat16

    def check(shard):
        del seen[:]
        module, x = copy.deepcopy(base), torch.randn(2, WIDTH, requires_grad=True)
        sharded = shard(module, param_dtype=half)
        module(x).sum().backward()
        sharded.step(RATE)
        other = shard(copy.deepcopy(base), param_dtype=half, cast_forward_inputs=False)
        told = raises(lambda: other.module(x))
        single = {"dtype": torch.float32}
        options = lambda name, param: single if "0.bias" in name else {}
        mixed = shard(copy.deepcopy(base), param_dtype=half, param_options=options)
        raises(lambda: mixed.module(x))
        is_as_it_was = seen[-1][0] == torch.float32
        is_cast = is_as_it_was and seen[:2] == [half, (half, half, torch.long)] and x.grad.dtype == torch.float32
        return is_cast and told != "no exception" or f"{seen}, {told}"

    return on_each(mode, check, ranks=1)


def state_dicts_keep_the_given_dtype(mode):
    """state_dict() has main weights in fp32, and load_state_dict() does not round them."""

    def check(shard):
        module, other = net(), net()
        sharded = shard(module, param_dtype=torch.bfloat16)
        train(module, sharded)
        state = module.state_dict()
        part = module.head.state_dict()
        again = shard(other, param_dtype=torch.bfloat16)
        other.load_state_dict(state)
        full, found = sharded.full_state_dict(), again.full_state_dict()
        is_kept = all(torch.equal(full[name], state[name]) and torch.equal(full[name], found[name]) for name in full)
        is_kept = is_kept and state["head.weight"].dtype == torch.float32
        return is_kept and torch.equal(part["weight"], full["head.weight"])

    return on_each(mode, check)


WRONG_DTYPES = {
    "an integer": ({"param_dtype": torch.int8}, ("param_dtype", "int8")),
    "float64": ({"param_dtype": torch.float64}, ("'embed.weight'", "float64", "bfloat16")),
    "a word": ({"output_dtype": "half"}, ("output_dtype", "'half'")),
    "bytes": ({"param_options": lambda name, param: {"dtype": torch.uint8}}, ("'embed.weight'", "uint8")),
}


def refuses_dtypes(options, words):
    return lambda mode: on_each(mode, lambda shard: raises(lambda: shard(net(), **options), *words), ranks=1)


# -- quantized weights ------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Layers whose matrices have whole blocks of 32."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 4)
        self.recomputes = False

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x))
        return self.head(x)


WIDE = Wide()
WIDE_X = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


def train_wide(module, sharded, steps=8):
    losses = []
    for _ in range(steps):
        loss = (module(WIDE_X) - WIDE_X[:, :4]).square().mean()
        loss.backward()
        sharded.step(RATE)
        losses.append(loss.item())
    return losses


def quantizes(kind, recomputes):
    """The codes' numbers are near the main weights and not equal, the layers' tensors have memory only while they are
    used, and training goes nearly as with weights in fp32."""

    def check(shard):
        module, plain = copy.deepcopy(WIDE), copy.deepcopy(WIDE)
        module.recomputes = recomputes
        is_matrix = lambda name, param: name.startswith("layers.") and param.dim() == 2
        options = lambda name, param: {"quantization": kind} if is_matrix(name, param) else {}
        sharded = shard(module, held_groups=3, param_options=options)
        exact = plain.layers[1].weight.detach()
        with sharded.unsharded(module.layers[1]):
            shown = module.layers[1].weight.detach().clone()
        error = (shown - exact).abs().max() / exact.abs().max()
        sizes = []
        module.layers[1].register_forward_pre_hook(lambda *_: sizes.append(memory()))
        stored = [made for each in sharded.layers[1:] for made in each.quantized.tensors.values()]
        memory = lambda: [made.untyped_storage().nbytes() for made in stored]
        quantized, made = sharded.layers[2].quantized, []
        quantized._numbers = lambda *given, numbers=quantized._numbers: made.append(given) or numbers(*given)
        losses, wanted = train_wide(module, sharded), train_wide(plain, shard(plain))
        if len(made) > len(losses) * (3 if recomputes else 2):
            return f"numbers were made {len(made)} times"
        is_small = all(size[1] == 4 * 64 * 64 and sum(size) == size[1] for size in sizes) and sum(memory()) == 0
        by_loss = max(abs(a - b) for a, b in zip(losses, wanted))
        is_near = 0 < error < 0.07 and 0 < by_loss < 0.02 and losses[-1] < losses[0] / 2
        return is_near and is_small or f"{error}, {by_loss}, {losses}, {sizes[:2]}"

    return lambda mode: on_each(mode, check)


def quantized_weights_are_saved_exactly(mode):
    def check(shard):
        module, other = copy.deepcopy(WIDE), copy.deepcopy(WIDE)
        options = lambda name, param: {"quantization": fsdp.Quantization.MXFP8} if name == "layers.1.weight" else {}
        sharded = shard(module, param_options=options)
        start = sharded.full_state_dict()["layers.1.weight"]
        train_wide(module, sharded)
        state = module.state_dict()
        again = shard(other, param_options=options)
        other.load_state_dict(state)
        found = again.full_state_dict()["layers.1.weight"]
        is_exact = torch.equal(start, WIDE.layers[1].weight.detach())
        return is_exact and torch.equal(found, sharded.full_state_dict()["layers.1.weight"])

    return on_each(mode, check)


def numbers_are_those_of_the_library(mode):
    """What the backward pass multiplies by is made of the codes of columns."""

    def check(shard):
        module = copy.deepcopy(WIDE)
        module.layers[1].weight.data[::2] *= 1e-4  # blocks of a column have small and large numbers, those of a row not
        exact = module.layers[1].weight.detach().clone()
        options = lambda name, param: {"quantization": fsdp.Quantization.MXFP8} if name == "layers.1.weight" else {}
        sharded = shard(module, param_options=options)
        x = WIDE_X[:1].clone().requires_grad_()
        y = module.layers[1](x * 1)
        grads = [torch.autograd.grad(y[0, row], x, retain_graph=True)[0][0] for row in range(0, 64, 21)]
        sharded.discard()
        with sharded.unsharded(module.layers[1]):
            by_row = module.layers[1].weight.detach().clone()
        columns = torch.stack(grads)
        blocks = exact.view(2, 32, 64).abs().amax(1)
        exponent = torch.ceil(torch.log2(blocks / 448)).repeat_interleave(32, 0)
        scale = torch.exp2(exponent)
        wanted = ((exact / scale).to(torch.float8_e4m3fn).float() * scale)[::21]
        is_right = torch.equal(columns, wanted) and not torch.equal(columns, by_row[::21])
        return is_right or str((columns - wanted).abs().max())

    return on_each(mode, check, ranks=1)


# -- ignored parameters -----------------------------------------------------------------------------------------------


def ignored_parameters_stay(mode):
    def check(shard):
        for ignored in ("a set", "a function", "one"):
            module = net()
            own = [module.norm.weight, module.blocks.first.bias]
            chosen = {
                "a set": set(own),
                "a function": lambda name, param: name in ("norm.weight", "blocks.first.bias"),
                "one": own[0],
            }[ignored]
            own = own[:1] if ignored == "one" else own
            sharded = shard(module, ignored_params=chosen)
            declared = {name for layer in sharded.layers for name, _ in layer.params}
            optimizer, before = torch.optim.SGD(own, 0.1), [param.detach().clone() for param in own]
            step_of(module, 0, 0)
            sharded.step(RATE)
            optimizer.step()
            moved = all(not torch.equal(param.detach(), value) for param, value in zip(own, before))
            full = sharded.full_state_dict()
            if "norm.weight" in declared or not moved or not torch.equal(full["norm.weight"], own[0].detach()):
                return f"{ignored}: {declared}, {moved}"
            own[0].data.zero_()
            sharded.load_full_state_dict(full)
            state = module.state_dict()
            if not torch.equal(own[0].detach(), full["norm.weight"]) or set(state) != set(full):
                return f"{ignored}: it is not loaded"
            sharded.close()
        return True

    return on_each(mode, check)


def ignored_parameters_are_not_saved(mode):
    def check(shard):
        with tempfile.TemporaryDirectory() as folder:
            module = net()
            sharded = shard(module, ignored_params=lambda name, param: name == "norm.weight")
            sharded.save(folder + "/saved")
            module.norm.weight.data.fill_(3)
            sharded.load(folder + "/saved")
            return module.norm.weight.eq(3).all().item()

    return on_each(mode, check, ranks=1)


def wrong_ignored_parameters(mode):
    def check(shard):
        told = [
            raises(lambda: shard(net(), ignored_params=[torch.zeros(3, 4)]), "ignored_params", "(3, 4)"),
            raises(lambda: shard(net(), ignored_params=["head"]), "ignored_params", "'head'", "lambda name, param"),
            raises(lambda: shard(net(), ignored_params=lambda name, param: True), "no parameters to shard"),
        ]
        return told == [True] * 3 or str(told)

    return on_each(mode, check, ranks=1)


WRONG_LAYERS = {
    "a name that is not there": (["nothing"], ("'nothing'", "does not contain")),
    "a number": ([3], ("layers has 3", "a module")),
    "an empty list": ([[]], ("empty list",)),
    "a module twice": ([["embed", "head"], "head"], ("'head' twice", "one group")),
    "a word in place of a list": ("head", ("layers is 'head'", "list")),
    "a module in place of a list": (nn.Linear(1, 1), ("layers is Linear", "list")),
    "the whole module in a list": ([["", "embed"], "head"], ("whole module", "root group")),
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
        default_groups,
        the_log_tells_the_groups,
        a_resident_group_stays_gathered,
        parameters_have_options,
        gradients_are_synchronized_together,
        weights_in_param_dtype,
        dtypes_of_outputs_and_grads,
        inputs_are_cast,
        state_dicts_keep_the_given_dtype,
        quantized_weights_are_saved_exactly,
        numbers_are_those_of_the_library,
        ignored_parameters_stay,
        ignored_parameters_are_not_saved,
        wrong_ignored_parameters,
    ):
        yield case.__name__.replace("_", " "), case
    for kind in fsdp.Quantization:
        for recomputes in (False, True):
            yield f"weights in {kind.name}{', recomputed' if recomputes else ''}", quantizes(kind, recomputes)
    for name, (layers, words) in WRONG_LAYERS.items():
        yield f"layers with {name}", refuses(layers, words)
    for name, (options, words) in WRONG_DTYPES.items():
        yield f"the dtype is {name}", refuses_dtypes(options, words)


def named_cases(mode):
    for name, case in cases(mode):
        yield f"{name} ({mode})", lambda case=case: case(mode)


if __name__ == "__main__":
    sys.exit(run_cases(named_cases))
