# SPDX-License-Identifier: Apache-2.0
"""A module of torch whose weights, gradients and optimizer state libfsdp shards and owns.

    sharded = libfsdp.torch.shard(module, context)
    for inputs, targets in data:
        loss = criterion(module(inputs), targets)
        loss.backward()
        sharded.step(lr=1e-3, max_norm=1.0)

Hooks of the module's layers unshard and reshard them; each gradient is handed over when autograd has it, and not kept.
Parameters are views of memory whose addresses stay, which is what a tape needs. Eager only: torch.compile would move or
drop the hooks.
"""

import contextlib
import os

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ._library import lib
from .constants import EVERY_RANK, Dtype, GroupFlag, ParamFlag, Phase
from .group import Param

DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float16: Dtype.FLOAT16,
    torch.uint8: Dtype.UINT8,  # of frozen parameters: codes of the caller's own
}


def shard(module, context, layers=None, no_decay=lambda name, param: param.dim() < 2, **options):
    """Shards a module over the ranks of the context, and hooks it; returns a Sharded.

    layers: the submodules that are a group each, in the order of the forward pass; default: the elements of each
    outermost ModuleList and Sequential. What they do not have, and what several of them share, is the root group.
    no_decay says which parameters have no weight decay. Further keywords are the fields of fsdp_model_options. The
    module's values are those of this rank: let them be equal on all.
    """
    compiled = [
        name or "the module"
        for name, part in module.named_modules()
        if hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
    ]
    if compiled:
        raise TypeError(f"libfsdp.torch.shard is for eager modules: torch.compile was applied to {', '.join(compiled)}")
    return Sharded(module, context, list(_find_layers(module)) if layers is None else list(layers), no_decay, options)


def _find_layers(module):
    if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
        yield from (element for element in module if any(True for _ in element.parameters()))
    else:
        for child in module.children():
            yield from _find_layers(child)


class _Refuse(TorchDispatchMode):
    """Refuses, by its name, an operation that would write into weights: where they are mapped it would kill the
    process."""

    def __init__(self, addresses):
        super().__init__()
        self.addresses = addresses

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for argument, value in zip(function._schema.arguments, args):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self.addresses:
                raise RuntimeError(
                    f"{function} would write into weights that libfsdp owns: change them in the update window"
                )
        return function(*args, **(kwargs or {}))


class _Layer:
    """A group and the module whose visits it follows. params: [(name, parameter)]."""

    def __init__(self, owner, name, module, params):
        self.owner, self.name, self.module, self.params = owner, name, module, params
        self.trained = [index for index, (_, param) in enumerate(params) if param.requires_grad]
        self.phases, self.given, self.is_held = [], set(), False

    def declare(self, flags, no_decay):
        declared = []
        for name, param in self.params:
            bits = (0 if param.requires_grad else ParamFlag.FROZEN) | (
                ParamFlag.NO_DECAY if no_decay(name, param) else 0
            )
            declared.append(Param(name, param.shape, DTYPES[param.dtype], flags=bits))
        self.group = self.owner.model.create_group(self.name, declared, flags=flags)

    def attach(self):
        """From here on the parameters are the library's memory."""
        with self.group.unsharded(Phase.EVAL, self.owner.stream()):
            for (_, param), view in zip(self.params, self.group.tensors(Phase.EVAL).values()):
                param.data = torch.from_dlpack(view)
        for index in self.trained:
            self.params[index][1].register_post_accumulate_grad_hook(lambda param, index=index: self.give(index, param))
        self.module.register_forward_pre_hook(self.before_forward)
        self.module.register_forward_hook(self.after_forward, always_call=True)
        self.module.register_full_backward_pre_hook(self.before_backward)

    def before_forward(self, module, inputs):
        phase = (
            Phase.RECOMPUTE if self.owner.is_in_backward else Phase.FORWARD if torch.is_grad_enabled() else Phase.EVAL
        )
        self.group.unshard(phase, self.owner.stream())
        self.phases.append(phase)

    def after_forward(self, module, inputs, output):
        if self.phases:  # also after an exception, and where a recomputation stops early
            self.group.reshard(self.phases.pop(), self.owner.stream())

    def before_backward(self, module, grads):
        self.owner.begin_backward()
        self.hold()

    def hold(self):
        if not self.is_held:
            self.group.unshard(Phase.BACKWARD, self.owner.stream())
            self.is_held = True

    def give(self, index, param):
        """autograd has added up a gradient: libfsdp takes it, and torch need not keep it."""
        self.owner.begin_backward()
        grad, param.grad = param.grad.contiguous(), None
        self.group.check(
            lib.put_grad(
                self.group.handle, index, grad.data_ptr(), DTYPES[grad.dtype], grad.numel(), 0, self.owner.stream()
            )
        )
        self.given.add(index)
        if len(self.given) == len(self.trained):
            self.owner.reduce_ready()

    @property
    def is_ready(self):
        return len(self.given) == len(self.trained)

    def reduce(self):
        """What autograd gave nothing for counts as zeros."""
        for index in self.trained:
            if index not in self.given:
                self.group.put_grad(index, None, self.owner.stream())
        if self.is_held:
            self.group.reshard(Phase.BACKWARD, self.owner.stream())
        self.group.reduce_grad(self.owner.is_last, self.owner.stream())
        self.forget()

    def forget(self):
        self.given, self.is_held = set(), False
        self.phases.clear()


