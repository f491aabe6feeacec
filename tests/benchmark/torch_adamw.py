#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fsdp_step_adamw beside torch.optim.AdamW: the same tensors, one thread each, in turns within one process.

usage: torch_adamw.py LIBFSDP.SO [--pairs N]

Exits with 77 (skipped) where torch is not importable. Prints the median time of a step for each optimizer and the median
of the pairwise ratios; ends with 1 if the weights differ by more than fp32 rounding allows.
"""
import argparse
import ctypes as c
import statistics
import sys
import time

try:
    import torch
except ImportError:
    print("torch is not importable: skipped")
    sys.exit(77)


class Param(c.Structure):
    _fields_ = [("struct_size", c.c_uint64), ("name", c.c_char_p), ("shape", c.POINTER(c.c_uint64)),
                ("dimension_count", c.c_uint32), ("dtype", c.c_int32), ("flags", c.c_uint32), ("granule", c.c_int32),
                ("granule_rows", c.c_uint64), ("lr_scale", c.c_double), ("user_data", c.c_void_p)]


class AdamWOptions(c.Structure):
    _fields_ = [("struct_size", c.c_uint64), ("beta1", c.c_double), ("beta2", c.c_double), ("epsilon", c.c_double),
                ("weight_decay", c.c_double), ("step", c.c_uint64), ("flags", c.c_uint32), ("reserved", c.c_uint32)]


FSDP_FLOAT32, FSDP_LAST, EVERY_RANK = 1, 1 << 18, -1
LR, DECAY = 1e-3, 0.1


def shapes(width, layers):
    """A GPT's parameters: a few matrices and many small vectors."""
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    small = [(width,)] * 7 + [(4 * width,)]
    return [(256, width)] + layers * (layer + small) + [(width,), (256, width)]


class Ours:
    """One rank of a world of one, through the C ABI."""

    def __init__(self, path, tensors):
        self.lib = c.CDLL(path)
        self.context, self.model, self.group = c.c_void_p(), c.c_void_p(), c.c_void_p()
        self.call("fsdp_create_local_contexts", c.c_uint32(1), None, c.byref(self.context))
        self.call("fsdp_create_model", self.context, None, c.byref(self.model))
        keep = [(c.c_uint64 * t.dim())(*t.shape) for t in tensors]
        params = (Param * len(tensors))(*[
            Param(c.sizeof(Param), f"p{i}".encode(), shape, len(shape), FSDP_FLOAT32, 0, 0, 0, 0.0, None)
            for i, shape in enumerate(keep)])
        self.call("fsdp_create_group", self.model, b"all", params, c.c_uint64(len(tensors)),
                  c.c_uint64(c.sizeof(Param)), None, c.byref(self.group))
        self.call("fsdp_seal_model", self.model)
        for i, t in enumerate(tensors):
            self.call("fsdp_load_param", self.group, c.c_uint64(i), c.c_void_p(t.data_ptr()), FSDP_FLOAT32,
                      c.c_uint64(t.numel()), EVERY_RANK, c.c_uint32(0))
        self.call("fsdp_publish_weights", self.model, None)
        self.options = AdamWOptions(c.sizeof(AdamWOptions), 0, 0, 0, DECAY, 0, 0, 0)

    def call(self, name, *arguments):
        status = getattr(self.lib, name)(*arguments)
        if status != 0:
            sys.exit(f"{name}: status {status}")

    def set_grads(self, grads):
        for i, g in enumerate(grads):
            self.call("fsdp_put_grad", self.group, c.c_uint64(i), c.c_void_p(g.data_ptr()), FSDP_FLOAT32,
                      c.c_uint64(g.numel()), c.c_uint32(0), None)
        self.call("fsdp_reduce_grad", self.group, c.c_uint32(FSDP_LAST), None)
        self.call("fsdp_finish_grads", self.model, c.c_double(1.0), c.c_uint32(0), None)

    def step(self):
        self.call("fsdp_step_adamw", self.model, c.c_double(LR), c.byref(self.options), None)

    def read(self, i, tensor):
        self.call("fsdp_read_param", self.group, c.c_uint64(i), c.c_void_p(tensor.data_ptr()), FSDP_FLOAT32,
                  c.c_uint64(tensor.numel()), EVERY_RANK, c.c_uint32(0))


def timed(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(path, width, layers, pairs):
    torch.manual_seed(0)
    initial = [torch.randn(shape) for shape in shapes(width, layers)]
    grads = [torch.randn_like(t) for t in initial]
    ours = Ours(path, initial)
    peers = {}
    for name, kind in (("torch", {}), ("torch foreach", {"foreach": True}), ("torch fused", {"fused": True})):
        weights = [t.clone().requires_grad_() for t in initial]
        for weight, grad in zip(weights, grads):
            weight.grad = grad.clone()
        peers[name] = (weights, torch.optim.AdamW(weights, lr=LR, weight_decay=DECAY, **kind))
    times = {name: [] for name in ["libfsdp", *peers]}
    for _ in range(pairs):
        ours.set_grads(grads)
        times["libfsdp"].append(timed(ours.step))
        for name, (weights, optimizer) in peers.items():
            for weight, grad in zip(weights, grads):
                weight.grad.copy_(grad)  # as ours were just written
            times[name].append(timed(optimizer.step))
    elements = sum(t.numel() for t in initial)
    print(f"width {width}, {layers} layers: {len(initial)} tensors, {elements / 1e6:.2f} M elements, {pairs} pairs")
    for name, taken in times.items():
        ratio = statistics.median(t / o for t, o in zip(taken[3:], times["libfsdp"][3:]))
        print(f"  {name:14} {statistics.median(taken[3:]) * 1e6:9.1f} us  {ratio:6.2f} x libfsdp")
    return check(ours, peers["torch"][0])


def check(ours, weights):
    """The largest relative difference of a tensor's weights, by norm."""
    worst = 0.0
    for i, weight in enumerate(weights):
        mine = torch.empty_like(weight)
        ours.read(i, mine)
        worst = max(worst, ((mine - weight).norm() / weight.norm()).item())
    print(f"  largest relative difference of a tensor: {worst:.1e}")
    return worst < 1e-5


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library")
    parser.add_argument("--pairs", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    good = [measure(arguments.library, width, layers, arguments.pairs)
            for width, layers in ((64, 24), (256, 6), (512, 12))]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
