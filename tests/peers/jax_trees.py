#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trees and steps of libfsdp.jax.shard: groups, frozen leaves, accumulated gradients, flax variables and nnx modules;
and what errors say.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python jax_trees.py [WORD...]

WORD: only cases whose name has it. Needs jax (CPU); cases of flax are skipped without it. Ranks are threads. Reports in
the Test Anything Protocol.
"""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax_check import Cases, differ, part, raises
from jax_shard import batch, loss_of, make_params

import libfsdp as fsdp
import libfsdp.jax

try:
    import flax.linen as nn
    from flax import nnx
    from flax.core import FrozenDict
except ImportError:
    nn = nnx = None
RATE, STEPS = 0.01, 4
case = Cases(lambda name: "no flax" if nnx is None and ("flax" in name or "nnx" in name) else None)


def group_names(context, params, **options):
    sharded = libfsdp.jax.shard(params, context, **options)
    found = {name: [param.name for param in group.params] for name, group in sharded.model.groups.items()}
    sharded.close()
    return found


def one(*shape):
    return jnp.ones(shape or (2,))


def decoder():
    block = {"attention": {"w": one(4, 4)}, "norm": one(4)}
    return {"embed": one(8, 4), "decoder": {"blocks": [block, block, block], "norm": {"scale": one(4)}}, "scale": one()}


# -- groups --------------------------------------------------------------------------------------------------------


@case
def children_and_repeated_blocks_are_groups(context):
    found = group_names(context, decoder())
    blocks = {f"decoder/blocks/{i}": [f"decoder/blocks/{i}/attention/w", f"decoder/blocks/{i}/norm"] for i in range(3)}
    return found == {**blocks, "decoder": ["decoder/norm/scale"], "root": ["embed", "scale"]} or found


@case
def numbered_names_are_repeated_blocks(context):
    params = {"params": {"Body_0": {f"Block_{i}": {"Dense_0": {"w": one()}, "Dense_1": {"w": one()}} for i in (0, 1)}}}
    found = group_names(context, params)
    return list(found) == ["params/Body_0/Block_0", "params/Body_0/Block_1"] or found


@case
def a_single_numbered_child_is_no_repeated_block(context):
    found = group_names(context, {"body": {"Dense_0": {"w": one()}, "norm": {"scale": one()}}})
    return list(found) == ["body"] or found


@case
def a_list_of_leaves_is_one_group(context):
    found = group_names(context, {"out": [one(), one()]})
    return found == {"out": ["out/0", "out/1"]} or found


@case
def a_pattern_names_groups(context):
    found = group_names(context, decoder(), layers=r"decoder/blocks/[01]")
    names = {name: len(params) for name, params in found.items()}
    return names == {"decoder/blocks/0": 2, "decoder/blocks/1": 2, "root": 5} or found


@case
def a_function_names_groups(context):
    found = group_names(context, decoder(), layers=lambda name: "norms" if "norm" in name else None)
    return found["norms"] == [f"decoder/blocks/{i}/norm" for i in range(3)] + ["decoder/norm/scale"] or found


@case
def a_pattern_that_matches_nothing_is_refused(context):
    return raises(lambda: libfsdp.jax.shard(decoder(), context, layers="blocks"), "'decoder/blocks/0/attention/w'")


# -- accumulation --------------------------------------------------------------------------------------------------


def train(context, sharded, steps=STEPS, first=0, **options):
    for step in range(first, first + steps):
        grads = jax.grad(loss_of)(sharded.params(), *part(context, step))
        sharded.apply_grads(grads, RATE, weight_decay=0.1, **options)


@case
def micro_batches_add_up_to_the_batch(context):
    whole, sums = (libfsdp.jax.shard(make_params(), context) for _ in range(2))
    for step in range(STEPS):
        rows = part(context, step)
        norm = whole.apply_grads(jax.grad(loss_of)(whole.params(), *rows), RATE, max_norm=0.5)
        for half in (slice(0, 2), slice(2, 4)):
            sums.accumulate(jax.grad(loss_of)(sums.params(), *[each[half] for each in rows]))
        found = sums.apply(RATE, max_norm=0.5, scale=0.5)
        if abs(found - norm) > 1e-5 * norm or norm <= 0.5:
            return f"norms {found} and {norm}"
    return differ(sums.full_params(), whole.full_params()) < 1e-5


@case
def one_accumulation_has_the_bits_of_apply_grads(context):
    one_call, two_calls = (libfsdp.jax.shard(make_params(), context) for _ in range(2))
    train(context, one_call, 1)
    two_calls.accumulate(jax.grad(loss_of)(two_calls.params(), *part(context, 0)))
    two_calls.apply(RATE, weight_decay=0.1)
    return differ(one_call.full_params(), two_calls.full_params()) == 0


@case
def apply_without_gradients_is_refused(context):
    sharded = libfsdp.jax.shard(make_params(), context)
    return raises(lambda: sharded.apply(RATE), "call sharded.accumulate(grads) first")


@case
def apply_grads_amid_accumulation_is_refused(context):
    sharded = libfsdp.jax.shard(make_params(), context)
    sharded.accumulate(make_params())
    found = raises(lambda: sharded.apply_grads(make_params(), RATE), "gradients are accumulated", "sharded.discard()")
    sharded.discard()
    train(context, sharded, 1)
    alone = libfsdp.jax.shard(make_params(), context)
    train(context, alone, 1)
    return found is True and differ(sharded.full_params(), alone.full_params()) == 0 or found


@case
def a_step_with_nan_is_skipped_on_every_rank(context):
    sharded = libfsdp.jax.shard(make_params(), context)
    before = sharded.full_params()
    grads = make_params()
    if context.rank == 1:
        grads["out"][0] = grads["out"][0].at[3, 3].set(jnp.nan)
    sharded.accumulate(grads)
    sharded.apply(RATE, skip_nonfinite=True)
    is_right = sharded.skipped_param == "out/0" and differ(sharded.full_params(), before) == 0
    sharded.accumulate(make_params())
    sharded.apply(RATE, skip_nonfinite=True)
    is_right = is_right and sharded.skipped_param is None and differ(sharded.full_params(), before) > 0
    sharded.accumulate(grads)
    sharded.apply(RATE, skip_nonfinite=True)
    was_skipped = sharded.skipped_param == "out/0"
    sharded.apply_grads(make_params(), RATE)
    return is_right and was_skipped and sharded.skipped_param is None


# -- layers one at a time --------------------------------------------------------------------------------------------


def make_net():
    keys = jax.random.split(jax.random.PRNGKey(2), 4)
    blocks = [{"w": jax.random.normal(key, (16, 16)) / 4, "b": jnp.zeros(16)} for key in keys[:3]]
    return {"blocks": blocks, "head": {"w": jax.random.normal(keys[3], (16, 5)) / 4}, "scale": jnp.ones(())}


@jax.jit
def block_of(params, x):
    return x + jnp.tanh(x @ params["w"] + params["b"])


@jax.jit
def head_of(params, scale, x, y):
    return scale * jnp.mean((x @ params["w"] - y) ** 2)


def net_loss(params, x, y):
    for block in params["blocks"]:
        x = block_of(block, x)
    return head_of(params["head"], params["scale"], x, y)


def layer_step(sharded, x, y):
    """A pass that holds the weights of one layer at a time."""
    blocks, inputs = [name for name in sharded.layers if name.startswith("blocks/")], [x]
    for layer in blocks:
        inputs.append(block_of(sharded.layer_params(layer), inputs[-1]))
    head, root = (sharded.layer_params(name, fsdp.Phase.BACKWARD) for name in ("head", "root"))
    grads = jax.grad(head_of, argnums=(0, 1, 2))(head, root["scale"], inputs.pop(), y)
    sharded.accumulate_layer("root", {"scale": grads[1]})
    sharded.accumulate_layer("head", grads[0])
    into = grads[2]
    for layer in reversed(blocks):
        _, pull = jax.vjp(block_of, sharded.layer_params(layer, fsdp.Phase.BACKWARD), inputs.pop())
        grads, into = pull(into)
        sharded.accumulate_layer(layer, grads)


@case
def layers_one_at_a_time_train_as_the_whole(context):
    whole = libfsdp.jax.shard(make_net(), context)
    options = {"unshard_mode": fsdp.UnshardMode.COPIED, "held_groups": 1}
    layers = libfsdp.jax.shard(make_net(), context, **options)
    for step in range(STEPS):
        whole.apply_grads(jax.grad(net_loss)(whole.params(), *part(context, step)), RATE)
        layer_step(layers, *part(context, step))
        layers.apply(RATE)
    held, block = layers.model.role_bytes(fsdp.Role.GATHER), 4 * (16 * 16 + 16)
    off = differ(layers.full_params(), whole.full_params())
    return off < 1e-5 and 0 < held < 2 * block or f"weights differ by {off:.1e}, {held} bytes are gathered"


@case
def a_layer_is_its_subtree_or_the_tree_without_the_others(context):
    sharded = libfsdp.jax.shard({**make_net(), "table": jnp.arange(3)}, context)
    block, root = sharded.layer_params("blocks/1"), sharded.layer_params("root")
    is_right = differ(block, make_net()["blocks"][1]) == 0 and root["head"] == {"w": None} and root["scale"] == 1
    return bool(is_right and root["table"][2] == 2) or (block, root)


@case
def layers_of_an_nnx_module_are_states(context):
    sharded = libfsdp.jax.shard(nnx_module(), context)
    state = nnx.split(nnx_module())[1]
    found = sharded.layer_params("blocks/1")
    sharded.discard()
    has_all = set(found) == {"linear", "norm", "drop"} or set(found)
    return has_all if has_all is not True else differ(found["linear"], state["blocks"][1]["linear"]) == 0


@case
def a_layer_without_a_gradient_is_named(context):
    sharded = libfsdp.jax.shard(make_net(), context)
    sharded.accumulate_layer("head", make_net()["head"])
    found = raises(lambda: sharded.apply(RATE), "layer 'blocks/0' has 0 gradients and layer 'head' 1")
    sharded.discard()
    return found


@case
def a_missing_gradient_of_a_layer_is_named(context):
    sharded = libfsdp.jax.shard(make_net(), context)
    grads = {"w": jnp.ones((16, 16))}
    return raises(lambda: sharded.accumulate_layer("blocks/2", grads), "accumulate_layer('blocks/2')", "'blocks/2/b'")


@case
def an_unknown_layer_is_named(context):
    sharded = libfsdp.jax.shard(make_net(), context)
    names = "blocks/0, blocks/1, blocks/2, head, root"
    return raises(lambda: sharded.layer_params("block/0"), "no layer 'block/0'", names)


@case
def parameters_in_bfloat16_have_main_weights_in_fp32(context):
    params = jax.tree_util.tree_map(lambda leaf: leaf.astype(jnp.bfloat16), make_params())
    sharded = libfsdp.jax.shard(params, context)
    for _ in range(3):
        sharded.apply_grads(jax.tree_util.tree_map(jnp.ones_like, sharded.params()), 1e-4)
    found, full = sharded.params()["hidden"]["w"], sharded.full_params()["hidden"]["w"]
    wanted = np.asarray(params["hidden"]["w"], np.float32) - 3e-4
    is_right = found.dtype == jnp.bfloat16 and full.dtype == np.float32 and np.abs(full - wanted).max() < 1e-6
    return bool(is_right) or (str(found.dtype), str(full.dtype), np.abs(full - wanted).max())


# -- frozen --------------------------------------------------------------------------------------------------------


@case
def frozen_parameters_keep_their_bits(context):
    for frozen in (lambda name, leaf: name.startswith("hidden"), "^hidden/"):
        sharded = libfsdp.jax.shard(make_params(), context, frozen=frozen)
        train(context, sharded)
        full = sharded.full_params()
        if differ(full["hidden"], make_params()["hidden"]) or not differ(full["out"], make_params()["out"]):
            return f"frozen by {frozen}"
    return True


@case
def frozen_parameters_take_no_states(context):
    all_trained, some = (libfsdp.jax.shard(make_params(), context, frozen=frozen) for frozen in (None, "^hidden/"))
    found = [each.model.role_bytes(fsdp.Role.OPTIMIZER) for each in (all_trained, some)]
    return found[1] < found[0] / 2 or found


@case
def gradients_of_frozen_parameters_may_be_left_out(context):
    sharded = libfsdp.jax.shard(make_params(), context, frozen="^hidden/")
    sharded.apply_grads({"out": make_params()["out"]}, RATE)
    return differ(sharded.full_params()["out"], make_params()["out"]) > 0


@case
def freeze_stops_training_and_unfreeze_goes_on(context):
    sharded = libfsdp.jax.shard(make_params(), context)
    sharded.freeze("hidden/w")
    train(context, sharded, 2)
    stayed = differ(sharded.full_params()["hidden"]["w"], make_params()["hidden"]["w"]) == 0
    moved = differ(sharded.full_params()["hidden"]["b"], make_params()["hidden"]["b"]) > 0
    sharded.unfreeze(lambda name: name == "hidden/w")
    train(context, sharded, 1, first=2)
    return stayed and moved and differ(sharded.full_params()["hidden"]["w"], make_params()["hidden"]["w"]) > 0


@case
def rules_that_choose_no_parameter_are_refused(context):
    variables = {"params": make_params()}
    for option, rule in (("frozen", "^hidden/"), ("frozen", lambda name, leaf: name == "b"), ("no_decay", "^hidden/")):
        words = f"{option}=", "chooses none of the 4 parameters", "'params/hidden/b'", f"leave {option}= out"
        found = raises(lambda: libfsdp.jax.shard(variables, context, **{option: rule}), *words)  # noqa: B023
        if found is not True:
            return found
    return bool(libfsdp.jax.shard(variables, context, no_decay=lambda name, leaf: False).layers)


@case
def a_step_with_all_parameters_frozen_is_refused(context):
    sharded = libfsdp.jax.shard(make_params(), context)
    sharded.freeze(".")
    sharded.accumulate({})
    found = raises(lambda: sharded.apply_grads({}, RATE), "sharded.apply_grads(): all 4 parameters are frozen")
    apply = raises(lambda: sharded.apply(RATE), "all 4 parameters are frozen", "sharded.unfreeze()")
    return apply if found is True else found


@case
def frozen_by_shard_cannot_be_unfrozen(context):
    sharded = libfsdp.jax.shard(make_params(), context, frozen="hidden/w")
    return raises(lambda: sharded.unfreeze("hidden"), "'hidden/w' is frozen by shard(frozen=)", "sharded.freeze()")


@case
def freezing_nothing_is_refused(context):
    sharded = libfsdp.jax.shard(make_params(), context)
    return raises(lambda: sharded.freeze("hiden"), "sharded.freeze(): 'hiden' chooses none of the 4 parameters")


# -- errors --------------------------------------------------------------------------------------------------------


@case
def a_missing_gradient_is_named(context):
    sharded = libfsdp.jax.shard(make_params(), context)
    grads = {"hidden": make_params()["hidden"], "out": [make_params()["out"][0]]}
    return raises(lambda: sharded.apply_grads(grads, RATE), "no gradient of 'out/1'", "sharded.freeze()")


@case
def an_unknown_gradient_is_named(context):
    sharded = libfsdp.jax.shard(make_params(), context)
    return raises(lambda: sharded.accumulate({"hiden": make_params()["hidden"]}), "sharded.accumulate()", "'hiden/b'")


@case
def a_transposed_gradient_is_refused(context):
    sharded = libfsdp.jax.shard(make_params(), context)
    grads = make_params()
    grads["hidden"]["w"] = grads["hidden"]["w"].T
    return raises(lambda: sharded.apply_grads(grads, RATE), "'hidden/w' has the shape (33, 16)", "(16, 33)")


@case
def another_float_is_refused(context):
    params = {"w": np.ones((2, 2))}
    return raises(lambda: libfsdp.jax.shard(params, context), "'w' is in float64", "float32")


@case
def a_tree_without_parameters_is_refused(context):
    return raises(lambda: libfsdp.jax.shard({"table": jnp.arange(3)}, context), "none of the tree's 1 leaves")


@case
def shapes_without_values_are_refused(context):
    shapes = jax.eval_shape(make_params)
    return raises(lambda: libfsdp.jax.shard(shapes, context), "'hidden/b' is a jax.ShapeDtypeStruct")


@case
def a_leaf_that_is_no_array_is_named(context):
    params = {**make_params(), "activation": jnp.tanh}
    return raises(lambda: libfsdp.jax.shard(params, context), "leaf 'activation' is a", "an array is expected")


@case
def errors_of_the_library_name_calls_of_python(context):
    sharded = libfsdp.jax.shard(make_params(), context)
    sharded.accumulate(make_params())
    found = raises(lambda: sharded.freeze("hidden"), "sharded.freeze()")
    sharded.discard()
    return found


# -- flax ----------------------------------------------------------------------------------------------------------


def flax_module():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.tanh(nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x)))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            for _ in range(2):
                x = Block()(x, train)
            return nn.Dense(5)(x)

    return Net()


def flax_loss(module, params, stats, x, y):
    out, changed = module.apply({"params": params, "batch_stats": stats}, x, True, mutable=["batch_stats"])
    return jnp.mean((out - y) ** 2), changed


@case
def flax_variables_train_their_params(context):
    module, (x, y) = flax_module(), batch(0)
    variables = module.init(jax.random.PRNGKey(0), x, True)
    sharded = libfsdp.jax.shard(variables, context)
    groups = list(sharded.model.groups)
    grad = jax.grad(lambda *arguments: flax_loss(module, *arguments), has_aux=True)
    params, stats = variables["params"], variables["batch_stats"]
    whole = libfsdp.jax.shard(params, context)  # beside it: parameters alone
    for _ in range(3):
        found = sharded.params()
        grads, changed = grad(found["params"], found["batch_stats"], x, y)
        sharded.apply_grads(grads, RATE)
        sharded.keep(changed)
        grads, changed = grad(whole.params(), stats, x, y)
        stats = changed["batch_stats"]
        whole.apply_grads(grads, RATE)
    full = sharded.full_params()
    are_groups = groups == ["params/Block_0", "params/Block_1", "params/Dense_0"] or groups
    has_moved = differ(full["batch_stats"], variables["batch_stats"]) > 0
    is_equal = differ(full["params"], whole.full_params()) == 0 and differ(full["batch_stats"], stats) == 0
    return are_groups if are_groups is not True else has_moved and is_equal


@case
def frozen_dicts_of_flax_stay_frozen_dicts(context):
    variables = FrozenDict(flax_module().init(jax.random.PRNGKey(0), batch(0)[0], True))
    sharded = libfsdp.jax.shard(variables, context)
    found = sharded.params()
    is_same = differ(found, variables) == 0 and isinstance(found, FrozenDict)
    return is_same and all(name.startswith("params/") for name in sharded.layers) or sharded.layers


def nnx_module():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(16, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.drop(nnx.tanh(self.linear(self.norm(x))))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks, self.head = nnx.List([Block(rngs) for _ in range(2)]), nnx.Linear(16, 5, rngs=rngs)

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Net(nnx.Rngs(0))


def nnx_loss(module, x, y):
    return jnp.mean((module(x) - y) ** 2)


@case
def nnx_modules_train_their_params(context):
    x, y = batch(0)
    sharded, alone = libfsdp.jax.shard(nnx_module(), context, no_decay=".*"), nnx_module()
    names = {name: [param.name for param in group.params] for name, group in sharded.model.groups.items()}
    optimizer = nnx.Optimizer(alone, optax_adamw(), wrt=nnx.Param)
    for _ in range(3):
        module = sharded.params()
        loss, grads = nnx.value_and_grad(nnx_loss)(module, x, y)
        sharded.apply_grads(grads, RATE)
        sharded.keep(module)
        wanted, grads = nnx.value_and_grad(nnx_loss)(alone, x, y)
        optimizer.update(alone, grads)
        if abs(loss - wanted) > 1e-5:
            return f"loss {loss}, alone {wanted}"
    found, expected = (nnx.split(module)[1] for module in (sharded.full_params(), alone))
    leaves = [jax.tree_util.tree_leaves(each) for each in (found, expected)]
    numbers = [[leaf for leaf in each if leaf.dtype == jnp.float32] for each in leaves]
    head = names.get("head") == ["head/bias", "head/kernel"] or names
    return head if head is not True else differ(*numbers) < 1e-4 and "blocks/1" in names


def optax_adamw():
    import optax

    return optax.adamw(RATE, weight_decay=0.0)


@case
def state_of_an_nnx_module_is_a_tree(context):
    graph, state = nnx.split(nnx_module())
    sharded, (x, y) = libfsdp.jax.shard(state, context), batch(0)
    params, rest = nnx.split_state(sharded.params(), nnx.Param, ...)

    def loss(params):
        module = nnx.merge(graph, params, rest)
        module.eval()  # batch statistics stay as they are
        return nnx_loss(module, x, y)

    grads = jax.grad(loss)(params)
    sharded.apply_grads(grads, RATE)
    changed = [differ(sharded.full_params()["head"][name], state["head"][name]) for name in ("kernel", "bias")]
    return min(changed) > 0 or changed


# -- the guide -----------------------------------------------------------------------------------------------------


def the_guide_s_first_program_prints_what_it_says(_folder):
    guide = (pathlib.Path(__file__).parents[2] / "docs/guides/jax.md").read_text()
    program, wanted = (guide.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "text"))
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return found.stdout == wanted or f"{found.stdout}{found.stderr[-300:]}"


case.add_alone("the guide's first program prints what it says", the_guide_s_first_program_prints_what_it_says)

if __name__ == "__main__":
    sys.exit(1 if case.run() else 0)
