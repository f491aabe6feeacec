# SPDX-License-Identifier: Apache-2.0
"""Owners of handles of the library. A handle is destroyed once: when it is given back, when its owner is collected, or
at the end of the process.

The library's handles may be destroyed in any order and from any thread, and destroying never waits for peers. So
garbage collection may destroy them.
"""

import weakref


class Handle:
    """A handle's number, with the finalizer that destroys it. Views keep this object alive: the memory is unmapped
    with the last view."""

    __slots__ = ("number", "kept", "_finalizer", "__weakref__")

    def __init__(self, destroy, number):
        self.number, self.kept = number, []  # kept: what the library uses until it has destroyed the number
        self._finalizer = weakref.finalize(self, _destroy, destroy, number, self.kept)

    def destroy(self):
        self._finalizer()


def _destroy(destroy, number, kept):
    destroy(number)
    kept.clear()


class Owner:
    """An object with a handle that close() gives back."""

    _handle = None

    @property
    def handle(self):
        """The number that the library's calls take. It is None once closed, which calls refuse as INVALID_HANDLE."""
        return self._handle.number if self._handle else None

    @property
    def is_closed(self):
        return self._handle is None

    def close(self):
        """Give the handle back. Further calls do nothing."""
        self._handle = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()
