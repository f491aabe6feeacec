#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face in libfsdp.torch: files with one tensor for each expert, where the module has them in one.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python torch_hugging_face.py [--mode MODE] [WORD...]

WORD: only cases whose name has it. Needs torch (CPU is enough), numpy and safetensors; with transformers 5 its Mixtral
writes and reads the folders, too. Ranks are threads. Reports in the Test Anything Protocol.
"""

import contextlib
import copy
import importlib.util
import json
import os
import sys
import tempfile

import torch
from torch import nn
from torch_check import Report, on_ranks, raises, read_options

import libfsdp.torch
from libfsdp.torch import MIXTRAL, HuggingFaceFolder, save_hugging_face

EXPERTS, WIDTH, INNER = 3, 4, 6
SHAPES = {"w1": (INNER, WIDTH), "w3": (INNER, WIDTH), "w2": (WIDTH, INNER)}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))

    def forward(self, x):
        gate, up = (x @ self.gate_up_proj.transpose(1, 2)).chunk(2, -1)
        return ((nn.functional.silu(gate) * up) @ self.down_proj.transpose(1, 2)).sum(0)


class Block(nn.Module):
    """With the names of transformers' Mixtral."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.gate, self.mlp.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.arange(2.0))

    def forward(self, x):
        return x + self.mlp.experts(self.norm(x)) * self.mlp.gate(x).sum()


class Net(nn.Module):
    """A head that is tied to the embedding: Hugging Face's files have it once."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(5, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(0)
BASE = Net()


def files_of(module):
    """What Hugging Face's files have, by hand."""
    found = {}
    for name, values in module.state_dict().items():
        path, experts = name.replace(".mlp.", ".block_sparse_moe."), range(EXPERTS)
        if name.endswith("gate_up_proj"):
            path = path.removesuffix("gate_up_proj")
            found.update({f"{path}{i}.w1.weight": values[i, :INNER] for i in experts})
            found.update({f"{path}{i}.w3.weight": values[i, INNER:] for i in experts})
        elif name.endswith("down_proj"):
            found.update({f"{path.removesuffix('down_proj')}{i}.w2.weight": values[i] for i in experts})
        elif name != "head.weight":
            found[path] = values
    return {name: value.clone().contiguous() for name, value in found.items()}


@contextlib.contextmanager
def folder_of(tensors):
    """In two files."""
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        names = sorted(tensors)
        for number, some in enumerate((names[::2], names[1::2])):
            save_file({name: tensors[name] for name in some}, os.path.join(folder, f"{number}.safetensors"))
        yield folder


def read_folder(folder):
    from safetensors.torch import load_file

    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            found.update(load_file(os.path.join(folder, name)))
    return found


def equal(found, wanted):
    names = set(found) ^ set(wanted)
    wrong = [name for name in wanted if name in found and not torch.equal(found[name], wanted[name])]
    return not names and not wrong or f"names that differ: {sorted(names)}; values that differ: {wrong}"


def agree(results):
    return next((found for found in results if found is not True), True)


def empty():
    with torch.device("meta"):
        module = Net()
    module.head.weight = module.embed.weight
    return module


def a_module_on_meta_is_made_of_a_folder(mode, ranks):
    with folder_of(files_of(BASE)) as folder:

        def run(context, shard):
            sharded = shard(empty(), init=HuggingFaceFolder(folder, MIXTRAL))
            return equal(sharded.full_state_dict(), BASE.state_dict())

        return agree(on_ranks(ranks, mode, run))


def a_sharded_module_loads_a_folder(mode, ranks):
    with folder_of(files_of(BASE)) as folder:

        def run(context, shard):
            other = copy.deepcopy(BASE)
            nn.init.zeros_(other.layers[1].mlp.experts.down_proj)
            sharded = shard(other)
            sharded.load_full_state_dict(HuggingFaceFolder(folder, MIXTRAL))
            return equal(sharded.full_state_dict(), BASE.state_dict())

        return agree(on_ranks(ranks, mode, run))


