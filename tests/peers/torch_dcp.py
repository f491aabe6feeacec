#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Folders of torch.distributed.checkpoint: a job of FSDP2 on two processes trains and saves, and goes on here with the
losses that it has itself. A job here goes on under FSDP2, if safetensors is installed. Folders that would run code, and
broken ones, are refused.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_dcp.py [--mode mapped|copied|debug] [WORD...]

WORD: only cases whose name has it. Needs torch with FSDP2 (CPU is enough) and numpy; here ranks are threads. Reports in
the Test Anything Protocol.
"""

import copy
import importlib.util
import os
import pickle
import shutil
import socket
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch_check import on_ranks, raises, run_cases

import libfsdp as fsdp

RANKS, STEPS, RATE, DECAY = 2, 10, 1e-2, 0.1


class Net(nn.Module):
    """Rows that two ranks divide unevenly, and buffers."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(13, 5), nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, 13)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def loss_of(module, step, rank):
    x = torch.randint(13, (8,), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(module(x), (x + 1) % 13)


def train_by_fsdp2(rank, folder, port):
    """Trains, saves after STEPS steps, and goes on; saves its losses after that."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    module = Net()
    for layer in module.layers:
        fully_shard(layer)
    fully_shard(module)
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY), []
    for step in range(2 * STEPS):
        if step == STEPS:
            values, states = get_state_dict(module, optimizer)
            dcp.save({"app": {"model": values, "optim": states}}, checkpoint_id=f"{folder}/saved")
        loss = loss_of(module, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.save(losses[STEPS:], f"{folder}/losses-{rank}")
    dist.destroy_process_group()


def go_on_by_fsdp2(rank, folder, port):
    """Loads a checkpoint of Sharded.save by the reader of Hugging Face's files, and trains on; saves its losses."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    module, losses = Net(), []
    for layer in module.layers:
        fully_shard(layer)
    fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=DECAY)
    saved = next(entry.path for entry in os.scandir(f"{folder}/ours") if entry.name.startswith("step-"))
    named = {name: param.detach() for name, param in module.named_parameters()}
    dcp.load(dict(named), storage_reader=HuggingFaceStorageReader(saved))
    kinds = "exp_avg", "exp_avg_sq"
    states = {f"state.{name}.{kind}": torch.zeros_like(param) for name, param in named.items() for kind in kinds}
    states |= {f"state.{name}.step": torch.zeros(()) for name in named}
    dcp.load(states, storage_reader=HuggingFaceStorageReader(f"{saved}/optimizer/0000"))
    for name, param in module.named_parameters():
        optimizer.state[param] = {kind: states[f"state.{name}.{kind}"] for kind in ("step", *kinds)}
    for step in range(STEPS, 2 * STEPS):
        loss = loss_of(module, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.save(losses, f"{folder}/their-losses-{rank}")
    dist.destroy_process_group()


def spawn(function, folder):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torch.multiprocessing.spawn(function, (folder, port), nprocs=RANKS)


def fsdp2_goes_on_from_here(mode):
    def train(context, shard):
        module, losses = copy.deepcopy(OTHER), []
        sharded = shard(module, no_decay=lambda name, param: False)
        for step in range(2 * STEPS):
            if step == STEPS:
                sharded.save(f"{FOLDER}/ours")
            loss = loss_of(module, step, context.rank)
            loss.backward()
            sharded.step(RATE, weight_decay=DECAY)
            losses.append(loss.item())
        return losses[STEPS:]

    shutil.rmtree(f"{FOLDER}/ours", ignore_errors=True)
    wanted = on_ranks(RANKS, mode, train)
    spawn(go_on_by_fsdp2, FOLDER)
    found = [torch.load(f"{FOLDER}/their-losses-{rank}") for rank in range(RANKS)]
    worst = max(abs(a - b) for one, other in zip(found, wanted) for a, b in zip(one, other))
    return worst < 1e-5 or f"losses differ by {worst:.1e}"


def save_by_fsdp2():
    folder = tempfile.TemporaryDirectory()
    spawn(train_by_fsdp2, folder.name)
    return folder


def go_on(context, shard, load, **options):
    """Loads into another module, and returns the losses of the steps after the save."""
    module, losses = copy.deepcopy(OTHER), []
    sharded = shard(module, **options)
    load(sharded)
    for step in range(STEPS, 2 * STEPS):
        loss = loss_of(module, step, context.rank)
        loss.backward()
        sharded.step() if sharded.optimizer else sharded.step(RATE, weight_decay=DECAY)
        losses.append(loss.item())
    return losses


def differences(mode, load, **options):
    found = on_ranks(RANKS, mode, lambda context, shard: go_on(context, shard, load, **options))
    wanted = [torch.load(f"{FOLDER}/losses-{rank}") for rank in range(RANKS)]
    return max(abs(a - b) for one, other in zip(found, wanted) for a, b in zip(one, other))


def goes_on_as_fsdp2(mode):
    options = {"lr": RATE, "weight_decay": DECAY}
    worst = differences(
        mode,
        lambda sharded: sharded.load_dcp(f"{FOLDER}/saved"),
        optimizer=torch.optim.AdamW,
        optimizer_options=options,
    )
    return worst < 1e-5 or f"losses differ by {worst:.1e}"


def goes_on_without_param_groups(mode):
    worst = differences(mode, lambda sharded: sharded.load_dcp(f"{FOLDER}/saved"), no_decay=lambda name, param: False)
    return worst < 1e-5 or f"losses differ by {worst:.1e}"


def states_are_needed(mode):
    """Without the states losses are others: the comparison would see it."""
    worst = differences(
        mode, lambda sharded: sharded.load_dcp(f"{FOLDER}/saved", weights_only=True), no_decay=lambda name, param: False
    )
    return worst > 1e-3 or f"losses differ by {worst:.1e}"


def shard_one(mode, check, **options):
    def run(context, shard):
        return check(shard(copy.deepcopy(OTHER), **options))

    return on_ranks(1, mode, run)[0]


def other_optimizers_are_refused(mode):
    def check(sharded):
        found = raises(lambda: sharded.load_dcp(f"{FOLDER}/saved"), "SGD", "weights_only=True")
        sharded.load_dcp(f"{FOLDER}/saved", weights_only=True)
        return found

    return shard_one(mode, check, optimizer=torch.optim.SGD, optimizer_options={"lr": 0.1, "momentum": 0.9})


# -- what a folder has ------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """One parameter, one that shard() ignores, and a buffer."""

    def __init__(self):
        super().__init__()
        self.scale, self.kept = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x):
        return x @ self.scale * self.kept.detach()


