#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libfsdp.jax.shard: parameters that are sharded train as JAX alone does with AdamW written out.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python jax_shard.py

Needs jax (CPU); ranks are threads. Reports in the Test Anything Protocol. jax_trees.py has the other checks.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import libfsdp as fsdp
import libfsdp.jax

STEPS, BATCH = 5, 8
number = failed = 0


def case(name, passed, told=""):
    global number, failed
    number += 1
    failed += not passed
    print(f"{'ok' if passed else 'not ok'} {number} - {name}{f' # {told}' if told else ''}", flush=True)


def make_params():
    keys = jax.random.split(jax.random.PRNGKey(1), 3)
    return {
        "hidden": {"w": jax.random.normal(keys[0], (16, 33)) / 4, "b": jnp.zeros(33)},
        "out": [jax.random.normal(keys[1], (33, 5)) / 6, jnp.zeros(5)],
    }


def batch(step):
    keys = jax.random.split(jax.random.PRNGKey(100 + step))
    return jax.random.normal(keys[0], (BATCH, 16)), jax.random.normal(keys[1], (BATCH, 5))


@jax.jit
def loss_of(params, x, y):
    h = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return jnp.mean((h @ params["out"][0] + params["out"][1] - y) ** 2)


def train_alone():
    params, losses = make_params(), []
    m = v = jax.tree_util.tree_map(jnp.zeros_like, params)
    for step in range(STEPS):
        loss, grads = jax.value_and_grad(loss_of)(params, *batch(step))
        m = jax.tree_util.tree_map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree_util.tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, v, grads)
        c1, c2 = 1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1)
        params = jax.tree_util.tree_map(
            lambda p, m, v: p * (1 - 0.01 * (0.1 if p.ndim > 1 else 0)) - 0.01 * (m / c1) / (jnp.sqrt(v / c2) + 1e-8),
            params,
            m,
            v,
        )
        losses.append(float(loss))
    return losses, params


def train_sharded(world_size, zero_copy=False, **options):
    def rank(context):
        sharded, losses = libfsdp.jax.shard(make_params(), context, **options), []
        for step in range(STEPS):
            x, y = (part[context.rank :: world_size] for part in batch(step))
            params = sharded.params(unsafe_zero_copy=zero_copy)
            loss, grads = jax.block_until_ready(jax.value_and_grad(loss_of)(params, x, y))
            del params
            sharded.apply_grads(grads, 0.01, weight_decay=0.1)
            losses.append(context.all_reduce_values(float(loss), fsdp.ValueOp.MEAN))
        full = sharded.full_params()
        sharded.close()
        return losses, full

    return fsdp.run_local(world_size, rank)


def main():
    wanted, params = train_alone()
    for world_size, zero_copy, options in (
        (1, False, {}),
        (2, False, {}),
        (4, False, {}),
        (2, True, {}),
        (2, False, {"strategy": fsdp.Strategy.OPTIM_GRADS}),
        (2, False, {"main_storage": fsdp.MainStorage.SPLIT16}),  # fp32 weights are their own main weights
        (2, False, {"optimizer": fsdp.Optimizer.ADAMW_8BIT}),  # these parameters are too small for codes
    ):
        results = train_sharded(world_size, zero_copy, **options)
        losses, full = results[0]
        first, differ = abs(losses[0] - wanted[0]), max(abs(a - b) for a, b in zip(losses, wanted))
        weights = max(float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree_util.tree_leaves, (full, params))))
        same = all(jax.tree_util.tree_all(jax.tree_util.tree_map(np.array_equal, full, other)) for _, other in results)
        named = "".join(f", {value.name}" for value in options.values())
        case(
            f"{world_size} ranks{', zero copy' if zero_copy else ''}{named}",
            first < 1e-5 and differ < 1e-5 and weights < 1e-4 and same,
            f"first loss differs by {first:.1e}, losses by {differ:.1e}, weights by {weights:.1e}",
        )
    print(f"1..{number}")
    return failed


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