def a_folder_is_saved(mode, ranks):
    """In files of at most 300 bytes, or one parameter, after a step; what it has is what the module has."""
    with tempfile.TemporaryDirectory() as holder:
        folder = os.path.join(holder, "saved")

        def run(context, shard):
            module = copy.deepcopy(BASE)
            module.register_buffer("table", torch.ones(1), persistent=False)
            sharded = shard(module)
            module(torch.arange(5)).pow(2).mean().backward()
            sharded.step(1e-2)
            save_hugging_face(sharded, folder, MIXTRAL, max_bytes=300)
            told = raises(lambda: save_hugging_face(sharded, folder, MIXTRAL), "save_hugging_face", folder)
            return told, sharded.full_state_dict()

        results = on_ranks(ranks, mode, run)
        trained = copy.deepcopy(BASE)
        trained.load_state_dict(results[0][1])
        with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as file:
            index = json.load(file)
        found = read_folder(folder)
        sizes = sum(value.nbytes for value in found.values()) == index["metadata"]["total_size"]
        files = set(index["weight_map"].values())
        is_right = equal(found, files_of(trained))
        is_indexed = set(index["weight_map"]) == set(found) and len(files) > 3 and sizes
        told = agree(told for told, _ in results)
        return is_right is told is is_indexed is True or f"{is_right}, {told}, {is_indexed}"


def dtypes_are_those_before_shard(mode):
    with tempfile.TemporaryDirectory() as folder:

        def run(context, shard):
            sharded = shard(copy.deepcopy(BASE).bfloat16(), param_dtype=torch.float32)
            save_hugging_face(sharded, folder, MIXTRAL)
            return True

        on_ranks(2, mode, run)
        found = {name: value.dtype for name, value in read_folder(folder).items()}
        return set(found.values()) == {torch.bfloat16} or str(found)


def what_does_not_fit_is_told(mode):
    lacks, fewer = files_of(BASE), files_of(BASE)
    lacks.pop("layers.1.block_sparse_moe.experts.1.w3.weight")
    fewer = {name: value for name, value in fewer.items() if "experts.2." not in name}

    def run(context, shard):
        told = []
        with folder_of(lacks) as folder:
            init = HuggingFaceFolder(folder, MIXTRAL)
            told.append(raises(lambda: shard(empty(), init=init), "has expert 2 of", "experts.1.w3.weight'"))
            told.append(raises(lambda: init["layers.0.mlp.other"], "no 'layers.0.mlp.other'"))
        gates = {name: value for name, value in files_of(BASE).items() if "gate.weight" in name}
        own = {name: value.clone() for name, value in BASE.state_dict().items()}
        for tensors, words in (({**own, **gates}, ("{expert}.w1", "gate_up_proj' itself")), (own, ("gate.weight' itself",))):
            with folder_of(tensors) as folder:
                init = HuggingFaceFolder(folder, MIXTRAL)
                told.append(raises(lambda: shard(empty(), init=init), "leave it out of names=", *words))
        with folder_of(fewer) as folder:
            init = HuggingFaceFolder(folder, MIXTRAL)
            told.append(raises(lambda: shard(empty(), init=init), "(2, 12, 4)", "(3, 12, 4)", "gate_up_proj"))
        with folder_of(files_of(BASE)) as folder:
            told.append(raises(lambda: shard(empty(), init=HuggingFaceFolder(folder)), "no values of 'layers.0.mlp"))
        with tempfile.TemporaryDirectory() as folder:
            told.append(raises(lambda: HuggingFaceFolder(folder), "no *.safetensors"))
            for wrong in (["a", "b"], ["a.{expert}", "b"], ["{layer}.a"], ["{expert}.{expert}"]):
                told.append(raises(lambda: HuggingFaceFolder(folder, {"x": wrong}), "'x'", "{expert}"))
            sharded = shard(copy.deepcopy(BASE))
            odd = {"{layer}.mlp.experts.gate_up_proj": [f"{{layer}}.{{expert}}.{i}" for i in range(5)]}
            told.append(raises(lambda: save_hugging_face(sharded, folder, odd), "gate_up_proj", "5 equal parts"))
        mesh = context.create_mesh()
        own = shard(copy.deepcopy(BASE), group_options=lambda name, layer: {"mesh": mesh} if name == "layers.1" else {})
        told.append(raises(lambda: save_hugging_face(own, "nowhere", MIXTRAL), "'layers.1'", "mesh of its own"))
        return told == [True] * len(told) or str(told)

    return agree(on_ranks(1, mode, run))


def save_index(folder, index):
    with open(os.path.join(folder, "model.safetensors.index.json"), "w", encoding="utf-8") as file:
        json.dump({"metadata": {}, "weight_map": index}, file)


