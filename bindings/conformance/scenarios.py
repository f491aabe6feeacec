# SPDX-License-Identifier: Apache-2.0
"""The scenarios as calls, without the values that come back: reference.py puts them behind each "->".

Statuses and the rank of an error ("! STATUS RANK") are from the docstrings of include/fsdp.h.
"""

import expert_scenarios
import matrix_scenarios
import optimizer_scenarios
import piece_scenarios
import precision_scenarios
from scenario_parts import (
    ALL,
    BODY,
    COARSE,
    GRADS,
    HEAD,
    TWO,
    WEIGHTS,
    backward,
    counters,
    ending,
    five_steps,
    forward,
    load,
    read,
    step,
    two_groups,
)


def strategies():
    for strategy in ("NO_SHARD", "OPTIM", "OPTIM_GRADS", "OPTIM_GRADS_PARAMS"):
        yield "adamw_matches_reference_" + strategy.lower(), ALL, five_steps(f" strategy=STRATEGY_{strategy}")
    yield "adamw_matches_reference_copied", ALL, five_steps(" unshard_mode=UNSHARD_COPIED")
    yield "adamw_options_and_factor_match_reference", ALL, sum_and_options()


def sum_and_options():
    lines = two_groups(" grad_op=GRAD_OP_FACTOR grad_factor=0.3 flags=MODEL_NO_PREFETCH prefetch_depth=2")
    adamw = "step_adamw m 0.003 beta1=0.8 beta2=0.95 epsilon=1e-6 weight_decay=0.2"
    lines += ["prefetch body FORWARD", *step(TWO, 1, adamw + " step=7", scale="0.25"), *step(TWO, 2, adamw)]
    lines += ["set_param_lr_scale body 0 0.5", "set_param_lr_scale head 1 0", *step(TWO, 3, adamw)]
    return ending(
        *lines,
        *read(TWO),
        "get_stats m step ->",
        *[f"get_model_info m {field} ->" for field in ("group_count", "param_count", "element_count")],
    )


def scalars():
    """Parameters without dimensions, of which most ranks hold nothing; one of them is a group."""
    groups = (("alone", 1), ("body", 3))
    declared = [
        "create_model m",
        "param shift",
        "create_group m alone",
        "param gate dtype=FLOAT16 flags=PARAM_NO_DECAY",
        "param w 3 2",
        "param temperature",
        "create_group m body",
        "seal_model m",
    ]
    lines = [*declared, *load(groups), "publish_weights m"]
    for n in range(4):
        lines += step(groups, n, values=COARSE, call=("put_grad", "acquire_grad")[n % 2])
    lines += [*read(groups), "read_param body 0 dtype=FLOAT16 ->", "save m scalars"]
    yield "scalars_train_and_save", ALL, ending(*lines)
    lines = [*declared, "load m 2 scalars ->", "publish_weights m", *forward(groups), *step(groups, 4, values=COARSE)]
    yield "scalars_load_and_go_on", ALL, ending(*lines, *read(groups), "get_stats m step ->")


def tied():
    groups = (("embedding", 1), ("body", 2))
    lines = [
        "create_model m",
        "param table 16 8",
        "create_group m embedding flags=GROUP_ROOT",
        *BODY,
        "create_group m body",
        "seal_model m",
        *load(groups),
        "publish_weights m",
    ]
    for n in range(5):
        lines += [
            "unshard embedding FORWARD",
            "get_params embedding FORWARD ->",
            *forward(groups[1:]),
            "unshard embedding FORWARD",
            "reshard embedding FORWARD",
            "reshard embedding FORWARD",
            "unshard embedding BACKWARD",
            f"acquire_grad embedding 0 {GRADS.format(n)}",
            *backward(groups[1:], n),
            f"acquire_grad embedding 0 {GRADS.format(n + 500)}",
            "reshard embedding BACKWARD",
            "reduce_grad embedding flags=LAST",
            "finish_grads m 1",
            "step_adamw m 0.01",
        ]
    return "tied_weights_add_their_gradients", ALL, ending(*lines, *read(groups))


