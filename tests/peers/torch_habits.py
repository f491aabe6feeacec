#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What torch's users do to a module beside training it, after libfsdp.torch.shard: it works as they expect, or a Python
exception names the parameter and the call to use.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_habits.py [--mode mapped|copied|debug] [WORD...]

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test Anything
Protocol.
"""

import copy
import io
import sys

import torch
from torch import nn
from torch_check import Report, on_ranks, raises, read_options

import libfsdp as fsdp
from libfsdp.torch.words import in_torch_words

RATE = 1e-2
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A stack with buffers and a head that is tied to the first layer."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.head.weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


torch.manual_seed(0)
BASE = Net()


def net():
    return copy.deepcopy(BASE)


def backward(module, shift=0):
    loss = module(X + shift).pow(2).mean()
    loss.backward()
    return loss.item()


def train(module, sharded, steps=1, **options):
    losses = []
    for step in range(steps):
        losses.append(backward(module, step))
        sharded.step(RATE, **options)
    return losses


def trains(module, sharded):
    """Do weights change, and are the losses those of the weights?"""
    before = sharded.full_state_dict()
    train(module, sharded, 2)
    after = sharded.full_state_dict()
    return not torch.equal(before["layers.1.weight"], after["layers.1.weight"])


# -- parameters -------------------------------------------------------------------------------------------------------


def a_frozen_layer_stays(module, sharded):
    train(module, sharded, 2, weight_decay=0.1)
    before = sharded.full_state_dict()
    module.layers[1].requires_grad_(False)
    train(module, sharded, 2, weight_decay=0.1)
    frozen = sharded.full_state_dict()
    module.layers[1].requires_grad_(True)
    train(module, sharded, 1)
    after = sharded.full_state_dict()
    name, other = "layers.1.weight", "layers.2.weight"
    return (
        torch.equal(before[name], frozen[name])
        and not torch.equal(before[other], frozen[other])
        and not torch.equal(after[name], frozen[name])
    )


def freezing_within_a_step_is_refused(module, sharded):
    backward(module)
    module.layers[1].requires_grad_(False)
    return raises(lambda: module(X), "layers.1", "requires_grad", "after sharded.step()")


def conversion_is_refused(module, sharded):
    found = raises(lambda: (module.to(torch.bfloat16), module(X.bfloat16())), "layers.0.weight")
    sharded.drop_writes()
    for buffer in ("running_mean", "running_var"):
        setattr(module.norm, buffer, getattr(module.norm, buffer).float())
    return found is True and trains(module, sharded) or found


def writes_in_place_are_told(module, sharded):
    found = raises(lambda: (nn.init.zeros_(module.layers[2].weight), module(X)), "layers.2.weight")
    sharded.drop_writes()
    return found is True and trains(module, sharded) or found


def new_parameters_are_told(module, sharded):
    before = module.norm.bias
    module.norm.bias = nn.Parameter(torch.zeros(8))
    found = raises(lambda: module(X), "norm.bias", "not in the module")
    sharded.drop_writes()
    return found is True and module.norm.bias is before and trains(module, sharded) or found


def added_parameters_are_told(module, sharded):
    """A frozen one is the program's own, and a part that is replaced is an addition too."""
    module.layers[1].extra = nn.Parameter(torch.zeros(8), requires_grad=False)
    train(module, sharded)
    module.layers[1].extra.requires_grad_(True)
    before = module.layers[2]
    found = raises(lambda: module(X), "'layers.1.extra'", "after shard()", "ignored_params")
    del module.layers[1].extra
    module.layers[2] = nn.Linear(8, 8)
    replaced = raises(lambda: module(X), "'layers.2.weight'", "after shard()")
    module.layers[2] = before
    return found is True and replaced is True and trains(module, sharded) or f"{found}, {replaced}"


def parameters_in_the_place_of_none_are_told(module, sharded):
    """As the bias of a Linear without one."""
    module.layers[1].register_parameter("late", None)
    train(module, sharded)
    module.layers[1].late = nn.Parameter(torch.zeros(8))
    found = raises(lambda: module(X), "'layers.1.late'", "after shard()", "ignored_params")
    module.layers[1].late = None
    return found is True and trains(module, sharded) or found


