#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The GPT of gpt_jax.py, gathered layer by layer: a pass holds the weights of one layer, and the gradients of one.

usage: fsdp-run -n 2 --no-prefix python3 gpt_jax_layers.py

The backward pass computes each block again from its input, as jax.checkpoint does.
"""

import math
import sys

import jax
import jax.numpy as jnp
import tiny_gpt
from gpt_jax import block, group_of, norm, train_alone
from gpt_jax import by_name as by_name_alone
from tiny_gpt import LAYERS, LEARNING_RATE, SHAPES, STEPS, WEIGHT_DECAY

import libfsdp as fsdp
import libfsdp.jax

BLOCKS = [f"blocks/{layer}" for layer in range(LAYERS)]
WHOLE = 4 * sum(math.prod(shape) for shape in SHAPES.values())
BLOCK = 4 * sum(math.prod(shape) for shape in tiny_gpt.BLOCK.values())


def place_of(name):
    """(the layer, the name in it) of a parameter."""
    group, own = group_of(name)
    if group != "rest":
        return group.replace(".", "/"), own
    return "embed" if name in ("tokens.weight", "places.weight") else "head", own


def make_params():
    layers = {}
    for name, value in tiny_gpt.make_weights().items():
        layer, own = place_of(name)
        layers.setdefault(layer, {})[own] = jnp.asarray(value)
    return {"embed": layers["embed"], "blocks": [layers[layer] for layer in BLOCKS], "head": layers["head"]}


@jax.jit
def embed_forward(params, tokens):
    return params["tokens.weight"][tokens] + params["places.weight"]


@jax.jit
def block_forward(params, x):
    return block(x, params)


@jax.jit
def head_loss(params, x, targets):
    logits = norm(x, params, "norm") @ params["head.weight"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


head_backward = jax.jit(jax.value_and_grad(head_loss, argnums=(0, 1)))


@jax.jit
def block_backward(params, x, gradient):
    return jax.vjp(block_forward, params, x)[1](gradient)


@jax.jit
def embed_backward(params, tokens, gradient):
    return jax.vjp(lambda params: embed_forward(params, tokens), params)[1](gradient)[0]


class Peak:
    """The largest number of bytes of arrays of JAX that have the shape of a weight: weights and gradients."""

    def __init__(self):
        self.bytes, self.before = 0, {id(array) for array in jax.live_arrays()}

    def look(self):
        own = [array for array in jax.live_arrays() if id(array) not in self.before]
        self.bytes = max(self.bytes, sum(array.nbytes for array in own if array.shape in SHAPES.values()))


def train_step(sharded, tokens, targets, peak):
    inputs = [embed_forward(sharded.layer_params("embed"), tokens)]
    for layer in BLOCKS:
        inputs.append(block_forward(sharded.layer_params(layer), inputs[-1]))
    params = sharded.layer_params("head", fsdp.Phase.BACKWARD)
    loss, (grads, gradient) = head_backward(params, inputs.pop(), targets)
    sharded.accumulate_layer("head", grads)
    peak.look()
    for layer in reversed(BLOCKS):
        params = grads = None  # before the next ones are made
        params = sharded.layer_params(layer, fsdp.Phase.BACKWARD)
        grads, gradient = block_backward(params, inputs.pop(), gradient)
        sharded.accumulate_layer(layer, grads)
        peak.look()
    params = grads = None
    sharded.accumulate_layer("embed", embed_backward(sharded.layer_params("embed"), tokens, gradient))
    return float(loss)


def train_sharded(context):
    options = {"unshard_mode": fsdp.UnshardMode.COPIED, "held_groups": 1}
    sharded = libfsdp.jax.shard(make_params(), context, no_decay=lambda name, leaf: False, **options)
    losses, peak = [], Peak()
    for step in range(STEPS):
        loss = train_step(sharded, *tiny_gpt.read_batch(step, context.rank, context.world_size), peak)
        sharded.apply(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        losses.append(context.all_reduce_values(loss, fsdp.ValueOp.MEAN))
    return losses, sharded, peak.bytes


def by_name(params):
    layers = {"embed": params["embed"], "head": params["head"], **dict(zip(BLOCKS, params["blocks"]))}
    return {name: layers[place_of(name)[0]][place_of(name)[1]] for name in SHAPES}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    alone, weights_alone = train_alone()
    with fsdp.Context() as context:
        losses, sharded, peak = train_sharded(context)
        weights, rank_bytes = by_name(sharded.full_params()), tiny_gpt.read_rank_bytes(sharded.model)
        framework = f"jax-layers {jax.__version__}"
        tiny_gpt.compare(framework, context, losses, alone, weights, by_name_alone(weights_alone), rank_bytes)
        if context.rank == 0:
            gathered = sharded.model.role_bytes(fsdp.Role.GATHER)
            print(f"gathered at once: {gathered} bytes in libfsdp, {peak} in JAX with gradients; weights have {WHOLE}")
            if gathered > 1.05 * BLOCK or peak > 2.1 * BLOCK:
                sys.exit(f"more than one layer was gathered: a block has {BLOCK} bytes")
