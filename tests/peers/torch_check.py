# SPDX-License-Identifier: Apache-2.0
"""What the checks of libfsdp.torch share: reports in the Test Anything Protocol, modes, and torch's side of a comparison."""

import argparse
import contextlib
import copy
import os

import torch

import libfsdp as fsdp
import libfsdp.torch

MODES = ("mapped", "copied", "debug")


def read_options():
    """The arguments of a check: one mode or all, and words that a case must have in its name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("words", nargs="*")
    torch.set_num_threads(1)
    options = parser.parse_args()
    options.modes = [options.mode] if options.mode else MODES
    return options


class Report:
    def __init__(self):
        self.number = self.failed = 0

    def case(self, name, passed, told=""):
        self.number += 1
        self.failed += not passed
        print(f"{'ok' if passed else 'not ok'} {self.number} - {name}{f' # {told}' if told else ''}", flush=True)

    def run(self, name, function):
        """function returns True, or what is wrong."""
        try:
            found = function()
        except Exception as error:
            found = f"{type(error).__name__}: {str(error)[:500]}"
        self.case(name, found is True, "" if found is True else found)

    def end(self):
        print(f"1..{self.number}")
        return 1 if self.failed else 0


def run_cases(cases):
    """Runs (name, function) of cases(mode) for the modes and words of the arguments. Returns the exit status."""
    options, report = read_options(), Report()
    for mode in options.modes:
        for name, function in cases(mode):
            if all(word in name for word in options.words):
                report.run(name, function)
    return report.end()


def options_of(mode, world_size):
    """Options of shard(), so that copied weights are copied on one rank, too."""
    if mode != "copied":
        return {}
    alone = {"flags": fsdp.ModelFlag.FORCE_COMMUNICATION} if world_size == 1 else {}
    return {"unshard_mode": fsdp.UnshardMode.COPIED, **alone}


@contextlib.contextmanager
def mode_set(mode):
    before = os.environ.get("FSDP_DEBUG")
    os.environ["FSDP_DEBUG"] = "1" if mode == "debug" else "0"
    try:
        yield
    finally:
        os.environ.pop("FSDP_DEBUG") if before is None else os.environ.update(FSDP_DEBUG=before)


def on_ranks(world_size, mode, function, **options):
    """function(context, shard) on each rank, where shard(module) shards in the mode. Returns what the ranks return."""
    with mode_set(mode):
        made = {**options_of(mode, world_size), **options}

        def rank(context):
            return function(context, lambda module, **more: libfsdp.torch.shard(module, context, **{**made, **more}))

        return fsdp.run_local(world_size, rank)


class AdamW:
    """The library's formulas for torch alone: fp32, one number of steps for all parameters, and what has no gradient
    stays."""

    def __init__(self, params, rate, epsilon=1e-8):
        self.params, self.rate, self.epsilon, self.number = list(params), rate, epsilon, 0
        self.main = {param: param.detach().float().clone() for param in self.params}
        self.moments = {param: (torch.zeros_like(main), torch.zeros_like(main)) for param, main in self.main.items()}

    @torch.no_grad()
    def step(self, factor=1.0):
        self.number += 1
        for param in self.params:
            if param.grad is None:
                continue
            grad, (m, v) = param.grad.float() * factor, self.moments[param]
            m.mul_(0.9).add_(grad, alpha=0.1)
            v.mul_(0.999).addcmul_(grad, grad, value=0.001)
            change = (m / (1 - 0.9**self.number)) / ((v / (1 - 0.999**self.number)).sqrt() + self.epsilon)
            param.copy_(self.main[param].sub_(self.rate * change))
            param.grad = None


def train_alone(module, step_of, steps, rate, epsilon=1e-8, ranks=1):
    """step_of(module, step, rank) runs the passes of one step and returns its loss. Gradients are the ranks' mean."""
    module = copy.deepcopy(module)
    optimizer, losses = AdamW((p for p in module.parameters() if p.requires_grad), rate, epsilon), []
    for step in range(steps):
        losses += [float(step_of(module, step, rank)) for rank in range(ranks)]
        optimizer.step(1 / ranks)
    return losses, {name: optimizer.main.get(param, param.detach()) for name, param in module.named_parameters()}


def train_sharded(module, step_of, steps, rate, mode, epsilon=1e-8, ranks=1, **options):
    def rank(context, shard):
        mine, losses = copy.deepcopy(module), []
        sharded = shard(mine)
        for step in range(steps):
            losses.append(float(step_of(mine, step, context.rank)))
            sharded.step(rate, epsilon=epsilon)
        return losses, sharded.full_state_dict()

    results = on_ranks(ranks, mode, rank, **options)
    return [loss for losses in zip(*(losses for losses, _ in results)) for loss in losses], results[0][1]


def difference(found, wanted):
    """The largest difference of two rows of numbers or tensors, relative to numbers above 1; infinite for NaN."""
    worst = 0.0
    for a, b in zip(found, wanted):
        a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
        worst = max(worst, ((a - b).abs() / b.abs().clamp(min=1)).max().item())
    return worst if worst == worst else float("inf")


def compare(module, step_of, steps, rate, mode, epsilon=1e-8, ranks=1, loss=1e-5, weight=1e-4, **options):
    """"" if the module trains sharded as it does alone, else what differs."""
    losses, weights = train_alone(module, step_of, steps, rate, epsilon, ranks)
    try:
        found_losses, found = train_sharded(module, step_of, steps, rate, mode, epsilon, ranks, **options)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:500]}"
    by_loss = difference(found_losses, losses)
    by_weight = difference([found[name] for name in weights], weights.values())
    if by_loss < loss and by_weight < weight:
        return ""
    return f"losses differ by {by_loss:.1e}, weights by {by_weight:.1e}"


def message_of(function):
    """The exception that it raises, as text; "" if none."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def raises(function, *words):
    """True if it raises an exception that has all of the words and no name of C, else what it does."""
    text = message_of(function)
    if not text:
        return "no exception"
    return (all(word in text for word in words) and "fsdp_" not in text.lower()) or text
