# SPDX-License-Identifier: Apache-2.0
"""What owns a handle of the library: it is destroyed once, when it is given back, collected, or left at the end of the
process.

The library's handles may be destroyed in any order and from any thread, and destroying never waits for peers: so
collecting does.
"""

import weakref


class Handle:
    """The number, and the object that destroys it. Views keep it alive: memory is unmapped with the last one."""

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
        """The number that the library's calls take; None once closed, which they refuse as INVALID_HANDLE."""
        return self._handle.number if self._handle else None

    @property
    def is_closed(self):
        return self._handle is None

    def close(self):
        """Give the handle back. May be called again."""
        self._handle = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()
