# SPDX-License-Identifier: Apache-2.0
"""Weights that autograd saves for a backward pass, where they come and go: what is kept is which parameter it was, and
not an address, which another layer may have by then."""

import torch


class _Weight:
    """A view of a parameter that an operation has saved."""

    __slots__ = ("layer", "index", "dtype", "shape", "stride", "offset", "version")

    def __init__(self, layer, index, view):
        self.layer, self.index, self.dtype = layer, index, view.dtype
        self.shape, self.stride, self.offset = view.shape, view.stride(), view.storage_offset()
        self.version = layer.params[index][1]._version


class SavedWeights:
    """The hooks of torch.autograd.graph.saved_tensors_hooks, entered at the outermost forward."""

    def __init__(self, owner):
        self.owner, self._places, self._context = owner, {}, None

    def know(self, layer, views):
        for index, view in enumerate(views):
            self._places[view.data_ptr()] = layer, index

    def forget(self, views):
        for view in views:
            self._places.pop(view.data_ptr(), None)

    def enter(self):
        """Not inside of other hooks, which would then not see what they wait for: those of a checkpoint's recomputation,
        whose layers are held while their backward pass runs, or the program's own."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True):
            return
        self._context = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
        self._context.__enter__()

    def leave(self):
        if self._context:
            self._context.__exit__()
            self._context = None

    def find(self, tensor):
        """(layer, index) of the parameter whose memory this is, or None."""
        return self._places.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None

    def pack(self, tensor):
        place = self.find(tensor)
        if place:
            return _Weight(*place, tensor)
        # The tensor itself would keep its graph, and so itself, alive.
        return tensor.detach(), tensor._version

    def unpack(self, packed):
        if isinstance(packed, _Weight):
            return self._weight(packed)
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
                "instead."
            )
        return tensor

    def _weight(self, saved):
        name, param = saved.layer.params[saved.index]
        if param._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameter {name!r} is at version {param._version}; expected version {saved.version} instead. A step "
                "writes all weights: run the backward pass before it"
            )
        self.owner.passes.hold(saved.layer)
        view = saved.layer.find_views()[1][saved.index]
        if view.dtype != saved.dtype:
            view = view.view(saved.dtype)
        view = view.as_strided(saved.shape, saved.stride, saved.offset)
        # With create_graph operations of the backward pass save it in turn, beyond the hold.
        return view.clone() if torch.is_grad_enabled() else view
