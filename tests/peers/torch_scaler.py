#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""GradScaler, steps that are skipped and clipping with libfsdp.torch.shard, beside torch on whole gradients.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_scaler.py [--mode MODE] [WORD...]

MODE: mapped, copied or debug; default: all three.

WORD: only cases whose name has it. Needs torch (CPU is enough) and numpy; ranks are threads. Reports in the Test
Anything Protocol.
"""

import copy
import functools
import math
import sys
import tempfile

import torch
from torch import nn, optim
from torch_check import on_ranks, raises, run_cases
from torch_optimizers import BASE, KINDS, Alone, backward, inputs

import libfsdp as fsdp

LINEAR = nn.Linear(4, 9)


def in_files(folder):
    """Options of shard() for states and gradients at home in a file."""
    return {"state_home": fsdp.Home.FILE, "grad_home": fsdp.Home.FILE, "home_directory": folder}


def grad_scaler_skips_on_all_ranks(make, options, mode, ranks, homes=lambda folder: {}):
    """Inf on the last rank alone at step 2: all ranks skip it, and scale less; all else as without a scaler. A step
    with no gradients would not leave all as it was, because missing gradients are zeros here."""

    def run(context, shard, scaler):
        module = copy.deepcopy(BASE)
        zeros = fsdp.MissingGrad.ZEROS
        found = homes(folder) if scaler else {}
        sharded = shard(module, optimizer=make, optimizer_options=options, missing_grad=zeros, **found)
        scales, norms, steps = [], [], []
        for step in range(5):
            is_bad = step == 2 and context.rank == ranks - 1
            if scaler is None and step == 2:
                continue
            loss = module(inputs(step, context.rank)).pow(2).mean() * (math.inf if is_bad else 1)
            if scaler is None:
                loss.backward()
                norms.append(float(sharded.clip_grad_norm_(0.5)))
                sharded.optimizer.step()
                continue
            scaler.scale(loss).backward()
            if step != 3:
                scaler.unscale_(sharded.optimizer)
                norms.append(float(sharded.clip_grad_norm_(0.5)))
                if not found:
                    sharded.clip_grad_value_(1e9)
            else:
                norms.append(float(sharded.clip_grad_norm_(0.5 * scaler.get_scale())) / scaler.get_scale())
            scaler.step(sharded.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            sharded.optimizer.zero_grad()
        if scaler:
            sharded.save(f"{folder}/checkpoint")
            steps.append(sharded.load(f"{folder}/checkpoint").step)
        return sharded.full_state_dict(), (scales, steps), norms

    def rank(context, shard):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
        found, (scales, steps), norms = run(context, shard, scaler)
        wanted, _, wanted_norms = run(context, shard, None)
        if scales != [1024.0, 1024.0, 512.0, 512.0, 512.0] or steps != [4]:
            return f"scales {scales}, step {steps}"
        if norms[2] != math.inf or norms[:2] + norms[3:] != wanted_norms:
            return f"norms {norms}, not {wanted_norms}"
        bad = [name for name in wanted if not torch.equal(found[name], wanted[name])]
        return f"{bad} differ" if bad else ""

    with tempfile.TemporaryDirectory() as folder:
        return next(filter(None, on_ranks(ranks, mode, rank)), True)


def skip_nonfinite_leaves_all_as_it_was(make, mode, ranks):
    def rank(context, shard):
        module = copy.deepcopy(BASE)
        options = {"optimizer": make, "optimizer_options": {"lr": 0.1}} if make else {}
        sharded, rate = shard(module, **options), [] if make else [0.1]
        backward(module, context, 0)
        sharded.step(*rate, skip_nonfinite=True)
        told, before = [sharded.skipped_param], sharded.full_state_dict()
        for norm in (None, 1.0):
            backward(module, context, 1, math.nan if context.rank == ranks - 1 else 1.0)
            sharded.step(*rate, skip_nonfinite=True, max_norm=norm)
            told.append(sharded.skipped_param)
        after = sharded.full_state_dict()
        backward(module, context, 1)
        sharded.step(*rate, skip_nonfinite=True, max_norm=1.0)
        moved = not torch.equal(sharded.full_state_dict()["layers.0.weight"], before["layers.0.weight"])
        same = all(torch.equal(before[name], after[name]) for name in before)
        return (same and moved and told[0] is None and None not in told[1:] and sharded.skipped_param is None) or told

    found = on_ranks(ranks, mode, rank)
    return next((each for each in found if each is not True), True)


def clipping_by_norm_is_torchs(norm_type, options, mode, ranks):
    """Groups that every rank holds whole count once."""

    def rank(context, shard):
        module, alone = copy.deepcopy(BASE), Alone(optim.SGD, {"lr": 0.1})
        sharded = shard(module, optimizer=optim.SGD, optimizer_options={"lr": 0.1}, **options)
        for step in range(3):
            backward(module, context, step)
            sharded.finish()
            alone.take(sharded, step)
            wanted = torch.nn.utils.clip_grad_norm_(alone.params.values(), 0.01, norm_type)
            alone.optimizer.step()
            norm = sharded.clip_grad_norm_(0.01, norm_type)
            if not torch.allclose(norm, wanted, rtol=1e-5) or not wanted > 0.01:
                return f"norm {norm}, not {wanted}"
            sharded.step()
        return alone.differs(sharded, exact=False)

    return next(filter(None, on_ranks(ranks, mode, rank)), True)


def inf_in_one_ranks_shard_counts_for_all(mode, ranks):
    """Only the rank that owns row 0 has Inf: all skip the step. Clipping leaves the gradients as they are."""

    def rank(context, shard):
        module = copy.deepcopy(LINEAR)
        sharded = shard(module, optimizer=optim.SGD, optimizer_options={"lr": 0.1})
        factors = torch.tensor([math.inf] + 8 * [1.0])
        (module(torch.ones(1, 4)) * factors).sum().backward()
        if sharded.clip_grad_norm_(0.5, 1) != math.inf:
            return "a finite norm"
        if not torch.equal(sharded.read_grad("weight")[1:], torch.ones(8, 4)):
            return "clipped by an infinite norm"
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))  # a scaler must have scaled something
        scaler.step(sharded.optimizer)
        scaler.update()
        state = sharded.full_state_dict()
        if scaler.get_scale() != 4.0 or not torch.equal(state["weight"], LINEAR.weight):
            return f"scale {scaler.get_scale()}"
        return ""

    return next(filter(None, on_ranks(ranks, mode, rank)), True)


def clipping_by_value_is_torchs(mode, ranks):
    def rank(context, shard):
        module, alone = copy.deepcopy(BASE), Alone(optim.SGD, {"lr": 0.1})
        sharded = shard(module, optimizer=optim.SGD, optimizer_options={"lr": 0.1})
        for step in range(3):
            backward(module, context, step)
            sharded.finish()
            alone.take(sharded, step)
            torch.nn.utils.clip_grad_value_(alone.params.values(), 0.01)
            alone.optimizer.step()
            sharded.clip_grad_value_(0.01)
            sharded.step()
        return alone.differs(sharded)

    return next(filter(None, on_ranks(ranks, mode, rank)), True)


def a_small_norm_clips_nothing(mode, ranks):
    def rank(context, shard):
        module, alone = copy.deepcopy(BASE), Alone(optim.SGD, {"lr": 0.1})
        sharded = shard(module, optimizer=optim.SGD, optimizer_options={"lr": 0.1})
        backward(module, context, 0)
        sharded.finish()
        alone.take(sharded, 0).optimizer.step()
        sharded.clip_grad_norm_(1e9, 1)
        sharded.step()
        return alone.differs(sharded)

    return next(filter(None, on_ranks(ranks, mode, rank)), True)


def a_nonfinite_norm_is_told(mode, ranks):
    def rank(context, shard):
        module = copy.deepcopy(BASE)
        sharded = shard(module)
        for norm_type in (1, math.inf):
            backward(module, context, 0, math.nan if context.rank == 0 else 1.0)
            norm = sharded.clip_grad_norm_(1.0, norm_type)
            if math.isfinite(norm):
                return f"norm {norm}"
            clip = functools.partial(sharded.clip_grad_norm_, 1.0, norm_type, error_if_nonfinite=True)
            found = raises(clip, "is nan", "discard")
            sharded.discard()
            if found is not True:
                return found
        return ""

    return next(filter(None, on_ranks(ranks, mode, rank)), True)


def files_change_no_bit(make, options, mode, ranks):
    """Losses, norms and weights of four clipped steps of two backward passes each are those in memory."""
    base = copy.deepcopy(BASE).bfloat16()

    def run(context, shard, **homes):
        module, told = copy.deepcopy(base), []
        sharded = shard(module, optimizer=make, optimizer_options=options, **homes)
        for step in range(4):
            for part in (2 * step, 2 * step + 1):
                loss = module(inputs(part, context.rank).bfloat16()).float().pow(2).mean()
                loss.backward()
                told.append(loss.item())
            told.append(float(sharded.clip_grad_norm_(0.1)))
            sharded.step()
        return told, sharded.full_state_dict()

    def rank(context, shard):
        found, weights = run(context, shard, main_home=fsdp.Home.FILE, **in_files(folder))
        wanted, others = run(context, shard)
        bad = [name for name in others if not torch.equal(weights[name], others[name])]
        moved = not torch.equal(others["layers.0.weight"], base.state_dict()["layers.0.weight"])
        return "" if found == wanted and not bad and moved else f"{bad} differ; {found}, not {wanted}"

    with tempfile.TemporaryDirectory() as folder:
        return next(filter(None, on_ranks(ranks, mode, rank)), True)


def gradients_in_a_file_tell_which_clipping_there_is(mode, ranks):
    """A refused clipping leaves the step as it was."""

    def rank(context, shard):
        module = copy.deepcopy(BASE)
        sharded = shard(module, **in_files(folder))
        backward(module, context, 0)
        words = "grad_home is Home.FILE", "grad_home=Home.HOST"
        told = [
            raises(lambda: sharded.clip_grad_value_(0.1), "clip_grad_value_", "clip_grad_norm_(max_norm)", *words),
            raises(lambda: sharded.clip_grad_norm_(0.1, 1), "clip_grad_norm_", "norm_type is 1", *words),
        ]
        backward(module, context, 1)
        sharded.step(0.1, max_norm=0.1)
        return next((each for each in told if each is not True), "")

    with tempfile.TemporaryDirectory() as folder:
        return next(filter(None, on_ranks(ranks, mode, rank)), True)


def cases(mode):
    for ranks in (1, 2, 3):
        tail = f"({mode}, {ranks} ranks)"
        for function in (
            inf_in_one_ranks_shard_counts_for_all,
            clipping_by_value_is_torchs,
            a_small_norm_clips_nothing,
            a_nonfinite_norm_is_told,
            gradients_in_a_file_tell_which_clipping_there_is,
        ):
            yield f"{function.__name__.replace('_', ' ')} {tail}", lambda: function(mode, ranks)
        for kind in ("SGD, momentum", "Adam, fused"):
            make, options = KINDS[kind]
            yield f"GradScaler with {kind} {tail}", lambda: grad_scaler_skips_on_all_ranks(make, options, mode, ranks)
        options = {"lr": 0.1}
        yield f"GradScaler with AdamW {tail}", lambda: grad_scaler_skips_on_all_ranks(optim.AdamW, options, mode, ranks)
        name = f"GradScaler with AdamW at home in files {tail}"
        yield name, lambda: grad_scaler_skips_on_all_ranks(optim.AdamW, options, mode, ranks, in_files)
        for make in (fsdp.Optimizer.ADAMW, fsdp.Optimizer.ADAMW_8BIT, optim.AdamW):
            name = f"files change no bit, {getattr(make, 'name', 'torch.optim.AdamW')} {tail}"
            yield name, lambda: files_change_no_bit(make, options, mode, ranks)
        for make in (None, optim.SGD):
            name = f"skip_nonfinite with {make and make.__name__} {tail}"
            yield name, lambda: skip_nonfinite_leaves_all_as_it_was(make, mode, ranks)
        for norm_type in (1, 2, 3, math.inf):
            for strategy in (0, fsdp.Strategy.NO_SHARD):
                name = f"clipping by norm {norm_type} is torch's, strategy {int(strategy)} {tail}"
                options = {"strategy": strategy} if strategy else {}
                yield name, lambda: clipping_by_norm_is_torchs(norm_type, options, mode, ranks)


if __name__ == "__main__":
    sys.exit(run_cases(cases))
