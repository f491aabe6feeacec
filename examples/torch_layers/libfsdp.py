# SPDX-License-Identifier: Apache-2.0
"""The part of fsdp.h that this example calls, through ctypes alone. The structures are those that bindings/python writes out of the
header; its package, which does more, is not used here."""
import ctypes as c
import importlib.util
import os
import pathlib


def load_structures():
    path = pathlib.Path(__file__).resolve().parents[2] / "bindings/python/libfsdp/_abi.py"
    spec = importlib.util.spec_from_file_location("fsdp_structures", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


abi = load_structures()

FLOAT32, BFLOAT16 = abi.FSDP_FLOAT32, abi.FSDP_BFLOAT16
FORWARD, BACKWARD, EVAL = abi.FSDP_FORWARD, abi.FSDP_BACKWARD, abi.FSDP_EVAL
NO_DECAY = abi.FSDP_PARAM_NO_DECAY
MEAN = abi.FSDP_VALUE_MEAN
LAST = abi.FSDP_LAST
FORCE_COMMUNICATION = abi.FSDP_MODEL_FORCE_COMMUNICATION
EVERY_RANK = abi.FSDP_EVERY_RANK
DEVICE_CUDA = abi.FSDP_DEVICE_CUDA
TRANSPORTS = {"auto": 0, "nccl": abi.FSDP_TRANSPORT_NCCL, "staging": abi.FSDP_TRANSPORT_STAGING}
ROLES = ("total", "compute", "main", "grad", "optimizer", "gather", "reduce", "staging")

Error, Tensor, Param = abi.fsdp_error, abi.fsdp_tensor, abi.fsdp_param
ContextOptions, ModelOptions, AdamW = abi.fsdp_context_options, abi.fsdp_model_options, abi.fsdp_adamw_options


class Failed(Exception):
    """A call that did not return FSDP_OK, with the library's own message."""


class Library:
    """libfsdp.so: every call raises Failed instead of returning a status."""

    def __init__(self, path=None):
        self._calls = c.CDLL(path or os.environ.get("FSDP_LIBRARY", "libfsdp.so"))

    def call(self, name, *arguments):
        function = getattr(self._calls, name)
        function.restype = c.c_int32
        status = function(*arguments)
        if status:
            error = Error()
            self._calls.fsdp_get_last_error(None, c.byref(error))
            raise Failed(f"{name}: {error.message.decode()}")
