#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level decoder: torch's math over libfsdp's memory.

  python3 train.py                         one rank on this machine's cores
  fsdp-run -n 2 python3 train.py           two ranks
  python3 train.py --device cuda           on a GPU

FSDP_LIBRARY says where libfsdp.so is, if the loader does not find it by itself."""
import argparse
import json
import os
import pathlib
import time

import torch

import sharded
import transformer


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 4), ("width", 256), ("heads", 4), ("context", 128), ("batch", 16), ("steps", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--transport", choices=("auto", "nccl", "staging"), default="auto")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights and the math")
    parser.add_argument("--force", action="store_true", help="communicate also in a world of one")
    parser.add_argument("--plain", action="store_true", help="torch alone, with its own AdamW: to compare with")
    parser.add_argument("--json", type=pathlib.Path)
    return parser.parse_args()


def read_text():
    here = pathlib.Path(__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(text, options, rank, world_size, device):
    """Rank `rank`'s rows of every step's batch, which is the same for any number of ranks."""
    generator = torch.Generator().manual_seed(1)
    own = options.batch // world_size
    while True:
        starts = torch.randint(len(text) - options.context - 1, (options.batch,), generator=generator)
        rows = torch.stack([text[s : s + options.context + 1] for s in starts[rank * own : (rank + 1) * own]]).to(device)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def decay_groups(model):
    params = list(model.parameters())
    return [{"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]


class Plain:
    """The same training as Sharded, by torch alone on one rank."""

    rank, world_size = 0, 1

    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.AdamW(decay_groups(model), betas=(0.9, 0.95), eps=1e-8,
                                           fused=next(model.parameters()).is_cuda)

    def step(self, lr, max_norm):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def mean(self, value):
        return value

    def close(self):
        pass


def main():
    options = parse()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()) \
        if options.device == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    model = transformer.Decoder(options.layers, options.width, options.heads, options.context).to(device)
    if options.plain:
        trainer = Plain(model)
    else:
        trainer = sharded.Sharded(model.layers(), dtype, device, options.transport, options.force)
    if options.batch % trainer.world_size:
        raise SystemExit(f"--batch {options.batch} does not divide by {trainer.world_size} ranks")
    out = open(options.json, "w") if options.json and trainer.rank == 0 else None
    started = time.monotonic()
    for step, (tokens, targets) in zip(range(options.steps), batches(read_text(), options, trainer.rank, trainer.world_size, device)):
        loss = model.loss(tokens, targets)
        loss.backward()
        mean = trainer.mean(loss.item())
        norm = trainer.step(options.lr, 1.0)
        if out:
            print(json.dumps({"step": step + 1, "loss": mean, "grad_norm": norm}), file=out)
        if trainer.rank == 0 and (step % 10 == 9 or step + 1 == options.steps):
            speed = (step + 1) * options.batch * options.context / (time.monotonic() - started)
            print(f"step {step + 1:4}/{options.steps}  loss {mean:.4f}  {speed:.0f} tokens/s", flush=True)
    trainer.close()


if __name__ == "__main__":
    main()
