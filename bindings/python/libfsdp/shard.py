# SPDX-License-Identifier: Apache-2.0
"""The part of one parameter that this rank owns."""

from . import _abi
from ._library import check, lib
from .constants import Dtype
from .tensor import Tensor


class Shard:
    """A shard: main_weight and main_grad are arrays of its elements, which may be written in the update window only.
    The other fields are those of fsdp_shard."""

    def __init__(self, model, index):
        self._model, self._index = model, index
        found = _abi.fsdp_shard()
        check(lib.get_shard(model.handle, index, found))
        self.group = next(group for group in model.groups.values() if group.handle == found.group)
        self.param_index, self.name = found.param_index, found.name.decode()
        self.element_offset, self.element_count = found.element_offset, found.element_count
        self.row_offset, self.row_count = found.row_offset, found.row_count
        self.lr_scale, self.flags, self.state_count = found.lr_scale, found.flags, found.state_count
        self.main_weight = self._array(found.main_weight, found.main_weight_dtype)
        self.main_grad = self._array(found.main_grad, found.main_grad_dtype)

    def _array(self, address, dtype):
        return Tensor.of(
            address, (self.element_count,), Dtype(dtype), self._model._handle, self._model.device
        ).array()

    def state(self, name):
        """The elements of a named optimizer state."""
        found = _abi.fsdp_tensor()
        check(lib.get_shard_state(self._model.handle, self._index, name.encode(), found))
        return Tensor(found, self._model._handle).array()
