# SPDX-License-Identifier: Apache-2.0
"""A group and the module whose visits it follows."""

import ctypes

import torch
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from .. import _abi
from .._library import lib
from ..constants import EVERY_RANK, ParamFlag, Phase
from ..group import Param
from .grads import DTYPES, Grads
from .parameter import ClosedParameter, HiddenParameter, refuse_use
from .saved import copy_weight, current_task
from .words import in_torch_words


def refuse_tracing():
    """torch.compile then leaves the hooks out of its graph, or, if the graph must be whole, tells this."""
    raise RuntimeError(
        "libfsdp unshards weights in hooks, which are no part of a graph: compile functions or modules inside of a layer, "
        "or without fullgraph"
    )


def refuse_replica(module):
    """A copy of a sharded module has parameters of its own, and is none of ours; a replica has ours."""
    if getattr(module, "_is_replica", False):
        raise RuntimeError("a sharded module has no replicas: run a rank for each GPU in place of DataParallel")


class NotCopied:
    """A part of a sharded module that a copy of the module has no part in."""

    def __deepcopy__(self, memo):
        return self  # hooks of a copied module find that it is not theirs

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a sharded module is not pickled: save sharded.full_state_dict(), or call sharded.save(folder) on every rank"
        )


class Visit:
    """One call of a module's forward: what its hooks undo when it ends."""

    __slots__ = ("hooks", "phase", "use")

    def __init__(self, hooks):
        self.hooks, self.phase, self.use = hooks, None, None


class Use:
    """A forward pass of a layer that a backward pass may come to. It ends when a node of autograd runs that comes after
    all nodes of the layer."""

    __slots__ = ("layer", "is_open")

    def __init__(self, layer):
        self.layer, self.is_open = layer, True
        layer.open_uses += 1

    def end(self, grads=None):
        if self.is_open:
            self.is_open = False
            self.layer.open_uses -= 1
        if self.layer.open_uses == 0:
            self.layer.owner.passes.end_uses(self.layer)


