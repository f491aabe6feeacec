# SPDX-License-Identifier: Apache-2.0
"""An ordinary decoder in torch: nothing in it knows of libfsdp."""
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (t.view(batch, tokens, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Embedding(nn.Module):
    def __init__(self, vocabulary, context, width):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)

    def forward(self, tokens):
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class Head(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        return self.linear(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, layers, width, heads, context, vocabulary=256):
        super().__init__()
        self.embedding = Embedding(vocabulary, context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = Head(vocabulary, width)

    def layers(self):
        """(name, module) of each layer, in the order of the forward pass."""
        return [("embedding", self.embedding), *((f"block{i}", b) for i, b in enumerate(self.blocks)), ("head", self.head)]

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())
