# SPDX-License-Identifier: Apache-2.0
"""train_gpt of libfsdp beside PyTorch FSDP2, DeepSpeed ZeRO-3 and PyTorch alone on one machine: the same GPT, the same
weights and rows.

usage: compare.py --build BUILD [--tokens] [--layers N] [--width N] [--heads N] [--batch N] [--steps N] [--rounds N]
           [--json FILE]

All take turns. Three of them train on 2 ranks of one thread each, and PyTorch alone in one process of two threads with
the whole batch. Tokens/s are those of all steps but the first few.

A round also measures the compute of train_gpt and of PyTorch alone: two processes at once, so that the machine is as
busy, each with the rows of a rank but without sharding and without a peer. Subtracted are
  compute    forward and backward passes, as the processes alone measured them
  AdamW      clipping and AdamW of the process alone, which has the whole state, halved: each of 2 ranks has half of it
What remains of a step is what sharding costs: gathers, reductions, waiting for the other rank, bookkeeping. --tokens
leaves this out, and memory.

The run fails if the models have different numbers of parameters, or if the losses differ. Without DeepSpeed, it is left
out, with the reason.
"""
import argparse
import contextlib
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
BYTES_OF_PARAMETER = 16  # fp32: weight, gradient and the two states of AdamW
LOSS_TOLERANCE = 1e-3  # fp32 sums are added in another order, and the difference grows over tens of steps
EXIT_SKIPPED = 77
MATH = re.compile(r"(forward|backward) |loss$|load rows$")
SHARDED = {"libfsdp": "libfsdp", "fsdp2": "FSDP2", "zero3": "ZeRO-3"}
# DeepSpeed compiles its operators when they are loaded for the first time.
LOAD_DEEPSPEED = """import deepspeed
from deepspeed.accelerator import get_accelerator
for name in ("FusedAdamBuilder", "ShareMemCommBuilder"):
    get_accelerator().create_op_builder(name).load()
print(deepspeed.__version__)"""


def check_torch():
    try:
        import torch
        from torch.distributed.fsdp import fully_shard  # noqa: F401: from 2.6 on
    except ImportError as error:
        print(f"skipped: PyTorch 2.6 or newer is needed ({error})")
        sys.exit(EXIT_SKIPPED)
    return torch.__version__.split("+")[0]


