# SPDX-License-Identifier: Apache-2.0
"""DLPack (dmlc.github.io/dlpack) in both directions, through ctypes: it makes capsules of memory that the library owns,
and reads addresses from the capsules of torch, JAX, MLX, tinygrad or numpy."""

import ctypes
import math

from .constants import DeviceKind, Dtype

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
# Whose memory it is; None: both kinds of device read it.
_DEVICES = {CPU: DeviceKind.HOST, CUDA: DeviceKind.CUDA, CUDA_HOST: None, CUDA_MANAGED: None}
_NAME, _USED, _VERSIONED, _USED_VERSIONED = (
    b"dltensor",
    b"used_dltensor",
    b"dltensor_versioned",
    b"used_dltensor_versioned",
)
# (code, bits) of a DLDataType
TYPES = {Dtype.FLOAT32: (2, 32), Dtype.FLOAT16: (2, 16), Dtype.BFLOAT16: (4, 16), Dtype.UINT8: (1, 8)}
_CODES = {**TYPES, Dtype.FLOAT8_E4M3: (1, 8), Dtype.E8M0: (1, 8)}  # unsigned bytes: few consumers know DLPack's own
READ_ONLY = 1


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("tensor", _Tensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned, of DLPack 1."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_api = ctypes.pythonapi
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_get_raw = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_is_valid_raw = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))

# What capsules keep alive until their consumer calls the deleter: {address of the managed struct: (struct, shape,
# owner)}.
_exported = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address):
    """The deleter, which the consumer calls on any thread when it no longer uses the memory."""
    _exported.pop(address, None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _drop(capsule):
    """The destructor of a capsule that no consumer took over. It gets the capsule as an address, because the capsule is
    being destroyed and no reference to it may be kept."""
    for name in (_NAME, _VERSIONED):
        if _is_valid_raw(capsule, name):
            _exported.pop(_get_raw(capsule, name), None)


_kept_callbacks = (_delete, _drop)
_deleter, _destructor = (ctypes.cast(callback, ctypes.c_void_p) for callback in _kept_callbacks)


def device_of(kind, index):
    """Return DLPack's (device type, index)."""
    return (CUDA if kind == DeviceKind.CUDA else CPU, index)


def c_strides(shape):
    """The strides of an array that is contiguous in C order, in elements."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def export(tensor, owner, max_version=None):
    """Make a capsule of a Tensor's memory, which owner keeps mapped. If the consumer knows DLPack 1, the capsule is of
    that version, with its read-only flag."""
    is_versioned = max_version is not None and max_version[0] >= 1
    managed = (_ManagedVersioned if is_versioned else _Managed)()
    shape = (ctypes.c_int64 * max(len(tensor.shape), 1))(*tensor.shape)
    strides = (ctypes.c_int64 * max(len(tensor.shape), 1))(*(tensor.strides or c_strides(tensor.shape)))
    code, bits = _CODES[tensor.dtype]
    kind, index = device_of(tensor.device, tensor.device_index)
    managed.tensor = _Tensor(tensor.address, kind, index, len(tensor.shape), code, bits, 1, shape, strides, 0)
    managed.deleter = _deleter.value
    if is_versioned:
        managed.major, managed.flags = 1, READ_ONLY if tensor.is_read_only else 0
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, strides, owner)
    return _new(address, _VERSIONED if is_versioned else _NAME, _destructor)


def read(array):
    """Return (address, dtype, shape, the object that keeps the memory alive, device) of an array with __dlpack__.

    The array must be contiguous in C order, with a dtype and a device of fsdp.h. device is None if host and GPU can
    read the memory.
    """
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:  # older than DLPack 1
        capsule = array.__dlpack__()
    if _is_valid(capsule, _VERSIONED):
        tensor = _ManagedVersioned.from_address(_get(capsule, _VERSIONED)).tensor
    elif _is_valid(capsule, _NAME):
        tensor = _Managed.from_address(_get(capsule, _NAME)).tensor
    else:
        raise ValueError("a DLPack capsule that was used before")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    types = {code: dtype for dtype, code in TYPES.items()}
    dtype = types.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise ValueError(
            f"an array of DLPack type ({tensor.code}, {tensor.bits}): float32, bfloat16 or float16 is expected"
        )
    if tensor.device_type not in _DEVICES:
        raise ValueError(f"an array on a device of DLPack's type {tensor.device_type}: host or CUDA is expected")
    if not _is_contiguous(tensor, shape):
        raise ValueError("an array that is not contiguous in C order: make a copy of it")
    # The capsule frees what the producer holds when it is collected: it is not consumed, only looked at.
    return (tensor.data or 0) + tensor.byte_offset, dtype, shape, capsule, _DEVICES[tensor.device_type]


def _is_contiguous(tensor, shape):
    if not tensor.strides or 0 in shape:
        return True
    step = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] != 1 and tensor.strides[axis] != step:
            return False
        step *= shape[axis]
    return True
