#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Leaves that libfsdp.jax.shard keeps whole on every rank, their means over the ranks, and checkpoints of them.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python jax_kept.py [WORD...]

WORD: only cases whose name has it. Needs jax (CPU). Ranks are threads. Reports in the Test Anything Protocol.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax_check import Cases, differ, part, raises, shared_folder
from jax_shard import loss_of, make_params
from jax_trees import RATE, STEPS, train

import libfsdp.jax

cases = Cases()


def with_integers():
    return {**make_params(), "table": jnp.arange(5), "mask": jnp.array([True, False]), "key": jax.random.key(3)}


@cases
def integers_are_kept_and_saved(context):
    sharded = libfsdp.jax.shard(with_integers(), context)
    grads = jax.grad(lambda params: loss_of(params, *part(context, 0)), allow_int=True)
    sharded.apply_grads(grads({name: sharded.params()[name] for name in ("hidden", "out", "table")}), RATE)
    found = sharded.params()
    is_kept = found["table"].dtype == jnp.int32 and (found["table"] == jnp.arange(5)).all() and found["mask"][0]
    sharded.keep({"table": jnp.arange(5) + 7, "key": jax.random.key(4)})
    with shared_folder(context) as folder:
        sharded.save(folder)
        other = libfsdp.jax.shard(with_integers(), context)
        other.load(folder)
        loaded = other.params()
    same_key = jax.random.key_data(loaded["key"]).tolist() == jax.random.key_data(jax.random.key(4)).tolist()
    return bool(is_kept and (loaded["table"] == jnp.arange(5) + 7).all() and same_key and not loaded["mask"][1])


@cases
def integers_of_numpy_stay_numpy_s(context):
    sharded = libfsdp.jax.shard({**make_params(), "table": np.arange(5)}, context)
    sharded.keep({"table": np.arange(5) + 2**40})
    with shared_folder(context) as folder:
        sharded.save(folder)
        other = libfsdp.jax.shard({**make_params(), "table": np.arange(5)}, context)
        other.load(folder)
    return bool((other.full_params()["table"] == np.arange(5) + 2**40).all())


@cases
def keep_refuses_another_shape(context):
    sharded = libfsdp.jax.shard(with_integers(), context)
    return raises(lambda: sharded.keep({"table": jnp.arange(6)}), "leaf 'table' is int32[6]", "int32[5] is expected")


@cases
def keep_without_kept_leaves_is_refused(context):
    sharded = libfsdp.jax.shard(with_integers(), context)
    return raises(lambda: sharded.keep(make_params()), "has none of the 3 leaves that are kept")


@cases
def a_checkpoint_of_other_kept_leaves_is_refused(context):
    sharded = libfsdp.jax.shard({**make_params(), "table": jnp.arange(5)}, context)
    with shared_folder(context) as folder:
        sharded.save(folder)
        other = libfsdp.jax.shard(with_integers(), context)
        found = raises(lambda: other.load(folder), "the checkpoint has no kept leaf 'key'")
    train_again = {name: other.params()[name] for name in ("hidden", "out")}
    other.apply_grads(train_again, RATE)
    return found


@cases
def training_goes_on_after_a_load(context):
    straight = libfsdp.jax.shard(make_params(), context)
    train(context, straight)
    first = libfsdp.jax.shard(make_params(), context)
    train(context, first, 2)
    with shared_folder(context) as folder:
        first.save(folder)
        second = libfsdp.jax.shard(jax.tree_util.tree_map(jnp.zeros_like, make_params()), context)
        second.load(folder)
    train(context, second, STEPS - 2, first=2)
    return differ(second.full_params(), straight.full_params()) == 0


@cases
def batch_statistics_are_means_over_the_ranks(context):
    stats = {"mean": jnp.zeros((30, 30)), "half": jnp.zeros(3, jnp.bfloat16), "count": jnp.arange(2)}
    sharded = libfsdp.jax.shard({"params": make_params(), "batch_stats": stats}, context)
    own = {"mean": jnp.full((30, 30), 1.0 + context.rank), "half": jnp.full(3, 4.0 * context.rank, jnp.bfloat16)}
    sharded.keep({"batch_stats": {**own, "count": jnp.arange(2) + context.rank}})
    found = sharded.params()["batch_stats"]
    is_mean = (found["mean"] == 1.5).all() and (found["half"] == 2.0).all() and found["half"].dtype == jnp.bfloat16
    return bool(is_mean and (found["count"] == jnp.arange(2) + context.rank).all()) or str(found)


@cases
def equal_statistics_keep_their_bits(context):
    stats = np.full(700, 1.5e308)  # a sum of two such values is Inf
    sharded = libfsdp.jax.shard({"params": make_params(), "batch_stats": {"mean": stats}}, context)
    sharded.keep({"batch_stats": {"mean": -stats}})
    found = sharded.params()["batch_stats"]["mean"]
    return isinstance(found, np.ndarray) and bool((found == -stats).all())


if __name__ == "__main__":
    sys.exit(1 if cases.run() else 0)
