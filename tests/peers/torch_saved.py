#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""libfsdp.torch.shard with few buffers: what autograd saves, what checkpoints recompute, and what layers give out are the
right weights, also when the buffer that they were in has others.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_saved.py [--mode mapped|copied|debug] [WORD...]

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test Anything
Protocol.
"""

import copy
import functools
import sys

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)
from torch_check import Report, compare, on_ranks, raises, read_options

import libfsdp as fsdp

WIDTH, BATCH, RATE = 8, 4, 1e-2


def data_of(step, rank):
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return h + self.down(torch.tanh(self.up(h)))


class Recomputing(Block):
    def forward(self, h):
        return checkpoint(super().forward, h, use_reentrant=False)


class RecomputingReentrant(Block):
    def forward(self, h):
        return checkpoint(super().forward, h, use_reentrant=True)


class Calling(Block):
    """Between its first weight and its last its checkpoint runs other layers, side by side."""

    others = ()

    def forward(self, h):
        def run(h):
            return h + self.down(side_by_side(self.others, torch.tanh(self.up(h))))

        return checkpoint(run, h, use_reentrant=False)


class Layers(nn.Module):
    """run(layers, x) says what is made of the layers, and around(run, layers, x) in which checkpoint or hooks."""

    def __init__(self, run, around=lambda run, layers, x: run(layers, x), count=8, layer=Block):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(layer() for _ in range(count)), nn.Linear(WIDTH, WIDTH)
        self.run, self.around = run, around

    def forward(self, x):
        return self.head(self.around(self.run, self.layers, x))


def in_order(*order):
    def run(layers, x):
        for index in order or range(len(layers)):
            x = layers[index](x)
        return x

    return run


def side_by_side(layers, x):
    y = x
    for found in [layer(x) for layer in layers]:
        y = y * torch.tanh(found) + x
    return y


def crossed(layers, x):
    """Each layer of the second half looks at what the first half came to, with one of its layers."""
    half = len(layers) // 2
    seen = in_order(*range(half))(layers, x)
    for first, second in zip(layers[:half], layers[half:]):
        x = second(x) + second(seen) + first(x)
    return x


def in_halves(layers, x):
    """Two checkpoints, each of more layers than there are buffers, which share one."""
    half = checkpoint(in_order(0, 1, 2, 3, 4), layers, x, use_reentrant=False)
    return checkpoint(in_order(0, 5, 6, 7, 0), layers, half, use_reentrant=False)


def recomputed(run, layers, x):
    return checkpoint(run, layers, x, use_reentrant=False)


def recomputed_reentrant(run, layers, x):
    return checkpoint(run, layers, x, use_reentrant=True)


def in_segments(run, layers, x):
    return checkpoint_sequential(list(layers), 2, x, use_reentrant=False)


def hooked(run, layers, x):
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return run(layers, x)


def offloaded(run, layers, x):
    with save_on_cpu():
        return run(layers, x)


def recomputed_and_offloaded(run, layers, x):
    with save_on_cpu():
        return checkpoint(run, layers, x, use_reentrant=False)


def saves(*operations):
    """A selective checkpoint, which keeps what these operations came to; all of them: without any."""

    def choose(context, operation, *args, **kwargs):
        keeps = not operations or operation in operations
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, choose)


PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default


def recomputed_in_part(run, layers, x):
    return checkpoint(run, layers, x, use_reentrant=False, context_fn=saves(*PRODUCTS))


class RecomputingInPart(Block):
    def forward(self, h):
        return checkpoint(super().forward, h, use_reentrant=False, context_fn=saves())


class Table(nn.Module):
    """Gives out parts of its weights."""

    def __init__(self, part):
        super().__init__()
        self.weight, self.part = nn.Parameter(torch.randn(BATCH, WIDTH)), part

    def forward(self):
        return self.part(self.weight)


class Positions(nn.Module):
    """is_last: the module gives the part out, and the loss uses it."""

    def __init__(self, part, is_last=False):
        super().__init__()
        torch.manual_seed(0)
        self.tables, self.layers = nn.ModuleList([Table(part)]), nn.ModuleList(Block() for _ in range(6))
        self.own, self.is_last = nn.Parameter(torch.randn(BATCH, WIDTH)), is_last

    def forward(self, x):
        found = self.tables[0]()
        found = found["part"] if isinstance(found, dict) else found
        y = in_order()(self.layers, x) * found
        return (y, self.own[:1], found) if self.is_last else y + self.own[:1]


class Rotation(nn.Module):
    def __init__(self, is_conjugate):
        super().__init__()
        self.weight, self.is_conjugate = nn.Parameter(torch.randn(WIDTH)), is_conjugate

    def forward(self, x):
        turn = torch.view_as_complex(self.weight.reshape(-1, 2))
        z = torch.view_as_complex(x.reshape(BATCH, -1, 2))
        z = z * (turn.conj() if self.is_conjugate else turn)
        return torch.view_as_real(z).reshape(BATCH, WIDTH) * turn.conj().imag.sum()


class Rotated(Layers):
    def __init__(self, is_conjugate):
        super().__init__(in_order(), count=6)
        self.layers.insert(1, Rotation(is_conjugate))


class CallsOthers(Layers):
    def __init__(self):
        super().__init__(in_order(0, 1))
        self.layers[1] = Calling()

    def forward(self, x):
        self.layers[1].others = list(self.layers)[2:]
        return super().forward(x)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight.t())
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0].t(), None


class WithoutGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return NoGradient.apply(x, self.weight)


class Custom(Layers):
    """A function of the program's own saves a view of a weight, and has no gradient for it."""

    def __init__(self):
        super().__init__(in_order(), count=6)
        self.layers.insert(1, WithoutGradient())


