# SPDX-License-Identifier: Apache-2.0
"""The first values of a module that was made on the meta device. They are made in torch's memory for one group after
the other, and each rank keeps its shards."""

import contextlib
import os

import torch
from torch.nn import Parameter

from ..constants import EVERY_RANK, DeviceKind, ValueOp


def find_initial(module, context, init, ignored):
    """The InitialValues of a module that has parameters or buffers on the meta device, else None."""
    names = [name for name, value in _named_values(module) if value.is_meta]
    if not names:
        if init is not None:
            raise ValueError(
                "libfsdp.torch.shard: init is for a module on the meta device, and this one has values already: make "
                "it in `with torch.device('meta'):`"
            )
        return None
    lost = next((name for name, param in module.named_parameters() if param in ignored and param.is_meta), None)
    if lost:
        raise ValueError(
            f"libfsdp.torch.shard: the ignored parameter {lost!r} is on the meta device, and libfsdp gives it no "
            "values: give it memory and values before shard()"
        )
    return InitialValues(module, context, init)


def _named_values(module):
    yield from module.named_parameters()
    yield from module.named_buffers()


class InitialValues:
    """init: None for each part's reset_parameters(), a function of a part, {name: values}, or a folder."""

    def __init__(self, module, context, init):
        self.module, self.context, self.init = module, context, init
        is_cuda = context.device == DeviceKind.CUDA
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
        self.folder = init if isinstance(init, (str, os.PathLike)) else None
        self.values = init if hasattr(init, "keys") else None
        self.is_given = self.folder is not None or self.values is not None
        self.names, self.roots = {}, {}
        # parts in the order of module.apply(): children come first
        self.parts = _in_order(module)
        self._check_init()
        self.meta_buffers = self._place()

    def _check_init(self):
        if not (self.init is None or callable(self.init) or self.is_given):
            raise TypeError(
                f"libfsdp.torch.shard: init is {self.init!r}: it is a function of a module, a mapping of names to "
                "values, or the folder of a checkpoint"
            )
        for path, part in self.parts.items():
            self._check_part(path, part)

    def _check_part(self, path, part):
        own = [name for name, param in part._parameters.items() if param is not None and param.is_meta]
        lost = [name for name, buffer in part._buffers.items() if buffer is not None and buffer.is_meta]
        if self.is_given:
            own, lost = [], [name for name in lost if name in part._non_persistent_buffers_set]
        if (own or lost) and self._function_of(part) is None:
            raise ValueError(
                f"libfsdp.torch.shard: {type(part).__name__} {path!r} has {(own + lost)[0]!r} on the meta device and "
                "no reset_parameters(): give shard() init=, a function that fills the parameters and buffers of one module"
            )

    def _function_of(self, part):
        """What fills the part's own parameters and buffers, or None."""
        if self.init is not None and not self.is_given:
            return lambda: self.init(part)
        return getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)

    def _place(self):
        """Moves parameters to the device, still without memory, and gives buffers their memory. Returns
        {part: [names of such buffers]}."""
        made, found = {}, {}
        for part in self.parts.values():
            for name, param in part._parameters.items():
                if param is not None and param.is_meta:
                    if param not in made:
                        made[param] = self._placeholder(param)
                    part._parameters[name] = made[param]
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[name] = torch.empty_like(buffer, device=self.device)
                    found.setdefault(part, []).append(name)
        for name, param in self.module.named_parameters(remove_duplicate=False):
            self.names.setdefault(param, []).append(name)
        self.placed = set(made.values())
        return found

    def _placeholder(self, param):
        placed = Parameter(self._no_memory(param), requires_grad=param.requires_grad)
        placed.__dict__.update(param.__dict__)
        return placed

    def _no_memory(self, param):
        return torch.zeros((), dtype=param.dtype, device=self.device).expand(param.shape)

    # -- values -------------------------------------------------------------------------------------------------

    def load(self, layer):
        """Loads the group's parameters. Collective."""
        if self.folder is not None:
            return
        if self.values is not None:
            for index, (name, param) in enumerate(layer.params):
                layer.group.load_param(index, self._value_of(param).contiguous(), EVERY_RANK)
        else:
            self._make(layer)

    def _make(self, layer):
        """The parts of the group get memory and make their values, and one rank's go to all."""
        own = {param: index for index, (_, param) in enumerate(layer.params)}
        parts = [part for part in self.parts.values() if any(param in own for param in _params_of(part))]
        with self._memory(parts):
            for part in parts:
                if any(param in self.placed for param in _params_of(part)) or part in self.meta_buffers:
                    self._function_of(part)()
            root = self._root_of(layer)
            for param, index in own.items():
                is_root = self.context.rank == root
                layer.group.load_param(index, param.detach().contiguous() if is_root else None, root)

    @contextlib.contextmanager
    def _memory(self, parts):
        """Gives memory to the parts' parameters that have none."""
        lent = {param for part in parts for param in _params_of(part) if param in self.placed}
        for param in lent:
            param.data = torch.empty(param.shape, dtype=param.dtype, device=self.device)
        try:
            with torch.no_grad():
                yield
        finally:
            for param in lent:
                param.data = self._no_memory(param)

    def _root_of(self, layer):
        """The lowest rank of the group's mesh. Collective."""
        mesh = layer.mesh
        if mesh not in self.roots:
            self.roots[mesh] = int(self.context.all_reduce_values(float(self.context.rank), ValueOp.MIN, mesh))
        return self.roots[mesh]

    def _value_of(self, param):
        names = self.names[param]
        name = next((name for name in names if name in self.values), None)
        if name is None:
            raise KeyError(f"libfsdp.torch.shard: init has no values of {names[0]!r}")
        values = torch.as_tensor(self.values[name]).detach()
        if values.shape != param.shape:
            raise ValueError(
                f"libfsdp.torch.shard: init has {tuple(values.shape)} for {name!r}, whose shape is {tuple(param.shape)}"
            )
        return values.to(self.device, param.dtype)

    def fill_buffers(self):
        """Fills the buffers that no group's parts fill, and those of which init has values."""
        for part, names in self.meta_buffers.items():
            is_by_name = self.is_given and part._non_persistent_buffers_set.isdisjoint(names)
            if not is_by_name and (self.is_given or not _params_of(part)):
                with self._memory([part]):
                    self._function_of(part)()
            for name in names if self.values is not None else ():
                if name not in part._non_persistent_buffers_set:
                    path = next(path for path, each in self.parts.items() if each is part)
                    self._fill_buffer(f"{path}.{name}" if path else name, part._buffers[name])

    def _fill_buffer(self, name, buffer):
        if name not in self.values:
            raise KeyError(f"libfsdp.torch.shard: init has no values of the buffer {name!r}")
        with torch.no_grad():
            buffer.copy_(torch.as_tensor(self.values[name]))


def _in_order(module):
    """{path: part}, with children before their parents."""
    paths = {part: path for path, part in module.named_modules()}
    order = []
    module.apply(lambda part: order.append(part) if part not in order else None)
    return {paths[part]: part for part in order}


def _params_of(part):
    return [param for param in part._parameters.values() if param is not None]