def frozen():
    groups, fixed = (("base", 2), ("adapter", 2)), (("base", 0), ("base", 1), ("adapter", 0))
    lines = [
        "create_model m",
        "param base.w 16 8 dtype=BFLOAT16 flags=PARAM_FROZEN",
        "param base.b 16 flags=PARAM_FROZEN",
        "create_group m base",
        "param a 8 4 flags=PARAM_FROZEN",
        "param b 16 4",
        "create_group m adapter",
        "seal_model m",
        *load(groups),
        "publish_weights m",
    ]
    for n in range(5):
        lines += [*forward(groups), *backward(groups[1:], n, frozen=fixed), "finish_grads m 1", "step_adamw m 0.01"]
    lines += [f"put_grad base 0 {GRADS.format(0)} ! INVALID_STATE -1", *forward(groups, "EVAL")]
    return (
        "frozen_weights_do_not_change",
        ALL,
        ending(*lines, "read_param base 1 ->", *read(groups[1:], frozen=fixed), "get_stats m reduces ->"),
    )


def accumulation():
    for policy in ("EACH", "LAST"):
        lines = two_groups(f" reduce_policy=REDUCE_POLICY_{policy}")
        for n in range(3):
            for k in range(3):
                lines += forward(TWO)
                lines += backward(TWO, 10 * n + k, is_last=k == 2, call=("put_grad", "acquire_grad")[k % 2])
            lines += ["finish_grads m 0.3333333333333333", "step_adamw m 0.01"]
        yield "micro_batches_add_up_" + policy.lower(), ALL, ending(*lines, *read(TWO), "get_stats m reduces ->")


def ended():
    """No contribution is marked as the last one, and some groups have none: fsdp_finish_grads ends them all."""
    for policy in ("EACH", "LAST"):
        lines = two_groups(f" reduce_policy=REDUCE_POLICY_{policy}")
        for n in range(4):
            for k in range(n):
                given = TWO[1:] if n == 3 else TWO
                lines += forward(given) + backward(given, 10 * n + k, is_last=False)
            lines += ["finish_grads m 0.5 flags=LAST", "step_adamw m 0.01"]
        lines += [*read(TWO), "get_stats m reduces ->"]
        yield "finish_grads_ends_contributions_" + policy.lower(), ALL, ending(*lines)


def whole_grads():
    lines = [*two_groups(" reduce_policy=REDUCE_POLICY_EACH"), "read_grad body 0 ! INVALID_STATE -1"]
    for n in range(2):
        lines += [*forward(TWO), *backward(TWO, n + 5), "finish_grads m 0.5"]
        lines += [f"read_grad {group} {p} ->" for group, count in TWO for p in range(count)]
        lines += [
            f"load_grad head 0 {WEIGHTS.format(n + 70)}",
            f"load_grad body 1 {GRADS.format(n + 80)} root=0",
            "read_grad head 0 ->",
            "read_grad body 1 ->",
            "read_grad body 1 dtype=BFLOAT16 ->",
            "read_grad head 9 ! INVALID_ARGUMENT -1",
            "step_adamw m 0.01",
            f"load_grad head 0 {WEIGHTS.format(1)} ! INVALID_STATE -1",
        ]
    return "whole_grads_are_read_and_loaded", ALL, ending(*lines, *read(TWO))


def parts():
    """Groups of three parameters of which two do not fit: reduced one after the other."""
    groups = (("body", 3), ("head", 3))
    lines = ["create_model m max_pending_bytes=16384"]
    for group, _ in groups:
        lines += [f"param {group}.a 96 32", f"param {group}.b 96 32", f"param {group}.c 96", f"create_group m {group}"]
    lines += ["seal_model m", *load(groups), "publish_weights m"]
    for n in range(3):
        lines += forward(groups)
        for g, (group, count) in reversed(list(enumerate(groups))):
            lines.append(f"unshard {group} BACKWARD")
            if n == 1:
                lines.append(f"complete_grad {group} 2 ! INVALID_STATE -1")
            for p in reversed(range(count)):
                call = ("put_grad", "acquire_grad")[(n + p) % 2]
                lines.append(f"{call} {group} {p} {GRADS.format(n * 7919 + g * 101 + p)}")
                lines.append(f"complete_grad {group} {p}")
                if n == 1:
                    lines.append(f"put_grad {group} {p} none ! INVALID_STATE -1")
                    lines.append(f"complete_grad {group} {p} ! INVALID_STATE -1")
            lines += [f"reshard {group} BACKWARD", f"reduce_grad {group} flags=LAST"]
        lines += ["finish_grads m 1", "step_adamw m 0.01"]
    return "parts_are_reduced_when_complete", ALL, ending(*lines, *read(groups), "get_stats m pending_grad_groups ->")


