# SPDX-License-Identifier: Apache-2.0
"""Compares the losses and gradient norms of two runs of train_gpt. usage: compare_runs.py [--tolerance X] A.json B.json

X is relative; 0 asks for the same bits, and of the weights too."""
import argparse
import json
import sys


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("a")
    parser.add_argument("b")
    options = parser.parse_args()
    a, b = ([json.loads(line) for line in open(name)] for name in (options.a, options.b))
    if len(a) != len(b) or len(a) < 3:
        sys.exit(f"{options.a} has {len(a)} lines, {options.b} {len(b)}")
    worst = 0.0
    for x, y in zip(a[:-1], b[:-1]):
        for key in ("loss", "grad_norm"):
            difference = abs(x[key] - y[key]) / max(abs(x[key]), 1e-30)
            if not difference <= options.tolerance:
                sys.exit(f"step {x['step']}: {key} {x[key]!r} and {y[key]!r}, {difference:.3g} apart")
            worst = max(worst, difference)
    if options.tolerance == 0 and a[-1]["weights_hash"] != b[-1]["weights_hash"]:
        sys.exit(f"weights {a[-1]['weights_hash']} and {b[-1]['weights_hash']}")
    if not a[-2]["loss"] < a[0]["loss"] - 0.3:
        sys.exit(f"the loss went from {a[0]['loss']} to {a[-2]['loss']}: nothing was learnt")
    print(f"largest relative difference {worst:.3g}")


if __name__ == "__main__":
    main()
