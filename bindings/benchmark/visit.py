#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a visit of a group costs in Python: unshard, 12 views, reshard, in a world of one.

Prints nanoseconds, the median of 9 rounds of 20,000 visits. The arrays are made once, since their addresses are fixed,
and looked up by name at each visit; visit.c is the same in C.
"""

import statistics
import time

import libfsdp as fsdp

VISITS, ROUNDS = 20_000, 9


def visit(group, names):
    """A round, in seconds: all views are looked up by name."""
    began = time.perf_counter()
    for _ in range(VISITS):
        with group.unsharded() as weights:
            for name in names:
                weights[name]
    return time.perf_counter() - began


def measure(context):
    with context.create_model() as model:
        params = [fsdp.Param(f"w{n}", (64, 64)) for n in range(12)]
        group = model.create_group("layer", params)
        model.seal()
        model.publish_weights()
        visit(group, [param.name for param in params])
        times = [visit(group, [param.name for param in params]) for _ in range(ROUNDS)]
    return statistics.median(times) / VISITS * 1e9


if __name__ == "__main__":
    print(f"{fsdp.run_local(1, measure)[0]:.1f}")
