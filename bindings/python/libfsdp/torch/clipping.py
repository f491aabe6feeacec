# SPDX-License-Identifier: Apache-2.0
"""Clips the main gradients by norms of any order and by value, as torch.nn.utils does."""

import ctypes
import math

import torch

from .. import _abi
from .._library import lib
from ..constants import ValueOp


def clip_norm(owner, max_norm, norm_type):
    """Returns the norm before clipping. A norm that is not finite leaves the gradients as they are."""
    if norm_type == 2:
        return owner.model.clip_grads(max_norm, stream=owner.stream())
    norm = _measure(owner, norm_type)
    if math.isfinite(norm) and (factor := max_norm / (norm + 1e-6)) < 1:
        owner.model.scale_grads(factor, owner.stream())
    return norm


def check_arguments(owner, max_norm, norm_type):
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: max_norm is {max_norm}: it must be above 0")
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type is {norm_type}: it must be above 0, or inf")
    if norm_type != 2 and owner.has_filed_grads:
        raise RuntimeError(
            f"clip_grad_norm_: norm_type is {norm_type}, but grad_home is Home.FILE: of gradients in a file there is "
            "only the norm of order 2: leave out norm_type, or give shard() grad_home=Home.HOST"
        )
    meshed = next((layer.name for layer in owner.layers if layer.has_mesh), None)
    if norm_type != 2 and meshed is not None:
        raise ValueError(
            f"clip_grad_norm_: norm_type is {norm_type}, but group {meshed!r} has a mesh of its own: only the norm of "
            "order 2 is added over such groups"
        )


def check_value(owner, clip_value):
    if not clip_value >= 0:
        raise ValueError(f"clip_grad_value_: clip_value is {clip_value}: it must not be below 0")
    if owner.has_filed_grads:
        raise RuntimeError(
            "clip_grad_value_: grad_home is Home.FILE, and gradients in a file have no tensors to clamp: clip by "
            "sharded.clip_grad_norm_(max_norm), or give shard() grad_home=Home.HOST"
        )


def unscale(owner, grads, found_inf, inverse_scale):
    """Multiplies this rank's gradients by inverse_scale. found_inf becomes 1 if any has Inf or NaN."""
    if not owner.has_filed_grads:
        with torch._C.DisableTorchFunctionSubclass():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)
    elif owner.model.check_grads(owner.stream()) is not None:
        found_inf.fill_(1.0)
    else:
        owner.model.scale_grads(inverse_scale.item(), owner.stream())


def _measure(owner, norm_type):
    """The norm of all gradients. An element that several ranks own counts once."""
    grads = [shard.grad for shard in owner.shards() if is_first(owner, shard)]
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64).item() for grad in grads]
    if norm_type == math.inf:
        return owner.context.all_reduce_values(_largest(norms), ValueOp.MAX, owner.mesh)
    total = owner.context.all_reduce_values(sum(norm**norm_type for norm in norms), ValueOp.SUM, owner.mesh)
    return total ** (1 / norm_type)


def _largest(norms):
    return math.nan if any(norm != norm for norm in norms) else max(norms, default=0.0)


def is_first(owner, shard):
    """True if no lower rank owns the same part of the parameter."""
    chunk = _abi.fsdp_chunk()
    for rank in range(owner.context.rank):
        status = lib.get_chunk(shard.found.group, shard.found.param_index, rank, ctypes.byref(chunk))
        if not status and chunk.element_count and chunk.element_offset == shard.found.element_offset:
            return False
    return True


def clip_value(owner, clip_value):
    with torch.no_grad():
        for shard in owner.shards():
            shard.grad.clamp_(-clip_value, clip_value)