# -- steps ------------------------------------------------------------------------------------------------------------


def loss_of(module, x):
    found = module(x)
    if isinstance(found, tuple):
        found = found[0] * found[1] + found[2]
    return found.pow(2).mean()


def one(module, step, rank):
    loss = loss_of(module, data_of(step, rank).requires_grad_())
    loss.backward()
    return loss.detach()


def two(module, step, rank):
    loss = loss_of(module, data_of(step, rank)) * loss_of(module, data_of(step, rank) + 1)
    loss.backward()
    return loss.detach()


def around_all(around):
    def step_of(module, step, rank):
        loss = around(lambda module, x: module(x), module, data_of(step, rank).requires_grad_()).pow(2).mean()
        loss.backward()
        return loss.detach()

    return step_of


def inference_first(module, step, rank):
    with torch.inference_mode():
        seen = float(loss_of(module, data_of(step, rank)))
    return one(module, step, rank) + seen


def grads_after_a_pass(module, step, rank):
    """autograd.grad looks at parameters whose gradients the library has."""
    loss = one(module, step, rank)
    grads = torch.autograd.grad(loss_of(module, data_of(step, rank)), list(module.parameters()), allow_unused=True)
    return loss + one(module, step + 7, rank) + sum(float(grad.sum()) for grad in grads if grad is not None)


