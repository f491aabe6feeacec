#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""State dicts and checkpoints of a module after libfsdp.torch.shard: they have the right values, or a Python exception
names what does not fit, and the module goes on.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_states.py [--mode mapped|copied|debug] [WORD...]

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test Anything
Protocol.
"""

import contextlib
import io
import sys
import tempfile
from unittest import mock

import torch
from torch import nn
from torch_check import message_of, raises
from torch_habits import RATE, X, backward, net, run_habits, train, trains

import libfsdp as fsdp
import libfsdp.torch


def equal(found, wanted):
    return set(found) == set(wanted) and all(torch.equal(found[name].float(), wanted[name].float()) for name in wanted)


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


def a_load_that_raises_can_be_left(module, sharded):
    """A part of the module raises while it loads: the model goes on with what it had by then."""

    def refuse(*_):
        raise ValueError("a bad value")

    module.norm._load_from_state_dict, before = refuse, module.norm._load_from_state_dict
    found = raises(lambda: module.load_state_dict(net().state_dict()), "a bad value")
    module.norm._load_from_state_dict = before
    told = [raises(call, "load_state_dict()", "sharded.discard()") for call in (lambda: module(X), lambda: sharded.step(RATE))]
    sharded.discard()
    is_right = trains(module, sharded) and load_state_dict_takes_values(module, sharded)
    return [found, *told] == [True] * 3 and is_right or f"{found}, {told}, {is_right}"


def full_state_dicts_of_other_dtypes_load(module, sharded):
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        wanted = {name: (value * 4).to(dtype) for name, value in net().state_dict().items()}
        sharded.load_full_state_dict(wanted)
        if not equal(sharded.full_state_dict(), wanted):
            return f"{dtype} loads as something else"
    return trains(module, sharded)


def a_full_state_dict_with_one_of_two_names_loads(module, sharded):
    full = {name: value + 1 for name, value in net().state_dict().items() if name != "layers.0.weight"}
    sharded.load_full_state_dict(full, strict=False)
    return torch.equal(sharded.full_state_dict()["layers.0.weight"], full["head.weight"]) and trains(module, sharded)


def loads_within_a_step_are_refused(module, sharded):
    """The error is in torch's words, and the step goes on."""
    state, found = net().state_dict(), []
    loads = [lambda: module.load_state_dict(state), lambda: sharded.load_full_state_dict(state), lambda: sharded.load("no")]
    backward(module)
    found += [raises(call, "sharded.step()", "sharded.discard()") for call in loads[:2]]
    sharded.finish()
    found += [raises(call, "sharded.step()") for call in (*loads[:2], lambda: sharded.save("no"))]
    sharded.step(RATE)
    return found == [True] * 5 and trains(module, sharded) or str(found)


def a_checkpoint_that_does_not_fit(module, sharded):
    """Loading it is an error, and the model goes on."""
    with shared_folder(sharded.context) as folder:
        other = libfsdp.torch.shard(nn.Sequential(nn.Linear(3, 3)), sharded.context)
        other.save(folder)
        found = raises(lambda: sharded.load(folder), "norm.weight")
        return found is True and trains(module, sharded) or found


def a_layer_loads_its_own(module, sharded):
    wanted = {name: value + 2 for name, value in net().layers[1].state_dict().items()}
    module.layers[1].load_state_dict(wanted)
    return torch.equal(sharded.full_state_dict()["layers.1.weight"], wanted["weight"]) and trains(module, sharded)


class Block(nn.Module):
    """Parts of two levels, parameters of the block's own, and a weight that it shares with two of its parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.gain = nn.Parameter(torch.ones(8))
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        self.outer = nn.Linear(8, 8)
        self.outer.weight = self.shared = self.inner[0].weight

    def forward(self, x):
        return x + self.outer(self.inner(x)) * self.gain


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layers = Block(), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        return self.layers[1](self.layers[0](self.first(x)))


def parts_of_layers_save_and_load_their_own(shard):
    """So do parts of the root group, and none of them touches what is not its own."""
    module = Blocks()
    sharded = shard(module)
    for path in ("", "first", "first.inner", "layers.1", "layers.1.inner.1", "layers.0.outer", "layers.0.inner.0"):
        before = sharded.full_state_dict()
        part, prefix = module.get_submodule(path), path + "." if path else ""
        state = part.state_dict()
        own = {name: value for name, value in before.items() if name.startswith(prefix)}
        if not equal({prefix + name: value for name, value in state.items()}, own):
            return f"the state dict of {path!r} is wrong"
        wanted = {name: value * 2 + 1 for name, value in state.items()}
        part.load_state_dict(wanted, assign=path.endswith("1"))
        full = sharded.full_state_dict()
        names = dict(module.named_parameters(remove_duplicate=False))
        loaded = {id(names[name]) for name in own}
        others = {name: value for name, value in full.items() if id(names[name]) not in loaded}
        if not equal({name: full[name] for name in own}, {prefix + name: value for name, value in wanted.items()}):
            return f"{path!r} has not loaded its own"
        if not equal(others, {name: before[name] for name in others}):
            return f"the load of {path!r} has changed others"
    module(X).pow(2).mean().backward()
    sharded.step(RATE)
    return True


class Turned(nn.Linear):
    """Saves and loads by methods of its own: its weight turned, beside the usual names."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "turned"] = self.weight.detach().t()

    def _load_from_state_dict(self, state, prefix, *rest):
        state.pop(prefix + "turned", None)
        super()._load_from_state_dict(state, prefix, *rest)


