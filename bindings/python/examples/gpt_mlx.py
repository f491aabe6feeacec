#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT of MLX whose weights, gradients and optimizer state libfsdp shards, beside the same module of MLX alone.

MLX computes a whole gradient at once, later than it is told to, and takes its arrays for immutable. So a step is one
call, fsdp_apply_grads, and the module has copies of the weights while its gradients are computed.

usage: fsdp-run -n 2 --no-prefix python3 gpt_mlx.py
"""

from importlib.metadata import version

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers
import numpy as np
import tiny_gpt
from mlx.utils import tree_flatten, tree_unflatten
from tiny_gpt import CONTEXT, EPSILON, HEADS, LAYERS, LEARNING_RATE, STEPS, VOCABULARY, WEIGHT_DECAY, WIDTH

import libfsdp as fsdp


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, EPSILON), nn.LayerNorm(WIDTH, EPSILON)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def __call__(self, x):
        qkv = mx.split(self.qkv(self.norm1(x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2) for part in qkv)
        scale = (WIDTH // HEADS) ** -0.5
        mixed = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal")
        x = x + self.proj(mixed.swapaxes(1, 2).reshape(x.shape))
        return x + self.down(nn.gelu_approx(self.up(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = [Block() for _ in range(LAYERS)]
        self.norm, self.head = nn.LayerNorm(WIDTH, EPSILON), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.load_weights([(name, mx.array(value)) for name, value in tiny_gpt.make_weights().items()])

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, tokens, targets):
    return nn.losses.cross_entropy(model(mx.array(tokens)), mx.array(targets), reduction="mean")


def train_alone():
    model, losses = Gpt(), []
    optimizer = mlx.optimizers.AdamW(LEARNING_RATE, [0.9, 0.999], 1e-8, WEIGHT_DECAY, bias_correction=True)
    for step in range(STEPS):
        loss, grads = nn.value_and_grad(model, loss_of)(model, *tiny_gpt.read_batch(step))
        optimizer.update(model, grads)
        losses.append(loss.item())
    return losses, {name: np.array(value) for name, value in tree_flatten(model.parameters())}


def declare(model, context):
    """A group for each block, one for what is in none. Returns the libfsdp.Model and, in order, (group, name)."""
    owner, members = context.create_model(), {}
    for name, value in tree_flatten(model.parameters()):
        group = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else "rest"
        members.setdefault(group, []).append((name, value))
    places = []
    for name, params in members.items():
        group = owner.create_group(name, [fsdp.Param(param, value.shape) for param, value in params])
        places += [(group, param) for param, _ in params]
    owner.seal()
    values = dict(tree_flatten(model.parameters()))
    for group, name in places:
        group.load_param(name, np.array(values[name]))
    owner.publish_weights()
    return owner, places


def copy_weights(owner, phase=fsdp.Phase.EVAL):
    """The full weights as arrays of MLX, which are copies: mx.array copies memory of numpy."""
    copies = []
    for group in owner.groups.values():
        with group.unsharded(phase) as weights:
            copies += [(name, mx.array(view)) for name, view in weights.items()]
    return tree_unflatten(copies)


def train_sharded(context):
    model, losses = Gpt(), []
    owner, places = declare(model, context)
    for step in range(STEPS):
        model.update(copy_weights(owner))
        batch = tiny_gpt.read_batch(step, context.rank, context.world_size)
        loss, grads = nn.value_and_grad(model, loss_of)(model, *batch)
        grads = dict(tree_flatten(grads))
        mx.eval(grads)
        owner.apply_grads([np.array(grads[name]) for _, name in places], LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        losses.append(context.all_reduce_values(loss.item(), fsdp.ValueOp.MEAN))
    return losses, {name: group.read_param(name) for group, name in places}, tiny_gpt.read_rank_bytes(owner)


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    alone, weights_alone = train_alone()
    with fsdp.Context() as context:
        losses, weights, rank_bytes = train_sharded(context)
        framework = f"mlx {version('mlx')}"
        tiny_gpt.compare(framework, context, losses, alone, weights, weights_alone, rank_bytes)
