#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What torch's users do to a module beside training it, after libfsdp.torch.shard: it works as they expect, or a Python
exception names the parameter and the call to use.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_habits.py [--mode mapped|copied|debug] [WORD...]

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test Anything
Protocol.
"""

import argparse
import copy
import io
import sys
import tempfile

import torch
from torch import nn
from torch_check import MODES, Report, on_ranks, raises

RATE = 1e-2
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A stack with buffers and a head that is tied to the first layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.head.weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


torch.manual_seed(0)
BASE = Net()


def net():
    return copy.deepcopy(BASE)


def backward(module, shift=0):
    loss = module(X + shift).pow(2).mean()
    loss.backward()
    return loss.item()


def train(module, sharded, steps=1, **options):
    losses = []
    for step in range(steps):
        losses.append(backward(module, step))
        sharded.step(RATE, **options)
    return losses


def trains(module, sharded):
    """Do weights change, and are the losses those of the weights?"""
    before = sharded.full_state_dict()
    train(module, sharded, 2)
    after = sharded.full_state_dict()
    return not torch.equal(before["layers.1.weight"], after["layers.1.weight"])


def equal(found, wanted):
    return set(found) == set(wanted) and all(torch.equal(found[name].float(), wanted[name].float()) for name in wanted)


# -- state dicts ------------------------------------------------------------------------------------------------------


def state_dict_has_the_weights(module, sharded):
    train(module, sharded, 3)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return equal(torch.load(file), sharded.full_state_dict()) and trains(module, sharded)


def load_state_dict_takes_values(module, sharded, **options):
    wanted = {name: value + 1 for name, value in net().state_dict().items()}
    module.load_state_dict(wanted, **options)
    alone = net()
    alone.load_state_dict(wanted)
    is_right = equal(sharded.full_state_dict(), wanted)
    return is_right and torch.allclose(module(X), alone(X), atol=1e-5) and trains(module, sharded)


def load_state_dict_assigns_values(module, sharded):
    return load_state_dict_takes_values(module, sharded, assign=True)


def load_state_dict_tells_what_is_missing(module, sharded):
    state = net().state_dict()
    del state["head.bias"]
    found = raises(lambda: module.load_state_dict(state), "head.bias")
    module.load_state_dict(state, strict=False)
    return found is True and trains(module, sharded) or found


def load_state_dict_tells_shapes_that_differ(module, sharded):
    state = net().state_dict()
    state["layers.1.weight"] = torch.ones(3, 3)
    found = raises(lambda: module.load_state_dict(state), "layers.1.weight", "size mismatch")
    return found is True and trains(module, sharded) or found


def a_layer_loads_its_own(module, sharded):
    wanted = {name: value + 2 for name, value in net().layers[1].state_dict().items()}
    module.layers[1].load_state_dict(wanted)
    return torch.equal(sharded.full_state_dict()["layers.1.weight"], wanted["weight"]) and trains(module, sharded)


def full_state_dict_has_buffers_and_tied_names(module, sharded):
    train(module, sharded, 2)
    full = sharded.full_state_dict()
    if set(full) != set(net().state_dict()):
        return str(set(full) ^ set(net().state_dict()))
    module.norm.running_mean.zero_()
    sharded.load_full_state_dict({name: value * 2 for name, value in full.items()})
    return equal(sharded.full_state_dict(), {name: value * 2 for name, value in full.items()})


def load_full_state_dict_names_what_does_not_fit(module, sharded):
    full = sharded.full_state_dict()
    lacks = {name: value for name, value in full.items() if name != "norm.weight"}
    found = raises(lambda: sharded.load_full_state_dict(lacks), "norm.weight")
    other = raises(lambda: sharded.load_full_state_dict({**full, "norm.weight": torch.ones(3)}), "norm.weight", "shapes")
    return found is True and other is True and trains(module, sharded) or f"{found}, {other}"


def saves_and_loads_with_buffers(module, sharded):
    with shared_folder(sharded.context) as folder:
        train(module, sharded, 2)
        sharded.save(folder)
        saved = sharded.full_state_dict()
        train(module, sharded, 2)
        sharded.load(folder)
        return equal(sharded.full_state_dict(), saved) and trains(module, sharded)


class shared_folder:
    """A folder that rank 0 makes and removes, by its name."""

    names = {}

    def __init__(self, context):
        self.context = context

    def __enter__(self):
        if self.context.rank == 0:
            self.folder = tempfile.TemporaryDirectory()
            self.names["folder"] = self.folder.name
        self.context.all_reduce_values(0.0)
        return self.names["folder"]

    def __exit__(self, *_):
        self.context.all_reduce_values(0.0)
        if self.context.rank == 0:
            self.folder.cleanup()


# -- parameters -------------------------------------------------------------------------------------------------------


def a_frozen_layer_stays(module, sharded):
    train(module, sharded, 2, weight_decay=0.1)
    before = sharded.full_state_dict()
    module.layers[1].requires_grad_(False)
    train(module, sharded, 2, weight_decay=0.1)
    frozen = sharded.full_state_dict()
    module.layers[1].requires_grad_(True)
    train(module, sharded, 1)
    after = sharded.full_state_dict()
    name, other = "layers.1.weight", "layers.2.weight"
    return (
        torch.equal(before[name], frozen[name])
        and not torch.equal(before[other], frozen[other])
        and not torch.equal(after[name], frozen[name])
    )


def freezing_within_a_step_is_refused(module, sharded):
    backward(module)
    module.layers[1].requires_grad_(False)
    return raises(lambda: module(X), "layers.1", "requires_grad", "after sharded.step()")


def conversion_is_refused(module, sharded):
    found = raises(lambda: (module.to(torch.bfloat16), module(X.bfloat16())), "layers.0.weight")
    sharded.drop_writes()
    for buffer in ("running_mean", "running_var"):
        setattr(module.norm, buffer, getattr(module.norm, buffer).float())
    return found is True and trains(module, sharded) or found


def writes_in_place_are_told(module, sharded):
    found = raises(lambda: (nn.init.zeros_(module.layers[2].weight), module(X)), "layers.2.weight")
    sharded.drop_writes()
    return found is True and trains(module, sharded) or found


def new_parameters_are_told(module, sharded):
    before = module.norm.bias
    module.norm.bias = nn.Parameter(torch.zeros(8))
    found = raises(lambda: module(X), "norm.bias", "not in the module")
    sharded.drop_writes()
    return found is True and module.norm.bias is before and trains(module, sharded) or found


def writes_can_be_taken(module, sharded):
    if sharded.moves:
        return raises(sharded.take_writes, "load_state_dict")
    nn.init.ones_(module.layers[2].weight)
    module.norm.bias = nn.Parameter(torch.full((8,), 3.0))
    module.layers[3].bias.data = torch.full((8,), 5.0)
    sharded.take_writes()
    full = sharded.full_state_dict()
    is_right = [full[name].eq(value).all() for name, value in (("layers.2.weight", 1), ("norm.bias", 3), ("layers.3.bias", 5))]
    return all(is_right) and trains(module, sharded)


def weights_outside_of_a_pass(module, sharded):
    if not sharded.moves:
        return torch.equal(module.layers[1].weight, BASE.layers[1].weight)
    found = raises(lambda: module.layers[1].weight + 1, "layers.1.weight", "sharded.unsharded()")
    with sharded.unsharded(module.layers[1]):
        return torch.equal(module.layers[1].weight, BASE.layers[1].weight) and found


def a_deep_copy(module, sharded):
    if sharded.moves:
        return raises(lambda: copy.deepcopy(module), "deepcopy", "full_state_dict")
    other = copy.deepcopy(module)
    before = other(X)
    train(module, sharded, 1)
    other.train()
    return torch.allclose(other(X), before) and trains(module, sharded)


def pickling_is_refused(module, sharded):
    return raises(lambda: torch.save(module, io.BytesIO()), "full_state_dict")


# -- gradients --------------------------------------------------------------------------------------------------------


def clip_grad_norm_names_the_call(module, sharded):
    backward(module)
    return raises(lambda: nn.utils.clip_grad_norm_(module.parameters(), 1.0), "handed to libfsdp", "max_norm")


def an_optimizer_of_torch_is_refused(module, sharded):
    optimizer = torch.optim.AdamW(module.parameters())
    backward(module)
    return raises(optimizer.step, "optimizer of torch has nothing to do")


def zero_grad_after_backward_is_told(module, sharded):
    backward(module)
    module.zero_grad()
    found = raises(lambda: sharded.step(RATE), "zero_grad", "sharded.discard()")
    sharded.discard()
    return found is True and trains(module, sharded) or found


def zero_grad_around_a_step_is_nothing(module, sharded):
    for _ in range(2):
        module.zero_grad()
        train(module, sharded, 1)
        module.zero_grad()
    return trains(module, sharded)


def whole_gradients_can_be_read(module, sharded):
    alone = net()
    backward(alone)
    backward(module)
    sharded.finish()
    found = sharded.read_grad("layers.2.weight")
    told = [raises(lambda: module(X), "sharded.step()"), raises(sharded.finish, "sharded.step()")]
    before = sharded.full_state_dict()["layers.2.weight"]
    sharded.step(RATE)
    has_moved = not torch.equal(before, sharded.full_state_dict()["layers.2.weight"])
    is_right = torch.allclose(found, alone.layers[2].weight.grad, atol=1e-6)
    return told == [True, True] and has_moved and is_right and trains(module, sharded) or str(told)


def a_backward_after_the_step_is_refused(module, sharded):
    loss = module(X).pow(2).mean()
    loss.backward(retain_graph=True)
    sharded.step(RATE)
    return raises(loss.backward, "modified by an inplace operation")


def operations_in_place_are_checked(module, sharded):
    y = torch.tanh(module.layers[0](X.clone().requires_grad_()))
    y.add_(1)
    return raises(y.sum().backward, "inplace")


def an_exception_in_backward(module, sharded):
    hook = module.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
    found = raises(lambda: backward(module), "ZeroDivisionError")
    hook.remove()
    told = raises(lambda: (backward(module), sharded.step(RATE)), "sharded.discard()")
    sharded.discard()
    return found is True and told is True and trains(module, sharded) or f"{found}, {told}"


def an_exception_in_forward(module, sharded):
    hook = module.layers[1].register_forward_hook(lambda *_: 1 / 0)
    found = raises(lambda: module(X), "ZeroDivisionError")
    hook.remove()
    return found is True and trains(module, sharded) or found


HABITS = [
    state_dict_has_the_weights,
    load_state_dict_takes_values,
    load_state_dict_assigns_values,
    load_state_dict_tells_what_is_missing,
    load_state_dict_tells_shapes_that_differ,
    a_layer_loads_its_own,
    full_state_dict_has_buffers_and_tied_names,
    load_full_state_dict_names_what_does_not_fit,
    saves_and_loads_with_buffers,
    a_frozen_layer_stays,
    freezing_within_a_step_is_refused,
    conversion_is_refused,
    writes_in_place_are_told,
    new_parameters_are_told,
    writes_can_be_taken,
    weights_outside_of_a_pass,
    a_deep_copy,
    pickling_is_refused,
    clip_grad_norm_names_the_call,
    an_optimizer_of_torch_is_refused,
    zero_grad_after_backward_is_told,
    zero_grad_around_a_step_is_nothing,
    whole_gradients_can_be_read,
    a_backward_after_the_step_is_refused,
    operations_in_place_are_checked,
    an_exception_in_backward,
    an_exception_in_forward,
]


# -- what shard() refuses ---------------------------------------------------------------------------------------------


def frozen_at_first():
    module = net()
    module.layers[1].requires_grad_(False)
    return module


def unfreezing_what_was_declared_frozen(shard):
    module = frozen_at_first()
    sharded = shard(module)
    train(module, sharded, 1)
    module.layers[1].requires_grad_(True)
    return raises(lambda: module(X), "layers.1", "frozen when the module was sharded")


def closing_gives_the_module_back(shard):
    module = net()
    sharded = shard(module)
    train(module, sharded, 2)
    full = sharded.full_state_dict()
    sharded.close()
    if sharded.moves:
        if not module.layers[1].weight.isnan().all():
            return "weights that are gone look as if they were there"
        module.load_state_dict(full)
    alone = net()
    alone.load_state_dict(full)
    is_same = torch.equal(module(X), alone(X))
    sharded = shard(module)
    is_trained = trains(module, sharded)
    return is_same and is_trained


def too_few_buffers_name_the_option(shard):
    module = net()
    sharded = shard(module, held_groups=1)
    if not sharded.moves:
        return trains(module, sharded)
    found = raises(lambda: module(X), "'layers.0'", "'root'", "shard() a larger held_groups")
    sharded.discard()
    return found


def sharded_twice(shard):
    module = net()
    shard(module)
    return raises(lambda: shard(module), "sharded already")


REFUSED = {
    "float64": (lambda: nn.Linear(2, 2).double(), ("'weight'", "float64")),
    "integers": (lambda: with_integers(), ("'codes'", "int64")),
    "the meta device": (lambda: nn.Linear(2, 2, device="meta"), ("'weight'", "meta device")),
    "no parameters": (lambda: nn.ReLU(), ("ReLU has no parameters",)),
    "max_norm": (lambda: nn.Embedding(4, 2, max_norm=1.0), ("Embedding", "max_norm")),
    "torch.compile": (lambda: nn.Sequential(torch.compile(nn.Linear(2, 2))), ("torch.compile",)),
}


def with_integers():
    module = nn.Module()
    module.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    return module


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report()

    def run(name, ranks, mode, function):
        if all(word in name for word in options.words):
            ending = f"({mode}, {ranks} rank{'s' if ranks > 1 else ''})"

            def agree():
                found = on_ranks(ranks, mode, lambda context, shard: function(shard))
                return next((one for one in found if one is not True), True)

            report.run(f"{name} {ending}", agree)

    for mode in [options.mode] if options.mode else MODES:
        for ranks in (1, 2):
            for habit in HABITS:

                def check(shard, habit=habit):
                    module = net()
                    sharded = shard(module)
                    found = habit(module, sharded)
                    sharded.discard()
                    return found

                run(habit.__name__.replace("_", " "), ranks, mode, check)
            for refusal in (unfreezing_what_was_declared_frozen, sharded_twice, closing_gives_the_module_back,
                            too_few_buffers_name_the_option):
                run(refusal.__name__.replace("_", " "), ranks, mode, refusal)
    for name, (make, words) in REFUSED.items():
        run(f"shard refuses {name}", 1, "mapped", lambda shard, make=make, words=words: raises(lambda: shard(make()), *words))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