def writes_can_be_taken(module, sharded):
    if sharded.hides_weights:
        return raises(sharded.take_writes, "load_state_dict")
    nn.init.ones_(module.layers[2].weight)
    module.norm.bias = nn.Parameter(torch.full((8,), 3.0))
    module.layers[3].bias.data = torch.full((8,), 5.0)
    sharded.take_writes()
    full = sharded.full_state_dict()
    is_right = [full[name].eq(value).all() for name, value in (("layers.2.weight", 1), ("norm.bias", 3), ("layers.3.bias", 5))]
    return all(is_right) and trains(module, sharded)


def weights_outside_of_a_pass(module, sharded):
    if not sharded.hides_weights:
        return torch.equal(module.layers[1].weight, BASE.layers[1].weight)
    found = raises(lambda: module.layers[1].weight + 1, "layers.1.weight", "sharded.unsharded()")
    with sharded.unsharded(module.layers[1]):
        return torch.equal(module.layers[1].weight, BASE.layers[1].weight) and found


def writes_within_a_step_are_kept(module, sharded):
    if sharded.hides_weights:
        return True
    backward(module)
    nn.init.ones_(module.layers[2].weight)
    found = raises(sharded.take_writes, "sharded.step()", "sharded.discard()")
    is_kept = module.layers[2].weight.eq(1).all().item()
    sharded.discard()
    sharded.drop_writes()
    return found is True and is_kept and trains(module, sharded) or found


def a_step_while_weights_are_shown(module, sharded):
    backward(module)
    with sharded.unsharded(module.layers[1]):
        found = raises(lambda: sharded.step(RATE), "sharded.unsharded()", "'layers.1'")
    sharded.step(RATE)
    return found is True and trains(module, sharded) or found


def what_is_no_group_is_not_shown(module, sharded):
    def show():
        with sharded.unsharded(module.layers):
            pass

    return raises(show, "ModuleList is no group", "'layers.1'")


def a_deep_copy(module, sharded):
    if sharded.hides_weights:
        return raises(lambda: copy.deepcopy(module), "deepcopy", "full_state_dict")
    other = copy.deepcopy(module)
    before = other(X)
    train(module, sharded, 1)
    other.train()
    return torch.allclose(other(X), before) and trains(module, sharded)


def pickling_is_refused(module, sharded):
    return raises(lambda: torch.save(module, io.BytesIO()), "full_state_dict")


# -- gradients --------------------------------------------------------------------------------------------------------


def clip_grad_norm_names_the_call(module, sharded):
    backward(module)
    return raises(lambda: nn.utils.clip_grad_norm_(module.parameters(), 1.0), "handed to libfsdp", "max_norm")


def an_optimizer_of_torch_is_refused(module, sharded):
    optimizer = torch.optim.AdamW(module.parameters())
    backward(module)
    return raises(optimizer.step, "layers.0.weight", "optimizer=torch.optim.SGD")


def zero_grad_after_backward_is_told(module, sharded):
    backward(module)
    module.zero_grad()
    found = raises(lambda: sharded.step(RATE), "zero_grad", "sharded.discard()")
    sharded.discard()
    return found is True and trains(module, sharded) or found


def zero_grad_around_a_step_is_nothing(module, sharded):
    for _ in range(2):
        module.zero_grad()
        train(module, sharded, 1)
        module.zero_grad()
    return trains(module, sharded)


def zero_grad_of_a_part_is_told(module, sharded):
    backward(module)
    module.layers[2].zero_grad()
    found = raises(lambda: (backward(module), sharded.step(RATE)), "'layers.2.weight'", "zero_grad", "sharded.discard()")
    sharded.discard()
    return found is True and trains(module, sharded) or found


