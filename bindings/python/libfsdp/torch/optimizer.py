# SPDX-License-Identifier: Apache-2.0
"""Optimizers of torch over this rank's shards. Weights, gradients and states are memory of the library, which torch's
step changes in place; the library saves the states by name."""

import math
import warnings
import zlib

import torch
from torch.nn import Parameter

from .. import _abi
from .._library import lib
from ..constants import AdamWFlag, Dtype, MainStorage, Optimizer, ParamFlag, ValueOp
from ..shard import refuse_file
from ..tensor import Tensor
from .grads import DTYPES
from .parameter import ShardGrad
from .probe import make_optimizer, probe

_MOST_VALUES = 512  # of one fsdp_all_reduce_values


def choose_optimizer(optimizer, options, groups, device):
    """What steps the model, for the arguments of shard(): None is AdamW of the library without param_groups."""
    if not callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        if groups is not None:
            raise TypeError("libfsdp.torch.shard: optimizer_groups is for an optimizer of torch (optimizer=)")
        return None if options is None else LibraryAdamW(optimizer, _adamw_defaults(options))
    kind, defaults, kept = probe(optimizer, options or {}, device)
    if kind is torch.optim.AdamW and not defaults["amsgrad"] and not defaults["maximize"]:
        return LibraryAdamW(Optimizer.ADAMW, defaults, groups or (lambda name, param: {}))
    return TorchOptimizer(optimizer, options or {}, groups, kept)


def _adamw_defaults(options):
    try:
        return torch.optim.AdamW([Parameter(torch.zeros(1))], **{"weight_decay": 0.0, **options}).defaults
    except TypeError as error:
        raise TypeError(f"libfsdp.torch.shard: optimizer_options of AdamW: {error}") from error


class _OfShards:
    """Comes before the class of the program's optimizer: step() takes the library's gradients and publishes."""

    def step(self, closure=None):
        """Ends the step's gradients, steps and publishes the weights. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.fsdp_owner.step_by(super().step)
        return loss

    def zero_grad(self, set_to_none=True):
        """There is nothing to clear after a step. Gradients before a step stay in the library's sums."""
        self.fsdp_owner.require_no_grads("optimizer.zero_grad()")

    def add_param_group(self, param_group):
        raise RuntimeError(
            "add_param_group: the parameters of a sharded module are known at shard(); give it optimizer_groups="
        )

    def state_dict(self):
        raise RuntimeError(
            "optimizer.state_dict(): each rank has only its part of the states: call sharded.save(folder) on every rank"
        )

    def load_state_dict(self, state_dict):
        raise RuntimeError(
            "optimizer.load_state_dict(): each rank has only its part of the states: call sharded.load(folder) on "
            "every rank"
        )

    def __reduce_ex__(self, protocol):
        raise TypeError("the optimizer of a sharded module cannot be pickled: call sharded.save(folder) on every rank")


class AdamW(torch.optim.Optimizer):
    """The param_groups of torch's AdamW, for a step of the library's."""

    def step(self):
        self.fsdp_owner.steps.step_library(self.param_groups[0])


class ShardView:
    """A shard of the model: the tensors of its main weight (None if it has none in fp32), gradient and states."""

    def __init__(self, owner, index):
        self.owner, self.index, self._grad = owner, index, None
        self.found = _abi.fsdp_shard()
        self.look()
        self.name, self.count = self.found.name.decode(), self.found.element_count
        is_float = self.found.main_weight and self.found.main_weight_dtype == Dtype.FLOAT32
        self.weight = self.tensor(self.found.main_weight) if is_float else None

    @property
    def grad(self):
        if not self.found.main_grad:
            raise RuntimeError(
                f"the gradient of {self.name} is at home in a file (grad_home is Home.FILE) and has no tensor; norms, "
                "clip_grad_norm_ and the library's AdamW work, and Home.HOST has tensors"
            )
        if self._grad is None:
            self._grad = self.tensor(self.found.main_grad)
        return self._grad

    def shown_grad(self):
        """The gradient. At home in a file it is a tensor of the shard's size that takes no memory."""
        return self.grad if self.found.main_grad else torch.zeros((), device=self.owner.device).expand(self.count)

    def look(self):
        self.owner.model.context.check(lib.get_shard(self.owner.model.handle, self.index, self.found))
        return self

    @property
    def is_stepped(self):
        """False if this step must leave the parameter unchanged. Call look() first."""
        return not self.found.flags & ParamFlag.FROZEN

    def tensor(self, address):
        model = self.owner.model
        return torch.from_dlpack(Tensor.of(address, (self.count,), Dtype.FLOAT32, model._handle, model.device))

    def state(self, name):
        model, found = self.owner.model, _abi.fsdp_tensor()
        model.context.check(lib.get_shard_state(model.handle, self.index, name.encode(), found))
        return torch.from_dlpack(Tensor(found, model._handle)).view(self.count)


