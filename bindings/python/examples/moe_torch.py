#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small Mixtral with libfsdp.torch.shard, whose experts have meshes of their own, and compares it with the
same module trained by torch alone.

usage: fsdp-run -n 4 --no-prefix python3 moe_torch.py

Each of two neighbouring ranks has one half of a block's experts. With 4 ranks, ranks 0 and 2 have the same experts and
share them; dense layers are shared by all ranks. torch.distributed moves the tokens.
"""

import tiny_gpt
import torch
from tiny_gpt import CONTEXT, EPSILON, HEADS, LAYERS, LEARNING_RATE, STEPS, VOCABULARY, WEIGHT_DECAY, WIDTH
from torch import distributed, nn

import libfsdp as fsdp
import libfsdp.torch

EXPERTS, CHOSEN, HIDDEN = 4, 2, 96  # experts of a block; how many of them a token goes to


class Dense(nn.Module):
    """Attention, and the router: what all ranks share."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, EPSILON), nn.RMSNorm(WIDTH, EPSILON)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(WIDTH, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        tokens = self.norm2(x).flatten(0, 1)
        scores, chosen = self.router(tokens).topk(CHOSEN)
        return x, tokens, scores.softmax(-1), chosen


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Experts(nn.ModuleDict):
    """Experts by their numbers in the block: a rank may have only some of them, under the same names."""

    def __init__(self):
        super().__init__({str(number): Expert() for number in range(EXPERTS)})

    def keep(self, numbers):
        for number in set(self) - set(map(str, numbers)):
            del self[number]

    def forward(self, tokens, numbers):
        out = torch.zeros_like(tokens)
        for number, expert in self.items():  # also those without tokens: every rank does the same
            places = (numbers == int(number)).nonzero().flatten()
            out = out.index_add(0, places, expert(tokens[places]))
        return out


class Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(context, rows, sent, received, group):
        context.counts, context.group = (sent, received), group
        got = rows.new_empty((sum(received), *rows.shape[1:]))
        distributed.all_to_all_single(got, rows.contiguous(), received, sent, group=group)
        return got

    @staticmethod
    def backward(context, grad):
        sent, received = context.counts
        return Exchange.apply(grad, received, sent, context.group), None, None, None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.experts, self.group = Dense(), Experts(), None  # group: the ranks that have all experts

    def forward(self, x):
        x, tokens, scores, chosen = self.dense(x)
        numbers, order = chosen.flatten().sort(stable=True)
        rows = self.mix(tokens[order // CHOSEN], numbers)
        mixed = torch.zeros_like(tokens).index_add(0, order // CHOSEN, rows * scores.flatten()[order, None])
        return x + mixed.view_as(x)

    def mix(self, rows, numbers):
        """What experts make of rows that are sorted by the number of their expert."""
        if self.group is None:
            return self.experts(rows, numbers)
        members = self.group.size()
        sent = torch.bincount(numbers * members // EXPERTS, minlength=members)
        received = torch.empty_like(sent)
        distributed.all_to_all_single(received, sent, group=self.group)
        sent, received = sent.tolist(), received.tolist()
        numbers = Exchange.apply(numbers, sent, received, self.group)
        out = self.experts(Exchange.apply(rows, sent, received, self.group), numbers)
        return Exchange.apply(out, received, sent, self.group)


class Mixtral(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH, EPSILON), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for param in filter(lambda param: param.dim() > 1, self.parameters()):
            nn.init.normal_(param, std=0.05)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model, *batch):
    tokens, targets = (torch.from_numpy(part).long() for part in batch)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def train_alone():
    model, losses = Mixtral(), []
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        loss = loss_of(model, *tiny_gpt.read_batch(step))
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append((loss.item(), norm.item()))
    return losses, {name: param.detach() for name, param in model.named_parameters()}


def start_exchange(context):
    """Ranks of one host meet at a port that rank 0 has opened."""
    is_first = context.rank == 0
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_first else None
    port = int(context.all_reduce_values(store.port if is_first else 0))
    store = store or distributed.TCPStore("127.0.0.1", port)
    distributed.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)


def train_sharded(context):
    parallel = min(2, context.world_size)
    model, losses, first = Mixtral(), [], context.rank % parallel
    mesh = context.create_mesh(ranks=range(first, context.world_size, parallel))
    if parallel > 1:
        start_exchange(context)
        pairs = [distributed.new_group([rank, rank + 1]) for rank in range(0, context.world_size, parallel)]
    for block in model.blocks:
        block.experts.keep(range(first * EXPERTS // parallel, (first + 1) * EXPERTS // parallel))
        block.group = pairs[context.rank // parallel] if parallel > 1 else None
    sharded = libfsdp.torch.shard(
        model,
        context,
        layers=[part for block in model.blocks for part in (block.dense, block.experts)],
        group_options=lambda name, layer: {"mesh": mesh} if isinstance(layer, Experts) else {},
        no_decay=lambda name, param: False,
    )
    for step in range(STEPS):
        loss = loss_of(model, *tiny_gpt.read_batch(step, context.rank, context.world_size))
        loss.backward()
        norm = sharded.step(LEARNING_RATE, max_norm=1.0, weight_decay=WEIGHT_DECAY)
        losses.append((context.all_reduce_values(loss.item(), fsdp.ValueOp.MEAN), norm))
    return losses, sharded.full_state_dict()


def compare(context, losses, alone, weights, weights_alone):
    """Compares this rank's experts and the dense layers with those of torch alone."""
    worst = max((weights[name] - weights_alone[name]).abs().max().item() for name in weights)
    worst = context.all_reduce_values(worst, fsdp.ValueOp.MAX)
    if context.rank == 0:
        print(f"torch {torch.__version__}, {context.world_size} ranks")
        for step, ((loss, norm), (loss_alone, norm_alone)) in enumerate(zip(losses, alone)):
            print(f"step {step + 1}: loss {loss:.7f}, alone {loss_alone:.7f}; norm {norm:.5f}, alone {norm_alone:.5f}")
        print(f"weights differ by at most {worst:.1e}")
    close = all(abs(a - b) < 1e-4 * b for pair in zip(losses, alone) for a, b in zip(*pair))
    if not (close and worst < 1e-4):
        raise SystemExit("the two runs differ")


if __name__ == "__main__":
    torch.set_num_threads(1)
    alone, weights_alone = train_alone()
    with fsdp.Context() as context:
        losses, weights = train_sharded(context)
        compare(context, losses, alone, weights, weights_alone)
    if distributed.is_initialized():
        distributed.destroy_process_group()
