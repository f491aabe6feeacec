# SPDX-License-Identifier: Apache-2.0
"""Scenarios of weights and optimizer states in fewer bits than fp32."""

from scenario_parts import ALL, COARSE, GRADS, WEIGHTS, ending, forward, load, read, step

ONE = (("body", 2),)
TIES = "37 {} 0 1021 9"  # every third lies in the middle between two bf16; their squares add up exactly
SEED = "rounding_seed=81985529216486895"


def low_precision():
    groups = (("body", 2),)
    for name, dtype, options in (
        ("bf16_matches_reference", "BFLOAT16", ""),
        ("bf16_with_fp32_grads_matches_reference", "BFLOAT16", " grad_dtype=FLOAT32 reduce_dtype=BFLOAT16"),
        ("fp16_matches_reference", "FLOAT16", ""),
        ("fp16_with_fp32_grads_matches_reference", "FLOAT16", " grad_dtype=FLOAT32 reduce_dtype=FLOAT16"),
    ):
        declared = [f"param w 12 8 dtype={dtype}", "param scale 12", "create_group m body", "seal_model m"]
        lines = ["create_model m" + options, *declared, *load(groups), "publish_weights m"]
        for n in range(5):
            w, scale = (GRADS if options else COARSE).format(n * 31), GRADS.format(n * 77)
            put = f"put_grad body 0 {w}" + ("" if options else f" dtype={dtype}")
            lines += [
                *forward(groups),
                "unshard body BACKWARD",
                put if n % 2 == 0 else f"acquire_grad body 0 {w}",
                f"put_grad body 1 {scale}",
                "reshard body BACKWARD",
                "reduce_grad body flags=LAST",
                "finish_grads m 1",
                "step_adamw m 0.01",
            ]
        yield name, ALL, ending(*lines, *read(groups), f"read_param body 0 dtype={dtype} ->", "check_replicas m")


def declared(options, dtype="BFLOAT16"):
    """A parameter of 16 bits, and one of 32, whose main weights are always fp32."""
    return [f"create_model m{options}", f"param w 12 8 dtype={dtype}", "param scale 12", "create_group m body"]


def five(groups, adamw="step_adamw m 0.01 weight_decay=0.1"):
    return [line for n in range(5) for line in step(groups, n * 31, adamw, values=COARSE)]


def main_storage():
    for name, options in (("split16", "MAIN_SPLIT16"), ("none", f"MAIN_NONE {SEED}")):
        begun = [*declared(f" main_storage={options}"), "seal_model m", *load(ONE), f"load_param body 0 {TIES.format(0)}"]
        lines = [*begun, "publish_weights m", *five(ONE), "check_replicas m", *read(ONE)]
        yield f"main_storage_{name}_matches_reference", ALL, ending(*lines, "get_stats m step ->")
    groups = (("split", 1), ("rounded", 1), ("wide", 1))
    for worlds, name, mesh in (
        (ALL, "of_groups", []),
        ((4,), "of_replicas", ["create_mesh mesh replicate_size=2 shard_size=2"]),
    ):
        lines = [*mesh, f"create_model m {SEED}" + (" mesh=mesh outer_strategy=OUTER_OPTIM" if mesh else "")]
        for (group, _), storage in zip(groups, (" main_storage=MAIN_SPLIT16", " main_storage=MAIN_NONE", "")):
            lines += [f"param {group}.w 10 8 dtype=BFLOAT16", f"create_group m {group}{storage}"]
        lines += ["seal_model m", *load(groups), "publish_weights m", *five(groups), "check_replicas m", *read(groups)]
        yield f"main_storage_{name}_matches_reference", worlds, ending(*lines)


def own_optimizer():
    """What fsdp_round_stochastic gives for steps of the caller's own."""
    lines = [*declared(f" main_storage=MAIN_NONE optimizer=OPTIMIZER_CALLER {SEED}"), "seal_model m", *load(ONE)]
    lines += [f"round_stochastic m body 0 1 {WEIGHTS.format(3)}", "publish_weights m", "read_param body 0 ->"]
    lines += [f"round_stochastic m body 0 2 {WEIGHTS.format(3)} ! INVALID_STATE -1", "begin_update m"]
    lines += [f"round_stochastic m body 1 2 {WEIGHTS.format(3)} ! INVALID_STATE -1"]
    lines += [f"round_stochastic m body 0 2 {WEIGHTS.format(3)}", "publish_weights m", "read_param body 0 ->"]
    return "numbers_are_rounded_stochastically", ALL, ending(*lines, *forward(ONE))


def coded(options="", dtype="FLOAT32", optimizer="OPTIMIZER_ADAMW_8BIT"):
    """Parameters whose blocks of 256 elements lie across rows, one whose last block is short, and a small one."""
    return [
        f"create_model m optimizer={optimizer}{options}",
        f"param w1 48 96 dtype={dtype}",
        f"param w2 100 48 dtype={dtype} flags=PARAM_NO_DECAY",
        "create_group m body",
        f"param v 4100 dtype={dtype}",
        f"param small 10 8 dtype={dtype}",
        "create_group m head",
        "seal_model m",
    ]


TWO = (("body", 2), ("head", 2))


