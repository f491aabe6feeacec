# SPDX-License-Identifier: Apache-2.0
"""Scenarios of matrices that come whole to one rank, as calls: see scenarios.py."""

from scenario_parts import ALL, GRADS, backward, counters, ending, load, read

# Single matrices, splits and stacks; up.bias and norm are no matrices. Ranks divide the stack inside its matrices.
DECLARED = {
    "mlp": (
        "up 10 4 matrix=MATRIX_LAST_TWO",
        "up.bias 10",
        "down 4 10 matrix=MATRIX_LAST_TWO",
    ),
    "attention": ("qkv 24 8 matrix=MATRIX_LAST_TWO splits=16,4,4", "norm 8"),
    "experts": (
        "stack 6 5 4 matrix=MATRIX_LAST_TWO row_dimensions=2",
        "pairs 2 3 4 6 matrix=MATRIX_LAST_TWO splits=1,3",
    ),
}
THREE = tuple((group, len(params)) for group, params in DECLARED.items())
QKV = ("attention", 0)


def model_with_matrices(options="", param_options=""):
    lines = ["create_model m" + options]
    for group, params in DECLARED.items():
        lines += [f"param {param}{param_options}" for param in params] + [f"create_group m {group}"]
    return [*lines, "seal_model m", *load(THREE), "publish_weights m"]


def read_grads(frozen=()):
    numbered = [(group, p) for group, count in THREE for p in range(count)]
    return [f"read_grad {group} {p} ->" for group, p in numbered if (group, p) not in frozen]


def steps(count, change="change_matrices m", frozen=()):
    lines = []
    for n in range(count):
        lines += [*backward(THREE, n, values=GRADS, frozen=frozen), "finish_grads m 0.5", change]
        lines += [*read_grads(frozen), "step_adamw m 0.01"]
    return lines


def trained():
    """The bits are those of one rank that changes the mean of the gradients."""
    of_models = {
        "optim_grads_params": (ALL, ""),
        "optim": ((2, 4), " strategy=STRATEGY_OPTIM"),
        "no_shard": ((2,), " strategy=STRATEGY_NO_SHARD"),
        "optim_grads_params_in_waves": ((2, 4), " matrix_bytes=1024"),
    }
    for name, (worlds, options) in of_models.items():
        lines = [*model_with_matrices(options), *steps(2), *read(THREE), *counters("version", "step")]
        yield f"matrices_of_{name}_match_reference", worlds, ending(*lines)
    grid = ["create_mesh grid replicate_size=2 shard_size=2"]
    lines = [*grid, *model_with_matrices(" mesh=grid outer_strategy=OUTER_OPTIM"), *steps(2)]
    yield "matrices_of_replicas_match_reference", (4,), ending(*lines, *read(THREE))


def rounded():
    """Matrices in bfloat16 are rounded on the way to their ranks."""
    lines = [*model_with_matrices(), *steps(2, "change_matrices m dtype=BFLOAT16")]
    yield "matrices_are_rounded_to_bfloat16", ALL, ending(*lines, *read(THREE))
    lines = model_with_matrices(" main_storage=MAIN_NONE rounding_seed=3", " dtype=BFLOAT16")
    lines += ["begin_update m", "change_matrices m source=main_weight", "publish_weights m"]
    yield "matrices_of_bfloat16_main_weights_match_reference", (1, 4), ending(*lines, *read(THREE))


def moved():
    """From gradients to a state, and from a state to main weights, which cannot be discarded any more."""
    lines = [*model_with_matrices(), *steps(1, "change_matrices m target=exp_avg")]
    lines += [*backward(THREE, 1), "finish_grads m 1", "change_matrices m source=exp_avg target=main_weight"]
    lines += ["discard_step m ! INVALID_STATE -1", "publish_weights m", *read(THREE)]
    return "matrices_go_from_one_state_to_another", ALL, ending(*lines, *steps(1))


def left_out():
    """A parameter that is not trained now keeps its main weights."""
    lines = [*model_with_matrices(), "set_param_trainable attention 0 0", *steps(1, frozen=(QKV,)), "begin_update m"]
    lines += ["change_matrices m source=main_weight", "publish_weights m", "set_param_trainable attention 0 1"]
    return "matrices_of_parameters_that_are_not_trained_stay", (1, 2), ending(*lines, *steps(1), *read(THREE))


def refused():
    """Matrices are collected inside the window, and nothing else is called until their rows are back."""
    lines = [
        *model_with_matrices(),
        "change_matrices m ! INVALID_STATE -1",
        "begin_update m",
        "change_matrices m ! INVALID_STATE -1",  # this window has no gradients
        "change_matrices m source=momentum ! INVALID_ARGUMENT -1",
        "change_matrices m source=exp_avg target=momentum ! INVALID_ARGUMENT -1",
        "publish_weights m",
        *backward(THREE, 0),
        "finish_grads m 0.5",
        "collect_matrices m",
        "collect_matrices m ! INVALID_STATE -1",
        "get_grad_norm m ! INVALID_STATE -1",
        "scale_grads m 2 ! INVALID_STATE -1",
        "step_adamw m 0.01 ! INVALID_STATE -1",
        "publish_weights m ! INVALID_STATE -1",
        "discard_step m",
        *steps(1),
    ]
    yield "matrices_that_are_collected_must_come_back", ALL, ending(*lines, *read(THREE))
    lines = [
        "create_model m main_storage=MAIN_SPLIT16",
        "param w 8 4 matrix=MATRIX_LAST_TWO splits=4,3",
        "create_group m w ! INVALID_ARGUMENT -1",
        "param w 8 matrix=MATRIX_LAST_TWO",
        "create_group m w ! INVALID_ARGUMENT -1",
        "param w 8 4 matrix=MATRIX_LAST_TWO flags=PARAM_FROZEN",
        "create_group m w ! INVALID_ARGUMENT -1",
        "param w 8 4 dtype=BFLOAT16 matrix=MATRIX_LAST_TWO",
        "create_group m w",
        "seal_model m",
        "publish_weights m",
        "begin_update m",
        "change_matrices m source=main_weight ! INVALID_ARGUMENT -1",  # it is in two halves
        "change_matrices m source=exp_avg",
        "publish_weights m",
        "create_model n matrix_bytes=64",
        "param w 8 4 matrix=MATRIX_LAST_TWO",
        "create_group n w",
        "seal_model n ! INVALID_ARGUMENT 0",
        "create_model o",
        "param w 8 4",
        "create_group o w",
        "seal_model o",
        "change_matrices o source=main_weight ! INVALID_STATE -1",  # it has no matrices
        "publish_weights o",
    ]
    yield "matrices_that_cannot_be_collected_are_refused", (1, 2), ending(*lines)


def all_scenarios():
    yield from trained()
    yield from rounded()
    yield moved()
    yield left_out()
    yield from refused()
