# SPDX-License-Identifier: Apache-2.0
"""Moving averages of a sharded module's weights (EMA, SWA). Each is a state of every trained parameter, beside those of
the optimizer: a rank has the averages of its shards, and the library saves them by name."""

import contextlib
import re

import torch

from ..constants import Dtype, MainStorage, Optimizer, ValueOp
from .muon import MuonSteps
from .words import in_torch_words

_LOOKS_LIKE = "as torch.optim.swa_utils.get_ema_multi_avg_fn(0.999) returns one"


def read_averages(averages, steps, options):
    """{name: function} of the argument of shard(), or what is wrong with it."""
    for name, function in averages.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
            raise ValueError(
                f"libfsdp.torch.shard: averages has the name {name!r}: it must be 1 to 40 letters, digits, _ or -"
            )
        _try(name, function)
    if averages and isinstance(steps, MuonSteps):
        raise ValueError(
            "libfsdp.torch.shard: averages are not offered with Muon, because AdamW's parameters have no more states "
            "there: keep torch.optim.swa_utils.AveragedModel of a plain module, and load full_state_dict() into it"
        )
    if averages and options.get("main_storage", MainStorage.FLOAT32) not in (0, MainStorage.FLOAT32):
        raise ValueError(
            "libfsdp.torch.shard: averages need fp32 main weights, and main_storage keeps none: leave out one of them"
        )
    return dict(averages)


def _try(name, function):
    """The function must change a list of averages in place."""
    average = torch.zeros(2)
    try:
        for count in (1, 1000):  # it may wait for its first updates, or skip some
            found = function([average], [torch.ones(2)], torch.tensor(count))
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found is None and not average._version and not average.any():
        found = "no change of the tensor"
    if found is not None:
        raise TypeError(
            f"libfsdp.torch.shard: averages[{name!r}] must be a function (averages, weights, count) that changes a "
            f"list of averages in place and returns nothing, {_LOOKS_LIKE}; tried with one tensor, it gave: {found}"
        )


class Average:
    """An average of the module's weights, sharded as these are: sharded.averages[name]."""

    def __init__(self, owner, name, function):
        self.owner, self.name, self._function = owner, name, function
        self.count = 0  # of updates: n_averaged of torch.optim.swa_utils.AveragedModel
        self.state = f"average.{name}"

    def attach(self):
        """After the seal: finds this rank's parts."""
        with torch.inference_mode(False):
            self._weights = [shard.weight for shard in self.owner.shards()]
            self._values = [shard.state(self.state) for shard in self.owner.shards()]

    @in_torch_words
    def update(self):
        """Updates the average from the weights. Call it on every rank, after steps. The first update copies them."""
        self.owner.averages.require_hidden(f"sharded.averages[{self.name!r}].update()")
        if self._weights:
            with torch.no_grad():
                if self.count == 0:
                    torch._foreach_copy_(self._values, self._weights)
                else:
                    count = torch.tensor(self.count, device=self.owner.device)
                    self._function(list(self._values), list(self._weights), count)
        self.count += 1

    def fill(self, missing):
        """Copies the weight of each parameter whose state is one of these names."""
        with torch.no_grad():
            for shard, value in zip(self.owner.shards(), self._values):
                if f"state.{shard.name}.{self.state}" in missing:
                    value.copy_(shard.weight)

    @contextlib.contextmanager
    def shown(self):
        """In `with average.shown():` the module's weights are the average, for torch.no_grad(). Afterwards its weights
        and buffers are those of before. Collective."""
        self._show()
        try:
            yield self
        finally:
            if self.owner.averages.shown is self:  # else discard() has hidden it
                self.hide()

    @in_torch_words
    def _show(self):
        call = f"sharded.averages[{self.name!r}].shown()"
        self.owner.averages.require_hidden(call)
        low, high = self.owner.context.all_reduce_values([-self.count, self.count], ValueOp.MAX, self.owner.mesh)
        if -low != high or not self.count:
            counts = f"from {int(-low)} to {int(high)} updates on other ranks" if -low != high else "no update"
            raise RuntimeError(f"{call}: the average has had {counts}: call update() on every rank")
        self._buffers = [
            (part, name, buffer, None if buffer is None else buffer.detach().clone())
            for part in self.owner.module.modules()
            for name, buffer in part._buffers.items()
        ]
        self._swap(call, self)

    @in_torch_words
    def hide(self):
        """Gives the module its weights and buffers back, as the end of `with average.shown():` does. Collective."""
        with torch.no_grad():
            for part, name, buffer, before in self._buffers:
                part._buffers[name] = buffer  # a forward pass may have put another tensor there
                if buffer is not None:
                    buffer.copy_(before)
        self._swap("the end of `with average.shown():`", None)
        self._buffers = []

    def _swap(self, call, shown):
        """shown: what the module's weights are afterwards. After an exception they are what they were."""
        averages = self.owner.averages
        found, averages.shown = averages.shown, None  # the window is only for the weights themselves
        try:
            with self.owner.window(call), torch.no_grad():
                _exchange(list(zip(self._weights, self._values)))
                found = shown
        finally:
            averages.shown = found

    def full_state_dict(self):
        """{name: value} as sharded.full_state_dict() gives it, with the average in place of the weights. Collective."""
        with self.shown():
            return self.owner.full_state_dict()


