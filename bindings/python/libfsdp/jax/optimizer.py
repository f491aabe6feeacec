# SPDX-License-Identifier: Apache-2.0
"""A transformation of optax over this rank's rows of each parameter. Weights, gradients and states are memory of the
library, which saves the states by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy

from ..constants import Dtype, MainStorage
from . import arrays, elementwise

_DTYPES = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16, "float16": Dtype.FLOAT16}
_INSTEAD = (
    "In place of optax.clip_by_global_norm, clip by the library, which knows the norm over all ranks: "
    "sharded.apply_grads(max_norm=). In place of optax.apply_if_finite, sharded.apply(skip_nonfinite=True) skips such "
    "a step on every rank"
)


@dataclasses.dataclass
class _Leaf:
    """A leaf of the optimizer's state: elements of a parameter's state, a single number, or of no elements."""

    name: str
    param: object
    dtype: object


class OptaxOptimizer:
    """Declares the states before the seal, and then steps."""

    def __init__(self, transformation, tree, frozen):
        if not (hasattr(transformation, "init") and hasattr(transformation, "update")):
            raise TypeError(
                f"libfsdp.jax.shard: optimizer is a {type(transformation).__name__!r}: give a transformation of optax, "
                "as optax.sgd(0.1), or libfsdp.Optimizer.ADAMW"
            )
        self.update_of, self.tree = transformation, tree
        self.shapes = {name: leaf.shape if name in tree.params else (0,) for name, leaf in tree.leaves.items()}
        self.frozen = frozen
        params = self._abstract(self.shapes)
        self.template = self._try(lambda: jax.eval_shape(transformation.init, params))
        self.leaves = self._classify()
        self._check(params)
        self._step = jax.jit(self._update_and_apply)

    def _abstract(self, shapes):
        made = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        return self.tree.build_pytree(made)

    def _try(self, function):
        try:
            return function()
        except Exception as error:
            raise TypeError(
                f"libfsdp.jax.shard: the optimizer fails with the parameters alone: {type(error).__name__}: {error}"
            ) from error

    def _update(self, grads, state, params):
        return self.update_of.update(grads, state, params)

    def _update_and_apply(self, grads, state, params):
        import optax

        updates, state = self._update(grads, state, params)
        return optax.apply_updates(params, updates), state

    # -- what it keeps ------------------------------------------------------------------------------------------

    def _classify(self):
        """The _Leaf of each leaf of the state. A state of a parameter has the parameter's path at its end."""
        suffixes = {path: name for name, path in self.tree.raw_paths.items()}
        return [
            self._leaf(path, leaf, suffixes) for path, leaf in jax.tree_util.tree_flatten_with_path(self.template)[0]
        ]

    def _leaf(self, path, leaf, suffixes):
        for length in range(len(path), -1, -1):
            name = suffixes.get(path[len(path) - length :])
            if name is not None and self.shapes[name] == leaf.shape:
                prefix = _text(path[: len(path) - length]) or "state"
                is_empty = name not in self.tree.params or name in self.frozen
                return _Leaf(prefix, None if is_empty else name, self._dtype(prefix, leaf))
        if leaf.shape:
            self._refuse(f"its state {_text(path)!r} has the shape {leaf.shape}, which is no parameter's")
        return _Leaf(_text(path), None, leaf.dtype)

    def _dtype(self, name, leaf):
        if str(leaf.dtype) not in _DTYPES:
            self._refuse(f"its state {name!r} is in {leaf.dtype}")
        return leaf.dtype

    def _check(self, params):
        owners = [name if name in self.tree.params else None for name in self.tree.paths]
        owners = [*owners, *(leaf.param for leaf in self.leaves), *owners]
        try:
            self._try_update(params, owners)
        except elementwise.NotElementwise as error:
            self._refuse(f"its {error}")
        others = {name: (shape[0] + 1, *shape[1:]) if shape else shape for name, shape in self.shapes.items()}
        other = self._abstract(others)
        some = (params, self.template, params), (other, jax.eval_shape(self.update_of.init, other), other)
        if not elementwise.same_for_other_shapes(self._update, *some):
            self._refuse("its update depends on the shapes of the parameters")

    def _try_update(self, params, owners):
        self._try(lambda: jax.eval_shape(self._update, params, self.template, params))
        elementwise.check(self._update, params, self.template, params, owners)

    def _refuse(self, reason):
        raise TypeError(
            "libfsdp.jax.shard: the optimizer needs whole parameters, but each rank has only some rows of them: "
            f"{reason}. Use transformations that update each element by itself, such as optax.sgd, optax.adamw or "
            f"optax.lion. {_INSTEAD}"
        )

    # -- before and after the seal ------------------------------------------------------------------------------

    def check_storage(self, options):
        if options.get("main_storage", MainStorage.FLOAT32) not in (0, MainStorage.FLOAT32):
            raise ValueError(
                "libfsdp.jax.shard: main_storage keeps no fp32 weights, which an optimizer of optax needs: it is for "
                "AdamW of the library"
            )

    def declare(self, model):
        for name, dtype in dict((leaf.name, leaf.dtype) for leaf in self.leaves if leaf.param is not None).items():
            model.add_optimizer_state(name, _DTYPES[str(dtype)])

    def attach(self, model):
        """Makes the first state. States begin as the transformation makes them, which need not be zeros."""
        self.shards = {shard.name: shard for shard in model.shards()}
        self.views = [
            self._rows(leaf.param, self.shards[leaf.param].state(leaf.name)) if leaf.param in self.shards else None
            for leaf in self.leaves
        ]
        params = self._tree_of({name: shard.main_weight for name, shard in self.shards.items()})
        made = jax.tree_util.tree_leaves(jax.block_until_ready(jax.jit(self.update_of.init)(params)))
        self.held = [None if view is not None else value for view, value in zip(self.views, made)]
        self._keep_states(made, ())

    def _rows(self, name, numbers):
        """This rank's numbers of a parameter, with as many dimensions as the parameter."""
        shape = self.shapes[name]
        return numbers.reshape((-1, *shape[1:]) if shape else ())

    def _tree_of(self, numbers):
        """A pytree of JAX arrays, with no elements where this rank has none. A scalar has one, which is not used."""
        values = {}
        for name, shape in self.shapes.items():
            if name in numbers:
                values[name] = jax.device_put(self._rows(name, numbers[name]))
            else:
                values[name] = jnp.zeros((0, *shape[1:]) if shape else (), jnp.float32)
        return self.tree.build_pytree(values)

    # -- step ---------------------------------------------------------------------------------------------------

    def step(self, untrained):
        """Changes weights and states inside the update window. Parameters that are not trained now keep theirs."""
        params = self._tree_of({name: shard.main_weight for name, shard in self.shards.items()})
        grads = self._tree_of({name: shard.main_grad for name, shard in self.shards.items()})
        state = [value if view is None else jax.device_put(view) for view, value in zip(self.views, self.held)]
        state = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(self.template), state)
        made, state = jax.block_until_ready(self._step(grads, state, params))
        del params, grads  # from here on their memory changes
        for name, leaf in zip(self.tree.paths, jax.tree_util.tree_leaves(made)):
            if name in self.shards and name not in untrained:
                self.shards[name].main_weight[:] = numpy.asarray(leaf).reshape(-1)
        self._keep_states(jax.tree_util.tree_leaves(state), untrained)

    def _keep_states(self, made, untrained):
        for at, (leaf, view, value) in enumerate(zip(self.leaves, self.views, made)):
            if view is None:
                self.held[at] = value
            elif leaf.param not in untrained:
                view[...] = numpy.asarray(value)

    # -- single numbers -----------------------------------------------------------------------------------------

    def numbers(self):
        """{name: number} of the state's leaves that belong to no parameter, such as the number of steps."""
        return {leaf.name: self.held[at] for at, leaf in self._singles()}

    def set_numbers(self, numbers):
        for at, leaf in self._singles():
            if leaf.name in numbers:
                self.held[at] = jnp.asarray(numbers[leaf.name], leaf.dtype)

    def _singles(self):
        return [
            (at, leaf)
            for at, (leaf, shape) in enumerate(zip(self.leaves, jax.tree_util.tree_leaves(self.template)))
            if leaf.param is None and shape.shape == ()
        ]

    def pack(self):
        return arrays.pack(self.numbers())

    def unpack(self, packed):
        return arrays.unpack(packed, self.numbers(), "sharded.load()", "number of the optimizer")


def _text(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")
