# SPDX-License-Identifier: Apache-2.0
"""The GPT of examples/train_gpt in PyTorch: the same parameters, first values and rows of text."""
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256
FNV_BASIS, FNV_PRIME, MASK = 0xCBF29CE484222325, 0x100000001B3, (1 << 64) - 1


def mix(x):
    """The finalizer of SplitMix64, as examples/train_gpt/random.h has it."""
    with np.errstate(over="ignore"):
        x = np.asarray(x, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_bits(key, index):
    return mix(mix(key) ^ np.asarray(index, dtype=np.uint64))


def random_normal(key, count):
    index = np.arange(count, dtype=np.uint64)
    uniform = [((random_bits(key, 2 * index + np.uint64(k)) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
               for k in (0, 1)]
    return np.sqrt(-2.0 * np.log(uniform[0])) * np.cos(2 * math.pi * uniform[1])


def hash_name(name):
    value = FNV_BASIS
    for byte in name.encode():
        value = ((value ^ byte) * FNV_PRIME) & MASK
    return np.uint64(value)


def row(text, seed, step, index, context):
    """Tokens and targets of a row of a step: corpus_get_row."""
    key = mix(seed) ^ mix(np.uint64(MASK - step))
    first = int(random_bits(key, index)) % len(text)
    return text[(first + np.arange(context + 1)) % len(text)]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.query_bias = nn.Parameter(torch.zeros(width))
        self.value_bias = nn.Parameter(torch.zeros(width))
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        sequences, tokens, width = x.shape
        query, key, value = self.qkv(self.norm1(x)).split(width, dim=2)
        query, key, value = (t.view(sequences, tokens, self.heads, -1).transpose(1, 2)
                             for t in (query + self.query_bias, key, value + self.value_bias))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(sequences, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, context):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens, targets):
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.head(self.final_norm(x)).flatten(0, 1), targets.flatten())


# The example's names of parameters are part of the key of their initial values.
NAMES = {"qkv": "attention.qkv", "projection": "attention.projection", "up": "mlp.up", "down": "mlp.down"}


def fill(model, seed):
    """Each matrix from (seed, name, index) alone: parameter_fill. Vectors keep PyTorch's ones and zeros."""
    layers = len(model.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            parts = name.split(".")
            if parts[-2] in NAMES:
                parts[-2] = NAMES[parts[-2]]
            deviation = 0.02 / (math.sqrt(2.0 * layers) if parts[-2] in (NAMES["projection"], NAMES["down"]) else 1.0)
            values = deviation * random_normal(mix(seed) ^ hash_name(".".join(parts)), parameter.numel())
            parameter.copy_(torch.from_numpy(values.astype(np.float32)).view_as(parameter))