def _exchange(pairs):
    """Exchanges the values of the two tensors of each pair. After an exception in the middle, such as Ctrl-C, all have
    the values of before."""
    if not pairs:
        return
    kept = torch.empty(2, max(each.numel() for each, _ in pairs), device=pairs[0][0].device)
    begun, done = [], []
    try:
        for pair in pairs:
            _exchange_pair(pair, kept, begun)
            done.append(pair)
    except BaseException:
        if len(begun) > len(done):
            for tensor, values in zip(begun[-1], kept):
                tensor.copy_(values[: tensor.numel()])
        for pair in done:
            _exchange_pair(pair, kept, [])
        raise


def _exchange_pair(pair, kept, begun):
    """kept: memory for the values of both. begun gets the pair before it changes, when its values are kept."""
    first, second = (values[: pair[0].numel()] for values in kept)
    first.copy_(pair[0])
    second.copy_(pair[1])
    begun.append(pair)
    pair[0].copy_(second)
    pair[1].copy_(first)


class Averages(dict):
    """{name: Average}. shown is the average that the module's weights are now, or None."""

    def __init__(self, owner, functions):
        super().__init__((name, Average(owner, name, function)) for name, function in functions.items())
        self.owner, self.shown = owner, None

    def declare(self, model, optimizer):
        """optimizer: the model's."""
        if self:
            self._require_one_optimizer(optimizer)
        for average in self.values():
            model.add_optimizer_state(average.state, Dtype.FLOAT32)

    def _require_one_optimizer(self, default):
        """The library keeps such a state for all trained parameters only if AdamW updates all or none of them."""
        kinds = {}
        for layer in self.owner.layers:
            for param, trains in zip(layer.group.params, layer.trains):
                if trains:
                    kinds.setdefault((param.fields.get("optimizer") or default) == Optimizer.CALLER, param.name)
        if len(kinds) > 1:
            raise ValueError(
                f"libfsdp.torch.shard: averages are not offered where AdamW updates some parameters and the caller "
                f"others, and param_options gives {kinds[True]!r} Optimizer.CALLER and not {kinds[False]!r}: give all "
                "parameters one optimizer, or leave out averages="
            )

    def attach(self):
        for average in self.values():
            average.attach()

    def require_hidden(self, call):
        if self.shown:
            raise RuntimeError(
                f"{call}: the weights are the average {self.shown.name!r} now: leave `with average.shown():` first"
            )

    def require_no_grad(self):
        """A backward pass would be that of the average."""
        if self.shown and torch.is_grad_enabled():
            self.require_hidden("a forward pass that records a graph (without torch.no_grad())")

    # -- checkpoints ------------------------------------------------------------------------------------------

    def save(self):
        """{name: number of updates}"""
        return {name: average.count for name, average in self.items()}

    def load(self, counts, missing):
        """Called after the library has loaded the states. counts: what save() gave, or None: the checkpoint has no
        averages, and they begin anew. missing: names of the states that it lacks. A parameter that was frozen in its
        job had no average there: the average begins with the weight that was loaded."""
        for name, average in self.items():
            average.count = (counts or {}).get(name, 0)
            average.fill(missing)
