# SPDX-License-Identifier: Apache-2.0
"""Arrays of JAX as bytes in a checkpoint."""

import base64
import json

import jax
import jax.numpy as jnp
import numpy


def pack(arrays):
    """The bytes of {name: array}. Keys of jax.random are their data."""
    rows = {}
    for name, leaf in arrays.items():
        data = numpy.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        rows[name] = [data.dtype.name, data.shape, base64.b64encode(data.tobytes()).decode()]
    return json.dumps(rows).encode()


def unpack(packed, known, call, what):
    """The {name: array} of bytes, if names, shapes and dtypes are those of known. what names an array in errors."""
    rows = json.loads(packed)
    if differ := sorted(set(rows) ^ set(known)):
        where = "the checkpoint has" if differ[0] in known else "the tree that shard() was given has"
        raise ValueError(f"{call}: {where} no {what} {differ[0]!r}")
    found = {}
    for name, (dtype, shape, text) in rows.items():
        data = numpy.frombuffer(base64.b64decode(text), jnp.dtype(dtype)).reshape(shape)
        found[name] = _like(known[name], data)
        check(f"{call}: {what} {name!r} of the checkpoint", found[name], known[name])
    return found


def check(what, leaf, known):
    """Raises where shape or dtype differ."""
    leaf = leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf)
    found, expected = (f"{each.dtype}{list(each.shape)}" for each in (leaf, known))
    if found != expected:
        raise ValueError(f"{what} is {found}, where {expected} is expected")


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(leaf, data):
    if isinstance(leaf, (numpy.ndarray, numpy.generic)):
        return data.copy()
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf)) if is_key(leaf) else jnp.asarray(data)
