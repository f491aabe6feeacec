#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints between libfsdp and other programs: what one of them wrote the other reads, to the bit.

usage: peers.py BUILD [--torch]

Needs numpy and safetensors; with --torch PyTorch, too. tests/peers/peers.sh makes a place for them. Reports in the Test
Anything Protocol.
"""
import datetime
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import safetensors
import safetensors.numpy

LAYERS, WIDTH = 2, 24
STATES = ("exp_avg", "exp_avg_sq")
# tests/tools/checkpoint_rank.c declares the same parameters.
SHAPES = {"embed": (90, WIDTH), "norm": (WIDTH,)} | {
    f"{name}.{layer}": shape for layer in range(LAYERS)
    for name, shape in (("q", (WIDTH, 40)), ("k", (WIDTH, 16)), ("v", (WIDTH, 16)), ("up", (60, WIDTH)))}

cases = failed = compared = 0


def case(name, passed):
    global cases, failed
    cases += 1
    failed += not passed
    print(f"{'ok' if passed else 'not ok'} {cases} - {name}", flush=True)


def same(found, wanted):
    """Two {name: array}, to the bit."""
    global compared
    differ = [name for name in found.keys() | wanted.keys()
              if name not in found or name not in wanted or found[name].dtype != wanted[name].dtype
              or found[name].shape != wanted[name].shape or found[name].tobytes() != wanted[name].tobytes()]
    compared += len(wanted)
    for name in sorted(differ):
        print(f"# {name} differs")
    return not differ and len(wanted) > 0


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")


class Library:
    def __init__(self, build):
        self.build = Path(build)

    def ckpt(self, *arguments):
        run(self.build / "tools/fsdp-ckpt", *arguments)

    def rank(self, count, how, source, save, values):
        """Runs ranks that load weights. Returns the weights that they have then, and the states of those that train."""
        run(self.build / "tools/fsdp-run", "-n", count, self.build / "tests/tools/checkpoint_rank", how, source, save, values)
        rest = np.fromfile(values, np.float32)
        weights, states = {}, {}
        for name, shape in SHAPES.items():
            for state in (None, *STATES) if how == "train" else (None,):
                part, rest = rest[:np.prod(shape)], rest[np.prod(shape):]
                (states if state else weights)[f"state.{name}.{state}" if state else name] = part.reshape(shape)
        assert rest.size == 0
        return weights, states


def random_weights():
    source = np.random.default_rng(20261124)
    return {name: source.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def read_shards(folder):
    """All tensors of files that safe_open reads, put together by what their headers say of offsets."""
    boxes = {}
    for path in sorted(Path(folder).rglob("*.safetensors")):
        with safetensors.safe_open(path, "np") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():
                boxes.setdefault(name, []).append((offsets[name]["saved_offsets"], file.get_tensor(name)))
    tensors = {}
    for name, parts in boxes.items():
        shape = [max(offset[d] + part.shape[d] for offset, part in parts) for d in range(parts[0][1].ndim)]
        tensors[name] = np.zeros(shape, parts[0][1].dtype)
        for offset, part in parts:
            tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, part.shape))] = part
        assert sum(part.size for _, part in parts) == tensors[name].size, name
    return tensors


def with_safetensors(library, scratch):
    weights = random_weights()
    (scratch / "hf").mkdir()
    safetensors.numpy.save_file(weights, scratch / "hf/model.safetensors")
    library.ckpt("import", scratch / "hf", scratch / "imported")
    case("safe_open reads an import", same(read_shards(scratch / "imported/step-0000000000"), weights))
    loaded, _ = library.rank(2, "weights", scratch / "hf", scratch / "loaded", scratch / "values")
    case("ranks load what safetensors wrote", same(loaded, weights))
    for count in (1, 3):
        saved, values = scratch / f"saved{count}", scratch / f"values{count}"
        trained, states = library.rank(count, "train", scratch / "imported", saved, values)
        steps = {f"state.{name}.step": np.array(1.0) for name in SHAPES}
        found = read_shards(saved / "step-0000000002")
        case(f"safe_open reads weights, states and steps of {count}", same(found, trained | states | steps))
        library.ckpt("consolidate", saved, scratch / f"one{count}")
        case("... and load_file what is consolidated",
             same(safetensors.numpy.load_file(scratch / f"one{count}/model.safetensors"), trained))


# ---- PyTorch ----

def torch_read(folder, names):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    state = {name: torch.zeros(SHAPES[name]) for name in names}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return {name: tensor.numpy() for name, tensor in state.items()}


def torch_consolidate(folder, out):
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
    Path(out).mkdir()
    consolidate_safetensors_files(str(folder), str(out), fqn_to_index_mapping={name: 1 for name in SHAPES})
    tensors = {}
    for path in Path(out).glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


def torch_rank(rank, world, port, folder, source):
    """Writes the source's tensors over all ranks: every second tensor by columns, the others by rows."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    from torch.distributed.tensor import Shard, distribute_tensor
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    weights = {name: torch.from_numpy(array) for name, array in safetensors.numpy.load_file(source).items()}
    state = {name: distribute_tensor(weight, mesh, [Shard(1 if weight.dim() > 1 and i % 2 else 0)])
             for i, (name, weight) in enumerate(sorted(weights.items()))}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    dist.destroy_process_group()


