# SPDX-License-Identifier: Apache-2.0
"""One rank of the same training in PyTorch: fully_shard over gloo, or --alone with the plain module.

Writes a JSON file (of rank 0, or of this process alone): for each step its loss, its seconds, and of these the seconds
of forward and backward and of clipping and AdamW.
"""
import argparse
import json
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import gpt


def parse():
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 4), ("width", 320), ("heads", 5), ("context", 128), ("batch", 16), ("steps", 300),
                          ("seed", 1)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--corpus", required=True, help="one file")
    parser.add_argument("--json", required=True)
    parser.add_argument("--alone", action="store_true", help="no sharding, no other ranks; --batch is this process's")
    return parser.parse_args()


def learning_rate(step, steps, highest=1e-3):
    """Linear warmup, then a cosine down to a tenth."""
    warmup = min(steps // 10, 20)
    if step < warmup:
        return highest * (step + 1) / warmup
    return highest * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup)))


def shard(model):
    for block in model.layers:
        fully_shard(block)
    fully_shard(model)


def make_optimizer(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def load_rows(args, rank, world_size):
    """All steps' rows, before the first: reading text is no part of what is compared."""
    text = np.fromfile(args.corpus, dtype=np.uint8)
    sequences = args.batch // world_size
    rows = np.stack([[gpt.row(text, args.seed, step, rank * sequences + i, args.context) for i in range(sequences)]
                     for step in range(args.steps)])
    return torch.from_numpy(rows.astype(np.int64))


def train(args, model, optimizer, rows, world_size):
    steps = []
    parameters = list(model.parameters())
    for step in range(args.steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        loss = model(rows[step, :, :-1], rows[step, :, 1:])
        loss.backward()
        computed = time.perf_counter()
        mean = loss.detach()
        if world_size > 1:
            dist.all_reduce(mean)
        mean = mean.item() / world_size
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        steps.append({"loss": mean, "seconds": end - begin, "compute": computed - begin, "optimizer": end - computed})
    return steps


def main():
    args = parse()
    torch.set_num_threads(1)
    rank, world_size = 0, 1
    if not args.alone:
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
    model = gpt.Gpt(args.layers, args.width, args.heads, args.context)
    gpt.fill(model, args.seed)
    if not args.alone:
        shard(model)
    steps = train(args, model, make_optimizer(model), load_rows(args, rank, world_size), world_size)
    if rank == 0:
        with open(args.json, "w", encoding="ascii") as file:
            json.dump({"torch": torch.__version__, "parameters": sum(p.numel() for p in model.parameters()),
                       "steps": steps}, file)
    if not args.alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
