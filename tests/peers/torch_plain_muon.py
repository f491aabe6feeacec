# SPDX-License-Identifier: Apache-2.0
"""What the checks of libfsdp.torch.Muon train, and a plain Muon of whole matrices beside it."""

import copy

import torch
from torch import nn
from torch_check import AdamW

ADAMW_RATE, QKV = 0.01, [7, 4, 4]  # rows of q, k and v


class Block(nn.Module):
    """qkv has three matrices of two shapes, experts a stack of four, gate one."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(6), nn.Linear(6, 15)
        self.experts = nn.Parameter(torch.randn(4, 6, 15) / 4)
        self.gate = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        mixed = torch.einsum("eij,bj->bei", self.experts, torch.tanh(self.qkv(self.norm(x))))
        return x + (self.gate(x).softmax(-1)[..., None] * mixed).sum(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(11, 6), nn.Parameter(torch.randn(5, 6))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)

    def forward(self, tokens, is_rare=False):
        x = self.tokens(tokens) + self.places
        for layer in self.layers if is_rare else self.layers[:2]:
            x = layer(x)
        return self.head(self.norm(x))


BASE = Net()
MATRICES = {f"layers.{layer}.{name}" for layer in range(3) for name in ("qkv.weight", "experts", "gate.weight")}


def is_rare(step):
    return step % 3 == 2


def splits_of(name, param):
    return QKV if "qkv" in name else None


def loss_of(module, step, rank):
    tokens = torch.randint(11, (5,), generator=torch.Generator().manual_seed(100 * step + rank))
    return nn.functional.cross_entropy(module(tokens, is_rare(step)), tokens.roll(1))


def backward(module, context, step):
    loss_of(module, step, context.rank).backward()


class PlainMuon:
    """The formulas of torch.optim.Muon, matrix by matrix. cut(name, tensor) are the matrices of a parameter."""

    def __init__(self, params, lr, cut, momentum=0.95, nesterov=True, weight_decay=0.1, ratio=None, **iteration):
        self.params, self.lr, self.cut, self.iteration = params, lr, cut, iteration
        self.momentum, self.nesterov, self.decay = momentum, nesterov, weight_decay
        self.ratio = ratio or (lambda rows, columns: max(1, rows / columns) ** 0.5)
        self.buffers = {name: torch.zeros_like(param) for name, param in params.items()}

    @staticmethod
    def orthogonal(x, ns_steps=5, eps=1e-7, ns_coefficients=(3.4445, -4.775, 2.0315)):
        if x.size(0) > x.size(1):
            return PlainMuon.orthogonal(x.T, ns_steps, eps, ns_coefficients).T
        (a, b, c), x = ns_coefficients, x / x.norm().clamp(min=eps)
        for _ in range(ns_steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    @torch.no_grad()
    def step(self):
        for name, param in self.params.items():
            if param.grad is None:
                continue
            buffer = self.buffers[name]
            buffer.mul_(self.momentum).add_((1 - self.momentum) * param.grad)
            update = (1 - self.momentum) * param.grad + self.momentum * buffer if self.nesterov else buffer
            for weight, matrix in zip(self.cut(name, param), self.cut(name, update)):
                weight.mul_(1 - self.lr * self.decay)
                weight.sub_(self.lr * self.ratio(*matrix.shape) * self.orthogonal(matrix, **self.iteration))


def cut(name, tensor):
    if "qkv" in name:
        return tensor.split(QKV)
    return tensor.unbind(0) if tensor.dim() == 3 else [tensor]


class Alone:
    """Whole parameters, with the gradients that libfsdp has summed."""

    def __init__(self, make, matrices=MATRICES):
        self.module = copy.deepcopy(BASE)
        self.params = dict(self.module.named_parameters())
        self.muon = make({name: self.params[name] for name in self.params if name in matrices})
        self.adamw = AdamW([param for name, param in self.params.items() if name not in matrices], ADAMW_RATE)

    def take(self, sharded, step):
        """Collective. What no rank has a gradient for stays without one, as with torch."""
        for name, param in self.params.items():
            grad = sharded.read_grad(name).reshape(param.shape)
            param.grad = None if name.startswith("layers.2.") and not is_rare(step) else grad
        return self

    def step(self):
        self.muon.step()
        self.adamw.step()

    def differs(self, sharded, exact=()):
        """"" or the name of a parameter that differs from the sharded module's. Collective."""
        state, found = sharded.full_state_dict(), ""
        for name, param in self.params.items():
            close = torch.equal if name in exact else lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-5)
            if not found and not close(state[name], param.detach()):
                found = f"{name} differs by {(state[name] - param.detach()).abs().max():.1e}"
        return found
