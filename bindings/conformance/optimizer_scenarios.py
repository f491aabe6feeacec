# SPDX-License-Identifier: Apache-2.0
"""Models in which the caller updates some parameters, and AdamW the others."""

from scenario_parts import ALL, COARSE, WEIGHTS, counters, ending, forward, load, step


def two_optimizers():
    """The caller updates w, whose new weights a load in the window stands for; AdamW updates b."""
    update = "load_param body 0 " + WEIGHTS
    groups, fails = (("body", 2),), "! INVALID_ARGUMENT -1"
    for name, optimizer in (("", ""), ("_in_8_bits", " optimizer=OPTIMIZER_ADAMW_8BIT")):
        lines = [f"create_model m{optimizer}", "param w 48 96 dtype=BFLOAT16 optimizer=OPTIMIZER_CALLER"]
        lines += ["param b 4100 optimizer=OPTIMIZER_ADAMW", "create_group m body"]
        lines += ["param wrong 8 optimizer=OPTIMIZER_CALLER flags=PARAM_FROZEN", f"create_group m head {fails}"]
        lines += ["seal_model m", *load(groups), "publish_weights m"]
        for n in range(3):
            lines += [*step(groups, n, update.format(17 * n + 5), values=COARSE), "step_adamw m 0.01"]
        for state in ("exp_avg", "exp_avg_sq"):
            lines += [f"read_state body 0 {state} {fails}", f"read_state body 1 {state} ->"]
        lines += ["read_param body 0 ->", "read_param body 1 ->", *forward(groups), *counters("version", "step")]
        yield f"optimizer_of_a_parameter{name}_matches_reference", ALL, ending(*lines)
    lines = ["create_model m optimizer=OPTIMIZER_CALLER", "param w 12 8 optimizer=OPTIMIZER_ADAMW"]
    yield "optimizer_that_the_model_lacks_is_refused", ALL, ending(*lines, f"create_group m body {fails}")
