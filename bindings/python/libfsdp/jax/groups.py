# SPDX-License-Identifier: Apache-2.0
"""Which parameters of a tree form a group of the library."""

import collections
import re

ROOT = "root"


def find_groups(tree, layers):
    """{name of the group: names of its parameters}, in the order of the leaves."""
    if layers is None:
        choose = _Default(tree)
    else:
        choose = layers if callable(layers) else _Pattern(layers)
    groups = collections.defaultdict(list)
    for name in tree.params:
        groups[_checked(choose(name), name)].append(name)
    if layers is not None and list(groups) == [ROOT]:
        raise ValueError(
            f"libfsdp.jax.shard: layers names no group for any of the {len(tree.params)} parameters: the first one is "
            f"{tree.params[0]!r}, and a regular expression must match from its beginning"
        )
    return dict(groups)


def rule_of(rule, option):
    """rule(name, leaf) of a predicate or of a regular expression that is searched for in names."""
    if callable(rule):
        return rule
    if not isinstance(rule, (str, re.Pattern)):
        raise TypeError(f"libfsdp.jax.shard: {option} is {rule!r}: give a function or a regular expression")
    return lambda name, leaf: re.search(rule, name) is not None


def _checked(group, name):
    if group is not None and not isinstance(group, str):
        raise TypeError(f"libfsdp.jax.shard: layers({name!r}) is {group!r}: the name of a group, or None, is expected")
    return group or ROOT


class _Pattern:
    def __init__(self, pattern):
        self.pattern = re.compile(pattern)

    def __call__(self, name):
        found = self.pattern.match(name)
        return found and found[0]


class _Default:
    """Children of the tree's root, or of 'params'. Subtrees whose names differ only in a number at the end, as those of
    repeated blocks, are a group each; the outermost of them count."""

    def __init__(self, tree):
        self.paths, self.first = tree.paths, 1 if tree.has_collections else 0
        alike = collections.defaultdict(set)  # {place and name without the number: the names}
        for name in tree.params:
            for at, key in enumerate(self.paths[name][:-1]):
                alike[self._kind(name, at)].add(key)
        self.repeated = {kind for kind, keys in alike.items() if kind[1] != "" and len(keys) > 1}

    def _kind(self, name, at):
        path = self.paths[name]
        stem = re.sub(r"\d+$", "#", path[at])
        return path[:at], stem if stem.endswith("#") else ""

    def __call__(self, name):
        path = self.paths[name]
        for at in range(self.first, len(path) - 1):
            if self._kind(name, at) in self.repeated:
                return "/".join(path[: at + 1])
        return "/".join(path[: self.first + 1]) if len(path) > self.first + 1 else None
