# SPDX-License-Identifier: Apache-2.0
"""The tiny GPT that every framework's example trains: its shapes, its first weights, its text, and the comparison of
the sharded run with the framework alone. examples/README.md describes it."""

import sys

import numpy as np

import libfsdp as fsdp

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 2, 64, 2, 32, 256
BATCH, STEPS, LEARNING_RATE, WEIGHT_DECAY = 4, 5, 1e-3, 0.1
EPSILON = 1e-5  # of the norms
TEXT = (
    b"Each rank of a sharded job keeps a part of every weight, of every gradient and of the state of the optimizer. "
    b"Before a layer is used its weights are gathered, and after it they are given back. What the ranks' gradients "
    b"add up to goes to the one that keeps the part. So all ranks together need the memory of one copy."
)
BLOCK = {
    "norm1.weight": (WIDTH,),
    "norm1.bias": (WIDTH,),
    "qkv.weight": (3 * WIDTH, WIDTH),
    "proj.weight": (WIDTH, WIDTH),
    "norm2.weight": (WIDTH,),
    "norm2.bias": (WIDTH,),
    "up.weight": (4 * WIDTH, WIDTH),
    "up.bias": (4 * WIDTH,),
    "down.weight": (WIDTH, 4 * WIDTH),
    "down.bias": (WIDTH,),
}
SHAPES = {  # in this order they are numbered
    "tokens.weight": (VOCABULARY, WIDTH),
    "places.weight": (CONTEXT, WIDTH),
    **{f"blocks.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in BLOCK.items()},
    "norm.weight": (WIDTH,),
    "norm.bias": (WIDTH,),
    "head.weight": (VOCABULARY, WIDTH),
}
ONE_COPY = 16 * sum(int(np.prod(shape)) for shape in SHAPES.values())  # weight, gradient and two states, fp32
STATE = (fsdp.Role.COMPUTE, fsdp.Role.MAIN, fsdp.Role.GRAD, fsdp.Role.OPTIMIZER)


def make_weight(name):
    """Integers of 32 bits, then a division by a power of two: the same bits in every language."""
    number, shape = list(SHAPES).index(name), SHAPES[name]
    bits = np.arange(np.prod(shape), dtype=np.uint32) * np.uint32(2654435761) + np.uint32(40503 * number + 1)
    bits ^= bits >> np.uint32(16)
    bits *= np.uint32(2246822519)
    bits ^= bits >> np.uint32(13)
    values = ((bits & np.uint32(0xFFFF)).astype(np.float32) - 32768) / 2**19  # from -1/16 to 1/16
    is_gain = "norm" in name and name.endswith("weight")
    return (values + 1 if is_gain else values).reshape(shape)


def make_weights():
    return {name: make_weight(name) for name in SHAPES}


def read_batch(step, rank=0, world_size=1):
    """This rank's sequences of a step, and what follows each byte of them."""
    size = BATCH // world_size
    first = [11 * (step * BATCH + rank * size + b) for b in range(size)]
    rows = np.array([list(TEXT[start : start + CONTEXT + 1]) for start in first], dtype=np.int32)
    return rows[:, :-1], rows[:, 1:]


def read_rank_bytes(model):
    """Of each rank: its part of weights, gradients and optimizer states, and all memory."""
    ranks = range(model.context.world_size)
    return [(sum(model.role_bytes(role, rank) for role in STATE), model.role_bytes(rank=rank)) for rank in ranks]


def compare(framework, context, losses, alone, weights, weights_alone, rank_bytes):
    """Prints, on rank 0, the two runs beside each other; exits where they differ. losses: the ranks' means."""
    weights_differ = max(float(np.abs(np.asarray(weights[name]) - weights_alone[name]).max()) for name in SHAPES)
    if context.rank == 0:
        print(f"{framework}, {context.world_size} ranks")
        for step, pair in enumerate(zip(losses, alone), 1):
            print("step %d: loss %.7f, alone %.7f" % (step, *pair))
        print(f"weights differ by at most {weights_differ:.1e}")
        for rank, (state, total) in enumerate(rank_bytes):
            print(f"rank {rank}: state {state} bytes of {ONE_COPY}, {total} in all", flush=True)
    first, later = abs(losses[0] - alone[0]), max(abs(a - b) for a, b in zip(losses, alone))
    if not (first <= 1e-5 and later <= 1e-4 and weights_differ <= 1e-4):
        sys.exit(f"rank {context.rank}: the sharded run is not the one of {framework} alone")
