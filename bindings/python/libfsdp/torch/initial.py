# SPDX-License-Identifier: Apache-2.0
"""The first values of a module that was made on the meta device. They are made in torch's memory for one group after
the other, and each rank keeps its shards."""

import contextlib
import os

import torch
from torch.nn import Parameter

from ..constants import EVERY_RANK, DeviceKind, LoadFlag, ValueOp
from .state import BUFFERS, named_buffers, require_numbers, unpack


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


@contextlib.contextmanager
def restoring(initial):
    """On an error puts the module back on the meta device, so that a second shard() makes its values."""
    try:
        yield
    except BaseException:
        if initial:
            initial.restore()
        raise


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
        made, found, self.before = {}, {}, []
        for part in self.parts.values():
            for name, param in part._parameters.items():
                if param is not None and param.is_meta:
                    if param not in made:
                        made[param] = self._placeholder(param)
                    self.before.append((part._parameters, name, param))
                    part._parameters[name] = made[param]
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    self.before.append((part._buffers, name, buffer))
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

    def restore(self):
        """Puts the module back on the meta device, after shard() has failed."""
        for values, name, value in self.before:
            values[name] = value

    # -- values -------------------------------------------------------------------------------------------------

    def load(self, owner):
        """Makes or loads the values of all groups and buffers. Collective."""
        parts = [part for part in self.parts.values() if self._runs(part)]
        if not self.is_given:
            for unit, layers in self._units(owner.layers, parts):
                self._make(unit, layers)
            return
        for part in parts:  # they fill buffers that state dicts do not have
            with self._filled([part], self._own_params(part)):
                pass
        if self.folder is not None:
            self._load_folder(owner)
            return
        self._fill_buffers(self.values, "init")
        for layer in owner.layers:
            for index, (_, param) in enumerate(layer.params):
                layer.group.load_param(index, self._value_of(param).contiguous(), EVERY_RANK)

    def _runs(self, part):
        """True if the part's function has to fill something."""
        if self.is_given:
            return not part._non_persistent_buffers_set.isdisjoint(self.meta_buffers.get(part, ()))
        if self._function_of(part) is None:
            return False
        return bool(self._own_params(part)) or any(each in self.meta_buffers for each in self._reach_of(part))

    def _reach_of(self, part):
        """The modules whose values the part's function may write: init is for one module, while reset_parameters() of a
        module may fill the modules in it."""
        return [part] if self.init is not None and not self.is_given else list(part.modules())

    def _own_params(self, part):
        """The parameters without memory that the part's function may write."""
        return [param for each in self._reach_of(part) for param in _params_of(each) if param in self.placed]

    def _units(self, layers, parts):
        """Yields (parts, groups): groups that a part's function fills together are made at one time. First come parts
        that have buffers only."""
        places = {param: number for number, layer in enumerate(layers) for _, param in layer.params}
        numbers = {part: {places[param] for param in self._own_params(part)} for part in parts}
        unit_of = list(range(len(layers)))
        for some in numbers.values():
            joined = {unit_of[number] for number in some}
            unit_of = [min(joined) if unit in joined else unit for unit in unit_of]
        yield [part for part in parts if not numbers[part]], []
        for unit in dict.fromkeys(unit_of):
            own = [part for part in parts if any(unit_of[number] == unit for number in numbers[part])]
            yield own, [layer for layer, each in zip(layers, unit_of) if each == unit]

    def _make(self, parts, layers):
        """The groups get memory and their parts make their values, and one rank's go to all."""
        params = {param for layer in layers for _, param in layer.params if param in self.placed}
        with self._filled(parts, params):
            for layer in layers:
                root = self._root_of(layer)
                for index, (_, param) in enumerate(layer.params):
                    is_root = self.context.rank == root
                    layer.group.load_param(index, param.detach().contiguous() if is_root else None, root)

    @contextlib.contextmanager
    def _filled(self, parts, params):
        """Gives the parameters memory and runs the parts' functions. What had values before shard() keeps them."""
        for param in params:
            param.data = torch.empty(param.shape, dtype=param.dtype, device=self.device)
        kept = {value: value.detach().clone() for part in parts for value in self._given_values(part)}
        outside = {param: param._version for param in self.placed.difference(params)}
        try:
            with torch.no_grad():
                for part in parts:
                    self._run(part)
                for value, before in kept.items():
                    value.copy_(before)
                self._refuse_writes(outside)
                yield
        finally:
            for param in params:
                param.data = self._no_memory(param)

    def _given_values(self, part):
        """The parameters and buffers in the part's reach that were not on the meta device."""
        for each in self._reach_of(part):
            yield from (param for param in _params_of(each) if param not in self.placed)
            made = self.meta_buffers.get(each, ())
            yield from (value for name, value in each._buffers.items() if value is not None and name not in made)

    def _run(self, part):
        try:
            self._function_of(part)()
        except RuntimeError as error:
            if "single memory location" not in str(error):
                raise
            raise RuntimeError(_WRITES_OTHERS.format(f"of {type(part).__name__}", "of another module")) from error

    def _refuse_writes(self, versions):
        moved = next((param for param, version in versions.items() if param._version != version), None)
        if moved is not None:
            raise RuntimeError(_WRITES_OTHERS.format("of a module", repr(self.names[moved][0])))

    def _load_folder(self, owner):
        """Loads the weights and buffers of a checkpoint, and no states of an optimizer."""
        with self.context.open_checkpoint(self.folder) as checkpoint:
            kept = unpack(checkpoint, BUFFERS) or {}
            self._fill_buffers(kept, f"the checkpoint {os.fspath(self.folder)!r} of init")
            checkpoint.load_model(owner.model, flags=LoadFlag.WEIGHTS_ONLY)
        with torch.no_grad():
            for name, buffer in named_buffers(self.module):
                if name in kept:
                    buffer.copy_(kept[name])

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
        require_numbers("libfsdp.torch.shard: init", name, values, param)
        if values.shape != param.shape:
            raise ValueError(
                f"libfsdp.torch.shard: init has {tuple(values.shape)} for {name!r}, whose shape is {tuple(param.shape)}"
            )
        return values.to(self.device, param.dtype)

    def _fill_buffers(self, values, source):
        """Fills the buffers that were on the meta device and that state dicts have."""
        made = {id(part._buffers[name]) for part, names in self.meta_buffers.items() for name in names}
        for name, buffer in named_buffers(self.module):
            if id(buffer) in made:
                self._fill_buffer(name, buffer, values, source)

    def _fill_buffer(self, name, buffer, values, source):
        if name not in values:
            raise KeyError(f"libfsdp.torch.shard: {source} has no values of the buffer {name!r}")
        found = torch.as_tensor(values[name])
        require_numbers(f"libfsdp.torch.shard: {source}", name, found, buffer)
        if found.shape != buffer.shape:
            raise ValueError(
                f"libfsdp.torch.shard: {source} has {tuple(found.shape)} for the buffer {name!r}, whose shape is "
                f"{tuple(buffer.shape)}"
            )
        with torch.no_grad():
            buffer.copy_(found)


_WRITES_OTHERS = (
    "libfsdp.torch.shard: the function that fills the values {} has written a parameter {}, which has no memory at that "
    "time: init is called for each module and fills the parameters and buffers of this one; reset_parameters() may also "
    "fill those of modules in it"
)


def _in_order(module):
    """{path: part}, with children before their parents."""
    paths = {part: path for path, part in module.named_modules()}
    order = []
    module.apply(lambda part: order.append(part) if part not in order else None)
    return {paths[part]: part for part in order}


def _params_of(part):
    return [param for param in part._parameters.values() if param is not None]
