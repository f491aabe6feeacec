# SPDX-License-Identifier: Apache-2.0
"""With copied weights: weights that autograd saves for the backward pass, and outputs that are views of weights. Their
buffer may have another layer's weights by the time they are used. So a saved weight is replaced by a note of its
parameter, and an output by a copy."""

import contextlib

import torch
from torch.nn import Parameter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes


def current_task():
    """The number of the backward pass that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()


def copy_weight(view):
    """A copy that selective checkpoints do not see: they count the module's operations."""
    has_modes = torch._C._len_torch_dispatch_stack() > 0
    with _disable_current_modes() if has_modes else contextlib.nullcontext(), torch.no_grad():
        return view.clone()


class _Weight:
    """Stands for a view of a parameter that an operation has saved."""

    __slots__ = ("layer", "index", "dtype", "shape", "stride", "offset", "is_conj", "is_neg", "version")

    def __init__(self, layer, index, view):
        self.layer, self.index, self.dtype = layer, index, view.dtype
        self.shape, self.stride, self.offset = view.shape, view.stride(), view.storage_offset()
        self.is_conj, self.is_neg = view.is_conj(), view.is_neg()
        self.version = layer.params[index][1]._version

    def of(self, memory):
        """The same view of memory, where the parameter's weights are now."""
        view = memory.reshape(-1)
        view = view if view.dtype == self.dtype else view.view(self.dtype)
        view = view.as_strided(self.shape, self.stride, self.offset)
        view = view.conj() if self.is_conj else view
        return torch._neg_view(view) if self.is_neg else view


class _Hooks:
    """Saved-tensor hooks while a forward of the sharded module runs. theirs: the program's hooks (pack, unpack) around
    it, or None; they get all tensors that are not weights of the module."""

    def __init__(self, saved, theirs):
        self.saved, self.theirs = saved, theirs
        self.context = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor):
        place = self.saved.find(tensor)
        if place:
            return _Weight(*place, tensor)
        if self.theirs:
            return (self.theirs[0](tensor),)
        # Without detach() the tensor would keep its own graph, and so itself, alive.
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
    """Hooks while a checkpoint recomputes. The checkpoint counts the saved tensors, so its own hooks get all of them:
    weights as copies, which torch frees after their use."""

    def pack(self, tensor):
        return self.theirs[0](copy_weight(tensor) if self.saved.find(tensor) else tensor)

    def unpack(self, packed):
        return self.theirs[1](packed)


class SavedWeights:
    """Enters the saved-tensor hooks (torch.autograd.graph.saved_tensors_hooks) at each forward. So they are above hooks
    that the program has entered since the last one."""

    def __init__(self, owner):
        self.owner, self._places, self._entered = owner, {}, []

    def register(self, layer, address, views):
        """Registers the layer's views of a buffer. They stay registered when other weights are in the buffer."""
        for index, view in enumerate(views):
            is_quantized = layer.quantized and index in layer.quantized.kinds
            self._places[view.untyped_storage()._cdata] = layer, index, None if is_quantized else address

    def find(self, tensor):
        """(layer, index) of the parameter that the tensor is a view of, or None. Raises if other weights may be there
        now."""
        place = self._places.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        if place is None:
            return None
        layer, index, address = place
        if not layer.is_at(address):
            raise RuntimeError(
                f"a view of {layer.params[index][0]!r} is used after its weights were resharded, so it may show other "
                "weights: it was kept beyond the forward pass, by the module or by a selective checkpoint that saves "
                "views of weights"
            )
        return layer, index

    # -- hooks --------------------------------------------------------------------------------------------------

    def enter(self):
        """Enters the hooks that are needed here; returns the argument of leave()."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if top and self._is_own(top) and isinstance(top[0].__self__, _RecomputeHooks) and current_task() == -1:
            self.leave(top[0].__self__)  # left by a pass that an interrupt ended
            return self.enter()
        if top and self._is_own(top):
            return None
        if top and top[0].__module__ == "torch.utils.checkpoint":
            if current_task() == -1:
                return None  # a checkpoint's forward saves nothing
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
        """Leaves all hooks, after an exception that skipped the module's forward hooks."""
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
                "writes all weights: run the backward pass before the step"
            )
        self.owner.passes.hold(saved.layer)
        view = saved.of(saved.layer.find_views()[1][saved.index])
        # With create_graph, operations of the backward pass save the view too, and use it after the hold has ended.
        return copy_weight(view) if torch.is_grad_enabled() else view

    def copy_outputs(self, output):
        """Replaces views of weights in a forward's output by copies, which outlast the hold."""
        leaves, spec = pytree.tree_flatten(output)
        views = [index for index, value in enumerate(leaves) if self._is_view(value)]
        if not views:
            return output
        for index in views:
            leaves[index] = leaves[index].clone()  # differentiable
        return pytree.tree_unflatten(leaves, spec)

    def _is_view(self, value):
        return isinstance(value, torch.Tensor) and not isinstance(value, Parameter) and self.find(value)
