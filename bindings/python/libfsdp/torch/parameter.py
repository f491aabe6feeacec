# SPDX-License-Identifier: Apache-2.0
"""Placeholders in a sharded module: a parameter while its weights are not unsharded, and a gradient that libfsdp has
taken. Using their values raises a RuntimeError that names the parameter and the call to make instead."""

import torch
from torch.nn import Parameter

_getters = (
    "shape dtype device layout ndim requires_grad grad grad_fn is_leaf is_cuda is_cpu is_meta is_sparse is_quantized "
    "is_nested is_mkldnn is_mps is_xpu itemsize names output_nr retains_grad _version _backward_hooks _base"
).split()
_methods = (
    "size dim numel nelement element_size stride storage_offset is_contiguous is_floating_point is_complex is_signed "
    "get_device requires_grad_ register_hook register_post_accumulate_grad_hook ndimension _is_view is_inference"
).split()
# Functions that read a tensor's metadata and not its values.
_METADATA = {getattr(torch.Tensor, name).__get__ for name in _getters if hasattr(torch.Tensor, name)}
_METADATA |= {getattr(torch.Tensor, name) for name in _methods if hasattr(torch.Tensor, name)}
_METADATA |= {torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__, torch.Tensor.requires_grad.__set__}
_METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel}
_METADATA |= {torch.zeros_like, torch.ones_like, torch.empty_like}
# torch.compile asks for these of a parameter's gradient.
_METADATA_OF_GRAD = _METADATA | {torch.Tensor.untyped_storage, torch.Tensor.is_conj, torch.Tensor.is_neg}
_METADATA_OF_GRAD |= {torch.Tensor._is_zerotensor}


# Their arguments only say which gradients are wanted: the backward pass inside unshards the weights that it needs.
_AUTOGRAD_CALLS = {torch.autograd.grad, torch.autograd.backward}


def _call_autograd(function, args, kwargs):
    inputs = list(_tensors_in((*args, *kwargs.values()), HiddenParameter))
    for param in inputs:
        param.__class__ = Parameter
    try:
        return function(*args, **kwargs)
    finally:
        for param in inputs:
            if not param.fsdp_layer.is_shown:
                param.__class__ = HiddenParameter


def _tensors_in(values, kind):
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value, kind)


class HiddenParameter(Parameter):
    """A parameter while its layer is not unsharded. Inside a forward or backward pass, using its values unshards the
    layer; elsewhere it raises a RuntimeError that names the parameter.

    Parameters change their class when their layer is unsharded or resharded. So an unsharded parameter is a plain
    torch Parameter, and operations on it have no overhead.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if HandedGrad in types:
            return HandedGrad.__torch_function__(function, types, args, kwargs)
        if function in _AUTOGRAD_CALLS:
            return _call_autograd(function, args, kwargs)
        if function not in _METADATA:
            for param in list(_tensors_in((*args, *kwargs.values()), HiddenParameter)):
                param.fsdp_layer.reach(param, function)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def __repr__(self):
        return f"Parameter(sharded by libfsdp, {tuple(self.shape)}, {self.dtype}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo):
        self.fsdp_layer.reach(self, "copy.deepcopy")
        return super().__deepcopy__(memo)

    def __reduce_ex__(self, protocol):
        self.fsdp_layer.reach(self, "pickling")
        return super().__reduce_ex__(protocol)


# What gives a parameter all of its numbers.
_WRITES = {torch.Tensor.copy_, torch.Tensor.data.__set__}


class ClosedParameter(Parameter):
    """A parameter of a closed model whose weights were copied and went with it. It has no numbers, and no memory, until
    values are put into it, as module.load_state_dict() does; any other use is a RuntimeError that names it."""

    @staticmethod
    def close(param, name):
        param.data = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape)
        param.__class__ = ClosedParameter
        param.closed_name = name

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in _WRITES and type(args[0]) is ClosedParameter:
            return args[0]._fill(function, *args[1:], **kwargs)
        if function not in _METADATA:
            for param in _tensors_in((*args, *kwargs.values()), ClosedParameter):
                refuse_closed(param.closed_name, _name_of(function))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def _fill(self, function, *args, **kwargs):
        """A write that fails leaves the parameter closed."""
        filled = Parameter(torch.empty(self.shape, dtype=self.dtype, device=self.device), requires_grad=False)
        function(filled, *args, **kwargs)
        self.__class__ = Parameter
        self.data = filled.data
        del self.closed_name
        return self

    def __repr__(self):
        return f"Parameter(closed by libfsdp, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo):
        refuse_closed(self.closed_name, "copy.deepcopy")

    def __reduce_ex__(self, protocol):
        refuse_closed(self.closed_name, "pickling")


def refuse_closed(name, call):
    raise RuntimeError(
        f"{call}: the weights of {name!r} went with the model that sharded.close() ended: call sharded.full_state_dict() "
        "before close(), and module.load_state_dict() after it"
    )


class HandedGrad(torch.Tensor):
    """The marker in param.grad after a backward pass: libfsdp has the gradient. It has a shape and a dtype, but no
    values."""

    @staticmethod
    def of(param, name):
        made = torch.zeros((), dtype=param.dtype, device=param.device).expand(param.shape).as_subclass(HandedGrad)
        made.param_name = name
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function not in _METADATA_OF_GRAD:
            name = next(_tensors_in((*args, *kwargs.values()), HandedGrad)).param_name
            raise RuntimeError(
                f"{_name_of(function)}: the gradient of {name!r} was handed to libfsdp, which sums it over ranks. "
                "sharded.step(lr, max_norm=...) clips and steps, and sharded.clip_grad_norm_(max_norm, norm_type) clips "
                "by other norms; sharded.read_grad(name) after sharded.finish() reads it; an optimizer of torch "
                "steps if shard() gets its class, as in shard(..., optimizer=torch.optim.SGD)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def __repr__(self):
        return f"HandedGrad({self.param_name!r}, {tuple(self.shape)})"


class ShardGrad(torch.Tensor):
    """The gradient of a shard, as an optimizer's parameter shows it outside of the step. A GradScaler unscales it on
    all ranks; for all else there are calls of Sharded, which know of the other ranks' shards."""

    @staticmethod
    def of(grad, name, owner):
        made = grad.as_subclass(ShardGrad)
        made.param_name, made.owner = name, owner
        return made

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch._amp_foreach_non_finite_check_and_unscale_:
            return args[0][0].owner.unscale(*args, **kwargs)
        if function not in _METADATA:
            name = next(_tensors_in((*args, *kwargs.values()), ShardGrad)).param_name
            raise RuntimeError(
                f"{_name_of(function)}: this is only this rank's part of the gradient of {name!r}. "
                "sharded.clip_grad_norm_(max_norm, norm_type) and sharded.clip_grad_value_(value) clip on all ranks; "
                "sharded.read_grad(name) after sharded.finish() reads the whole gradient"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def __repr__(self):
        return f"ShardGrad({self.param_name!r}, {self.numel()} elements)"


def _name_of(function):
    return getattr(function, "__name__", None) or str(function)


def refuse_use(name, function):
    raise RuntimeError(
        f"{_name_of(function)}: the weights of {name!r} are not unsharded: outside of the module's forward and "
        "backward passes each rank has only a shard. To read them, use `with sharded.unsharded():` or "
        "sharded.full_state_dict(). To load them, use module.load_state_dict() or sharded.load_full_state_dict(). Do "
        "so on every rank. To train them, call sharded.step(lr), or give shard() the class of an optimizer, as in "
        "shard(..., optimizer=torch.optim.SGD)"
    )
