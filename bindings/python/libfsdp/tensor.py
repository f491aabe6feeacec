# SPDX-License-Identifier: Apache-2.0
"""Memory that the library owns, and arrays of the caller. Arrays are numpy's if numpy is installed, else memoryviews;
DLPack serves all other libraries."""

import ctypes
import math

from . import _abi, dlpack
from .constants import DeviceKind, Dtype

try:
    import numpy
except ImportError:
    numpy = None

SIZES = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2, Dtype.FLOAT8_E4M3: 1, Dtype.E8M0: 1, Dtype.UINT8: 1}
_HANDED_IN = (Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16, Dtype.UINT8)
# memoryview cannot be cast to "e": the two of 16 bits are told apart by their sign.
_FORMATS = {Dtype.FLOAT32: "f", Dtype.BFLOAT16: "H", Dtype.FLOAT16: "h", Dtype.FLOAT8_E4M3: "B", Dtype.E8M0: "B", Dtype.UINT8: "B"}
_TYPE_STRINGS = {Dtype.FLOAT32: "<f4", Dtype.BFLOAT16: "<u2", Dtype.FLOAT16: "<f2", Dtype.FLOAT8_E4M3: "|u1", Dtype.E8M0: "|u1", Dtype.UINT8: "|u1"}


def numpy_dtype(dtype):
    """numpy's type for a Dtype. numpy has no bfloat16: it is ml_dtypes' type if that is installed, else uint16 bits."""
    if dtype == Dtype.BFLOAT16:
        try:
            import ml_dtypes

            return numpy.dtype(ml_dtypes.bfloat16)
        except ImportError:
            return numpy.dtype("uint16")
    return numpy.dtype(_TYPE_STRINGS[dtype])


class Tensor:
    """A view of memory that the library owns, contiguous in C order unless it has strides, in elements.

    numpy(), memoryview() and __dlpack__ share it without a copy. The memory stays mapped as long as any of these views
    exists, whatever was closed. For the contents of the memory see fsdp_tensor in fsdp.h.
    """

    __slots__ = ("address", "shape", "dtype", "device", "device_index", "is_read_only", "strides", "owner", "__weakref__")

    def __init__(self, found, owner):
        """found is an fsdp_tensor."""
        self.address = found.data
        self.shape = tuple(found.shape[axis] for axis in range(found.dimension_count))
        self.dtype, self.device = Dtype(found.dtype), DeviceKind(found.device)
        self.device_index, self.owner, self.strides = found.device_index, owner, None
        self.is_read_only = bool(found.flags & _abi.FSDP_TENSOR_READ_ONLY)

    @classmethod
    def of(cls, address, shape, dtype, owner, like=None, strides=None):
        """A Tensor of memory at an address. like is the (device, device_index) of the memory; without it, the host."""
        made = cls.__new__(cls)
        made.address, made.shape, made.dtype, made.owner, made.is_read_only = (
            address,
            tuple(shape),
            Dtype(dtype),
            owner,
            False,
        )
        made.device, made.device_index = like or (DeviceKind.HOST, 0)
        made.strides = None if strides == dlpack.c_strides(made.shape) else strides
        return made

    @property
    def nbytes(self):
        return math.prod(self.shape) * SIZES[self.dtype]

    def __repr__(self):
        return (
            f"Tensor({self.shape}, {self.dtype.name}, {self.device.name}{', read-only' if self.is_read_only else ''})"
        )

    def need_contiguous(self):
        if self.strides:
            raise ValueError(
                f"a tensor of strides {self.strides} is not contiguous: take its parts, or make a copy of it"
            )

    def _need_host(self):
        if self.device != DeviceKind.HOST:
            raise ValueError("memory of a GPU: take it through DLPack, as torch.from_dlpack(tensor)")

    @property
    def __array_interface__(self):
        self._need_host()
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": _TYPE_STRINGS[self.dtype],
            "data": (self.address, self.is_read_only),
            "strides": self.strides and tuple(stride * SIZES[self.dtype] for stride in self.strides),
        }

    def numpy(self):
        """A numpy array of this memory. The array keeps the memory mapped."""
        return numpy.asarray(self).view(numpy_dtype(self.dtype))

    def memoryview(self):
        """A memoryview of this memory, which it keeps mapped. bfloat16 comes as bits, "H", and float16 as bits, "h"."""
        self._need_host()
        self.need_contiguous()
        memory = (ctypes.c_char * self.nbytes).from_address(self.address)
        memory.owner = self
        view = memoryview(memory).cast("B").cast(_FORMATS[self.dtype], self.shape or (1,))
        return view.toreadonly() if self.is_read_only else view

    def array(self):
        """What a program reads or writes: a numpy array, without numpy a memoryview; for a GPU the Tensor itself."""
        if self.device != DeviceKind.HOST:
            return self
        return self.numpy() if numpy else self.memoryview()

    def __dlpack_device__(self):
        return dlpack.device_of(self.device, self.device_index)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """The memory itself, never a copy. A consumer of DLPack 1 gets the read-only flag; torch does not write by
        itself."""
        if copy or (dl_device and tuple(dl_device) != self.__dlpack_device__()):
            raise BufferError("libfsdp lends its memory where it is, and does not copy")
        return dlpack.export(self, self.owner, max_version)