def zeroed():
    lines = two_groups()
    for n in range(2):
        lines += forward(TWO)
        for group in ("head", "body"):
            lines += [
                f"acquire_grads {group} {GRADS.format(n + 3)}",
                f"acquire_grads {group} {GRADS.format(n + 9)}",
                f"put_grad {group} 1 none",
                f"reduce_grad {group} flags=LAST",
            ]
        lines += ["finish_grads m 1", "step_adamw m 0.01"]
    return "zeroed_buffers_begin_at_zero", ALL, ending(*lines, *read(TWO))


def discarded():
    """A step that fails in the middle leaves nothing behind, wherever it fails."""
    lines = two_groups() + step(TWO, 0)
    lines += [
        "unshard body FORWARD",
        "unshard head FORWARD",
        "discard_step m",
        "reshard body FORWARD ! INVALID_STATE -1",
    ]
    lines += step(TWO, 1)
    lines += [
        *forward(TWO),
        "unshard head BACKWARD",
        f"put_grad head 0 {GRADS.format(9)}",
        "reduce_grad head flags=LAST ! INVALID_STATE -1",
        "discard_step m",
        *step(TWO, 2),
    ]
    lines += [
        *forward(TWO),
        *backward(TWO[1:], 77),
        "finish_grads m 1 ! INVALID_STATE 0",
        "unshard body FORWARD ! INVALID_STATE -1",
        "discard_step m",
        *step(TWO, 3),
    ]
    lines += [*forward(TWO), *backward(TWO, 78), "finish_grads m 1", "scale_grads m 3", "discard_step m", *step(TWO, 4)]
    return "discarded_steps_leave_nothing_behind", ALL, ending(*lines, *read(TWO), *counters("version", "step"))


def norms():
    lines = two_groups()
    for n, max_norm in enumerate(("0.5", "100000", "1")):
        lines += [
            *forward(TWO),
            *backward(TWO, n, values=COARSE),
            "finish_grads m 1",
            "check_grads m ->",
            "get_grad_norm m ->",
            f"clip_grads m {max_norm} ->",
            "step_adamw m 0.01",
        ]
    return "grads_are_clipped_by_their_norm", ALL, ending(*lines, *read(TWO))


def applied():
    lines = two_groups(" strategy=STRATEGY_OPTIM_GRADS")
    lines += [
        f"apply_grads m 0.01 {max_norm} {COARSE.format(n * 13)} weight_decay=0.1 ->"
        for n, max_norm in enumerate(("0", "1", "0.25", "1000", "0"))
    ]
    return "given_grads_are_clipped_and_applied", ALL, ending(*lines, *read(TWO), *counters("version", "step"))


def replicated():
    for name, options in (("hsdp", ""), ("hfsdp", " outer_strategy=OUTER_OPTIM")):
        lines = [
            "create_mesh mesh replicate_size=2 shard_size=2",
            *two_groups(" mesh=mesh" + options),
            "destroy_mesh mesh",
        ]
        for n in range(5):
            for k in range(2):
                lines += forward(TWO) + backward(TWO, 10 * n + k, is_last=k == 1)
            lines += ["finish_grads m 0.5", "step_adamw m 0.01"]
        lines += ["check_replicas m", *read(TWO), *counters("version", "step")]
        yield name + "_2x2_matches_reference", (4,), ending(*lines)


