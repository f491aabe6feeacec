# SPDX-License-Identifier: Apache-2.0
"""A transformation of optax over this rank's rows of each parameter. Weights, gradients and states are memory of the
library, which saves the states by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy

from ..constants import Dtype, MainStorage, ValueOp
from ..shard import refuse_file
from . import arrays, elementwise

_DTYPES = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16, "float16": Dtype.FLOAT16}
_MAX_NAME = 63  # of the library
_INSTEAD = (
    "In place of optax.clip_by_global_norm, clip by the library, which knows the norm over all ranks: "
    "sharded.apply_grads(max_norm=). In place of optax.apply_if_finite, sharded.apply(skip_nonfinite=True) skips such "
    "a step on every rank"
)


@dataclasses.dataclass
class _Leaf:
    """A leaf of the optimizer's state. owner: the leaf of the tree whose state it is, or None for a single number.
    param: the owner, if the library keeps the state."""

    name: str
    owner: object
    param: object
    dtype: object

    def __str__(self):
        return f"state {self.name!r}" + (f" of {self.owner!r}" if self.owner is not None else "")


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
        self.frozen, self.checked = frozen, []
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
                return _Leaf(prefix, name, None if is_empty else name, self._dtype(prefix, leaf))
        if leaf.shape:
            self._refuse(f"its state {_text(path)!r} has the shape {leaf.shape}, which is no parameter's")
        return _Leaf(_text(path), None, None, leaf.dtype)

    def _dtype(self, name, leaf):
        if str(leaf.dtype) not in _DTYPES:
            self._refuse(f"its state {name!r} is in {leaf.dtype}")
        if (length := len(name.encode())) > _MAX_NAME:
            raise ValueError(
                f"libfsdp.jax.shard: the optimizer's state {name!r} has a name of {length} bytes, and {_MAX_NAME} is "
                "the limit: give shorter labels to optax.multi_transform, or shorter names to optax.named_chain"
            )
        return leaf.dtype

    def _check(self, params):
        """Looks at init and update of the whole parameters, and then of one row and of none of each."""
        self._try(lambda: jax.eval_shape(self._update, params, self.template, params))
        init, update = self._trace(self.shapes)
        names = [self._param(name) for name in self.tree.paths]
        states = [(str(leaf), self._param(leaf.owner)) for leaf in self.leaves]
        try:
            elementwise.check(init, names, states)
            updates = [(f"update of {name!r}", self._param(name)) for name in self.tree.paths]
            elementwise.check(update, [*names, *(owner for _, owner in states), *names], [*updates, *states])
        except elementwise.NotElementwise as error:
            self._refuse(f"its {error}")
        self.whole = init, update
        if not all(self.is_same_with_rows(dict.fromkeys(self.tree.params, rows)) for rows in (1, 0)):
            self.refuse_shapes()

    def _param(self, name):
        """The name of a parameter; None for a leaf that is kept, which has no elements here."""
        return name if name in self.tree.params else None

    def _trace(self, shapes):
        """(init, update), traced. Their results have the structures of the state, and of the updates and the state."""
        params = self._abstract(shapes)
        init, state = jax.make_jaxpr(self.update_of.init, return_shape=True)(params)
        update, made = jax.make_jaxpr(self._update, return_shape=True)(params, state, params)
        expected = [(shapes[leaf.owner] if leaf.owner is not None else ()) for leaf in self.leaves]
        structures = [jax.tree_util.tree_structure(each) for each in (self.template, (params, self.template))]
        if [jax.tree_util.tree_structure(each) for each in (state, made)] != structures:
            self.refuse_shapes("the trees that it makes are not those of the parameters and of its first state")
        if [leaf.shape for leaf in jax.tree_util.tree_leaves(state)] != expected:
            self.refuse_shapes()
        return init, update

    def is_same_with_rows(self, rows):
        """Whether init and update do the same where parameters have {name: number of rows}. What they do with no
        elements does not matter, but single numbers and the state's structure must stay."""
        some = {name: count or 1 for name, count in rows.items()}
        return self._is_same(some, False) and (some == rows or self._is_same(rows, True))

    def _is_same(self, rows, of_numbers):
        shapes = {name: (rows.get(name, 0), *shape[1:]) if shape else () for name, shape in self.shapes.items()}
        if (shapes, of_numbers) in self.checked:
            return True
        try:
            found = self._trace(shapes)
        except Exception:  # the whole parameters have raised none
            return False
        self.checked.append((shapes, of_numbers))
        made = [[elementwise.operations(each, of_numbers) for each in both] for both in (found, self.whole)]
        return made[0] == made[1]

    def refuse_shapes(self, reason="its state or its update depends on the shapes of the parameters"):
        self._refuse(reason)

    def _refuse(self, reason):
        raise TypeError(
            "libfsdp.jax.shard: the optimizer needs whole parameters, but each rank has only some rows of them: "
            f"{reason}. Use transformations that update each element by itself, such as optax.sgd, optax.adamw or "
            f"optax.lion. {_INSTEAD}"
        )

    # -- before and after the seal ------------------------------------------------------------------------------

    def check_storage(self, options):
        refuse_file(options, "libfsdp.jax.shard", "an optimizer of optax")
        if options.get("main_storage", MainStorage.FLOAT32) not in (0, MainStorage.FLOAT32):
            raise ValueError(
                "libfsdp.jax.shard: main_storage keeps no fp32 weights, which an optimizer of optax needs: it is for "
                "AdamW of the library"
            )

    def declare(self, model):
        for name, dtype in dict((leaf.name, leaf.dtype) for leaf in self.leaves if leaf.param is not None).items():
            model.add_optimizer_state(name, _DTYPES[str(dtype)])

    def attach(self, context, model):
        """Makes the first state. States begin as the transformation makes them, which need not be zeros. Raises on
        every rank where the rows of one are too few for the transformation."""
        self.shards = {shard.name: shard for shard in model.shards()}
        rows = dict.fromkeys(self.tree.params, 0)
        rows.update((name, len(numpy.atleast_1d(self._rows(name, x.main_weight)))) for name, x in self.shards.items())
        if context.all_reduce_values(float(not self.is_same_with_rows(rows)), ValueOp.MAX):
            self.refuse_shapes()
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
        made = {at: _number(leaf, numbers[leaf.name]) for at, leaf in self._singles() if leaf.name in numbers}
        for at, value in made.items():
            self.held[at] = value

    def _singles(self):
        return [
            (at, leaf)
            for at, (leaf, shape) in enumerate(zip(self.leaves, jax.tree_util.tree_leaves(self.template)))
            if leaf.owner is None and shape.shape == ()
        ]

    def pack(self):
        return arrays.pack(self.numbers())

    def unpack(self, packed):
        return arrays.unpack(packed, self.numbers(), "sharded.load()", "number of the optimizer")


def _number(leaf, value):
    if numpy.shape(value) != ():
        raise ValueError(
            f"sharded.set_numbers(): {leaf.name!r} is given with the shape {numpy.shape(value)}: give a single number"
        )
    return jnp.asarray(value, leaf.dtype)


def _text(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")
