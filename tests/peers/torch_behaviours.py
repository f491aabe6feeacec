#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The behaviours that the tests of PyTorch's FSDP2 ask for, one check a row: libfsdp.torch has it, or
docs/coming-from.md says that it is not offered.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_behaviours.py [--mode mapped|copied|debug]

Most rows are cases of the scripts beside this one, which it runs; a row holds if it has such cases and all of them
pass. Takes minutes. Needs torch (CPU is enough) and numpy. Reports in the Test Anything Protocol.
"""

import copy
import datetime
import os
import platform
import re
import subprocess
import sys

import torch
from torch import nn
from torch_check import Report, on_ranks, read_options

import libfsdp as fsdp

HERE = os.path.dirname(os.path.abspath(__file__))
RATE = 1e-2

# -- checks that no other script has ----------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers in a list, and a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.layers, self.scale = nn.ModuleList(nn.Linear(8, 8) for _ in range(8)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x * self.scale

    def score(self, x):
        return self.layers[0](x).sum()


class Inputless(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self):
        return self.layer(torch.ones(2, 8))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.conv(x[:, :1, None, None].expand(2, 4, 5, 5))


torch.manual_seed(0)
BASES = {kind: kind() for kind in (Net, Inputless, Images)}


def rows(rank):
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(rank))


def loss_of(module, rank):
    return (module() if isinstance(module, Inputless) else module(rows(rank))).pow(2).mean()


def gradients(kind, losses, mode, ranks=2, factor=1.0, options=lambda context: {}):
    """Are the sharded module's gradients the mean of those of torch alone, times the factor?"""
    alone = copy.deepcopy(BASES[kind])
    for rank in range(ranks):
        (losses(alone, rank) * factor / ranks).backward()

    def run(context, shard):
        module = copy.deepcopy(BASES[kind])
        sharded = shard(module, **options(context))
        losses(module, context.rank).backward()
        sharded.finish()
        worst = max(
            (sharded.read_grad(name) - param.grad).abs().max().item()
            for name, param in alone.named_parameters()
            if param.grad is not None
        )
        sharded.step(RATE)
        return worst < 1e-6 or f"gradients differ by {worst:.1e}"

    return next((found for found in on_ranks(ranks, mode, run) if found is not True), True)


def no_inputs(mode):
    return gradients(Inputless, loss_of, mode)


def scalars(mode):
    return gradients(Net, loss_of, mode)


def channels_last(mode):
    return gradients(Images, loss_of, mode)


def own_methods(mode):
    return gradients(Net, lambda module, rank: module.score(rows(rank)), mode)


def sums(mode):
    return gradients(Net, loss_of, mode, factor=2.0, options=lambda context: {"grad_op": fsdp.GradOp.SUM})


def factors(mode):
    options = {"grad_op": fsdp.GradOp.FACTOR, "grad_factor": 0.25}
    return gradients(Net, loss_of, mode, factor=0.5, options=lambda context: options)


def replicas(mode):
    """HSDP: two replicas of two ranks."""
    return gradients(Net, loss_of, mode, 4, options=lambda context: {"mesh": context.create_mesh(shard_size=2)})


def subsets(mode):
    """Ranks 0 and 2 train a model without the others."""

    def run(context, shard):
        if context.rank not in (0, 2):
            return True
        mesh = context.create_mesh(ranks=[0, 2])
        module = copy.deepcopy(BASES[Net])
        sharded = shard(module, mesh=mesh)
        loss_of(module, context.rank).backward()
        sharded.step(RATE)
        return sharded.full_state_dict()["layers.0.weight"].ne(BASES[Net].layers[0].weight).any().item()

    return next((found for found in on_ranks(3, mode, run) if found is not True), True)


def memory(mode):
    """Buffers for copied weights are those of held_groups groups, and mapped weights need none."""

    def run(context, shard):
        found = {}
        for held in (2, 4):
            sharded = shard(copy.deepcopy(BASES[Net]), held_groups=held)
            found[held] = sharded.model.role_bytes(fsdp.Role.GATHER)
            sharded.close()
        is_right = 0 < found[2] < found[4] if mode == "copied" else found[2] == found[4] == 0
        return is_right or str(found)

    return on_ranks(2, mode, run)[0]


# -- rows -------------------------------------------------------------------------------------------------------------

