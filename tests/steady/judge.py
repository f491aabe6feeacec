#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Judges the steps of some runs of a program by the lines of hooks.c. usage: judge.py WHAT PROCESSES STEPS RUN...

RUN: a file with the lines of one run. WHAT: counts (no step allocates, maps, opens or starts anything), faults (none has
a page fault) or memory (the library has what it planned). Status 0: so it is; 1: it is not, and it says where; 3: these
runs do not show it, since the machine was too busy.

A wait for peers that lasts 100 ms is told to the others, which takes memory (circle_ms in lib/membership/liveness/watch.cpp,
longest_common in lib/device/host/progress.cpp), and what is run for the first time then is not in memory yet. No quick step,
in which none can have lasted so long, may count anything; a slow one may, but each step must have counted nothing in some run.
"""
import sys

QUICK_MS = 100
COUNTED = ("allocations", "frees", "maps", "descriptors", "threads", "open")
FAULTY_RUNS = 3  # the kernel may move a page on its own, and the process then faults on it, but once and not in each of
                 # these


def read(path):
    """A line is "steady_hooks:" and then names, each with its value."""
    steps = []
    for line in open(path, encoding="utf-8"):
        words = line.split()[1:]
        step = dict(zip(words[::2], words[1::2]))
        step.update({name: float(value) for name, value in step.items() if name != "rank"})
        steps.append(step)
    return steps


def place(step):
    return step["rank"], step["step"]


def is_quick(step):
    return step["ms"] < QUICK_MS


def never_without(runs, names):
    """Steps that have counted something in every run."""
    shown = {place(step) for run in runs for step in run if not any(step[name] for name in names)}
    never = {place(step) for step in runs[0]} - shown
    for rank, number in sorted(never):
        print(f"# step {number:g} of rank {rank}: not without {', '.join(names)} in {len(runs)} runs")
    return never


def tell(step):
    print("#", *(f"{name} {value:g}" if name != "rank" else f"rank {value}" for name, value in step.items()))


def judge_counts(runs):
    counted = [step for run in runs for step in run if is_quick(step) and any(step[name] for name in COUNTED)]
    for step in counted[:10]:
        tell(step)
    return 1 if counted else 3 if never_without(runs, COUNTED) else 0


def judge_faults(runs):
    faulted = [[step for step in run if is_quick(step) and step["faults"]] for run in runs]
    if all(faulted) and len(runs) >= FAULTY_RUNS:
        for step in sum(faulted, [])[:10]:
            tell(step)
        return 1
    return 3 if all(faulted) or never_without(runs, ["faults"]) else 0


def judge_memory(runs):
    wrong = [step for step in sum(runs, []) if not step["allocated"] == step["planned"] > 0]
    for step in wrong[:10]:
        tell(step)
    return 1 if wrong else 0


def main():
    what, processes, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    runs = [read(path) for path in sys.argv[4:]]
    for run in runs:
        if len(set(map(place, run))) != processes * steps or len(run) != processes * steps:
            print(f"# {len(run)} steps, not {steps} of each of {processes} processes")
            return 1
    return {"counts": judge_counts, "faults": judge_faults, "memory": judge_memory}[what](runs)


if __name__ == "__main__":
    sys.exit(main())
