#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The interpreter of bindings/conformance/scenarios.txt in Python; the README there says what it does."""

import array
import logging
import os
import struct
import sys
import threading
import zlib

import libfsdp as fsdp

TIMEOUT_MS = 30000


def crc(*parts):
    """Of arrays, one after the other."""
    value = 0
    for part in parts:
        view = memoryview(part.view("uint8") if hasattr(part, "view") and part.ndim else part)
        value = zlib.crc32(view.cast("B") if view.ndim and view.c_contiguous else view, value)
    return f"{value:08x}"


class Line:
    """A line's words: positional, KEY=VALUE, and what is expected."""

    def __init__(self, text, defines):
        self.text, self.only, self.but = text, None, None
        call, _, given = text.partition(" -> ")
        call, _, failed = call.partition(" ! ")
        words = [defines.get(word, word) for word in call.split()]
        if words[0] in ("on", "off"):
            setattr(self, {"on": "only", "off": "but"}[words[0]], int(words[1]))
            words = words[2:]
        pairs = [word.split("=", 1) for word in words if "=" in word]
        self.keys = {key: defines.get(value, value) for key, value in pairs}
        self.words = [word for word in words if "=" not in word]
        self.given = given.split()
        self.failed = tuple(int(defines.get(word, word)) for word in failed.split())

    def is_for(self, rank):
        return self.only in (None, rank) and self.but != rank


def read_scenarios(path):
    defines, name = {}, None
    with open(path, encoding="utf-8") as file:
        for text in map(str.strip, file):
            word, *rest = text.split() or ["#"]
            if word.startswith("#"):
                continue
            if word == "define":
                defines[rest[0]] = rest[1]
            elif word == "scenario":
                name, worlds, lines = rest[0], list(map(int, rest[1:])), []
            elif word == "end":
                yield name, worlds, lines
            else:
                lines.append(Line(text, defines))


def numbers(keys):
    """The values of the keys: integers, or doubles if they are written so."""
    return {
        key: float(value)
        if key in ("grad_factor", "beta1", "beta2", "epsilon", "weight_decay", "lr_scale")
        else int(value)
        for key, value in keys.items()
    }


def number_or_none(word):
    return None if word is None else int(word)


def change_matrix(matrix, number):
    """The last row comes first, and numbers are multiplied by a power of two: they stay exact in bfloat16."""
    view, columns = matrix[number], matrix.columns
    scale = 2 ** ((matrix.param_index + 2 * matrix.split_index + matrix.batch_index + number) % 4)
    flat = memoryview(view.view("uint8") if hasattr(view, "view") else view).cast("B")
    rows = flat.cast("f" if matrix.dtype == fsdp.Dtype.FLOAT32 else "H")
    if matrix.dtype == fsdp.Dtype.FLOAT32:
        numbers = rows.tolist()
    else:
        numbers = array.array("f", struct.pack(f"<{len(rows)}I", *(bits << 16 for bits in rows)))
    changed = [scale * x for first in range(len(rows) - columns, -1, -columns) for x in numbers[first : first + columns]]
    if matrix.dtype != fsdp.Dtype.FLOAT32:
        changed = [bits >> 16 for bits in memoryview(array.array("f", changed)).cast("B").cast("I")]
    rows[:] = array.array(rows.format, changed)


