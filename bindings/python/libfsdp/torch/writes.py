# SPDX-License-Identifier: Apache-2.0
"""What users do to the parameters of a sharded module: it is told, or taken into the model, and not lost in silence."""

import torch

from ..errors import InvalidState


class Writes:
    def __init__(self, owner):
        self.owner, self.places = owner, _find_places(owner.module)
        self.restores = True

    def attach(self):
        """Can what was written be undone? Not on a GPU whose weights lie in place, where it is all that there is."""
        try:
            self._restore()
        except InvalidState:
            self.restores = False

    def _restore(self):
        for layer in self.owner.layers:
            layer.group.restore_view()

    # -- told ---------------------------------------------------------------------------------------------------

    def check(self, layer):
        for index, (name, param) in enumerate(layer.params):
            for part, attribute in self.places[param]:
                if part._parameters.get(attribute) is not param:
                    self._refuse(
                        name,
                        "is not in the module any more (torch.func.functional_call, say, with tensors of its own, which needs "
                        "a plain module)",
                        "put the values of what is there into the model",
                    )
            if param._version != layer.versions[index]:
                self._refuse(name, "was written into in place", "put the numbers that are there now into the model")
            if not self.owner.moves and param.data_ptr() != layer.pointers[index]:
                self._refuse(
                    name,
                    f"has other memory ({tuple(param.shape)}, {param.dtype}): module.to(), .data = or the like replaced it",
                    "put its numbers into the model, in the dtype that shard() saw",
                )

    def _refuse(self, name, what, does):
        ways = [] if self.owner.moves else [f"sharded.take_writes() on every rank would {does}"]
        ways += ["sharded.drop_writes() shows the weights as they were"] if self.restores else []
        raise RuntimeError(
            f"parameter {name!r} {what}, but its weights are libfsdp's: {', '.join(ways)}. Convert a module before shard(); "
            "module.load_state_dict() loads after it"
        )

    def follow_requires_grad(self):
        with torch._C.DisableTorchFunctionSubclass():  # quick, for parameters that are hidden
            changed = [
                (layer, index, *layer.params[index])
                for layer in self.owner.layers
                for index, trains in enumerate(layer.trains)
                if layer.params[index][1].requires_grad != trains
            ]
        for layer, index, name, param in changed:
            if param.requires_grad and not layer.can_train[index]:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the module was sharded, and has no optimizer state: shard it "
                    "with requires_grad=True, and freeze it afterwards"
                )
            if self.owner.passes.reduced_passes:
                raise RuntimeError(
                    f"requires_grad of {name!r} has changed between a backward pass and its step: change it after "
                    "sharded.step()"
                )
            layer.group.set_param_trainable(index, param.requires_grad)
            layer.trains[index] = param.requires_grad

    # -- taken and dropped --------------------------------------------------------------------------------------

    def take(self):
        if self.owner.moves:
            raise RuntimeError("take_writes: copied weights are gone; use module.load_state_dict()")
        written = {
            (layer, index): found.detach().clone()
            for layer in self.owner.layers
            for index in range(len(layer.params))
            if (found := self._values(layer, index)) is not None
        }
        with self.owner.window("sharded.take_writes()"):
            self._reset()
            for (layer, index), values in written.items():
                param = layer.params[index][1]
                layer.group.load_param(index, values.to(param.device, param.dtype).contiguous())

    def drop(self):
        if not self.restores:
            raise RuntimeError(
                "drop_writes: these weights lie in place on the GPU, where what was written is all that there is: "
                "sharded.take_writes() keeps it, module.load_state_dict() and sharded.load() replace it"
            )
        self._reset()
        self._restore()

    def _reset(self):
        """The module has its parameters again, in the library's memory."""
        for layer in self.owner.layers:
            for index, (_, param) in enumerate(layer.params):
                for part, attribute in self.places[param]:
                    part._parameters[attribute] = param
                if self.owner.moves:
                    layer.versions[index] = param._version
                else:
                    layer.take_back(index)

    def _values(self, layer, index):
        """What the module has in the parameter's place, if that was written into or replaced; else None."""
        param = layer.params[index][1]
        for part, attribute in self.places[param]:
            if (found := part._parameters.get(attribute)) is not param and found is not None:
                return found
        is_other = param.data_ptr() != layer.pointers[index]
        return param if is_other or param._version != layer.versions[index] else None


def _find_places(module):
    """{parameter: [(module, attribute)]}"""
    places = {}
    for part in module.modules():
        for attribute, param in part._parameters.items():
            if param is not None:
                places.setdefault(param, []).append((part, attribute))
    return places
