# SPDX-License-Identifier: Apache-2.0
"""Saves and loads whole values: state dicts of the module, and checkpoints of the model with the module's buffers."""

import io
import pickle

import torch

from ..constants import EVERY_RANK, Dtype, LoadFlag, Phase, ValueOp
from ..errors import InvalidArgument
from .grads import DTYPES
from .words import in_torch_words


class StateDicts:
    """The hooks of state_dict() and load_state_dict(), of the module and of each part, which may be called alone."""

    def __init__(self, owner):
        self.owner = owner
        self.loading = []  # for each load under way its part, and the parameters that it lent to torch

    def hook(self, layers):
        """For each part: the layers whose weights its state dict needs, and the parameters that are its own."""
        holders, params = {}, {}
        for layer in layers:
            for module in layer.modules:
                holders.setdefault(module, {})[layer] = None
            for index, (_, param) in enumerate(layer.params):
                for part, _ in self.owner.writes.places[param]:
                    holders.setdefault(part, {})[layer] = None
                    params.setdefault(part, {})[layer, index] = None
        for part in self.owner.module.modules():
            self._hook_part(part, list(holders.get(part, ())), list(params.get(part, ())))

    def _hook_part(self, module, layers, params):
        handles = self.owner.handles
        if self.owner.hides_weights or self.owner.rounds:
            handles += [
                module.register_state_dict_pre_hook(
                    lambda part, prefix, keep_vars: self.show(part, module, layers, keep_vars)
                ),
                module.register_state_dict_post_hook(
                    lambda part, state, prefix, metadata: self.take(part, module, layers, state, prefix)
                ),
            ]
        handles += [
            module.register_load_state_dict_pre_hook(
                lambda part, state, prefix, *rest: self.begin_load(part, module, params)
            ),
            module.register_load_state_dict_post_hook(lambda part, keys: self.end_load(part, module)),
        ]

    # -- state_dict(), with copied or rounded weights -----------------------------------------------------------

    def show(self, part, module, layers, keep_vars):
        if part is not module:
            return
        if keep_vars and self.owner.hides_weights:
            raise RuntimeError("state_dict(keep_vars=True): the parameters have weights only while they are unsharded")
        for layer in layers:
            layer.hold(Phase.EVAL)

    def take(self, part, module, layers, state, prefix):
        """Copies the weights in the state dict: the layers are resharded before the call returns. Where weights
        are rounded, puts the main weights, in the dtype that they had in shard(). A part's weights have
        the names of its parameters. A part with its own method may save others: so the state dict of a layer, and of
        the part that was called, is looked through whole."""
        if part is not module:
            return
        is_layer = any(module in layer.modules for layer in layers)
        names = state if is_layer or not prefix else [prefix + attribute for attribute in module._parameters]
        for name in [name for name in names if name in state and name.startswith(prefix)]:
            place = self.owner.saved.find(state[name]) if isinstance(state[name], torch.Tensor) else None
            if place and place[0] in layers:
                state[name] = self._value_of(*place, state[name])
        for layer in layers:
            layer.give_back(Phase.EVAL)

    def _value_of(self, layer, index, view):
        if layer.is_rounded(index):
            return layer.read_main(index)
        return view.clone() if self.owner.hides_weights else view

    # -- load_state_dict() --------------------------------------------------------------------------------------

    def require_ended(self):
        if self.loading:
            raise RuntimeError(
                "module.load_state_dict() was ended by an exception: call sharded.discard() on every rank. What it had "
                "loaded before stays"
            )

    def abandon(self):
        """Cleans up after loads that an exception has ended. Returns True if there were any: the update window is open
        then."""
        loading, self.loading = self.loading, []
        for _, lent in loading:
            for layer, index, _, _ in lent:
                layer.take_back(index)
        return bool(loading)

    @in_torch_words
    def begin_load(self, part, module, params):
        """Lends the part's own parameters to torch: until its load ends they have memory of torch that may be written."""
        if part is not module:
            return
        open_now = {(layer, index) for _, opened in self.loading for layer, index, _, _ in opened}
        lent = []
        for layer, index in params:
            if (layer, index) not in open_now:
                param = layer.params[index][1]
                memory = torch.empty(param.shape, dtype=layer.given_dtypes[index], device=param.device)
                lent.append((layer, index, param, memory))
        if not self.loading:
            self.owner.begin_window("module.load_state_dict()")
        opened = []
        self.loading.append((part, opened))
        for layer, index, param, memory in lent:
            layer.lend(param, memory)
            opened.append((layer, index, param, param._version))

    @in_torch_words
    def end_load(self, part, module):
        if part is not module or not self.loading or self.loading[-1][0] is not part:
            return  # a part with its own method of loading has lent nothing
        for layer, index, param, version in self.loading.pop()[1]:
            values = self._find_assigned(layer, index)
            if values is None and param._version != version:
                values = param.data
            if values is not None:
                values = values.to(layer.given_dtypes[index])
                layer.group.load_param(index, _loadable(param, values), EVERY_RANK)
            layer.take_back(index)
        if not self.loading:
            self.owner.publish()

    def _find_assigned(self, layer, index):
        """The values of a parameter that load_state_dict(assign=True) has put into the module, or None. Puts ours
        back."""
        param, values = layer.params[index][1], None
        for owner, attribute in self.owner.writes.places[param]:
            if (found := owner._parameters.get(attribute)) is not param:
                values = found if found is not None else values
                owner._parameters[attribute] = param
        return values