def updated():
    lines = two_groups() + step(TWO, 0)
    lines += [
        "begin_update m",
        f"load_param body 0 {WEIGHTS.format(5).replace(' 0 ', ' 77 ')} root=0",
        f"load_state head 0 exp_avg {WEIGHTS.format(9)}",
        "load_state head 0 exp_avg_sq 1 2050 0 4099 14",
        "publish_weights m",
    ]
    return "weights_and_states_are_replaced_in_an_update", ALL, ending(*lines, *step(TWO, 1), *read(TWO))


def values():
    lines = [
        f"all_reduce_values VALUE_{op} {count} {COARSE.format(count)} ->"
        for op in ("SUM", "MIN", "MAX", "MEAN")
        for count in (1, 512)
    ]
    lines.append(f"all_reduce_values VALUE_SUM 513 {COARSE.format(0)} ! INVALID_ARGUMENT -1")
    return "values_are_reduced_in_rank_order", ALL, ending(*lines)


def checkpoints():
    """Every language loads what another language saved, on the same and on other numbers of ranks."""
    kept = " strategy=STRATEGY_OPTIM_GRADS"
    lines = two_groups()
    for n in range(3):
        lines += step(TWO, n)
    yield (
        "checkpoints_are_saved",
        ALL,
        ending(*lines, "save m plain", "save m plain ! INVALID_STATE 0", *step(TWO, 3), "save m plain"),
    )
    lines = [
        *two_groups(),
        *step(TWO, 5),
        "begin_checkpoint c behind",
        "add_checkpoint_model c net m",
        f"add_checkpoint_bytes c cursor BYTES_ONCE 7 {COARSE.format(3).replace(' 29 ', ' 0 ')}",
        "commit_checkpoint c",
        *step(TWO, 6),
        "wait_checkpoint c",
        "destroy_checkpoint c",
    ]
    yield "checkpoints_are_saved_while_training_goes_on", ALL, ending(*lines, *read(TWO))
    for world in ALL:
        declared = two_groups(kept)[:-1]
        after = [*step(TWO, 4), *read(TWO), "get_stats m step ->"]
        yield (
            f"checkpoints_of_{world}_ranks_load",
            ALL,
            ending(*declared, f"load m {world} plain ->", "publish_weights m", *read(TWO), *after),
        )
        opened = [
            f"open_checkpoint c {world} behind",
            "load_checkpoint_model c net m ->",
            "read_checkpoint_bytes c cursor ->",
            "read_checkpoint_bytes c nothing ! INVALID_ARGUMENT -1",
            "destroy_checkpoint c",
            "publish_weights m",
        ]
        yield f"checkpoints_with_bytes_of_{world}_ranks_load", ALL, ending(*declared, *opened, *after)
    lines = [
        *two_groups()[:-1],
        "load m 2 plain flags=LOAD_WEIGHTS_ONLY ->",
        "publish_weights m",
        *step(TWO, 4),
        *read(TWO),
    ]
    yield "weights_load_alone", ALL, ending(*lines, "get_stats m step ->")


