# SPDX-License-Identifier: Apache-2.0
"""Main weights and optimizer states in fewer bits than fp32, as docs/contracts/numerics.md describes them: the two halves
of FSDP_MAIN_SPLIT16, the stochastic rounding of FSDP_MAIN_NONE, the codes of FSDP_OPTIMIZER_ADAMW_8BIT."""

import bisect
import struct
import zlib

MASK32, MASK64 = 2**32 - 1, 2**64 - 1
BLOCK = 256  # elements that share a scale
CODED_COUNT = 4096  # a parameter of fewer elements keeps fp32 states


def bits_of(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def float_of(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def f32(x):
    return float_of(bits_of(x))


def upper_half(x):
    """The compute weight of SPLIT16: rounded to nearest, ties away from zero. The rest has the bits that it lacks."""
    return float_of((bits_of(x) + 0x8000 & 0xFFFFFFFF) & 0xFFFF0000)


# -- stochastic rounding ------------------------------------------------------------------------------------------


def rotated(x, count):
    return (x << count | x >> 64 - count) & MASK64


def xxh64(data):
    """XXH64 with seed 0, of fewer than 32 bytes."""
    assert len(data) < 32
    one, two, three, four, five = (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
    value, at = (five + len(data)) & MASK64, 0
    while at + 8 <= len(data):
        lane = int.from_bytes(data[at : at + 8], "little")
        value ^= rotated(lane * two & MASK64, 31) * one & MASK64
        value, at = (rotated(value, 27) * one + four) & MASK64, at + 8
    if at + 4 <= len(data):
        value ^= int.from_bytes(data[at : at + 4], "little") * one & MASK64
        value, at = (rotated(value, 23) * two + three) & MASK64, at + 4
    for byte in data[at:]:
        value = rotated(value ^ byte * five & MASK64, 11) * one & MASK64
    value = (value ^ value >> 33) * two & MASK64
    value = (value ^ value >> 29) * three & MASK64
    return value ^ value >> 32


def philox(key, counter):
    """The four words of Philox 4x32-10."""
    (x0, x1, x2, x3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = b >> 32 ^ x1 ^ k0, b & MASK32, a >> 32 ^ x3 ^ k1, a & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return x0, x1, x2, x3


def random_halves(name, seed, step, count, first=0):
    """16 random bits for each of so many elements of a parameter."""
    key, low = (seed & MASK32, seed >> 32), xxh64(name.encode()) & MASK32
    words, group = (), None
    for element in range(first, first + count):
        if group != element // 8:
            group = element // 8
            words = philox(key, (group & MASK32, group >> 32, low, step & MASK32))
        yield words[element % 8 // 2] >> element % 2 * 16 & 0xFFFF


def round_one(x, random):
    """Rounds to bf16. A finite number stays finite."""
    bits = bits_of(x)
    moved = bits + random
    if moved & 0x7F800000 == 0x7F800000:
        moved = bits
    return float_of(moved & 0xFFFF0000)


def round_stochastic(values, name, seed, step, first=0):
    return [round_one(x, random) for x, random in zip(values, random_halves(name, seed, step, len(values), first))]


# -- states in 8 bits ---------------------------------------------------------------------------------------------


def dynamic_map(is_signed):
    """The 256 numbers of the codes: in each decade the middles of equal parts of [0.1, 1]."""
    numbers = [0.0, 1.0]
    for i in range(7):
        parts = 2**i if is_signed else 2 ** (i + 1)
        step = (1 - 0.1) / parts
        edges = [k * step + 0.1 for k in range(parts)] + [1.0]
        middles = [10.0 ** (i - 6) * ((low + high) / 2) for low, high in zip(edges, edges[1:])]
        numbers += middles + ([-x for x in middles] if is_signed else [])
    return [f32(x) for x in sorted(numbers)]


MAPS = {"exp_avg": dynamic_map(True), "exp_avg_sq": dynamic_map(False)}
MIDDLES = {name: [(x + y) / 2 for x, y in zip(values, values[1:])] for name, values in MAPS.items()}


def encode(values, name):
    """Codes and the scale of each block. The nearest code is taken, the lower of two; a positive second moment never
    gets code 0."""
    codes, scales = [], []
    for at in range(0, len(values), BLOCK):
        block = values[at : at + BLOCK]
        scale = max(f32(1e-12), *map(abs, block))
        scales.append(scale)
        for x in block:
            code = bisect.bisect_left(MIDDLES[name], f32(x / scale))
            codes.append(max(code, 1) if name == "exp_avg_sq" and x > 0 else code)
    return {"codes": codes, "scales": scales}


def decode(state, name):
    if not isinstance(state, dict):
        return state
    return [f32(MAPS[name][code] * state["scales"][i // BLOCK]) for i, code in enumerate(state["codes"])]


def zero_state(count, name, is_coded):
    if not is_coded:
        return [0.0] * count
    return {"codes": [MAPS[name].index(0.0)] * count, "scales": [0.0] * -(-count // BLOCK)}


# -- known answers ------------------------------------------------------------------------------------------------


def check():
    """The vectors that the specification gives."""
    assert philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    name, seed = "layers.0.attention.wq", 0x0123456789ABCDEF
    assert xxh64(name.encode()) & MASK32 == 0x3B86BA67
    assert list(random_halves(name, seed, 7, 4)) == [0xCC67, 0x6CF5, 0xD990, 0x5DA0]
    assert list(random_halves(name, seed, 7, 3, 13)) == [0x8A2E, 0x569D, 0xFE6F]
    assert list(random_halves(name, seed, 7, 2, 2**35 + 3)) == [0x0ABC, 0x81D7]
    assert bits_of(round_one(f32(3.4e38), 0xFFFF)) == 0x7F7F0000
    rounded = round_stochastic([1.001953125] * 65536, "bias", 42, 1)
    assert sum(x > 1.001 for x in rounded) == 16430
    for kind, wanted in (("exp_avg", 0xB66387BA), ("exp_avg_sq", 0x603F8C47)):
        assert zlib.crc32(struct.pack("<256f", *MAPS[kind])) == wanted
    assert upper_half(1.00390625) == float_of(0x3F810000) and upper_half(-1.00390625) == -upper_half(1.00390625)


check()
