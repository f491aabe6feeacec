# SPDX-License-Identifier: Apache-2.0
"""Whether a transformation of optax updates each element by itself: only then can it work on this rank's rows. Its
functions are traced by jax.make_jaxpr, and each operation on numbers of a parameter must be one of those below."""

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


def check(traced, owners, results):
    """Raises NotElementwise. owners has the name of the parameter whose numbers an argument has, or None, for each leaf
    of the arguments. results has (words for it, the only parameter whose numbers it may have) for each result."""
    for found, (words, owner) in zip(_walk(traced.jaxpr, owners), results, strict=True):
        if found not in (None, owner):
            raise NotElementwise(f"{words} has numbers of {found!r}")


def operations(traced, of_numbers=False):
    """The operations of a traced function with their constants and where each takes its arguments from; shapes are left
    out. They are equal where a function does the same with arrays of other shapes. of_numbers: only operations that
    make a single number, because JAX leaves out some of those that make arrays of no elements."""
    return _rows(traced.jaxpr, of_numbers), _constants(traced)


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
        return [_owner_of_branches(each) for each in zip(*results)]
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


def _owner_of_branches(owners):
    """The owner of a result that each branch of a condition makes."""
    found = sorted({owner for owner in owners if owner is not None})
    if len(found) > 1:
        raise NotElementwise(f"condition chooses numbers of {found[0]!r} or of {found[1]!r}")
    return found[0] if found else None


def _without_param(equation, is_array):
    """Whether results are arrays whose elements may differ. A single number that is repeated is none."""
    is_repeated = equation.primitive.name == "broadcast_in_dim" and not equation.invars[0].aval.shape
    is_array = is_array or not (is_repeated or equation.primitive.name in _ELEMENTWISE)
    return [_NO_PARAM if is_array and each.aval.shape else None for each in equation.outvars]


def _rows(jaxpr, of_numbers):
    """A row for each operation, and one for the results. A variable is known by its number."""
    numbers, rows = {}, []
    for variables, equation in [((*jaxpr.constvars, *jaxpr.invars), None), *((e.outvars, e) for e in jaxpr.eqns)]:
        chosen = [each for each in variables if not (of_numbers and each.aval.shape)]
        if equation is not None and (chosen or not of_numbers):
            sources = _sources(equation.invars, numbers)
            rows.append((equation.primitive.name, sources, _options(equation, of_numbers)))
        for each in chosen:
            numbers[each] = len(numbers)
    return [*rows, _sources(jaxpr.outvars, numbers)]


def _sources(variables, numbers):
    return [str(each.val) if hasattr(each, "val") else numbers.get(each) for each in variables]


def _options(equation, of_numbers):
    """The options of an operation on elements; of other operations the functions that they call, since options of these
    have shapes."""
    if equation.primitive.name in _ELEMENTWISE:
        return str(equation.params)
    found = []
    for value in equation.params.values():
        for each in value if isinstance(value, tuple) else (value,):
            inner = getattr(each, "jaxpr", each)
            found += [(_rows(inner, of_numbers), _constants(each))] if hasattr(inner, "eqns") else []
    return found


def _constants(traced):
    return [str(each) for each in getattr(traced, "consts", ()) if getattr(each, "ndim", 0) == 0]