def empty(shape, dtype):
    """Return (a new array, which the library writes into, its address)."""
    if numpy:
        made = numpy.empty(shape, numpy_dtype(dtype))
        return made, made.ctypes.data
    memory = bytearray(math.prod(shape) * SIZES[dtype])
    view = memoryview(memory).cast(_FORMATS[dtype], list(shape) or [1])
    return view, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def read_numpy(array):
    types = {numpy_dtype(dtype): dtype for dtype in _HANDED_IN}
    types.setdefault(numpy.dtype("uint16"), Dtype.BFLOAT16)
    if array.dtype not in types:
        raise ValueError(f"an array of {array.dtype}: float32, float16, bfloat16 (its bits as uint16) or uint8 is expected")
    array = numpy.ascontiguousarray(array)
    return array.ctypes.data, types[array.dtype], array.shape, array, DeviceKind.HOST


def _read_buffer(array):
    view = memoryview(array)
    types = {"e": Dtype.FLOAT16, **{_FORMATS[dtype]: dtype for dtype in _HANDED_IN}}
    if view.format not in types or not view.c_contiguous:
        raise ValueError(
            f"a buffer of format {view.format!r}: contiguous 'f', 'e', 'h' (bits of float16), 'H' (bits of bfloat16) or 'B' is expected"
        )
    kept = (
        (ctypes.c_char * view.nbytes).from_buffer_copy(view)
        if view.readonly
        else (ctypes.c_char * view.nbytes).from_buffer(view.cast("B"))
    )
    return ctypes.addressof(kept), types[view.format], view.shape, kept, DeviceKind.HOST


def read(array):
    """Return (address, dtype, shape, the object that keeps the memory alive, device) of an array: numpy's, one with
    DLPack, or a buffer. device is None if host and GPU can read the memory."""
    if isinstance(array, Tensor):
        array.need_contiguous()
        return array.address, array.dtype, array.shape, array, array.device
    if numpy and isinstance(array, (numpy.ndarray, numpy.generic, list, tuple, float)):
        made = numpy.asarray(array)
        return read_numpy(
            made.astype(numpy.float32) if made.dtype == numpy.float64 and not isinstance(array, numpy.ndarray) else made
        )
    if hasattr(array, "__dlpack__"):
        return dlpack.read(array.detach() if hasattr(array, "detach") else array)
    return _read_buffer(array)


def read_grad(array, device):
    """read() for a gradient, which the context's device must be able to read. Returns the number of elements for shape,
    and no device."""
    address, dtype, shape, kept, where = read(array)
    if where not in (None, device):
        raise ValueError(f"a gradient in memory of {where.name}, for a context on {device.name}")
    count = math.prod(shape)
    if not address or not count:  # which the library would take for no gradient at all
        raise ValueError(f"an empty gradient, of shape {tuple(shape)}: None says that there is none")
    return address, dtype, count, kept


def read_value(array, device):
    """read() for data to load, which for a context on a GPU may be in host memory too. Returns as read_grad()."""
    address, dtype, shape, kept, where = read(array)
    if where == DeviceKind.CUDA and device == DeviceKind.HOST:
        raise ValueError(f"values in memory of {where.name}, for a context on {device.name}")
    return address, dtype, math.prod(shape), kept