def misuse():
    """Errors of use leave the context as it was: at the end a step is trained as if there had been none."""
    data = WEIGHTS.format(0)
    lines = [
        "create_model bad strategy=9 ! INVALID_ARGUMENT -1",
        "create_model bad flags=1 ! INVALID_ARGUMENT -1",
        "create_mesh bad replicate_size=3 shard_size=5 ! INVALID_ARGUMENT -1",
        "create_model m",
        *BODY,
        "create_group m body",
        "param other 4",
        "create_group m body ! INVALID_ARGUMENT -1",
        "unshard body FORWARD ! INVALID_STATE -1",
        f"load_param body 0 {data} ! INVALID_STATE -1",
        "publish_weights m ! INVALID_STATE -1",
        *HEAD,
        "create_group m head",
        "seal_model m",
        "seal_model m ! INVALID_STATE -1",
        "param late 4",
        "create_group m late ! INVALID_STATE -1",
        "find_group m nothing ! INVALID_ARGUMENT -1",
        "unshard body FORWARD ! INVALID_STATE -1",
        "reduce_grad body flags=LAST ! INVALID_STATE -1",
        "discard_step m ! INVALID_STATE -1",
        f"load_param body 7 {data} ! INVALID_ARGUMENT -1",
        f"load_param body 0 {data} element_count=31 ! INVALID_ARGUMENT -1",
        f"load_param body 0 {data} dtype=9 element_count=80 ! INVALID_ARGUMENT -1",
        f"load_param body 0 {data} flags=1 ! INVALID_ARGUMENT -1",
        f"load_param body 0 {data} root=-2 ! INVALID_ARGUMENT -1",
        "load m 1 there_is_none ! SYSTEM 0",
        *load(TWO),
        "publish_weights m",
        "publish_weights m ! INVALID_STATE -1",
        f"load_param body 0 {data} ! INVALID_STATE -1",
        "step_adamw m 0.01 ! INVALID_STATE -1",
        "unshard body 9 ! INVALID_ARGUMENT -1",
        "reshard body FORWARD ! INVALID_STATE -1",
        "unshard body FORWARD",
        "reshard body BACKWARD ! INVALID_STATE -1",
        "begin_update m ! INVALID_STATE 0",
        "reshard body FORWARD",
        "discard_step m",
        "read_state body 0 momentum ! INVALID_ARGUMENT -1",
        "set_param_lr_scale body 0 -1 ! INVALID_ARGUMENT -1",
        f"put_grad body 9 {data} ! INVALID_ARGUMENT -1",
        "reduce_grad body flags=MODEL_NO_PREFETCH ! INVALID_ARGUMENT -1",
        f"put_grad body 0 {data}",
        "reduce_grad body flags=LAST ! INVALID_STATE -1",
        f"put_grad body 1 {data}",
        "reduce_grad body flags=LAST",
        "reduce_grad body flags=LAST ! INVALID_STATE -1",
        f"acquire_grad body 0 {data} ! INVALID_STATE -1",
        "discard_step m",
        *forward(TWO),
        *backward(TWO, 1),
        "finish_grads m 1",
        "unshard body FORWARD ! INVALID_STATE -1",
        "clip_grads m 0 ! INVALID_ARGUMENT -1",
        "save m never ! INVALID_STATE -1",
        "step_adamw m 0.01 beta1=-1 ! INVALID_ARGUMENT -1",
        "step_adamw m 0.01",
        *read(TWO),
        "destroy_model m",
        "publish_weights m ! INVALID_HANDLE -1",
        "unshard body FORWARD ! INVALID_HANDLE -1",
    ]
    yield "misuse_changes_nothing", ALL, ending(*lines)


def differing():
    """Ranks make different calls: all ranks get the error, with the rank that differs from the first."""
    several = (2, 4)
    lines = [
        *two_groups(),
        *forward(TWO),
        *backward(TWO, 0),
        "finish_grads m 1",
        "on 1 step_adamw m 0.02 ! MISMATCH 1",
        "off 1 step_adamw m 0.01 ! MISMATCH 1",
        "discard_step m",
    ]
    yield "different_lr_names_the_rank", several, ending(*lines, *step(TWO, 1), *read(TWO))
    lines = [*two_groups(), "on 1 set_param_trainable body 0 0", "begin_update m ! MISMATCH 1", "discard_step m"]
    lines += ["on 1 set_param_trainable body 0 1", *step(TWO, 1), *read(TWO)]
    yield "different_trainable_names_the_rank", several, ending(*lines)
    lines = [
        "create_model m",
        "on 1 param w 9 8",
        "off 1 param w 8 8",
        "create_group m body",
        "seal_model m ! MISMATCH 1",
    ]
    yield "different_shape_names_the_rank", several, lines
    lines = [
        *two_groups(),
        "on 0 abort_context",
        "on 0 begin_update m ! ABORTED 0",
        "off 0 begin_update m ! PEER_FAILED 0",
    ]
    yield "abort_names_the_rank", several, lines


