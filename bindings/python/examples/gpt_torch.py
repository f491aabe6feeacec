#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT of torch, sharded by libfsdp.torch.shard, beside the same module of torch alone.

usage: fsdp-run -n 2 --no-prefix python3 gpt_torch.py
"""

import tiny_gpt
import torch
from tiny_gpt import CONTEXT, EPSILON, HEADS, LAYERS, LEARNING_RATE, STEPS, VOCABULARY, WEIGHT_DECAY, WIDTH
from torch import nn

import libfsdp as fsdp
import libfsdp.torch


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, EPSILON), nn.LayerNorm(WIDTH, EPSILON)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(WIDTH, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH, EPSILON), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.load_state_dict({name: torch.from_numpy(value) for name, value in tiny_gpt.make_weights().items()})

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, *batch):
    tokens, targets = (torch.from_numpy(part).long() for part in batch)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train_alone():
    model, losses = Gpt(), []
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        loss = loss_of(model, *tiny_gpt.read_batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: param.detach().numpy() for name, param in model.named_parameters()}


def train_sharded(context):
    model, losses = Gpt(), []
    sharded = libfsdp.torch.shard(model, context, no_decay=lambda name, param: False)
    for step in range(STEPS):
        loss = loss_of(model, *tiny_gpt.read_batch(step, context.rank, context.world_size))
        loss.backward()
        sharded.step(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        losses.append(context.all_reduce_values(loss.item(), fsdp.ValueOp.MEAN))
    return losses, sharded.full_state_dict(), tiny_gpt.read_rank_bytes(sharded.model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    alone, weights_alone = train_alone()
    with fsdp.Context() as context:
        losses, weights, rank_bytes = train_sharded(context)
        tiny_gpt.compare(f"torch {torch.__version__}", context, losses, alone, weights, weights_alone, rank_bytes)
