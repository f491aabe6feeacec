# SPDX-License-Identifier: Apache-2.0
"""Backward passes: which weights they hold, and in which order groups are reduced.

Every pass that gives a parameter a gradient reduces each group that trains once, in an order that is the same on all
ranks: that in which they were declared, from the last to the first, until all ranks have seen another one. Only the group
that is next is lent a buffer of the library, and no hook waits for a peer: what comes before its turn, or finds no buffer
free, waits in torch's memory.
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
        # held: layers, the one that was asked for last behind the others
        self.tasks, self.held, self.queue, self.seen = [], {}, [], []
        self.reduced_passes, self.is_broken = 0, False

    def in_backward(self):
        return current_task() != -1

    def begin(self):
        """At the first sign of a backward pass: its end is asked for."""
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
                "a backward pass ended by an exception, so that some groups were reduced and others were not: call "
                "sharded.discard() on every rank, and run the step again"
            )

    def check_markers_kept(self):
        """zero_grad() after a backward pass would forget gradients that are in the sums of all ranks."""
        if not self.reduced_passes:
            return
        with torch._C.DisableTorchFunctionSubclass():
            name = next(filter(None, (layer.grads.find_lost_marker() for layer in self.layers)), None)
        if name:
            raise RuntimeError(
                f"the gradient of {name!r} was cleared (zero_grad) after a backward pass, but libfsdp has it already: call "
                "sharded.discard() on every rank in place of zero_grad() to forget a step; after sharded.step() there is "
                "nothing to clear"
            )

    def note_forward(self):
        """Outside of any backward pass: one that has not ended by now never will."""
        if self.tasks and current_task() == -1:
            self.is_broken = True
            self.tasks = []
            self.give_back_all()

    # -- weights ------------------------------------------------------------------------------------------------

    def hold(self, layer):
        """The layer's weights stay until its last use ends, or the pass, or, where buffers are few, until others need
        them: they come back when they are needed again."""
        self.begin()
        if layer in self.held:
            self.held[layer] = self.held.pop(layer)
        else:
            self.hold_for(layer, Phase.BACKWARD, shows=False)
            self.held[layer] = True

    def show(self, layer):
        """The layer's weights are used in the pass, outside of its forward: what recomputes without it saves what it finds
        where we do not see it."""
        self.hold(layer)
        layer.show_copies()

    def hold_for(self, layer, phase, shows=True):
        """Where all buffers are taken, what a backward pass keeps can come back later: first what was asked for first. An
        operation that needs the weights of several layers asked for them last, and they were there at once in its forward."""
        while True:
            try:
                return layer.hold(phase, shows)
            except InvalidState as error:
                if not self.owner.moves or "held_groups" not in error.message:
                    raise
                kept = next(iter(self.held), None)
                if kept is None:
                    holders = error.message.partition("held, by ")[2].partition("; return")[0]
                    error.message = (
                        f"the weights of {layer.name!r} find no buffer: all are in use at once, by {holders}; give shard() a "
                        "larger held_groups"
                    )
                    raise
                self.give_back(kept)

    def give_back(self, layer):
        if self.held.pop(layer, None):
            layer.give_back(Phase.BACKWARD, shows=False)

    def give_back_all(self):
        for layer in list(self.held):
            self.give_back(layer)

    # -- gradients ----------------------------------------------------------------------------------------------

    @in_torch_words
    def end_uses(self, layer):
        """Autograd has left the layer: what has not come by now will not come in this pass."""
        if not self.in_backward():
            return
        self.give_back(layer)
        if layer.grads.arrived:
            layer.grads.is_over = True
            self.advance(layer)

    @in_torch_words
    def advance(self, layer):
        """What is complete follows from the order of autograd alone, never from how far other ranks are."""
        if len(self.tasks) > 1:  # in a checkpoint that runs a backward pass of its own a gradient may come in parts
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
        """On all ranks, where one of them has gradients that came late."""
        self.queue = [layer for layer in self.order if any(layer.trains)]
        for layer in self.queue:
            layer.grads.take_late()
        self._reduce_complete(0)
        for layer in self.layers:
            layer.grads.start_pass()

    def order_number(self):
        """Of the order that this pass has seen: ranks with the same number have seen the same."""
        number = 0
        for layer in self._seen_order():
            number = (number * 1000003 + layer.number + 1) % (1 << 52)  # a double has it exactly
        return number

    def _seen_order(self):
        trained = [layer for layer in self.order if any(layer.trains)]
        seen = [layer for layer in self.seen if layer in trained]
        return seen + [layer for layer in trained if layer not in seen]

    def adopt_order(self):
        """All ranks have seen this one."""
        seen = self._seen_order()
        self.order = seen + [layer for layer in self.order if layer not in seen]

    def start_step(self):
        self.reduced_passes = 0
        for layer in self.layers:
            layer.open_uses, layer.was_used = 0, False

    def discard(self):
        self.tasks, self.held, self.queue, self.is_broken = [], {}, [], False
        for layer in self.layers:
            layer.forget()
            layer.grads.discard()
        self.start_step()
