# SPDX-License-Identifier: Apache-2.0
"""A sharded module: its forward passes, its steps, and how its values are read, saved and loaded."""

import contextlib
import math
import os
import sys
import threading

import torch
from torch.utils import _pytree as pytree

from ..constants import Home, LoadFlag, Phase, Role, ScheduleKind, UnshardMode, ValueOp, ViewKind
from ..log import logger
from ..shard import refuse_file
from . import clipping, dcp, state
from .averages import Averages
from .casts import cast
from .division import divide
from .layer import Layer, NotCopied, refuse_replica, refuse_tracing
from .optimizer import LibraryAdamW, ShardView
from .passes import Passes
from .saved import SavedWeights, current_task
from .words import advice, in_torch_words
from .writes import Writes


def _traces():
    """Does torch.compile look at the module now?"""
    return torch._guards.TracingContext.try_get() is not None


class Sharded(NotCopied):
    """What shard() returns: model is the libfsdp.Model, module the module. optimizer is an optimizer of torch over this
    rank's shards, or None if shard() got none. averages is {name: Average}. skipped_param is the parameter whose
    gradient was not finite in the last step(skip_nonfinite=True), or None."""

    def __init__(self, module, context, groups, ignored, initial, rules, steps, held_groups, averages, options):
        self.module, self.context, self.ignored, self.steps = module, context, ignored, steps
        self.optimizer = self.skipped_param = self._shards = None
        self._is_skipped = False  # a GradScaler has found Inf or NaN: its step of the optimizer does nothing
        self._thread, self._depth, self._scope_holds, self._is_finished = None, 0, {}, False
        self._discards, self.first_step = 0, None
        self.device = next(param for param in module.parameters() if param not in ignored).device
        self._on_host = self.device.type != "cuda"
        self.has_filed_grads = options.get("grad_home") == Home.FILE
        self.mesh = options.get("mesh")
        self._prefetches = options.get("prefetch_depth", 1) > 0
        self.by_parts = options.get("max_pending_bytes", 0) > 0
        mapped = options.get("unshard_mode", UnshardMode.MAPPED if self._on_host else UnshardMode.COPIED)
        if self._on_host:
            options.setdefault("view_kind", ViewKind.PRIVATE)
        if steps:
            steps.check_storage(options, "the model")
        if averages:
            refuse_file(options, "libfsdp.torch.shard", "a moving average")
        self.model = context.create_model(**options)
        self.handles = []  # handles of all hooks
        self.casts = rules.casts
        self.layers = [Layer(self, number, *found) for number, found in enumerate(divide(module, groups, ignored))]
        self.root = next((layer for layer in self.layers if layer.is_root), None)
        for layer in self.layers:
            layer.declare(rules)
        # True if state_dict() must read main weights.
        self.rounds = any(layer.is_rounded(index) for layer in self.layers for index in range(len(layer.params)))
        if steps:
            steps.declare(self.model)
        self.averages = Averages(self, averages)
        self.averages.declare(self.model, options.get("optimizer"))
        self.model.set_schedule(ScheduleKind.ANY, held_groups=held_groups)
        self.model.seal()
        self._log_groups()
        is_debug = os.environ.get("FSDP_DEBUG", "0") not in ("", "0")
        # True if weights can be read only while their layer is unsharded (copied or quantized weights, or FSDP_DEBUG),
        # False if they always can, at one address.
        is_hidden = any(layer.quantized for layer in self.layers) or (is_debug and mapped == UnshardMode.MAPPED)
        self.hides_weights = bool(self.model.role_bytes(Role.GATHER)) or is_hidden
        self.saved, self.passes, self.writes = SavedWeights(self), Passes(self, self.layers), Writes(self)
        self.dicts = state.StateDicts(self)
        self._next, self._before, self._last = {}, {}, None
        if initial:
            initial.load(self)
        for layer in () if initial else self.layers:
            layer.load()
        self.model.publish_weights(self.stream())
        for layer in self.layers:
            layer.attach()
        self.writes.attach()
        if steps:
            steps.attach(self)
            self.optimizer = steps.optimizer
        self.averages.attach()
        self._hook()

    def _log_groups(self):
        if self.context.rank == 0:
            for layer in self.layers:
                count = sum(param.numel() for _, param in layer.params)
                logger.info("group %r: %d parameters, %d elements", layer.name, len(layer.params), count)

    def _hook(self):
        places = self.writes.places
        owners = {part for _, param in self.root.params for part, _ in places[param]} if self.root else set()
        self._root_parts = owners | {self.module}
        for part in self._root_parts:
            self.handles += [
                part.register_forward_pre_hook(self._before_root, prepend=True, with_kwargs=True),
                part.register_forward_hook(self._after_root, always_call=True),
            ]
        for layer in self.layers:
            if not layer.is_root:
                layer.hook()
        self.dicts.hook(self.layers)

    def stream(self):
        """torch's current stream; None on the host."""
        return None if self._on_host else torch.cuda.current_stream(self.device).cuda_stream

    # -- forward ------------------------------------------------------------------------------------------------

    def enter(self):
        """Begins a forward of the module or of a part. Returns the argument of leave()."""
        self._depth += 1
        return self.saved.enter() if self.hides_weights else None

    def begin_forward(self):
        """In an outermost forward, checks what the program has done to the module since the last one."""
        if self._depth > 1 or current_task() != -1:
            return
        self._require_usual()
        self.averages.require_no_grad()
        self.passes.check_last_pass_ended()
        self.writes.follow_requires_grad()
        self.writes.refuse_added()
        self._last = None

    def _require_usual(self):
        if self._is_finished:
            raise RuntimeError(
                "sharded.finish() has ended the step's gradients: call sharded.step() or sharded.discard() before the "
                "next forward pass"
            )
        self._is_skipped = False
        self.dicts.require_ended()
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled and compiled.compiled_autograd_enabled:
            raise RuntimeError("compiled autograd does not run the hooks of a sharded module: train it in eager mode")
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        if self._thread != thread:
            raise RuntimeError("a sharded module must run in the thread that ran it first: a rank has one thread")

    def leave(self, hooks):
        self.saved.leave(hooks)
        self._depth -= 1
        if self._depth:
            return
        holds, self._scope_holds = self._scope_holds, {}
        for layer, phase in holds.items():
            layer.give_back(phase)

    def is_held_in_scope(self, layer):
        return layer in self._scope_holds

    def release_in_scope(self, layer):
        if (phase := self._scope_holds.pop(layer, None)) is not None:
            layer.give_back(phase)

    def hold_in_scope(self, layer):
        """Holds the layer until the outermost forward ends."""
        if layer in self._scope_holds:
            return
        layer.was_used = True
        in_backward = current_task() != -1
        phase = Phase.RECOMPUTE if in_backward else Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL
        self.passes.hold_for(layer, phase)
        self._scope_holds[layer] = phase
        if phase == Phase.FORWARD:
            self.passes.keep_resident(layer)
        self.writes.check(layer)

    @in_torch_words
    def reach(self, layer):
        """Called when weights are used outside of their layer's forward. Inside a forward or backward pass unshards
        them until the pass ends and returns True; elsewhere returns False."""
        if self._depth:
            with advice("torch.compile of the whole module needs all layers at once: compile each layer, after shard()", _traces()):
                self.hold_in_scope(layer)
        elif current_task() != -1:
            self.passes.show(layer)
        else:
            return False
        return True

    @in_torch_words
    def _before_root(self, part, args, kwargs):
        refuse_tracing()
        if part not in self._root_parts:
            return refuse_replica(part)
        # torch calls _after_root even if something fails from here on.
        part.__dict__.setdefault("_fsdp_visits", []).append(self.enter())
        self.begin_forward()
        if self.root:
            self.hold_in_scope(self.root)
            if part is self.module:
                return cast((args, kwargs), self.root.input_dtype)
        return None

    @in_torch_words
    def _after_root(self, part, args, output):
        if part not in self._root_parts or not part.__dict__.get("_fsdp_visits"):
            return None
        hooks, shown = part._fsdp_visits.pop(), output
        try:
            if self.hides_weights and self._depth == 1:
                shown = self.saved.copy_outputs(output)
            if part is self.module:
                shown = cast(shown, self.casts.output_dtype)
            if current_task() == -1 and torch.is_grad_enabled() and part is self.module:
                for value in pytree.tree_leaves(shown):
                    if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                        value.grad_fn.register_prehook(lambda grads: self.passes.begin())
        finally:
            self.leave(hooks)
        return None if shown is output else shown

    # -- prefetch -----------------------------------------------------------------------------------------------

    def prefetch_after(self, layer, phase):
        """Prefetches the layer that came after this one the last time."""
        if not self.hides_weights or phase == Phase.RECOMPUTE:
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

    def require_between_steps(self, call):
        """Raises unless weights can be loaded now: libfsdp must have no gradients of a step."""
        self.averages.require_hidden(call)
        if self._is_finished:
            raise RuntimeError(
                f"{call}: sharded.finish() has ended the step's gradients: call sharded.step() or sharded.discard() "
                "first"
            )
        if self.passes.reduced_passes or self.passes.is_broken or self.passes.has_late():
            raise RuntimeError(
                f"{call}: libfsdp has gradients of a backward pass: call sharded.step() first, or sharded.discard() on "
                "every rank"
            )
        self.dicts.require_ended()

    @in_torch_words
    def begin_window(self, call):
        self.require_between_steps(call)
        self.require_no_holds(call)
        self.model.begin_update(self.stream())

    def require_no_holds(self, call):
        self.passes.check_last_pass_ended()
        self.passes.give_back_all()
        held = next((layer for layer in self.layers if layer.holds), None)
        if held:
            raise RuntimeError(
                f"{call}: the weights of {held.name!r} are in use, by `with sharded.unsharded():` or by an interrupted "
                "forward pass: leave the `with` first, or call sharded.discard() on every rank"
            )

    @contextlib.contextmanager
    def window(self, call):
        """The update window, in which weights may be loaded. What was loaded before an error stays."""
        self.begin_window(call)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):  # report the first error
                self.publish()
            raise
        self.publish()

    @in_torch_words
    def take_writes(self):
        """Loads what this rank has written into the module's parameters as the model's weights. Call it between steps.
        Collective: every rank must have written the same."""
        self.writes.take()

    @in_torch_words
    def drop_writes(self):
        """Drops writes into the module's parameters: they show the model's weights again."""
        self.writes.drop()

    # -- step ---------------------------------------------------------------------------------------------------

    @in_torch_words
    def finish(self, scale=1.0):
        """Ends the step's gradients. Call it to read them (read_grad) before step(), which otherwise does this first.
        No forward pass may run until step() or discard()."""
        if self._is_finished:
            raise RuntimeError(
                "sharded.finish() was called in this step already: call sharded.step() or sharded.discard() next"
            )
        self.averages.require_hidden("sharded.step()")
        self.passes.require_sound()
        self.dicts.require_ended()
        self.require_no_holds("sharded.step()")
        self.passes.require_sound()
        self.passes.check_markers_kept()
        self._agree()
        self.model.finish_grads(scale, self.stream(), is_last=True)
        self._is_finished = True

    @in_torch_words
    def step(self, lr=None, max_norm=None, scale=1.0, skip_nonfinite=False, **options):
        """Steps AdamW after the last backward pass, or the optimizer that shard() got, which has its own lr. Keywords
        are the fields of fsdp_adamw_options. With max_norm, clips the gradients and returns their norm before clipping.
        With skip_nonfinite, a step with Inf or NaN in any rank's gradients changes nothing, and skipped_param names the
        parameter. Collective."""
        self._check_options(lr, options)
        if not self._is_finished:
            self.finish(scale)
        elif scale != 1.0:
            raise ValueError("sharded.step(scale=...): sharded.finish(scale) was called before: give it the scale")
        norm = None if max_norm is None else self.model.clip_grads(max_norm, stream=self.stream())
        if skip_nonfinite and self._skip(norm):
            return norm
        if self.optimizer is not None:
            self.optimizer.step()
            return norm
        self.model.step_adamw(lr, stream=self.stream(), **self.step_number(), **options)
        self._end_step()
        return norm

    def step_number(self):
        """{"step": its number} in the first step of AdamW after load_dcp(), else {}."""
        return {} if self.first_step is None else {"step": self.first_step}

    def _check_options(self, lr, options):
        if self.optimizer is None and lr is None:
            raise TypeError("sharded.step() needs lr, unless shard() got an optimizer of torch or optimizer_options")
        given = (["lr"] if lr is not None else []) + list(options)
        if self.optimizer is not None and given:
            raise TypeError(
                f"sharded.step({given[0]}=): the options of {type(self.optimizer).__name__} are in "
                "sharded.optimizer.param_groups"
            )

    def _skip(self, norm):
        """Forgets the step if its gradients are not finite on any rank."""
        self.skipped_param = None
        if norm is None or not math.isfinite(norm):
            self.skipped_param = self.model.check_grads(self.stream())
        if self.skipped_param is not None:
            self.discard()
        return self.skipped_param is not None

    @in_torch_words
    def step_by(self, step):
        """Called by the optimizer's step(); step is that of its class."""
        if self._is_skipped:
            return
        if not self._is_finished:
            self.finish()
        self.steps.run(step)
        self._end_step()

    def set_requires_gradient_sync(self, *args, **kwargs):
        raise NotImplementedError(
            "sharded.set_requires_gradient_sync(): all groups take part in all backward passes of a step, because "
            "ranks must agree which gradients a sum has. To exchange gradients once a step, after its last backward "
            "pass, give shard() reduce_policy=libfsdp.ReducePolicy.LAST; to exclude a part from a step, freeze it "
            "with requires_grad_(False) on every rank"
        )

    @in_torch_words
    def unscale(self, grads, found_inf, inverse_scale):
        """Called by a GradScaler: divides this rank's gradients by the scale. Ranks agree if any has Inf or NaN; then
        they forget the step. Collective."""
        if not self._is_finished:
            self.finish()
        clipping.unscale(self, grads, found_inf, inverse_scale)
        if self.context.all_reduce_values(found_inf.item(), ValueOp.MAX, self.mesh):
            found_inf.fill_(1.0)
            self.discard()
            self._is_skipped = True

    @in_torch_words
    def clip_grad_norm_(self, max_norm, norm_type=2.0, error_if_nonfinite=False):
        """Ends the step's gradients and clips them by their norm over all ranks, as torch.nn.utils.clip_grad_norm_
        does; norm_type is above 0, or inf. Returns the norm before clipping, as a tensor. Gradients whose norm is not
        finite stay as they are. Then call step(). Collective."""
        clipping.check_arguments(self, max_norm, norm_type)
        norm = math.inf if self._is_skipped else self._clip_norm(float(max_norm), float(norm_type))
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm}: call sharded.discard() on "
                "every rank, or give error_if_nonfinite=False"
            )
        return torch.tensor(norm, dtype=torch.float64).to(torch.float32)

    def _clip_norm(self, max_norm, norm_type):
        if not self._is_finished:
            self.finish()
        return clipping.clip_norm(self, max_norm, norm_type)

    @in_torch_words
    def clip_grad_value_(self, clip_value):
        """Ends the step's gradients and clamps their elements to [-clip_value, clip_value]. Then call step().
        Collective."""
        clipping.check_value(self, clip_value)
        if self._is_skipped:
            return
        if not self._is_finished:
            self.finish()
        clipping.clip_value(self, float(clip_value))

    def shards(self):
        """This rank's shards, as tensors."""
        if self._shards is None:
            count = len(self.model.shards())
            with torch.inference_mode(False):
                self._shards = [ShardView(self, index) for index in range(count)]
        return self._shards

    def require_no_grads(self, call):
        if self._is_finished or self.passes.reduced_passes or self.passes.has_late():
            raise RuntimeError(
                f"{call}: libfsdp has gradients of a backward pass: to forget a step, call sharded.discard() on every "
                "rank; after a step there is nothing to clear"
            )

    def _end_step(self):
        self._is_finished, self.first_step = False, None
        self._clear_grads()
        self.passes.start_step()
        self._show_written()

    def _clear_grads(self):
        with torch._C.DisableTorchFunctionSubclass():
            for layer in self.layers:
                layer.grads.clear()

    def _agree(self):
        """Once a step, ranks tell each other their order of groups and if they have late gradients."""
        number = float(self.passes.order_number())
        values = [-number, number, float(self.passes.has_late())]
        low, high, late = self.context.all_reduce_values(values, ValueOp.MAX, self.mesh)
        if late:
            self.passes.reduce_late()
        if -low == high:
            self.passes.adopt_order()

    def publish(self):
        """Closes the update window: makes the compute weights from the main weights."""
        self.model.publish_weights(self.stream())
        self._show_written()

    def _show_written(self):
        for layer in self.layers:
            layer.mark_written()
        if not self.hides_weights:  # waits until all ranks have published, so that the module may be read at any time
            layer = self.layers[0]
            layer.hold(Phase.EVAL)
            layer.give_back(Phase.EVAL)

    @in_torch_words
    def discard(self):
        """Forgets a step that went wrong. Call it on every rank, also after an exception has ended a forward pass, a
        backward pass or a load. What such a load has loaded stays."""
        self._is_finished, self._depth, self._scope_holds = False, 0, {}
        self._discards += 1
        self.saved.leave_all()
        for part in self._root_parts:
            part.__dict__.pop("_fsdp_visits", None)
        if self.dicts.abandon():
            self.publish()
        self.model.discard_step(self.stream())
        self.passes.discard()
        if self.averages.shown:
            self.averages.shown.hide()

    # -- values -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def unsharded(self, *layers):
        """In `with sharded.unsharded():` the module's parameters have their weights, for reading. layers: modules that
        are a group of their own; default: all groups. Copied weights must fit into held_groups buffers."""
        groups = {module: layer for layer in self.layers for module in layer.modules}
        for module in layers:
            if module not in groups:
                raise ValueError(
                    f"sharded.unsharded(): {type(module).__name__} is no group of its own; the groups are "
                    + ", ".join(repr(layer.name) for layer in self.layers)
                )
        held, done, discards = dict.fromkeys(groups[module] for module in layers or groups), [], self._discards
        try:
            for layer in held:
                self._hold_to_read(layer)
                done.append(layer)
            yield self
        finally:
            if discards == self._discards:  # else discard() has dropped all holds
                for layer in done:
                    layer.give_back(Phase.EVAL)

    @in_torch_words
    def _hold_to_read(self, layer):
        with advice("`with sharded.unsharded(layer):` needs the buffer of one layer"):
            self.passes.hold_for(layer, Phase.EVAL)

    def _param(self, name):
        for layer in self.layers:
            for index, (own, _) in enumerate(layer.params):
                if own == name:
                    return layer.group, index
        raise KeyError(f"the sharded module has no parameter {name!r}")

    @in_torch_words
    def read_grad(self, name):
        """A parameter's whole gradient in fp32 on the host, after finish(). Collective."""
        group, index = self._param(name)
        return torch.from_numpy(group.read_grad(index))

    @in_torch_words
    def full_state_dict(self):
        """{name: value} as module.state_dict() names them, on the host: whole parameters in fp32, and buffers.
        Collective."""
        return state.full_state_dict(self)

    @in_torch_words
    def load_full_state_dict(self, values, strict=True):
        """Loads what full_state_dict() returns. Call it between steps. Collective: every rank passes the same values.
        A parameter with several names needs one of them. Returns the names (missing, unexpected)."""
        return state.load_full_state_dict(self, values, strict)

    @in_torch_words
    def state_dict(self):
        """{name: this rank's rows} as module.state_dict() names them, on the host in fp32, for load_state_dict() on
        the same rank; buffers are whole. Collective."""
        return state.shard_state_dict(self)

    @in_torch_words
    def load_state_dict(self, values):
        """Loads what state_dict() has returned on this rank. Call it between steps. Collective."""
        state.load_shard_state_dict(self, values)

    @in_torch_words
    def save(self, folder, extra=None, **options):
        """Saves a checkpoint of weights, optimizer state and buffers. extra: rank 0's values that load() returns, such
        as {"scheduler": scheduler.state_dict()}: what torch.load(weights_only=True) reads. Keywords are the fields of
        fsdp_save_options. Collective."""
        state.require_savable(self)
        state.save(self, folder, extra, options)

    @in_torch_words
    def load(self, folder, **options):
        """Loads a checkpoint of save(), or the weights and optimizer state of another checkpoint of libfsdp. Keywords
        are the fields of fsdp_load_options. Returns what was loaded; its extra is what save() got, or None.
        Collective."""
        loaded = state.load(self, folder, options)
        if loaded.name and not options.get("flags", 0) & LoadFlag.WEIGHTS_ONLY:
            self.first_step = None  # AdamW goes on with the checkpoint's number
        return loaded

    @in_torch_words
    def load_dcp(self, folder, weights_only=False, prefix=None):
        """Loads a folder of torch.distributed.checkpoint (.metadata and *.distcp): weights, buffers, and unless
        weights_only the states of AdamW by the names of parameters. The param_groups stay. prefix is what stands before
        the names of weights, as "model."; it is found if the folder has the weights once. A value that the folder lacks
        or has in another shape is an error before anything is loaded. After the states, save() needs a step first. No
        code of the folder runs. Collective."""
        if not weights_only and not isinstance(self.steps, (type(None), LibraryAdamW)):
            raise ValueError(
                "sharded.load_dcp(): only the states of AdamW of the library are loaded, and the module trains by "
                f"{type(self.optimizer).__name__}: give weights_only=True"
            )
        step = dcp.load(self, folder, weights_only, prefix)
        if step is not None:
            self.first_step = step + 1

    def close(self):
        """Closes the model and removes the module's hooks. Mapped weights stay readable in the module.
        Copied weights are gone, and their use is an error: call full_state_dict() before."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        for layer in self.layers:
            layer.detach()
        self.model.close()
