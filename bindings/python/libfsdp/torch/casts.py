# SPDX-License-Identifier: Apache-2.0
"""Dtypes of the compute weights, and casts of what forward passes take and return."""

import dataclasses

import torch
from torch.utils import _pytree as pytree

from .grads import DTYPES


@dataclasses.dataclass
class Casts:
    """The dtypes that shard() was given. As with FSDP2's MixedPrecisionPolicy, inputs are cast to the dtype of the
    layer's weights, and the outputs of the whole module to output_dtype."""

    param_dtype: object = None
    cast_forward_inputs: bool = True
    output_dtype: object = None

    def __post_init__(self):
        for name in ("param_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise TypeError(f"libfsdp.torch.shard: {name} is {dtype!r}: it is a floating dtype, as torch.bfloat16")

    def dtype_of(self, name, param, asked):
        """The dtype of a parameter's compute weights; asked is that of param_options, or None."""
        dtype = asked or (self.param_dtype if param.dtype.is_floating_point else None) or param.dtype
        if dtype not in DTYPES or (dtype == torch.uint8) != (param.dtype == torch.uint8):
            known = ", ".join(str(each).removeprefix("torch.") for each in DTYPES if each.is_floating_point)
            raise TypeError(
                f"libfsdp.torch.shard: the weights of {name!r} cannot be {dtype}: it is {param.dtype}, and libfsdp "
                f"converts to {known}"
            )
        return dtype

    def input_dtype(self, params, dtypes):
        """The dtype to which a layer's inputs are cast: that of all of its weights, if any was converted; else None."""
        is_converted = any(param.dtype != dtype for (_, param), dtype in zip(params, dtypes))
        return dtypes[0] if self.cast_forward_inputs and is_converted and len(set(dtypes)) == 1 else None


def cast(values, dtype):
    """The values with their floating tensors in the dtype; the same object if it is None or nothing changes."""
    if dtype is None:
        return values
    leaves, spec = pytree.tree_flatten(values)
    made = [_cast_one(leaf, dtype) for leaf in leaves]
    return values if all(a is b for a, b in zip(made, leaves)) else pytree.tree_unflatten(made, spec)


def _cast_one(leaf, dtype):
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def in_library_dtypes(options):
    """Options of the library in which dtypes of torch stand, as {"reduce_dtype": torch.float32}."""
    return {
        name: DTYPES.get(value, value) if isinstance(value, torch.dtype) else value for name, value in options.items()
    }
