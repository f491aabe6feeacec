#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes and compares weights for ckpt_test.sh with plain Python, not with the library's reader.

usage: weights.py make DIR | renames | same [--rounded | --renamed] A B | values DIR FILE | flip FILE AT | large FILE | peak COMMAND...
"""
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

LAYERS, WIDTH = 2, 24


def write_file(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for *_, data in tensors.values()))


def read_file(path):
    data = path.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    sharding = json.loads(header.pop("__metadata__", {}).get("DCP_SHARDING_INFO", "{}"))
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        offset = sharding.get(name, {}).get("saved_offsets", [0] * len(entry["shape"]))
        yield name, offset, entry["dtype"], entry["shape"], data[8 + length + begin:8 + length + end]


def read(folder):
    """{name: (type, shape, bytes)}; ranks have cut rows, one behind the other."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    parts = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, *part in read_file(path):
            parts.setdefault(name, []).append(part)
            if index.exists():
                assert json.loads(index.read_text())["weight_map"][name] == path.name, name
    tensors = {}
    for name, rows in parts.items():
        rows.sort()
        shape = list(rows[0][2])
        if shape:
            shape[0] = sum(part[2][0] for part in rows)
        tensors[name] = (rows[0][1], shape, b"".join(part[3] for part in rows))
    return tensors


def floats(count, source):
    return struct.pack(f"<{count}f", *(source.gauss(0, 1) for _ in range(count)))


def make(folder):
    """Two files and their index."""
    folder, source = Path(folder), random.Random(20261124)
    folder.mkdir()
    tensors = {"embed": ("F32", [90, WIDTH], floats(90 * WIDTH, source)), "norm": ("F32", [WIDTH], floats(WIDTH, source))}
    for layer in range(LAYERS):
        for name, shape in (("q", [WIDTH, 40]), ("k", [WIDTH, 16]), ("v", [WIDTH, 16]), ("up", [60, WIDTH])):
            tensors[f"{name}.{layer}"] = ("F32", shape, floats(shape[0] * shape[1], source))
    names = list(tensors)
    files = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, some in files.items():
        write_file(folder / file, {name: tensors[name] for name in some})
    index = {"metadata": {}, "weight_map": {name: file for file, some in files.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({"model_type": "none"}))


def renames():
    fused = [{"theirs": f"{name}.*", "ours": "layers.*.qkv", "to_row": row, "transposed": True}
             for name, row in (("q", 0), ("k", 40), ("v", 56))]
    print(json.dumps(fused + [{"theirs": "embed", "ours": "tokens"}, {"theirs": "embed", "ours": "head"}]))


def turned(tensor):
    dtype, (rows, columns), data = tensor
    size = len(data) // (rows * columns)
    return dtype, [columns, rows], b"".join(
        data[(r * columns + c) * size:(r * columns + c + 1) * size] for c in range(columns) for r in range(rows))


def renamed(tensors):
    """The tensors after the renames above."""
    result = {"tokens": tensors["embed"], "head": tensors["embed"], "norm": tensors["norm"]}
    for layer in range(LAYERS):
        parts = [turned(tensors[f"{name}.{layer}"]) for name in "qkv"]
        result[f"layers.{layer}.qkv"] = ("F32", [72, WIDTH], b"".join(part[2] for part in parts))
        result[f"up.{layer}"] = tensors[f"up.{layer}"]
    return result


def rounded(tensors):
    """To bfloat16, nearest even; there are neither NaNs nor overflows."""
    result = {}
    for name, (_, shape, data) in tensors.items():
        words = struct.unpack(f"<{len(data) // 4}I", data)
        result[name] = ("BF16", shape, b"".join(struct.pack("<H", (w + 0x7FFF + (w >> 16 & 1)) >> 16) for w in words))
    return result


def same(arguments):
    change = {"--rounded": rounded, "--renamed": renamed}.get(arguments[0])
    first, second = (read(path) for path in arguments[-2:])
    first = change(first) if change else first
    differ = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
    if differ or not first:
        print(f"# different: {differ}, of {len(first)} tensors")
    return 1 if differ or not first else 0


def values(folder, path):
    """Are these the floats of all tensors, in the order in which checkpoint_rank.c declares them?"""
    tensors = read(folder)
    names = ["embed", "norm"] + [f"{name}.{layer}" for layer in range(LAYERS) for name in ("q", "k", "v", "up")]
    return Path(path).read_bytes() != b"".join(tensors[name][2] for name in names)


def flip(path, at):
    data = bytearray(Path(path).read_bytes())
    data[int(at)] ^= 1
    Path(path).write_bytes(data)


def large(path):
    """A matrix of 256 MiB, from a block that is repeated."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [8192, 8192], "data_offsets": [0, 1 << 28]}}).encode()
    block = floats(1 << 16, random.Random(1))
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in range((1 << 28) // len(block)):
            file.write(block)


def peak(command):
    """Prints the KiB of memory that a command had at most."""
    with open(os.devnull, "wb") as nowhere:
        child = subprocess.Popen(command, stdout=nowhere)
        _, status, used = os.wait4(child.pid, 0)
    print(used.ru_maxrss)
    return status != 0


def main(what, *arguments):
    calls = {"make": make, "renames": renames, "values": values, "flip": flip, "large": large}
    if what in calls:
        return calls[what](*arguments) or 0
    return {"same": same, "peak": peak}[what](list(arguments))


sys.exit(main(*sys.argv[1:]))
