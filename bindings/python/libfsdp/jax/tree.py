# SPDX-License-Identifier: Apache-2.0
"""The tree that shard() is given: the names of its leaves, which of them are parameters, and trees of its structure."""

import sys
from collections.abc import Mapping

import jax
import jax.numpy as jnp

_TRAINABLE = ("float32", "bfloat16", "float16")


class Tree:
    """A pytree, or an nnx module, whose leaves are known by the names of their paths."""

    def __init__(self, given):
        self._graph, tree = _split(given)
        self._variables = _nnx_variables(tree)
        flat, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        names = [self._name(path) for path, _ in flat]
        self.paths = {name: self._keys(path) for name, (path, _) in zip(names, flat)}
        self.raw_paths = {name: path for name, (path, _) in zip(names, flat)}  # as JAX has them
        if len(self.paths) < len(flat):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"libfsdp.jax.shard: two leaves have the name {twice!r}: rename a key of the tree")
        self.leaves = {name: _as_array(name, leaf) for name, (_, leaf) in zip(names, flat)}
        # The variables of flax are {'params': ..., 'batch_stats': ...}.
        self.has_collections = self._variables is None and isinstance(given, Mapping) and "params" in given
        self.params = [name for name in names if self._is_param(name)]
        if not self.params:
            raise ValueError(f"libfsdp.jax.shard: none of the tree's {len(names)} leaves is a parameter in float32")

    def _keys(self, path):
        """In State of nnx the nodes are variables, whose values have the key "value"; the name ends before it."""
        keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
        return tuple(keys[:-1] if self._variables is not None and keys[-1] == "value" else keys)

    def _name(self, path):
        return "/".join(self._keys(path))

    def _is_param(self, name):
        dtype = self.leaves[name].dtype
        if not jnp.issubdtype(dtype, jnp.inexact):
            return False
        if self._variables is not None and not _is_nnx_param(self._variables.get(name)):
            return False
        if self.has_collections and self.paths[name][0] != "params":
            return False
        if str(dtype) not in _TRAINABLE:
            raise ValueError(
                f"libfsdp.jax.shard: parameter {name!r} is in {dtype}: convert it to {', '.join(_TRAINABLE[:2])} or "
                f"{_TRAINABLE[2]}, for example by jax.tree.map(lambda leaf: leaf.astype('float32'), params)"
            )
        return True

    def build(self, values):
        """The tree, or the nnx module, with {name: leaf}. A leaf that has no value is None."""
        tree = self.build_pytree(values)
        return tree if self._graph is None else sys.modules["flax.nnx"].merge(self._graph, tree)

    def build_pytree(self, values):
        """As build(), but of an nnx module it is the State."""
        return jax.tree_util.tree_unflatten(self._structure, [values.get(name) for name in self.paths])

    def build_layer(self, layer, names, values):
        """The subtree that the layer is named after, with {name: leaf}. For other layers it is the whole tree. Leaves
        that have no value are None."""
        part = self.build_pytree(values)
        for key in self.raw_paths[names[0]][: len(self.place(layer, names))]:
            part = getattr(part, key.name) if hasattr(key, "name") else part[_index(key)]
        return part

    def place(self, layer, names):
        """The path of the subtree that has all of the layer's leaves; () is the whole tree."""
        place = tuple(layer.split("/"))
        depth, paths = len(place), [self.paths[name] for name in names]
        return place if all(len(path) > depth and path[:depth] == place for path in paths) else ()

    def read(self, tree, call, place=()):
        """{name: leaf} of a tree, or of an nnx module, with all leaves of this tree or with some. place is the path of
        the subtree that it is."""
        flat, _ = jax.tree_util.tree_flatten_with_path(_split(tree)[1])
        found = {"/".join((*place, self._name(path))): leaf for path, leaf in flat}
        of_params = {f"params/{name}": leaf for name, leaf in found.items()}
        if self.has_collections and all(name in self.paths for name in of_params):  # variables["params"] alone
            return of_params
        if unknown := next((name for name in found if name not in self.paths), None):
            raise KeyError(
                f"{call}: the tree has a leaf {unknown!r}, but the tree that shard() was given has none of that name; "
                f"its first one is {next(iter(self.paths))!r}"
            )
        return found


def _index(key):
    """The key of a dict, or the index of a sequence."""
    return key.key if hasattr(key, "key") else key.idx


def _nnx():
    """flax.nnx, if the program has imported it."""
    return sys.modules.get("flax.nnx")


def _split(tree):
    """(what nnx.merge() needs, None for a pytree; the pytree)"""
    nnx = _nnx()
    return nnx.split(tree) if nnx and isinstance(tree, nnx.Module) else (None, tree)


def _nnx_variables(tree):
    """{name: variable} of a State of nnx; None for another pytree."""
    nnx = _nnx()
    if not nnx or not isinstance(tree, nnx.State):
        return None
    return {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(tree)}


def _is_nnx_param(variable):
    """A State without variables, as of nnx.to_pure_dict(), has parameters alone."""
    return not isinstance(variable, _nnx().Variable) or isinstance(variable, _nnx().Param)


def _as_array(name, leaf):
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError(f"libfsdp.jax.shard: leaf {name!r} is a jax.ShapeDtypeStruct, which has no values: give arrays")
    if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
        raise TypeError(
            f"libfsdp.jax.shard: leaf {name!r} is a {type(leaf).__name__}, and an array is expected: give the tree of "
            "arrays alone, for example the first result of equinox.partition(model, equinox.is_array)"
        )
    return leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
