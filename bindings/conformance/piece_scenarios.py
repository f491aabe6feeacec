# SPDX-License-Identifier: Apache-2.0
"""Scenarios of groups whose pieces are gathered by themselves, as calls: see scenarios.py."""

from scenario_parts import ALL, GRADS, counters, ending, load, read

PIECES = {"body": (0, 1, 1), "head": (0, 0, 1)}
IN_PIECES = tuple((group, len(numbers)) for group, numbers in PIECES.items())


def groups_in_pieces(options=""):
    """Visits name pieces, and BACKWARD does not read the second group."""
    lines = ["create_model m unshard_mode=UNSHARD_COPIED" + options]
    for group, numbers in PIECES.items():
        lines += [f"param {group}.{p} {8 + p} 6 piece={piece}" for p, piece in enumerate(numbers)]
        lines.append(f"create_group m {group}" + " backward_weights=BACKWARD_WEIGHTS_NONE" * (group == "head"))
    lines += [f"visit {group} FORWARD piece={piece}" for group in PIECES for piece in (0, 1)]
    lines += ["visit head BACKWARD", "visit body BACKWARD piece=1", "visit body BACKWARD piece=0"]
    lines += ["set_schedule m SCHEDULE_VISITS", "seal_model m", *load(IN_PIECES)]
    return [*lines, "publish_weights m"]


def hold_piece(group, phase, piece, seed=None):
    """Looks at the parameters of the piece, and with a seed gives their gradients."""
    lines = [f"unshard {group} {phase} piece={piece}"]
    for p, number in enumerate(PIECES[group]):
        if number == piece:
            lines.append(f"get_param {group} {p} {phase} ->")
            lines += [] if seed is None else [f"put_grad {group} {p} {GRADS.format(seed + p)}"]
    return [*lines, f"reshard {group} {phase} piece={piece}"]


def step_in_pieces(n):
    lines = [line for group in PIECES for piece in (0, 1) for line in hold_piece(group, "FORWARD", piece)]
    lines += [f"put_grad head {p} {GRADS.format(n * 7919 + p)}" for p in range(3)]
    lines += ["unshard head BACKWARD ! INVALID_STATE -1", "unshard head BACKWARD piece=1 ! INVALID_STATE -1"]
    lines += ["reduce_grad head flags=LAST", *hold_piece("body", "BACKWARD", 1, n * 7919 + 101)]
    lines += [*hold_piece("body", "BACKWARD", 0, n * 7919 + 101), "reduce_grad body flags=LAST", "finish_grads m 1"]
    return [*lines, "step_adamw m 0.01 weight_decay=0.1"]


def pieces():
    """Pieces are gathered by themselves, and a hold is returned as it was taken."""
    lines = groups_in_pieces()
    for n in range(4):
        lines += step_in_pieces(n)
    lines += [
        "unshard body FORWARD piece=2 ! INVALID_ARGUMENT -1",
        "reshard body FORWARD piece=0 ! INVALID_STATE -1",
        "unshard body FORWARD piece=1",
        "reshard body FORWARD ! INVALID_STATE -1",
        "reshard body FORWARD piece=0 ! INVALID_STATE -1",
        "get_param body 2 FORWARD ->",
        "reshard body FORWARD piece=1",
    ]
    yield "pieces_are_gathered_and_held_separately", ALL, ending(*lines, *read(IN_PIECES), *counters("step"))
    lines = [
        *groups_in_pieces(" flags=MODEL_NO_PREFETCH"),
        "unshard body FORWARD piece=1",
        "get_param body 0 FORWARD ! INVALID_STATE -1",
        "get_params body FORWARD ! INVALID_STATE -1",
        "reshard body FORWARD piece=1",
        "get_param body 1 FORWARD ! INVALID_STATE -1",
        "unshard body FORWARD ! INVALID_STATE -1",  # its pieces share a buffer
        *step_in_pieces(0),
        *read(IN_PIECES),
    ]
    yield "pieces_that_are_not_held_are_not_readable", (2, 4), ending(*lines, *counters("step", "gathered_groups"))
