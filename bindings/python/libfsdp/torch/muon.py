# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of a sharded module, and AdamW of the library for its other parameters."""

import dataclasses

import torch

from ..constants import Dtype, MainStorage, Optimizer, ParamFlag
from ..shard import refuse_file
from .matrices import find_matrices
from .newton_schulz import ADJUSTMENTS, lr_ratio, orthogonalize
from .optimizer import LibraryAdamW

_DTYPES = {None: Dtype.FLOAT32, torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16}
_ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_GROUP = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


@dataclasses.dataclass(frozen=True)
class Muon:
    """What to give to shard() as optimizer=: Muon for matrices, and AdamW of the library for all other parameters.

    lr .. adjust_lr_fn: those of torch.optim.Muon, with its formulas. adjust_lr_fn is None or "original",
    "match_rms_adamw", or "spectral_unclamped".
    adamw: lr, betas, eps and weight_decay of the other parameters; the default of weight_decay is 0.
    matrices(name, param): True for a parameter of Muon; asked for trained parameters of two or more dimensions. The
    last two dimensions are a matrix, and those before them count matrices, as in a stack of experts. Default: those of
    hidden layers (find_matrices says which).
    splits(name, param): None, or the rows of each matrix into which these dimensions are cut, as [n, n, n] for q, k
    and v.
    dtype: of the Newton-Schulz iteration, and of what travels between ranks: torch.float32 (the default) or
    torch.bfloat16, in which torch.optim.Muon iterates.

    sharded.optimizer has two param_groups: that of the matrices, then that of AdamW. All ranks must give the same.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_coefficients: tuple = (3.4445, -4.775, 2.0315)
    eps: float = 1e-7
    ns_steps: int = 5
    adjust_lr_fn: object = None
    adamw: object = None
    matrices: object = None
    splits: object = None
    dtype: object = None

    def __post_init__(self):
        for name in ("lr", "weight_decay", "momentum"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "it must not be below 0")
        numbers, adjust = self.ns_coefficients, self.adjust_lr_fn
        _require(len(tuple(numbers)) == 3, "ns_coefficients", numbers, "it must be three numbers")
        _require(0 <= self.ns_steps < 100, "ns_steps", self.ns_steps, "it must be from 0 to 99")
        _require(adjust in ADJUSTMENTS, "adjust_lr_fn", adjust, f"it must be one of {ADJUSTMENTS}")
        _require(self.dtype in _DTYPES, "dtype", self.dtype, "it must be torch.float32 or torch.bfloat16")
        unknown = set(self.adamw or {}) - set(_ADAMW)
        _require(not unknown, "adamw", self.adamw, f"AdamW of the library has {', '.join(_ADAMW)}")

    def steps(self, module, layers):
        """What steps a sharded module."""
        return MuonSteps(self, None if self.matrices else find_matrices(module, layers))


def _require(is_met, name, value, told):
    if not is_met:
        raise ValueError(f"libfsdp.torch.Muon: {name} is {value!r}: {told}")


class MuonOptimizer(torch.optim.Optimizer):
    """The param_groups of the matrices and of AdamW's parameters."""

    def step(self):
        self.fsdp_owner.steps.step_groups(*self.param_groups)


class MatrixShard:
    """A shard of a parameter that has matrices, with its momentum."""

    def __init__(self, shard, shape, splits):
        self.shard, self.momentum = shard, shard.state("momentum_buffer")
        self.parts = list(_parts(shard.found.element_offset, shard.count, shape, splits))

    def add_momentum(self, group):
        """Puts what Newton-Schulz works on in the place of the gradient."""
        grad = self.shard.grad
        self.momentum.lerp_(grad, 1 - group["momentum"])
        if group["nesterov"]:
            grad.lerp_(self.momentum, group["momentum"])
        else:
            grad.copy_(self.momentum)

    def descend(self, group):
        found, weight = self.shard.found, self.shard.weight
        lr = float(group["lr"]) * found.lr_scale
        if not found.flags & ParamFlag.NO_DECAY:
            weight.mul_(1 - lr * group["weight_decay"])
        for begin, end, *sizes in self.parts:
            ratio = lr_ratio(group["adjust_lr_fn"], *sizes)
            weight[begin:end].add_(self.shard.grad[begin:end], alpha=-lr * ratio)


