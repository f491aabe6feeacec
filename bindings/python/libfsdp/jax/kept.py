# SPDX-License-Identifier: Apache-2.0
"""The leaves that are no parameters: every rank has them whole, and checkpoints have them as bytes."""

import hashlib

import jax.numpy as jnp
import numpy

from ..constants import ValueOp
from . import arrays

_VALUES = 512  # that one call reduces at most


class Kept:
    """{name: array} of the leaves. Keys of jax.random stay keys."""

    def __init__(self, tree):
        params = set(tree.params)
        self.leaves = {name: leaf for name, leaf in tree.leaves.items() if name not in params}

    def take(self, found, call, context):
        """Takes the leaves of {name: leaf}, which may be some of them; parameters among them are left out. Leaves of
        floating-point numbers become their means over the ranks."""
        taken = {name: leaf for name, leaf in found.items() if name in self.leaves}
        if not taken:
            raise ValueError(f"{call}: the tree has none of the {len(self.leaves)} leaves that are kept")
        for name, leaf in taken.items():
            arrays.check(f"{call}: leaf {name!r}", leaf, self.leaves[name])
        self.leaves.update({**taken, **_means(taken, context)})

    def pack(self):
        return arrays.pack(self.leaves)

    def unpack(self, packed):
        """{name: leaf} of a checkpoint, if these are the leaves of this tree."""
        return arrays.unpack(packed, self.leaves, "sharded.load()", "kept leaf")


def _means(leaves, context):
    """{name: mean over the ranks} of the leaves of floating-point numbers; nothing if these are equal on all ranks."""
    found = {name: numpy.asarray(leaf) for name, leaf in leaves.items() if _is_floating(leaf)}
    digest = hashlib.sha256(b"".join(each.tobytes() for each in found.values())).digest()
    number = float(int.from_bytes(digest[:6], "little"))
    least, most = context.all_reduce_values([-number, number], ValueOp.MAX)
    if -least == most:
        return {}
    return {name: _mean(each, leaves[name], context) for name, each in found.items()}


def _is_floating(leaf):
    return not hasattr(leaf, "dtype") or jnp.issubdtype(leaf.dtype, jnp.floating)


def _mean(numbers, leaf, context):
    flat = numbers.astype(numpy.float64).reshape(-1)
    for first in range(0, flat.size, _VALUES):
        flat[first : first + _VALUES] = context.all_reduce_values(flat[first : first + _VALUES], ValueOp.MEAN)
    made = flat.reshape(numbers.shape).astype(numbers.dtype)
    return made if isinstance(leaf, (numpy.ndarray, numpy.generic)) else jnp.asarray(made)
