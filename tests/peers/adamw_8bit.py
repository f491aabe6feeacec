#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""FSDP_OPTIMIZER_ADAMW_8BIT beside the 8-bit AdamW of torchao and of bitsandbytes: how far each trains from fp32 AdamW.

usage: FSDP_LIBRARY=BUILD/lib/libfsdp.so PYTHONPATH=bindings/python adamw_8bit.py [--steps N] [WORD...]

WORD: only problems whose name has it. All begin with the same fp32 weights, a matrix and a vector, on the host. Two
problems are gradients from a seed: noise, and spread, where gradients of a block differ by orders of magnitude. The
gradients of the third, a regression, depend on the weights.

A row has the distance of the last weights from those of libfsdp's fp32 AdamW: of the weights' length, of the length of
the way from the first weights, and the largest difference in learning rates. It also has the number of codes of the
first and of the second moments that differ from libfsdp's after the first step (in brackets: where a second moment's
code is 0), the bytes of the states, and the loss.

Then each problem is trained on more ranks; torchao has the shards that FSDP2 would give it. The run fails if libfsdp's
weights do not have the same bits on 1, 2 and 3 ranks.

Needs numpy. torch, torchao and bitsandbytes are left out, with the reason, if they are not installed. torchao compiles
its step, which takes a minute. By hand; results: docs/testing.md and docs/guides/optimizer-memory.md.
"""

import argparse
import importlib
import sys

import numpy as np

import libfsdp as fsdp

RATE, DECAY = 1e-3, 0.1
SHAPES = {"matrix": (512, 512), "vector": (4096,)}
MOMENTS = ("exp_avg", "exp_avg_sq")


def normal(seed):
    """Numbers of a normal distribution for each weight."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def first_weights(seed=0):
    return {name: numbers / 16 for name, numbers in normal(seed).items()}


class Noise:
    """Gradients from a seed. Each element has a mean, noise as large as that, and a size (lognormal)."""

    loss = None

    def __init__(self, spread):
        self.start, self.mean = first_weights(), normal(1)
        self.sizes = {name: np.exp(spread * numbers) for name, numbers in normal(2).items()}

    def grads(self, step, weights):
        return {name: self.sizes[name] * (self.mean[name] + noise) for name, noise in normal((3, step)).items()}


class Regression:
    """Two layers, with the vector as a matrix of 8 rows: they learn what other two such layers answer."""

    def __init__(self):
        self.start = first_weights()
        self.x = normal(4)["matrix"][:256]
        self.y = self.answer(first_weights(5))[1]

    def answer(self, weights):
        hidden = np.tanh(self.x @ weights["matrix"].T)
        return hidden, hidden @ weights["vector"].reshape(8, 512).T

    def loss(self, weights):
        return float(np.square(self.answer(weights)[1] - self.y).mean())

    def grads(self, step, weights):
        hidden, answer = self.answer(weights)
        error = 2 / answer.size * (answer - self.y)
        into_hidden = error @ weights["vector"].reshape(8, 512) * (1 - hidden * hidden)
        return {"matrix": into_hidden.T @ self.x, "vector": (error.T @ hidden).reshape(-1)}


PROBLEMS = {"noise": lambda: Noise(0), "spread": lambda: Noise(1.5), "regression": Regression}


class Ours:
    """libfsdp's AdamW. Rank 0 gives all gradients, so that their sum has the same bits on any number of ranks."""

    def __init__(self, context, start, optimizer):
        self.rank, self.model = context.rank, context.create_model(optimizer=optimizer, grad_op=fsdp.GradOp.SUM)
        self.group = self.model.create_group("all", [fsdp.Param(name, w.shape) for name, w in start.items()])
        self.model.seal()
        for name, weight in start.items():
            self.group.load_param(name, weight)
        self.model.publish_weights()

    def weights(self):
        return {name: np.array(self.group.read_param(name)).reshape(shape) for name, shape in SHAPES.items()}

    def step(self, grads):
        given = [None if self.rank else np.ascontiguousarray(grad) for grad in grads.values()]
        self.model.apply_grads(given, RATE, weight_decay=DECAY)

    def codes(self):
        shards = self.model.shards()
        found = {moment: np.concatenate([np.array(shard.state(moment)) for shard in shards]) for moment in MOMENTS}
        return found if found["exp_avg"].dtype == np.uint8 else None

    def state_bytes(self):
        return self.model.role_bytes(fsdp.Role.OPTIMIZER)


class Theirs:
    """An optimizer of torch's kind. With shards, each rank's rows are parameters, as they are for FSDP2."""

    def __init__(self, start, make, codes_of, shards=1):
        import torch

        self.torch, self.codes_of = torch, codes_of
        parts = {name: torch.from_numpy(w.copy()).chunk(shards) for name, w in start.items()}
        self.params = {name: [torch.nn.Parameter(part.clone()) for part in of] for name, of in parts.items()}
        self.each = [param for of in self.params.values() for param in of]
        self.optimizer = make(self.each, lr=RATE, weight_decay=DECAY)

    def weights(self):
        return {name: np.concatenate([part.detach().numpy().copy() for part in of]) for name, of in self.params.items()}

    def step(self, grads):
        for name, of in self.params.items():
            for param, grad in zip(of, self.torch.from_numpy(grads[name]).chunk(len(of))):
                param.grad = grad.contiguous()
        self.optimizer.step()

    def codes(self):
        """None where a parameter has fp32 moments, as small ones have."""
        states = [self.optimizer.state[param] for param in self.each]
        found = {moment: [self.codes_of(state, moment) for state in states] for moment in MOMENTS}
        if all(codes.dtype == self.torch.uint8 for of in found.values() for codes in of):
            return {moment: np.concatenate([codes.numpy().reshape(-1) for codes in of]) for moment, of in found.items()}

    def state_bytes(self):
        """Of codes, scales and fp32 moments; the numbers of the codes, which bitsandbytes keeps once, are left out."""
        states = [item for state in self.optimizer.state.values() for item in state.items()]
        kept = [value for name, value in states if name != "step" and not name.startswith("qmap")]
        parts = [[value.codes, value.scale] if hasattr(value, "codes") else [value] for value in kept]
        return sum(part.nbytes for of in parts for part in of)


