# SPDX-License-Identifier: Apache-2.0
"""Matrices that one rank has whole inside the update window."""

from . import _abi
from ._library import lib, make
from .constants import DeviceKind
from .tensor import SIZES, Tensor, numpy


class Matrix:
    """Some equal matrices of one parameter, which this rank has whole until the loop goes on to the next ones.

    array is a numpy array [count, rows, columns] over the library's memory, to be changed in place. matrix[i] is one of
    the matrices, [rows, columns], and len(matrix) is count. tensor is the same memory for DLPack. On a GPU array is the
    tensor; without numpy it is a list of memoryviews [rows, columns].

    group, name and param_index say which parameter it is, batch_index which matrix of a stack comes first, split_index
    and row_offset which rows.
    """

    def __init__(self, model, found):
        """found is an fsdp_matrix."""
        self.group = next(group for group in model.groups.values() if group.handle == found.group)
        self.name, self.param_index = found.name.decode(), found.param_index
        self.batch_index, self.split_index, self.row_offset = found.batch_index, found.split_index, found.row_offset
        self.count, self.rows, self.columns = found.count, found.rows, found.columns
        self._stride_bytes = found.stride_bytes
        strides = (found.stride_bytes // SIZES[found.dtype], self.columns, 1)
        shape = (self.count, self.rows, self.columns)
        self.tensor = Tensor.of(found.data, shape, found.dtype, model._handle, model.device, strides)

    def __repr__(self):
        return f"Matrix({self.name!r}, {self.count} x {self.rows} x {self.columns}, {self.dtype.name})"

    @property
    def dtype(self):
        return self.tensor.dtype

    @property
    def array(self):
        if numpy or self.tensor.device != DeviceKind.HOST:
            return self.tensor.array()
        return [self[number] for number in range(self.count)]

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if not 0 <= number < self.count:
            raise IndexError(f"matrix {number} of {self!r}")
        whole = self.tensor
        address = whole.address + number * self._stride_bytes
        device = whole.device, whole.device_index
        return Tensor.of(address, (self.rows, self.columns), self.dtype, whole.owner, device).array()


class Matrices:
    """The matrices of this rank, made by Model.matrices: an iterator, whose end returns the rows."""

    def __init__(self, model, stream, **options):
        self._model, self._stream, self._is_over = model, stream, False
        self._check(lib.collect_matrices(model.handle, make(_abi.fsdp_matrix_options, options), stream))

    def _check(self, status):
        self._model.context.check(status)

    def __iter__(self):
        return self

    def __next__(self):
        if self._is_over:
            raise StopIteration
        found = _abi.fsdp_matrix()
        self._check(lib.next_matrix(self._model.handle, self._stream, found))
        if found.data:
            return Matrix(self._model, found)
        self._is_over = True
        self._check(lib.return_matrices(self._model.handle, self._stream))
        raise StopIteration
