# SPDX-License-Identifier: Apache-2.0
"""Divides a module's parameters into groups, and checks what shard() refuses."""

import torch
from torch import nn
from torch.nn.utils import parametrize

from .grads import DTYPES
from .parameter import ClosedParameter, refuse_closed


def find_layers(module):
    """The elements of each outermost ModuleList and Sequential. A ModuleDict is looked into: its elements may be parts
    of one block, or experts that ranks visit differently."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        yield from (element for element in module.children() if _has_params(element))
    else:
        for child in _children_of(module):
            yield from find_layers(child)


def _children_of(module):
    """The children, without the lists that torch.nn.utils.parametrize has made."""
    made = module.parametrizations if parametrize.is_parametrized(module) else None
    return [child for child in module.children() if child is not made]


def find_groups(module):
    """The groups of shard() by default, apart from the root group."""
    return [(layer,) for layer in find_layers(module)]


def _has_params(module):
    return any(True for _ in module.parameters())


def read_layers(module, layers):
    """The groups of the argument layers= of shard(): each a tuple of modules."""
    if isinstance(layers, str) or not hasattr(layers, "__iter__"):
        raise TypeError(
            f"libfsdp.torch.shard: layers is {_told(layers)}: it is a list of modules or of their names, as "
            "layers=['embed', *module.blocks]"
        )
    return [tuple(_find_part(module, part) for part in _list_of(layer)) for layer in layers]


def _told(value):
    return type(value).__name__ if isinstance(value, nn.Module) else repr(value)


def _list_of(layer):
    """A ModuleList is a module, and no list of modules."""
    if not isinstance(layer, (list, tuple)):
        return [layer]
    if not layer:
        raise ValueError("libfsdp.torch.shard: layers has an empty list: a group needs one module or more")
    return layer


def _find_part(module, part):
    """A module, or the module of that name."""
    if isinstance(part, nn.Module):
        return part
    if not isinstance(part, str):
        raise TypeError(
            f"libfsdp.torch.shard: layers has {part!r}: an element is a module, the name of one, or a list of those"
        )
    try:
        return module.get_submodule(part)
    except AttributeError as error:
        raise ValueError(f"libfsdp.torch.shard: layers has {part!r}, which the module does not contain") from error


def find_ignored(module, ignored):
    """The set of parameters of the argument ignored_params= of shard(): parameters, or a function of each."""
    params = dict(module.named_parameters())
    if callable(ignored):
        return {param for name, param in params.items() if ignored(name, param)}
    ignored = [ignored] if isinstance(ignored, torch.Tensor) else list(ignored or ())
    wrong = next((each for each in ignored if not any(each is param for param in params.values())), None)
    if wrong is not None:
        told = tuple(wrong.shape) if isinstance(wrong, torch.Tensor) else repr(wrong)
        raise ValueError(
            f"libfsdp.torch.shard: ignored_params has {told}, which is no parameter of the module: give parameters, or "
            "a function of their names, as lambda name, param: name == 'scale'"
        )
    return set(ignored)


def divide(module, groups, ignored=()):
    """Yields (name, modules, [(name, parameter)]) of each group. The root group comes first: it has the parameters that
    are in no group or in several. Ignored ones are in none."""
    groups = [group for group in groups if module not in group]  # the module itself is the root
    names, users = {}, {}
    for name, param in module.named_parameters():
        if param not in ignored:
            names[param] = name
    for group in groups:
        for param in _params_of(group):
            users.setdefault(param, []).append(group)
    inside = {part for group in groups for layer in group for part in layer.modules()}
    outside = {
        param for part in module.modules() if part not in inside for param in part.parameters(recurse=False)
    }
    root = [(name, param) for param, name in names.items() if len(users.get(param, ())) != 1 or param in outside]
    paths = {part: path for path, part in module.named_modules()}
    taken = {_name_of(group, paths) for group in groups}
    if root:
        yield _free_name("root", taken), (module,), root
    for group in groups:
        single = [param for param in _params_of(group) if len(users[param]) == 1 and param not in outside]
        own = [(names[param], param) for param in single if param in names]
        if own:
            yield _name_of(group, paths), group, own


def _params_of(group):
    """The parameters of the group's modules, each once."""
    return dict.fromkeys(param for layer in group for param in layer.parameters())


def _name_of(group, paths):
    """The paths of its modules; shortened if there are many, because a name has at most 255 bytes."""
    name = "+".join(paths[layer] for layer in group)
    return name if len(name) <= 200 else f"{paths[group[0]]}+{len(group) - 1} more"


def _free_name(name, taken):
    return name if name not in taken else _free_name(name + "_", taken)


def check_module(module, context, groups, ignored=()):
    """Raises TypeError or ValueError if the module cannot be sharded."""
    params = {name: param for name, param in module.named_parameters() if param not in ignored}
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
        raise TypeError(
            f"libfsdp.torch.shard is for eager modules: torch.compile was applied to {', '.join(compiled)}; call "
            "layer.compile() of each layer after shard(), or before it only compile forward methods and functions"
        )
    for name, part in module.named_modules():
        if getattr(part, "max_norm", None) is not None:
            raise TypeError(
                f"libfsdp.torch.shard: {type(part).__name__} {name!r} has max_norm, so its forward pass writes "
                "weights: set it to None, and clip between steps with sharded.full_state_dict() and "
                "sharded.load_full_state_dict()"
            )
    mixed = next((group for group in groups if module in group and len(group) > 1), None)
    if mixed:
        raise ValueError(
            f"libfsdp.torch.shard: layers has a list of {len(mixed)} with the whole module, whose parameters are the "
            "root group: list its parts instead"
        )
    _check_groups(module, [layer for group in groups for layer in group])


def _check_groups(module, layers):
    parts = set(module.modules())
    foreign = [type(layer).__name__ for layer in layers if layer not in parts]
    if foreign:
        raise ValueError(f"libfsdp.torch.shard: layers has {', '.join(foreign)}, which the module does not contain")
    if len(set(layers)) < len(layers):
        twice = next(name for name, part in module.named_modules() if layers.count(part) > 1)
        raise ValueError(f"libfsdp.torch.shard: layers has {twice!r} twice: a module belongs to one group")


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