class _Steps:
    """What the kinds of optimizers share: the shards, and the parameters that torch sees in their place."""

    def fields(self, name, param):
        """The fields of the parameter's fsdp_param that the optimizer needs."""
        return {}

    def attach(self, owner):
        """Makes the optimizer, after the seal."""
        self.owner = owner
        with torch.inference_mode(False):
            self.shards = owner.shards()
            self.params = [Parameter(self.value(shard)) for shard in self.shards]
            self.grads = [ShardGrad.of(shard.shown_grad(), shard.name, owner) for shard in self.shards]
            if not self.params:  # an optimizer, and a GradScaler, want one: this rank owns no element
                self.params = [Parameter(torch.zeros(0, device=owner.device))]
                self.grads = [ShardGrad.of(torch.zeros(0, device=owner.device), "", owner)]
            self.optimizer = self.make()
        kind = type(self.optimizer)
        self.optimizer.fsdp_owner = owner
        self.optimizer.__class__ = type(kind.__name__, (_OfShards, kind), {"__module__": kind.__module__})
        self.hide_grads()
        self.take_states()

    def hide_grads(self):
        for param, grad in zip(self.params, self.grads):
            param.grad = grad

    def compare_groups(self):
        """Raises on all ranks if ranks have other param_groups. Collective."""
        number = float(zlib.crc32(repr(self.saved_groups()).encode()))
        low, high = self.owner.context.all_reduce_values([-number, number], ValueOp.MAX, self.owner.mesh)
        if -low != high:
            raise RuntimeError(
                "optimizer.step(): the param_groups of ranks differ, as in lr or weight_decay: set the same values on "
                "every rank, and call sharded.discard()"
            )

    # -- checkpoints ------------------------------------------------------------------------------------------

    def saved_groups(self):
        plain = (type(None), bool, int, float, str, torch.Tensor)
        return [
            {key: value for key, value in group.items() if isinstance(value, plain) or _is_numbers(key, value)}
            for group in self.optimizer.param_groups
        ]

    @property
    def kind(self):
        """The optimizer's name in a checkpoint."""
        return type(self.optimizer).__name__

    def check_saved(self, saved):
        """Raises if the checkpoint is of another optimizer, before anything is loaded."""
        kind, groups = self.kind, len(self.optimizer.param_groups)
        if saved["class"] != kind:
            raise ValueError(f"sharded.load(): the checkpoint is of {saved['class']}, and the module trains by {kind}")
        if len(saved["groups"]) != groups:
            raise ValueError(
                f"sharded.load(): the checkpoint has {len(saved['groups'])} param_groups, and the optimizer {groups}"
            )

    def load(self, saved):
        """Called after the library has loaded weights and states. saved is None in another program's checkpoint."""
        for group, values in zip(self.optimizer.param_groups, saved["groups"] if saved else ()):
            group.update(values)


def _is_numbers(key, value):
    """True for betas and the like. A rank may have no shard of a group, and then its params are an empty list."""
    is_list = key != "params" and isinstance(value, (tuple, list))
    return is_list and all(isinstance(each, (int, float)) for each in value)


class LibraryAdamW(_Steps):
    """AdamW of the library, with the param_groups of torch's, for its schedulers and GradScaler."""

    def __init__(self, model_optimizer, defaults, groups=None):
        self.model_optimizer = model_optimizer
        keys = "lr", "betas", "eps", "weight_decay"
        self.defaults, self.groups = {key: defaults[key] for key in keys}, groups

    def no_decay(self, rule):
        """The rule of parameters without weight decay: with torch's AdamW, those of a group with weight_decay=0."""
        return rule if rule is not None or self.groups is None else self._is_without_decay

    def check_storage(self, options, where, params=()):
        pass

    def _is_without_decay(self, name, param):
        found = self.groups(name, param) or {}
        if set(found) - {"weight_decay"} or found.get("weight_decay", 0) != 0:
            raise ValueError(
                f"libfsdp.torch.shard: optimizer_groups gives {name!r} {found}: with AdamW of the library a group can "
                "only have weight_decay=0; other rates are those of sharded.model's set_param_lr_scale"
            )
        return "weight_decay" in found

    def declare(self, model):
        pass

    def take_states(self):
        pass

    def value(self, shard):
        """Without a weight in fp32 it is a tensor of the shard's size that takes no memory."""
        is_there = shard.weight is not None
        return shard.weight if is_there else torch.zeros((), device=self.owner.device).expand(shard.count)

    def make(self):
        return AdamW(self.params, dict(self.defaults))

    def run(self, step):
        step()

    def step_library(self, group):
        (beta1, beta2), flags = map(float, group["betas"]), 0
        flags |= AdamWFlag.BETA1_ZERO if beta1 == 0 else 0
        flags |= AdamWFlag.BETA2_ZERO if beta2 == 0 else 0
        flags |= AdamWFlag.EPSILON_ZERO if group["eps"] == 0 else 0
        options = {"beta1": beta1, "beta2": beta2, "epsilon": group["eps"], "weight_decay": group["weight_decay"]}
        options.update(self.owner.step_number())
        self.owner.model.step_adamw(float(group["lr"]), stream=self.owner.stream(), flags=flags, **options)

    def save(self):
        return {"class": "AdamW", "groups": self.saved_groups(), "params": {}}