def _parts(offset, count, shape, splits):
    """Yields (begin, end, rows, columns) of the parts of a shard whose matrices are equal in shape."""
    columns, heights = shape[-1], splits or [shape[-2]]
    if len(set(heights)) == 1:
        yield 0, count, heights[0], columns
        return
    first = 0
    while first < offset + count:
        for rows in heights:
            begin, end = max(first - offset, 0), min(first + rows * columns - offset, count)
            if begin < end:
                yield begin, end, rows, columns
            first += rows * columns


class MuonSteps(LibraryAdamW):
    """Muon's part of the step, before AdamW of the library does its part and publishes all."""

    kind = "Muon"

    def __init__(self, options, found):
        super().__init__(Optimizer.ADAMW, {**_ADAMW, **(options.adamw or {})})
        self.options, self.found, self.declared, self.storage = options, found, {}, 0

    # -- declaring ----------------------------------------------------------------------------------------------

    def fields(self, name, param):
        """The fields of the fsdp_param of a matrix."""
        if not self._is_matrix(name, param):
            return {}
        splits = self.options.splits and self.options.splits(name, param)
        splits = None if splits is None else [int(rows) for rows in splits]
        self.declared[name] = tuple(param.shape), splits
        return {"matrix": True, "splits": splits, "optimizer": Optimizer.CALLER}

    def _is_matrix(self, name, param):
        if not param.requires_grad or param.dim() < 2:
            return False
        return param in self.found if self.found is not None else bool(self.options.matrices(name, param))

    def check_storage(self, options, where, params=()):
        refuse_file(options, "libfsdp.torch.shard", "Muon")
        own = options.get("main_storage") or self.storage
        matrix = next((param.name for param in params if param.matrix), None)
        if matrix is not None and own not in (0, MainStorage.FLOAT32):
            raise ValueError(
                f"libfsdp.torch.shard: main_storage of {where} keeps no fp32 weights, which Muon needs for {matrix!r}: "
                "give other groups that main_storage by group_options, or leave the matrices to AdamW by matrices="
            )
        self.storage = own if not params else self.storage

    def declare(self, model):
        if not self.declared:
            raise ValueError(
                "libfsdp.torch.shard: no parameter of the module is a matrix for Muon: name them, as in "
                "Muon(matrices=lambda name, param: True), or use optimizer=torch.optim.AdamW"
            )
        model.add_optimizer_state("momentum_buffer")

    def make(self):
        own = {shard.name: param for shard, param in zip(self.shards, self.params)}
        self.matrices = [
            MatrixShard(shard, *self.declared[shard.name]) for shard in self.shards if shard.name in self.declared
        ]
        names = [each.shard.name for each in self.matrices]
        muon = {"params": [own[name] for name in names], **{key: getattr(self.options, key) for key in _GROUP}}
        others = [param for param in self.params if all(param is not each for each in muon["params"])]
        optimizer = MuonOptimizer([muon, {"params": others, **self.defaults}], {})
        for each in self.matrices:
            optimizer.state[own[each.shard.name]]["momentum_buffer"] = each.momentum
        return optimizer

    # -- a step -------------------------------------------------------------------------------------------------

    def run(self, step):
        self.compare_groups()
        step()

    def step_groups(self, muon, adamw):
        stepped = [each for each in self.matrices if each.shard.look().is_stepped]
        for each in stepped:
            each.add_momentum(muon)
        self.orthogonalize(muon)
        for each in stepped:
            each.descend(muon)
        self.step_library(adamw)

    def orthogonalize(self, group):
        """Works on the matrices that this rank owns, while the next ones travel. Collective."""
        for matrix in self.owner.model.matrices(dtype=_DTYPES[self.options.dtype], stream=self.owner.stream()):
            view = torch.from_dlpack(matrix.tensor)
            orthogonalize(view, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def save(self):
        return {"class": self.kind, "groups": self.saved_groups(), "params": {}}