def the_index_says_which_file_counts(mode):
    """A file of another save stays in the folder."""
    from safetensors.torch import save_file

    files = files_of(BASE)
    with folder_of(files) as folder:
        index = {name: f"{number % 2}.safetensors" for number, name in enumerate(sorted(files))}
        save_file({name: torch.zeros_like(value) for name, value in files.items()}, f"{folder}/old.safetensors")
        told = [raises(lambda: HuggingFaceFolder(folder), ".safetensors' and in 'old.safetensors'", "index.json")]
        save_index(folder, index)
        found = on_ranks(1, mode, lambda context, shard: shard(
            empty(), init=HuggingFaceFolder(folder, MIXTRAL)).full_state_dict())[0]
        told.append(equal(found, BASE.state_dict()))
        for file, words in {
            "1.safetensors": "does not have it",
            "2.safetensors": "'2.safetensors', which is not there",
            f"{folder}/0.safetensors": "not a name in this folder",
            "../0.safetensors": "not a name in this folder",
            "..": "not there",
            7: "not a name in this folder",
        }.items():
            save_index(folder, {**index, "embed.weight": file})
            told.append(raises(lambda: HuggingFaceFolder(folder), "'embed.weight'", words))
        return told == [True] * len(told) or str(told)


def codes_of_quantized_weights_are_refused(mode):
    """Files of fp8 and int8 have the scales in other tensors."""
    told = []
    for name in ("embed.weight", "layers.1.seen"):
        for dtype in (torch.float8_e4m3fn, torch.int8):
            files = files_of(BASE)
            files[name] = files[name].to(dtype)
            words = repr(name), str(dtype), "Dequantize first"

            def run(context, shard):
                init = HuggingFaceFolder(folder, MIXTRAL)
                told.append(raises(lambda: shard(empty(), init=init), *words, "init"))
                sharded = shard(copy.deepcopy(BASE))
                state = {**BASE.state_dict(), name: init[name]}
                told.append(raises(lambda: sharded.load_full_state_dict(state), *words, "load_full_state_dict"))
                told.append(equal(sharded.full_state_dict(), BASE.state_dict()))

            with folder_of(files) as folder:
                on_ranks(1, mode, run)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        state = {name: value.to(dtype) for name, value in BASE.state_dict().items()}
        found = on_ranks(1, mode, lambda context, shard: shard(empty(), init=state).full_state_dict())[0]
        told.append(equal(found, {name: value.float() for name, value in state.items()}))
    return told == [True] * len(told) or str(told)


def each_mesh_saves_a_folder(mode):
    """By its lowest rank, also if that is not rank 0; another mesh may save nothing."""
    with tempfile.TemporaryDirectory() as holder:

        def run(context, shard):
            number = context.rank // 2
            sharded = shard(copy.deepcopy(BASE), mesh=context.create_mesh(ranks=[2 * number, 2 * number + 1]))
            told = []
            if number == 1:
                save_hugging_face(sharded, f"{holder}/{number}", MIXTRAL)
                again = lambda: save_hugging_face(sharded, f"{holder}/{number}", MIXTRAL)  # noqa: E731
                told.append(raises(again, "has model" if context.rank == 2 else "rank 2 could not write"))
            return told == [True] * len(told) or str(told)

        told = agree(on_ranks(4, mode, run))
        return (told is True and equal(read_folder(f"{holder}/1"), files_of(BASE))) or told


def parameters_with_one_name_are_refused(mode):
    """In one file, and in two."""
    told = []
    for max_bytes in (5 << 30, 1):

        def run(context, shard):
            sharded = shard(copy.deepcopy(BASE))
            names = {"layers.0.norm.weight": ["layers.1.norm.weight"]}
            words = "save_hugging_face", "'layers.1.norm.weight'", "correct names="
            told.append(raises(lambda: save_hugging_face(sharded, folder, names, max_bytes), *words))

        with tempfile.TemporaryDirectory() as folder:
            on_ranks(1, mode, run)
    return told == [True] * len(told) or str(told)


def a_save_that_fails_can_be_repeated(mode):
    """The folder has no file of it, and no index is there before all files are."""
    with tempfile.TemporaryDirectory() as folder:

        def run(context, shard):
            sharded = shard(copy.deepcopy(BASE))
            names = {"{layer}.mlp.experts.down_proj": [f"{{layer}}.{{expert}}.{i}" for i in range(5)]}
            words = "5 equal parts" if context.rank == 0 else "rank 0 could not write"
            told = [raises(lambda: save_hugging_face(sharded, folder, names, max_bytes=100), words)]
            context.all_reduce_values(0.0)
            told.append(not os.listdir(folder) or str(os.listdir(folder)))
            context.all_reduce_values(0.0)
            save_hugging_face(sharded, folder, MIXTRAL, max_bytes=100)
            return told == [True] * len(told) or str(told)

        told = agree(on_ranks(2, mode, run))
        odd = [name for name in os.listdir(folder) if not name.endswith((".safetensors", ".index.json"))]
        return (told is True and not odd and equal(read_folder(folder), files_of(BASE))) or f"{told}, {odd}"


