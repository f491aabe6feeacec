# SPDX-License-Identifier: Apache-2.0
"""Whether a transformation of optax updates each element by itself: only then can it work on this rank's rows. Its
update is traced by jax.make_jaxpr, and each operation on numbers of a parameter must be one of those below."""

import itertools

import jax

_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p "
    "cos cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt "
    "max min mul ne neg nextafter not or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor".split()
)
_NO_PARAM = "an array that belongs to no parameter"  # of random numbers, for example
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # where an operation keeps the function that it calls


class NotElementwise(Exception):
    """Says which operation needs more than the element itself."""


def check(update, grads, state, params, owners):
    """Raises NotElementwise. Arguments are trees of shapes; owners has the name of the parameter whose numbers the leaf
    has, or None, for each leaf of (grads, state, params)."""
    traced = jax.make_jaxpr(update)(grads, state, params)
    _walk(traced.jaxpr, owners)


def same_for_other_shapes(update, some, others):
    """Whether the update of two trees of shapes has the same operations and constants."""
    return _operations(jax.make_jaxpr(update)(*some)) == _operations(jax.make_jaxpr(update)(*others))


def _walk(jaxpr, owners):
    """The owners of what a traced function returns, for the owners of its arguments."""
    known = {each: _NO_PARAM if each.aval.shape else None for each in jaxpr.constvars}
    known.update(zip(jaxpr.invars, owners))
    for equation in jaxpr.eqns:
        inputs = [None if hasattr(each, "val") else known.get(each) for each in equation.invars]
        known.update(zip(equation.outvars, _owners_of_results(equation, inputs)))
    return [None if hasattr(each, "val") else known.get(each) for each in jaxpr.outvars]


def _owners_of_results(equation, inputs):
    found, name = {owner for owner in inputs if owner is not None}, equation.primitive.name
    if name == "cond" and inputs[0] is None:
        results = [_walk(branch.jaxpr, inputs[1:]) for branch in equation.params["branches"]]
        return [next((owner for owner in each if owner is not None), None) for each in zip(*results)]
    if called := next((equation.params[key] for key in _CALLS if key in equation.params), None):
        if name not in ("scan", "while"):
            return _walk(getattr(called, "jaxpr", called), inputs)
    if found <= {_NO_PARAM}:
        return _without_param(equation, bool(found))
    if len(found) > 1 and name in _ELEMENTWISE:
        first, second = sorted(found)[:2]
        raise NotElementwise(f"operation {name} works on numbers of {first!r} and of {second!r} at once")
    is_copy = name == "broadcast_in_dim" and equation.invars[0].aval.shape == equation.outvars[0].aval.shape
    if name not in _ELEMENTWISE and not is_copy:
        raise NotElementwise(f"operation {name} works on all numbers of {min(found)!r}")
    return itertools.repeat(found.pop())


def _without_param(equation, is_array):
    """Whether results are arrays whose elements may differ. A single number that is repeated is none."""
    is_repeated = equation.primitive.name == "broadcast_in_dim" and not equation.invars[0].aval.shape
    is_array = is_array or not (is_repeated or equation.primitive.name in _ELEMENTWISE)
    return [_NO_PARAM if is_array and each.aval.shape else None for each in equation.outvars]


def _operations(traced):
    """Names of operations, and the constants that they are given."""
    found = [str(each) for each in traced.consts if getattr(each, "ndim", 0) == 0]
    pending = [traced.jaxpr]
    while pending:
        for equation in pending.pop().eqns:
            found.append((equation.primitive.name, [str(each.val) for each in equation.invars if hasattr(each, "val")]))
            for value in equation.params.values():
                for each in value if isinstance(value, tuple) else (value,):
                    inner = getattr(each, "jaxpr", each)
                    pending += [inner] if hasattr(inner, "eqns") else []
    return found