def full_state_dict(owner):
    """{name: value} as module.state_dict() names them, on the host: whole parameters in the precision of the main
    weights, and buffers. Ignored parameters, and those added after shard(), are as this rank has them. Collective: every
    rank gets it."""
    found = {param: param.detach().cpu().clone() for _, param in owner.writes.find_others()}
    for layer in owner.layers:
        for index, (_, param) in enumerate(layer.params):
            dtype = Dtype.UINT8 if param.dtype == torch.uint8 else Dtype.FLOAT32
            found[param] = torch.from_numpy(layer.group.read_param(index, dtype))
    state = {}
    for path, part in owner.module.named_modules():
        prefix = path + "." if path else ""
        for name, param in part._parameters.items():
            if param is not None:
                state[prefix + name] = found[param]
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                state[prefix + name] = buffer.detach().cpu().clone()
    return state


def load_full_state_dict(owner, state, strict=True):
    """Collective: every rank passes the same."""
    wanted, others = full_names(owner), {param for _, param in owner.writes.find_others()}
    given = {id(value) for name, value in wanted.items() if name in state}  # by one of the names that share it
    missing = [name for name, value in wanted.items() if id(value) not in given]
    unexpected = [name for name in state if name not in wanted]
    if strict and (missing or unexpected):
        raise KeyError(f"load_full_state_dict: missing {missing}, unexpected {unexpected}")
    shapes = {}
    for name in filter(state.__contains__, wanted):
        found = torch.as_tensor(state[name])
        require_numbers("load_full_state_dict: the state dict", name, found, wanted[name], _WHOLE)
        if found.shape != wanted[name].shape:
            shapes[name] = tuple(found.shape), tuple(wanted[name].shape)
    if shapes:
        raise ValueError(f"load_full_state_dict: shapes differ (given, the module's): {shapes}")
    values = {
        (layer, index): _loadable(param, state[name])
        for layer in owner.layers
        for index, (_, param) in enumerate(layer.params)
        for name in wanted
        if wanted[name] is param and name in state
    }
    with owner.window("sharded.load_full_state_dict()"):
        for (layer, index), value in values.items():
            layer.group.load_param(index, value, EVERY_RANK)
    with torch.no_grad():
        for name, value in wanted.items():
            if name in state and (value in others or not isinstance(value, torch.nn.Parameter)):
                value.copy_(state[name])
    return missing, unexpected


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHOLE = (torch.int16, torch.int32, torch.int64)


def require_numbers(source, name, values, wanted, others=()):
    """Raises if the values of a floating parameter or buffer may be the codes of a quantized one, without its scales.
    others: dtypes that are right, too."""
    if wanted.is_floating_point() and values.dtype not in (*_FLOATS, *others):
        raise ValueError(
            f"{source} has {values.dtype} for {name!r}, whose dtype is {wanted.dtype}: such values may be codes whose "
            "scales are in other tensors. Dequantize first, into float16, bfloat16, float32 or float64"
        )


def _loadable(param, values):
    """The values on the host, in a dtype that the library reads and with the values that plain torch would load."""
    values = torch.as_tensor(values).detach().cpu()
    if param.dtype == torch.uint8 or values.dtype not in DTYPES or values.dtype == torch.uint8:
        values = values.to(torch.uint8 if param.dtype == torch.uint8 else torch.float32)
    return values.contiguous()


def full_names(owner):
    """{name: parameter or buffer} as module.state_dict() names them."""
    names = {name: param for name, param in owner.module.named_parameters(remove_duplicate=False)}
    names.update(named_buffers(owner.module))
    return names


def named_buffers(module):
    """The buffers that state dicts have: (name, buffer)."""
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield (path + "." if path else "") + name, buffer


def shard_state_dict(owner):
    """{name: this rank's rows} as module.state_dict() names them, with whole buffers and parameters that libfsdp does not
    have."""
    found = {param: param.detach().clone() for _, param in owner.writes.find_others()}
    for layer in owner.layers:
        for index, (_, param) in enumerate(layer.params):
            found[param] = layer.read_rows(index)
    return {
        name: found[value] if value in found else value.detach().clone() for name, value in full_names(owner).items()
    }