ORDERS = ((0, 1, 2, 3, 4, 5, 0, 6, 7), (0, 1, 2, 0, 3, 4, 5, 1, 6), (7, 0, 1, 2, 3, 4, 5, 6, 7, 3, 3, 1))
CASES = {
    "a checkpoint over all layers": (lambda: Layers(in_order(), recomputed), one),
    "a reentrant checkpoint over all layers": (lambda: Layers(in_order(), recomputed_reentrant), one),
    **{
        f"a checkpoint over layers {order}": (lambda order=order: Layers(in_order(*order), recomputed), one)
        for order in ORDERS
    },
    "a reentrant checkpoint, layers again": (lambda: Layers(in_order(*ORDERS[1]), recomputed_reentrant), one),
    "a checkpoint over layers side by side": (lambda: Layers(side_by_side, recomputed), one),
    "a checkpoint over crossed layers": (lambda: Layers(crossed, recomputed), one),
    "two checkpoints that share a layer": (lambda: Layers(in_halves), one),
    "checkpoints of segments": (lambda: Layers(None, in_segments, count=11), one),
    "checkpoints inside of layers side by side": (lambda: Layers(side_by_side, layer=Recomputing), one),
    "reentrant ones inside of layers side by side": (lambda: Layers(side_by_side, layer=RecomputingReentrant), one),
    "a checkpoint inside of layers in one": (lambda: Layers(in_order(*ORDERS[0]), recomputed, layer=Recomputing), one),
    "a selective checkpoint": (lambda: Layers(in_order(*ORDERS[0]), recomputed_in_part), one),
    "selective checkpoints inside of layers": (lambda: Layers(in_order(), layer=RecomputingInPart), one),
    "a checkpoint inside of a layer that calls others": (CallsOthers, one),
    "a checkpoint, two forwards": (lambda: Layers(in_order(*ORDERS[0]), recomputed), two),
    "a checkpoint around the module": (lambda: Layers(in_order(*ORDERS[0])), around_all(recomputed)),
    "hooks of the program": (lambda: Layers(in_order(), hooked), one),
    "hooks of the program around the module": (lambda: Layers(in_order()), around_all(hooked)),
    "hooks of the program around a checkpoint": (lambda: Layers(in_order(), recomputed_and_offloaded), one),
    "save_on_cpu": (lambda: Layers(in_order(), offloaded), one),
    "save_on_cpu around the module": (lambda: Layers(in_order()), around_all(offloaded)),
    "layers side by side": (lambda: Layers(side_by_side), one),
    "a slice of a weight": (lambda: Positions(lambda weight: weight[:BATCH]), one),
    "an expanded weight in a dict": (lambda: Positions(lambda weight: {"part": weight[0].expand(BATCH, -1)}), one),
    "weights that a module gives out": (lambda: Positions(lambda weight: weight.t().t(), is_last=True), two),
    "a whole weight": (lambda: Positions(lambda weight: weight), one),
    "complex views": (lambda: Rotated(False), one),
    "conjugate views": (lambda: Rotated(True), one),
    "a function without a gradient for a weight": (Custom, one),
    "inference_mode before a step": (lambda: Layers(in_order()), inference_first),
    "autograd.grad after a backward pass": (lambda: Layers(in_order()), grads_after_a_pass),
}


def one_module_inside_of_another(mode):
    """A sharded module that calls another one, whose weights are no place of its own."""

    class Outer(Layers):
        def forward(self, x):
            return self.inner[0](super().forward(x))

    outer = Outer(in_order())
    outer.inner = [Layers(in_order())]

    def rank(context, shard):
        made = copy.deepcopy(outer)
        modules = [made, *made.inner]
        sharded = [shard(module) for module in modules]
        modules[0](data_of(0, context.rank)).pow(2).mean().backward()
        found = []
        for one in sharded:
            one.finish()
            found.append({name: one.read_grad(name) for layer in one.layers for name, _ in layer.params})
            one.discard()
        return found

    modules = [outer, *outer.inner]
    sum(outer(data_of(0, r)).pow(2).mean() for r in range(2)).div(2).backward()
    for found, module in zip(on_ranks(2, mode, rank)[0], modules):
        for name, param in module.named_parameters():
            if not torch.allclose(found[name], param.grad, atol=1e-6):
                return f"the gradient of {name} differs by {(found[name] - param.grad).abs().max():.1e}"
    return True