class TorchOptimizer(_Steps):
    """An optimizer of torch's that updates each element by itself."""

    model_optimizer = Optimizer.CALLER

    def __init__(self, make, options, groups, kept):
        self._make, self.options, self.groups, self.kept = make, options, groups, kept

    def no_decay(self, rule):
        if rule is not None:
            raise ValueError(
                "libfsdp.torch.shard: no_decay is for AdamW of the library: give parameters of another weight decay by "
                "optimizer_groups=lambda name, param: {'weight_decay': 0.0} if param.dim() < 2 else {}"
            )
        return lambda name, param: False  # the weight decay is that of the param_groups

    def check_storage(self, options, where, params=()):
        refuse_file(options, "libfsdp.torch.shard", "an optimizer of torch")
        if options.get("main_storage", MainStorage.FLOAT32) not in (0, MainStorage.FLOAT32):
            raise ValueError(
                f"libfsdp.torch.shard: main_storage of {where} keeps no fp32 weights, which an optimizer of torch "
                "needs: it is for AdamW of the library"
            )

    def declare(self, model):
        for name, dtype in self.kept.states.items():
            model.add_optimizer_state(name, DTYPES[dtype])

    def value(self, shard):
        return shard.weight

    def make(self):
        self.states = [{name: shard.state(name) for name in self.kept.states} for shard in self.shards]
        if self.groups is None:
            return make_optimizer(self._make, self.params, self.options)
        params = {shard.name: param for shard, param in zip(self.shards, self.params)}
        groups = []
        for layer in self.owner.layers:
            for name, param in layer.params:
                options = dict(self.groups(name, param) or {})
                group = next((group for group in groups if group[0] == options), None) or (options, [])
                if group not in groups:
                    groups.append(group)
                if name in params:
                    group[1].append(params[name])
        if not self.shards:
            groups[0][1].extend(self.params)
        return make_optimizer(self._make, [{**options, "params": own} for options, own in groups], self.options)

    def run(self, step):
        self.compare_groups()
        for shard, param in zip(self.shards, self.params):
            param.grad = shard.grad if shard.look().is_stepped else None
        if not self.shards:
            self.params[0].grad = None
        try:
            step()
        finally:
            self.hide_grads()
        self.take_states()
        self.owner.model.publish_weights(self.owner.stream())

    def take_states(self):
        """Moves states that torch has made into the library's memory, where later steps change them."""
        for param, views in zip(self.params, self.states):
            state = self.optimizer.state.get(param, {})
            for name, value in state.items():
                view = views.get(name)
                if view is None:
                    self._check_single(name, value)
                elif value is not view:
                    state[name] = view.copy_(value)

    def _check_single(self, name, value):
        if name not in self.kept.scalars:
            raise RuntimeError(
                f"optimizer.step(): its state {name!r} was not there in the steps that shard() tried: libfsdp cannot "
                "save it"
            )

    # -- checkpoints ------------------------------------------------------------------------------------------

    def save(self):
        """Single numbers are those of the ranks that own a part of the parameter. Collective."""
        names = [name for layer in self.owner.layers for (name, _), can in zip(layer.params, layer.can_train) if can]
        own = {shard.name: self._numbers(param) for shard, param in zip(self.shards, self.params)}
        width = 1 + len(self.kept.scalars)
        numbers = [number for name in names for number in own.get(name, [-math.inf] * width)]
        agreed = []
        for start in range(0, len(numbers), _MOST_VALUES):
            part = numbers[start : start + _MOST_VALUES]
            agreed += self.owner.context.all_reduce_values(part, ValueOp.MAX, self.owner.mesh)
        rows = {name: agreed[width * index : width * (index + 1)] for index, name in enumerate(names)}
        params = {name: dict(zip(self.kept.scalars, row[1:])) for name, row in rows.items() if row[0] == 1}
        return {"class": type(self.optimizer).__name__, "groups": self.saved_groups(), "params": params}

    def _numbers(self, param):
        """[1 if torch has made the states, the single numbers]"""
        state = self.optimizer.state.get(param)
        if not state:
            return [0.0] * (1 + len(self.kept.scalars))
        return [1.0] + [float(state[name]) for name in self.kept.scalars]

    def load(self, saved):
        super().load(saved)
        if saved is None:
            warnings.warn(
                f"sharded.load(): the checkpoint has no numbers of {type(self.optimizer).__name__}, such as its step: "
                "its states begin anew"
            )
        known = saved["params"] if saved else {}
        for shard, param, views in zip(self.shards, self.params, self.states):
            self.optimizer.state.pop(param, None)
            if (numbers := known.get(shard.name)) is not None:
                singles = {name: _as(example, numbers[name]) for name, example in self.kept.scalars.items()}
                self.optimizer.state[param] = {**singles, **views}


def _as(example, number):
    if isinstance(example, torch.Tensor):
        return torch.full_like(example, number, requires_grad=False)
    return type(example)(number)
