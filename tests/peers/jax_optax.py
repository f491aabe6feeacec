#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of optax over shards (libfsdp.jax.shard(optimizer=...)) beside optax alone, checkpoints of their states,
and what cannot work on shards.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python jax_optax.py [WORD...]

WORD: only cases whose name has it. Needs jax (CPU) and optax. Ranks are threads. Reports in the Test Anything Protocol.
"""

import sys

import jax
import jax.numpy as jnp
from jax_check import Cases, differ, part, raises, shared_folder
from jax_shard import batch, loss_of, make_params
from jax_trees import nnx, nnx_loss, nnx_module

import libfsdp as fsdp
import libfsdp.jax

try:
    import optax
except ImportError:
    print("1..0 # SKIP no optax")
    sys.exit(0)
STEPS = 5
cases = Cases(lambda name: "no flax" if nnx is None and "nnx" in name else None)


def by_dimensions(params):
    return jax.tree_util.tree_map(lambda leaf: leaf.ndim > 1, params)


def of_two_kinds(params):
    return jax.tree_util.tree_map(lambda leaf: "matrix" if leaf.ndim > 1 else "other", params)


def optimizers():
    warm = optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 10)
    return {
        "sgd": optax.sgd(0.1),
        "momentum and a schedule": optax.sgd(warm, momentum=0.9, nesterov=True),
        "momentum in bfloat16": optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.bfloat16),
        "adamw with a mask by dimensions": optax.adamw(0.01, weight_decay=0.5, mask=by_dimensions),
        "lion": optax.lion(0.01),
        "rmsprop": optax.rmsprop(0.01, initial_scale=0.5),
        "a chain with clip by value": optax.chain(optax.clip(1e-3), optax.scale_by_adam(), optax.scale(-0.01)),
        "two kinds of parameters": optax.multi_transform(
            {"matrix": optax.adam(0.01), "other": optax.sgd(0.1, momentum=0.5)}, of_two_kinds
        ),
        "an update every other step": optax.MultiSteps(optax.adam(0.01), 2).gradient_transformation(),
        "a branch": optax.conditionally_transform(optax.scale(0.5), lambda step: step % 2 == 0),
        "a moving average of updates": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    }


def train_alone(optimizer, steps=STEPS, max_norm=0.0):
    if max_norm:
        optimizer = optax.chain(optax.clip_by_global_norm(max_norm), optimizer)
    params, update = make_params(), jax.jit(optimizer.update)
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = update(jax.grad(loss_of)(params, *batch(step)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def train(context, sharded, steps=STEPS, first=0, **options):
    for step in range(first, first + steps):
        sharded.apply_grads(jax.grad(loss_of)(sharded.params(), *part(context, step)), **options)


def trains_as_alone(context, make, **options):
    """Whether weights are those of optax alone. make() makes the optimizer."""
    sharded = libfsdp.jax.shard(make_params(), context, optimizer=make())
    train(context, sharded, **options)
    full = sharded.full_params()
    off, moved = differ(full, train_alone(make(), **options)), differ(full, make_params())
    return off < 2e-5 < moved or f"weights differ by {off:.1e}, and have moved by {moved:.1e}"


def add_optimizers():
    for name in optimizers():
        for world_size in (1, 2, 4):
            cases.add(
                f"{name} trains as alone, {world_size} ranks",
                lambda context, name=name: trains_as_alone(context, lambda: optimizers()[name]),
                world_size,
            )


@cases
def max_norm_clips_as_clip_by_global_norm(context):
    return trains_as_alone(context, lambda: optax.sgd(0.1, momentum=0.9), max_norm=0.05)


@cases
def micro_batches_train_as_the_batch(context):
    sharded = libfsdp.jax.shard(make_params(), context, optimizer=optax.adam(0.01))
    for step in range(STEPS):
        rows = part(context, step)
        for half in (slice(0, 2), slice(2, 4)):
            sharded.accumulate(jax.grad(loss_of)(sharded.params(), *[each[half] for each in rows]))
        sharded.apply(scale=0.5)
    return differ(sharded.full_params(), train_alone(optax.adam(0.01))) < 2e-5


@cases
def scalars_are_trained_by_their_rank(context):
    params = {"gain": jnp.float32(2.0), "w": jnp.ones((4, 3))}
    sharded = libfsdp.jax.shard(params, context, optimizer=optax.sgd(0.1, momentum=0.9))
    for _ in range(2):
        sharded.apply_grads({"gain": jnp.float32(1.0), "w": jnp.zeros((4, 3))})
    return abs(float(sharded.full_params()["gain"]) - (2.0 - 0.1 - 0.19)) < 1e-6


@cases
def frozen_parameters_have_no_state_and_stay(context):
    found = []
    for frozen in (None, "^hidden/"):
        sharded = libfsdp.jax.shard(make_params(), context, frozen=frozen, optimizer=optax.adam(0.01))
        train(context, sharded)
        found.append(sharded.model.role_bytes(fsdp.Role.OPTIMIZER))
    stayed = differ(sharded.full_params()["hidden"], make_params()["hidden"]) == 0
    moved = differ(sharded.full_params()["out"], make_params()["out"]) > 0
    return stayed and moved and found[1] < found[0] / 2 or found


@cases
def states_of_frozen_parameters_alone_are_not_made(context):
    def states_of(optimizer):  # all matrices are frozen
        sharded = libfsdp.jax.shard(make_params(), context, frozen="w$|out/0", optimizer=optimizer)
        return sharded.model.role_bytes(fsdp.Role.OPTIMIZER)

    found = states_of(optimizers()["two kinds of parameters"]), states_of(optax.sgd(0.1, momentum=0.5))
    return found[0] == found[1] or found


@cases
def a_parameter_that_is_frozen_for_steps_keeps_weight_and_state(context):
    sharded = libfsdp.jax.shard(make_params(), context, optimizer=optax.sgd(0.1, momentum=0.9))
    train(context, sharded, 1)
    group = sharded.model.groups["out"]
    before, momentum = (read("out/0", *of) for read, of in ((group.read_param, ()), (group.read_state, ["0/trace"])))
    sharded.freeze("out/0")
    train(context, sharded, 2, first=1)
    stayed = (group.read_param("out/0") == before).all()
    kept = (group.read_state("out/0", "0/trace") == momentum).all() and momentum.any()
    sharded.unfreeze("out/0")
    train(context, sharded, 1, first=3)
    return bool(stayed and kept and (sharded.full_params()["out"][0] != before).any())


@cases
def numbers_of_the_state_can_be_changed(context):
    make = optax.inject_hyperparams(optax.sgd)
    sharded = libfsdp.jax.shard(make_params(), context, optimizer=make(learning_rate=0.1))
    sharded.set_numbers({"hyperparams/learning_rate": 0.3})
    train(context, sharded)
    rate = float(sharded.numbers()["hyperparams/learning_rate"])
    unknown = raises(lambda: sharded.set_numbers({"rate": 1.0}), "hyperparams/learning_rate", "not 'rate'")
    is_right = differ(sharded.full_params(), train_alone(optax.sgd(0.3))) < 2e-5 and abs(rate - 0.3) < 1e-6
    return is_right if unknown is True else unknown


@cases
def a_number_of_another_shape_is_refused_and_training_goes_on(context):
    make = optax.inject_hyperparams(optax.sgd)
    sharded = libfsdp.jax.shard(make_params(), context, optimizer=make(learning_rate=0.3))
    name = "hyperparams/learning_rate"
    found = raises(lambda: sharded.set_numbers({name: jnp.ones(3)}), "sharded.set_numbers()", name, "(3,)")
    train(context, sharded)
    return differ(sharded.full_params(), train_alone(optax.sgd(0.3))) < 2e-5 if found is True else found


@cases
def an_error_names_the_call_that_was_made(context):
    sharded = libfsdp.jax.shard(make_params(), context, optimizer=optax.sgd(0.1))
    sharded.model.begin_update()
    found = raises(lambda: sharded.apply_grads(make_params()), "INVALID_STATE: sharded.apply_grads(): ")
    sharded.model.publish_weights()
    train(context, sharded)
    return differ(sharded.full_params(), train_alone(optax.sgd(0.1))) < 2e-5 if found is True else found


@cases
def states_of_a_frozen_scalar_are_no_numbers(context):
    params = {"gain": jnp.ones(()), "w": jnp.ones((4, 3))}
    sharded = libfsdp.jax.shard(params, context, frozen="gain", optimizer=optax.adam(0.1))
    return list(sharded.numbers()) == ["0/count"] or list(sharded.numbers())


@cases
def a_long_name_of_a_state_is_refused(context):
    labels = {"x" * 70: optax.adam(0.1)}
    optimizer = optax.multi_transform(labels, lambda params: jax.tree_util.tree_map(lambda _: "x" * 70, params))
    words = "inner_states/xxx", "bytes, and 63 is the limit", "optax.multi_transform"
    return raises(lambda: libfsdp.jax.shard(make_params(), context, optimizer=optimizer), *words)


@cases
def numbers_of_the_library_s_adamw_are_refused(context):
    return raises(libfsdp.jax.shard(make_params(), context).numbers, "sharded.numbers()", "AdamW of the library")


@cases
def a_step_with_nan_leaves_states_as_they_are(context):
    sharded = libfsdp.jax.shard(make_params(), context, optimizer=optax.adam(0.01))
    train(context, sharded, 2)
    sharded.accumulate(jax.tree_util.tree_map(lambda leaf: leaf * (jnp.nan if context.rank else 1), make_params()))
    sharded.apply(skip_nonfinite=True)
    skipped = sharded.skipped_param
    train(context, sharded, STEPS - 2, first=2)
    return skipped == "hidden/b" and differ(sharded.full_params(), train_alone(optax.adam(0.01))) < 2e-5 or skipped


@cases
def nnx_modules_are_trained_by_optax(context):
    x, y = batch(0)
    make = lambda: optax.adamw(0.01, weight_decay=0.1, mask=by_dimensions)  # noqa: E731
    sharded, alone = libfsdp.jax.shard(nnx_module(), context, optimizer=make()), nnx_module()
    optimizer = nnx.Optimizer(alone, make(), wrt=nnx.Param)
    for _ in range(3):
        module = sharded.params()
        sharded.apply_grads(nnx.grad(nnx_loss)(module, x, y))
        sharded.keep(module)
        optimizer.update(alone, nnx.grad(nnx_loss)(alone, x, y))
    found, wanted = (nnx.state(module, nnx.Param) for module in (sharded.full_params(), alone))
    return differ(found, wanted) < 1e-4 < differ(found, nnx.state(nnx_module(), nnx.Param))


# -- checkpoints ---------------------------------------------------------------------------------------------------


def resumes(context, make, load_into):
    """Trains, saves, loads into what load_into(context) gives, and goes on as a run without a stop."""
    first = libfsdp.jax.shard(make_params(), context, optimizer=make())
    train(context, first, 2)
    with shared_folder(context) as folder:
        first.save(folder)
        second = load_into(context)
        second.load(folder)
    train(context, second, STEPS - 2, first=2)
    return second.full_params()


@cases
def states_and_numbers_come_back(context):
    def make():
        return optax.adamw(optax.linear_schedule(0.02, 0.0, STEPS), weight_decay=0.1)

    zeros = jax.tree_util.tree_map(jnp.zeros_like, make_params())
    full = resumes(context, make, lambda context: libfsdp.jax.shard(zeros, context, optimizer=make()))
    straight = libfsdp.jax.shard(make_params(), context, optimizer=make())
    train(context, straight)
    return differ(full, straight.full_params()) == 0


def a_checkpoint_of_three_ranks_loads_on_two(folder):
    make = lambda: optax.adam(0.01)  # noqa: E731

    def save(context):
        sharded = libfsdp.jax.shard(make_params(), context, optimizer=make())
        for step in range(2):  # every rank has the whole batch, so that sums do not depend on their number
            sharded.apply_grads(jax.grad(loss_of)(sharded.params(), *batch(step)))
        sharded.save(folder)

    def load(context):
        sharded = libfsdp.jax.shard(make_params(), context, optimizer=make())
        sharded.load(folder)
        for step in range(2, STEPS):
            sharded.apply_grads(jax.grad(loss_of)(sharded.params(), *batch(step)))
        return differ(sharded.full_params(), train_alone(make()))

    fsdp.run_local(3, save)
    off = max(fsdp.run_local(2, load))
    return off < 2e-5 or f"weights differ by {off}"


cases.add_alone("a checkpoint of three ranks loads on two", a_checkpoint_of_three_ranks_loads_on_two)


@cases
def a_checkpoint_of_another_optimizer_is_refused(context):
    sharded = libfsdp.jax.shard(make_params(), context, optimizer=optax.adam(0.01))
    other = libfsdp.jax.shard(make_params(), context, optimizer=optax.sgd(0.1, momentum=0.9))
    with shared_folder(context) as folder:
        sharded.save(folder)
        found = raises(lambda: other.load(folder), "sharded.load()", "no number of the optimizer '0/count'")
    before = differ(other.full_params(), make_params())
    train(context, other)
    return found if found is not True else before == 0 and differ(other.full_params(), make_params()) > 0


# -- what is refused -----------------------------------------------------------------------------------------------


def refused():
    return {
        "clip by global norm": (optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.1)), "max_norm="),
        "clip by block rms": (optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)), "reduce_sum"),
        "apply if finite": (optax.apply_if_finite(optax.sgd(0.1), 3), "skip_nonfinite=True"),
        "lamb": (optax.lamb(0.1), "whole parameters"),
        "adafactor": (optax.adafactor(0.1), "whole parameters"),
        "muon": (optax.contrib.muon(0.1), "whole parameters"),
        "noise": (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)), "belongs to no parameter"),
        "centralized gradients": (optax.chain(optax.centralize(), optax.sgd(0.1)), "whole parameters"),
        "lbfgs": (optax.lbfgs(), "has the shape (10, 33), which is no parameter's"),
    }


def add_refused():
    for name, (optimizer, *words) in refused().items():
        cases.add(
            f"{name} is refused",
            lambda context, optimizer=optimizer, words=words: raises(
                lambda: libfsdp.jax.shard(make_params(), context, optimizer=optimizer), "libfsdp.jax.shard", *words
            ),
        )


def by_rows():
    def update(grads, state, params=None):
        return jax.tree_util.tree_map(lambda grad: grad / -grad.shape[0], grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def mixing():
    def update(grads, state, params=None):
        grads["a"] = grads["a"] + grads["b"]
        return grads, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@cases
def an_update_that_depends_on_shapes_is_refused(context):
    return raises(lambda: libfsdp.jax.shard(make_params(), context, optimizer=by_rows()), "depends on the shapes")


def masked(optimizer, is_chosen):
    return optax.masked(optimizer, lambda params: jax.tree_util.tree_map(is_chosen, params))


def of_init(make):
    """Multiplies gradients by the state make(leaf, params)."""

    def init(params):
        return jax.tree_util.tree_map(lambda leaf: make(leaf, params), params)

    def update(grads, state, params=None):
        return jax.tree_util.tree_map(jnp.multiply, grads, state), state

    return optax.GradientTransformation(init, update)


def taking(other):
    """The update of "a" is the gradient of "b"; or all have the scalar of the last step, whose gradient is kept."""

    def swap(grads, state, params=None):
        return {**grads, "a": grads["b"]}, state

    def remember(grads, last, params=None):
        return jax.tree_util.tree_map(lambda grad: grad - last, grads), grads["scalar"]

    return optax.GradientTransformation(lambda params: jnp.zeros(()), swap if other == "swap" else remember)


def choosing():
    def update(grads, step, params=None):
        changed = {**grads, "a": jax.lax.cond(step > 2, lambda: grads["a"], lambda: grads["b"])}
        return changed, step + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


def of_count():
    """An update that counts the parameters with elements, of which a rank has fewer."""

    def update(grads, state, params=None):
        count = sum(leaf.size > 0 for leaf in jax.tree_util.tree_leaves(params))
        return jax.tree_util.tree_map(lambda grad: -grad, grads), state + count

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


def power_of_rows():
    def power(leaf):
        return leaf ** len(leaf) if leaf.ndim else leaf

    return optax.stateless(lambda grads, params: jax.tree_util.tree_map(power, grads))


def of_largest():
    """Halves the update of the largest parameter: which one it is differs for rows, and operations stay the same."""

    def update(grads, params):
        names = sorted(grads, key=lambda name: -grads[name].size)
        return {name: grads[name] * (2.0 if at else 0.5) for at, name in enumerate(names)}

    return optax.stateless(update)


DEPENDENT = {
    "a mask by size": (masked(optax.add_decayed_weights(1.0), lambda leaf: leaf.size > 20), "depends on the shapes"),
    "a mask by size with state": (masked(optax.trace(0.9), lambda leaf: leaf.size > 20), "depends on the shapes"),
    "a mask by rows": (masked(optax.scale(0.5), lambda leaf: leaf.shape[0] >= 6 if leaf.ndim else False), "shapes"),
    "a mask by the size of a rank's rows": (masked(optax.trace(0.9), lambda leaf: leaf.size == 12), "shapes"),
    "a norm in init": (of_init(lambda leaf, params: leaf * optax.global_norm(params)), "'a'"),
    "a first state that depends on rows": (
        of_init(lambda leaf, _: jnp.full(leaf.shape, 1.0 / max(leaf.size, 1))),
        "depends on the shapes",
    ),
    "a first state of numbers in order": (
        of_init(lambda leaf, _: jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape)),
        "state 'state' of 'a' has numbers of 'an array that belongs to no parameter'",
    ),
    "the update of another parameter": (taking("swap"), "update of 'a' has numbers of 'b'"),
    "a number with a scalar's gradient": (taking("scalar"), "state '' has numbers of 'scalar'"),
    "a choice between parameters": (choosing(), "condition chooses numbers of 'a' or of 'b'"),
    "a count of parameters with elements": (of_count(), "depends on the shapes"),
    "a power of the number of rows": (power_of_rows(), "depends on the shapes"),
    "the largest parameter": (of_largest(), "depends on the shapes"),
}


def add_dependent():
    for name, (optimizer, *words) in DEPENDENT.items():
        sizes = {"a": (6, 4), "b": (6, 4), "scalar": ()}
        sizes = {"a": (12, 1), "b": (2, 4)} if name == "the largest parameter" else sizes
        cases.add(
            f"{name} is refused",
            lambda context, optimizer=optimizer, words=words, sizes=sizes: raises(
                lambda: libfsdp.jax.shard(
                    {name: jnp.ones(size) for name, size in sizes.items()}, context, optimizer=optimizer, layers="."
                ),
                "libfsdp.jax.shard",
                *words,
            ),
        )


@cases
def an_update_that_mixes_parameters_is_refused(context):
    params = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
    return raises(lambda: libfsdp.jax.shard(params, context, optimizer=mixing()), "numbers of 'a' and of 'b' at once")


@cases
def main_storage_without_fp32_is_refused(context):
    options = {"optimizer": optax.sgd(0.1), "main_storage": fsdp.MainStorage.SPLIT16}
    return raises(lambda: libfsdp.jax.shard(make_params(), context, **options), "main_storage", "AdamW")


@cases
def lr_with_an_optimizer_of_optax_is_refused(context):
    sharded = libfsdp.jax.shard(make_params(), context, optimizer=optax.sgd(0.1))
    return raises(lambda: sharded.apply_grads(make_params(), lr=0.1), "lr is for AdamW", "optax.sgd(learning_rate)")


@cases
def no_lr_for_adamw_is_refused(context):
    return raises(lambda: libfsdp.jax.shard(make_params(), context).apply_grads(make_params()), "AdamW needs lr")


@cases
def something_else_is_refused(context):
    options = {"optimizer": optax.sgd}
    return raises(lambda: libfsdp.jax.shard(make_params(), context, **options), "'function'", "optax.sgd(0.1)")


if __name__ == "__main__":
    add_optimizers()
    add_refused()
    add_dependent()
    sys.exit(1 if cases.run() else 0)
