# SPDX-License-Identifier: Apache-2.0
"""libfsdp against PyTorch FSDP2 on one machine: the same GPT, the same weights and rows, 2 ranks of one thread each.

usage: compare.py --build BUILD [--layers N] [--width N] [--heads N] [--batch N] [--steps N] [--rounds N] [--json FILE]

Both take turns. Each round of each has two runs: the training on 2 ranks, and its compute alone: two processes at once,
so that the machine is as busy, each with the same rows per step but without sharding and without a peer. Subtracted are
  compute    forward and backward passes, as the processes alone measured them
  AdamW      clipping and AdamW of the process alone, which has the whole state, halved: each of 2 ranks has half of it
What remains of a step is what sharding costs: gathers, reductions, waiting for the other rank, bookkeeping.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
RANKS, SKIPPED_STEPS = 2, 3
LOSS_TOLERANCE = 1e-3  # fp32 sums are added in another order, and the difference grows over tens of steps
EXIT_SKIPPED = 77
MATH = re.compile(r"(forward|backward) |loss$|load rows$")


def check_torch():
    try:
        import torch
        from torch.distributed.fsdp import fully_shard  # noqa: F401: from 2.6 on
    except ImportError as error:
        print(f"skipped: PyTorch 2.6 or newer is needed ({error})")
        sys.exit(EXIT_SKIPPED)
    return torch.__version__


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path, required=True)
    for name, default in (("layers", 4), ("width", 320), ("heads", 5), ("context", 128), ("batch", 16), ("steps", 30),
                          ("rounds", 3)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--wait", type=int, default=0, help="seconds to wait before each run for an idle machine")
    parser.add_argument("--strategy", default="optim_grads_params", help="of libfsdp; FSDP2's is optim_grads_params")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.batch % RANKS or args.steps <= SKIPPED_STEPS:
        parser.error(f"--batch must be even and --steps more than {SKIPPED_STEPS}")
    return args


class Bench:
    """The four runs; each returns a list of seconds, step by step."""

    def __init__(self, args, work):
        self.args, self.work = args, work
        self.launcher = [str(args.build / "tools/fsdp-run"), "-n", str(RANKS), "--no-prefix"]
        # Both runs read one file, which is made from the current sources.
        self.corpus = work / "corpus.txt"
        sources = sorted((ROOT / "docs").rglob("*.md")) + sorted((ROOT / "lib").rglob("*.cpp"))
        self.corpus.write_bytes(b"".join(path.read_bytes() for path in sources))

    def flags(self, batch):
        args = self.args
        model = [word for name in ("layers", "width", "heads", "context", "steps")
                 for word in ("--" + name, str(getattr(args, name)))]
        return model + ["--batch", str(batch), "--corpus", str(self.corpus)]

    def ours(self, batch, out, *more):
        return [str(self.args.build / "examples/train_gpt"), *self.flags(batch), "--quiet", "--strategy",
                self.args.strategy, "--json", str(out), *more]

    def theirs(self, batch, out, *more):
        return [sys.executable, str(HERE / "train.py"), *self.flags(batch), "--json", str(out), *more]

    def run(self, commands):
        wait_until_idle(self.args.wait)
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        running = [subprocess.Popen(c, env=environment, stdout=subprocess.DEVNULL) for c in commands]
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit(f"failed with {codes}: {' '.join(commands[0])}")

    def ours_sharded(self):
        out = self.work / "ours.json"
        self.run([self.launcher + self.ours(self.args.batch, out)])
        lines = [json.loads(line) for line in out.read_text().splitlines()][:-1]
        tokens = self.args.batch * self.args.context
        return {"losses": [line["loss"] for line in lines],
                "step": [tokens / line["tokens_per_s"] for line in lines[SKIPPED_STEPS:]]}

    def theirs_sharded(self):
        out = self.work / "theirs.json"
        self.run([self.launcher + self.theirs(self.args.batch, out)])
        found = json.loads(out.read_text())
        return {"losses": [step["loss"] for step in found["steps"]], "parameters": found["parameters"],
                "step": [step["seconds"] for step in found["steps"][SKIPPED_STEPS:]]}

    def ours_alone(self):
        traces = [self.work / f"trace{i}.json" for i in range(RANKS)]
        self.run([self.ours(self.args.batch // RANKS, self.work / f"alone{i}.json", "--trace", str(trace))
                  for i, trace in enumerate(traces)])
        return self.collect([read_trace(trace) for trace in traces])

    def theirs_alone(self):
        outs = [self.work / f"alone{i}.json" for i in range(RANKS)]
        self.run([self.theirs(self.args.batch // RANKS, out, "--alone") for out in outs])
        return self.collect([json.loads(out.read_text())["steps"] for out in outs])

    @staticmethod
    def collect(processes):
        return {key: [step[key] for steps in processes for step in steps[SKIPPED_STEPS:]]
                for key in ("compute", "optimizer")}

    def memory(self, command):
        """Makes a separate run, and measures the ranks' largest resident size and the largest sum of proportional
        sizes."""
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
        running = subprocess.Popen(self.launcher + command, env=environment, stdout=subprocess.DEVNULL)
        peaks, sizes = {}, []
        while running.poll() is None:
            ranks = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
            found = [read_memory(pid) for pid in ranks]
            if len(found) == RANKS and all(found):
                sizes.append(sum(size for _, size in found))
                peaks.update((pid, peak) for pid, (peak, _) in zip(ranks, found))
            time.sleep(0.2)
        return {"peak_rss_mib": max(peaks.values()) / 1024, "sum_pss_mib": max(sizes) / 1024}


def read_idle():
    with open("/proc/stat", encoding="ascii") as file:
        times = [int(word) for word in file.readline().split()[1:9]]
    return times[3] + times[4], sum(times)


def wait_until_idle(seconds):
    """Returns after a second in which other programs used at most a tenth of the machine, or after the last attempt."""
    for _ in range(seconds):
        idle, total = read_idle()
        time.sleep(1)
        idle_now, total_now = read_idle()
        if idle_now - idle >= 0.9 * (total_now - total):
            return


def read_memory(pid):
    try:
        status, rollup = (Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "smaps_rollup"))
    except OSError:
        return None
    peak, size = re.search(r"VmHWM:\s*(\d+)", status), re.search(r"^Pss:\s*(\d+)", rollup, re.M)
    return (int(peak[1]), int(size[1])) if peak and size else None


def read_trace(path):
    """Of each step of a timeline: the seconds of the example's math, and those of clipping and AdamW."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    steps = []
    for step in (e for e in events if e["name"] == "step"):
        inside = [e for e in events if step["ts"] <= e["ts"] < step["ts"] + step["dur"]]
        steps.append({"compute": 1e-6 * sum(e["dur"] for e in inside if MATH.match(e["name"])),
                      "optimizer": 1e-6 * sum(e["dur"] for e in inside if e["name"] in ("clip_grads", "step_adamw"))})
    if not steps or not all(step["compute"] and step["optimizer"] for step in steps):
        sys.exit(f"{path.name}: a step without spans of the math or of AdamW; has train_gpt renamed them?")
    return steps