class Foreign(nn.Linear):
    """Loads without torch's method, so that no hook of torch hears of its beginning."""

    def _load_from_state_dict(self, state, prefix, metadata, strict, missing, unexpected, errors):
        self.loaded = {name: state.pop(prefix + name) for name in ("weight", "bias")}


def parts_with_methods_of_their_own_save_and_load(shard):
    torch.manual_seed(5)
    module = nn.Sequential(nn.Sequential(Turned(8, 8), nn.Tanh(), Foreign(8, 8)), Turned(8, 8), nn.Linear(8, 8))
    sharded = shard(module, held_groups=1)
    full, saved = sharded.full_state_dict(), module.state_dict()
    if not sharded.hides_weights:  # as in torch, they are the weights
        saved = {name: value.clone() for name, value in saved.items()}
    sharded.load_full_state_dict({name: value * 0 for name, value in full.items()})
    for name in ("0.0", "1"):
        if not torch.equal(saved[name + ".turned"], full[name + ".weight"].t()):
            return f"{name}.turned is not a copy of the weight"
    publishes, publish = [], sharded.publish
    sharded.publish = lambda: publishes.append(publish())
    module.load_state_dict({name: value + 1 for name, value in full.items()})
    if len(publishes) != 1:
        return f"one load is one update window, not {len(publishes)}"
    now = sharded.full_state_dict()
    wanted = {name: value * 0 if name.startswith("0.2") else value + 1 for name, value in full.items()}
    if not equal(now, wanted) or not torch.equal(module[0][2].loaded["bias"], full["0.2.bias"] + 1):
        return "what loads by torch's method, and nothing else, is to be loaded"
    module(X).pow(2).mean().backward()
    sharded.step(RATE)
    return True


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
        saved = sharded.full_state_dict()
        sharded.save(folder, step=7)
        told = raises(lambda: sharded.save(folder, step=7), "sharded.save(", "libfsdp.SaveFlag.REPLACE")
        if told is not True or "FSDP_SAVE" in message_of(lambda: sharded.save(folder, step=7)):
            return f"a name that is taken: {told}"
        sharded.save(folder, step=7, flags=libfsdp.SaveFlag.REPLACE)
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


def a_checkpoint_keeps_extra_values(module, sharded):
    """Those of rank 0, on every rank; a checkpoint without any has None."""
    scheduler = {"last_epoch": 3, "base_lrs": [0.1], "lr_lambdas": [None]}
    with shared_folder(sharded.context) as folder:
        train(module, sharded)
        told = raises(lambda: sharded.save(folder, extra=nn.Linear(2, 2)), "extra", "weights_only=True")
        sharded.save(folder, extra={"step": 7 + sharded.context.rank, "scheduler": scheduler, "rows": torch.ones(2)})
        found = sharded.load(folder).extra
        is_right = found.pop("rows").eq(1).all() and found == {"step": 7, "scheduler": scheduler}
        train(module, sharded)
        sharded.save(folder)
        return told is True and is_right and sharded.load(folder).extra is None or f"{told}, {found}"


def extra_values_of_rank_0_count(module, sharded):
    """If these cannot be saved, every rank raises, and training goes on; those of other ranks are not looked at."""
    rank, last = sharded.context.rank, sharded.context.world_size - 1
    with shared_folder(sharded.context) as folder:
        train(module, sharded)
        told = []
        for wrong in (nn.Linear(2, 2), lambda: 1, (each for each in "ab")):
            words = ("give it dicts", "torch.") if rank == 0 else ("rank 0's values", "torch.load(weights_only=True)")
            told.append(raises(lambda: sharded.save(folder, extra=wrong if rank == 0 else {"a": 1}), "extra", *words))
        if last:
            only_last = {"a": 1} if rank == last else None
            told.append(raises(lambda: sharded.save(folder, extra=only_last), "extra", "give them on rank 0"))
        for extra in ({"a": 1}, {}):
            sharded.save(folder, extra=extra if rank == 0 else None, flags=fsdp.SaveFlag.REPLACE)
            told.append(sharded.load(folder).extra == extra)
        sharded.save(folder, extra={"a": 2} if rank == 0 else lambda: 1, flags=fsdp.SaveFlag.REPLACE)
        told.append(sharded.load(folder).extra == {"a": 2})
    return told == [True] * len(told) and trains(module, sharded) or str(told)


def values_of_another_device_come_to_the_host(module, sharded):
    """As those of a GPU, in a job with fewer."""
    with shared_folder(sharded.context) as folder:
        is_first = sharded.context.rank == 0
        gpu = mock.patch("torch.serialization.location_tag", lambda storage: "cuda:7")
        with gpu if is_first else contextlib.nullcontext():
            sharded.save(folder, extra={"rows": torch.ones(2)})
        found = sharded.load(folder).extra["rows"]
        return found.device.type == "cpu" and found.tolist() == [1.0, 1.0] and trains(module, sharded)


