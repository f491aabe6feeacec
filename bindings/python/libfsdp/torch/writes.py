# SPDX-License-Identifier: Apache-2.0
"""Finds writes into a sharded module's parameters. Each is reported, taken into the model or dropped on request; none
is lost silently."""

import torch

from ..errors import InvalidState


_REPLACED = (
    "is not in the module any more (torch.func.functional_call with other tensors, say, works only with a plain module)",
    "load the values of what has replaced it",
)


class Writes:
    def __init__(self, owner):
        self.owner, self.places = owner, _find_places(owner.module)
        self._known = {place for places in self.places.values() for place in places}
        self._members, self._added = self._find_members(), []
        self.restores = True

    def attach(self):
        """Finds out if writes can be undone. They cannot on a GPU with weights in place: there is no other copy."""
        try:
            self._restore()
        except InvalidState:
            self.restores = False

    def _restore(self):
        for layer in self.owner.layers:
            layer.group.restore_view()

    # -- reported ---------------------------------------------------------------------------------------------

    def check(self, layer):
        for index, (name, param) in enumerate(layer.params):
            for part, attribute in self.places[param]:
                if part._parameters.get(attribute) is not param:
                    self._refuse(name, *_REPLACED)
            if param._version != layer.versions[index]:
                self._refuse(name, "was written into in place", "load its present values")
            if not self.owner.hides_weights and param.data_ptr() != layer.pointers[index]:
                self._refuse(
                    name,
                    f"has other memory now ({tuple(param.shape)}, {param.dtype}), by module.to(), .data = or the like",
                    "load its present values, in the dtype that it had in shard()",
                )

    def refuse_added(self):
        """Raises if the module has parameters to train that it did not have in shard()."""
        if not all(
            _names_of(part) == names and list(part._modules.values()) == parts
            for part, names, parts in self._members
        ):
            self._members, self._added = self._find_members(), list(self._find_added())
        for name, param in self._added:
            if param.requires_grad:
                raise RuntimeError(
                    f"parameter {name!r} was added to the module after shard(), so libfsdp does not train it: add it "
                    "before shard(), also if it is frozen later or in ignored_params, or call requires_grad_(False) on "
                    "it"
                )

    def _find_added(self):
        for path, part in self.owner.module.named_modules():
            for attribute, param in part._parameters.items():
                if param is not None and param not in self.places and (part, attribute) not in self._known:
                    yield (path + "." if path else "") + attribute, param

    def find_others(self):
        """(name, parameter) of those that the library does not have: ignored ones, and frozen ones that were added
        after shard(). Raises for one that has replaced a parameter of the model."""
        owned = {param: name for layer in self.owner.layers for name, param in layer.params}
        names = {place: name for param, name in owned.items() for place in self.places[param]}
        for path, part in self.owner.module.named_modules():
            for attribute, param in part._parameters.items():
                if param is not None and param not in owned:
                    if (part, attribute) in names:
                        self._refuse(names[part, attribute], *_REPLACED)
                    yield (path + "." if path else "") + attribute, param

    def _find_members(self):
        """[(module, the names of its parameters, its parts)], to see quickly that nothing was added."""
        return [(part, _names_of(part), list(part._modules.values())) for part in self.owner.module.modules()]

    def _refuse(self, name, what, does):
        ways = [] if self.owner.hides_weights else [f"call sharded.take_writes() on every rank to {does}"]
        ways += ["call sharded.drop_writes() to show the model's weights again"] if self.restores else []
        raise RuntimeError(
            f"parameter {name!r} {what}, but libfsdp owns its weights: {', or '.join(ways)}. Convert a module before "
            "shard(). After it, load values with module.load_state_dict()"
        )

    def follow_requires_grad(self):
        with torch._C.DisableTorchFunctionSubclass():  # skips __torch_function__ of hidden parameters
            changed = [
                (layer, index, *layer.params[index])
                for layer in self.owner.layers
                for index, trains in enumerate(layer.trains)
                if layer.params[index][1].requires_grad != trains
            ]
        for layer, index, name, param in changed:
            if param.requires_grad and not layer.can_train[index]:
                raise RuntimeError(
                    f"parameter {name!r} was frozen when the module was sharded, so it has no optimizer state: shard "
                    "it with requires_grad=True, and freeze it afterwards"
                )
            if self.owner.passes.reduced_passes:
                raise RuntimeError(
                    f"requires_grad of {name!r} has changed between a backward pass and its step: change it after "
                    "sharded.step()"
                )
            layer.group.set_param_trainable(index, param.requires_grad)
            layer.trains[index] = param.requires_grad

    # -- taken or dropped -------------------------------------------------------------------------------------

    def take(self):
        if self.owner.hides_weights:
            raise RuntimeError(
                "sharded.take_writes(): a write into copied weights ends when they are resharded; load values with "
                "module.load_state_dict()"
            )
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
                "sharded.drop_writes(): on this GPU the weights lie in place, so a write has replaced them. Keep it "
                "with sharded.take_writes(), or load weights with module.load_state_dict() or sharded.load()"
            )
        self._reset()
        self._restore()

    def _reset(self):
        """Gives the module its parameters back, as views of the library's memory."""
        for layer in self.owner.layers:
            for index, (_, param) in enumerate(layer.params):
                for part, attribute in self.places[param]:
                    part._parameters[attribute] = param
                if self.owner.hides_weights:
                    layer.versions[index] = param._version
                else:
                    layer.take_back(index)

    def _values(self, layer, index):
        """What the module has in the parameter's place, if the parameter was written into or replaced; else None."""
        param = layer.params[index][1]
        for part, attribute in self.places[param]:
            if (found := part._parameters.get(attribute)) is not param and found is not None:
                return found
        is_other = param.data_ptr() != layer.pointers[index]
        return param if is_other or param._version != layer.versions[index] else None


def _names_of(part):
    """Of its own parameters. A name such as bias may stand for None."""
    return {name for name, param in part._parameters.items() if param is not None}


def _find_places(module):
    """{parameter: [(module, attribute)]}"""
    places = {}
    for part in module.modules():
        for attribute, param in part._parameters.items():
            if param is not None:
                places.setdefault(param, []).append((part, attribute))
    return places
