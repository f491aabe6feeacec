# SPDX-License-Identifier: Apache-2.0
"""Errors of the library as exceptions: libfsdp.Error, and a class for each status (docs/contracts/errors.md)."""

from . import _abi
from .constants import Origin, Status


class Error(Exception):
    """A call of libfsdp that failed.

    It has status, rank (the rank to blame, or None), message, origin and origin_code (where the error comes from, for
    example errno of the operating system), and context_failed (the context can only be destroyed).
    """

    def __init__(self, message, status=Status.INTERNAL, rank=None, origin=None, origin_code=0, context_failed=False):
        super().__init__(message)
        self.message, self.status, self.rank = message, status, rank
        self.origin, self.origin_code, self.context_failed = origin, origin_code, context_failed

    def __str__(self):
        return f"{self.status.name}: {self.message}"


class InvalidArgument(Error, ValueError):
    """A value that can never be right here."""


class InvalidHandle(Error):
    """An object that is closed, or that belongs to another context."""


class InvalidState(Error):
    """The right call at the wrong moment; the message names the call expected."""


class Unsupported(Error, NotImplementedError):
    """This build, backend or release cannot do it."""


class OutOfMemory(Error, MemoryError):
    """An allocation failed, or the model does not fit."""


class Busy(Error):
    """Another thread is inside this context; or, with wait=False, the call would have to wait."""


class Mismatch(Error):
    """Ranks called or declared different things."""


class PeerFailed(Error, ConnectionError):
    """A rank died, left or aborted; rank says which."""


class Timeout(Error, TimeoutError):
    """Peers did not come within timeout_ms."""


class Aborted(Error):
    """The context was aborted here."""


class Interrupted(Error):
    """The wait was given up because interrupted_flag asked for it. (Ctrl-C raises KeyboardInterrupt instead.)"""


class System(Error):
    """The operating system or a backend failed; origin and origin_code say which and how."""


class Internal(Error):
    """A bug in libfsdp: please report the message."""


CLASSES = {
    Status[name]: kind
    for name, kind in {
        "INVALID_ARGUMENT": InvalidArgument,
        "INVALID_HANDLE": InvalidHandle,
        "INVALID_STATE": InvalidState,
        "UNSUPPORTED": Unsupported,
        "OUT_OF_MEMORY": OutOfMemory,
        "BUSY": Busy,
        "MISMATCH": Mismatch,
        "PEER_FAILED": PeerFailed,
        "TIMEOUT": Timeout,
        "ABORTED": Aborted,
        "INTERRUPTED": Interrupted,
        "SYSTEM": System,
        "INTERNAL": Internal,
    }.items()
}


def error_of(found, status=None):
    """The exception for an fsdp_error; None if its status is OK."""
    status = found.status if status is None else status
    if status == _abi.FSDP_OK:
        return None
    known = Status(status)
    origin = Origin(found.origin) if found.origin in list(Origin) else None
    return CLASSES[known](
        found.message.decode(errors="replace"),
        known,
        None if found.rank < 0 else found.rank,
        origin,
        found.origin_code,
        bool(found.context_failed),
    )