def trainable():
    """Parameters and a whole group stop training for some steps, and train again later."""
    adamw = "step_adamw m 0.01 weight_decay=0.1"
    put = f"put_grad body 0 {GRADS.format(5)}"
    lines = [*two_groups(), *step(TWO, 0, adamw), "set_param_trainable body 0 0", put + " ! INVALID_STATE -1"]
    lines += step(TWO, 1, adamw, frozen=[("body", 0)])
    lines += ["set_param_trainable head 0 0", "set_param_trainable head 1 0"]
    lines += step(TWO, 2, adamw, frozen=[("body", 0), ("head", 0), ("head", 1)])
    lines += [*read(TWO), *counters("step", "reduces", "pending_grad_groups"), "set_param_trainable body 0 1", put]
    lines += ["set_param_trainable head 0 1 ! INVALID_STATE -1", "discard_step m"]
    lines += ["set_param_trainable head 0 1", "set_param_trainable head 1 1", *step(TWO, 3, adamw)]
    return "untrained_params_are_left_out_of_steps", ALL, ending(*lines, *read(TWO), *counters("step", "reduces"))


def missing():
    """A step without a gradient for either skips w1 but not b1; a gradient on one rank is enough to train w1."""
    groups, adamw = (("body", 2),), ["finish_grads m 1", "step_adamw m 0.01 weight_decay=0.1"]
    lines = ["create_model m", "param w1 10 8 missing_grad=MISSING_GRAD_SKIP"]
    lines += ["param b1 10 missing_grad=MISSING_GRAD_ZEROS", "create_group m body", "seal_model m"]
    lines += [*load(groups), "publish_weights m", *step(groups, 0)]
    lines += ["put_grad body 0 none", "put_grad body 1 none", "reduce_grad body flags=LAST", *adamw, *read(groups)]
    lines += [f"on 0 put_grad body 0 {GRADS.format(3)}", "off 0 put_grad body 0 none"]
    lines += [f"put_grad body 1 {GRADS.format(4)}", "reduce_grad body flags=LAST", *adamw, *read(groups)]
    return "missing_grads_are_skipped_or_zero", ALL, ending(*lines, *counters("step"))


def stacks():
    """Ranks divide the matrices of a stack, which changes no bit; a row cannot lie in more dimensions than there are."""
    groups = (("body", 2),)
    lines = ["create_model m", "param up 3 5 4 row_dimensions=4", "param pair 2 30 row_dimensions=2"]
    lines += ["create_group m body ! INVALID_ARGUMENT -1"]
    lines += ["param up 3 5 4 row_dimensions=2", "param pair 2 30 row_dimensions=2", "create_group m body"]
    lines += ["seal_model m", *load(groups), "publish_weights m"]
    return "stacks_are_divided_inside_their_matrices", ALL, ending(*lines, *step(groups, 0), *read(groups))


def read_planes(phase, planes):
    return [
        f"unshard body {phase}",
        *[f"get_plane body 0 {phase} PLANE_{plane} ->" for plane in planes],
        f"swizzle_scales body 0 {phase} PLANE_{planes[1]} ->",
        f"reshard body {phase}",
    ]


def mxfp8():
    """Before and after a step: what each phase reads, and its scales as a GEMM reads them."""
    groups = (("body", 2),)
    lines = [
        "create_model m unshard_mode=UNSHARD_COPIED",
        "param q 64 96 quantization=QUANTIZE_MXFP8",
        "param b 10",
        "create_group m body",
        "seal_model m",
        *load(groups),
        "publish_weights m",
    ]
    both = read_planes("FORWARD", ("ROW", "ROW_SCALE"))
    both += read_planes("BACKWARD", ("COLUMN", "COLUMN_SCALE"))
    lines += [*both, *backward(groups, 1), "finish_grads m 1", "step_adamw m 0.01", *both]
    return "mxfp8_planes_match_reference", ALL, ending(*lines, "read_param body 0 ->")


