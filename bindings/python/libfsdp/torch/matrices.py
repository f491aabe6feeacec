# SPDX-License-Identifier: Apache-2.0
"""Finds the parameters of a module that Muon takes as matrices by default."""

from torch import nn
from torch.nn.modules.conv import _ConvNd

_NOT_HIDDEN = (nn.Embedding, nn.EmbeddingBag, _ConvNd)


def find_matrices(module, layers):
    """The set of trained parameters of two or more dimensions, without

    - those of nn.Embedding, nn.EmbeddingBag and convolutions, also if another module shares them;
    - outside of the layers: those of other modules than nn.Linear, such as a table of positions;
    - those of the output head (see find_head).
    """
    layers = [layer for layer in layers if layer is not module]
    inside = {part for layer in layers for part in layer.modules()}
    head, left_out, found = find_head(module, layers), set(), set()
    for part in module.modules():
        params = {param for param in part.parameters(recurse=False) if param.requires_grad and param.dim() >= 2}
        is_hidden = part in inside or isinstance(part, nn.Linear)
        is_taken = is_hidden and part is not head and not isinstance(part, _NOT_HIDDEN)
        (found if is_taken else left_out).update(params)
    return found - left_out


def find_head(module, layers):
    """The last registered module, embeddings aside, that has parameters of two or more dimensions. None if that module
    is in a layer that has other such parameters: then it belongs to the last layer of a module without a head."""
    last, own = None, set()
    for part in module.modules():
        params = _of_matrices(part, recurse=False)
        if params and not isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            last, own = part, params
    layer = next((layer for layer in layers if any(part is last for part in layer.modules())), None)
    return last if layer is None or _of_matrices(layer) <= own else None


def _of_matrices(part, recurse=True):
    return {param for param in part.parameters(recurse=recurse) if param.dim() >= 2}