class Sharded:
    """What shard() returns: model is the libfsdp.Model, module the module, whose parameters are read inside its forward
    and backward only."""

    def __init__(self, module, context, layers, no_decay, options):
        self.module, self.context, self.is_last, self.is_in_backward = module, context, True, False
        self.model = context.create_model(**options)
        self._stream_of = next(module.parameters()).device
        self.layers = list(self._divide(layers))
        for layer in self.layers:
            # The root is held while the layers are visited, in both directions.
            layer.declare(GroupFlag.ROOT | GroupFlag.RESIDENT if layer.module is module else 0, no_decay)
        self.model.seal()
        for layer in self.layers:
            for index, (_, param) in enumerate(layer.params):
                layer.group.load_param(index, param.detach().contiguous(), EVERY_RANK)
        self.model.publish_weights(self.stream())
        for layer in self.layers:
            layer.attach()
        self._to_reduce, self._guard = [], None
        if os.environ.get("FSDP_DEBUG", "0") not in ("", "0"):
            self._refuse_writes()

    def _divide(self, layers):
        """The root first: what no layer has, or several have."""
        names, users = {}, {}
        for name, param in self.module.named_parameters():
            names[param] = name
        for layer in layers:
            for param in layer.parameters():
                users.setdefault(param, []).append(layer)
        root = [(name, param) for param, name in names.items() if len(users.get(param, ())) != 1]
        outside = {
            param
            for part in self.module.modules()
            if not any(part in layer.modules() for layer in layers)
            for param in part.parameters(recurse=False)
        }
        root += [(name, param) for param, name in names.items() if len(users.get(param, ())) == 1 and param in outside]
        if root:
            yield _Layer(self, "root", self.module, root)
        taken, paths = {param for _, param in root}, {part: path for path, part in self.module.named_modules()}
        for layer in layers:
            own = [(names[param], param) for param in layer.parameters() if param not in taken]
            if own:
                yield _Layer(self, paths[layer], layer, own)

    def _refuse_writes(self):
        addresses = {param.untyped_storage().data_ptr() for param in self.module.parameters()}
        guards = []

        def enter(module, inputs):
            guards.append(_Refuse(addresses))
            guards[-1].__enter__()

        def leave(module, inputs, output):
            guards.pop().__exit__(None, None, None)

        self.module.register_forward_pre_hook(enter)
        self.module.register_forward_hook(leave, always_call=True)

    def stream(self):
        """The stream that torch works on now; None on the host."""
        return torch.cuda.current_stream(self._stream_of).cuda_stream if self._stream_of.type == "cuda" else None

    # -- backward -----------------------------------------------------------------------------------------------

    def begin_backward(self):
        """At the first sign of a backward pass: its end is asked for, and the groups' order is fixed, which is the same
        on every rank."""
        if not self.is_in_backward:
            self.is_in_backward = True
            self._to_reduce = [layer for layer in reversed(self.layers) if layer.trained]
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def reduce_ready(self):
        while self._to_reduce and self._to_reduce[0].is_ready:
            self._to_reduce.pop(0).reduce()

    def _end_backward(self):
        self.is_in_backward = False
        while self._to_reduce:
            self._to_reduce.pop(0).reduce()
        for layer in self.layers:  # those that train nothing hold their weights until here
            if layer.is_held:
                layer.group.reshard(Phase.BACKWARD, self.stream())
                layer.forget()

    @contextlib.contextmanager
    def accumulate(self):
        """Backward passes in the with block are micro-batches that others follow."""
        self.is_last = False
        try:
            yield self
        finally:
            self.is_last = True

    # -- step ---------------------------------------------------------------------------------------------------

    def step(self, lr, max_norm=None, scale=1.0, **options):
        """After the last backward pass: AdamW, whose options are keywords. Returns the norm of the gradients where
        max_norm is given."""
        self.model.finish_grads(scale, self.stream())
        norm = None if max_norm is None else self.model.clip_grads(max_norm, stream=self.stream())
        self.model.step_adamw(lr, stream=self.stream(), **options)
        return norm

    def discard(self):
        """Forget a step that went wrong, on every rank."""
        self.is_in_backward, self._to_reduce = False, []
        for layer in self.layers:
            layer.forget()
        for param in self.module.parameters():
            param.grad = None
        self.model.discard_step(self.stream())

    def full_state_dict(self):
        """{name: whole parameter, fp32, on the host} of all groups, on every rank."""
        return {
            name: torch.from_numpy(layer.group.read_param(index))
            for layer in self.layers
            for index, (name, _) in enumerate(layer.params)
        }

    def close(self):
        self.model.close()