def views_that_are_kept_too_long_are_told(mode):
    """A module keeps views beyond its forward; a checkpoint keeps what each operation came to, views among them."""

    class Keeping(Block):
        def forward(self, h):
            self.kept = getattr(self, "kept", self.up.weight.t())
            return h @ self.kept

    def recomputed_from_views(run, layers, x):
        return checkpoint(run, layers, x, use_reentrant=False, context_fn=saves())

    def rank(context, shard):
        found = []
        for made, steps in ((Layers(in_order(), layer=Keeping), 2), (Layers(in_order(*ORDERS[0]), recomputed_from_views), 1)):
            sharded = shard(made)

            def train(made=made, sharded=sharded, steps=steps):
                for step in range(steps):
                    one(made, step, context.rank)
                    made.run = in_order(3, 1, 5, 0, 2, 7, 6, 4)  # in buffers of others
                    sharded.discard()

            # In debug mode each layer has a buffer of its own.
            found.append(raises(train, "a view of 'layers.", "kept") if mode == "copied" else (train() or True))
            sharded.discard()
        return found

    found = on_ranks(2, mode, rank)
    return found[0] == [True, True] or str(found[0])


def outputs_are_copies_in_evaluation(mode):
    """What a layer has given out stays as it was, whatever its buffer has later."""

    wanted = Positions(lambda weight: weight[:], is_last=True)

    def rank(context, shard):
        module = copy.deepcopy(wanted)
        sharded = shard(module)
        with torch.no_grad():
            table, (_, own, _) = module.tables[0](), module(data_of(0, 0))
            for layer in module.layers:
                layer(data_of(0, 0))
            same = torch.equal(table, wanted.tables[0].weight) and torch.equal(own, wanted.own[:1])
        sharded.discard()
        return same

    return all(on_ranks(2, mode, rank))


class Squares(nn.Module):
    """Layers whose matrices have whole blocks of 32."""

    def __init__(self, recomputes):
        super().__init__()
        self.layers, self.recomputes = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)), recomputes

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x))
        return x


def quantized_numbers_stay_within_a_hold(mode):
    """As the guide says: a backward pass takes the codes by rows where they are still there."""
    quantizes = lambda name, param: {"quantization": fsdp.Quantization.MXFP8} if param.dim() == 2 else {}

    def rank(context, shard):
        found = []
        for recomputes, flags in ((False, 0), (True, 0), (False, fsdp.GroupFlag.RESIDENT)):
            phases, kept = [], {"flags": flags}
            module = Squares(recomputes)
            sharded = shard(module, held_groups=4, param_options=quantizes, group_options=lambda name, layer: kept)
            quantized = sharded.layers[1].quantized
            quantized._numbers = lambda i, phase, made=quantized._numbers, seen=phases: seen.append(phase) or made(i, phase)
            module(torch.ones(1, 64)).sum().backward()
            sharded.discard()
            found.append([phase.name for phase in phases])
        return found

    found = on_ranks(1, mode, rank)[0]
    return found == [["FORWARD", "BACKWARD"], ["FORWARD", "RECOMPUTE"], ["FORWARD"]] or str(found)


def main():
    options, report = read_options(), Report()
    for mode in options.modes:
        for name, (make, step_of) in CASES.items():
            for held_groups in (0, 3) if mode == "copied" else (0,):
                if all(word in name for word in options.words):
                    more = {"held_groups": held_groups} if held_groups else {}
                    wrong = compare(make(), step_of, 3, RATE, mode, ranks=2, epsilon=1e-4, **more)
                    report.case(f"{name} ({mode}{f', {held_groups} buffers' if held_groups else ''})", not wrong, wrong)
        for check in (
            one_module_inside_of_another,
            views_that_are_kept_too_long_are_told,
            outputs_are_copies_in_evaluation,
            quantized_numbers_stay_within_a_hold,
        ):
            name = check.__name__.replace("_", " ")
            if all(word in name for word in options.words):
                report.run(f"{name} ({mode})", lambda check=check, mode=mode: check(mode))
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
