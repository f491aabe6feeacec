# SPDX-License-Identifier: Apache-2.0
"""The part of one parameter that this rank owns."""

from . import _abi
from ._library import check, lib
from .constants import Dtype, Home
from .tensor import Tensor, read_grad


def refuse_file(options, call, user):
    """Raises if the options of a model put weights, gradients or states, which `user` needs in memory, into a file."""
    for field in ("state_home", "main_home", "grad_home"):
        if options.get(field) == Home.FILE:
            raise ValueError(
                f"{call}: {field} is Home.FILE, but {user} needs weights, gradients and states in memory: Home.FILE is for AdamW of "
                "the library and for your own optimizer over Model.shard_chunks(), and Home.HOST for all optimizers"
            )


class Shard:
    """A shard: main_weight and main_grad are arrays of its elements, which may be written in the update window only.
    The other fields are those of fsdp_shard.

    With MainStorage.SPLIT16 main_weight is None: group.read_param and load_param convert. At home in a file both
    are None: model.shard_chunks brings them. With MainStorage.NONE it is of bfloat16, and round_stochastic writes it.
    """

    def __init__(self, model, index):
        self._index = index
        found = _abi.fsdp_shard()
        check(lib.get_shard(model.handle, index, found))
        self._take(model, found)

    def _take(self, model, found):
        self._model = model
        self.group = next(group for group in model.groups.values() if group.handle == found.group)
        self.param_index, self.name = found.param_index, found.name.decode()
        self.element_offset, self.element_count = found.element_offset, found.element_count
        self.row_offset, self.row_count = found.row_offset, found.row_count
        self.lr_scale, self.flags, self.state_count = found.lr_scale, found.flags, found.state_count
        self._main_address = found.main_weight
        self.main_weight = found.main_weight and self._array(found.main_weight, found.main_weight_dtype)
        self.main_grad = found.main_grad and self._array(found.main_grad, found.main_grad_dtype)

    def _array(self, address, dtype):
        return Tensor.of(
            address, (self.element_count,), Dtype(dtype), self._model._handle, self._model.device
        ).array()

    def round_stochastic(self, values, step, offset=0, stream=None):
        """Round float32 numbers stochastically into main_weight, from element offset of this shard on, for an optimizer
        of the caller's own with MainStorage.NONE. step is the number of the optimizer's step."""
        address, dtype, count, _kept = read_grad(values, self._model.context.device)
        if dtype != Dtype.FLOAT32:
            raise ValueError(f"numbers of {dtype.name}: float32 is rounded")
        if not 0 <= offset <= self.element_count - count:
            raise ValueError(f"{count} numbers from element {offset} on, of a shard of {self.element_count}")
        if not 0 <= step < 2**64:
            raise OverflowError(f"step is {step}, which does not fit into 64 bits")
        to = self._main_address and self._main_address + 2 * offset
        at = self.element_offset + offset
        status = lib.round_stochastic(self.group.handle, self.param_index, at, address, to, count, step, stream)
        self._model.context.check(status)

    def state(self, name):
        """The elements of a named optimizer state. Those of an 8-bit state are codes (uint8). Their scales, one for each
        256 elements, are the state "NAME.absmax". None if the state is at home in a file (Home.FILE): model.shard_chunks
        brings it."""
        found = _abi.fsdp_tensor()
        check(lib.get_shard_state(self._model.handle, self._index, name.encode(), found))
        return None if not found.data else Tensor(found, self._model._handle).array()


class ShardChunk(Shard):
    """A part of a shard at home in a file (Home.FILE), which is in memory until the loop goes on to the next one. It has
    what a Shard has, for its elements alone."""

    def __init__(self, model, found):
        """found is an fsdp_shard."""
        self._take(model, found)

    def state(self, name):
        """The elements of a named optimizer state."""
        found = _abi.fsdp_tensor()
        self._model.context.check(lib.get_shard_chunk_state(self._model.handle, name.encode(), found))
        return Tensor(found, self._model._handle).array()


class ShardChunks:
    """The chunks of this rank, made by Model.shard_chunks: an iterator, at whose end all of them are in the file."""

    def __init__(self, model, stream):
        self._model, self._stream, self._is_over = model, stream, False

    def __iter__(self):
        return self

    def __next__(self):
        if self._is_over:
            raise StopIteration
        found = _abi.fsdp_shard()
        self._model.context.check(lib.next_shard_chunk(self._model.handle, self._stream, found))
        if found.element_count:
            return ShardChunk(self._model, found)
        self._is_over = True
        raise StopIteration
