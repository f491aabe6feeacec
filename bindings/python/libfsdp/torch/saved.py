# SPDX-License-Identifier: Apache-2.0
"""Weights that autograd saves for a backward pass, and outputs that are weights, where weights come and go: what is kept
is which parameter it was, or a copy, and never an address, which another layer may have by then."""

import contextlib

import torch
from torch.nn import Parameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes


def current_task():
    """The number of the backward pass that this thread is in, or -1."""
    return torch._C._current_graph_task_id()


def copy_weight(view):
    """A copy that is no operation of the module: selective checkpoints count those."""
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    with _disable_current_modes() if has_modes else contextlib.nullcontext(), torch.no_grad():
        return view.clone()


class _Weight:
    """A view of a parameter that an operation has saved."""

    __slots__ = ("layer", "index", "dtype", "shape", "stride", "offset", "is_conj", "is_neg", "version")

    def __init__(self, layer, index, view):
        self.layer, self.index, self.dtype = layer, index, view.dtype
        self.shape, self.stride, self.offset = view.shape, view.stride(), view.storage_offset()
        self.is_conj, self.is_neg = view.is_conj(), view.is_neg()
        self.version = layer.params[index][1]._version

    def of(self, memory):
        """The same view of the weights where they lie now."""
        view = memory.reshape(-1)
        view = view if view.dtype == self.dtype else view.view(self.dtype)
        view = view.as_strided(self.shape, self.stride, self.offset)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


class _Hooks:
    """What autograd saves while a forward of the sharded module runs. theirs: the hooks (pack, unpack) of the program
    around it, which have what is no weight of ours, or None."""

    def __init__(self, saved, theirs):
        self.saved, self.theirs = saved, theirs
        self.context = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor):
        place = self.saved.find(tensor)
        if place:
            return _Weight(*place, tensor)
        if self.theirs:
            return (self.theirs[0](tensor),)
        # The tensor itself would keep its graph, and so itself, alive.
        return tensor.detach(), tensor._version

    def unpack(self, packed):
        if isinstance(packed, _Weight):
            return self.saved.fetch(packed)
        if self.theirs:
            return self.theirs[1](packed[0])
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version} "
                "instead."
            )
        return tensor


class _RecomputeHooks(_Hooks):
    """A checkpoint recomputes what it did not save, and counts what it sees: it is given everything, weights as copies,
    which end with their use."""

    def pack(self, tensor):
        return self.theirs[0](copy_weight(tensor) if self.saved.find(tensor) else tensor)

    def unpack(self, packed):
        return self.theirs[1](packed)


class SavedWeights:
    """The hooks of torch.autograd.graph.saved_tensors_hooks, entered at each forward, so that they are above those that
    the program entered meanwhile."""

    def __init__(self, owner):
        self.owner, self._places, self._entered = owner, {}, []

    def know(self, layer, address, views):
        """A layer has tensors of its own for each buffer that it has been in, whatever is there now."""
        for index, view in enumerate(views):
            self._places[view.untyped_storage()._cdata] = layer, index, address

    def find(self, tensor):
        """(layer, index) of the parameter that this is a view of, or None."""
        place = self._places.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        if place is None:
            return None
        layer, index, address = place
        if not layer.is_at(address):
            raise RuntimeError(
                f"a view of {layer.params[index][0]!r} is used when the weights are not unsharded any more, and shows others: "
                "it was kept beyond the forward pass, by the module, or by a selective checkpoint that saves views of weights"
            )
        return layer, index

    # -- hooks --------------------------------------------------------------------------------------------------

    def enter(self):
        """What leave() takes."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top and self._is_own(top) and isinstance(top[0].__self__, _RecomputeHooks) and current_task() == -1:
            self.leave(top[0].__self__)  # of a pass that an interrupt has ended
            return self.enter()
        if top and self._is_own(top):
            return None
        if top and top[0].__module__ == "torch.utils.checkpoint":
            if current_task() == -1:
                return None  # its forward, which saves nothing
            hooks = _RecomputeHooks(self, top)
        else:
            hooks = _Hooks(self, top)
        hooks.context.__enter__()
        self._entered.append(hooks)
        return hooks

    def leave(self, hooks):
        if hooks and hooks in self._entered:
            self._entered.remove(hooks)
            hooks.context.__exit__()

    def leave_all(self):
        """After an exception that no hook of a forward was told of."""
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) and self._is_own(top):
            self.leave(top[0].__self__)
        self._entered = []

    def _is_own(self, top):
        hooks = getattr(top[0], "__self__", None)
        return isinstance(hooks, _Hooks) and hooks.saved is self

    # -- values -------------------------------------------------------------------------------------------------

    def fetch(self, saved):
        name, param = saved.layer.params[saved.index]
        if param._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"parameter {name!r} is at version {param._version}; expected version {saved.version} instead. A step "
                "writes all weights: run the backward pass before it"
            )
        self.owner.passes.hold(saved.layer)
        view = saved.of(saved.layer.find_views()[1][saved.index])
        # With create_graph operations of the backward pass save it in turn, beyond the hold.
        return copy_weight(view) if torch.is_grad_enabled() else view

    def copy_outputs(self, output):
        """The output of a forward, with copies of what is a view of a weight: it is there when the weight is not."""
        leaves, spec = pytree.tree_flatten(output)
        views = [index for index, value in enumerate(leaves) if self._is_view(value)]
        if not views:
            return output
        for index in views:
            leaves[index] = leaves[index].clone()  # through which gradients go
        return pytree.tree_unflatten(leaves, spec)

    def _is_view(self, value):
        return isinstance(value, torch.Tensor) and not isinstance(value, Parameter) and self.find(value)
