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
    meshed = next((layer.name for layer in owner.layers if layer.has_mesh), None)
    if norm_type != 2 and meshed is not None:
        raise ValueError(
            f"clip_grad_norm_: norm_type is {norm_type}, but group {meshed!r} has a mesh of its own: only the norm of "
            "order 2 is added over such groups"
        )


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