def a_gradient_of_a_failed_pass_is_forgotten(module, sharded):
    alone = net()
    backward(alone)
    backward(module)
    module.zero_grad()
    with sharded.unsharded(module):
        raises(lambda: module.norm.weight.pow(2).sum().backward())
    sharded.discard()
    backward(module)
    sharded.finish()
    found = sharded.read_grad("norm.weight")
    sharded.step(RATE)
    return torch.allclose(found, alone.norm.weight.grad, atol=1e-6) and trains(module, sharded) or str(found)


def whole_gradients_can_be_read(module, sharded):
    alone = net()
    backward(alone)
    backward(module)
    sharded.finish()
    found = sharded.read_grad("layers.2.weight")
    told = [raises(lambda: module(X), "sharded.step()"), raises(sharded.finish, "sharded.step()")]
    before = sharded.full_state_dict()["layers.2.weight"]
    sharded.step(RATE)
    has_moved = not torch.equal(before, sharded.full_state_dict()["layers.2.weight"])
    is_right = torch.allclose(found, alone.layers[2].weight.grad, atol=1e-6)
    return told == [True, True] and has_moved and is_right and trains(module, sharded) or str(told)


def a_backward_after_the_step_is_refused(module, sharded):
    loss = module(X).pow(2).mean()
    loss.backward(retain_graph=True)
    sharded.step(RATE)
    return raises(loss.backward, "modified by an inplace operation")


def operations_in_place_are_checked(module, sharded):
    y = torch.tanh(module.layers[0](X.clone().requires_grad_()))
    y.add_(1)
    return raises(y.sum().backward, "inplace")


def an_exception_in_backward(module, sharded):
    hook = module.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
    found = raises(lambda: backward(module), "ZeroDivisionError")
    hook.remove()
    told = raises(lambda: (backward(module), sharded.step(RATE)), "sharded.discard()")
    sharded.discard()
    return found is True and told is True and trains(module, sharded) or f"{found}, {told}"


def an_exception_in_forward(module, sharded):
    hook = module.layers[1].register_forward_hook(lambda *_: 1 / 0)
    found = raises(lambda: module(X), "ZeroDivisionError")
    hook.remove()
    return found is True and trains(module, sharded) or found


def an_interrupt(module, sharded):
    """Ctrl-C in a forward or backward pass, which torch's hooks of a forward are not told of."""

    def interrupt(*_):
        raise KeyboardInterrupt

    def is_interrupted(call):
        try:
            call()
        except KeyboardInterrupt:
            return True
        return False

    alone = net()
    backward(alone)
    for register in (module.layers[1].register_forward_pre_hook, module.layers[1].register_full_backward_hook):
        hook = register(interrupt)
        if not is_interrupted(lambda: backward(module)):
            return "it was not interrupted"
        hook.remove()
        sharded.discard()
        if torch._C._autograd._top_saved_tensors_default_hooks(True):
            return "the program's own operations would still be hooked"
        backward(module)
        sharded.finish()
        found = sharded.read_grad("layers.2.weight")
        sharded.discard()
        if not torch.allclose(found, alone.layers[2].weight.grad, atol=1e-6):
            return str(found - alone.layers[2].weight.grad)
    return trains(module, sharded)


HABITS = [
    a_frozen_layer_stays,
    freezing_within_a_step_is_refused,
    conversion_is_refused,
    writes_in_place_are_told,
    new_parameters_are_told,
    added_parameters_are_told,
    parameters_in_the_place_of_none_are_told,
    writes_can_be_taken,
    weights_outside_of_a_pass,
    writes_within_a_step_are_kept,
    a_step_while_weights_are_shown,
    what_is_no_group_is_not_shown,
    a_deep_copy,
    pickling_is_refused,
    clip_grad_norm_names_the_call,
    an_optimizer_of_torch_is_refused,
    zero_grad_after_backward_is_told,
    zero_grad_around_a_step_is_nothing,
    zero_grad_of_a_part_is_told,
    a_gradient_of_a_failed_pass_is_forgotten,
    whole_gradients_can_be_read,
    a_backward_after_the_step_is_refused,
    operations_in_place_are_checked,
    an_exception_in_backward,
    an_exception_in_forward,
    an_interrupt,
]