class Layer(NotCopied):
    """params: [(name, parameter)], in the order of the group."""

    def __init__(self, owner, number, name, module, params):
        self.owner, self.number, self.name, self.module, self.params = owner, number, name, module, params
        self.is_root = module is owner.module
        self.names = {param: index for index, (_, param) in enumerate(params)}
        self.can_train = [param.requires_grad for _, param in params]
        self.trains = list(self.can_train)
        # holds: of the library; shows: those of them for which the parameters are views of the weights
        self.visits, self.holds, self.shows, self.open_uses = [], 0, 0, 0
        self.address, self.has_copies = None, False
        self.was_used = False  # since the last step
        self.grads = Grads(self)

    def declare(self, no_decay, missing_grad):
        declared = []
        for name, param in self.params:
            flags = 0 if param.requires_grad else ParamFlag.FROZEN
            flags |= ParamFlag.NO_DECAY if no_decay(name, param) else 0
            declared.append(Param(name, param.shape, DTYPES[param.dtype], flags=flags, missing_grad=missing_grad))
        self.group = self.owner.model.create_group(self.name, declared)
        self._found = (_abi.fsdp_tensor * len(declared))()
        self._views = {}

    def load(self):
        for index, (_, param) in enumerate(self.params):
            self.group.load_param(index, param.detach().contiguous(), EVERY_RANK)

    # -- weights in the module ----------------------------------------------------------------------------------

    def attach(self):
        """From here on the parameters are the library's memory."""
        self.hold(Phase.EVAL)
        self.show()
        self.versions = [param._version for _, param in self.params]
        self.pointers = [param.data_ptr() for _, param in self.params]
        self.give_back(Phase.EVAL)
        for index, (_, param) in enumerate(self.params):
            param.fsdp_layer = self
            if self.can_train[index]:
                self.grads.watch(index, param)

    def detach(self):
        """The model is closed. Weights that came and went are gone, and the use of one of them says so."""
        for name, param in self.params:
            if type(param) is HiddenParameter:
                param.__class__ = Parameter
            param.grad = None
            del param.fsdp_layer
            if self.owner.moves:
                ClosedParameter.close(param, name)

    def find_views(self):
        """The tensors of the full weights where they lie now."""
        size = ctypes.sizeof(_abi.fsdp_tensor)
        self.group.check(lib.get_params(self.group.handle, Phase.FORWARD, self._found, len(self._found), size))
        address = self._found[0].data
        if address not in self._views:
            views = self.group.tensors(Phase.FORWARD).values()
            with torch.inference_mode(False):  # they outlast it, if it is on
                self._views[address] = [torch.from_dlpack(view) for view in views]
            self.owner.saved.know(self, address, self._views[address])
        return address, self._views[address]

    def is_at(self, address):
        """Are the weights in that buffer now?"""
        return self.address == address or (self.holds > 0 and self.find_views()[0] == address)

    def show(self):
        """Where weights come and go the parameters become views of the buffer that they are in now."""
        self.address, views = self.find_views()
        for (_, param), view in zip(self.params, views):
            if type(param) is HiddenParameter:
                param.__class__ = Parameter
            if param.data_ptr() != view.data_ptr():
                param.data = view

    def show_copies(self):
        """What is saved of them is used when the buffer may have the weights of others."""
        for (_, param), view in zip(self.params, self.find_views()[1]):
            param.__class__ = Parameter
            param.data = copy_weight(view)
        self.has_copies = True

    @property
    def is_shown(self):
        return self.shows > 0 or self.has_copies

    def hide(self):
        self.address, self.has_copies = None, False
        for _, param in self.params:
            if type(param) is Parameter:
                param.__class__ = HiddenParameter

    def reach(self, param, function):
        """A hidden parameter is used. Inside a pass its layer is unsharded, until the pass ends."""
        if not self.owner.reach(self):
            refuse_use(self.params[self.names[param]][0], function)

    def mark_written(self):
        """A step has written the weights: graphs that saved the old ones must not be used."""
        torch.autograd.graph.increment_version([param for _, param in self.params])
        self.versions = [version + 1 for version in self.versions]

    def lend(self, param, tensor):
        """Until take_back the parameter is a tensor of torch, which may be written into."""
        if type(param) is HiddenParameter:
            param.__class__ = Parameter
        param.data = tensor

    def take_back(self, index):
        param = self.params[index][1]
        param.data = next(iter(self._views.values()))[index]
        self.versions[index] = param._version
        if self.owner.moves and not self.is_shown:
            param.__class__ = HiddenParameter

    # -- holds --------------------------------------------------------------------------------------------------

    def hold(self, phase, shows=True):
        status = lib.unshard(self.group.handle, phase, 0, self.owner.stream())
        if status:
            self.group.check(status)
        self.holds += 1
        self.shows += shows
        if shows and self.shows == 1 and self.owner.moves:
            self.show()

    def give_back(self, phase, shows=True):
        self.holds -= 1
        self.shows -= shows
        if self.shows == 0 and self.owner.moves and (shows or self.has_copies):
            self.hide()
        status = lib.reshard(self.group.handle, phase, 0, self.owner.stream())
        if status:
            self.group.check(status)

    def prefetch(self, phase):
        if self.holds == 0:
            self.group.check(lib.prefetch(self.group.handle, phase, 0, self.owner.stream()))

    # -- visits -------------------------------------------------------------------------------------------------

    def hook(self):
        self.owner.handles += [
            self.module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
            self.module.register_forward_hook(self.after_forward, always_call=True),
        ]

    @in_torch_words
    def before_forward(self, module, args, kwargs):
        if torch.compiler.is_compiling():
            refuse_tracing()
        if module is not self.module:
            return refuse_replica(module)
        visit = Visit(self.owner.enter())
        self.visits.append(visit)  # after_forward is called whatever fails from here on
        self.owner.begin_forward()
        self.was_used = True
        grads, in_backward = torch.is_grad_enabled(), current_task() != -1
        phase = Phase.RECOMPUTE if in_backward else Phase.FORWARD if grads else Phase.EVAL
        self.owner.passes.hold_for(self, phase)
        visit.phase = phase
        self.owner.writes.check(self)
        if grads and not in_backward:
            visit.use = self.begin_use(args, kwargs)
        self.owner.prefetch_after(self, phase)

    def begin_use(self, args, kwargs):
        """The use ends once autograd comes to what gave the layer its inputs."""
        before = {
            value.grad_fn
            for value in pytree.tree_leaves((args, kwargs))
            if isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None
        }
        use = Use(self)
        for node in before:
            node.register_prehook(use.end)
        return use

    @in_torch_words
    def after_forward(self, module, inputs, output):
        if module is not self.module or not self.visits:
            return None
        visit = self.visits.pop()
        try:
            shown = self.owner.saved.copy_outputs(output) if self.owner.moves else output
            if visit.use:
                self.watch_outputs(shown)
            return None if shown is output else shown
        finally:
            if visit.phase is not None:
                self.give_back(visit.phase)
            self.owner.leave(visit.hooks)

    def watch_outputs(self, output):
        """When autograd comes to them, the layer's weights are soon needed."""
        for value in pytree.tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None:
                value.grad_fn.register_prehook(self._before_backward)

    @in_torch_words
    def _before_backward(self, grads):
        self.owner.passes.begin()
        if self.owner.moves:
            self.owner.passes.hold(self)
            self.owner.prefetch_before(self)

    def forget(self):
        """The library has forgotten the step, and with it all holds."""
        if self.is_shown and self.owner.moves:
            self.hide()
        self.holds, self.shows, self.visits = 0, 0, []