def torch_write_whole(folder, weights):
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageWriter
    state = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    dcp.save(state, no_dist=True, storage_writer=HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping={name: 1 + i % 2 for i, name in enumerate(sorted(weights))}))


def free_port():
    import socket
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def torch_write_distributed(folder, world, source):
    import torch.multiprocessing
    torch.multiprocessing.spawn(torch_rank, (world, free_port(), folder, source), world)


def with_torch(library, scratch):
    warnings.simplefilter("ignore")  # about there being only one process
    weights = safetensors.numpy.load_file(scratch / "hf/model.safetensors")
    for count in (1, 3):
        folder = scratch / f"saved{count}/step-0000000002"
        trained = {name: array for name, array in read_shards(folder).items() if not name.startswith("state.")}
        case(f"dcp.load reads what {count} saved", same(torch_read(folder, SHAPES), trained))
        case("... and consolidate_safetensors_files", same(torch_consolidate(folder, scratch / f"torch_one{count}"), trained))
        case("... and dcp.load what fsdp-ckpt consolidated", same(torch_read(scratch / f"one{count}", SHAPES), trained))
    torch_write_whole(scratch / "whole", weights)
    for world in (1, 3):
        torch_write_distributed(scratch / f"torch{world}", world, scratch / "hf/model.safetensors")
    torch_consolidate(scratch / "torch3", scratch / "torch3_one")
    for name, what in (("whole", "one process with an index"), ("torch1", "one rank, save_distributed"),
                       ("torch3", "three ranks, rows and columns, save_distributed"), ("torch3_one", "them, consolidated")):
        for count in (1, 3):
            loaded, _ = library.rank(count, "weights", scratch / name, scratch / f"from_{name}{count}", scratch / "values")
            case(f"{count} load what torch wrote: {what}", same(loaded, weights))
        library.ckpt("import", scratch / name, scratch / f"import_{name}")
        case("... and fsdp-ckpt imports it", same(read_shards(scratch / f"import_{name}/step-0000000000"), weights))


def main():
    library, torch_too = Library(sys.argv[1]), "--torch" in sys.argv[2:]
    versions = f"numpy {np.__version__}, safetensors {safetensors.__version__}"
    if torch_too:
        import torch
        versions += f", torch {torch.__version__}"
    with tempfile.TemporaryDirectory() as scratch:
        with_safetensors(library, Path(scratch))
        if torch_too:
            with_torch(library, Path(scratch))
    print(f"1..{cases}")
    print(f"# {datetime.date.today()}: {versions}: {cases - failed} of {cases} cases, {compared} tensors compared to the bit")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.exit(main())