def codes_of_torch(state, moment):
    return getattr(state[moment], "codes", state[moment])


def codes_of_bitsandbytes(state, moment):
    return state["state1" if moment == "exp_avg" else "state2"]


PEERS = {
    "torch, fp32": ("torch.optim", "AdamW", codes_of_torch),
    "torchao, 8-bit": ("torchao.optim", "AdamW8bit", codes_of_torch),
    "bitsandbytes, 8-bit": ("bitsandbytes.optim", "AdamW8bit", codes_of_bitsandbytes),
}


def find_peers():
    """{name: (function that makes the optimizer, function that finds its codes)}, of those that are installed."""
    found = {}
    for name, (module, call, codes_of) in PEERS.items():
        try:
            found[name] = getattr(importlib.import_module(module), call), codes_of
        except Exception as error:
            print(f"{name} is left out: {type(error).__name__}: {error}")
    return found


def vector_of(weights):
    return np.concatenate([weight.reshape(-1) for weight in weights.values()]).astype(np.float64)


class Trained:
    """What a run gave: the last weights, the codes after the first step, bytes of states, and the loss."""

    def __init__(self, peer, problem, steps):
        for step in range(steps):
            peer.step(problem.grads(step, peer.weights()))
            if step == 0:
                self.codes = peer.codes()
        self.weights, self.bytes = peer.weights(), peer.state_bytes()
        self.loss = problem.loss and problem.loss(self.weights)

    def vector(self):
        return vector_of(self.weights)


def train_ours(problem, steps, optimizer, ranks=1):
    def train(context):
        return Trained(Ours(context, problem.start, optimizer), problem, steps)

    return fsdp.run_local(ranks, train)[0]


def count_others(trained, ours):
    """Codes of the first and of the second moments that differ; those of the second that are 0 are told apart."""
    if not trained.codes:
        return "-"
    first, second = (np.flatnonzero(trained.codes[moment] != ours.codes[moment]) for moment in MOMENTS)
    zeros = np.count_nonzero(trained.codes["exp_avg_sq"][second] == 0)
    return f"{len(first)}, {len(second)} ({zeros})"


def tell_row(*columns):
    print("{:20} {:>10} {:>10} {:>11} {:>22} {:>9} {:>9}".format(*columns), flush=True)


def tell(name, trained, reference, ours, start):
    far, end = trained.vector() - reference.vector(), reference.vector()
    of_weights, of_way = (f"{np.linalg.norm(far) / np.linalg.norm(length):.1e}" for length in (end, end - start))
    loss = "-" if trained.loss is None else f"{trained.loss:.3e}"
    most, codes = f"{np.abs(far).max() / RATE:,.3f}", count_others(trained, ours)
    tell_row(name, of_weights, of_way, most, codes, f"{trained.bytes:,}", loss)


def train_all(problem, peers, steps):
    """{name: Trained}, of libfsdp and of the peers, each on one rank."""
    found = {
        "libfsdp, fp32": train_ours(problem, steps, fsdp.Optimizer.ADAMW),
        "libfsdp, 8-bit": train_ours(problem, steps, fsdp.Optimizer.ADAMW_8BIT),
    }
    for name, peer in peers.items():
        found[name] = Trained(Theirs(problem.start, *peer), problem, steps)
    return found


def compare(name, problem, peers, steps):
    """One table. Returns whether libfsdp's weights have the same bits on 1, 2 and 3 ranks."""
    found = train_all(problem, peers, steps)
    print(f"\n{name}, {steps} steps" + (f" from a loss of {problem.loss(problem.start):.3f}" if problem.loss else ""))
    tell_row("from libfsdp, fp32", "of weights", "of the way", "most", "other codes", "bytes", "loss")
    for peer, trained in found.items():
        tell(peer, trained, found["libfsdp, fp32"], found["libfsdp, 8-bit"], vector_of(problem.start))
    if "torchao, 8-bit" in peers:
        sharded = Trained(Theirs(problem.start, *peers["torchao, 8-bit"], shards=2), problem, steps)
        tell_sharded(sharded, found["torchao, 8-bit"])
    return is_same_on_more_ranks(problem, steps, found["libfsdp, 8-bit"])


def tell_sharded(sharded, whole):
    for name, weight in sharded.weights.items():
        count = np.count_nonzero(weight != whole.weights[name])
        print(f"torchao, 8-bit: {count} of {weight.size} weights of the {name} differ with the shards of 2 ranks")


def is_same_on_more_ranks(problem, steps, ours):
    counts = []
    for ranks in (2, 3):
        more = train_ours(problem, steps, fsdp.Optimizer.ADAMW_8BIT, ranks)
        counts.append(np.count_nonzero(more.vector() != ours.vector()))
        print(f"libfsdp, 8-bit: {counts[-1]} of {len(more.vector())} weights differ on {ranks} ranks")
    return not any(counts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    peers = find_peers()
    chosen = [name for name in PROBLEMS if not options.words or any(word in name for word in options.words)]
    return 0 if all([compare(name, PROBLEMS[name](), peers, options.steps) for name in chosen]) else 1


if __name__ == "__main__":
    sys.exit(main())
