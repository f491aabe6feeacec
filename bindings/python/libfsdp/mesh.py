# SPDX-License-Identifier: Apache-2.0
"""Ranks arranged as replicate x shard."""

import ctypes

from . import _abi
from ._library import lib, make
from .handle import Owner


class Mesh(Owner):
    """A mesh, made by Context.create_mesh. Models that were made from the mesh keep what they need."""

    def __init__(self, context, ranks=None, **options):
        if ranks is not None:
            options.update(ranks=(ctypes.c_uint32 * len(ranks))(*ranks), rank_count=len(ranks))
        made = make(_abi.fsdp_mesh_options, options)
        self._handle = context.own(lib.destroy_mesh, lib.create_mesh, context.handle, made)


def handle_of(mesh):
    """The handle for a call. Without a mesh it is None, which means all ranks; so a closed mesh is refused here."""
    if mesh is None:
        return None
    if mesh.is_closed:
        raise ValueError("the mesh is closed: close it after the calls that take it")
    return mesh.handle
