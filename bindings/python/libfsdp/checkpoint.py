# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several models that are saved while training goes on, or opened to be read
(docs/guides/checkpoints.md)."""

import ctypes
import json
import os

from . import _abi
from ._library import lib, make, read_text
from .handle import Owner


class Checkpoint(Owner):
    """A checkpoint, made by Context.begin_checkpoint or Context.open_checkpoint."""

    def __init__(self, context, call, *arguments):
        self.context = context
        self._handle = context.own(lib.destroy_checkpoint, call, context.handle, *arguments)

    @classmethod
    def begin(cls, context, folder, **options):
        return cls(context, lib.begin_checkpoint, os.fsencode(folder), make(_abi.fsdp_save_options, options))

    @classmethod
    def open(cls, context, folder):
        return cls(context, lib.open_checkpoint, os.fsencode(folder))

    def add_model(self, model, name=""):
        self.context.check(lib.add_checkpoint_model(self.handle, name.encode(), model.handle))
        # A save goes on when the handles of checkpoint and model are gone, and reads the model's arenas.
        self.context._handle.kept.extend(model._handle.kept)

    def add_bytes(self, name, data, owner=_abi.FSDP_BYTES_ONCE):
        """Add bytes of the program's own. data is bytes or any buffer; it is copied at once."""
        data = bytes(data)
        self.context.check(lib.add_checkpoint_bytes(self.handle, name.encode(), data, len(data), owner))

    def commit(self):
        """Save the checkpoint while training goes on."""
        self.context.check(lib.commit_checkpoint(self.handle))

    @property
    def status(self):
        """The checkpoint's progress: an fsdp_checkpoint_status."""
        found = _abi.fsdp_checkpoint_status()
        self.context.check(lib.get_checkpoint_status(self.handle, found))
        return found

    def wait(self):
        """Wait until the checkpoint is there or is known to have failed."""
        self.context.check(lib.wait_checkpoint(self.handle))

    def load_model(self, model, name="", **options):
        """Load a model by its name. Keywords are the fields of fsdp_load_options. Returns the fsdp_loaded."""
        loaded = _abi.fsdp_loaded()
        self.context.check(
            lib.load_checkpoint_model(
                self.handle, name.encode(), model.handle, make(_abi.fsdp_load_options, options), loaded
            )
        )
        return loaded

    def read_bytes(self, name):
        size = ctypes.c_uint64(0)
        self.context.check(lib.read_checkpoint_bytes(self.handle, name.encode(), None, size))
        data = ctypes.create_string_buffer(size.value)
        self.context.check(lib.read_checkpoint_bytes(self.handle, name.encode(), data, size))
        return data.raw[: size.value]


def list_checkpoints(folder):
    """List the checkpoints of a folder, the newest first, as the parsed JSON."""
    return json.loads(read_text(lib.list_checkpoints, os.fsencode(folder)))
