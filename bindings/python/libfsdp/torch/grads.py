# SPDX-License-Identifier: Apache-2.0
"""The gradients of one group, from autograd to the library."""

import torch

from .. import _abi
from .._library import lib
from ..constants import Dtype
from .parameter import HandedGrad

DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float16: Dtype.FLOAT16,
    torch.uint8: Dtype.UINT8,  # frozen parameters only: codes of the caller's own
}


class Grads:
    """Collects one contribution of the group: the gradients of one backward pass. The contribution is complete when
    autograd has left the layer, and is reduced when the group's turn comes."""

    def __init__(self, layer):
        self.layer, self.owner = layer, layer.owner
        # waiting: gradients that are still in torch's memory; given: parameters with a gradient in the contribution;
        # put: parameters that _put_once() has put; late: gradients that came after the contribution was complete
        self.waiting, self.given, self.put, self.late = {}, set(), set(), {}
        # arrived: parameters that got a gradient in this pass; cleared: parameters whose marker this pass has removed;
        # marked: parameters that got a marker since the last step
        self.arrived, self.cleared, self.marked = set(), set(), set()
        self.is_over = self.is_complete = False
        self.markers = []

    def make_markers(self):
        """Called when the parameters have the dtypes of the compute weights."""
        self.markers = [
            HandedGrad.of(param, name) if can else None
            for (name, param), can in zip(self.layer.params, self.layer.can_train)
        ]

    def watch(self, index, param):
        self.owner.handles += [
            param.register_hook(lambda grad: self._take_marker(index, param)),
            param.register_post_accumulate_grad_hook(lambda param: self.receive(index, param)),
        ]

    @property
    def trained(self):
        return [index for index, trains in enumerate(self.layer.trains) if trains]

    @property
    def is_ready(self):
        """True if this backward pass brings the layer no further gradients."""
        return self.is_over or len(self.given) == sum(self.layer.trains)

    # -- from autograd ------------------------------------------------------------------------------------------

    def _take_marker(self, index, param):
        """Removes the marker before autograd would add the gradient to it."""
        if type(param.grad) is HandedGrad:
            self.owner.passes.begin()
            self.cleared.add(index)
            param.grad = None

    def receive(self, index, param):
        """Called when autograd has accumulated the parameter's gradient, or has reached the parameter without one."""
        grad, param.grad = param.grad, None
        if grad is None:
            return
        self.owner.passes.begin()
        if not self.layer.trains[index]:
            raise RuntimeError(
                f"requires_grad of {self.layer.params[index][0]!r} was False when the forward pass began, so libfsdp "
                "does not take its gradient: change requires_grad between steps, before the forward pass"
            )
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        self.arrived.add(index)
        where = self.late if self.is_complete else self.waiting
        where[index] = where[index] + grad if index in where else grad
        if not self.is_complete:
            self.given.add(index)
            self.owner.passes.advance(self.layer)

    # -- to the library -----------------------------------------------------------------------------------------

    def hand_over(self, flags):
        """Puts the gradients that are here. Returns False if no buffer is free now or the contribution is not complete.
        Once it is complete, parameters without a gradient are put as such."""
        if self.owner.by_parts:  # max_pending_bytes: buffers are for parts, and a part is reduced once it is complete
            return self.is_complete and all(self._put_once(index, flags) for index in reversed(self.trained))
        for index in list(self.waiting):
            if not self._put(index, flags):
                return False
        return self.is_complete and all(
            self._put_once(index, flags) for index in self.trained if index not in self.given
        )

    def _put(self, index, flags):
        grad = self.waiting.get(index)
        if grad is None:
            what = None, 0, 0
        else:
            grad = grad.contiguous()
            what = grad.data_ptr(), DTYPES[grad.dtype], grad.numel()
        status = lib.put_grad(self.layer.group.handle, index, *what, flags, self.owner.stream())
        if status == _abi.FSDP_BUSY and flags:
            return False
        self.layer.group.check(status)
        self.waiting.pop(index, None)
        return True

    def _put_once(self, index, flags):
        if index in self.put:
            return True
        if not self._put(index, flags):
            return False
        if self.owner.by_parts:
            self.layer.group.complete_grad(index, self.owner.stream())
        self.put.add(index)
        return True

    def reduce(self):
        self.layer.group.reduce_grad(False, self.owner.stream())

    # -- passes and steps ---------------------------------------------------------------------------------------

    def mark(self):
        """Sets param.grad to the marker where the library has the gradient."""
        self.marked |= self.arrived
        with torch._C.DisableTorchFunctionSubclass():
            for index in self.arrived | self.cleared:
                self.layer.params[index][1].grad = self.markers[index]

    def find_lost_marker(self):
        """The name of a parameter whose marker was removed though the library has its gradient, or None."""
        params = self.layer.params
        return next((params[i][0] for i in self.marked if type(params[i][1].grad) is not HandedGrad), None)

    def clear(self):
        for _, param in self.layer.params:
            param.grad = None
        self.marked = set()

    def take_late(self):
        """Makes the late gradients a contribution of their own."""
        self.waiting, self.late = self.late, {}
        self.given, self.put, self.is_complete = set(self.waiting), set(), True

    def start_pass(self):
        self.waiting, self.given, self.put, self.arrived, self.cleared = {}, set(), set(), set(), set()
        self.is_over = self.is_complete = False

    def discard(self):
        self.start_pass()
        self.late = {}
        with torch._C.DisableTorchFunctionSubclass():
            self.clear()
