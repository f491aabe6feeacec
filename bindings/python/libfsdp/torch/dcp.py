# SPDX-License-Identifier: Apache-2.0
"""Reads folders of torch.distributed.checkpoint, as jobs with FSDP2 save them: .metadata, and *.distcp files.

.metadata is a pickle. The reader below makes plain records of the few classes that it knows and refuses all others, so
a folder cannot run code. The files have values of torch.save(), which torch.load(weights_only=True) reads.
"""

import io
import os
import pickle

import torch

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
    prefixes = [name[: -len(first)] for name in names if name.endswith(first)]
    fitting = [prefix for prefix in prefixes if all(prefix + each + ending in names for each in wanted)]
    if len(fitting) > 1:
        raise ValueError(f"the checkpoint has the module's parameters several times, under {sorted(fitting)}")
    return fitting[0] if fitting else None


def load(owner, folder, weights_only):
    """Loads weights and buffers, and AdamW's states unless weights_only. Collective."""
    saved = DistributedCheckpoint(folder)
    names = saved.names()
    params = [name for layer in owner.layers for name, _ in layer.params]
    prefix = find_prefix(names, params)
    if prefix is None:
        lost = next(name for name in params if not any(each.endswith(name) for each in names) or name == params[-1])
        raise KeyError(f"{folder} lacks weights of the module's parameters, say of {lost!r}; it has {names[:8]}")
    trained = [name for layer in owner.layers for (name, _), can in zip(layer.params, layer.can_train) if can]
    states = None if weights_only or not trained else _find_states(folder, saved, trained)
    with owner.window("sharded.load_dcp()"):
        for layer in owner.layers:
            for index, (name, _) in enumerate(layer.params):
                layer.group.load_param(index, _loadable(saved.read(prefix + name)))
                for state in ("exp_avg", "exp_avg_sq") if states is not None and layer.can_train[index] else ():
                    layer.group.load_state(index, state, saved.read(f"{states}{name}.{state}").float().contiguous())
    _load_buffers(owner, saved, prefix)
    return None if states is None else _read_step(folder, saved, states, trained)


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


def _load_buffers(owner, saved, prefix):
    with torch.no_grad():
        for part, module in owner.module.named_modules():
            for name, buffer in module._buffers.items():
                full = prefix + (part + "." if part else "") + name
                if buffer is not None and full in saved.entries:
                    buffer.copy_(saved.read(full))


def _read_step(folder, saved, states, trained):
    """AdamW's number of steps, which the library counts once for the whole model."""
    steps = {name: int(saved.read(f"{states}{name}.step")) for name in trained}
    if len(set(steps.values())) > 1:
        raise ValueError(f"{folder}: AdamW's numbers of steps differ between parameters, and libfsdp has one: {steps}")
    return next(iter(steps.values()))
