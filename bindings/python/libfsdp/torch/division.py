# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a module are a group, and what shard() refuses."""

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
    """Yields (name, module, [(name, parameter)]) of each group, the root first: what no layer has, or several have."""
    layers = [layer for layer in layers if layer is not module]  # which is the root
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
    """Raises TypeError or ValueError, in one sentence, for a module that cannot be sharded."""
    params = dict(module.named_parameters())
    if not params:
        raise ValueError(f"libfsdp.torch.shard: {type(module).__name__} has no parameters, so there is nothing to shard")
    for name, param in params.items():
        _check_param(name, param)
    devices = {param.device for param in params.values()}
    if len(devices) > 1:
        raise ValueError(
            f"libfsdp.torch.shard: parameters are on {', '.join(sorted(map(str, devices)))}: move the module to the one "
            "device of this rank first"
        )
    if next(iter(devices)).type == "cuda" and context.is_thread:
        raise TypeError(
            "libfsdp.torch.shard: ranks that are threads of one process share torch's streams on a GPU: run a process "
            "for each rank, say with fsdp-run"
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
                f"libfsdp.torch.shard: {type(part).__name__} {name!r} has max_norm, which writes weights in the forward "
                "pass: set it to None, and clip between steps, with sharded.full_state_dict() and load_full_state_dict()"
            )
    parts = set(module.modules())
    strangers = [type(layer).__name__ for layer in layers if layer not in parts]
    if strangers:
        raise ValueError(f"libfsdp.torch.shard: layers has {', '.join(strangers)}, which the module does not contain")


def _check_param(name, param):
    if hasattr(param, "fsdp_layer"):
        raise ValueError(
            f"libfsdp.torch.shard: parameter {name!r} is sharded already: shard() a module once, and close() what it "
            "returned before it is sharded anew"
        )
    if type(param) is ClosedParameter:
        refuse_closed(name, "libfsdp.torch.shard")
    if torch.nn.parameter.is_lazy(param):
        raise ValueError(
            f"libfsdp.torch.shard: parameter {name!r} is lazy and has no shape yet: run the module once before shard()"
        )
    if param.is_meta:
        raise ValueError(
            f"libfsdp.torch.shard: parameter {name!r} is on the meta device and has no values: module.to_empty() and "
            "initialize it, or load a state dict, before shard()"
        )
    if type(param).__name__ == "DTensor" or type(getattr(param, "data", None)).__name__ == "DTensor":
        raise TypeError(
            f"libfsdp.torch.shard: parameter {name!r} is a DTensor: shard the plain tensors of this rank, and declare "
            "boxes of larger tensors through libfsdp.Param(global_shape=, global_offset=)"
        )
    if param.numel() == 0:
        raise ValueError(f"libfsdp.torch.shard: parameter {name!r} has shape {tuple(param.shape)}, and nothing in it to shard")
    if param.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"libfsdp.torch.shard: parameter {name!r} is {param.dtype}, and libfsdp keeps {known} (uint8: frozen)")
    if param.dtype == torch.uint8 and param.requires_grad:
        raise TypeError(f"libfsdp.torch.shard: parameter {name!r} is {param.dtype}, which does not train")
