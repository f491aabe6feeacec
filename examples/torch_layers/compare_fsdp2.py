#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The training step of this example beside torch's own FSDP2: the same model, batches and precision on one rank, in turns.

Prints, for each, the median time of a step and the peak of memory. With --device cpu it shows that both compute the
same; its times are meaningful on a GPU only."""
import argparse
import json
import os
import statistics
import time

import torch
from torch import distributed

import sharded
import transformer
from train import Plain, batches, read_text


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 24), ("width", 2048), ("heads", 16), ("context", 1024), ("batch", 8), ("steps", 12),
                          ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--transport", choices=("auto", "nccl", "staging"), default="auto")
    parser.add_argument("--json")
    return parser.parse_args()


class Fsdp2(Plain):
    """bf16 math over fp32 main weights, with gradients reduced in fp32, as in libfsdp."""

    def __init__(self, model):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for _, layer in model.layers():
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        super().__init__(model)

    def step(self, lr, max_norm):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def make(which, model, options, device):
    if which == "FSDP2":
        return Fsdp2(model)
    return sharded.Sharded(model.layers(), torch.bfloat16, device, options.transport, force=True)


def used_bytes(device):
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def run(which, options, device):
    """Steps of a fresh model: losses, seconds of each step, bytes of the device in use at the end of the first steps."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        before = used_bytes(device)
    model = transformer.Decoder(options.layers, options.width, options.heads, options.context).to(device)
    trainer = make(which, model, options, device)
    if on_gpu:  # what the first weights took is given back by now
        torch.cuda.reset_peak_memory_stats(device)
    losses, seconds = [], []
    for _, (tokens, targets) in zip(range(options.steps), batches(read_text(), options, 0, 1, device)):
        started = time.monotonic()
        loss = model.loss(tokens, targets)
        loss.backward()
        trainer.step(1e-4, 1.0)
        losses.append(loss.item())
        seconds.append(time.monotonic() - started)
    result = {"losses": losses, "seconds": seconds}
    if on_gpu:
        result["device_bytes"] = used_bytes(device) - before
        result["torch_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        if which != "FSDP2":
            result["library_bytes"] = trainer.memory()["total"]
    trainer.close()
    return result


def report(which, runs):
    steady = [s for r in runs for s in r["seconds"][3:]]
    line = f"{which:8} {1e3 * statistics.median(steady):9.2f} ms a step  loss {runs[0]['losses'][0]:.4f} -> {runs[0]['losses'][-1]:.4f}"
    if "device_bytes" in runs[0]:
        peak = max(r["torch_peak_bytes"] + r.get("library_bytes", 0) for r in runs)
        line += f"  peak {peak / 2**30:.2f} GiB allocated, {max(r['device_bytes'] for r in runs) / 2**30:.2f} GiB of the device"
    print(line, flush=True)


def main():
    options = parse()
    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29555"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    distributed.init_process_group("nccl" if options.device == "cuda" else "gloo", device_id=device if options.device == "cuda" else None)
    runs = {"FSDP2": [], "libfsdp": []}
    for _ in range(options.rounds):
        for which in runs:
            runs[which].append(run(which, options, device))
    for which in runs:
        report(which, runs[which])
    if options.json:
        with open(options.json, "w") as out:
            json.dump({"torch": torch.__version__, "options": vars(options), "runs": runs}, out)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
