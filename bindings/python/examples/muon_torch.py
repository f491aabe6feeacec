#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A tiny GPT of torch that libfsdp.torch trains by Muon, beside the same module trained by torch alone.

usage: fsdp-run -n 4 --no-prefix python3 muon_torch.py [REPLICAS]

The last line is a hash of all weights. It is the same for 1, 2, 3, 4, 6 and 12 ranks, and with REPLICAS (HSDP): each
matrix is orthogonalized whole, and the sums of gradients are exact, because each sample's gradient is rounded to
multiples of 2^-22.
"""

import hashlib
import sys

import torch
from gpt_torch import Gpt, loss_of
from tiny_gpt import CONTEXT, TEXT, WIDTH
from torch import nn

import libfsdp as fsdp
import libfsdp.torch

STEPS, SAMPLES = 6, 12  # of a step
MUON, ADAMW = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}, {"lr": 3e-3, "weight_decay": 0.1}


def splits(name, param):
    """q, k and v are matrices of their own."""
    return [WIDTH, WIDTH, WIDTH] if "qkv" in name else None


def backward(model, step, samples):
    """Each sample is a pass of its own. Returns the sum of their losses."""
    loss = 0.0
    for sample in samples:
        start = 7 * (step * SAMPLES + sample) % (len(TEXT) - CONTEXT)
        row = torch.tensor(list(TEXT[start : start + CONTEXT + 1])).numpy()[None]
        part = loss_of(model, row[:, :-1], row[:, 1:]) / SAMPLES
        part.backward()
        loss += part.item()
    return loss


def make_model():
    model = Gpt()
    for param in model.parameters():
        param.register_hook(lambda grad: (grad * 2**22).round() / 2**22)
    return model


class PlainMuon(torch.optim.Optimizer):
    """The formulas of torch.optim.Muon, in fp32. Its parameters are (name, parameter)."""

    def __init__(self, named, **options):
        super().__init__([{"params": [param], "name": name} for name, param in named], options)

    @staticmethod
    def orthogonal(x):
        if x.size(0) > x.size(1):
            return PlainMuon.orthogonal(x.T).T
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        return x

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (param,), lr = group["params"], group["lr"]
            buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
            buffer.lerp_(param.grad, 1 - group["momentum"])
            update = param.grad.lerp(buffer, group["momentum"])
            rows = splits(group["name"], param) or [len(param)]
            for weight, matrix in zip(param.split(rows), update.split(rows)):
                weight.mul_(1 - lr * group["weight_decay"])
                ratio = max(1, matrix.size(0) / matrix.size(1)) ** 0.5
                weight.sub_(lr * ratio * self.orthogonal(matrix))


def train_alone():
    model, losses = make_model(), []
    named = list(model.named_parameters())
    matrices = [(name, param) for name, param in named if name.startswith("blocks.") and param.dim() == 2]
    others = [param for name, param in named if not any(param is matrix for _, matrix in matrices)]
    decays = [{"params": [param], **({} if param.dim() > 1 else {"weight_decay": 0.0})} for param in others]
    optimizers = PlainMuon(matrices, **MUON), torch.optim.AdamW(decays, **ADAMW)
    for step in range(STEPS):
        losses.append(backward(model, step, range(SAMPLES)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: param.detach() for name, param in named}


def train_sharded(context, replicas):
    model, losses = make_model(), []
    sharded = libfsdp.torch.shard(
        model,
        context,
        optimizer=libfsdp.torch.Muon(**MUON, adamw=ADAMW, splits=splits),
        mesh=context.create_mesh(replicate_size=replicas) if replicas > 1 else None,
        grad_op=fsdp.GradOp.SUM,
    )
    for step in range(STEPS):
        loss = backward(model, step, range(context.rank, SAMPLES, context.world_size))
        sharded.step(max_norm=1.0)
        losses.append(context.all_reduce_values(loss))
    return losses, sharded.full_state_dict()


def compare(context, losses, alone, weights, weights_alone):
    worst = max((weights[name] - weights_alone[name]).abs().max().item() for name in weights)
    if context.rank == 0:
        print(f"torch {torch.__version__}, {context.world_size} ranks")
        for step, pair in enumerate(zip(losses, alone), 1):
            print("step %d: loss %.5f, alone %.5f" % (step, *pair))
        print(f"weights differ from those of torch alone by at most {worst:.1e}")
        numbers = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
        print(f"weights {hashlib.sha256(numbers).hexdigest()[:16]}", flush=True)
    if not (all(abs(a - b) < 1e-4 for a, b in zip(losses, alone)) and worst < 1e-3):
        sys.exit(f"rank {context.rank}: the sharded run is not the one of torch alone")


if __name__ == "__main__":
    torch.set_num_threads(1)
    alone, weights_alone = train_alone()
    with fsdp.Context() as context:
        losses, weights = train_sharded(context, int(sys.argv[1]) if len(sys.argv) > 1 else 1)
        compare(context, losses, alone, weights, weights_alone)