def codes():
    sparse = "37 {} 29 25 6"  # blocks with zeros
    for name, options, dtype in (
        ("fp32", "", "FLOAT32"),
        ("split16", " main_storage=MAIN_SPLIT16", "BFLOAT16"),
        ("none", f" main_storage=MAIN_NONE {SEED}", "BFLOAT16"),
    ):
        lines = [*coded(options, dtype), *load(TWO), "publish_weights m"]
        for n in range(3):
            lines += step(TWO, n, "step_adamw m 0.01 weight_decay=0.1", values=(COARSE, sparse, COARSE)[n])
        lines += [*read(TWO), "begin_update m", f"load_state body 0 exp_avg {WEIGHTS.format(9)}"]
        lines += ["load_state body 0 exp_avg_sq 1 2050 0 4099 14", "read_state body 0 exp_avg ->"]
        lines += ["read_state body 0 exp_avg_sq ->", "publish_weights m", *step(TWO, 7, values=COARSE)]
        yield f"adamw_8bit_{name}_matches_reference", ALL, ending(*lines, "check_replicas m", *read(TWO))


def checkpoints():
    """A checkpoint of one form loads in that form on other numbers of ranks, and a checkpoint in fp32 loads in each
    form."""
    forms = {
        "wide": ("", "BFLOAT16", "OPTIMIZER_ADAMW"),
        "split": (" main_storage=MAIN_SPLIT16", "BFLOAT16"),
        "rounded": (f" main_storage=MAIN_NONE {SEED}", "BFLOAT16"),
    }
    for name, form in forms.items():
        lines = [*coded(*form), *load(TWO), "publish_weights m", *step(TWO, 3, values=COARSE)]
        yield f"checkpoints_of_{name}_weights_are_saved", ALL, ending(*lines, f"save m {name}")
    for name, folder in (("split", "split"), ("rounded", "rounded"), ("split", "wide"), ("rounded", "wide")):
        lines = [*coded(*forms[name]), f"load m 2 {folder} ->", "publish_weights m", *read(TWO)]
        lines += [*step(TWO, 4, values=COARSE), *read(TWO)]
        yield f"checkpoints_of_{folder}_weights_load_in_{name}_ones", ALL, ending(*lines)


def refused():
    """Combinations of options that none of these forms allows."""
    lines = [
        "create_model bad main_storage=4 ! INVALID_ARGUMENT -1",
        "create_model bad main_storage=MAIN_SPLIT16 optimizer=OPTIMIZER_CALLER ! INVALID_ARGUMENT -1",
        "create_model m optimizer=OPTIMIZER_CALLER",
        "param w 12 8 dtype=BFLOAT16",
        "create_group m body main_storage=MAIN_SPLIT16 ! INVALID_ARGUMENT -1",
        "param w 12 8 dtype=BFLOAT16",
        "create_group m body main_storage=4 ! INVALID_ARGUMENT -1",
        "param w 12 8 dtype=BFLOAT16",
        "create_group m body main_storage=MAIN_NONE",
        "seal_model m",
        f"load_param body 0 {WEIGHTS.format(0)}",
        "publish_weights m",
        "read_param body 0 ->",
    ]
    return "main_storage_that_does_not_fit_is_refused", ALL, ending(*lines)


def measured():
    """Norms of weights of every form, and zeros of gradients that are given, missing, or skipped."""
    lines = [
        "create_model m",
        "param w 12 8 dtype=BFLOAT16 missing_grad=MISSING_GRAD_SKIP",
        "param scale 12 missing_grad=MISSING_GRAD_SKIP",
        "create_group m split main_storage=MAIN_SPLIT16",
        "param v 6 10 dtype=BFLOAT16",
        "create_group m none main_storage=MAIN_NONE",
        "param base.w 16 8 dtype=FLOAT16 flags=PARAM_FROZEN",
        "param base.b 16 flags=PARAM_FROZEN",
        "create_group m base",
        "seal_model m",
    ]
    params = (("split", 0), ("split", 1), ("none", 0), ("base", 0), ("base", 1))
    lines += [f"load_param {group} {p} {TIES.format(100 * n)}" for n, (group, p) in enumerate(params)]
    lines += ["get_param_weight_norms m ->", "publish_weights m", "count_zero_grads m ! INVALID_STATE -1"]
    for given in ((0, 1, 2), (1,), (0,)):
        lines += ["get_param_weight_norms m ->", *forward((("split", 2), ("none", 1)))]
        for n, (group, p) in reversed(list(enumerate(params[:3]))):
            lines.append(f"put_grad {group} {p} {COARSE.format(n) if n in given else 'none'}")
        lines += ["reduce_grad none flags=LAST", "reduce_grad split flags=LAST", "finish_grads m 1"]
        lines += ["get_param_grad_norms m ->", "count_zero_grads m ->", "get_param_weight_norms m ->"]
        lines += ["get_grad_norm m ->", "discard_step m"]
    return "weights_are_measured_and_zeros_counted", ALL, ending(*lines)


def all_scenarios():
    yield from low_precision()
    yield from main_storage()
    yield own_optimizer()
    yield from codes()
    yield from checkpoints()
    yield measured()
    yield refused()
