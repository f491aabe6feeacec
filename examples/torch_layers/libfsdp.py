# SPDX-License-Identifier: Apache-2.0
"""The part of fsdp.h that this example calls, through ctypes alone. Structures as in the header, in its order."""
import ctypes as c
import os

FLOAT32, BFLOAT16, FLOAT16 = 1, 2, 3
FORWARD, BACKWARD, RECOMPUTE, EVAL = 1, 2, 3, 4
NO_DECAY = 1 << 14
MEAN = 4
LAST = 1 << 18
FORCE_COMMUNICATION = 1 << 12
EVERY_RANK = -1
DEVICE_HOST, DEVICE_CUDA = 1, 2
TRANSPORTS = {"auto": 0, "nccl": 1, "staging": 2}
ROLES = ("total", "compute", "main", "grad", "optimizer", "gather", "reduce", "staging")
u32, i32, u64, f64, pointer = c.c_uint32, c.c_int32, c.c_uint64, c.c_double, c.c_void_p


class Sized(c.Structure):
    """A structure whose first field is its size."""

    def __init__(self, **fields):
        super().__init__(c.sizeof(self), **fields)


class Error(Sized):
    _fields_ = [("struct_size", u64), ("status", i32), ("origin", i32), ("origin_code", c.c_int64), ("rank", i32),
                ("context_failed", i32), ("message", c.c_char * 1024)]


class Tensor(Sized):
    _fields_ = [("struct_size", u64), ("data", pointer), ("shape", c.POINTER(u64)), ("element_count", u64),
                ("dimension_count", u32), ("dtype", i32), ("element_size", u32), ("flags", u32), ("device", i32),
                ("device_index", i32)]


class ContextOptions(Sized):
    _fields_ = [("struct_size", u64), ("flags", u32), ("world_size", u32), ("rank", u32), ("ranks_per_host", u32),
                ("rendezvous", c.c_char_p), ("device", i32), ("device_index", i32), ("device_transport", i32),
                ("timeout_ms", u32), ("heartbeat_timeout_ms", u32), ("log_level", i32), ("interrupted_flag", pointer),
                ("interrupted", pointer), ("interrupted_data", pointer), ("log", pointer), ("log_data", pointer),
                ("trace_directory", c.c_char_p), ("trace_events", u64), ("flight_directory", c.c_char_p),
                ("flight_events", u32), ("debug_delay_us", u32), ("debug_delay_seed", u64),
                ("debug_failed_allocation", u64)]


class ModelOptions(Sized):
    _fields_ = [("struct_size", u64), ("mesh", pointer), ("flags", u32), ("strategy", i32), ("outer_strategy", i32),
                ("unshard_mode", i32), ("grad_dtype", i32), ("reduce_dtype", i32), ("grad_op", i32),
                ("reduce_policy", i32), ("grad_factor", f64), ("optimizer", i32), ("max_pending_groups", u32),
                ("prefetch_depth", u32), ("reserved", u32), ("prefetch_bytes", u64)]


class Param(Sized):
    _fields_ = [("struct_size", u64), ("name", c.c_char_p), ("shape", c.POINTER(u64)), ("dimension_count", u32),
                ("dtype", i32), ("flags", u32), ("granule", i32), ("granule_rows", u64), ("lr_scale", f64),
                ("user_data", pointer)]


class AdamW(Sized):
    _fields_ = [("struct_size", u64), ("beta1", f64), ("beta2", f64), ("epsilon", f64), ("weight_decay", f64),
                ("step", u64), ("flags", u32), ("reserved", u32)]


class Failed(Exception):
    """A call that did not return FSDP_OK, with the library's own message."""


class Library:
    """libfsdp.so: every call raises Failed instead of returning a status."""

    def __init__(self, path=None):
        self._calls = c.CDLL(path or os.environ.get("FSDP_LIBRARY", "libfsdp.so"))

    def call(self, name, *arguments):
        function = getattr(self._calls, name)
        function.restype = i32
        status = function(*arguments)
        if status:
            error = Error()
            self._calls.fsdp_get_last_error(None, c.byref(error))
            raise Failed(f"{name}: {error.message.decode()}")