def a_load_reads_all_values_first(module, sharded):
    """What cannot be read is an error before weights are loaded."""
    with shared_folder(sharded.context) as folder:
        train(module, sharded)
        is_first = sharded.context.rank == 0
        unchecked = mock.patch("libfsdp.torch.state._pack_extra", libfsdp.torch.state._pack)
        with unchecked if is_first else contextlib.nullcontext():
            sharded.save(folder, extra={"a": nn.Linear(2, 2)})
        train(module, sharded)
        before = sharded.full_state_dict()
        told = raises(lambda: sharded.load(folder), "Weights only load failed")
        is_same = equal(sharded.full_state_dict(), before)
        return (told is is_same is True and trains(module, sharded)) or f"{told}, {is_same}"


def errors_name_the_flags_of_python(shard):
    first, other = shard(net()), shard(nn.ModuleDict({"other": nn.Linear(3, 3)}))
    either = fsdp.LoadFlag.ALLOW_MISSING | fsdp.LoadFlag.ALLOW_UNEXPECTED
    with shared_folder(first.context) as folder:
        first.save(folder)
        told = raises(lambda: other.load(folder, flags=either), "none of the model's tensors", "libfsdp.LoadFlag.IF_ANY")
    module = net()
    sharded = shard(module, optimizer=fsdp.Optimizer.CALLER)
    backward(module)
    steps = raises(lambda: sharded.step(RATE), "libfsdp.Optimizer.CALLER", "sharded.step()")
    return told is steps is True or f"{told}, {steps}"


def a_sharded_state_dict_has_this_ranks_rows(module, sharded):
    """All ranks together have each element once, and tied names have the same values."""
    train(module, sharded, 2)
    full, own, sizes = sharded.full_state_dict(), sharded.state_dict(), []
    for name, value in full.items():
        count = sharded.context.all_reduce_values(float(own[name].numel()))
        is_param = name in dict(module.named_parameters(remove_duplicate=False))
        sizes.append(count == value.numel() * (1 if is_param else sharded.context.world_size))
    rows = {}
    for layer in sharded.layers:
        for index, (name, _) in enumerate(layer.params):
            chunk = layer.group.chunk(index)
            rows[name] = full[name][chunk.row_offset : chunk.row_offset + chunk.row_count]
    is_right = all(torch.equal(own[name], value) for name, value in rows.items())
    is_tied = torch.equal(own["head.weight"], own["layers.0.weight"])
    return set(own) == set(full) and all(sizes) and is_right and is_tied and trains(module, sharded)


def a_sharded_state_dict_loads(module, sharded):
    own, before = sharded.state_dict(), sharded.full_state_dict()
    train(module, sharded, 2)
    if equal(sharded.full_state_dict(), before):
        return "nothing was trained"
    sharded.load_state_dict(own)
    alone = net()
    alone.load_state_dict(before)
    is_right = equal(sharded.full_state_dict(), before) and equal(sharded.state_dict(), own)
    return is_right and torch.allclose(module(X), alone(X), atol=1e-5) and trains(module, sharded)


def a_sharded_state_dict_that_does_not_fit(module, sharded):
    own, less = sharded.state_dict(), sharded.state_dict()
    del less["head.bias"]
    wider = {**own, "layers.1.weight": torch.zeros(9, 8)}
    told = [
        raises(lambda: sharded.load_state_dict(less), "missing ['head.bias']"),
        raises(lambda: sharded.load_state_dict(wider), "'layers.1.weight'", "(9, 8)", "sharded.save()"),
    ]
    backward(module)
    told.append(raises(lambda: sharded.load_state_dict(own), "sharded.load_state_dict()", "sharded.discard()"))
    sharded.discard()
    return told == [True] * 3 and trains(module, sharded) or str(told)


HABITS = [
    a_sharded_state_dict_has_this_ranks_rows,
    a_sharded_state_dict_loads,
    a_sharded_state_dict_that_does_not_fit,
    state_dict_has_the_weights,
    load_state_dict_takes_values,
    load_state_dict_assigns_values,
    load_state_dict_tells_what_is_missing,
    load_state_dict_tells_shapes_that_differ,
    a_load_that_raises_can_be_left,
    full_state_dicts_of_other_dtypes_load,
    a_full_state_dict_with_one_of_two_names_loads,
    loads_within_a_step_are_refused,
    a_checkpoint_that_does_not_fit,
    a_layer_loads_its_own,
    full_state_dict_has_buffers_and_tied_names,
    load_full_state_dict_names_what_does_not_fit,
    saves_and_loads_with_buffers,
    a_checkpoint_keeps_extra_values,
    extra_values_of_rank_0_count,
    values_of_another_device_come_to_the_host,
    a_load_reads_all_values_first,
]

if __name__ == "__main__":
    parts = [parts_of_layers_save_and_load_their_own, parts_with_methods_of_their_own_save_and_load]
    sys.exit(run_habits(HABITS, [*parts, errors_name_the_flags_of_python]))
