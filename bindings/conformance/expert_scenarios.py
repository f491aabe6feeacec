# SPDX-License-Identifier: Apache-2.0
"""Scenarios of experts: groups that only some of the model's ranks share, as calls. See scenarios.py."""

from scenario_parts import ALL, BODY, COARSE, GRADS, HEAD, TWO, WEIGHTS, counters, ending, read

WORLD = 4
EXPERTS = 2  # parameters of the experts' group


def each(line):
    """The line for each rank by itself; {half} is which half of the experts the rank has."""
    return [f"on {rank} " + line.format(half=rank % 2) for rank in range(WORLD)]


def mesh_of_experts(options=""):
    return [f"on {rank} create_mesh some {rank % 2} {rank % 2 + 2}{options}" for rank in range(WORLD)]


def model_with_experts(options="", experts="", mesh=""):
    """Ranks 0 and 2 share one half of the experts, ranks 1 and 3 the other half, under other names."""
    lines = [*mesh_of_experts(mesh), f"create_model m{options}", *BODY, "create_group m body"]
    for p in range(EXPERTS):
        lines += each(f"param experts.{{half}}.{p} {6 + p} 4")
    lines += [f"create_group m experts mesh=some{experts}", "destroy_mesh some", *HEAD, "create_group m head"]
    lines.append("seal_model m")
    for p in range(2):
        lines += [f"load_param {group} {p} {WEIGHTS.format(1000 * p + g)}" for g, (group, _) in enumerate(TWO)]
        lines += [
            f"on {rank} load_param experts {p} {WEIGHTS.format(5000 + 100 * p + 977 * (rank % 2))}" for rank in range(WORLD)
        ]
    return [*lines, "publish_weights m"]


def forward_with_experts(phase="FORWARD"):
    lines = []
    for group in ("body", "experts", "head"):
        lines.append(f"unshard {group} {phase}")
        show = f"get_params {group} {phase} ->"
        lines += each(show) if group == "experts" else [show]
        lines.append(f"reshard {group} {phase}")
    return lines


def backward_with_experts(seed, values=GRADS, is_last=True):
    lines = []
    for g, group in enumerate(("head", "experts", "body")):
        lines.append(f"unshard {group} BACKWARD")
        call = ("put_grad", "acquire_grad")[(seed + g) % 2]
        lines += [f"{call} {group} {p} {values.format(seed * 7919 + g * 101 + p)}" for p in range(2)]
        lines += [f"reshard {group} BACKWARD", f"reduce_grad {group}" + (" flags=LAST" if is_last else "")]
    return lines


def read_with_experts():
    lines = read(TWO)
    for p in range(EXPERTS):
        lines += each(f"read_param experts {p} ->")
        lines += [line for state in ("exp_avg", "exp_avg_sq") for line in each(f"read_state experts {p} {state} ->")]
    return lines


def steps_with_experts(count=2, microbatches=2):
    lines = []
    for n in range(count):
        for k in range(microbatches):
            lines += forward_with_experts() + backward_with_experts(10 * n + k, is_last=k + 1 == microbatches)
        lines += [f"finish_grads m {1 / microbatches}", "step_adamw m 0.01 weight_decay=0.1"]
    return lines


def trained():
    """Dense layers and experts train in turn: with one mean, with a factor or a sum of their own, and with replicas."""
    of_strategies = {
        "optim_grads_params": "",
        "optim": " strategy=STRATEGY_OPTIM",
        "no_shard": " strategy=STRATEGY_NO_SHARD",
    }
    for name, option in of_strategies.items():
        lines = model_with_experts(experts=option) + steps_with_experts() + read_with_experts()
        yield f"experts_of_{name}_have_a_mesh_of_their_own", (WORLD,), ending(*lines, *counters("version", "reduces"))
    lines = model_with_experts(" unshard_mode=UNSHARD_COPIED", " grad_op=GRAD_OP_FACTOR grad_factor=0.75")
    yield "experts_have_their_own_grad_factor", (WORLD,), ending(*lines, *steps_with_experts(), *read_with_experts())
    lines = model_with_experts(" grad_op=GRAD_OP_FACTOR grad_factor=0.3", " grad_op=GRAD_OP_SUM")
    yield "grads_of_experts_are_summed", (WORLD,), ending(*lines, *steps_with_experts(), *read_with_experts())


