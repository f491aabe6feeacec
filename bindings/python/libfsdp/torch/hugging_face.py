# SPDX-License-Identifier: Apache-2.0
"""Folders of Hugging Face (*.safetensors) with other names than the module's, or with one tensor for each expert where
the module has a stack of all experts."""

import collections.abc
import contextlib
import json
import os
import re

import torch

from ..constants import ValueOp
from .words import in_torch_words

# Mixtral of transformers 5: stacks of experts in the module, one tensor for each expert in the files.
MIXTRAL = {
    "{layer}.mlp.experts.gate_up_proj": [
        "{layer}.block_sparse_moe.experts.{expert}.w1.weight",
        "{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    ],
    "{layer}.mlp.experts.down_proj": ["{layer}.block_sparse_moe.experts.{expert}.w2.weight"],
    "{layer}.mlp.gate.weight": ["{layer}.block_sparse_moe.gate.weight"],
}
_INDEX = "model.safetensors.index.json"
_UNFINISHED = ".unfinished"


def _safetensors():
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("folders of Hugging Face need the package safetensors: pip install safetensors") from error
    return safetensors


class Names:
    """The names of a module's parameters in files: {name in the module: [names in the files]}. {layer} stands for any
    words. With {expert}, the parameter is a stack of the experts 0, 1, ..; several names are parts of one expert, whose
    rows follow each other."""

    def __init__(self, names):
        self._rules = []
        for name, found in names.items():
            found = [found] if isinstance(found, str) else list(found)
            _check_rule(name, found)
            self._rules.append((_pattern(name), name, found, [_pattern(each) for each in found]))

    def find(self, name):
        """(names in the files, with {expert} if the parameter is a stack; is it one) of a parameter."""
        for pattern, _, found, _ in self._rules:
            if match := pattern.fullmatch(name):
                layer = match.groupdict().get("layer", "")
                return [each.replace("{layer}", layer) for each in found], "{expert}" in found[0]
        return [name], False

    def in_module(self, file_name):
        """The module's name for a name in the files."""
        for _, name, _, patterns in self._rules:
            for match in filter(None, (pattern.fullmatch(file_name) for pattern in patterns)):
                return name.replace("{layer}", match.groupdict().get("layer", ""))
        return file_name


def _pattern(name):
    words = re.escape(name).replace(re.escape("{expert}"), "(?P<expert>[0-9]+)")
    return re.compile(words.replace(re.escape("{layer}"), "(?P<layer>.+)"))


def _check_rule(name, found):
    is_stack = {"{expert}" in each for each in found}
    counts = {(each.count("{layer}"), each.count("{expert}")) for each in found}
    is_right = len(is_stack) == 1 and (len(found) == 1 or is_stack == {True}) and name.count("{expert}") == 0
    if not is_right or name.count("{layer}") > 1 or counts != {(name.count("{layer}"), int(is_stack == {True}))}:
        raise ValueError(
            f"libfsdp.torch: the names in files of {name!r} are {found}: give one name, or names that all have "
            "{expert} once. If the module's name has {layer}, each of them has it once"
        )


class HuggingFaceFolder(collections.abc.Mapping):
    """{name in the module: values}, each read when it is asked for: init= of shard() for a module on the meta device,
    or the argument of sharded.load_full_state_dict().

    folder: with *.safetensors files. names: {name in the module: [names in the files]}, such as libfsdp.torch.MIXTRAL;
    all other parameters have the same name in both."""

    def __init__(self, folder, names=()):
        self.folder, self._names = os.fspath(folder), Names(dict(names))
        has_index = os.path.exists(os.path.join(self.folder, _INDEX))
        self._files = self._find_indexed() if has_index else self._find_all()  # {name in the files: path}
        self._own = dict.fromkeys(self._names.in_module(name) for name in self._files)

    def _find_indexed(self):
        """The index alone says which file has a tensor: files that it does not name are passed over."""
        with open(os.path.join(self.folder, _INDEX), encoding="utf-8") as file:
            index = json.load(file)["weight_map"]
        held = {file: self._names_in(self._require_own(file, index)) for file in dict.fromkeys(index.values())}
        lost = next((name for name, file in index.items() if name not in held[file]), None)
        if lost is not None:
            raise ValueError(
                f"libfsdp.torch.HuggingFaceFolder: {_INDEX} of {self.folder} has {lost!r} in {index[lost]!r}, and this "
                "file does not have it: get the index and the files of one save"
            )
        return {name: os.path.join(self.folder, file) for name, file in index.items()}

    def _require_own(self, file, index):
        """The file's name, if it is a file in the folder itself."""
        is_name = isinstance(file, str) and os.path.basename(file) == file
        if is_name and os.path.isfile(os.path.join(self.folder, file)):
            return file
        name = next(name for name in index if index[name] == file)
        why = "is not there: get all files of the save" if is_name else "is not a name in this folder: correct the index"
        raise ValueError(
            f"libfsdp.torch.HuggingFaceFolder: {_INDEX} of {self.folder} has {name!r} in {file!r}, which {why}"
        )

    def _find_all(self):
        files = {}
        for file in sorted(name for name in os.listdir(self.folder) if name.endswith(".safetensors")):
            for name in self._names_in(file):
                if name in files:
                    raise ValueError(
                        f"libfsdp.torch.HuggingFaceFolder: {self.folder} has {name!r} in "
                        f"{os.path.basename(files[name])!r} and in {file!r}, and no {_INDEX} to say which one counts: "
                        "remove the file that does not belong to the model"
                    )
                files[name] = os.path.join(self.folder, file)
        if not files:
            raise ValueError(f"libfsdp.torch.HuggingFaceFolder: {self.folder} has no *.safetensors files")
        return files

    def _names_in(self, file):
        with _safetensors().safe_open(os.path.join(self.folder, file), "pt") as opened:
            return dict.fromkeys(opened.keys())

    def _read(self, name):
        with _safetensors().safe_open(self._files[name], "pt") as file:
            return file.get_tensor(name)

    def __contains__(self, name):
        return name in self._own  # without reading it

    def __getitem__(self, name):
        if name not in self._own:
            found = ", ".join(map(repr, self._names.find(name)[0]))
            raise KeyError(f"{self.folder} has no {found}, for the parameter {name!r}")
        found, is_stack = self._names.find(name)
        if is_stack:
            return self._stack(name, found)
        self._require_mapped(name, found, found[0] in self._files)
        return self._read(found[0])

    def _require_mapped(self, name, found, is_there):
        if not is_there:
            raise KeyError(
                f"{self.folder} has no {', '.join(map(repr, found))}; it has {name!r} itself: leave it out of names="
            )

    def _stack(self, name, found):
        patterns = [_pattern(each) for each in found]
        numbers = [int(match["expert"]) for at in self._files for each in patterns if (match := each.fullmatch(at))]
        self._require_mapped(name, found, numbers)
        wanted = [[each.replace("{expert}", str(number)) for each in found] for number in range(max(numbers) + 1)]
        lost = next((each for expert in wanted for each in expert if each not in self._files), None)
        if lost:
            raise KeyError(f"{self.folder} has expert {max(numbers)} of {name!r}, but no {lost!r}")
        return torch.stack([torch.cat([self._read(each) for each in expert]) for expert in wanted])

    def __iter__(self):
        return iter(self._own)

    def __len__(self):
        return len(self._own)


@in_torch_words
def save_hugging_face(sharded, folder, names=(), max_bytes=5 << 30):
    """Writes the weights and buffers into *.safetensors files and their index, in the dtypes that they had in shard().

    names: as of HuggingFaceFolder; several parts of an expert are equal in rows. folder: has none of these files yet.
    A rank has one parameter whole at a time. The lowest rank of the model's mesh writes, and has up to max_bytes of
    what it writes. Collective: the mesh; each mesh needs a folder of its own."""
    own = next((layer.name for layer in sharded.layers if layer.has_mesh), None)
    if own is not None:
        raise ValueError(
            f"save_hugging_face: group {own!r} has a mesh of its own, so no rank can read all of its experts: call "
            "sharded.save(), and load it into a module whose groups are all on one mesh"
        )
    context, mesh = sharded.context, sharded.mesh
    first = int(context.all_reduce_values(float(context.rank), ValueOp.MIN, mesh))
    writer = _Writer(folder, max_bytes) if context.rank == first else None
    error = _write_all(sharded, Names(dict(names)), writer)
    has_failed = context.all_reduce_values(float(error is not None), ValueOp.MAX, mesh)
    if error:
        raise error
    if has_failed:
        raise RuntimeError(f"save_hugging_face: rank {first} could not write {os.fspath(folder)}: its error says why")


def _write_all(sharded, names, writer):
    """The exception, or None. writer: None on ranks that only take part in the reads. Collective."""
    error = _try(writer.begin) if writer else None
    for name, values in _whole_values(sharded):
        if writer and not error:
            error = _try(lambda: writer.add(_parts_of(names, name, values)))
    if writer and not error:
        error = _try(writer.end)
    if error:
        writer.remove()
    return error


def _try(write):
    """The exception, or None: the rank that writes must go on to read, as the other ranks do."""
    try:
        write()
    except Exception as error:
        return error
    return None


def _whole_values(sharded):
    """(name, value) of each parameter and buffer, tied ones once. Collective."""
    others = {}
    for name, param in sharded.writes.find_others():
        others.setdefault(param, name)
    for layer in sharded.layers:
        for index, (name, _) in enumerate(layer.params):
            yield name, layer.read_main(index).cpu()
    yield from ((name, param.detach().cpu()) for param, name in others.items())
    for name, buffer in sharded.module.named_buffers():
        path, _, own = name.rpartition(".")
        if own not in sharded.module.get_submodule(path)._non_persistent_buffers_set:
            yield name, buffer.detach().cpu()


def _parts_of(names, name, values):
    """{name in the files: tensor}"""
    found, is_stack = names.find(name)
    if not is_stack:
        return {found[0]: values.contiguous()}
    if values.dim() < 2 or values.shape[1] % len(found):
        raise ValueError(
            f"save_hugging_face: {name!r} has the shape {tuple(values.shape)}, whose experts do not divide into "
            f"{len(found)} equal parts"
        )
    return {
        each.replace("{expert}", str(number)): part.clone()
        for number, expert in enumerate(values)
        for each, part in zip(found, expert.chunk(len(found)))
    }


class _Writer:
    def __init__(self, folder, max_bytes):
        self.folder, self.max_bytes = os.fspath(folder), max_bytes
        self.tensors, self.bytes, self.index, self.total = {}, 0, {}, 0
        self.paths = []  # of the files, which have other names until all are written

    def begin(self):
        os.makedirs(self.folder, exist_ok=True)
        if old := [name for name in os.listdir(self.folder) if name.endswith((".safetensors", _INDEX))]:
            raise ValueError(f"save_hugging_face: {self.folder} has {old[0]} already: give an empty folder")

    def add(self, tensors):
        twice = next((name for name in tensors if name in self.tensors or name in self.index), None)
        if twice is not None:
            raise ValueError(
                f"save_hugging_face: two parameters or buffers have the name {twice!r} in the files: correct names="
            )
        size = sum(value.nbytes for value in tensors.values())
        if self.tensors and self.bytes + size > self.max_bytes:
            self._write()
        self.tensors.update(tensors)
        self.bytes += size

    def _write(self):
        name = f"model-{len(set(self.index.values())) + 1:05d}.safetensors"
        self.paths.append(os.path.join(self.folder, name))
        _safetensors().torch.save_file(self.tensors, self.paths[-1] + _UNFINISHED, {"format": "pt"})
        self.index.update(dict.fromkeys(self.tensors, name))
        self.tensors, self.bytes, self.total = {}, 0, self.total + self.bytes

    def end(self):
        self._write()
        self.paths.append(os.path.join(self.folder, _INDEX))
        with open(self.paths[-1] + _UNFINISHED, "w", encoding="utf-8") as file:
            json.dump({"metadata": {"total_size": self.total}, "weight_map": self.index}, file, indent=2)
        for path in self.paths:
            os.replace(path + _UNFINISHED, path)

    def remove(self):
        """After an error, so that the folder can be saved again."""
        for path in self.paths:
            for each in (path, path + _UNFINISHED):
                with contextlib.suppress(OSError):
                    os.remove(each)
