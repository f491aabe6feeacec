# SPDX-License-Identifier: Apache-2.0
"""One rank of the same training in PyTorch, by --kind:

  fsdp2   fully_shard over gloo
  zero3   DeepSpeed ZeRO-3 over gloo, with its default options and its AdamW
  plain   the module alone in this process, which has the whole batch, with --threads threads

Rank 0 writes a JSON file: for each step its loss, its seconds, and of these the seconds of forward and backward and of
clipping and AdamW.
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

BETAS, DECAY, MAX_NORM = (0.9, 0.95), 0.1, 1.0


def parse():
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 4), ("width", 320), ("heads", 5), ("context", 128), ("batch", 16), ("steps", 300),
                          ("seed", 1)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--corpus", required=True, help="one file")
    parser.add_argument("--json", required=True)
    parser.add_argument("--kind", choices=("fsdp2", "zero3", "plain"), default="fsdp2")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def learning_rate(step, steps, highest=1e-3):
    """Linear warmup, then a cosine down to a tenth."""
    warmup = min(steps // 10, 20)
    if step < warmup:
        return highest * (step + 1) / warmup
    return highest * (0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup)))


def make_groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]


class Torch:
    """The module alone, or sharded by FSDP2, with AdamW of torch."""

    def __init__(self, model, kind):
        if kind == "fsdp2":
            for block in model.layers:
                fully_shard(block)
            fully_shard(model)
        self.module = model
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(make_groups(model), lr=1e-3, betas=BETAS, fused=True)

    def backward(self, loss):
        loss.backward()

    def update(self):
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Zero3:
    """The module sharded by DeepSpeed, which clips and updates by an optimizer of its own."""

    def __init__(self, model, sequences):
        import deepspeed

        options = {"train_micro_batch_size_per_gpu": sequences, "gradient_clipping": MAX_NORM,
                   "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": list(BETAS)}},
                   "zero_optimization": {"stage": 3}, "steps_per_print": 2**30}
        self.module = deepspeed.initialize(model=model, model_parameters=make_groups(model), config=options)[0]
        self.optimizer = self.module.optimizer

    def backward(self, loss):
        self.module.backward(loss)

    def update(self):
        self.module.step()


def load_rows(args, rank, world_size):
    """All steps' rows, before the first: reading text is no part of what is compared."""
    text = np.fromfile(args.corpus, dtype=np.uint8)
    sequences = args.batch // world_size
    rows = np.stack([[gpt.row(text, args.seed, step, rank * sequences + i, args.context) for i in range(sequences)]
                     for step in range(args.steps)])
    return torch.from_numpy(rows.astype(np.int64))


def train(args, trainer, rows, world_size):
    steps = []
    for step in range(args.steps):
        begin = time.perf_counter()
        for group in trainer.optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        loss = trainer.module(rows[step, :, :-1], rows[step, :, 1:])
        trainer.backward(loss)
        computed = time.perf_counter()
        mean = loss.detach()
        if world_size > 1:
            dist.all_reduce(mean)
        mean = mean.item() / world_size
        trainer.update()
        end = time.perf_counter()
        steps.append({"loss": mean, "seconds": end - begin, "compute": computed - begin, "optimizer": end - computed})
    return steps


def main():
    args = parse()
    torch.set_num_threads(args.threads)
    rank, world_size = 0, 1
    if args.kind == "zero3":
        import deepspeed

        deepspeed.init_distributed("gloo", verbose=False)
    elif args.kind == "fsdp2":
        dist.init_process_group("gloo")
    if args.kind != "plain":
        rank, world_size = dist.get_rank(), dist.get_world_size()
    model = gpt.Gpt(args.layers, args.width, args.heads, args.context)
    gpt.fill(model, args.seed)
    count = sum(p.numel() for p in model.parameters())
    trainer = Zero3(model, args.batch // world_size) if args.kind == "zero3" else Torch(model, args.kind)
    steps = train(args, trainer, load_rows(args, rank, world_size), world_size)
    if rank == 0:
        with open(args.json, "w", encoding="ascii") as file:
            json.dump({"parameters": count, "steps": steps}, file)
    if args.kind != "plain":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
