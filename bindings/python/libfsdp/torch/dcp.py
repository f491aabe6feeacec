# SPDX-License-Identifier: Apache-2.0
"""Reads folders of torch.distributed.checkpoint, as jobs with FSDP2 save them: .metadata, and *.distcp files.

.metadata is a pickle. The reader below makes plain records of the few classes that it knows and refuses all others, so
a folder cannot run code. The files have values of torch.save(), which torch.load(weights_only=True) reads.
"""

import io
import os
import pickle

import torch

from .state import named_buffers

_METADATA = "torch.distributed.checkpoint.metadata"


class _Record:
    """Stands for an object of torch's: it has the pickled attributes, and no methods."""

    def __init__(self, *values):
        self.values = values

    def __setstate__(self, state):
        self.__dict__.update(state if isinstance(state, dict) else {"values": state})


class _Tensors(_Record):
    """TensorStorageMetadata"""


def _plain(*values):
    return values[0] if len(values) == 1 else values


_RECORDS = "Metadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta TensorProperties".split()
_KNOWN = {(_METADATA, name): _Record for name in _RECORDS}
_KNOWN[_METADATA, "TensorStorageMetadata"] = _Tensors
_KNOWN["torch.distributed.checkpoint.filesystem", "_StorageInfo"] = _Record
_KNOWN |= {
    (_METADATA, "_MEM_FORMAT_ENCODING"): _plain,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _plain,
}
_KNOWN |= {(room, name): _plain for room in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        found = _KNOWN.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no .metadata of a checkpoint needs")
        return found

    def persistent_load(self, pid):
        raise pickle.UnpicklingError("it names an object outside of the pickle")


def _key_of(index):
    """(name, offset of the part); torch leaves the offset out where a value has no parts."""
    offset = getattr(index, "offset", None)
    return index.fqn, None if offset is None else tuple(offset)


class DistributedCheckpoint:
    """The tensors of a folder: read(name) returns one, whole and on the host."""

    def __init__(self, folder):
        self.folder = os.fspath(folder)
        self.entries, self.places = self._read_metadata()

    def _read_metadata(self):
        path = os.path.join(self.folder, ".metadata")
        try:
            with open(path, "rb") as file:
                metadata = _Unpickler(file).load()
            places = {_key_of(index): info for index, info in metadata.storage_data.items()}
            return dict(metadata.state_dict_metadata), places
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{path}: a folder of torch.distributed.checkpoint has this file; its job may have died in the save"
            ) from error
        except Exception as error:
            raise ValueError(f"{path} is no .metadata of torch.distributed.checkpoint: {error}") from error

    def names(self):
        """The names of tensors."""
        return [name for name, entry in self.entries.items() if isinstance(entry, _Tensors)]

    def read(self, name):
        entry = self.entries[name]
        made, count = None, 0
        for chunk in entry.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            part = self._read_chunk(name, offsets, sizes)
            made = torch.zeros(tuple(entry.size), dtype=part.dtype) if made is None else made
            place = made
            for axis, (start, size) in enumerate(zip(offsets, sizes)):
                place = place.narrow(axis, start, size)
            place.copy_(part)
            count += part.numel()
        if made is None or count != made.numel():
            shape = tuple(entry.size)
            raise ValueError(f"{self.folder}: the parts of {name!r} have {count} elements, and its shape is {shape}")
        return made

    def _read_chunk(self, name, offsets, sizes):
        info = self.places.get((name, offsets)) or self.places.get((name, None))
        if info is None:
            raise ValueError(f"{self.folder}: .metadata does not say where the part of {name!r} at {offsets} is")
        file_name = info.relative_path
        if os.path.basename(file_name) != file_name:
            raise ValueError(f"{self.folder}: .metadata names the file {file_name!r}, which is not in the folder")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{self.folder}: {name!r} was saved with transforms, such as compression: save it without")
        with open(os.path.join(self.folder, file_name), "rb") as file:
            file.seek(info.offset)
            part = torch.load(io.BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes:
            place = os.path.join(self.folder, file_name)
            raise ValueError(f"{place}: the part of {name!r} at {offsets} is no tensor of shape {sizes}")
        return part


def find_prefix(names, wanted, ending=""):
    """What stands before the names of a module's parameters in a checkpoint, as "model.", or None if names lack."""
    names, first = set(names), wanted[0] + ending
    prefixes = [name[: -len(first)] for name in names if name == first or name.endswith("." + first)]
    fitting = [prefix for prefix in prefixes if all(prefix + each + ending in names for each in wanted)]
    if len(fitting) > 1:
        does = "load with weights_only=True" if ending else "give load_dcp one of these as prefix="
        what = "AdamW's states" if ending else "the module's parameters"
        raise ValueError(f"the checkpoint has {what} several times, under {sorted(fitting)}: {does}")
    return fitting[0] if fitting else None


def load(owner, folder, weights_only, prefix):
    """Loads weights and buffers, and AdamW's states unless weights_only. Returns AdamW's number of steps, or None.
    Collective."""
    saved = DistributedCheckpoint(folder)
    params = [name for layer in owner.layers for name, _ in layer.params]
    prefix = _prefix_of_weights(folder, saved, params, prefix)
    trained = [name for layer in owner.layers for (name, _), can in zip(layer.params, layer.can_train) if can]
    states = None if weights_only or not trained else _find_states(folder, saved, trained)
    _check_shapes(owner, folder, saved, prefix, states)
    step = None if states is None else _read_step(folder, saved, states, trained)
    with owner.window("sharded.load_dcp()"):
        for layer in owner.layers:
            for index, (name, _) in enumerate(layer.params):
                layer.group.load_param(index, _loadable(saved.read(prefix + name)))
                for state in _STATES if states is not None and layer.can_train[index] else ():
                    layer.group.load_state(index, state, saved.read(f"{states}{name}.{state}").float().contiguous())
    with torch.no_grad():
        for name, value in _whole_values(owner).items():
            value.copy_(saved.read(prefix + name))
    return step


_STATES = "exp_avg", "exp_avg_sq"


def _prefix_of_weights(folder, saved, params, prefix):
    if prefix is not None and not (prefix == "" or (isinstance(prefix, str) and prefix.endswith("."))):
        raise ValueError(f"sharded.load_dcp(): prefix is {prefix!r}: it is empty or ends in a dot, as 'model.'")
    names = saved.names()
    found = find_prefix(names, params) if prefix is None else prefix
    ending = lambda name: any(each == name or each.endswith("." + name) for each in names)
    is_there = ending if prefix is None else lambda name: prefix + name in names
    lost = [name for name in params if not is_there(name)]
    if found is None or lost:
        under = f" under {prefix!r}" if prefix else ""
        lost = (lost or params[-1:])[0]
        raise KeyError(f"{folder} lacks weights of the module's parameters{under}, say of {lost!r}; it has {names[:8]}")
    return found


def _whole_values(owner):
    """{name: value} of what each rank has whole: ignored parameters and the buffers of state dicts."""
    ignored = {name: param for name, param in owner.module.named_parameters() if param in owner.ignored}
    return {**ignored, **dict(named_buffers(owner.module))}


def _check_shapes(owner, folder, saved, prefix, states):
    """Raises, before anything is loaded, unless the folder has every value in the module's shape."""
    for layer in owner.layers:
        for index, (name, param) in enumerate(layer.params):
            _check_shape(folder, saved, prefix + name, param)
            for state in _STATES if states is not None and layer.can_train[index] else ():
                _check_shape(folder, saved, f"{states}{name}.{state}", param)
    for name, value in _whole_values(owner).items():
        _check_shape(folder, saved, prefix + name, value)


def _check_shape(folder, saved, name, value):
    entry = saved.entries.get(name)
    if not isinstance(entry, _Tensors):
        raise KeyError(
            f"{folder} has no {name!r}, which the module has as a parameter or buffer, or AdamW as its state: nothing "
            "was loaded"
        )
    if tuple(entry.size) != tuple(value.shape):
        raise ValueError(
            f"{folder}: {name!r} has the shape {tuple(entry.size)}, and the module's is {tuple(value.shape)}: nothing "
            "was loaded"
        )


def _loadable(values):
    return (values if values.dtype == torch.uint8 else values.float()).contiguous()


def _find_states(folder, saved, trained):
    states = find_prefix(saved.names(), trained, ".exp_avg")
    if states is None:
        raise KeyError(
            f"{folder} has no states of AdamW by the names of parameters, as {trained[0] + '.exp_avg'!r}: save what "
            "torch.distributed.checkpoint.state_dict.get_state_dict returns, or load with weights_only=True"
        )
    return states


def _read_step(folder, saved, states, trained):
    """AdamW's number of steps, which the library counts once for the whole model."""
    lost = next((name for name in trained if not _is_number(saved.entries.get(f"{states}{name}.step"))), None)
    if lost:
        raise KeyError(
            f"{folder} does not tell AdamW's number of steps of {lost!r}: there is no number {states + lost + '.step'!r}. "
            "Nothing was loaded; load with weights_only=True"
        )
    steps = {name: int(saved.read(f"{states}{name}.step")) for name in trained}
    if len(set(steps.values())) > 1:
        raise ValueError(f"{folder}: AdamW's numbers of steps differ between parameters, and libfsdp has one: {steps}")
    return next(iter(steps.values()))


def _is_number(entry):
    return isinstance(entry, _Tensors) and all(size == 1 for size in entry.size)
