#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT of JAX, sharded by libfsdp.jax.shard, beside the same function of JAX alone.

usage: fsdp-run -n 2 --no-prefix python3 gpt_jax.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import tiny_gpt
from tiny_gpt import CONTEXT, EPSILON, HEADS, LAYERS, LEARNING_RATE, STEPS, WEIGHT_DECAY, WIDTH

import libfsdp as fsdp
import libfsdp.jax


def group_of(name):
    """blocks.0.up.weight is the parameter up.weight of blocks.0; what is in no block is in rest."""
    parts = name.split(".")
    return (".".join(parts[:2]), ".".join(parts[2:])) if parts[0] == "blocks" else ("rest", name)


def make_params():
    params = {}
    for name, value in tiny_gpt.make_weights().items():
        group, own = group_of(name)
        params.setdefault(group, {})[own] = jnp.asarray(value)
    return params


def norm(x, params, name):
    centered = x - x.mean(-1, keepdims=True)
    scaled = centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + EPSILON)
    return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]


def block(x, params):
    qkv = norm(x, params, "norm1") @ params["qkv.weight"].T
    q, k, v = (part.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2) for part in jnp.split(qkv, 3, -1))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(WIDTH // HEADS)
    mixed = jax.nn.softmax(jnp.where(jnp.tri(CONTEXT, dtype=bool), scores, -jnp.inf), -1) @ v
    x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ params["proj.weight"].T
    up = norm(x, params, "norm2") @ params["up.weight"].T + params["up.bias"]
    return x + jax.nn.gelu(up, approximate=True) @ params["down.weight"].T + params["down.bias"]


@jax.jit
@jax.value_and_grad
def loss_and_grads(params, tokens, targets):
    rest = params["rest"]
    x = rest["tokens.weight"][tokens] + rest["places.weight"]
    for layer in range(LAYERS):
        x = block(x, params[f"blocks.{layer}"])
    logits = norm(x, rest, "norm") @ rest["head.weight"].T
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -picked.mean()


@jax.jit
def adamw(step, param, grad, m, v):
    m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad**2
    update = m / (1 - 0.9**step) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8)
    return param * (1 - LEARNING_RATE * WEIGHT_DECAY) - LEARNING_RATE * update, m, v


def train_alone():
    params, tree, losses = make_params(), jax.tree_util, []
    m = v = tree.tree_map(jnp.zeros_like, params)
    for step in range(STEPS):
        loss, grads = loss_and_grads(params, *tiny_gpt.read_batch(step))
        updated = tree.tree_map(lambda *leaves: adamw(step + 1, *leaves), params, grads, m, v)
        params, m, v = tree.tree_transpose(tree.tree_structure(params), tree.tree_structure((0, 0, 0)), updated)
        losses.append(float(loss))
    return losses, params


def train_sharded(context):
    sharded, losses = libfsdp.jax.shard(make_params(), context, no_decay=lambda name, leaf: False), []
    for step in range(STEPS):
        batch = tiny_gpt.read_batch(step, context.rank, context.world_size)
        loss, grads = loss_and_grads(sharded.params(), *batch)
        sharded.apply_grads(grads, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        losses.append(context.all_reduce_values(float(loss), fsdp.ValueOp.MEAN))
    return losses, sharded.full_params(), tiny_gpt.read_rank_bytes(sharded.model)


def by_name(params):
    return {name: np.asarray(params[group_of(name)[0]][group_of(name)[1]]) for name in tiny_gpt.SHAPES}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    alone, weights_alone = train_alone()
    with fsdp.Context() as context:
        losses, weights, rank_bytes = train_sharded(context)
        framework = f"jax {jax.__version__}"
        tiny_gpt.compare(framework, context, losses, alone, by_name(weights), by_name(weights_alone), rank_bytes)
