# SPDX-License-Identifier: Apache-2.0
"""Backward passes: which weights they hold, and in which order groups are reduced.

A backward pass that produces a gradient reduces each trained group once. All ranks reduce in the same order: at first
the reverse of the declared order, and later the order of the last step in which all ranks saw the same one. Only the
next group in this order borrows gradient buffers from the library, and no hook waits for a peer. A gradient that comes
before its group's turn, or finds no free buffer, waits in torch's memory.
"""

import torch

from ..constants import GradFlag, Phase
from ..errors import InvalidState
from .saved import current_task
from .words import in_torch_words


class Passes:
    def __init__(self, owner, layers):
        self.owner, self.layers = owner, layers
        self.order = list(reversed(layers))
        # held: layers, in the order in which they were last asked for
        self.tasks, self.held, self.queue, self.seen = [], {}, [], []
        self.reduced_passes, self.is_broken = 0, False
        self.residents = []  # layers that stay gathered until the backward pass has ended

    def in_backward(self):
        return current_task() != -1

    def begin(self):
        """Called at the first sign of a backward pass. Has autograd call end() when the pass is over."""
        task = current_task()
        if task in self.tasks:
            return
        self.require_sound()
        if not self.tasks:
            self.check_markers_kept()
            self.queue = [layer for layer in self.order if any(layer.trains)]
            self.seen = []
            for layer in self.queue:
                layer.grads.is_over = layer.grads.is_complete = not layer.was_used
        self.tasks.append(task)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self.end(task))

    def require_sound(self):
        if self.is_broken:
            raise RuntimeError(
                "a backward pass was ended by an exception, and some groups may have been reduced already: call "
                "sharded.discard() on every rank, and run the step again"
            )

    def check_markers_kept(self):
        """Raises if zero_grad() has cleared gradients that libfsdp has already: they stay in the sums over ranks."""
        if not self.reduced_passes:
            return
        with torch._C.DisableTorchFunctionSubclass():
            name = next(filter(None, (layer.grads.find_lost_marker() for layer in self.layers)), None)
        if name:
            raise RuntimeError(
                f"the gradient of {name!r} was cleared (zero_grad) after a backward pass, but libfsdp has it already. "
                "To forget a step, call sharded.discard() on every rank in place of zero_grad(). After sharded.step() "
                "there is nothing to clear"
            )

    def check_last_pass_ended(self):
        """Called outside of backward passes. A pass that has not called end() by now was ended by an exception."""
        if self.tasks and current_task() == -1:
            self.is_broken = True
            self.tasks = []
            self.give_back_all()

    # -- weights ------------------------------------------------------------------------------------------------

    def hold(self, layer):
        """Holds the layer's weights until the last use of the layer or the pass ends. If buffers run out, other layers
        take this one's buffer, and its weights are gathered again when they are next needed."""
        self.begin()
        if layer in self.held:
            self.held[layer] = self.held.pop(layer)
        else:
            self.hold_for(layer, Phase.BACKWARD, shows=False)
            self.held[layer] = True

    def show(self, layer):
        """The backward pass uses the layer's weights outside of the layer's forward. Code that recomputes there may
        save them without our hooks, so the parameters become copies."""
        self.hold(layer)
        layer.show_copies()

    def hold_for(self, layer, phase, shows=True):
        """Holds the layer. If all buffers are taken, first gives back layers that the backward pass keeps, those that
        were asked for earliest first. So the weights of one operation stay together: it asked for them last, and they
        fitted in its forward."""
        while True:
            try:
                return layer.hold(phase, shows)
            except InvalidState as error:
                if not self.owner.hides_weights or "held_groups" not in error.message:
                    raise
                kept = next(iter(self.held), None)
                if kept is None and self.residents:
                    self.give_back_resident()
                    continue
                if kept is None:
                    holders = error.message.partition("held, by ")[2].partition("; return")[0]
                    error.message = (
                        f"no buffer is free for the weights of {layer.name!r}: all are in use, by {holders}; give "
                        "shard() a larger held_groups"
                    )
                    raise
                self.give_back(kept)

    def give_back(self, layer):
        if self.held.pop(layer, None):
            layer.give_back(Phase.BACKWARD, shows=False)

    def give_back_all(self):
        for layer in list(self.held):
            self.give_back(layer)
        while self.residents:
            self.give_back_resident()

    def keep_resident(self, layer):
        """Holds a group with GroupFlag.RESIDENT until the backward pass or the step ends, or buffers run out."""
        if layer.is_resident and layer not in self.residents:
            layer.hold(Phase.FORWARD, shows=False)
            self.residents.append(layer)

    def give_back_resident(self):
        self.residents.pop(0).give_back(Phase.FORWARD, shows=False)

    # -- gradients ----------------------------------------------------------------------------------------------

    @in_torch_words
    def end_uses(self, layer):
        """Autograd has left the layer: this pass brings it no further gradients."""
        if not self.in_backward():
            return
        self.give_back(layer)
        if layer.grads.arrived:
            layer.grads.is_over = True
            self.advance(layer)

    @in_torch_words
    def advance(self, layer):
        """Reduces what is complete. The order in which layers become complete depends only on autograd, never on how
        far other ranks are."""
        if len(self.tasks) > 1:  # a reentrant checkpoint's own backward pass may bring only a part of a gradient
            return
        if layer.grads.is_ready and not layer.grads.is_complete:
            layer.grads.is_complete = True
            self.seen.append(layer)
        self._reduce_complete(GradFlag.NO_WAIT)

    def _reduce_complete(self, flags):
        while self.queue and self.queue[0].grads.hand_over(flags):
            self.queue.pop(0).grads.reduce()

    @in_torch_words
    def end(self, task):
        self.tasks.remove(task)
        if self.tasks:
            return
        self.give_back_all()
        if any(layer.grads.arrived for layer in self.layers):
            for layer in self.queue:
                layer.grads.is_complete = True
            self._reduce_complete(0)
            self.reduced_passes += 1
        for layer in self.layers:
            layer.grads.mark()
            layer.grads.start_pass()
        self.queue = []

    def has_late(self):
        return any(layer.grads.late for layer in self.layers)

    def reduce_late(self):
        """Called on all ranks if any rank has late gradients."""
        self.queue = [layer for layer in self.order if any(layer.trains)]
        for layer in self.queue:
            layer.grads.take_late()
        self._reduce_complete(0)
        for layer in self.layers:
            layer.grads.start_pass()

    def order_number(self):
        """A hash of _seen_order(), for comparison between ranks."""
        number = 0
        for layer in self._seen_order():
            number = (number * 1000003 + layer.number + 1) % (1 << 52)  # exact as a double
        return number

    def _seen_order(self):
        """The trained groups, first those that autograd completed in the last pass, in its order."""
        trained = [layer for layer in self.order if any(layer.trains)]
        seen = [layer for layer in self.seen if layer in trained]
        return seen + [layer for layer in trained if layer not in seen]

    def adopt_order(self):
        """Makes _seen_order() the order of later passes. Call it only if all ranks have seen the same order."""
        seen = self._seen_order()
        self.order = seen + [layer for layer in self.order if layer not in seen]

    def start_step(self):
        self.reduced_passes = 0
        for layer in self.layers:
            layer.open_uses, layer.was_used = 0, False

    def discard(self):
        self.tasks, self.held, self.queue, self.residents, self.is_broken = [], {}, [], [], False
        for layer in self.layers:
            layer.forget()
            layer.grads.discard()
        self.start_step()
