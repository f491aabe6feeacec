# SPDX-License-Identifier: Apache-2.0
"""Part or all of a step that was captured into a CUDA graph."""

from ._library import lib
from .handle import Owner


class Capture(Owner):
    """A capture, made by Model.end_capture."""

    def __init__(self, model, handle):
        self.model, self._handle = model, handle

    def prepare_replay(self, lr=0.0, stream=None):
        """Call this before each launch of the graph on the stream."""
        self.model.context.check(lib.prepare_replay(self.handle, lr, stream))

    def commit_replay(self, stream=None):
        """Call this after the graph was launched."""
        self.model.context.check(lib.commit_replay(self.handle, stream))

    def cancel_replay(self, stream=None):
        """Call this instead of commit_replay if the graph was not launched."""
        self.model.context.check(lib.cancel_replay(self.handle, stream))
