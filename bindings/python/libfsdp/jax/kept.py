# SPDX-License-Identifier: Apache-2.0
"""The leaves that are no parameters: every rank has them whole, and checkpoints have them as bytes."""

import base64
import json

import jax
import jax.numpy as jnp
import numpy


class Kept:
    """{name: array} of the leaves. Keys of jax.random stay keys."""

    def __init__(self, tree):
        params = set(tree.params)
        self.tree, self.leaves = tree, {name: leaf for name, leaf in tree.leaves.items() if name not in params}

    def take(self, found, call):
        """Takes the leaves of {name: leaf}, which may be some of them; parameters among them are left out."""
        taken = {name: leaf for name, leaf in found.items() if name in self.leaves}
        if not taken:
            raise ValueError(f"{call}: the tree has none of the {len(self.leaves)} leaves that are kept")
        for name, leaf in taken.items():
            _check(f"{call}: leaf {name!r}", leaf, self.leaves[name])
        self.leaves.update(taken)

    def pack(self):
        rows = {}
        for name, leaf in self.leaves.items():
            data = _data(leaf)
            rows[name] = [str(leaf.dtype), data.dtype.name, data.shape, base64.b64encode(data.tobytes()).decode()]
        return json.dumps(rows).encode()

    def unpack(self, packed):
        """{name: leaf} of a checkpoint, if these are the leaves of this tree."""
        rows = json.loads(packed)
        if differ := sorted(set(rows) ^ set(self.leaves)):
            where = "the checkpoint has no" if differ[0] in self.leaves else "the tree that shard() was given has no"
            raise ValueError(f"sharded.load(): {where} kept leaf {differ[0]!r}")
        found = {}
        for name, (dtype, stored, shape, text) in rows.items():
            data = numpy.frombuffer(base64.b64decode(text), jnp.dtype(stored)).reshape(shape)
            found[name] = _like(self.leaves[name], data)
            _check(f"sharded.load(): leaf {name!r} of the checkpoint", found[name], self.leaves[name])
        return found


def _check(what, leaf, known):
    found, expected = (f"{each.dtype}{list(each.shape)}" for each in (jnp.asarray(leaf), known))
    if found != expected:
        raise ValueError(f"{what} is {found}, and shard() was given {expected}")


def _is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf):
    return numpy.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _like(leaf, data):
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else jnp.asarray(data)
