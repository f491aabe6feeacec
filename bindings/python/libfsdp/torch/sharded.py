# SPDX-License-Identifier: Apache-2.0
"""A sharded module: the scope of its forward passes, and its steps."""

import contextlib
import os
import sys
import threading

import torch
from torch.utils import _pytree as pytree

from ..constants import Phase, Role, ScheduleKind, UnshardMode, ValueOp, ViewKind
from ..errors import InvalidState
from . import state
from .division import divide
from .layer import Layer, NotCopied, refuse_replica, refuse_tracing
from .parameter import HandedGrad
from .passes import Passes, current_task
from .saved import SavedWeights


class Sharded(NotCopied):
    """What shard() returns: model is the libfsdp.Model, module the module."""

    def __init__(self, module, context, layers, no_decay, missing_grad, held_groups, options):
        self.module, self.context = module, context
        self._thread, self._depth, self._scope_holds, self._is_finished = None, 0, {}, False
        self._device = next(module.parameters()).device
        self._on_host = self._device.type != "cuda"
        self._mesh = options.get("mesh")
        self._prefetches = options.get("prefetch_depth", 1) > 0
        mapped = options.get("unshard_mode", UnshardMode.MAPPED if self._on_host else UnshardMode.COPIED)
        if self._on_host:
            options.setdefault("view_kind", ViewKind.PRIVATE)
        self.model = context.create_model(**options)
        self.handles = []  # of hooks
        self.layers = [Layer(self, number, *found) for number, found in enumerate(divide(module, layers))]
        self.root = next((layer for layer in self.layers if layer.is_root), None)
        for layer in self.layers:
            layer.declare(no_decay, missing_grad)
        self.model.set_schedule(ScheduleKind.ANY, held_groups=held_groups)
        self.model.seal()
        is_debug = os.environ.get("FSDP_DEBUG", "0") not in ("", "0")
        # Do weights come and go, or are they always there, at one address?
        self.moves = bool(self.model.role_bytes(Role.GATHER)) or (is_debug and mapped == UnshardMode.MAPPED)
        self.places = self._find_places()
        self.saved, self.passes = SavedWeights(self), Passes(self, self.layers)
        self._next, self._before, self._last = {}, {}, None
        for layer in self.layers:
            layer.load()
        self.model.publish_weights(self.stream())
        for layer in self.layers:
            layer.attach()
        self._hook()

    def _find_places(self):
        """{parameter: [(module, attribute)]}"""
        places = {}
        for part in self.module.modules():
            for attribute, param in part._parameters.items():
                if param is not None:
                    places.setdefault(param, []).append((part, attribute))
        return places

    def _hook(self):
        owners = {part for _, param in self.root.params for part, _ in self.places[param]} if self.root else set()
        self._root_parts = owners | {self.module}
        for part in self._root_parts:
            self.handles += [
                part.register_forward_pre_hook(self._before_root, prepend=True),
                part.register_forward_hook(self._after_root, always_call=True),
            ]
        for layer in self.layers:
            if not layer.is_root:
                layer.hook()
        dicts = state.StateDicts(self)
        dicts.hook(self.module, [self.root] if self.root else [])
        for layer in self.layers:
            if not layer.is_root and layer.module is not self.module:
                dicts.hook(layer.module, [layer])

    def stream(self):
        """The stream that torch works on now; None on the host."""
        return None if self._on_host else torch.cuda.current_stream(self._device).cuda_stream

    # -- forward ------------------------------------------------------------------------------------------------

    def enter(self, module):
        """A forward of the module, or of a part of it, begins."""
        self._depth += 1
        if self._depth > 1:
            return
        if current_task() == -1:
            self._require_usual()
            self.passes.note_forward()
            self._follow_requires_grad()
            self._last = None
        if self.moves:
            self.saved.enter()

    def _require_usual(self):
        if self._is_finished:
            raise RuntimeError(
                "sharded.finish() has ended the step's gradients: call sharded.step() or sharded.discard() before the next "
                "forward pass"
            )
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled and compiled.compiled_autograd_enabled:
            raise RuntimeError("compiled autograd does not run the hooks of a sharded module: train it in eager mode")
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        if self._thread != thread:
            raise RuntimeError("a sharded module runs in the thread that ran it first: libfsdp has one thread a rank")

    def leave(self):
        self._depth -= 1
        if self._depth:
            return
        self.saved.leave()
        holds, self._scope_holds = self._scope_holds, {}
        for layer, phase in holds.items():
            layer.give_back(phase)

    def hold_in_forward(self, layer, phase):
        try:
            layer.hold(phase)
        except InvalidState as error:
            if not self.moves or "held_groups" not in error.message:
                raise
            # What backward passes keep can come back later.
            while self.passes.held:
                self.passes.give_back(next(iter(self.passes.held)))
                with contextlib.suppress(InvalidState):
                    return layer.hold(phase)
            holders = error.message.partition("held, by ")[2].partition("; return")[0]
            error.message = (
                f"the weights of {layer.name!r} find no buffer: all are in use at once, by {holders}; give shard() a larger "
                "held_groups"
            )
            raise

    def hold_in_scope(self, layer):
        """Until the outermost forward ends."""
        if layer in self._scope_holds:
            return
        layer.was_used = True
        in_backward = current_task() != -1
        phase = Phase.RECOMPUTE if in_backward else Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL
        if in_backward and self.moves:
            self.passes.hold(layer)
        self.hold_in_forward(layer, phase)
        self._scope_holds[layer] = phase
        layer.check_untouched()

    def reach(self, layer):
        """Weights are used outside of their layer's forward. Unshards them if there is a pass whose end takes them."""
        if current_task() != -1:
            self.passes.hold(layer)
        elif self._depth:
            self.hold_in_scope(layer)
        else:
            return False
        return True

    def _before_root(self, part, args):
        if torch.compiler.is_compiling():
            refuse_tracing()
        if part not in self._root_parts:
            return refuse_replica(part)
        part.__dict__.setdefault("_fsdp_visits", []).append(True)  # the hook behind is called whatever fails here
        self.enter(part)
        if self.root:
            self.hold_in_scope(self.root)

    def _after_root(self, part, args, output):
        if part not in self._root_parts or not part.__dict__.get("_fsdp_visits"):
            return
        part._fsdp_visits.pop()
        if current_task() == -1 and torch.is_grad_enabled() and part is self.module:
            for value in pytree.tree_leaves(output):
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    value.grad_fn.register_prehook(lambda grads: self.passes.begin())
        self.leave()

    # -- gathers ahead ------------------------------------------------------------------------------------------

    def prefetch_after(self, layer, phase):
        """The layers come in the order in which they came last."""
        if not self.moves or phase == Phase.RECOMPUTE:
            return
        if self._last is not None and self._last is not layer:
            self._next[self._last], self._before[layer] = layer, self._last
        self._last = layer
        if self._prefetches and layer in self._next:
            self._next[layer].prefetch(phase)

    def prefetch_before(self, layer):
        if self._prefetches and layer in self._before:
            self._before[layer].prefetch(Phase.BACKWARD)

    # -- what users do to parameters ----------------------------------------------------------------------------

    def _follow_requires_grad(self):
        with torch._C.DisableTorchFunctionSubclass():  # quick, for parameters that are hidden
            changed = [
                (layer, index, *layer.params[index])
                for layer in self.layers
                for index, trains in enumerate(layer.trains)
                if layer.params[index][1].requires_grad != trains
            ]
        for layer, index, name, param in changed:
            if param.requires_grad and not layer.can_train[index]:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the module was sharded, and has no optimizer state: shard it "
                    "with requires_grad=True, and freeze it afterwards"
                )
            if self.passes.reduced_passes:
                raise RuntimeError(
                    f"requires_grad of {name!r} has changed between a backward pass and its step: change it after "
                    "sharded.step()"
                )
            layer.group.set_param_trainable(index, param.requires_grad)
            layer.trains[index] = param.requires_grad

    def check_grads_kept(self):
        """zero_grad() after a backward pass would forget gradients that are in the sums of all ranks."""
        if not self.passes.reduced_passes or self._has_markers():
            return
        raise RuntimeError(
            "gradients were cleared (zero_grad) after a backward pass, but libfsdp has them already: call "
            "sharded.discard() on every rank in place of zero_grad() to forget a step; after sharded.step() there is "
            "nothing to clear"
        )

    def _has_markers(self):
        with torch._C.DisableTorchFunctionSubclass():
            return any(type(param.grad) is HandedGrad for layer in self.layers for _, param in layer.params)

    def _clear_markers(self):
        with torch._C.DisableTorchFunctionSubclass():
            for layer in self.layers:
                for _, param in layer.params:
                    if type(param.grad) is HandedGrad:
                        param.grad = None

    def take_writes(self):
        """What was written into the module's parameters on this rank becomes the model's weights. Collective: every rank
        must have written the same. Between steps."""
        if self.moves:
            raise RuntimeError("take_writes: copied weights are gone; use module.load_state_dict()")
        written = {
            (layer, index): found.detach().clone()
            for layer in self.layers
            for index in range(len(layer.params))
            if (found := layer.written_values(index)) is not None
        }
        self.drop_writes()
        self.model.begin_update(self.stream())
        for (layer, index), values in written.items():
            param = layer.params[index][1]
            layer.group.load_param(index, values.to(param.device, param.dtype).contiguous())
        self.publish()

    def drop_writes(self):
        """The module's parameters show the model's weights again, whatever was written into them."""
        for layer in self.layers:
            for index, (_, param) in enumerate(layer.params):
                for part, attribute in self.places[param]:
                    part._parameters[attribute] = param
                if not self.moves:
                    layer.take_back(index)
                else:
                    layer.versions[index] = param._version
            layer.group.restore_view()

    # -- step ---------------------------------------------------------------------------------------------------

    def finish(self, scale=1.0):
        """The step's gradients are complete: what step() does first, and does not do again. Until then gradients can be
        read; no forward pass may run."""
        if self._is_finished:
            raise RuntimeError("sharded.finish() was called in this step already: go on with sharded.step() or discard()")
        self.passes.require_sound()
        self.passes.note_forward()
        self.passes.require_sound()
        self.check_grads_kept()
        self._agree()
        self.model.finish_grads(scale, self.stream(), is_last=True)
        self._is_finished = True

    def step(self, lr, max_norm=None, scale=1.0, **options):
        """After the last backward pass: AdamW, whose options are keywords. Returns the norm of the gradients where
        max_norm is given. Collective."""
        if not self._is_finished:
            self.finish(scale)
        elif scale != 1.0:
            raise ValueError("sharded.step(scale=...): gradients were scaled by sharded.finish(scale) before")
        norm = None if max_norm is None else self.model.clip_grads(max_norm, stream=self.stream())
        self.model.step_adamw(lr, stream=self.stream(), **options)
        self._end_step()
        return norm

    def _end_step(self):
        self._is_finished = False
        self._clear_markers()
        self.passes.start_step()
        self._show_written()

    def _agree(self):
        """Once a step ranks tell each other in which order they have seen the groups come, and if gradients came late."""
        if len(self.layers) < 2:
            return self.passes.reduce_late() if self.passes.has_late() else None
        number = float(self.passes.order_number())
        values = [-number, number, float(self.passes.has_late())]
        low, high, late = self.context.all_reduce_values(values, ValueOp.MAX, self._mesh)
        if late:
            self.passes.reduce_late()
        if -low == high:
            self.passes.adopt_order()

    def publish(self):
        """Closes the update window: the main weights become those that the module computes with."""
        self.model.publish_weights(self.stream())
        self._show_written()

    def _show_written(self):
        for layer in self.layers:
            layer.mark_written()
        if not self.moves:  # whatever reads them from here on comes after all ranks have written them
            layer = self.layers[0]
            layer.hold(Phase.EVAL)
            layer.give_back(Phase.EVAL)

    def discard(self):
        """Forget a step that went wrong, on every rank."""
        self._is_finished = False
        self._clear_markers()
        self.model.discard_step(self.stream())
        self.passes.discard()

    # -- values -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unsharded(self, *layers):
        """`with sharded.unsharded():` the module's parameters have their weights, to be read. layers: modules that are a
        group each; default: all, which must fit (held_groups)."""
        held = [layer for layer in self.layers if not layers or layer.module in layers]
        done = []
        try:
            for layer in held:
                self.hold_in_forward(layer, Phase.EVAL)
                done.append(layer)
            yield self
        finally:
            for layer in done:
                layer.give_back(Phase.EVAL)

    def _param(self, name):
        for layer in self.layers:
            for index, (own, _) in enumerate(layer.params):
                if own == name:
                    return layer.group, index
        raise KeyError(f"the sharded module has no parameter {name!r}")

    def read_grad(self, name):
        """The whole gradient of a parameter, fp32, on the host, after finish(). Collective."""
        group, index = self._param(name)
        return torch.from_numpy(group.read_grad(index))

    def full_state_dict(self):
        """{name: value} as module.state_dict() names them, parameters whole, fp32, and buffers, on the host. Collective."""
        return state.full_state_dict(self)

    def load_full_state_dict(self, values, strict=True):
        """Between steps. Collective: every rank passes the same. Returns the names (missing, unexpected)."""
        return state.load_full_state_dict(self, values, strict)

    def save(self, folder, **options):
        """A checkpoint of weights, optimizer state and buffers; keywords are the fields of fsdp_save_options. Collective."""
        state.save(self, folder, options)

    def load(self, folder, **options):
        """From save(), or the weights and states of any checkpoint of libfsdp. Keywords are the fields of
        fsdp_load_options. Collective."""
        return state.load(self, folder, options)

    def close(self):
        """The model ends, and the module has its hooks no more. Weights that are mapped stay readable in it; those that
        were copied are gone: full_state_dict() first."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        self._clear_markers()
        for layer in self.layers:
            layer.detach()
        self.model.close()