class Rank:
    """What one rank of a scenario has: its methods are the calls."""

    def __init__(self, context, rank, world, folders):
        self.context, self.rank, self.world, (self.save_folder, self.load_folder) = context, rank, world, folders
        self.named, self.params, self.declared, self.visits = {}, {}, [], []

    def call(self, line):
        return getattr(self, line.words[0])(*line.words[1:], **line.keys)

    def values(self, words, count, dtype=fsdp.Dtype.FLOAT32, shift=0):
        """The array of five integers."""
        a, b, c, m, k = map(int, words)
        made = array.array("f", (((a * i + b + shift + c * self.rank) % m - m // 2) / 2**k for i in range(count)))
        if dtype == fsdp.Dtype.BFLOAT16:
            return array.array("H", (bits >> 16 for bits in memoryview(made).cast("B").cast("I")))
        if dtype == fsdp.Dtype.FLOAT16:
            return array.array("h", struct.pack(f"{count}e", *made))
        return made

    def elements(self, group, index):
        params = self.params[group]
        count = 1
        for size in params[int(index)].shape if int(index) < len(params) else ():
            count *= size
        return count

    # -- declaring

    def param(self, name, *shape, **keys):
        splits = keys.pop("splits", None)
        splits = splits and list(map(int, splits.split(",")))
        self.declared.append(fsdp.Param(name, map(int, shape), splits=splits, **numbers(keys)))

    def visit(self, group, phase, piece=None):
        self.visits.append((self.named[group].info.group_index, int(phase), number_or_none(piece)))

    def create_mesh(self, name, *ranks, **keys):
        self.named[name] = self.context.create_mesh(ranks=list(map(int, ranks)) or None, **numbers(keys))

    def create_model(self, name, mesh=None, **keys):
        self.named[name] = self.context.create_model(mesh=self.named[mesh] if mesh else None, **numbers(keys))

    def create_group(self, model, name, mesh=None, **keys):
        declared, self.declared = self.declared, []
        self.params.setdefault(name, declared)
        self.named[name] = self.named[model].create_group(
            name, declared, mesh=self.named[mesh] if mesh else None, **numbers(keys)
        )

    def set_schedule(self, model, kind, held_groups=0):
        visits, self.visits = self.visits or None, []
        self.named[model].set_schedule(int(kind), visits, held_groups=int(held_groups))

    def find_group(self, model, name):
        self.named[model].find_group(name)

    def seal_model(self, model):
        self.named[model].seal()

    def destroy(self, name):
        self.named[name].close()

    destroy_model = destroy_mesh = destroy_checkpoint = destroy

    def close_context(self):
        self.context.check(fsdp.lib.close_context(self.context.handle))

    def abort_context(self):
        self.context.abort("conformance")

    # -- parameters and states

    def load_param(
        self, group, index, *values, dtype=fsdp.Dtype.FLOAT32, element_count=None, root=fsdp.EVERY_RANK, flags=0
    ):
        data, group = self.values(values, self.elements(group, index)), self.named[group]
        if element_count or int(dtype) != fsdp.Dtype.FLOAT32 or int(flags):  # what the object has no words for
            self.context.check(
                fsdp.lib.load_param(
                    group.handle,
                    int(index),
                    data.buffer_info()[0],
                    int(dtype),
                    int(element_count or len(data)),
                    int(root),
                    int(flags),
                )
            )
        else:
            group.load_param(int(index), data, root=int(root))

    def read_param(self, group, index, dtype=fsdp.Dtype.FLOAT32):
        return crc(self.named[group].read_param(int(index), fsdp.Dtype(int(dtype))))

    def load_state(self, group, index, name, *values):
        self.named[group].load_state(int(index), name, self.values(values, self.elements(group, index)))

    def read_state(self, group, index, name):
        return crc(self.named[group].read_state(int(index), name))

    def load_grad(self, group, index, *values, root=fsdp.EVERY_RANK):
        self.named[group].load_grad(int(index), self.values(values, self.elements(group, index)), root=int(root))

    def read_grad(self, group, index, dtype=fsdp.Dtype.FLOAT32):
        return crc(self.named[group].read_grad(int(index), fsdp.Dtype(int(dtype))))

    def set_param_lr_scale(self, group, index, scale):
        self.named[group].set_param_lr_scale(int(index), float(scale))

    def set_param_trainable(self, group, index, trainable):
        self.named[group].set_param_trainable(int(index), int(trainable))

    # -- gathers and gradients

    def unshard(self, group, phase, piece=None):
        self.named[group].unshard(int(phase), piece=number_or_none(piece))

    def reshard(self, group, phase, piece=None):
        self.named[group].reshard(int(phase), piece=number_or_none(piece))

    def restore_view(self, group):
        self.named[group].restore_view()

    def prefetch(self, group, phase):
        self.named[group].prefetch(int(phase))

    def get_param(self, group, index, phase):
        param, group = self.params[group][int(index)], self.named[group]
        group.tensors(int(phase), param.piece)  # not unsharded: the library says so
        return crc(group.weights(int(phase), param.piece)[param.name])

    def get_params(self, group, phase):
        return crc(*self.named[group].weights(int(phase)).values())

    def get_plane(self, group, index, phase, plane):
        return crc(self.named[group].plane(int(index), int(plane), int(phase)).memoryview())

    def swizzle_scales(self, group, index, phase, plane):
        return crc(self.named[group].swizzle_scales(int(index), int(plane), int(phase)))

    def acquire_grad(self, group, index, *values):
        grad, adds = self.named[group].acquire_grad(int(index))
        self.write(grad, values, 0, adds)

    def acquire_grads(self, group, *values):
        grads = self.named[group].acquire_grads()
        for p, param in enumerate(self.params[group]):
            if param.name in grads:
                self.write(grads[param.name], values, p, True)

    def write(self, grad, values, shift, adds):
        bytes_of = memoryview(grad.reshape(-1).view("uint8") if hasattr(grad, "reshape") else grad).cast("B")
        kind = grad.dtype.char if hasattr(grad, "dtype") else grad.format  # what has bf16 has no letter of its own
        dtype = fsdp.Dtype.FLOAT32 if kind == "f" else fsdp.Dtype.FLOAT16 if kind in "eh" else fsdp.Dtype.BFLOAT16
        flat = bytes_of.cast({fsdp.Dtype.FLOAT32: "f", fsdp.Dtype.FLOAT16: "h"}.get(dtype, "H"))
        data = self.values(values, len(flat), dtype, shift)
        flat[:] = array.array("f", (x + y for x, y in zip(flat, data))) if adds else data

    def put_grad(self, group, index, *values, dtype=fsdp.Dtype.FLOAT32):
        is_none = values == ("none",)
        data = None if is_none else self.values(values, self.elements(group, index), int(dtype))
        self.named[group].put_grad(int(index), data)

    def complete_grad(self, group, index):
        self.named[group].complete_grad(int(index))

    def reduce_grad(self, group, flags=0):
        if int(flags) in (0, fsdp._abi.FSDP_LAST):
            self.named[group].reduce_grad(is_last=bool(int(flags)))
        else:
            self.context.check(fsdp.lib.reduce_grad(self.named[group].handle, int(flags), None))

    def finish_grads(self, model, scale, flags=0):
        self.named[model].finish_grads(float(scale), is_last=bool(int(flags)))

    def scale_grads(self, model, factor):
        self.named[model].scale_grads(float(factor))

    def get_grad_norm(self, model):
        return struct.pack(">d", self.named[model].get_grad_norm()).hex()

    def get_param_grad_norms(self, model):
        return crc(array.array("d", self.named[model].get_param_grad_norms().values()))

    def get_param_weight_norms(self, model):
        return crc(array.array("d", self.named[model].get_param_weight_norms().values()))

    def count_zero_grads(self, model):
        return str(self.named[model].count_zero_grads())

    def clip_grads(self, model, max_norm):
        return struct.pack(">d", self.named[model].clip_grads(float(max_norm))).hex()

    def check_grads(self, model):
        return str(int(self.named[model].check_grads() is not None))

    # -- steps

    def step_adamw(self, model, lr, **keys):
        self.named[model].step_adamw(float(lr), **numbers(keys))

    def round_stochastic(self, model, group, index, step, *values):
        data, group = self.values(values, self.elements(group, index)), self.named[group]
        for shard in self.named[model].shards():
            if shard.group is group and shard.param_index == int(index):
                own = data[shard.element_offset : shard.element_offset + shard.element_count]
                shard.round_stochastic(own, int(step))

    def collect_matrices(self, model, source=None, target=None, dtype=None):
        return self.named[model].matrices(source, target, number_or_none(dtype)) and None

    def change_matrices(self, model, source=None, target=None, dtype=None):
        for matrix in self.named[model].matrices(source, target, number_or_none(dtype)):
            for number in range(len(matrix)):
                change_matrix(matrix, number)

    def apply_grads(self, model, lr, max_norm, *values, **keys):
        trained = [
            (group, p) for group, params in self.params.items() for p, param in enumerate(params) if param.is_trainable
        ]
        grads = [self.values(values, self.elements(group, p), shift=j) for j, (group, p) in enumerate(trained)]
        norm = self.named[model].apply_grads(grads, float(lr), max_norm=float(max_norm), **numbers(keys))
        return struct.pack(">d", norm).hex()

    def publish_weights(self, model):
        self.named[model].publish_weights()

    def begin_update(self, model):
        self.named[model].begin_update()

    def discard_step(self, model):
        self.named[model].discard_step()

    def check_replicas(self, model):
        self.named[model].check_replicas()

    def all_reduce_values(self, op, count, *values):
        reduced = self.context.all_reduce_values(self.values(values, int(count)), int(op))
        return crc(array.array("d", reduced))

    def get_stats(self, model, field):
        return str(getattr(self.named[model].stats, field))

    def get_model_info(self, model, field):
        return str(getattr(self.named[model].info, field))

    # -- checkpoints

    def save_path(self, folder):
        return f"{self.save_folder}/{self.world}/{folder}"

    def load_path(self, world, folder):
        return f"{self.load_folder}/{world}/{folder}"

    def save(self, model, folder):
        self.named[model].save(self.save_path(folder))

    def load(self, model, world, folder, **keys):
        loaded = self.named[model].load(self.load_path(world, folder), **numbers(keys))
        return f"{loaded.step}/{loaded.loaded_tensors}"

    def begin_checkpoint(self, name, folder):
        self.named[name] = self.context.begin_checkpoint(self.save_path(folder))

    def open_checkpoint(self, name, world, folder):
        self.named[name] = self.context.open_checkpoint(self.load_path(world, folder))

    def add_checkpoint_model(self, checkpoint, name, model):
        self.named[checkpoint].add_model(self.named[model], name)

    def load_checkpoint_model(self, checkpoint, name, model):
        return str(self.named[checkpoint].load_model(self.named[model], name).step)

    def add_checkpoint_bytes(self, checkpoint, name, owner, count, *values):
        self.named[checkpoint].add_bytes(name, self.values(values, int(count)).tobytes(), int(owner))

    def read_checkpoint_bytes(self, checkpoint, name):
        return crc(self.named[checkpoint].read_bytes(name))

    def commit_checkpoint(self, checkpoint):
        self.named[checkpoint].commit()

    def wait_checkpoint(self, checkpoint):
        self.named[checkpoint].wait()


class Wrong(Exception):
    """A status that was not expected: the ranks no longer agree on what comes next."""


class Run:
    def __init__(self):
        self.is_as_expected = True

    def execute(self, rank, line, number, world_index):
        """Makes the call, compares, and returns its line of the transcript."""
        try:
            status, blamed, value = 0, -1, rank.call(line) or "-"
        except fsdp.Error as error:
            status, blamed, value = int(error.status), -1 if error.rank is None else error.rank, "-"
            told = str(error)
        wanted = line.failed or (0, -1)
        given = line.given[min(world_index, len(line.given) - 1)] if line.given else value
        if (status, blamed) != wanted or (not status and value != given):
            self.is_as_expected = False
            print(
                f"{line.text}, world {rank.world}, rank {rank.rank}\n"
                f"  gave {status} {value}, rank {blamed}: {told if status else ''}",
                file=sys.stderr,
            )
            if status != wanted[0]:
                raise Wrong
        return f"{number} {status} {blamed} {value}\n"

    def rank(self, name, world_index, lines, rank):
        number, transcript = 0, 0
        try:
            for line in filter(lambda line: line.is_for(rank.rank), lines):
                if line.words[0] in ("param", "visit"):
                    rank.call(line)
                else:
                    number += 1
                    transcript = zlib.crc32(self.execute(rank, line, number, world_index).encode(), transcript)
        except Wrong:
            rank.context.abort("a status that was not expected")
        except BaseException:
            self.is_as_expected = False
            rank.context.abort("an exception of the interpreter")
            raise
        rank.context.destroy()
        sys.stdout.write(f"{name} {rank.world} {rank.rank} {transcript:08x}\n")  # in one piece: print() writes two
        sys.stdout.flush()

    def threads(self, name, world_index, world, lines, folders):
        contexts = fsdp.create_local_contexts(world, timeout_ms=TIMEOUT_MS)
        ranks = [Rank(context, rank, world, folders) for rank, context in enumerate(contexts)]
        threads = [threading.Thread(target=self.rank, args=(name, world_index, lines, rank)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def main(mode, *folders, path):
    logging.getLogger("libfsdp").addHandler(logging.NullHandler())  # scenarios fail on purpose
    run, launched = Run(), int(os.environ.get("WORLD_SIZE", 1))
    for name, worlds, lines in read_scenarios(path):
        if mode == "threads":
            for index, world in enumerate(worlds):
                run.threads(name, index, world, lines, folders)
        elif launched in worlds:
            context = fsdp.Context(timeout_ms=TIMEOUT_MS)
            run.rank(name, worlds.index(launched), lines, Rank(context, context.rank, launched, folders))
    return 0 if run.is_as_expected else 1


if __name__ == "__main__":
    if len(sys.argv) != 5 or sys.argv[1] not in ("threads", "processes"):
        sys.exit("usage: conformance.py threads|processes SAVE_FOLDER LOAD_FOLDER scenarios.txt")
    sys.exit(main(*sys.argv[1:4], path=sys.argv[4]))
