# SPDX-License-Identifier: Apache-2.0
"""Fully sharded data parallel training: libfsdp for Python.

    import libfsdp as fsdp

The names are those of fsdp.h without their prefix; README.md has a program to start with. The low-level layer is
libfsdp._abi, and ``libfsdp.lib`` has every call of the header, under its name without fsdp_.
"""
from . import _abi
from ._library import check, lib, read_text
from .capture import Capture
from .checkpoint import Checkpoint, list_checkpoints
from .constants import *  # noqa: F403  the enums
from .constants import EVERY_RANK
from .context import Context, create_local_contexts, run_local
from .errors import *  # noqa: F403  the exceptions
from .errors import Error
from .group import Group, Param
from .matrices import Matrix
from .mesh import Mesh
from .model import Model
from .shard import Shard, ShardChunk
from .tensor import Tensor

__version__ = lib.get_version().decode()


def describe_build():
    """Describe what this build of the library contains, as {key: value}."""
    return dict(line.split(": ", 1) for line in read_text(lib.describe_build).splitlines() if ": " in line)
