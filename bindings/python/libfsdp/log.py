# SPDX-License-Identifier: Apache-2.0
"""Hooks that hand the library's log lines to the logger "libfsdp"."""

import functools
import logging

from . import _abi

logger = logging.getLogger("libfsdp")
_LOGGED = {
    _abi.FSDP_LOG_ERROR: logging.ERROR,
    _abi.FSDP_LOG_WARNING: logging.WARNING,
    _abi.FSDP_LOG_INFO: logging.INFO,
    _abi.FSDP_LOG_DEBUG: logging.DEBUG,
}


def wanted_level():
    """The log level that the logger "libfsdp" would show. The library does not make lines below it."""
    wanted = logger.getEffectiveLevel()
    return max((level for level, number in _LOGGED.items() if number >= wanted), default=_abi.FSDP_LOG_ERROR)


def _show(level, message):
    logger.log(_LOGGED.get(level, logging.DEBUG), "%s", message.decode(errors="replace"))


@_abi.fsdp_log_hook
def shared_hook(user_data, level, message):
    """The log hook of contexts that belong to threads of one process: signal handlers run only on the main thread."""
    _show(level, message)


def make_hook(on_raised):
    """Make a hook for a context that may belong to the main thread. It calls on_raised(error) if logging raises.

    The hook is max(), a callable in C, whose key is the send method of a generator. The generator gets one argument
    after the other, and continues inside its "try" (see context._Watch).
    """
    lines = _lines(on_raised)
    next(lines)
    return _abi.fsdp_log_hook(functools.partial(max, key=lines.send))


def _lines(on_raised):
    level = None
    while True:
        try:
            while True:
                part = yield 0  # equal keys, for max()
                if isinstance(part, bytes):
                    _show(level, part)
                else:  # the user data, which a signal may cost, then the level
                    level = part
        except GeneratorExit:
            raise
        except BaseException as raised:
            on_raised(raised)
