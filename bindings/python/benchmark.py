#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a visit of a group costs in Python: unshard, 12 views, reshard, in a world of one. usage: benchmark.py [--json]

Prints the median of 9 rounds of 20,000 visits in microseconds. The arrays are made once, since their addresses are fixed.
"""
import json
import statistics
import sys
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
    return {"visit_us": statistics.median(times) / VISITS * 1e6}


def main():
    with fsdp.Context(world_size=1, rendezvous="benchmark") as context:
        found = measure(context)
    print(json.dumps(found) if "--json" in sys.argv[1:] else f"unshard, 12 views, reshard: {found['visit_us']:.2f} us")


if __name__ == "__main__":
    main()
