#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""LoRA on a small GPT-2 of transformers by libfsdp.torch and by PyTorch's FSDP2 over gloo, as a new user writes it:
AdamW, a schedule with warmup, clipping, a checkpoint in the middle and a resume. Prints lines, losses, steps a second
and memory.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_new_user.py [--rounds N] [--steps N]

Each round runs both on two ranks, processes of one thread each, in turns. The model has random weights: nothing is
downloaded. Memory is the peak of a rank's process (VmHWM). Needs torch, transformers and peft.
"""

import argparse
import inspect
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

RANKS, WARMUP, RATE, LENGTH, VOCABULARY = 2, 5, 1e-2, 64, 4096


# -- what both programs share -----------------------------------------------------------------------------------------


def make_model():
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=4, n_embd=256, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    )
    lora = peft.LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora)


def rate_at(steps):
    return lambda step: (step + 1) / WARMUP if step < WARMUP else 0.5 * (1 + math.cos(math.pi * step / steps))


def batch(step, rank):
    import torch

    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(RANKS * (step % 4) + rank))


# -- the two programs -------------------------------------------------------------------------------------------------


def by_libfsdp(folder, steps):
    import torch

    import libfsdp as fsdp
    import libfsdp.torch

    def start():
        model = make_model()
        sharded = libfsdp.torch.shard(
            model, context, optimizer=torch.optim.AdamW, optimizer_options={"lr": RATE, "weight_decay": 0.01}
        )
        return model, sharded, torch.optim.lr_scheduler.LambdaLR(sharded.optimizer, rate_at(steps))

    def train(model, sharded, scheduler, first, last):
        for step in range(first, last):
            tokens = batch(step, context.rank)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            sharded.step(max_norm=0.5)
            scheduler.step()
            yield loss.item()

    with fsdp.Context() as context:
        model, sharded, scheduler = start()
        yield from train(model, sharded, scheduler, 0, steps // 2)
        sharded.save(folder, extra={"scheduler": scheduler.state_dict()})
        sharded.close()

        model, sharded, scheduler = start()
        scheduler.load_state_dict(sharded.load(folder).extra["scheduler"])
        yield from train(model, sharded, scheduler, steps // 2, steps)


def by_fsdp2(folder, steps):
    import torch
    from torch import distributed
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def start():
        model = make_model()
        for block in model.base_model.model.transformer.h:
            fully_shard(block)
        fully_shard(model)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.01)
        return model, trained, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at(steps))

    def train(model, trained, optimizer, scheduler, first, last):
        for step in range(first, last):
            tokens = batch(step, distributed.get_rank())
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            yield loss.item()

    def values(model, optimizer, scheduler):
        weights, states = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": states, "scheduler": scheduler.state_dict()}

    distributed.init_process_group("gloo")
    model, trained, optimizer, scheduler = start()
    yield from train(model, trained, optimizer, scheduler, 0, steps // 2)
    checkpoint.save(values(model, optimizer, scheduler), checkpoint_id=folder)

    model, trained, optimizer, scheduler = start()
    kept = values(model, optimizer, scheduler)
    checkpoint.load(kept, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
    scheduler.load_state_dict(kept["scheduler"])
    yield from train(model, trained, optimizer, scheduler, steps // 2, steps)
    distributed.destroy_process_group()


PROGRAMS = {"libfsdp": by_libfsdp, "FSDP2": by_fsdp2}


# -- the measurement --------------------------------------------------------------------------------------------------


def peak_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM:"))


def rank_main(kind, folder, steps):
    import peft  # noqa: F401  what the import takes is not the library's
    import torch

    torch.set_num_threads(1)
    imported, losses, times = peak_kib(), [], [time.perf_counter()]
    for loss in PROGRAMS[kind](folder, steps):
        losses.append(loss)
        times.append(time.perf_counter())
    seconds = [after - before for before, after in zip(times, times[1:])]
    usual = statistics.median(second for step, second in enumerate(seconds) if step not in (0, 1, steps // 2))
    print(json.dumps({"losses": losses, "rate": 1 / usual, "imported": imported, "peak": peak_kib()}), flush=True)


def launch(kind, steps):
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--kind", kind, "--folder", folder, "--steps", str(steps)],
                stdout=subprocess.PIPE, text=True,
                env=dict(os.environ, RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1",
                         MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), HF_HUB_OFFLINE="1"),
            )
            for rank in range(RANKS)
        ]
        return [json.loads(rank.communicate()[0].strip().splitlines()[-1]) for rank in ranks]


def lines_of(program):
    return sum(1 for line in inspect.getsource(program).splitlines() if line.strip())


def row(kind, rounds):
    ranks = [rank for ranks in rounds for rank in ranks]
    rates = sorted(statistics.median(rank["rate"] for rank in ranks) for ranks in rounds)
    peak, imported = (max(rank[key] for rank in ranks) / 1024 for key in ("peak", "imported"))
    return (
        f"| {kind} | {lines_of(PROGRAMS[kind])} | {rates[0]:.1f}, {statistics.median(rates):.1f}, {rates[-1]:.1f} "
        f"| {peak:.0f} | {peak - imported:.0f} | {ranks[0]['losses'][0]:.6f} | {ranks[0]['losses'][-1]:.6f} |"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kind", choices=PROGRAMS)
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.kind:
        return rank_main(options.kind, options.folder, options.steps)
    rounds = {kind: [] for kind in PROGRAMS}
    for _ in range(options.rounds):
        for kind, found in rounds.items():
            found.append(launch(kind, options.steps))
    shared = sum(map(lines_of, (make_model, rate_at, batch)))
    print(f"| program | lines, beside {shared} that both share | steps/s: min, median, max | MiB of a rank, peak "
          "| after the imports | first loss | last loss |\n|---|---|---|---|---|---|---|")
    for kind, found in rounds.items():
        print(row(kind, found))
    pairs = [
        (ours, theirs)
        for round in zip(*rounds.values())
        for a, b in zip(*round)
        for ours, theirs in zip(a["losses"], b["losses"])
    ]
    worst = max(abs(ours - theirs) for ours, theirs in pairs)
    ratios = sorted(a[0]["rate"] / b[0]["rate"] for a, b in zip(*rounds.values()))
    print(f"in a round libfsdp has {ratios[0]:.2f} to {ratios[-1]:.2f} of the steps/s of FSDP2, in the median "
          f"{statistics.median(ratios):.2f}; losses differ by {worst:.1e} at most")
    return worst > 1e-5


if __name__ == "__main__":
    sys.exit(main())