def load_shard_state_dict(owner, state):
    """Loads what shard_state_dict() has returned on this rank."""
    wanted = full_names(owner)
    missing, unexpected = [name for name in wanted if name not in state], [name for name in state if name not in wanted]
    if missing or unexpected:
        raise KeyError(f"sharded.load_state_dict: missing {missing}, unexpected {unexpected}")
    places = {param: (layer, index) for layer in owner.layers for index, (_, param) in enumerate(layer.params)}
    for name, value in wanted.items():
        shape = places[value][0].rows_shape(places[value][1]) if value in places else tuple(value.shape)
        if tuple(state[name].shape) != shape:
            raise ValueError(
                f"sharded.load_state_dict: {name!r} has the shape {tuple(state[name].shape)}, and this rank's part is "
                f"{shape}: load what this rank's state_dict() gave; for other ranks use sharded.save() and load()"
            )
    with owner.window("sharded.load_state_dict()"):
        for value, (layer, index) in places.items():
            layer.load_rows(index, next(state[name] for name, own in wanted.items() if own is value))
    with torch.no_grad():
        for name, value in wanted.items():
            if value not in places:
                value.copy_(state[name])


BUFFERS, OPTIMIZER, EXTRA, AVERAGES = "torch.buffers", "torch.optimizer", "torch.extra", "torch.averages"


def require_savable(owner):
    owner.averages.require_hidden("sharded.save()")
    if owner._is_finished:
        raise RuntimeError("sharded.save(): sharded.finish() has ended the step's gradients: call sharded.step() first")
    if owner.first_step is not None:
        raise RuntimeError(
            f"sharded.save(): the model has AdamW's states of {owner.first_step - 1} steps from load_dcp(), and takes "
            "over that number in the next step: call sharded.step() once before you save"
        )


def save(owner, folder, extra, options):
    """Saves a checkpoint of the model. In it, as bytes of torch.save(), are the module's buffers, the param_groups and
    single numbers of an optimizer of torch, and the program's own values."""
    packed = _share_extra(owner.context, extra)
    optimizer = owner.steps.save() if owner.steps else None
    with owner.context.begin_checkpoint(folder, **options) as checkpoint:
        checkpoint.add_model(owner.model)
        checkpoint.add_bytes(BUFFERS, _pack({name: buffer.detach().cpu() for name, buffer in named_buffers(owner.module)}))
        if optimizer:
            checkpoint.add_bytes(OPTIMIZER, _pack(optimizer))
        if owner.averages:
            checkpoint.add_bytes(AVERAGES, _pack(owner.averages.save()))
        if packed is not None:
            checkpoint.add_bytes(EXTRA, packed)
        checkpoint.commit()
        checkpoint.wait()


def _share_extra(context, extra):
    """The bytes of rank 0's values, and b"" on other ranks; None if rank 0 has given none. Raises on every rank if they
    cannot be saved. Collective: the job."""
    packed = error = None
    if context.rank == 0 and extra is not None:
        try:
            packed = _pack_extra(extra)
        except Exception as found:
            error = found
    found = error is not None, packed is not None, extra is not None
    has_failed, is_packed, is_given = context.all_reduce_values([float(each) for each in found], ValueOp.MAX)
    if error:
        raise error
    if has_failed:
        raise TypeError(
            "sharded.save(extra=): rank 0's values are none that torch.load(weights_only=True) reads: its error says why"
        )
    if is_given and not is_packed:
        raise ValueError(
            "sharded.save(extra=): rank 0's values are saved, and rank 0 has given none, while another rank has: give "
            "them on rank 0"
        )
    return None if not is_packed else packed or b""


def _pack(values):
    packed = io.BytesIO()
    torch.save(values, packed)
    return packed.getvalue()


def _pack_extra(extra):
    """Raises now, and not in the load, if torch.load would refuse the values."""
    says = "torch.save"
    try:
        packed = _pack(extra)
        says = "torch.load(weights_only=True)"
        _read(packed)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise TypeError(
            "sharded.save(extra=): sharded.load() could not read it again: give it dicts, lists, tensors, numbers and "
            f"strings. {says} says: {error}"
        ) from error
    return packed


def unpack(checkpoint, name):
    """None if the checkpoint is another program's, without these bytes."""
    try:
        packed = checkpoint.read_bytes(name)
    except InvalidArgument:
        return None
    return _read(packed)


def _read(packed):
    """Tensors come to the host: this job may have fewer GPUs."""
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)


def load(owner, folder, options):
    with owner.context.open_checkpoint(folder) as checkpoint:  # a missing checkpoint fails here, before the window
        optimizer = unpack(checkpoint, OPTIMIZER) if owner.steps else None
        kept, extra, counts = (unpack(checkpoint, name) for name in (BUFFERS, EXTRA, AVERAGES))
        if optimizer:
            owner.steps.check_saved(optimizer)
        with owner.window("sharded.load()"):
            loaded = checkpoint.load_model(owner.model, **options)
    loaded.extra = extra
    if owner.steps:
        owner.steps.load(optimizer)
    if not options.get("flags", 0) & LoadFlag.WEIGHTS_ONLY:
        owner.averages.load(counts, set(owner.model.describe_load()["missing"]) if owner.averages else ())
    if kept:
        with torch.no_grad():
            for name, buffer in named_buffers(owner.module):
                if name in kept:
                    buffer.copy_(kept[name])
    return loaded
