#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a Hugging Face folder of a small model in GPT-2's shape, with random weights: two files and their index.

usage: make_folder.py DIR
"""
import json
import random
import struct
import sys
from pathlib import Path

CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_embd": 48, "n_head": 3, "n_positions": 32, "vocab_size": 96}


def shapes():
    width, hidden = CONFIG["n_embd"], 4 * CONFIG["n_embd"]
    yield "wte.weight", "BF16", [CONFIG["vocab_size"], width]
    yield "wpe.weight", "F32", [CONFIG["n_positions"], width]
    for layer in range(CONFIG["n_layer"]):
        for name, shape in (("ln_1.weight", [width]), ("ln_1.bias", [width]),
                            ("attn.c_attn.weight", [width, 3 * width]), ("attn.c_attn.bias", [3 * width]),
                            ("attn.c_proj.weight", [width, width]), ("attn.c_proj.bias", [width]),
                            ("ln_2.weight", [width]), ("ln_2.bias", [width]),
                            ("mlp.c_fc.weight", [width, hidden]), ("mlp.c_fc.bias", [hidden]),
                            ("mlp.c_proj.weight", [hidden, width]), ("mlp.c_proj.bias", [width])):
            yield f"h.{layer}.{name}", "F32", shape
        yield f"h.{layer}.attn.bias", "U8", [1, 1, 4, 4]  # the mask: no weight, and to be passed over
    yield "ln_f.weight", "F32", [width]
    yield "ln_f.bias", "F32", [width]


def values(name, dtype, shape, source):
    count = 1
    for size in shape:
        count *= size
    if dtype == "U8":
        return bytes([1]) * count
    mean = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
    floats = struct.pack(f"<{count}f", *(mean + source.gauss(0, 0.3) for _ in range(count)))
    # The upper half of an fp32 is a bf16 that was rounded towards zero.
    return floats if dtype == "F32" else b"".join(floats[i + 2:i + 4] for i in range(0, len(floats), 4))


def write_file(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors))


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    source = random.Random(20261124)
    tensors = [(name, dtype, shape, values(name, dtype, shape, source)) for name, dtype, shape in shapes()]
    half = len(tensors) // 2
    files = {"model-00001-of-00002.safetensors": tensors[:half], "model-00002-of-00002.safetensors": tensors[half:]}
    for name, some in files.items():
        write_file(folder / name, some)
    index = {"metadata": {"total_size": sum(len(data) for *_, data in tensors)},
             "weight_map": {tensor[0]: name for name, some in files.items() for tensor in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))


main()