# A row holds by cases of scripts, given as (script, words of their names), or by a check of this one.
HOLDS = {
    "training: root_no_forward_inputs": [no_inputs],
    "training: to_float64_after_init": [("habits", "conversion is refused"), ("habits", "shard refuses float64")],
    "training: train_parity_single_group": [("groups", "all modules in one group")],
    "training: train_parity_multi_group": [("shard", "layers that give and take: tensor")],
    "training: unshard_async_op, explicit_prefetching": [("shard", "gathers ahead in the order of the last step")],
    "training: non_root_forward_backward": [("shard", "parts of the module alone")],
    "training: multi_forward_module": [("shard", "layers that are used twice")],
    "training: activation checkpointing": [("shard", "a checkpoint in each"), ("shard", "a reentrant checkpoint")],
    "training: fully_shard([a, b])": [("groups", "several modules")],
    "training: partial_group_forward_then_standalone": [("shard", "weights of a layer outside of it")],
    "training: grouped_module_cast_forward_inputs": [("groups", "inputs are cast")],
    "training: reset_iter_state_after_exception": [("habits", "an exception in"), ("groups", "outlasts an exception")],
    "training: double_forward": [("shard", "two forwards, one backward")],
    "training: shared_params": [("shard", "a tied head"), ("groups", "what modules of a group share")],
    "training: gradient_accumulation": [("shard", "several backward passes")],
    "training: 1f1b_microbatching": [("shard", "two forwards, two backwards")],
    "training: train_parity_hsdp": [replicas],
    "training: custom_forward_method": [own_methods],
    "autograd: unused_forward_output": [("shard", "an output that the loss does not use")],
    "autograd: unused_forward_module": [("shard", "a layer that is not used")],
    "autograd: nontensor_activations": [("shard", "layers that give and take")],
    "mixed_precision: compute_dtype": [("groups", "weights in param dtype")],
    "mixed_precision: reduce_dtype, output_dtype": [("groups", "dtypes of outputs and grads")],
    "mixed_precision: preserved dtypes": [("groups", "parameters have options"), ("shard", "dtypes side by side")],
    "clip_grad_norm: L2, 1, 3, inf": [("scaler", "clipping by norm")],
    "grad_scaler: GradScaler": [("scaler", "GradScaler with")],
    "memory: buffers of held groups": [memory],
    "state_dict: save_load": [("states", "state dict has the weights"), ("states", "load state dict takes values")],
    "state_dict: sharded": [("states", "a sharded state dict")],
    "state_dict: rank0_offload_full": [("states", "full state dict has buffers and tied names")],
    "frozen: mixed": [("shard", "frozen parameters")],
    "frozen: freeze_after_init": [("habits", "a frozen layer stays")],
    "frozen: unfreeze_params": [("habits", "unfreezing what was declared frozen")],
    "ignore_params": [("groups", "ignored parameters")],
    "init: meta device": [("initial", "values of reset parameters"), ("initial", "one rank makes the values")],
    "init: scalar parameter": [scalars],
    "init: channels_last": [channels_last],
    "init: double shard": [("habits", "sharded twice")],
    "init: mixed and integer dtypes": [("shard", "dtypes side by side"), ("habits", "shard refuses integers")],
    "init: process_group subset": [subsets],
    "extensions: FP8 all-gather": [("groups", "weights in FP8")],
    "comm: force_sum": [sums],
    "comm: set_gradient_divide_factor": [factors],
    "comm: unshard, reshard": [("groups", "a group of several modules is shown")],
    "compile": [("compile", "each layer, compiled after shard by eager")],
    "logging": [("groups", "the log tells the groups")],
}

# What docs/coming-from.md must say, in a row that says "not offered" or begins with "| - (".
NOT_OFFERED = {
    "training: root_move_forward_input_to_device": "root_move_forward_input_to_device",
    "training: param_registration_after_forward": "DTensor parameters",
    "training: shard_largest_dim, shard_placement_fn": "sharding of other dimensions",
    "training: cpu_offload": "CPUOffloadPolicy",
    "training: post_optim_event": "post_optim_event",
    "training: gradient synchronization of a part": "set_requires_gradient_sync",
    "training: 2d, 3d, tp_ep with DTensor": "DTensor parameters",
    "training: share_comm_ctx": "share_comm_ctx",
    "clip_grad_norm: 2d": "clip_grad_norm_",
    "mixed_precision: clamp_reduce_dtype": "clamp_reduce_dtype",
    "comm: custom comm": "set_custom_all_gather",
    "comm: reshard_after_forward=int, set_unshard_in_backward": "set_unshard_in_backward",
    "spmd_types, dtensor prefetch": "DTensor parameters",
}


def run_script(name, mode):
    """{name of a case: is it ok} of a script in the mode."""
    words = ["--mode", mode] + (["by eager"] if name == "compile" else [])
    command = [sys.executable, os.path.join(HERE, f"torch_{name}.py"), *words]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found = re.findall(r"^(not ok|ok) \d+ - ([^#\n]*)", ran.stdout, re.M)
    return {case: is_ok == "ok" for is_ok, case in found}


def holds(proofs, mode, results):
    for proof in proofs:
        if callable(proof):
            found = proof(mode)
            if found is not True:
                return found
            continue
        script, words = proof
        if script not in results:
            results[script] = run_script(script, mode)
        cases = {case: is_ok for case, is_ok in results[script].items() if words in case}
        failed = [case for case, is_ok in cases.items() if not is_ok]
        if failed or not cases:
            return f"torch_{script}.py: {', '.join(failed) or f'no case {words!r}'}"
    return True


def is_told(word):
    with open(os.path.join(HERE, "../../docs/coming-from.md"), encoding="utf-8") as file:
        told = [line for line in file if word in line and ("not offered" in line.lower() or line.startswith("| - ("))]
    return bool(told) or f"docs/coming-from.md does not say that {word!r} is not offered"


def main():
    options, report = read_options(), Report()
    for mode in options.modes[:2]:
        results = {}
        for row, proofs in HOLDS.items():
            report.run(f"{row} ({mode})", lambda: holds(proofs, mode, results))
    for row, word in NOT_OFFERED.items():
        report.run(f"{row} is not offered, and the guide says so", lambda: is_told(word))
    print(
        f"# {len(HOLDS)} hold, {len(NOT_OFFERED)} are not offered; {report.failed} checks failed. "
        f"{datetime.date.today()}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