def make_environment(threads=1):
    """Of every run. Tensors of PyTorch stay in the host's memory also where there is a GPU; programs in the folder of
    Python are found (ninja, by which DeepSpeed compiles)."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return dict(os.environ, OMP_NUM_THREADS=str(threads), OPENBLAS_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
                DS_ACCELERATOR="cpu", LOCAL_SIZE=str(RANKS), PATH=path)


def find_deepspeed():
    """Its version, or None, with the reason printed."""
    found = subprocess.run([sys.executable, "-c", LOAD_DEEPSPEED], env=make_environment(), capture_output=True,
                           text=True, check=False)
    if found.returncode == 0:
        return found.stdout.split()[-1]
    print(f"DeepSpeed ZeRO-3 is skipped: {(found.stderr.strip().splitlines() or ['no message'])[-1]}", flush=True)
    return None


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path, required=True)
    for name, default in (("layers", 4), ("width", 320), ("heads", 5), ("context", 128), ("batch", 16), ("steps", 30),
                          ("rounds", 3)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--wait", type=int, default=0, help="seconds to wait before each run for an idle machine")
    parser.add_argument("--strategy", default="optim_grads_params", help="of libfsdp; FSDP2's is optim_grads_params")
    parser.add_argument("--tokens", action="store_true", help="measure tokens/s only")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.batch % RANKS or args.steps <= SKIPPED_STEPS:
        parser.error(f"--batch must be even and --steps more than {SKIPPED_STEPS}")
    return args


class Bench:
    """The runs; each returns a list of seconds, step by step."""

    def __init__(self, args, work):
        self.args, self.work = args, work
        self.launcher = [str(args.build / "tools/fsdp-run"), "-n", str(RANKS), "--no-prefix"]
        # All runs read one file, which is made from the current sources.
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

    def run(self, commands, threads=1):
        wait_until_idle(self.args.wait)
        running = [subprocess.Popen(c, env=make_environment(threads), stdout=subprocess.DEVNULL) for c in commands]
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit(f"failed with {codes}: {' '.join(commands[0])}")

    def sharded(self, kind, out):
        """The command of a training on all ranks."""
        if kind == "libfsdp":
            return self.launcher + self.ours(self.args.batch, out)
        return self.launcher + self.theirs(self.args.batch, out, "--kind", kind)

    def training(self, kind):
        out = self.work / f"{kind}.json"
        if kind == "torch":
            self.run([self.theirs(self.args.batch, out, "--kind", "plain", "--threads", str(RANKS))], RANKS)
        else:
            self.run([self.sharded(kind, out)])
        read = self.read_ours if kind == "libfsdp" else self.read_theirs
        losses, parameters, seconds = read(out)
        tokens = self.args.batch * self.args.context * len(seconds)
        return {"losses": losses, "parameters": parameters, "step": seconds, "tokens_per_s": tokens / sum(seconds)}

    def read_ours(self, out):
        *lines, last = [json.loads(line) for line in out.read_text().splitlines()]
        tokens = self.args.batch * self.args.context
        return ([line["loss"] for line in lines], last["unsharded_bytes"] // BYTES_OF_PARAMETER,
                [tokens / line["tokens_per_s"] for line in lines[SKIPPED_STEPS:]])

    def read_theirs(self, out):
        found = json.loads(out.read_text())
        return ([step["loss"] for step in found["steps"]], found["parameters"],
                [step["seconds"] for step in found["steps"][SKIPPED_STEPS:]])

    def ours_alone(self):
        traces = [self.work / f"trace{i}.json" for i in range(RANKS)]
        self.run([self.ours(self.args.batch // RANKS, self.work / f"alone{i}.json", "--trace", str(trace))
                  for i, trace in enumerate(traces)])
        return self.collect([read_trace(trace) for trace in traces])

    def theirs_alone(self):
        outs = [self.work / f"alone{i}.json" for i in range(RANKS)]
        self.run([self.theirs(self.args.batch // RANKS, out, "--kind", "plain") for out in outs])
        return self.collect([json.loads(out.read_text())["steps"] for out in outs])

    @staticmethod
    def collect(processes):
        return {key: [step[key] for steps in processes for step in steps[SKIPPED_STEPS:]]
                for key in ("compute", "optimizer")}

    def memory(self, kind):
        """Makes a separate run, and measures the ranks' largest resident size and the largest sum of proportional
        sizes."""
        command = self.sharded(kind, self.work / "memory.json")
        running = subprocess.Popen(command, env=make_environment(), stdout=subprocess.DEVNULL)
        peaks, sizes = {}, []
        while running.poll() is None:
            ranks = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
            found = [read_memory(pid) for pid in ranks]
            if len(found) == RANKS and all(found):
                sizes.append(sum(size for _, size in found))
                peaks.update((pid, peak) for pid, (peak, _) in zip(ranks, found))
            time.sleep(0.2)
        return {"peak_rss_mib": max(peaks.values()) / 1024, "sum_pss_mib": max(sizes) / 1024}


@contextlib.contextmanager
def without_leftovers():
    """Removes the memory that DeepSpeed's operator for communication shares between ranks and leaves behind."""
    def found():
        return set(Path("/dev/shm").glob("deepspeed_allreduce_buffer_*"))
    before = found()
    try:
        yield
    finally:
        for path in found() - before:
            path.unlink(missing_ok=True)


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


def print_tokens(trainings):
    print(f"\n{'tokens/s: least, median, most':55} {'':27} {'libfsdp beside it':>27}")
    for one in trainings:
        cells = ("".join(f"{form(value):>9}" for value in (min(some), median(some), max(some))) if some else "-"
                 for some, form in ((one["tokens_per_s"], "{:.0f}".format), (one["ratio"], "{:.2f}".format)))
        print(f"{one['title']:55} {next(cells):>27} {next(cells):>27}")


def print_columns(head, rows, value, kinds):
    """A column for each kind, with libfsdp's value divided by that of each other kind."""
    print(f"\n{head:34} {'libfsdp':>10}" + "".join(f" {SHARDED[kind]:>10} {'ratio':>8}" for kind in kinds[1:]))
    for label, key in rows:
        ours, *others = (value(kind, key) for kind in kinds)
        print(f"{label:34} {ours:10.2f}" + "".join(f" {other:10.2f} {ours / other:8.3f}" for other in others))


