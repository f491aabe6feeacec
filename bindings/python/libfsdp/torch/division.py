# SPDX-License-Identifier: Apache-2.0
"""Divides a module's parameters into groups, and checks what shard() refuses."""

import torch
from torch import nn

from .grads import DTYPES
from .parameter import ClosedParameter, refuse_closed


def find_layers(module):
    """The elements of each outermost ModuleList and Sequential."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield from (element for element in module if any(True for _ in element.parameters()))
    else:
        for child in module.children():
            yield from find_layers(child)


def divide(module, layers):
    """Yields (name, module, [(name, parameter)]) of each group. The root group comes first: it has the parameters that
    are in no layer or in several."""
    layers = [layer for layer in layers if layer is not module]  # the module itself is the root
    names, users = {}, {}
    for name, param in module.named_parameters():
        names[param] = name
    for layer in layers:
        for param in layer.parameters():
            users.setdefault(param, []).append(layer)
    inside = {part for layer in layers for part in layer.modules()}
    outside = {
        param for part in module.modules() if part not in inside for param in part.parameters(recurse=False)
    }
    root = [(name, param) for param, name in names.items() if len(users.get(param, ())) != 1 or param in outside]
    paths = {part: path for path, part in module.named_modules()}
    taken = {paths[layer] for layer in layers}
    if root:
        yield _free_name("root", taken), module, root
    for layer in layers:
        own = [(names[param], param) for param in layer.parameters() if len(users[param]) == 1 and param not in outside]
        if own:
            yield paths[layer], layer, own


def _free_name(name, taken):
    return name if name not in taken else _free_name(name + "_", taken)


def check_module(module, context, layers):
    """Raises TypeError or ValueError if the module cannot be sharded."""
    params = dict(module.named_parameters())
    if not params:
        raise ValueError(f"libfsdp.torch.shard: {type(module).__name__} has no parameters to shard")
    for name, param in params.items():
        _check_param(name, param)
    devices = {param.device for param in params.values()}
    if len(devices) > 1:
        raise ValueError(
            f"libfsdp.torch.shard: parameters are on {', '.join(sorted(map(str, devices)))}: move the module to this "
            "rank's device first"
        )
    if next(iter(devices)).type == "cuda" and context.is_thread:
        raise TypeError(
            "libfsdp.torch.shard: ranks on GPUs cannot be threads, which share torch's streams: run one process per "
            "rank, say with fsdp-run"
        )
    compiled = [
        name or "the module"
        for name, part in module.named_modules()
        if hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
    ]
    if compiled:
        raise TypeError(f"libfsdp.torch.shard is for eager modules: torch.compile was applied to {', '.join(compiled)}")
    for name, part in module.named_modules():
        if getattr(part, "max_norm", None) is not None:
            raise TypeError(
                f"libfsdp.torch.shard: {type(part).__name__} {name!r} has max_norm, so its forward pass writes "
                "weights: set it to None, and clip between steps with sharded.full_state_dict() and "
                "sharded.load_full_state_dict()"
            )
    parts = set(module.modules())
    foreign = [type(layer).__name__ for layer in layers if layer not in parts]
    if foreign:
        raise ValueError(f"libfsdp.torch.shard: layers has {', '.join(foreign)}, which the module does not contain")


def _check_param(name, param):
    if hasattr(param, "fsdp_layer"):
        raise ValueError(
            f"libfsdp.torch.shard: parameter {name!r} is sharded already: call close() on what shard() returned before "
            "you shard the module again"
        )
    if type(param) is ClosedParameter:
        refuse_closed(name, "libfsdp.torch.shard")
    if torch.nn.parameter.is_lazy(param):
        raise ValueError(
            f"libfsdp.torch.shard: parameter {name!r} is lazy and has no shape yet: run the module once before shard()"
        )
    if param.is_meta:
        raise ValueError(
            f"libfsdp.torch.shard: parameter {name!r} is on the meta device and has no values: call module.to_empty(), "
            "then initialize the module or load a state dict, before shard()"
        )
    if type(param).__name__ == "DTensor" or type(getattr(param, "data", None)).__name__ == "DTensor":
        raise TypeError(
            f"libfsdp.torch.shard: parameter {name!r} is a DTensor: shard a module of plain tensors. Declare a rank's "
            "part of a larger tensor with libfsdp.Param(global_shape=, global_offset=)"
        )
    if param.numel() == 0:
        raise ValueError(f"libfsdp.torch.shard: parameter {name!r} is empty: its shape is {tuple(param.shape)}")
    if param.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(
            f"libfsdp.torch.shard: parameter {name!r} is {param.dtype}, but libfsdp stores {known} (uint8: frozen)"
        )
    if param.dtype == torch.uint8 and param.requires_grad:
        raise TypeError(f"libfsdp.torch.shard: parameter {name!r} is {param.dtype}, which cannot be trained")
