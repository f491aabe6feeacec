# SPDX-License-Identifier: Apache-2.0
"""MXFP8 as include/fsdp.h describes it, one number at a time: codes by search, scales by their definition."""

import bisect
import ctypes
import math


def value_of(code):
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


VALUES = [value_of(code) for code in range(0x7F)]


def code_of(x):
    """The nearest code; ties go to the even one."""
    sign, x = (0x80 if math.copysign(1, x) < 0 else 0), abs(x)
    above = bisect.bisect_left(VALUES, x)
    if above == len(VALUES):
        return sign | 0x7E
    if above == 0 or VALUES[above] == x:
        return sign | above
    up, down = VALUES[above] - x, x - VALUES[above - 1]
    return sign | (above if up < down or (up == down and above % 2 == 0) else above - 1)


def scale_of(amax):
    """The least power of two that is not below amax times the fp32 1/448, biased by 127; amax is 0 or a normal
    number."""
    product = ctypes.c_float(amax * ctypes.c_float(1 / 448).value).value
    if product == 0:
        return 0
    mantissa, exponent = math.frexp(product)
    return exponent + 126 + (mantissa != 0.5)


def planes(values, rows, columns, down):
    """Returns {number of the plane: its bytes}, and under "scales" a matrix in a GEMM's rows with its sizes. down:
    COLUMN."""
    blocks = {}
    block_at = lambda i: i // columns // 32 * columns + i % columns if down else i // 32
    for i, x in enumerate(values):
        blocks.setdefault(block_at(i), []).append(abs(x))
    scales = bytes(scale_of(max(blocks[block])) for block in sorted(blocks))
    codes = bytes(code_of(x * 2.0 ** (127 - scales[block_at(i)])) for i, x in enumerate(values))
    if down:
        outer = bytes(scales[r * columns + c] for c in range(columns) for r in range(rows // 32))
        return {3: codes, 4: scales, "scales": (outer, columns, rows // 32)}
    return {1: codes, 2: scales, "scales": (scales, rows, columns // 32)}


def swizzled(scales, outer, inner):
    across = -(-inner // 4)
    written = bytearray(-(-outer // 128) * across * 512)
    for r in range(outer):
        for c in range(inner):
            tile = r // 128 * across + c // 4
            written[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = scales[r * inner + c]
    return bytes(written)