# -- what shard() refuses ---------------------------------------------------------------------------------------------


def frozen_at_first():
    module = net()
    module.layers[1].requires_grad_(False)
    return module


def unfreezing_what_was_declared_frozen(shard):
    module = frozen_at_first()
    sharded = shard(module)
    train(module, sharded, 1)
    module.layers[1].requires_grad_(True)
    return raises(lambda: module(X), "layers.1", "frozen when the module was sharded")


def closing_gives_the_module_back(shard):
    module = net()
    sharded = shard(module)
    train(module, sharded, 2)
    full = sharded.full_state_dict()
    sharded.close()
    if sharded.hides_weights:
        uses = [lambda: module(X), module.layers[1].weight.sum, module.state_dict, lambda: copy.deepcopy(module), lambda: shard(module)]
        told = [raises(use, "sharded.close()", "full_state_dict()") for use in uses]
        if told != [True] * len(uses) or raises(lambda: module.layers[1](X), "layers.1.weight") is not True:
            return f"weights that are gone: {told}"
        failed = raises(lambda: module.layers[1].weight.data.copy_(torch.ones(3)), "layers.1.weight")
        with torch.no_grad():
            failed = failed is True and raises(lambda: module.layers[1].weight.copy_(torch.ones(3)), "size")
        if failed is not True or raises(module.layers[1].weight.sum, "layers.1.weight") is not True:
            return f"a write that failed has made a weight of no values: {failed}"
        module.load_state_dict(full)
    alone = net()
    alone.load_state_dict(full)
    is_same = torch.equal(module(X), alone(X))
    sharded = shard(module)
    is_trained = trains(module, sharded)
    return is_same and is_trained


def too_few_buffers_name_the_option(shard):
    module = net()
    sharded = shard(module, held_groups=1)
    if not sharded.hides_weights:
        return trains(module, sharded)
    found = raises(lambda: module(X), "'layers.0'", "'root'", "shard() a larger held_groups")
    sharded.discard()

    def show_all():
        with sharded.unsharded():
            pass

    told = raises(show_all, "larger held_groups", "sharded.unsharded(layer)")
    sharded.discard()
    return found is True and told is True or f"{found}, {told}"


def layers_may_be_compiled_after_shard(shard):
    """The whole module too, where buffers are enough for all of its layers."""
    losses = []
    for held_groups, compiles in ((3, "nothing"), (3, "layers"), (8, "module"), (3, "module")):
        torch._dynamo.reset()
        module = net()
        sharded = shard(module, held_groups=held_groups)
        for layer in module.layers if compiles == "layers" else ():
            layer.compile(backend="eager")
        if compiles == "module":
            module.compile(backend="eager")
        if sharded.hides_weights and compiles == "module" and held_groups == 3:
            found = raises(lambda: module(X), "larger held_groups", "compile each layer, after shard()")
            sharded.discard()
            return found and losses[0] == losses[1] == losses[2]
        losses.append(train(module, sharded, 3))
        sharded.close()
    return losses == losses[:1] * 4 or str(losses)


def unfreezing_between_forward_and_backward(shard):
    module = net()
    sharded = shard(module)
    module.layers[1].requires_grad_(False)
    train(module, sharded, 1)
    loss = module(X).pow(2).mean()
    module.layers[1].requires_grad_(True)
    with sharded.unsharded(module.layers[1]):
        loss = loss + module.layers[1].bias.sum() * 2
    found = raises(loss.backward, "layers.1.bias", "between steps")
    sharded.discard()
    return found


def names_of_groups_are_free(shard):
    """The module itself as a layer, and layers that are called as the root group is."""
    for module, layers in ((nn.Sequential(nn.Linear(8, 8)), "all"), (Rooted(), "root")):
        sharded = shard(module, layers=[module] if layers == "all" else [module.root])
        if not torch.isfinite(torch.tensor(train(module, sharded, 2))).all():
            return "it does not train"
        sharded.close()
    return True