def summarize(rounds):
    """Medians within each round, differences within each round, and the medians of those over the rounds."""
    each = []
    for taken in rounds:
        step, compute, optimizer = (median(taken[key]) for key in ("step", "compute", "optimizer"))
        each.append({"step_s": step, "compute_s": compute, "optimizer_half_s": optimizer / RANKS,
                     "beyond_compute_s": step - compute,
                     "beyond_compute_and_optimizer_s": step - compute - optimizer / RANKS})
    return {key: median(one[key] for one in each) for key in each[0]}


def difference(ours, theirs):
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def print_table(result):
    rows = (("step", "step_s"), ("forward and backward alone", "compute_s"),
            ("clip and AdamW alone, halved", "optimizer_half_s"), ("step - compute", "beyond_compute_s"),
            ("step - compute - AdamW", "beyond_compute_and_optimizer_s"))
    ours, theirs = result["libfsdp"]["median"], result["fsdp2"]["median"]
    print(f"\n{'ms, medians':34} {'libfsdp':>10} {'FSDP2':>10} {'ratio':>8}")
    for label, key in rows:
        print(f"{label:34} {1e3 * ours[key]:10.2f} {1e3 * theirs[key]:10.2f} {ours[key] / theirs[key]:8.3f}")
    print(f"\n{'MiB':34} {'libfsdp':>10} {'FSDP2':>10} {'ratio':>8}")
    for label, key in (("peak resident, largest rank", "peak_rss_mib"), ("proportional, both ranks", "sum_pss_mib")):
        ours, theirs = (result[side]["memory"][key] for side in ("libfsdp", "fsdp2"))
        print(f"{label:34} {ours:10.1f} {theirs:10.1f} {ours / theirs:8.3f}")
    print(f"\nlosses of {result['steps']} steps: largest relative difference {result['loss_difference']:.2e}")


def main():
    version = check_torch()
    args = parse()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        ours, theirs = [], []
        for number in range(args.rounds):
            ours.append({**bench.ours_sharded(), **bench.ours_alone()})
            theirs.append({**bench.theirs_sharded(), **bench.theirs_alone()})
            steps = " and ".join(f"{1e3 * median(side[-1]['step']):.1f}" for side in (ours, theirs))
            print(f"round {number + 1}/{args.rounds}: step {steps} ms, load {os.getloadavg()[0]:.1f}", flush=True)
        memory = [bench.memory(command(args.batch, bench.work / "memory.json"))
                  for command in (bench.ours, bench.theirs)]
    model = {key: getattr(args, key) for key in ("layers", "width", "heads", "context", "batch")}
    result = {"torch": version, "model": model, "parameters": theirs[0]["parameters"], "ranks": RANKS,
              "steps": args.steps, "strategy": args.strategy,
              "loss_difference": max(difference(a["losses"], b["losses"]) for a, b in zip(ours, theirs))}
    for side, rounds, used in (("libfsdp", ours, memory[0]), ("fsdp2", theirs, memory[1])):
        result[side] = {"median": summarize(rounds), "memory": used, "rounds": rounds}
    print(f"\nPyTorch {version}, {result['parameters'] / 1e6:.2f} M parameters, {RANKS} ranks, {args.strategy}")
    print_table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if not result["loss_difference"] <= LOSS_TOLERANCE:
        sys.exit(f"the losses differ by more than {LOSS_TOLERANCE}: not the same training")


if __name__ == "__main__":
    main()
