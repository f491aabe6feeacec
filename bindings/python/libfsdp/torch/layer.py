# SPDX-License-Identifier: Apache-2.0
"""Shards one layer: a group of the library, and the hooks on its module that unshard and reshard it."""

import ctypes
import dataclasses

import torch
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from .. import _abi
from .._library import lib
from ..constants import EVERY_RANK, Dtype, GroupFlag, ParamFlag, Phase, Quantization
from ..group import Param
from .casts import cast, in_library_dtypes
from .grads import DTYPES, Grads
from .quantized import QuantizedWeights
from .parameter import ClosedParameter, HiddenParameter, refuse_use
from .saved import copy_weight, current_task
from .words import in_torch_words


def refuse_tracing():
    """Makes torch.compile leave the hooks out of its graph. With fullgraph, and in an export, it is an error. Other
    threads may compile meanwhile, and torch.compiler.is_compiling() would be True for them, too."""
    if torch.compiler.is_dynamo_compiling() or _is_exporting():
        raise RuntimeError(
            "libfsdp unshards weights in hooks, which cannot be part of a compiled graph: compile functions or modules "
            "inside of a layer, or without fullgraph, and export a plain module with sharded.full_state_dict()"
        )


_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


def refuse_replica(module):
    """Raises for a replica, which uses the sharded module's parameters. A copy has its own parameters and may run."""
    if getattr(module, "_is_replica", False):
        raise RuntimeError("a sharded module has no replicas: run a rank for each GPU in place of DataParallel")


class NotCopied:
    """Base of the objects in a sharded module's hooks: a copy of the module shares them instead of copying them."""

    def __deepcopy__(self, memo):
        return self  # the hooks see that they are called by a copy, and do nothing

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a sharded module cannot be pickled: save sharded.full_state_dict(), or call sharded.save(folder) on every "
            "rank"
        )


class Visit:
    """One call of a module's forward, with what its hooks must undo at the end."""

    __slots__ = ("hooks", "phase", "use")

    def __init__(self, hooks):
        self.hooks, self.phase, self.use = hooks, None, None


class Use:
    """One forward of a layer that a backward pass may go through. The use ends when autograd runs a node that produced
    an input of the layer: all nodes of the layer have run by then."""

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


@dataclasses.dataclass
class Rules:
    """The callables that shard() was given."""

    no_decay: object
    missing_grad: object
    row_dimensions: object
    boxes: object
    group_options: object
    param_options: object
    casts: object

    def fields(self, name, param):
        """The fields of a parameter's fsdp_param, with a dtype of torch."""
        options = {"dtype": None, **(self.param_options(name, param) or {})}
        flags = 0 if param.requires_grad else ParamFlag.FROZEN
        flags |= ParamFlag.NO_DECAY if self.no_decay(name, param) else 0
        flags |= options.pop("flags", 0)
        shape, offset = self.boxes(name, param) or (None, None)
        return {
            "flags": flags,
            "missing_grad": self.missing_grad,
            "row_dimensions": self.row_dimensions(name, param),
            "global_shape": shape,
            "global_offset": offset,
            **options,
        }

    def options_of(self, name, layer):
        """The fields of a group's fsdp_group_options."""
        return in_library_dtypes(self.group_options(name, layer) or {})


