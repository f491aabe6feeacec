# SPDX-License-Identifier: Apache-2.0
"""Runs of calls that scenarios are made of."""

ALL = (1, 2, 4)
WEIGHTS = "40503 {} 0 16777213 24"  # in [-1/2, 1/2), every bit of an fp32 in use
GRADS = "69069 {} 5570563 16777213 22"  # in [-2, 2): sums of ranks are rounded
COARSE = "37 {} 29 251 6"  # exact in bf16 and fp16, and their squares add up exactly
BODY = ["param w1 10 8", "param b1 10 flags=PARAM_NO_DECAY"]
HEAD = ["param w2 6 10", "param b2 6"]


def load(groups):
    """groups: (name, number of parameters)."""
    numbered = [(group, p) for group, count in groups for p in range(count)]
    return [f"load_param {group} {p} {WEIGHTS.format(1000 * n)}" for n, (group, p) in enumerate(numbered)]


def read(groups, states=("exp_avg", "exp_avg_sq"), frozen=()):
    lines = []
    for group, count in groups:
        for p in range(count):
            lines.append(f"read_param {group} {p} ->")
            lines += [f"read_state {group} {p} {state} ->" for state in states if (group, p) not in frozen]
    return lines


def forward(groups, phase="FORWARD"):
    return [
        line
        for group, _ in groups
        for line in (f"unshard {group} {phase}", f"get_params {group} {phase} ->", f"reshard {group} {phase}")
    ]


def backward(groups, seed, is_last=True, values=GRADS, call="put_grad", frozen=()):
    lines = []
    for g, (group, count) in reversed(list(enumerate(groups))):
        lines.append(f"unshard {group} BACKWARD")
        for p in range(count):
            if (group, p) not in frozen:
                lines.append(f"{call} {group} {p} {values.format(seed * 7919 + g * 101 + p)}")
        lines += [f"reshard {group} BACKWARD", f"reduce_grad {group}" + (" flags=LAST" if is_last else "")]
    return lines


def step(groups, seed, optimizer="step_adamw m 0.01", scale="1", **how):
    return forward(groups) + backward(groups, seed, **how) + [f"finish_grads m {scale}", optimizer]


def ending(*more):
    return [*more, "close_context"]


TWO = (("body", 2), ("head", 2))


def two_groups(options="", group_options=""):
    return [
        f"create_model m{options}",
        *BODY,
        f"create_group m body{group_options}",
        *HEAD,
        "create_group m head",
        "seal_model m",
        *load(TWO),
        "publish_weights m",
    ]


def counters(*fields):
    return [f"get_stats m {field} ->" for field in fields]


def five_steps(options, count=5, **how):
    lines = two_groups(options)
    for n in range(count):
        call = how.pop("call", None) or ("put_grad", "acquire_grad")[n % 2]
        lines += step(TWO, n, "step_adamw m 0.01 weight_decay=0.1", call=call, **how)
    return ending(*lines, *read(TWO), *counters("version", "step", "reduces", "gathered_groups", "pending_grad_groups"))
