# SPDX-License-Identifier: Apache-2.0
"""libfsdp.so itself: where it is, its calls with their prototypes, and exceptions made of statuses.

Calls release the GIL (ctypes.CDLL). A call has its name in the header without fsdp_: ``lib.get_version()``.
``check(status)`` raises the exception that the status and the thread's last error describe.
"""
import ctypes
import os
import pathlib

from . import _abi
from .errors import error_of


def find_library():
    """The path of libfsdp.so: FSDP_LIBRARY, else the file beside this one (in a wheel), else what the dynamic linker
    finds."""
    if named := os.environ.get("FSDP_LIBRARY"):
        return named
    beside = pathlib.Path(__file__).resolve().parent / "libfsdp.so"
    return str(beside) if beside.exists() else "libfsdp.so.1"


class Library:
    """The library's calls as attributes."""

    def __init__(self, path):
        self.path = path
        handle = ctypes.CDLL(path)
        for name, (returns, arguments, doc) in _abi.CALLS.items():
            call = getattr(handle, name)
            call.restype, call.argtypes, call.__doc__ = returns, arguments, doc
            setattr(self, name[len("fsdp_"):], call)


for _struct, _size in _abi.SIZES.items():
    if ctypes.sizeof(_struct) != _size:
        raise ImportError(f"{_struct.__name__} has {ctypes.sizeof(_struct)} bytes here and {_size} in fsdp.h")

lib = Library(find_library())


def last_error(context=None):
    """The fsdp_error of this thread's last failing call, or of the last failing call on a context."""
    error = _abi.fsdp_error()
    lib.get_last_error(context, error)
    return error


def check(status):
    """Raise the libfsdp.Error of the status's class, unless the status is OK."""
    if status:
        raise error_of(last_error(), status)


def read_text(call, *arguments):
    """Return the text that a call writes into a caller's buffer."""
    size = ctypes.c_uint64(0)
    check(call(*arguments, None, size))
    while True:
        buffer = ctypes.create_string_buffer(size.value)
        status = call(*arguments, buffer, size)
        if status != _abi.FSDP_INVALID_ARGUMENT or size.value <= len(buffer):
            break
    check(status)
    return buffer.value.decode()


def make(struct, fields):
    """Make a struct from keyword arguments. Text is encoded to bytes; None means the default."""
    filled = struct()
    known = {name for name, _ in struct._fields_} - {"struct_size"}
    for name, value in fields.items():
        if name not in known:
            raise TypeError(f"{struct.__name__} has no field {name!r}; it has {', '.join(sorted(known))}")
        if value is not None:
            set_field(filled, name, value)
    return filled


def set_field(filled, name, value):
    """Set a field of a struct. ctypes cuts numbers that do not fit; here they are refused."""
    is_number = isinstance(getattr(filled, name), (int, float))
    if is_number and isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"{name} is {value!r}, it must be a number or a member of an enum")
    setattr(filled, name, os.fsencode(value) if isinstance(value, (str, os.PathLike)) else value)
    if isinstance(value, int) and is_number and getattr(filled, name) != value:
        raise OverflowError(f"{name} is {value}, which does not fit into its field of {type(filled).__name__}")
