# SPDX-License-Identifier: Apache-2.0
"""Parameters of JAX (any pytree of arrays) whose main weights, gradients and optimizer state libfsdp shards and owns.

    sharded = libfsdp.jax.shard(params, context, strategy=libfsdp.Strategy.OPTIM_GRADS)
    for batch in data:
        loss, grads = jax.value_and_grad(loss_of)(sharded.params(), batch)
        sharded.apply_grads(grads, lr=1e-3, max_norm=1.0)

JAX computes a whole gradient at once, so a step is one call, fsdp_apply_grads, with the full gradients of this rank.
"""

import jax
import numpy

from .constants import Phase
from .group import Param
from .tensor import read_numpy


def shard(params, context, no_decay=lambda name, leaf: leaf.ndim < 2, **options):
    """Make a Sharded from a pytree. Each child of the tree's root becomes a group. Keywords are the fields of
    fsdp_model_options, as main_storage=MainStorage.SPLIT16 or optimizer=Optimizer.ADAMW_8BIT. Each rank loads its own
    values, so they must be equal on all ranks."""
    return Sharded(params, context, no_decay, options)


class Sharded:
    """What shard() returns. Its attribute model is the libfsdp.Model."""

    def __init__(self, params, context, no_decay, options):
        from . import ParamFlag

        leaves, self._tree = jax.tree_util.tree_flatten_with_path(params)
        self.context, self.model, self._places = context, context.create_model(**options), []
        groups = {}
        for path, leaf in leaves:
            groups.setdefault(jax.tree_util.keystr(path[:1]), []).append((jax.tree_util.keystr(path), leaf))
        for group, members in groups.items():
            made = self.model.create_group(
                group,
                [
                    Param(name, leaf.shape, _dtype_of(leaf), flags=ParamFlag.NO_DECAY if no_decay(name, leaf) else 0)
                    for name, leaf in members
                ],
            )
            self._places += [(made, name) for name, _ in members]
        self.model.seal()
        for (group, name), (_, leaf) in zip(
            self._places, (member for members in groups.values() for member in members)
        ):
            group.load_param(name, numpy.asarray(leaf))
        self.model.publish_weights()
        # Flattening goes child by child, so the groups' parameters are the leaves in order.
        assert [name for _, name in self._places] == [jax.tree_util.keystr(path) for path, _ in leaves]

    def params(self, phase=Phase.EVAL, unsafe_zero_copy=False):
        """The full compute weights as a pytree of JAX arrays. The arrays are copies, because JAX takes arrays for
        immutable and computes later.

        With unsafe_zero_copy the arrays are the library's own memory where this is possible (CPU). Before the next
        apply_grads, wait with jax.block_until_ready for everything computed from the arrays, and drop the arrays,
        because their contents change. The model must keep compute weights whole (any strategy but OPTIM_GRADS_PARAMS)
        or map them.
        """
        leaves = {}
        for group in self.model.groups.values():
            with group.unsharded(phase):
                for name, view in group.weights(phase).items():
                    # jax.device_put takes memory of numpy over where it is aligned; a copy has no other owner.
                    leaves[name] = jax.device_put(view if unsafe_zero_copy else numpy.array(view))
        return jax.tree_util.tree_unflatten(self._tree, [leaves[name] for _, name in self._places])

    def apply_grads(self, grads, lr, max_norm=0.0, **options):
        """Take a step of AdamW with this rank's full gradients, a pytree of the parameters' structure. The call waits
        until the gradients are computed, and returns their norm before clipping."""
        leaves = jax.block_until_ready(jax.tree_util.tree_leaves(grads))
        return self.model.apply_grads([numpy.asarray(leaf) for leaf in leaves], lr, max_norm=max_norm, **options)

    def full_params(self):
        """The whole main weights in fp32, as a pytree of numpy arrays."""
        return jax.tree_util.tree_unflatten(self._tree, [group.read_param(name) for group, name in self._places])

    def close(self):
        self.model.close()


def _dtype_of(leaf):
    return read_numpy(numpy.empty(0, leaf.dtype))[1]
