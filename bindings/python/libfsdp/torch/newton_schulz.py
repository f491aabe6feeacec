# SPDX-License-Identifier: Apache-2.0
"""The Newton-Schulz iteration of torch.optim.Muon, on several matrices at once, and its adjusted learning rates."""

import math

import torch

ADJUSTMENTS = (None, "original", "match_rms_adamw", "spectral_unclamped")


_ALIGNMENT = 64  # bytes


def orthogonalize(matrices, coefficients, steps, eps):
    """Replaces each of some matrices [count, rows, columns] by about U V^T, where U S V^T is its singular value
    decomposition. All arithmetic is in the dtype of the matrices. On a CPU the bits of a matrix do not depend on how
    many others come with it."""
    a, b, c = coefficients
    wide = matrices.mT if matrices.size(1) > matrices.size(2) else matrices
    rows, columns = wide.shape[1:]
    x, room = (_make_room(wide, columns) for _ in range(2))
    gram, update = (_make_room(wide, rows) for _ in range(2))
    torch.div(wide, _norms(matrices).clamp(min=eps), out=x)
    for _ in range(steps):
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=update)
        torch.baddbmm(x, update, x, beta=a, out=room)
        x, room = room, x
    wide.copy_(x)


def _make_room(wide, columns):
    """As many matrices of as many rows. Each begins at a multiple of 64 bytes, so that products treat all alike."""
    count, rows, unit = wide.size(0), wide.size(1), _ALIGNMENT // wide.element_size()
    stride = -(-rows * columns // unit) * unit
    return torch.empty_strided((count, rows, columns), (stride, columns, 1), dtype=wide.dtype, device=wide.device)


def _norms(matrices):
    """The Frobenius norms, each computed by itself."""
    return torch.stack(torch._foreach_norm(matrices.unbind(0))).view(-1, 1, 1)


def lr_ratio(name, rows, columns):
    """By what an update of a matrix is multiplied besides the learning rate (adjust_lr_fn of torch.optim.Muon)."""
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if name == "spectral_unclamped":
        return math.sqrt(rows / columns)
    return math.sqrt(max(1, rows / columns))
