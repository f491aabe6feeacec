# SPDX-License-Identifier: Apache-2.0
"""What the checks of libfsdp.jax share: cases on ranks that are threads, reported in the Test Anything Protocol."""

import sys
import tempfile

import jax
import numpy as np
from jax_shard import batch

import libfsdp as fsdp


class Cases:
    """Functions of a context that return True, or what is wrong, on every rank."""

    def __init__(self, skip=lambda name: None):
        self.cases, self.skip = [], skip

    def __call__(self, function):
        self.add(function.__name__.replace("_", " "), function)
        return function

    def add(self, name, function, world_size=2):
        self.cases.append((name, lambda: on_ranks(function, world_size)))

    def add_alone(self, name, function):
        """A case that starts its ranks itself. function(folder)"""

        def run():
            with tempfile.TemporaryDirectory() as folder:
                return function(folder)

        self.cases.append((name, run))

    def run(self):
        """Runs the cases whose names have all words of the command line. Returns how many have failed."""
        chosen = [(name, run) for name, run in self.cases if all(word in name for word in sys.argv[1:])]
        failed = sum(self._report(number, name, run) for number, (name, run) in enumerate(chosen, 1))
        print(f"1..{len(chosen)}")
        return failed

    def _report(self, number, name, run):
        if reason := self.skip(name):
            print(f"ok {number} - {name} # SKIP {reason}")
            return False
        try:
            found = run()
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:500]}"
        told = "" if found is True else f" # {found}"
        print(f"{'ok' if found is True else 'not ok'} {number} - {name}{told}", flush=True)
        return found is not True


def on_ranks(function, world_size):
    """What function(context) returns on rank 0; all ranks must return the same."""
    results = fsdp.run_local(world_size, function)
    return results[0] if all(result == results[0] for result in results) else f"ranks differ: {results}"


def raises(function, *words):
    """True, or what was raised in place of an error with all of these words."""
    try:
        function()
    except Exception as error:
        text = str(error)
        return True if all(word in text for word in words) else f"{type(error).__name__}: {text}"
    return "nothing was raised"


def differ(found, wanted):
    """The largest difference of two trees of numbers."""
    leaves = [[np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(tree)] for tree in (found, wanted)]
    return max(float(np.abs(a - b).max()) for a, b in zip(*leaves, strict=True))


def part(context, step):
    """This rank's rows of a batch."""
    return [rows[context.rank :: context.world_size] for rows in batch(step)]


def meet(context):
    context.all_reduce_values(0.0, fsdp.ValueOp.MAX)


class shared_folder:
    """A folder that rank 0 makes. Ranks are threads of one process."""

    made = {}

    def __init__(self, context):
        self.context = context

    def __enter__(self):
        if self.context.rank == 0:
            self.made[0] = tempfile.TemporaryDirectory()
        meet(self.context)
        return self.made[0].name

    def __exit__(self, *_):
        meet(self.context)
        if self.context.rank == 0:
            self.made.pop(0).cleanup()