def an_added_frozen_parameter_is_saved(mode):
    """As an ignored one: each rank has it whole."""
    with tempfile.TemporaryDirectory() as folder:

        def run(context, shard):
            module = copy.deepcopy(BASE)
            sharded = shard(module)
            module.layers[1].norm.scale = nn.Parameter(torch.full((2,), 7.0), requires_grad=False)
            wanted = {**BASE.state_dict(), "layers.1.norm.scale": torch.full((2,), 7.0)}
            save_hugging_face(sharded, folder, MIXTRAL)
            told = [equal(sharded.full_state_dict(), wanted)]
            told.append("layers.1.norm.scale" in sharded.state_dict())
            sharded.load_full_state_dict({**wanted, "layers.1.norm.scale": torch.full((2,), 8.0)})
            told.append(module.layers[1].norm.scale.tolist() == [8.0, 8.0])
            module.layers[0].norm.weight = nn.Parameter(torch.ones(WIDTH))
            words = "'layers.0.norm.weight' is not in the module any more", "take_writes" if mode == "mapped" else ""
            told += [raises(call, *words) for call in (sharded.full_state_dict, sharded.state_dict)]
            told.append(raises(lambda: sharded.load_full_state_dict(wanted), *words))
            told.append(raises(lambda: save_hugging_face(sharded, f"{folder}/more"), *words))
            return told == [True] * len(told) or str(told)

        told = agree(on_ranks(2, mode, run))
        added = {"layers.1.norm.scale": torch.full((2,), 7.0)}
        found = equal(read_folder(folder), {**files_of(BASE), **added})
        return told is found is True or f"{told}, {found}"


# -- transformers -----------------------------------------------------------------------------------------------------


def mixtral():
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_local_experts=EXPERTS,
    )
    return transformers.MixtralForCausalLM(config)


def mixtral_of_transformers_both_ways(mode):
    """Its folder becomes our module, and our folder its module."""
    import transformers

    base = mixtral()
    with tempfile.TemporaryDirectory() as holder:
        theirs, ours = os.path.join(holder, "theirs"), os.path.join(holder, "ours")
        base.save_pretrained(theirs)
        others = [copy.deepcopy(base) for _ in range(2)]

        def run(context, shard):
            module = others[context.rank]
            with torch.no_grad():
                for param in module.parameters():
                    param.zero_()
            sharded = shard(module)
            sharded.load_full_state_dict(HuggingFaceFolder(theirs, MIXTRAL))
            save_hugging_face(sharded, ours, MIXTRAL)
            return equal(sharded.full_state_dict(), base.state_dict())

        found = agree(on_ranks(2, mode, run))
        base.config.save_pretrained(ours)
        again = transformers.MixtralForCausalLM.from_pretrained(ours)
        files = equal(read_folder(ours), read_folder(theirs))
        return found is True and files is True and equal(again.state_dict(), base.state_dict()) or f"{found}, {files}"


def main():
    options, report = read_options(), Report()
    cases = [a_module_on_meta_is_made_of_a_folder, a_sharded_module_loads_a_folder, a_folder_is_saved]
    named = {f"{case.__name__}, {n} ranks": lambda mode, c=case, n=n: c(mode, n) for case in cases for n in (1, 2)}
    single = (
        dtypes_are_those_before_shard,
        what_does_not_fit_is_told,
        the_index_says_which_file_counts,
        codes_of_quantized_weights_are_refused,
        each_mesh_saves_a_folder,
        parameters_with_one_name_are_refused,
        a_save_that_fails_can_be_repeated,
        an_added_frozen_parameter_is_saved,
    )
    named.update({case.__name__: case for case in single})
    if importlib.util.find_spec("transformers"):
        named["mixtral_of_transformers_both_ways"] = mixtral_of_transformers_both_ways
    for mode in options.modes:
        for name, case in named.items():
            if all(word in name for word in options.words):
                report.run(f"{name.replace('_', ' ')} ({mode})", lambda: case(mode))
    return report.end()


if __name__ == "__main__":
    if not importlib.util.find_spec("safetensors"):
        print("1..0 # SKIP no safetensors")
        sys.exit(0)
    sys.exit(main())