def print_costs(result, kinds):
    print_columns("ms, medians", (("step", "step_s"), ("forward and backward alone", "compute_s"),
                                  ("clip and AdamW alone, halved", "optimizer_half_s"),
                                  ("step - compute", "beyond_compute_s"),
                                  ("step - compute - AdamW", "beyond_compute_and_optimizer_s")),
                  lambda kind, key: 1e3 * result[kind]["median"][key], kinds)
    print_columns("MiB", (("peak resident, largest rank", "peak_rss_mib"),
                          ("proportional, both ranks", "sum_pss_mib")),
                  lambda kind, key: result[kind]["memory"][key], kinds)


def make_titles(torch, deepspeed):
    ranks = f"{RANKS} ranks of 1 thread"
    return {"libfsdp": f"train_gpt of libfsdp, {ranks}", "fsdp2": f"PyTorch {torch} FSDP2 over gloo, {ranks}",
            "zero3": f"DeepSpeed {deepspeed or ''} ZeRO-3 over gloo, {ranks}".replace("  ", " "),
            "torch": f"PyTorch {torch} alone, 1 process of {RANKS} threads"}


def collect_trainings(rounds, titles):
    """For each kind, tokens/s of all rounds, and how many times as many libfsdp has; empty lists if it was skipped."""
    trainings = []
    for kind, title in titles.items():
        speeds = [taken[kind]["tokens_per_s"] for taken in rounds if kind in taken]
        ratios = [taken["libfsdp"]["tokens_per_s"] / taken[kind]["tokens_per_s"] for taken in rounds
                  if kind in taken and kind != "libfsdp"]
        trainings.append({"kind": kind, "title": title, "tokens_per_s": speeds, "ratio": ratios})
    return trainings


def measure(bench, number, kinds):
    """A round: what each kind has found."""
    taken = {kind: bench.training(kind) for kind in kinds}
    if not bench.args.tokens:
        alone = {"libfsdp": bench.ours_alone(), "torch": bench.theirs_alone()}
        for kind in kinds:
            taken[kind].update(alone["libfsdp" if kind == "libfsdp" else "torch"])
    speeds = ", ".join(f"{kind} {taken[kind]['tokens_per_s']:.0f}" for kind in kinds)
    print(f"round {number + 1}/{bench.args.rounds}: tokens/s {speeds}; load {os.getloadavg()[0]:.1f}", flush=True)
    return taken


def check(rounds):
    """The largest relative difference of losses. Ends the program if the trainings were not the same."""
    counts = {kind: found["parameters"] for kind, found in rounds[0].items()}
    if len(set(counts.values())) != 1:
        sys.exit(f"numbers of parameters differ: {counts}")
    largest = max(difference(taken["libfsdp"]["losses"], found["losses"]) for taken in rounds
                  for found in taken.values())
    print(f"\nlosses of {len(rounds[0]['libfsdp']['losses'])} steps: largest relative difference {largest:.2e}")
    if not largest <= LOSS_TOLERANCE:
        sys.exit(f"the losses differ by more than {LOSS_TOLERANCE}: not the same training")
    return largest


def main():
    torch, args = check_torch(), parse()
    deepspeed = find_deepspeed()
    titles = make_titles(torch, deepspeed)
    kinds = [kind for kind in titles if kind != "zero3" or deepspeed]
    sharded = [kind for kind in kinds if kind in SHARDED]
    with tempfile.TemporaryDirectory() as folder, without_leftovers():
        bench = Bench(args, Path(folder))
        rounds = [measure(bench, number, kinds) for number in range(args.rounds)]
        memory = {} if args.tokens else {kind: bench.memory(kind) for kind in sharded}
    model = {key: getattr(args, key) for key in ("layers", "width", "heads", "context", "batch")}
    result = {"torch": torch, "deepspeed": deepspeed, "model": model, "ranks": RANKS, "steps": args.steps,
              "parameters": rounds[0]["libfsdp"]["parameters"], "strategy": args.strategy,
              "trainings": collect_trainings(rounds, titles)}
    print(f"\n{result['parameters'] / 1e6:.2f} M parameters, {args.batch} x {args.context} tokens a step, "
          f"{args.strategy}")
    print_tokens(result["trainings"])
    if not args.tokens:
        for kind in sharded:
            found = [taken[kind] for taken in rounds]
            result[kind] = {"median": summarize(found), "memory": memory[kind], "rounds": found}
        print_costs(result, sharded)
    result["loss_difference"] = check(rounds)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