class Layer(NotCopied):
    """One group, its modules, and its parameters: [(name, parameter)] in the order of the group."""

    def __init__(self, owner, number, name, modules, params):
        self.owner, self.number, self.name, self.modules, self.params = owner, number, name, modules, params
        self.is_root = owner.module in modules
        self.unvisited = None  # of a group of several modules: those that this forward has yet to run
        self.names = {param: index for index, (_, param) in enumerate(params)}
        self.can_train = [param.requires_grad for _, param in params]
        self.trains = list(self.can_train)
        # holds: holds on the library's group; shows: how many of them need the module's parameters to be the weights
        self.visits, self.holds, self.shows, self.open_uses = [], 0, 0, 0
        self.phases = []  # of the holds
        self.address, self.has_copies = None, False
        # given_dtypes: dtypes that the parameters had in shard(); dtypes: those of their compute weights
        self.given_dtypes, self.dtypes = [param.dtype for _, param in params], []
        self.was_used = False  # since the last step
        self.grads = Grads(self)

    def declare(self, rules):
        declared, kinds, steps = [], [], self.owner.steps
        for name, param in self.params:
            fields = {**rules.fields(name, param), **(steps.fields(name, param) if steps else {})}
            dtype = rules.casts.dtype_of(name, param, fields.pop("dtype"))
            self.dtypes.append(dtype)
            kinds.append(fields.get("quantization"))
            declared.append(Param(name, param.shape, DTYPES[dtype], **fields))
        self.input_dtype = rules.casts.input_dtype(self.params, self.dtypes)
        options = rules.options_of(self.name, self.modules[0] if len(self.modules) == 1 else list(self.modules))
        self.has_mesh = options.get("mesh") is not None
        self.mesh = options.get("mesh") or self.owner.mesh
        if steps:
            steps.check_storage(options, f"group {self.name!r}", declared)
        flags = options.pop("flags", 0)
        self.is_resident = bool(flags & GroupFlag.RESIDENT)  # the library keeps no group by itself in any order
        options["flags"] = flags & ~GroupFlag.RESIDENT
        self.group = self.owner.model.create_group(self.name, declared, **options)
        kinds = {index: Quantization(kind) for index, kind in enumerate(kinds) if kind}
        self.quantized = QuantizedWeights(self, kinds) if kinds else None
        self._found = (_abi.fsdp_tensor * len(declared))()
        self._views = {}

    def load(self):
        """Loads the module's values."""
        for index, (_, param) in enumerate(self.params):
            self.group.load_param(index, param.detach().contiguous(), EVERY_RANK)

    # -- weights in the module ----------------------------------------------------------------------------------

    def attach(self):
        """Makes the parameters views of the library's memory."""
        self.hold(Phase.EVAL)
        self.show()
        self.versions = [param._version for _, param in self.params]
        self.pointers = [param.data_ptr() for _, param in self.params]
        self.give_back(Phase.EVAL)
        self.grads.make_markers()
        for index, (_, param) in enumerate(self.params):
            param.fsdp_layer = self
            if self.can_train[index]:
                self.grads.watch(index, param)

    def detach(self):
        """Gives the module plain parameters back when the model is closed. Copied weights are gone: any use raises an
        error that says so."""
        for name, param in self.params:
            if type(param) is HiddenParameter:
                param.__class__ = Parameter
            param.grad = None
            del param.fsdp_layer
            if self.owner.hides_weights:
                ClosedParameter.close(param, name)

    def find_views(self):
        """The address of the full weights now, and a tensor for each of them."""
        size, phase = ctypes.sizeof(_abi.fsdp_tensor), self.phases[-1]
        self.group.check(lib.get_params(self.group.handle, phase, self._found, len(self._found), size))
        if self.quantized:
            self.quantized.fill(phase)
        address = next((found.data for found in self._found if found.data), None)  # None: all are quantized
        if address not in self._views:
            views = iter(self.group.tensors(phase).values())
            made = self.quantized.tensors if self.quantized else {}
            with torch.inference_mode(False):  # the tensors may outlast an inference mode
                indices = range(len(self.params))
                self._views[address] = [made[i] if i in made else torch.from_dlpack(next(views)) for i in indices]
            self.owner.saved.register(self, address, self._views[address])
        return address, self._views[address]

    def is_at(self, address):
        """True if the weights are in the buffer at that address now; None is torch's memory of quantized weights."""
        if address is None:
            return self.holds > 0
        return self.address == address or (self.holds > 0 and self.find_views()[0] == address)

    def show(self):
        """Makes the parameters views of the weights where they are now."""
        self.address, views = self.find_views()
        for (_, param), view in zip(self.params, views):
            if type(param) is HiddenParameter:
                param.__class__ = Parameter
            if param.data_ptr() != view.data_ptr():
                param.data = view

    def show_copies(self):
        """Makes the parameters copies of the weights: saved tensors may outlast the weights in the buffer."""
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
        """Called when a hidden parameter is used. Inside a pass this unshards the layer until the pass ends; elsewhere
        it raises."""
        if not self.owner.reach(self):
            refuse_use(self.params[self.names[param]][0], function)

    def is_rounded(self, index):
        """True if the compute weights are not in the dtype that the parameter had in shard(), or are quantized."""
        is_quantized = self.quantized is not None and index in self.quantized.kinds
        return is_quantized or self.dtypes[index] != self.given_dtypes[index]

    def read_main(self, index):
        """The whole main weight in the dtype that the parameter had in shard(). Collective."""
        param, is_bytes = self.params[index][1], self.dtypes[index] == torch.uint8
        found = torch.from_numpy(self.group.read_param(index, Dtype.UINT8 if is_bytes else Dtype.FLOAT32))
        return found.to(param.device, self.given_dtypes[index])

    def rows_shape(self, index):
        """The shape of this rank's rows of a parameter."""
        param = self.group.params[index]
        return (self.group.chunk(index).row_count, *param.shape[max(param.fields["row_dimensions"], 1) :])

    def read_rows(self, index):
        """This rank's rows of the main weight, in fp32 on the host. Collective."""
        is_bytes, chunk = self.dtypes[index] == torch.uint8, self.group.chunk(index)
        whole = torch.from_numpy(self.group.read_param(index, Dtype.UINT8 if is_bytes else Dtype.FLOAT32))
        own = whole.reshape(-1)[chunk.element_offset : chunk.element_offset + chunk.element_count]
        return own.reshape(self.rows_shape(index)).clone()

    def load_rows(self, index, values):
        chunk = self.group.chunk(index)
        if chunk.element_count:
            self.group.load_chunk(index, values.contiguous(), chunk.row_offset, chunk.row_count)

    def mark_written(self):
        """Called after a step has written the weights. Increments the versions, so that autograd refuses graphs that
        saved the old weights."""
        torch.autograd.graph.increment_version([param for _, param in self.params])
        self.versions = [version + 1 for version in self.versions]

    def lend(self, param, tensor):
        """Makes the parameter the given tensor, which may be written, until take_back()."""
        if type(param) is HiddenParameter:
            param.__class__ = Parameter
        param.data = tensor

    def take_back(self, index):
        param = self.params[index][1]
        param.data = next(iter(self._views.values()))[index]
        self.versions[index] = param._version
        if self.owner.hides_weights and not self.is_shown:
            param.__class__ = HiddenParameter

    # -- holds --------------------------------------------------------------------------------------------------

    def hold(self, phase, shows=True):
        status = lib.unshard(self.group.handle, phase, 0, self.owner.stream())
        if status:
            self.group.check(status)
        self.holds += 1
        self.phases.append(phase)
        self.shows += shows
        if shows and self.shows == 1 and self.owner.hides_weights:
            self.show()

    def give_back(self, phase, shows=True):
        self.holds -= 1
        self.phases.remove(phase)
        self.shows -= shows
        if self.shows == 0 and self.owner.hides_weights and (shows or self.has_copies):
            self.hide()
        if self.holds == 0 and self.quantized:
            self.quantized.empty()
        status = lib.reshard(self.group.handle, phase, 0, self.owner.stream())
        if status:
            self.group.check(status)

    def prefetch(self, phase):
        if self.holds == 0:
            self.group.check(lib.prefetch(self.group.handle, phase, 0, self.owner.stream()))

    # -- visits -------------------------------------------------------------------------------------------------

    def hook(self):
        for module in self.modules:
            self.owner.handles += [
                module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.after_forward, always_call=True),
            ]

    @in_torch_words
    def before_forward(self, module, args, kwargs):
        refuse_tracing()
        if module not in self.modules:
            return refuse_replica(module)
        visit = Visit(self.owner.enter())
        self.visits.append(visit)  # torch calls after_forward even if something fails from here on
        self.owner.begin_forward()
        self.was_used = True
        grads, in_backward = torch.is_grad_enabled(), current_task() != -1
        phase = Phase.RECOMPUTE if in_backward else Phase.FORWARD if grads else Phase.EVAL
        self.owner.passes.hold_for(self, phase)
        visit.phase = phase
        self.begin_span()
        if phase == Phase.FORWARD:
            self.owner.passes.keep_resident(self)
        self.owner.writes.check(self)
        if grads and not in_backward:
            visit.use = self.begin_use(args, kwargs)
        self.owner.prefetch_after(self, phase)
        return cast((args, kwargs), self.input_dtype)

    def begin_use(self, args, kwargs):
        """Starts a use, which ends when autograd runs a node that produced an input of the layer."""
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
        if module not in self.modules or not self.visits:
            return None
        visit = self.visits.pop()
        try:
            shown = self.owner.saved.copy_outputs(output) if self.owner.hides_weights else output
            if visit.use:
                self.watch_outputs(shown)
            return None if shown is output else shown
        finally:
            if visit.phase is not None:
                self.give_back(visit.phase)
            self.end_span(module)
            self.owner.leave(visit.hooks)

    def begin_span(self):
        """The first of several modules: holds the group until all of them have run, or the outermost forward ends."""
        if len(self.modules) > 1 and not self.owner.is_held_in_scope(self):
            self.unvisited = set(self.modules)
            self.owner.hold_in_scope(self)

    def end_span(self, module):
        if self.unvisited is None:
            return
        self.unvisited.discard(module)
        if not self.unvisited:
            self.unvisited = None
            self.owner.release_in_scope(self)

    def watch_outputs(self, output):
        """Holds the weights when autograd comes to the layer's outputs: the layer's backward needs them next."""
        for value in pytree.tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is not None:
                value.grad_fn.register_prehook(self._before_backward)

    @in_torch_words
    def _before_backward(self, grads):
        self.owner.passes.begin()
        if self.owner.hides_weights:
            self.owner.passes.hold(self)
            self.owner.prefetch_before(self)

    def forget(self):
        """Called after the library has discarded the step, and with it all holds."""
        if self.is_shown and self.owner.hides_weights:
            self.hide()
        if self.quantized:
            self.quantized.empty()
        self.holds, self.shows, self.phases, self.visits, self.unvisited = 0, 0, [], [], None