def private_views():
    """Views that may be restored at any time; nothing that is trained changes by it."""
    lines = two_groups(" view_kind=VIEWS_PRIVATE")
    lines += ["restore_view body", "unshard body FORWARD", "restore_view body", "get_params body FORWARD ->"]
    lines += ["reshard body FORWARD", *step(TWO, 1), "restore_view head", *step(TWO, 2)]
    yield "private_views_are_restored_at_any_time", ALL, ending(*lines, *read(TWO))
    lines = two_groups(" unshard_mode=UNSHARD_COPIED flags=MODEL_NO_PREFETCH")
    lines += ["restore_view body", "unshard body FORWARD", "restore_view body ! INVALID_STATE -1"]
    lines += ["reshard body FORWARD", "restore_view body", *step(TWO, 1)]
    yield "copied_views_are_restored_while_not_held", (2, 4), ending(*lines, *read(TWO))
    lines = [*two_groups(), "restore_view body ! INVALID_STATE -1", *step(TWO, 1)]
    yield "read_only_views_are_not_restored", ALL, ending(*lines)


def any_order():
    """Groups held out of order and two at once, in two buffers: copied weights move from hold to hold."""
    groups = (*TWO, ("tail", 1))
    in_turns = [
        *("unshard head FORWARD", "unshard body FORWARD", "get_params head FORWARD ->", "get_params body FORWARD ->"),
        "reshard head FORWARD",
        *("unshard tail FORWARD", "get_params tail FORWARD ->", "get_params body FORWARD ->"),
        *("unshard body BACKWARD", "reshard body FORWARD", "get_params body BACKWARD ->", "reshard body BACKWARD"),
        *("unshard head FORWARD", "get_params head FORWARD ->", "get_params tail FORWARD ->"),
        *("reshard tail FORWARD", "reshard head FORWARD"),
        *("prefetch body FORWARD", "unshard tail FORWARD", "unshard body FORWARD", "get_params body FORWARD ->"),
        *("get_params tail FORWARD ->", "reshard tail FORWARD", "reshard body FORWARD"),
    ]
    train = [backward(groups[g : g + 1], 7 * g) for g in (1, 2, 0)]
    steps = [*in_turns, *[line for lines in train for line in lines], "finish_grads m 1", "step_adamw m 0.01"] * 2
    for worlds, mode in ((ALL, "MAPPED"), ((2, 4), "COPIED")):
        declared = two_groups(f" unshard_mode=UNSHARD_{mode}")
        seal = declared.index("seal_model m")
        more = ["param w3 7 6", "create_group m tail"]
        more += ["set_schedule m SCHEDULE_SEQUENTIAL held_groups=2 ! INVALID_ARGUMENT -1"]
        more += ["set_schedule m SCHEDULE_ANY held_groups=2"]
        lines = [*declared[:seal], *more, "seal_model m", *load(groups), "publish_weights m", *steps]
        if mode == "COPIED":
            lines += [
                *("unshard tail FORWARD", "unshard body FORWARD", "unshard head FORWARD ! INVALID_STATE -1"),
                *("get_params tail FORWARD ->", "get_params body FORWARD ->", "reshard tail FORWARD"),
                *("unshard head FORWARD", "get_params head FORWARD ->", "reshard body FORWARD", "reshard head FORWARD"),
            ]
        yield mode.lower() + "_groups_are_held_in_any_order", worlds, ending(*lines, *steps, *read(groups))


def all_scenarios():
    """(name, worlds, calls) of each, in the order of the file."""
    yield from strategies()
    yield from precision_scenarios.all_scenarios()
    yield from scalars()
    yield mxfp8()
    yield from private_views()
    yield from any_order()
    yield from piece_scenarios.pieces()
    yield from expert_scenarios.all_scenarios()
    yield from matrix_scenarios.all_scenarios()
    yield tied()
    yield frozen()
    yield from accumulation()
    yield from ended()
    yield whole_grads()
    yield zeroed()
    yield trainable()
    yield missing()
    yield from optimizer_scenarios.two_optimizers()
    yield stacks()
    yield parts()
    yield discarded()
    yield norms()
    yield applied()
    yield from replicated()
    yield updated()
    yield values()
    yield from checkpoints()
    yield from misuse()
    yield from differing()
