#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Computes the logits of load_hf by itself, in doubles, from the folder that make_folder.py wrote, and compares.

usage: check.py DIR LOGITS TOKEN...      LOGITS: what load_hf printed
"""
import json
import math
import struct
import sys
from pathlib import Path


def read_folder(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        length = struct.unpack_from("<Q", data)[0]
        for name, one in json.loads(data[8:8 + length]).items():
            if name == "__metadata__" or one["dtype"] == "U8":
                continue
            begin, end = (8 + length + at for at in one["data_offsets"])
            raw = data[begin:end]
            if one["dtype"] == "BF16":
                raw = b"".join(b"\0\0" + raw[i:i + 2] for i in range(0, len(raw), 2))
            flat = struct.unpack(f"<{len(raw) // 4}f", raw)
            columns = one["shape"][-1]
            tensors[name] = flat if len(one["shape"]) == 1 else [flat[i:i + columns] for i in range(0, len(flat), columns)]
    return tensors


def normalize(x, weight, bias):
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return [(v - mean) / math.sqrt(variance + 1e-5) * w + b for v, w, b in zip(x, weight, bias)]


def multiply(x, weight, bias):  # weight as GPT-2 has it: [in, out]
    return [b + sum(v * row[out] for v, row in zip(x, weight)) for out, b in enumerate(bias)]


def attend(qkv, at, heads):
    width = len(qkv[0]) // 3
    size = width // heads
    result = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        query = qkv[at][:width][part]
        scores = [math.exp(sum(q * k for q, k in zip(query, qkv[t][width:2 * width][part])) / math.sqrt(size)) for t in range(at + 1)]
        result += [sum(s * qkv[t][2 * width:][part][i] for t, s in enumerate(scores)) / sum(scores) for i in range(size)]
    return result


def gelu(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def add(x, y):
    return [a + b for a, b in zip(x, y)]


def find_logits(w, config, tokens):
    x = [add(w["wte.weight"][token], w["wpe.weight"][t]) for t, token in enumerate(tokens)]
    for layer in range(config["n_layer"]):
        def of(name):
            return w[f"h.{layer}.{name}"]
        qkv = [multiply(normalize(v, of("ln_1.weight"), of("ln_1.bias")), of("attn.c_attn.weight"), of("attn.c_attn.bias")) for v in x]
        for t in range(len(x)):
            x[t] = add(x[t], multiply(attend(qkv, t, config["n_head"]), of("attn.c_proj.weight"), of("attn.c_proj.bias")))
            hidden = multiply(normalize(x[t], of("ln_2.weight"), of("ln_2.bias")), of("mlp.c_fc.weight"), of("mlp.c_fc.bias"))
            x[t] = add(x[t], multiply([gelu(v) for v in hidden], of("mlp.c_proj.weight"), of("mlp.c_proj.bias")))
    last = normalize(x[-1], w["ln_f.weight"], w["ln_f.bias"])
    return [sum(a * b for a, b in zip(last, row)) for row in w["wte.weight"]]


def main():
    folder = Path(sys.argv[1])
    config = json.loads((folder / "config.json").read_text())
    expected = find_logits(read_folder(folder), config, list(map(int, sys.argv[3:])))
    found = [float(line) for line in open(sys.argv[2])]
    assert len(found) == len(expected), (len(found), len(expected))
    worst = max(abs(a - b) for a, b in zip(found, expected))
    scale = max(map(abs, expected))
    print(f"load_hf: {len(found)} logits up to {scale:.2f}, off by {worst:.1e} at most")
    # fp32 keeps seven digits, and the longest sum here has 192 terms.
    sys.exit(worst > 2e-5 * scale)


main()
