# SPDX-License-Identifier: Apache-2.0
"""Finds out what one of torch's optimizers keeps for each parameter, by dry steps of a tiny parameter, and whether it
can work on shards: each rank has only a part of each parameter, as one row of numbers."""

import dataclasses

import torch
from torch.nn import Parameter

from .grads import DTYPES

_SHAPE, _CUT, _STEPS = (4, 6), 7, 3


@dataclasses.dataclass
class Kept:
    """states: {name: torch dtype} of what has an element for each element of the parameter; scalars: {name: example} of
    the single numbers."""

    states: dict
    scalars: dict


def make_optimizer(make, params, options):
    """The program's optimizer of these parameters or groups."""
    if isinstance(make, torch.optim.Optimizer):
        raise TypeError(
            f"libfsdp.torch.shard: optimizer is a {type(make).__name__} of parameters that libfsdp will own: pass its "
            f"class, as in shard(..., optimizer=torch.optim.{type(make).__name__}, optimizer_options={{'lr': 0.1}})"
        )
    made = make(params, **options)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            f"libfsdp.torch.shard: optimizer made a {type(made).__name__}: pass a class of torch.optim, or a function "
            "of a list of parameters that returns an optimizer of torch"
        )
    return made


def probe(make, options, device):
    """Returns (the class of the optimizer, its defaults, the Kept). Raises TypeError if the optimizer needs whole
    tensors."""
    generator = torch.Generator().manual_seed(1)
    values = [(torch.randn(_SHAPE, generator=generator) * 3).to(device) for _ in range(_STEPS + 1)]
    whole, optimizer = _train(make, options, values, lambda value: [value.clone()])
    name = type(optimizer).__name__
    kept = _classify(name, optimizer.state[whole[0]])
    try:
        parts, _ = _train(make, options, values, _cut)
    except Exception as error:
        _refuse(name, f"its step raises {type(error).__name__} for such a part ({error})", error)
    if not torch.allclose(whole[0].flatten(), torch.cat([part.flatten() for part in parts]), rtol=1e-4, atol=1e-6):
        _refuse(name, "its step of two parts of a parameter differs from its step of the whole parameter")
    return type(optimizer), optimizer.defaults, kept


def _cut(value):
    flat = value.flatten()
    return [flat[:_CUT].clone(), flat[_CUT:].clone()]


def _train(make, options, values, divide):
    with torch.inference_mode(False), torch.enable_grad():
        params = [Parameter(part) for part in divide(values[0])]
        optimizer = make_optimizer(make, params, options)
        if isinstance(optimizer, torch.optim.LBFGS):
            _refuse("LBFGS", "it takes dot products of all gradients, and evaluates the loss several times in a step")
        for value in values[1:]:
            for param, grad in zip(params, divide(value)):
                param.grad = grad
            optimizer.step()
    return [param.detach() if len(params) > 1 else param for param in params], optimizer


def _classify(name, state):
    kept = Kept({}, {})
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == _SHAPE and value.dtype in DTYPES:
            kept.states[key] = value.dtype
        elif isinstance(value, (int, float)) or isinstance(value, torch.Tensor) and value.dim() == 0:
            kept.scalars[key] = value
        else:
            found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
            _refuse(name, f"its state {key!r} for a parameter of shape {_SHAPE} is {found}")
    return kept


def _refuse(name, reason, cause=None):
    raise TypeError(
        f"libfsdp.torch.shard: {name} needs whole tensors, but each rank has only a part of each parameter, as one row "
        f"of numbers: {reason}. Use an optimizer that updates each element by itself, such as SGD, RMSprop or Adagrad, "
        "or keep the library's AdamW" + ("; libfsdp.torch.Muon works on whole matrices" if name == "Muon" else "")
    ) from cause
