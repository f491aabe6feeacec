# SPDX-License-Identifier: Apache-2.0
"""The training that include/fsdp.h and docs/contracts/numerics.md describe, of all ranks at once, one rounded operation
at a time.

Plain Python, so that it runs wherever the tests do: an operation of two fp32 in double, rounded to fp32, is the fp32
operation (double has more than twice the bits).
"""

import ctypes
import json
import math
import pathlib
import struct
import zlib
from fractions import Fraction

import compact

ABI = pathlib.Path(__file__).resolve().parents[1] / "abi" / "abi.json"


def read_constants():
    """{name without prefix: value}, of all that abi.json has."""
    described = json.loads(ABI.read_text())
    families = [family["values"] for family in described["constants"]]
    return {name.removeprefix("FSDP_"): value for family in families for name, value in family.items()}


CONSTANTS = read_constants()
FLOAT32, BFLOAT16, FLOAT16 = CONSTANTS["FLOAT32"], CONSTANTS["BFLOAT16"], CONSTANTS["FLOAT16"]
MOMENTS = ("exp_avg", "exp_avg_sq")


def f32(x):
    return ctypes.c_float(x).value


def bits_of(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def bf16(x):
    """To nearest, ties to even."""
    bits = bits_of(x)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def f16(x):
    """To nearest, ties to even, subnormal numbers too, as struct does it; scenarios stay below what is infinite."""
    return struct.unpack("<e", struct.pack("<e", x))[0]


def rounded(x, dtype):
    return {BFLOAT16: bf16, FLOAT16: f16}.get(dtype, f32)(x)


def bytes_of(values, dtype=FLOAT32):
    if dtype == BFLOAT16:
        return b"".join(struct.pack("<H", bits_of(bf16(x)) >> 16) for x in values)
    return struct.pack(f"<{len(values)}{'e' if dtype == FLOAT16 else 'f'}", *values)


def crc(data):
    return f"{zlib.crc32(data):08x}"


def hex_of(x):
    return struct.pack(">d", x).hex()


def array(words, count, rank, shift=0):
    a, b, c, m, k = map(int, words)
    values = [((a * i + b + shift + c * rank) % m - m // 2) / 2**k for i in range(count)]
    assert all(f32(x) == x for x in values), words
    return values


class Param:
    def __init__(self, name, shape, keys):
        self.name, self.shape, self.count = name, shape, math.prod(shape)
        self.dtype = int(keys.get("dtype", FLOAT32))
        self.flags, self.lr_scale = int(keys.get("flags", 0)), float(keys.get("lr_scale", 1))
        self.main, self.weights = [0.0] * self.count, [0.0] * self.count
        self.keep_in(CONSTANTS["MAIN_FLOAT32"], False)
        self.is_callers = int(keys.get("optimizer", 0)) == CONSTANTS["OPTIMIZER_CALLER"]
        self.splits = list(map(int, keys["splits"].split(","))) if "splits" in keys else []
        if int(keys.get("matrix", 0)) and not self.splits:
            self.splits = shape[-2:-1]  # one matrix of all rows
        self.skips, self.trained = int(keys.get("missing_grad", 0)) == CONSTANTS["MISSING_GRAD_SKIP"], True
        self.forget()

    def keep_in(self, storage, has_codes):
        """Chooses how main weights and states are stored, by the options of the group and the model."""
        self.storage = storage if self.dtype == BFLOAT16 and self.trainable else CONSTANTS["MAIN_FLOAT32"]
        self.is_coded = has_codes and not self.is_callers and self.count >= compact.CODED_COUNT
        self.states = {name: compact.zero_state(self.count, name, self.is_coded) for name in MOMENTS}

    def set_main(self, values):
        is_rounded = not self.trainable or self.storage == CONSTANTS["MAIN_NONE"]
        self.main = [rounded(x, self.dtype) for x in values] if is_rounded else values

    def set_state(self, name, values):
        """Values are fp32, or codes that a checkpoint has."""
        plain = compact.decode(values, name)
        if self.is_coded:
            self.states[name] = values if values is not plain else compact.encode(plain, name)
        else:
            self.states[name] = plain

    def compute_weight(self, x):
        return compact.upper_half(x) if self.storage == CONSTANTS["MAIN_SPLIT16"] else rounded(x, self.dtype)

    def changed_matrices(self, values, index):
        """The rows of each matrix in the opposite order, multiplied by a power of two."""
        columns, made, first = self.shape[-1], [], 0
        for batch in range(math.prod(self.shape[:-2])):
            for split, rows in enumerate(self.splits):
                scale = 2 ** ((index + 2 * split + batch) % 4)
                for row in reversed(range(rows)):
                    at = first + row * columns
                    made += [x * scale for x in values[at : at + columns]]
                first += rows * columns
        return made

    def plane(self, name):
        """The gradient, the main weights or a state, as numbers."""
        plain = {None: self.grad, "main_weight": self.main}
        return plain[name] if name in plain else compact.decode(self.states[name], name)

    def set_plane(self, name, values):
        if name is None:
            self.grad = values
        elif name == "main_weight":
            self.set_main(values)
        else:
            self.set_state(name, values)

    def forget(self):
        """No gradient of this step yet: neither the ranks' full ones nor the replicas' totals."""
        self.local, self.totals, self.grad, self.given = {}, None, None, False

    @property
    def trainable(self):
        return not self.flags & CONSTANTS["PARAM_FROZEN"]

    @property
    def has_gradient(self):
        return self.trainable and self.trained

    def kept(self):
        return self.main, self.states


class Group:
    """A group as the ranks of one mesh share it. Other ranks of the model may share it with other parameters."""

    def __init__(self, model, params, keys, mesh):
        self.model, self.params, self.keys, self.mesh = model, params, keys, mesh
        for param in params:
            param.keep_in(self.option("main_storage", CONSTANTS["MAIN_FLOAT32"]), model.has_codes)

    def option(self, name, default=0):
        return int(self.keys.get(name, 0)) or int(self.model.keys.get(name, 0)) or default

    def grad_dtype(self, param):
        return self.option("grad_dtype", param.dtype)

    def is_last_only(self):
        strategy = self.option("strategy", CONSTANTS["STRATEGY_OPTIM_GRADS_PARAMS"])
        if strategy == CONSTANTS["STRATEGY_OPTIM"]:
            return True
        default = "LAST" if strategy == CONSTANTS["STRATEGY_NO_SHARD"] else "EACH"
        return self.option("reduce_policy", CONSTANTS["REDUCE_POLICY_" + default]) == CONSTANTS["REDUCE_POLICY_LAST"]

    def contribute(self, rank, index, values):
        """A rank writes a full gradient, or adds to the one it has."""
        param, dtype = self.params[index], self.grad_dtype(self.params[index])
        before = param.local.get(rank)
        param.local[rank] = (
            [rounded(x, dtype) for x in values]
            if before is None
            else [rounded(x + y, dtype) for x, y in zip(before, values)]
        )

    def reduce(self, is_last):
        if self.is_last_only() and not is_last:
            return
        trained = [param for param in self.params if param.has_gradient]
        self.model.reduces += 0 in self.mesh.ranks and len(self.mesh.ranks) > 1 and bool(trained)
        for param in trained:
            added = [self.sum_replica(param, replica) for replica in range(self.mesh.replicas)]
            before, param.local = param.totals, {}
            param.totals = (
                added if before is None else [[f32(x + y) for x, y in zip(*pair)] for pair in zip(before, added)]
            )

    def end(self):
        """Reduces gradients that wait for the last contribution; a group without any contribution gets zeros."""
        if all(param.totals is None and not param.local for param in filter(lambda param: param.trainable, self.params)):
            for index, param in enumerate(self.params):
                for rank in self.mesh.ranks if param.trainable else ():
                    self.contribute(rank, index, [0.0] * param.count)
            self.reduce(True)
        elif self.is_last_only() and any(param.local for param in self.params):
            self.reduce(True)

    def sum_replica(self, param, replica):
        """Adds up the ranks of one replica in their order, each rounded to the dtype that is sent, then multiplies by
        the factor."""
        size = len(self.mesh.ranks) // self.mesh.replicas
        wire = self.option("reduce_dtype", self.grad_dtype(param))
        ranks = self.mesh.ranks[replica * size : (replica + 1) * size]
        total = [rounded(x, wire) for x in param.local[ranks[0]]]
        for rank in ranks[1:]:
            total = [f32(x + rounded(y, wire)) for x, y in zip(total, param.local[rank])]
        factor = self.factor()
        return [f32(x * factor) for x in total]

    def factor(self):
        """The mean is over the ranks of the model, also where fewer ranks share the group."""
        keys = self.keys if int(self.keys.get("grad_op", 0)) else self.model.keys
        op = int(keys.get("grad_op", CONSTANTS["GRAD_OP_MEAN"]))
        if op == CONSTANTS["GRAD_OP_FACTOR"]:
            return f32(float(keys["grad_factor"]))
        return f32(1 / len(self.model.mesh.ranks)) if op == CONSTANTS["GRAD_OP_MEAN"] else 1.0


def norm_of(values):
    """Scenarios that ask for it have numbers whose squares add up exactly, in whatever order."""
    squares = sum(Fraction(x) ** 2 for x in values)
    assert float(squares) == squares, "the norm depends on the order of additions"
    return math.sqrt(squares)


class Mesh:
    def __init__(self, ranks, replicas=1):
        self.ranks, self.replicas = list(ranks), replicas


class Model:
    def __init__(self, keys, mesh):
        self.keys, self.mesh = keys, mesh
        self.groups, self.version, self.step, self.reduces = [], 0, 0, 0

    @property
    def has_codes(self):
        return int(self.keys.get("optimizer", 0)) == CONSTANTS["OPTIMIZER_ADAMW_8BIT"]

    @property
    def params(self):
        return [param for group in self.groups for param in group.params]

    def params_of(self, rank):
        return [param for group in self.groups if rank in group.mesh.ranks for param in group.params]

    @property
    def trained(self):
        return [param for param in self.params if param.has_gradient]

    def publish(self):
        for param in self.params:
            param.weights = [param.compute_weight(x) for x in param.main]
            param.forget()
        self.version += 1

    def finish(self, scale):
        for param in self.trained:
            total = param.totals[0]
            for other in param.totals[1:]:
                total = [f32(x + y) for x, y in zip(total, other)]
            param.grad = total
        self.scale(scale)

    def scale(self, factor):
        if f32(factor) != 1:
            for param in self.trained:
                param.grad = [f32(x * f32(factor)) for x in param.grad]

    def change_matrices(self, source, target, dtype):
        """Each matrix in this dtype."""
        for group in self.groups:
            for index, param in enumerate(group.params):
                if param.splits and param.has_gradient:
                    values = [rounded(x, dtype) for x in param.plane(source)]
                    param.set_plane(target, param.changed_matrices(values, index))

    def norm(self):
        return norm_of(x for param in self.trained for x in param.grad)

    def clip(self, max_norm):
        norm = self.norm()
        if norm > max_norm:
            self.scale(max_norm / norm)
        return norm

    def adamw(self, lr, keys):
        self.step = int(keys.get("step", 0)) or self.step + 1
        for param in self.trained:
            if param.is_callers or (param.skips and not param.given):
                continue
            self.update(param, f32(lr * param.lr_scale), keys)
        self.publish()

    def update(self, param, lr, keys):
        """In fp32, one rounded operation at a time, as fsdp_step_adamw writes it."""
        beta1, beta2 = float(keys.get("beta1", 0.9)), float(keys.get("beta2", 0.999))
        decay = 0 if param.flags & CONSTANTS["PARAM_NO_DECAY"] else f32(lr * f32(float(keys.get("weight_decay", 0))))
        rest1, rest2, epsilon = f32(1 - beta1), f32(1 - beta2), f32(float(keys.get("epsilon", 1e-8)))
        c1, c2 = f32(1 - beta1**self.step), f32(1 - beta2**self.step)
        first, second = (compact.decode(param.states[name], name) for name in MOMENTS)
        for i, g in enumerate(param.grad):
            first[i] = f32(first[i] + f32(f32(rest1 * g) - f32(rest1 * first[i])))
            second[i] = f32(second[i] + f32(f32(f32(rest2 * g) * g) - f32(rest2 * second[i])))
            w = f32(param.main[i] - f32(decay * param.main[i]))
            root = f32(f32(math.sqrt(f32(second[i] / c2))) + epsilon)
            param.main[i] = f32(w - f32(f32(lr * f32(first[i] / c1)) / root))
        if param.storage == CONSTANTS["MAIN_NONE"]:
            param.main = self.rounded_at_random(param, param.main, self.step)
        if param.is_coded:
            param.states = {name: compact.encode(state, name) for name, state in zip(MOMENTS, (first, second))}

    def rounded_at_random(self, param, values, step):
        return compact.round_stochastic(values, param.name, int(self.keys.get("rounding_seed", 0)), step)
