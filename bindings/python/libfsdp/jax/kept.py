# SPDX-License-Identifier: Apache-2.0
"""The leaves that are no parameters: every rank has them whole, and checkpoints have them as bytes."""

from . import arrays


class Kept:
    """{name: array} of the leaves. Keys of jax.random stay keys."""

    def __init__(self, tree):
        params = set(tree.params)
        self.leaves = {name: leaf for name, leaf in tree.leaves.items() if name not in params}

    def take(self, found, call):
        """Takes the leaves of {name: leaf}, which may be some of them; parameters among them are left out."""
        taken = {name: leaf for name, leaf in found.items() if name in self.leaves}
        if not taken:
            raise ValueError(f"{call}: the tree has none of the {len(self.leaves)} leaves that are kept")
        for name, leaf in taken.items():
            arrays.check(f"{call}: leaf {name!r}", leaf, self.leaves[name])
        self.leaves.update(taken)

    def pack(self):
        return arrays.pack(self.leaves)

    def unpack(self, packed):
        """{name: leaf} of a checkpoint, if these are the leaves of this tree."""
        return arrays.unpack(packed, self.leaves, "sharded.load()", "kept leaf")
