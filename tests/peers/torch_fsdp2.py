#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A step of a small Llama by libfsdp.torch.shard beside PyTorch's FSDP2 over gloo: time, memory and losses, in turns.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_fsdp2.py [--rounds N] [--steps N] [--copied]

FSDP2_BATCH (1) and FSDP2_LENGTH (64) say how many tokens a rank has: with many of them both spend their time in torch.

Each round runs both, on two ranks as processes with one thread each: fp32, AdamW, clipped. Memory is what the processes
have of their own and their share of what they have in common (PSS), right after the module was sharded and after the last
step. Needs torch and transformers.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

RANKS, VOCABULARY = 2, 8192
BATCH, LENGTH = (int(os.environ.get(name, usual)) for name, usual in (("FSDP2_BATCH", 1), ("FSDP2_LENGTH", 64)))


def build():
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
            num_key_value_heads=8, max_position_embeddings=LENGTH,
        )
    )


def batch(step, rank):
    import torch

    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2 * step + rank))


def pss():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) >> 10


def run_steps(model, step_of, steps, rank):
    losses, times = [], []
    for step in range(steps):
        tokens, begin = batch(step, rank), time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        step_of()
        times.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return losses, statistics.median(times[2:])


def as_fsdp2(rank, steps):
    import torch
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    model = build()
    before = pss()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    after = pss()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    losses, seconds = run_steps(model, step, steps, rank)
    result = dict(losses=losses, seconds=seconds, before=before, after=after, end=pss())
    distributed.destroy_process_group()
    return result


def as_libfsdp(rank, steps, copied):
    import libfsdp as fsdp
    import libfsdp.torch

    with fsdp.Context() as context:
        model = build()
        before = pss()
        options = {"unshard_mode": fsdp.UnshardMode.COPIED} if copied else {}
        sharded = libfsdp.torch.shard(model, context, no_decay=lambda name, param: False, **options)
        after = pss()
        losses, seconds = run_steps(
            model, lambda: sharded.step(1e-3, max_norm=1.0, weight_decay=0.01), steps, rank
        )
        return dict(losses=losses, seconds=seconds, before=before, after=after, end=pss())


def rank_main(kind, rank, steps):
    import torch

    torch.set_num_threads(1)
    result = as_fsdp2(rank, steps) if kind == "FSDP2" else as_libfsdp(rank, steps, kind == "copied")
    print(json.dumps(result), flush=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(kind, steps):
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), "--kind", kind, "--steps", str(steps)],
            stdout=subprocess.PIPE, text=True,
            env=dict(os.environ, RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                     MASTER_PORT=str(port), OMP_NUM_THREADS="1"),
        )
        for rank in range(RANKS)
    ]
    return [json.loads(rank.communicate()[0].strip().splitlines()[-1]) for rank in ranks]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--copied", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--kind")
    options = parser.parse_args()
    if options.rank is not None:
        return rank_main(options.kind, options.rank, options.steps)
    kinds, found = ["FSDP2", "copied" if options.copied else "libfsdp"], {}
    for _ in range(options.rounds):
        for kind in kinds:
            found.setdefault(kind, []).append(launch(kind, options.steps))
    for kind in kinds:
        ranks = [rank for round in found[kind] for rank in round]
        seconds = statistics.median(rank["seconds"] for rank in ranks)
        memory = {key: statistics.median(sum(rank[key] for rank in round) for round in found[kind]) for key in ("before", "after", "end")}
        print(f"{kind:8} step {seconds * 1e3:7.1f} ms; MiB of both ranks: {memory['before']:.0f} before, {memory['after']:.0f} sharded, {memory['end']:.0f} at the end; loss {ranks[0]['losses'][0]:.4f} to {ranks[0]['losses'][-1]:.4f}")
    ours, theirs = (statistics.median(rank["seconds"] for round in found[kind] for rank in round) for kind in reversed(kinds))
    differ = max(abs(a - b) for a, b in zip(found[kinds[0]][0][0]["losses"], found[kinds[1]][0][0]["losses"]))
    print(f"a step takes {ours / theirs:.2f} of FSDP2's time; losses differ by {differ:.1e}")


if __name__ == "__main__":
    main()
