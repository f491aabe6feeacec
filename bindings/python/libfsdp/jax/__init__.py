# SPDX-License-Identifier: Apache-2.0
"""Parameters of JAX (any pytree of arrays, flax variables or an nnx module) whose main weights, gradients and optimizer
state libfsdp shards and owns.

    sharded = libfsdp.jax.shard(params, context, strategy=libfsdp.Strategy.OPTIM_GRADS)
    for batch in data:
        loss, grads = jax.value_and_grad(loss_of)(sharded.params(), batch)
        sharded.apply_grads(grads, lr=1e-3, max_norm=1.0)

JAX computes a whole gradient at once, so a step is one call, fsdp_apply_grads, with the full gradients of this rank.
"""

from ..constants import Optimizer
from .sharded import Rules, Sharded
from .words import in_jax_words

__all__ = ["Sharded", "shard"]


@in_jax_words
def shard(
    params,
    context,
    no_decay=lambda name, leaf: leaf.ndim < 2,
    layers=None,
    frozen=None,
    optimizer=Optimizer.ADAMW,
    held_groups=0,
    **options,
):
    """Shards a pytree, flax variables ({'params': ...}) or an nnx module over the ranks of the context; returns a
    Sharded.

    A leaf's name is its path, as "params/Dense_0/kernel" or "blocks/0/w". Parameters are the leaves in float32,
    bfloat16 or float16; of flax variables only those in 'params', and of an nnx module only its nnx.Param. All other
    leaves, such as integers, keys of jax.random and batch statistics, are kept: every rank has them whole, they are not
    trained, and Sharded.keep() changes them.

    layers: which parameters form a group and are so gathered and reduced together. A regular expression that matches
    the beginning of names: what it matches names the group, as r"blocks/\\d+". Or layers(name): the group's name, or
    None. Other parameters form the group "root". Default: each child of the tree's root, or of 'params', that is a
    subtree is a group. Subtrees whose names differ only in a number at the end, as blocks/0 and blocks/1, are a group
    each.
    no_decay: the parameters without weight decay, with AdamW. A predicate no_decay(name, leaf), or a regular expression
    that is searched for in names. Default: those of fewer than two dimensions.
    frozen: the parameters that are never trained, as a predicate or a regular expression, which must choose some. They
    have no gradient and no optimizer state. Default: none.
    optimizer: Optimizer.ADAMW or ADAMW_8BIT of the library; or a transformation of optax, as optax.sgd(0.1), which must
    update each element by itself. It sees a tree of the structure of params, in which each parameter has this rank's
    rows, in float32; parameters that are frozen have none. The library keeps its states.
    held_groups: how many groups can be gathered at once where weights are copied (FSDP_SCHEDULE_ANY). Default: groups
    are gathered in the order of the tree, the next one ahead of its use.
    options: the fields of fsdp_model_options, as main_storage=MainStorage.SPLIT16.

    Each rank shards its own values, so they must be equal on all ranks.
    """
    return Sharded(params, context, Rules(no_decay, layers, frozen), optimizer, held_groups, options)