def small_values(number):
    return {"scale": torch.full((4, 2), number), "kept": torch.full((2,), number), "table": torch.full((3,), number)}


def small_states(step):
    return {"scale.exp_avg": torch.ones(4, 2), "scale.exp_avg_sq": torch.ones(4, 2), "scale.step": torch.tensor(step)}


def save_alone(mode, values):
    import torch.distributed.checkpoint as dcp

    folder = tempfile.mkdtemp(dir=FOLDER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that one process saves
        dcp.save(values, checkpoint_id=folder, no_dist=True)
    return folder


def with_small(mode, check, values):
    """check(sharded, folder) on one rank."""
    folder = save_alone(mode, values)

    def run(context, shard):
        module = Small()
        return check(shard(module, ignored_params=[module.kept]), folder)

    return on_ranks(1, mode, run)[0]


def numbers_of(sharded):
    return [value.float().mean().item() for value in sharded.full_state_dict().values()]


def refuses_small(change, words, **options):
    """The folder is refused, and nothing of it is loaded."""

    def case(mode):
        values = {**small_values(5.0), **small_states(3.0)}
        change(values)

        def check(sharded, folder):
            found = raises(lambda: sharded.load_dcp(folder, **options), *words)
            return found if found is not True else numbers_of(sharded) == [0.0] * 3 or str(numbers_of(sharded))

        return with_small(mode, check, values)

    return case


SMALL = {
    "a weight of another shape": (lambda v: v.update(scale=torch.ones(2, 4)), ("'scale'", "(2, 4)", "(4, 2)"), {}),
    "a state of another shape": (
        lambda v: v.update({"scale.exp_avg_sq": torch.ones(8)}),
        ("'scale.exp_avg_sq'", "(8,)", "(4, 2)"),
        {},
    ),
    "a buffer of another shape": (lambda v: v.update(table=torch.ones(1)), ("'table'", "(1,)", "(3,)"), {}),
    "a buffer that is missing": (lambda v: v.pop("table"), ("no 'table'", "nothing"), {}),
    "an ignored parameter that is missing": (lambda v: v.pop("kept"), ("no 'kept'", "nothing"), {}),
    "a number of steps that is missing": (
        lambda v: v.pop("scale.step"),
        ("number of steps of 'scale'", "weights_only=True"),
        {},
    ),
    "a longer name": (lambda v: v.update(grayscale=v.pop("scale")), ("lacks weights", "'scale'"), {}),
    "weights that are there twice": (
        lambda v: v.update({f"{at}.{name}": value for at in ("a", "b") for name, value in small_values(1.0).items()}),
        ("several times", "'a.'", "'b.'", "prefix="),
        {},
    ),
    "a prefix without a dot": (lambda v: None, ("prefix is 'model'", "dot"), {"prefix": "model"}),
    "a prefix that is not there": (lambda v: None, ("under 'ema.'", "'scale'"), {"prefix": "ema."}),
}


def a_prefix_chooses_the_weights(mode):
    values = {f"{at}.{name}": v for at, n in (("a", 1.0), ("b", 2.0)) for name, v in small_values(n).items()}

    def check(sharded, folder):
        found = []
        for prefix in ("a.", "b."):
            sharded.load_dcp(folder, weights_only=True, prefix=prefix)
            found.append(numbers_of(sharded))
        return found == [[1.0] * 3, [2.0] * 3] or str(found)

    return with_small(mode, check, values)


def train_small(sharded):
    sharded.module(torch.ones(1, 4)).sum().backward()
    sharded.step(RATE)
    return sharded.model.stats.step


def the_number_of_steps_is_not_lost(mode):
    """It would be if a save came before a step."""

    def check(sharded, folder):
        sharded.load_dcp(folder)
        ours = tempfile.mkdtemp(dir=FOLDER)
        told = raises(lambda: sharded.save(ours), "1000 steps", "sharded.step()")
        sharded.load_dcp(folder, weights_only=True)  # the states stay, and so does the number
        first = train_small(sharded)
        sharded.save(ours)
        saved = sharded.load(ours).step
        return told is True and [first, saved, train_small(sharded)] == [1001, 1001, 1002] or f"{told} {first} {saved}"

    return with_small(mode, check, {**small_values(5.0), **small_states(1000.0)})


def a_load_replaces_the_number_of_steps(mode):
    def check(sharded, folder):
        ours = tempfile.mkdtemp(dir=FOLDER)
        train_small(sharded), train_small(sharded)
        sharded.save(ours)
        sharded.load_dcp(folder)
        sharded.load(ours, flags=fsdp.LoadFlag.WEIGHTS_ONLY)
        kept = sharded.first_step
        sharded.load(ours)
        found = kept, train_small(sharded)
        return found == (1001, 3) or str(found)

    return with_small(mode, check, {**small_values(5.0), **small_states(1000.0)})


# -- folders that are refused -----------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return os.mkdir, (f"{FOLDER}/was-run",)


def copied_folder(name):
    folder = f"{FOLDER}/{name}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(f"{FOLDER}/saved", folder)
    return folder


def refused(mode, name, change, *words):
    folder = copied_folder(f"{name}-{mode}")
    change(folder)
    found = shard_one(mode, lambda sharded: raises(lambda: sharded.load_dcp(folder), *words))
    return found is True and not os.path.exists(f"{FOLDER}/was-run") or f"{found}, or it has run code"


def change_metadata(folder, change):
    with open(f"{folder}/.metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with open(f"{folder}/.metadata", "wb") as file:
        pickle.dump(metadata, file)


def put_evil_metadata(folder):
    change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", Evil()))


def put_evil_payload(folder):
    """The first tensor's place has another pickle."""
    path = f"{folder}/evil.distcp"
    torch.save(Evil(), path)

    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path, info.offset, info.length = "evil.distcp", 0, os.path.getsize(path)

    change_metadata(folder, change)


def put_path(folder):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = "../saved/" + info.relative_path

    change_metadata(folder, change)


def drop_chunk(folder):
    def change(metadata):
        metadata.state_dict_metadata["app.model.head.weight"].chunks.pop()

    change_metadata(folder, change)


def drop_weight(folder):
    change_metadata(folder, lambda metadata: metadata.state_dict_metadata.pop("app.model.head.weight"))


def drop_states(folder):
    def change(metadata):
        for name in [name for name in metadata.state_dict_metadata if name.endswith(".exp_avg")]:
            del metadata.state_dict_metadata[name]

    change_metadata(folder, change)


REFUSED = {
    "metadata that would run code": (put_evil_metadata, ("mkdir", ".metadata")),
    "a payload that would run code": (put_evil_payload, ("mkdir",)),
    "a file outside of the folder": (put_path, ("../saved/", "not in the folder")),
    "a part that is missing": (drop_chunk, ("head.weight", "elements")),
    "a weight that is missing": (drop_weight, ("'head.weight'",)),
    "states that are missing": (drop_states, ("exp_avg", "get_state_dict", "weights_only=True")),
    "a folder without metadata": (lambda folder: os.remove(f"{folder}/.metadata"), (".metadata", "this file")),
}


def cases(mode):
    for case in (goes_on_as_fsdp2, goes_on_without_param_groups, states_are_needed, other_optimizers_are_refused):
        yield f"{case.__name__.replace('_', ' ')} ({mode})", lambda case=case: case(mode)
    for case in (
        a_prefix_chooses_the_weights,
        the_number_of_steps_is_not_lost,
        a_load_replaces_the_number_of_steps,
    ):
        yield f"{case.__name__.replace('_', ' ')} ({mode})", lambda case=case: case(mode)
    for name, (change, words, options) in SMALL.items():
        case = refuses_small(change, words, **options)
        yield f"{name} is refused, and nothing is loaded ({mode})", lambda case=case: case(mode)
    if mode == "copied" and importlib.util.find_spec("safetensors"):
        yield f"fsdp2 goes on from here ({mode})", lambda: fsdp2_goes_on_from_here(mode)
    for name, (change, words) in REFUSED.items():
        yield f"{name} is refused ({mode})", lambda name=name, change=change, words=words: refused(
            mode, name.replace(" ", "-"), change, *words
        )


if __name__ == "__main__":
    torch.manual_seed(1)
    OTHER, HOLDER = Net(), save_by_fsdp2()
    FOLDER = HOLDER.name
    sys.exit(run_cases(cases))