class Rooted(nn.Module):
    def __init__(self):
        super().__init__()
        self.root, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.root(x))


def sharded_twice(shard):
    module = net()
    shard(module)
    return raises(lambda: shard(module), "sharded already")


def what_differs_by_rank_is_named(shard):
    """On GPUs, where gathers are collective: the library's error says what to do in torch's words."""

    @in_torch_words
    def visit(text):
        raise fsdp.errors.Mismatch(text)

    texts = (
        "rank 0 called all_gather of 'a' (#7, 64 bytes), rank 1 called all_gather of 'b' (#7, 64 bytes)",
        "as number 7, rank 0 gathered group 'a', rank 1 gathered group 'b' for BACKWARD",
    )
    passes = (
        "rank 0 is in fsdp_put_grad (reduce_scatter of 'a' (#0, float32, 648 elements)), rank 1 is in fsdp_all_reduce_values "
        "(fsdp_all_reduce_values): they wait for each other"
    )
    told = raises(lambda: visit(passes), "the backward pass", "sharded.step()", "as many backward passes", "times zero")
    if told is not True:
        return told
    words = "'a'", "'b'", "the same layers in the same order", "shard()", "as one layer"
    return next((told for told in (raises(lambda: visit(text), *words) for text in texts) if told is not True), True)


REFUSED = {
    "float64": (lambda: nn.Linear(2, 2).double(), ("'weight'", "float64")),
    "integers": (lambda: with_integers(), ("'codes'", "int64")),
    "an empty parameter": (lambda: with_an_empty_one(), ("'nothing'", "(0, 3)")),
    "no parameters": (lambda: nn.ReLU(), ("ReLU has no parameters",)),
    "max_norm": (lambda: nn.Embedding(4, 2, max_norm=1.0), ("Embedding", "max_norm")),
    "torch.compile": (lambda: nn.Sequential(torch.compile(nn.Linear(2, 2))), ("torch.compile",)),
}


def with_an_empty_one():
    module = nn.Linear(2, 2)
    module.nothing = nn.Parameter(torch.zeros(0, 3))
    return module


def with_integers():
    module = nn.Module()
    module.codes = nn.Parameter(torch.arange(3), requires_grad=False)
    return module


def run_habits(habits, others=(), refused=None, alone=()):
    """The script: habits(module, sharded), others(shard), alone(shard) on one rank, and what shard() refuses."""
    options, report = read_options(), Report()

    def run(name, ranks, mode, function):
        if all(word in name for word in options.words):
            ending = f"({mode}, {ranks} rank{'s' if ranks > 1 else ''})"

            def agree():
                found = on_ranks(ranks, mode, lambda context, shard: function(shard))
                return next((one for one in found if one is not True), True)

            report.run(f"{name} {ending}", agree)

    for mode in options.modes:
        for ranks in (1, 2):
            for habit in habits:

                def check(shard, habit=habit):
                    module = net()
                    sharded = shard(module)
                    found = habit(module, sharded)
                    sharded.discard()
                    return found

                run(habit.__name__.replace("_", " "), ranks, mode, check)
            for other in others:
                run(other.__name__.replace("_", " "), ranks, mode, other)
        for other in alone:
            run(other.__name__.replace("_", " "), 1, mode, other)
    for name, (make, words) in (refused or {}).items():
        run(f"shard refuses {name}", 1, "mapped", lambda shard, make=make, words=words: raises(lambda: shard(make()), *words))
    return report.end()


OTHERS = [
    unfreezing_what_was_declared_frozen,
    unfreezing_between_forward_and_backward,
    sharded_twice,
    closing_gives_the_module_back,
    too_few_buffers_name_the_option,
    names_of_groups_are_free,
    what_differs_by_rank_is_named,
]

if __name__ == "__main__":
    # torch.compile works for all threads of a process at once.
    sys.exit(run_habits(HABITS, OTHERS, REFUSED, [layers_may_be_compiled_after_shard]))
