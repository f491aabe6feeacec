#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes scenarios.txt: the calls of scenarios.py, with the values that must come back of each.

usage: reference.py            writes bindings/conformance/scenarios.txt
       reference.py --check    compares; the differences are printed, and the status is 1

It knows include/fsdp.h and docs/contracts/numerics.md (training.py), and nothing of the library.
"""

import argparse
import difflib
import json
import math
import pathlib
import struct
import sys

import compact
import quantized
import scenarios
from training import CONSTANTS, FLOAT32, Group, Mesh, Model, Param, array, bytes_of, crc, hex_of, norm_of

TARGET = pathlib.Path(__file__).resolve().parent / "scenarios.txt"


class Run:
    """All ranks of one world at once; a line for some ranks alone changes what only they have."""

    def __init__(self, world, saved):
        self.world, self.saved = world, saved
        self.ranks, self.declared, self.named = range(world), [], {}
        self.meshes = {}  # {name: {rank: Mesh}}

    def call(self, words, keys):
        named = self.named.get(words[1]) if len(words) > 1 else None
        if isinstance(named, list):
            return self.call_by_mesh(named, words, keys)
        return getattr(self, words[0])(*words[1:], **keys)

    def call_by_mesh(self, groups, words, keys):
        """A call on a group with several meshes, each of whose ranks share other parameters."""
        ranks, given = self.ranks, set()
        for group in groups:
            self.ranks, self.named[words[1]] = [rank for rank in ranks if rank in group.mesh.ranks], group
            if self.ranks:
                given.add(getattr(self, words[0])(*words[1:], **keys))
        self.ranks, self.named[words[1]] = ranks, groups
        assert len(given) == 1, f"{words} gives other values on other meshes: write a line for each rank"
        return given.pop()

    def ignore(self, *words, **keys):
        """These calls change nothing that a later value depends on."""

    visit = set_schedule = seal_model = unshard = reshard = prefetch = restore_view = ignore
    destroy_model = destroy_mesh = destroy_checkpoint = close_context = abort_context = find_group = ignore
    check_replicas = commit_checkpoint = wait_checkpoint = ignore

    def param(self, name, *shape, **keys):
        self.declared.append((self.ranks, name, list(map(int, shape)), keys))

    def create_mesh(self, name, *ranks, **keys):
        mesh = Mesh(map(int, ranks) if ranks else range(self.world), int(keys.get("replicate_size", 1)))
        self.meshes.setdefault(name, {}).update({rank: mesh for rank in self.ranks})

    def mesh_at(self, name, rank):
        return self.meshes[name][rank] if name else Mesh(range(self.world))

    def create_model(self, model, mesh=None, **keys):
        self.named[model] = Model(keys, self.mesh_at(mesh, 0))

    def create_group(self, model, group, mesh=None, **keys):
        model, made = self.named[model], {}
        for rank in self.ranks:
            own = self.mesh_at(mesh, rank) if mesh else model.mesh
            if tuple(own.ranks) not in made:
                params = [Param(*param) for ranks, *param in self.declared if rank in ranks]
                made[tuple(own.ranks)] = Group(model, params, keys, own)
        made, self.declared = list(made.values()), []
        self.named[group] = made[0] if len(made) == 1 else made
        model.groups += made

    def at(self, group, index):
        return self.named[group].params[int(index)]

    def load_param(self, group, index, *values, **keys):
        param = self.at(group, index)
        param.set_main(array(values, param.count, int(keys.get("root", 0))))

    def read_param(self, group, index, dtype=FLOAT32):
        return crc(bytes_of(self.at(group, index).main, int(dtype)))

    def load_state(self, group, index, name, *values):
        param = self.at(group, index)
        param.set_state(name, array(values, param.count, 0))

    def read_state(self, group, index, name):
        return crc(bytes_of(compact.decode(self.at(group, index).states[name], name)))

    def set_param_lr_scale(self, group, index, scale):
        param, zero = self.at(group, index), CONSTANTS["PARAM_LR_ZERO"]
        param.lr_scale = float(scale)
        param.flags = param.flags & ~zero if param.lr_scale else param.flags | zero

    def set_param_trainable(self, group, index, trainable):
        self.at(group, index).trained = trainable == "1"

    def get_param(self, group, index, phase):
        param = self.at(group, index)
        return crc(bytes_of(param.weights, param.dtype))

    def get_params(self, group, phase):
        return crc(b"".join(bytes_of(param.weights, param.dtype) for param in self.named[group].params))

    def get_plane(self, group, index, phase, plane):
        return crc(self.planes(group, index, plane)[int(plane)])

    def swizzle_scales(self, group, index, phase, plane):
        return crc(quantized.swizzled(*self.planes(group, index, plane)["scales"]))

    def planes(self, group, index, plane):
        columns = int(plane) >= CONSTANTS["PLANE_COLUMN"]
        return quantized.planes(self.at(group, index).weights, *self.at(group, index).shape, columns)

    def acquire_grad(self, group, index, *values):
        self.at(group, index).given = True
        for rank in self.ranks:
            self.named[group].contribute(rank, int(index), array(values, self.at(group, index).count, rank))

    def acquire_grads(self, group, *values):
        for index, param in enumerate(self.named[group].params):
            param.given = True
            for rank in self.ranks if param.has_gradient else []:
                self.named[group].contribute(rank, index, array(values, param.count, rank, index))

    def put_grad(self, group, index, *values, dtype=FLOAT32):
        count = self.at(group, index).count
        for rank in self.ranks:
            data = [0.0] * count if values == ("none",) else array(values, count, rank)
            self.at(group, index).given |= values != ("none",)
            self.named[group].contribute(rank, int(index), data)

    def complete_grad(self, group, index):
        """The moment of the reduce makes no difference to any value."""

    def reduce_grad(self, group, flags=0):
        self.named[group].reduce(bool(int(flags) & CONSTANTS["LAST"]))

    def finish_grads(self, model, scale, flags=0):
        if int(flags) & CONSTANTS["LAST"]:
            for group in self.named[model].groups:
                group.end()
        self.named[model].finish(float(scale))

    def load_grad(self, group, index, *values, root=-1):
        param = self.at(group, index)
        param.grad = array(values, param.count, max(0, int(root)))

    def read_grad(self, group, index, dtype=FLOAT32):
        return crc(bytes_of(self.at(group, index).grad, int(dtype)))

    def scale_grads(self, model, factor):
        self.named[model].scale(float(factor))

    def get_grad_norm(self, model):
        return hex_of(self.named[model].norm())

    def get_param_grad_norms(self, model):
        params = self.named[model].params_of(self.ranks[0])
        return self.norms(param.grad if param.has_gradient else [] for param in params)

    def get_param_weight_norms(self, model):
        return self.norms(param.main for param in self.named[model].params_of(self.ranks[0]))

    def norms(self, parts):
        return crc(b"".join(struct.pack("<d", norm_of(values)) for values in parts))

    def count_zero_grads(self, model):
        changed = [param for param in self.named[model].trained if param.given or not param.skips]
        return str(sum(x == 0 for param in changed for x in param.grad))

    def clip_grads(self, model, max_norm):
        return hex_of(self.named[model].clip(float(max_norm)))

    def check_grads(self, model):
        return str(int(any(not math.isfinite(x) for param in self.named[model].trained for x in param.grad)))

    def step_adamw(self, model, lr, **keys):
        self.named[model].adamw(float(lr), keys)

    def collect_matrices(self, model, source=None, target=None, dtype=FLOAT32):
        """What is collected and not returned changes nothing."""

    def change_matrices(self, model, source=None, target=None, dtype=FLOAT32):
        self.named[model].change_matrices(source, target or source, int(dtype))

    def round_stochastic(self, model, group, index, step, *values):
        param = self.at(group, index)
        param.main = self.named[model].rounded_at_random(param, array(values, param.count, 0), int(step))

    def apply_grads(self, model, lr, max_norm, *values, **keys):
        model = self.named[model]
        for j, param in enumerate(model.trained):
            param.given = True
            group = next(group for group in model.groups if param in group.params)
            for rank in self.ranks:
                group.contribute(rank, group.params.index(param), array(values, param.count, rank, j))
        for group in model.groups:
            group.reduce(True)
        model.finish(1)
        norm = model.clip(float(max_norm)) if float(max_norm) else model.norm()
        model.adamw(float(lr), keys)
        return hex_of(norm)

    def publish_weights(self, model):
        self.named[model].publish()

    def begin_update(self, model):
        self.discard_step(model)

    def discard_step(self, model):
        for param in self.named[model].params:
            param.forget()

    def all_reduce_values(self, op, count, *values):
        columns = list(zip(*(array(values, int(count), rank) for rank in self.ranks)))
        folds = {"SUM": sum, "MIN": min, "MAX": max, "MEAN": lambda column: sum(column) / self.world}
        fold = next(folds[name] for name in folds if CONSTANTS["VALUE_" + name] == int(op))
        return crc(struct.pack(f"<{count}d", *map(fold, columns)))

    def get_stats(self, model, field):
        model = self.named[model]
        return str({"version": model.version, "step": model.step, "reduces": model.reduces}.get(field, 0))

    def get_model_info(self, model, field):
        model = self.named[model]
        return str(
            {
                "group_count": len(model.groups),
                "param_count": len(model.params),
                "element_count": sum(param.count for param in model.params),
            }[field]
        )

    def save(self, model, folder, name=""):
        model = self.named[model]
        kept = {param.name: json.loads(json.dumps(param.kept())) for param in model.params}
        self.saved.setdefault((self.world, folder), {})[name] = (model.step, kept)

    def load(self, model, world, folder, flags=0, name=""):
        model, (step, kept) = self.named[model], self.saved[int(world), folder][name]
        is_whole = not int(flags) & CONSTANTS["LOAD_WEIGHTS_ONLY"]
        for param in model.params:
            main, states = json.loads(json.dumps(kept[param.name]))
            param.set_main(main)
            for state in states if is_whole else ():
                param.set_state(state, states[state])
        model.step = step if is_whole else model.step
        # Each parameter has two moments (codes and scales, or fp32) and a count of steps.
        coded = sum(isinstance(state, dict) for param in model.params for state in param.kept()[1].values())
        return f"{step}/{len(model.params) * 4 + coded if is_whole else len(model.params)}"

    def begin_checkpoint(self, checkpoint, folder):
        self.named[checkpoint] = (self.world, folder)

    def open_checkpoint(self, checkpoint, world, folder):
        self.named[checkpoint] = (int(world), folder)

    def add_checkpoint_model(self, checkpoint, name, model):
        self.save(model, self.named[checkpoint][1], name=name)

    def load_checkpoint_model(self, checkpoint, name, model):
        return self.load(model, *self.named[checkpoint], name=name).split("/")[0]

    def add_checkpoint_bytes(self, checkpoint, name, owner, count, *values):
        is_once = int(owner) == CONSTANTS["BYTES_ONCE"]
        assert is_once or values[2] == "0", "one value for all ranks is expected"
        self.saved.setdefault(self.named[checkpoint], {})["bytes", name] = bytes_of(array(values, int(count), 0))

    def read_checkpoint_bytes(self, checkpoint, name):
        return crc(self.saved[self.named[checkpoint]]["bytes", name])


def execute(line, run):
    """The value that the line gives in this run; None if the line fails or asks for no value."""
    call, _, _ = line.partition(" ->")
    words = [word.partition("=") if "=" in word else word for word in call.split()]
    names = [str(CONSTANTS.get(word, word)) for word in words if isinstance(word, str)]
    keys = {
        key: str(CONSTANTS.get(value, value)) for key, _, value in (word for word in words if isinstance(word, tuple))
    }
    run.ranks = range(run.world)
    if names[0] in ("on", "off"):
        run.ranks = [rank for rank in run.ranks if (rank == int(names[1])) == (names[0] == "on")]
        names = names[2:]
    return run.call(names, keys)


def fill_in(name, worlds, calls, saved):
    yield f"scenario {name} {' '.join(map(str, worlds))}"
    runs = [Run(world, saved) for world in worlds]
    for line in calls:
        if " ! " in line:
            for run in runs:
                run.declared = [] if "create_group" in line else run.declared
            yield line
            continue
        values = [execute(line, run) for run in runs]
        assert (values[0] is not None) == line.endswith(" ->"), line
        same = values[:1] if len(set(values)) == 1 else values
        yield line if values[0] is None else f"{line} {' '.join(same)}"
    yield "end"


def used_constants(lines):
    words = {part for line in lines for word in line.split() for part in [word.rpartition("=")[2]]}
    return [f"define {name} {value}" for name, value in CONSTANTS.items() if name in words]


def write():
    saved, lines = {}, []
    for name, worlds, calls in scenarios.all_scenarios():
        lines += ["", *fill_in(name, worlds, calls, saved)]
    head = [
        "# SPDX-License-Identifier: Apache-2.0",
        "# Written by reference.py out of scenarios.py; README.md says how it is read.",
        "",
    ]
    return "\n".join([*head, *used_constants(lines), *lines]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    written = write()
    if not parser.parse_args().check:
        TARGET.write_text(written)
        return 0
    kept = TARGET.read_text()
    for line in difflib.unified_diff(kept.splitlines(), written.splitlines(), TARGET.name, "reference.py", lineterm=""):
        print(line)
    return 0 if kept == written else 1


if __name__ == "__main__":
    sys.exit(main())
