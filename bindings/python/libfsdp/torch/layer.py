# SPDX-License-Identifier: Apache-2.0
"""A group and the module whose visits it follows."""

import ctypes

import torch
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from .. import _abi
from .._library import lib
from ..constants import EVERY_RANK, Dtype, ParamFlag, Phase
from ..group import Param
from .parameter import HandedGrad, HiddenParameter, refuse_use
from .passes import current_task

DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float16: Dtype.FLOAT16,
    torch.uint8: Dtype.UINT8,  # of frozen parameters: codes of the caller's own
}


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

    __slots__ = ("entered", "phase", "use")

    def __init__(self):
        self.entered, self.phase, self.use = False, None, None


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
        self.visits, self.holds, self.open_uses, self.address = [], 0, 0, None
        # waiting: gradients in torch's memory; given: what the contribution has; arrived: what this pass has brought;
        # late: what came when the contribution of its pass was complete
        self.waiting, self.given, self.arrived, self.late = {}, set(), set(), {}
        self.is_over = self.is_complete = False
        self.was_used = False  # since the last step
        self.markers = [HandedGrad.of(param, name) if can else None for (name, param), can in zip(params, self.can_train)]

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
                self.owner.handles += [
                    param.register_hook(lambda grad, param=param: self._clear_marker(param)),
                    param.register_post_accumulate_grad_hook(lambda param, index=index: self.receive(index, param)),
                ]

    def detach(self):
        """The model is closed. Weights that came and went are gone: what the parameters show says so."""
        for _, param in self.params:
            if type(param) is HiddenParameter:
                param.__class__ = Parameter
            if self.owner.moves and param.dtype.is_floating_point:
                param.data = torch.full(param.shape, float("nan"), dtype=param.dtype, device=param.device)
            param.grad = None
            del param.fsdp_layer

    def find_views(self):
        """The tensors of the full weights where they lie now."""
        size = ctypes.sizeof(_abi.fsdp_tensor)
        self.group.check(lib.get_params(self.group.handle, Phase.FORWARD, self._found, len(self._found), size))
        address = self._found[0].data
        if address not in self._views:
            views = self.group.tensors(Phase.FORWARD).values()
            self._views[address] = [torch.from_dlpack(view) for view in views]
        return address, self._views[address]

    def show(self):
        """Where weights come and go the parameters become views of the buffer that they are in now."""
        address, views = self.find_views()
        if self.address is not None and address != self.address:
            self.owner.saved.forget(self._views[self.address])
        self.address = address
        for (_, param), view in zip(self.params, views):
            if type(param) is HiddenParameter:
                param.__class__ = Parameter
            if param.data_ptr() != view.data_ptr():
                param.data = view
        if self.owner.moves:
            self.owner.saved.know(self, views)

    def hide(self):
        self.owner.saved.forget(self._views[self.address])
        self.address = None
        for _, param in self.params:
            if type(param) is Parameter:
                param.__class__ = HiddenParameter

    def reach(self, param, function):
        """A hidden parameter is used. Inside a pass its layer is unsharded, until the pass ends."""
        if not self.owner.reach(self):
            refuse_use(self.params[self.names[param]][0], function)

    def check_untouched(self):
        """What was written into the module's parameters behind the library's back is told, and not lost in silence."""
        for index, (name, param) in enumerate(self.params):
            for part, attribute in self.owner.places[param]:
                if part._parameters.get(attribute) is not param:
                    self._refuse(name, "is not in the module any more", "put the values of what is there into the model")
            if param._version != self.versions[index]:
                self._refuse(name, "was written into in place", "put the numbers that are there now into the model")
            if not self.owner.moves and param.data_ptr() != self.pointers[index]:
                self._refuse(
                    name,
                    f"has other memory ({tuple(param.shape)}, {param.dtype}): module.to(), .data = or the like replaced it",
                    "put its numbers into the model, in the dtype that shard() saw",
                )

    def written_values(self, index):
        """What the module has in the parameter's place, if that was written into or replaced; else None."""
        param = self.params[index][1]
        for part, attribute in self.owner.places[param]:
            if (found := part._parameters.get(attribute)) is not param and found is not None:
                return found
        is_other = not self.owner.moves and param.data_ptr() != self.pointers[index]
        return param if is_other or param._version != self.versions[index] else None

    def _refuse(self, name, what, does):
        raise RuntimeError(
            f"parameter {name!r} {what}, but its weights are libfsdp's: sharded.take_writes() on every rank would {does}, "
            "sharded.drop_writes() shows the weights as they were. Convert a module before shard(); "
            "module.load_state_dict() loads after it"
        )

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
        if self.owner.moves and not self.holds:
            param.__class__ = HiddenParameter

    # -- holds --------------------------------------------------------------------------------------------------

    def hold(self, phase):
        status = lib.unshard(self.group.handle, phase, 0, self.owner.stream())
        if status:
            self.group.check(status)
        self.holds += 1
        if self.holds == 1 and self.owner.moves:
            self.show()

    def give_back(self, phase):
        self.holds -= 1
        if self.holds == 0 and self.owner.moves:
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

    def before_forward(self, module, args, kwargs):
        if torch.compiler.is_compiling():
            refuse_tracing()
        if module is not self.module:
            return refuse_replica(module)
        visit = Visit()
        self.visits.append(visit)
        visit.entered = True  # after_forward is called whatever fails from here on
        self.owner.enter(module)
        self.was_used = True
        grads, in_backward = torch.is_grad_enabled(), current_task() != -1
        if in_backward and self.owner.moves:  # what is saved now is used when this forward has ended
            self.owner.passes.hold(self)
        phase = Phase.RECOMPUTE if in_backward else Phase.FORWARD if grads else Phase.EVAL
        self.owner.hold_in_forward(self, phase)
        visit.phase = phase
        self.check_untouched()
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

    def after_forward(self, module, inputs, output):
        if module is not self.module or not self.visits:
            return
        visit = self.visits.pop()
        try:
            if visit.use:
                self.watch_outputs(output)
            if visit.phase is not None:
                self.give_back(visit.phase)
        finally:
            if visit.entered:
                self.owner.leave()

    def watch_outputs(self, output):
        """When autograd comes to them, the layer's weights are soon needed."""
        for value in pytree.tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None:
                value.grad_fn.register_prehook(self._before_backward)

    def _before_backward(self, grads):
        self.owner.passes.begin()
        if self.owner.moves:
            self.owner.passes.hold(self)
            self.owner.prefetch_before(self)

    # -- gradients ----------------------------------------------------------------------------------------------

    @property
    def trained(self):
        return [index for index, trains in enumerate(self.trains) if trains]

    @property
    def is_ready(self):
        """Everything that this backward pass gives the layer is here."""
        return self.is_over or len(self.given) == sum(self.trains)

    def _clear_marker(self, param):
        if type(param.grad) is HandedGrad:
            self.owner.passes.begin()
            param.grad = None

    def receive(self, index, param):
        """autograd has added up a gradient."""
        self.owner.passes.begin()
        grad, param.grad = param.grad, None
        if not self.trains[index]:
            return
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        self.arrived.add(index)
        where = self.late if self.is_complete else self.waiting
        where[index] = where[index] + grad if index in where else grad
        if not self.is_complete:
            self.given.add(index)
            self.owner.passes.advance(self)

    def put_waiting(self, flags):
        """Hands over what waits; False if the library has no buffer now."""
        for index in list(self.waiting):
            grad = self.waiting[index].contiguous()
            status = lib.put_grad(
                self.group.handle, index, grad.data_ptr(), DTYPES[grad.dtype], grad.numel(), flags, self.owner.stream()
            )
            if status == _abi.FSDP_BUSY and flags:
                return False
            self.group.check(status)
            del self.waiting[index]
        return True

    def reduce(self):
        """What autograd gave nothing for has no gradient."""
        for index in self.trained:
            if index not in self.given:
                self.group.put_grad(index, None, self.owner.stream())
        self.group.reduce_grad(False, self.owner.stream())

    def mark_grads(self):
        with torch._C.DisableTorchFunctionSubclass():
            for index in self.arrived:
                self.params[index][1].grad = self.markers[index]

    def take_late(self):
        """What came late is a contribution of its own."""
        self.waiting, self.late = self.late, {}
        self.given, self.is_complete = set(self.waiting), True

    def start_pass(self):
        self.waiting, self.given, self.arrived = {}, set(), set()
        self.is_over = self.is_complete = False

    def forget(self):
        """The library has forgotten the step, and with it all holds."""
        self.start_pass()
        self.late = {}
        if self.holds and self.owner.moves:
            self.hide()
        self.holds = 0
