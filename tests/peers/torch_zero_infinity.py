#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps with optimizer states in files: libfsdp.torch.shard beside ZeRO-Infinity of DeepSpeed, in turns.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_zero_infinity.py DIR [--layers N] [--width N]
           [--tokens N] [--steps N] [--rounds N] [--max-norm N] [--aio JSON] [--sub-group N] [--kinds KIND,...]

Each round trains the same blocks of Linear layers in bf16 on two ranks, which are processes of one thread each:
  file     libfsdp with main weights, main gradients and states of its AdamW in a file in DIR
  zero     DeepSpeed: ZeRO-3 on the CPU over gloo, DeepSpeedCPUAdam, offload_optimizer to files in DIR
  memory   libfsdp with all of that in memory
The losses of file and memory must be the same bits, and those of zero the same but for the noise of bf16. The exit
status is 1 if they are not. Without DeepSpeed or its operator async_io (libaio), zero is skipped with the reason. Peak
memory is what a rank had resident during the timed steps; pages that both ranks share count in each. By hand; needs
torch. DeepSpeed compiles its operators in the first run, which takes minutes.
"""

import argparse
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

RANKS, WARM_UP = 2, 2
BETAS, EPSILON, DECAY = (0.9, 0.999), 1e-8, 0.01
NOISE = 1e-3  # of a loss: bf16 keeps 8 bits of a number, and the sum of a loss averages their errors
KINDS = ("file", "zero", "memory")
AIO = dict(block_size=1048576, queue_depth=32, intra_op_parallelism=1, single_submit=False, overlap_events=True)
SIZES = dict(layers=4, width=512, tokens=16, steps=6, rounds=3)


# -- what both train ------------------------------------------------------------------------------------------


def build(layers, width):
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(width, 4 * width, bias=False, dtype=torch.bfloat16)
            self.down = nn.Linear(4 * width, width, bias=False, dtype=torch.bfloat16)

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(x)))

    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers)))


def rate_of(given):
    """AdamW moves each weight by about the rate, so a sum over the width moves by about this product."""
    return 0.5 / given.width


def loss_of(module, step, rank, given):
    import torch

    generator = torch.Generator().manual_seed(RANKS * step + rank)
    inputs, targets = torch.randn(2, given.tokens, given.width, generator=generator)
    return torch.nn.functional.mse_loss(module(inputs.bfloat16()).float(), targets)


# -- measurements of a rank -----------------------------------------------------------------------------------


def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def peak_memory():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def disk_traffic():
    """Bytes that this process has read from disks, and written to them."""
    fields = dict(line.split(": ") for line in pathlib.Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def bytes_in_files(folder, rank):
    """Bytes of the files without a name that this process has open; on rank 0 also of the files in the folder."""
    found = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    files = [fd for fd in found if os.path.exists(fd) and os.path.realpath(fd).startswith(f"{folder}/")]
    files = {os.stat(fd).st_ino: os.stat(fd) for fd in files if os.stat(fd).st_nlink == 0}
    named = [path.stat() for path in pathlib.Path(folder).rglob("*") if path.is_file()] if rank == 0 else []
    return sum(512 * stat.st_blocks for stat in [*files.values(), *named])


def run_steps(module, step_of, rank, given):
    losses, seconds = [], []
    for step in range(WARM_UP + given.steps):
        if step == WARM_UP:
            forget_peak()
            before = disk_traffic()
        begin = time.perf_counter()
        loss = loss_of(module, step, rank, given)
        step_of(loss)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    moved = [(now - then) / given.steps for now, then in zip(disk_traffic(), before)]
    return dict(losses=losses, seconds=statistics.median(seconds[WARM_UP:]), peak=peak_memory(), read=moved[0],
                written=moved[1], files=bytes_in_files(given.folder, rank))


# -- the two libraries ----------------------------------------------------------------------------------------


def train_libfsdp(rank, given):
    import libfsdp as fsdp
    import libfsdp.torch

    homes = ("state_home", "main_home", "grad_home") if given.kind == "file" else ()
    options = {**{home: fsdp.Home.FILE for home in homes}, **({"home_directory": given.folder} if homes else {})}
    with fsdp.Context() as context:
        module = build(given.layers, given.width)
        sharded = libfsdp.torch.shard(module, context, **options)

        def step(loss):
            loss.backward()
            sharded.step(rate_of(given), max_norm=given.max_norm or None, beta1=BETAS[0], beta2=BETAS[1],
                         epsilon=EPSILON, weight_decay=DECAY)

        return run_steps(module, step, rank, given)


def zero_options(given):
    """Pinned buffers and reads and writes beside the update, as the documentation of ZeRO-Infinity recommends. The
    buffers are for weights, gradients and two states of what is read, updated and written."""
    offload = dict(device="nvme", nvme_path=given.folder, pin_memory=True, pipeline_read=True, pipeline_write=True,
                   buffer_count=3 * 4)
    adamw = {"lr": rate_of(given), "betas": list(BETAS), "eps": EPSILON, "weight_decay": DECAY}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": given.max_norm,
        "optimizer": {"type": "AdamW", "params": adamw},
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "sub_group_size": given.sub_group},
        "aio": json.loads(given.aio),
    }


def train_zero(rank, given):
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    options = zero_options(given)
    with deepspeed.zero.Init(config_dict_or_path=options):
        module = build(given.layers, given.width)
    engine = deepspeed.initialize(model=module, config=options)[0]

    def step(loss):
        engine.backward(loss)
        engine.step()

    used = type(engine.optimizer.optimizer).__name__
    if used != "DeepSpeedCPUAdam":
        raise RuntimeError(f"rank {rank}: DeepSpeed steps by {used}, and DeepSpeedCPUAdam was to be measured")
    return run_steps(engine, step, rank, given)


def rank_main(given):
    import torch

    torch.set_num_threads(1)
    result = (train_zero if given.kind == "zero" else train_libfsdp)(given.rank, given)
    print("\n" + json.dumps(result), flush=True)


# -- runs -----------------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def reason_to_skip_zero():
    """None, or why this machine cannot run ZeRO-Infinity."""
    script = ("import deepspeed; from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load(); "
              "from deepspeed.ops.adam import DeepSpeedCPUAdam")
    found = subprocess.run([sys.executable, "-c", script], env=dict(os.environ, DS_ACCELERATOR="cpu"),
                           capture_output=True, text=True)
    return None if found.returncode == 0 else (found.stderr.strip().splitlines() or ["no message"])[-1]


def start_rank(kind, rank, folder, port):
    environment = dict(os.environ, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_SIZE=str(RANKS),
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    output, log = (open(f"{folder}.{kind}.{rank}.{name}", "w+") for name in ("out", "log"))
    command = [sys.executable, *sys.argv, "--rank", str(rank), "--kind", kind, "--folder", folder]
    return subprocess.Popen(command, stdout=output, stderr=log, env=environment), output, log


def wait_for(ranks):
    """Waits until all have ended. Returns the first that failed, after it has ended the others, or None."""
    while True:
        states = [process.poll() for process, _, _ in ranks]
        failed = next((rank for rank, state in enumerate(states) if state), None)
        if failed is not None or None not in states:
            break
        time.sleep(0.05)
    for process, _, _ in ranks:
        process.kill()
        process.wait()
    return failed


def text_of(file):
    file.seek(0)
    return file.read().strip()


def launch(kind, place):
    """What each rank has measured."""
    folder, port = f"{place}/{kind}", free_port()
    os.makedirs(folder)
    ranks = [start_rank(kind, rank, folder, port) for rank in range(RANKS)]
    failed = wait_for(ranks)
    shutil.rmtree(folder)
    if failed is not None:
        sys.exit(f"{kind}: rank {failed} failed with status {ranks[failed][0].returncode}:\n"
                 + "\n".join(text_of(ranks[failed][2]).splitlines()[-20:]))
    return [json.loads(text_of(output).splitlines()[-1]) for _, output, _ in ranks]


def losses_of(found):
    return [loss for rank in found[0] for loss in rank["losses"]]


def median(found, key):
    return statistics.median(rank[key] for ranks in found for rank in ranks)


def row(kind, found):
    files = statistics.median(sum(rank["files"] for rank in ranks) for ranks in found)
    losses = found[0][0]["losses"]
    return (f"{kind:7}{median(found, 'seconds'):9.3f}{median(found, 'peak') / 2**20:11.0f}{files / 2**20:11.0f}"
            f"{median(found, 'read') / 2**20:11.0f}{median(found, 'written') / 2**20:11.0f}"
            f"  {losses[0]:.6f} to {losses[-1]:.6f}")


def compare(found):
    """Prints what must hold between the kinds. Returns the exit status."""
    status = 0
    if "memory" in found:
        is_same = losses_of(found["file"]) == losses_of(found["memory"])
        print(f"losses of file and memory are {'the same bits' if is_same else 'NOT the same bits'}")
        status |= not is_same
    if "zero" in found:
        apart = max(abs(a - b) / b for a, b in zip(losses_of(found["file"]), losses_of(found["zero"])))
        print(f"losses of file and zero differ by {apart:.1e} of the loss (at most {NOISE} is noise)")
        ratio = median(found["zero"], "seconds") / median(found["file"], "seconds")
        print(f"a step of zero takes {ratio:.2f} of the time of file")
        status |= not apart <= NOISE
    return int(status)


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="a folder on the disk to measure")
    for name, usual in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--sub-group", type=int, default=2**24, help="elements that DeepSpeed updates at once")
    parser.add_argument("--max-norm", type=float, default=1.0, help="0: gradients are not clipped")
    parser.add_argument("--aio", default=json.dumps(AIO), help="DeepSpeed's options of async_io")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS))
    for name in ("rank", "kind", "folder"):
        parser.add_argument(f"--{name}", type=int if name == "rank" else str, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if "file" not in given.kinds or not set(given.kinds) <= set(KINDS):
        parser.error(f"--kinds is {','.join(given.kinds)}: give file, and zero or memory beside it")
    if given.steps < 1 or given.rounds < 1:
        parser.error(f"--steps is {given.steps} and --rounds {given.rounds}: both must be at least 1")
    return given


def main():
    given = read_arguments()
    if given.rank is not None:
        return rank_main(given)
    found, reason = {}, reason_to_skip_zero() if "zero" in given.kinds else None
    kinds = [kind for kind in given.kinds if kind != "zero" or reason is None]
    with tempfile.TemporaryDirectory(dir=given.directory, prefix="zero-infinity-") as place:
        for _ in range(given.rounds):
            for kind in kinds:
                found.setdefault(kind, []).append(launch(kind, os.path.realpath(place)))
    millions = 8e-6 * given.layers * given.width**2
    print(f"{millions:.1f} million parameters, {RANKS} ranks, medians of {given.rounds} rounds")
    print("           s/step  peak MiB  files MiB   read MiB  written MiB of a step; losses of rank 0")
    for kind in kinds:
        print(row(kind, found[kind]))
    if reason is not None:
        print(f"zero   skipped: {reason}")
    return compare(found)


if __name__ == "__main__":
    sys.exit(main())