def replicated():
    """Each group has replicas of its own, and says what they divide."""
    grid = ["create_mesh grid replicate_size=2 shard_size=2"]
    lines = [*grid, *model_with_experts(" mesh=grid outer_strategy=OUTER_OPTIM"), *steps_with_experts()]
    yield "experts_without_replicas_train_beside_replicas", (WORLD,), ending(*lines, *read_with_experts())
    lines = model_with_experts("", " outer_strategy=OUTER_OPTIM", " replicate_size=2 shard_size=1")
    yield "experts_have_their_own_replicas", (WORLD,), ending(*lines, *steps_with_experts(), *read_with_experts())


def alone():
    """A mesh of one rank: no rank shares its experts."""
    lines = ["on 0 create_mesh own 0", "on 1 create_mesh own 1", "create_model m", *BODY, "create_group m body"]
    lines += [f"on {rank} param experts.{rank} 6 4" for rank in range(2)]
    lines += ["create_group m experts mesh=own", "seal_model m"]
    for rank in range(2):
        lines.append(f"on {rank} load_param experts 0 {WEIGHTS.format(rank)}")
    lines.append("publish_weights m")
    for n in range(3):
        lines += [f"put_grad experts 0 {COARSE.format(n)}", "reduce_grad experts flags=LAST"]
        lines += [f"put_grad body {p} {COARSE.format(n + p)}" for p in range(2)]
        lines += ["reduce_grad body flags=LAST", "finish_grads m 1", "get_grad_norm m ->", "step_adamw m 0.01"]
    lines += [f"on {rank} read_param experts 0 ->" for rank in range(2)]
    return "experts_may_be_on_one_rank", (2,), ending(*lines, "read_param body 0 ->")


def norms():
    """One norm of all experts and dense layers, on every rank."""
    lines = model_with_experts()
    for n in range(3):
        lines += [*backward_with_experts(n, COARSE), "finish_grads m 1", "get_grad_norm m ->", "check_grads m ->"]
        lines += each("get_param_grad_norms m ->")
        lines += ["count_zero_grads m ->", f"clip_grads m {4 ** n / 4} ->"]
        lines += each("read_grad experts 0 ->")
        lines.append("step_adamw m 0.01")
    return "experts_and_dense_layers_have_one_norm", (WORLD,), ending(*lines, *read_with_experts())


def saved():
    """A checkpoint has the experts of all ranks, which other ranks divide in another way."""
    lines = [*model_with_experts(), *steps_with_experts(2, 1), "begin_checkpoint c experts"]
    lines += ["add_checkpoint_model c net m", "commit_checkpoint c", "wait_checkpoint c", "destroy_checkpoint c"]
    yield "experts_are_saved", (WORLD,), ending(*lines)
    lines = ["create_model m", *BODY, "create_group m body", *HEAD, "create_group m head"]
    names = [f"experts.{half}.{p}" for half in range(2) for p in range(EXPERTS)]
    lines += [f"param {name} {6 + int(name[-1])} 4" for name in names]
    lines += ["create_group m experts", "seal_model m", "open_checkpoint c 4 experts"]
    lines += ["load_checkpoint_model c net m ->", "destroy_checkpoint c", "publish_weights m"]
    yield "all_experts_are_loaded", ALL, ending(*lines, *read((*TWO, ("experts", len(names)))))


def refused():
    """A group's mesh has ranks of the model only."""
    lines = [f"on {rank} create_mesh pair {rank - rank % 2} {rank - rank % 2 + 1}" for rank in range(WORLD)]
    lines += ["create_model m mesh=pair", *mesh_of_experts(), "param w 8 4"]
    lines.append("create_group m w mesh=some ! INVALID_ARGUMENT -1")
    return "experts_are_shared_by_ranks_of_the_model", (WORLD,), ending(*lines)


def all_scenarios():
    yield from trained()
    yield from replicated()
    yield alone()
    yield norms()
    yield from saved()
    yield refused()
