#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the built GPU kernels consist of; needs no GPU. usage: code_test.py LIBFSDP OBJECT...

The kernels promise the bits of the host's. In PTX an addition or a multiplication that names its rounding is never
contracted to a fused one, so the PTX may hold nothing else. The machine code is made from the same source with the same
flags; cuobjdump, where it is installed, shows that it has no fused operation either.
"""
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

WANTED = {("code", 80), ("code", 90), ("code", 100), ("ptx", 100)}
# As many as cuda::kernels::prepare (lib/device/cuda/prepare.cpp) runs once, so that none is loaded in the middle of a step.
KERNELS = 63
KINDS = {1: "ptx", 2: "code"}
# All that may be done to floating-point numbers: these are rounded to nearest once, or exact.
ALLOWED = re.compile(r"((add|sub|mul|div|sqrt)\.rn|(ld|st)\.[a-z0-9.]+|mov|selp|setp\.[a-z]+|cvt\.(f64|rn\.f32|rn\.satfinite\.e(4m3|5m2)x2))\.f(32|64)")
FLOAT = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*\.(?:f16x2|bf16x2|f16|bf16|tf32|f32|f64)(?:\.\w+)*)\s", re.M)
# Fused operations of single and double precision in machine code. Divisions and roots (adamw, fp8) are made of them.
FUSED = re.compile(r"\b(?:FFMA2?|DFMA)\b(?:\.[A-Z0-9]+)*")


def entries(data):
    """(kind, architecture, payload) of every part of the fat binaries in the file."""
    at = data.find(struct.pack("<I", 0xBA55ED50))
    while at >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, at)
        part, end = at + header, at + header + size
        while part < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, part)
            architecture, = struct.unpack_from("<I", data, part + 28)
            yield KINDS.get(kind, kind), architecture, data[part + header:part + header + size]
            part += header + size
        at = data.find(struct.pack("<I", 0xBA55ED50), end)


def missing(data):
    found = {(kind, architecture) for kind, architecture, _ in entries(data)}
    return [f"no {kind} for {architecture}, only {sorted(found)}" for kind, architecture in sorted(WANTED - found)]


def inexact(ptx):
    return sorted({name for name in FLOAT.findall(ptx) if not ALLOWED.fullmatch(name)})


def bad_ptx(data):
    ptx = [payload.decode() for kind, _, payload in entries(data) if kind == "ptx"]
    if not any(".entry" in text for text in ptx):
        return ["no kernel in the PTX: is it compressed?"]
    return [f"PTX has {name}" for text in ptx for name in inexact(text)]


def uncounted(objects):
    kernels = sum(payload.count(b".entry") for path in objects
                  for kind, _, payload in entries(Path(path).read_bytes()) if kind == "ptx")
    return [] if kernels == KERNELS else [f"{kernels} kernels, prepare() knows {KERNELS}"]


def fused(cuobjdump, path):
    code = subprocess.run([cuobjdump, "-sass", path], capture_output=True, text=True, check=True).stdout
    if "EXIT" not in code:
        return ["cuobjdump shows no code"]
    return sorted(set(FUSED.findall(code)))


def needed(library):
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"NEEDED.*\[(.*)\]", text)


def finds_bad_ones():
    bad = ["fma.rn.f32", "add.f32", "add.rn.ftz.f32", "div.full.f32", "sqrt.approx.f32", "mul.ftz.f32", "fma.rn.f64",
           "add.rn.bf16x2", "rcp.rn.f32"]
    text = "".join(f"\t@%p1 {name} \t%f1, %f2;\n" for name in bad) + "\tadd.rn.f32 \t%f1, %f2, %f3;\n"
    return [f"{name} was not found" for name in sorted(set(bad) - set(inexact(text)))] + \
        [f"{name} was found" for name in sorted(set(inexact(text)) - set(bad))]


def cases(library, objects):
    yield "bad instructions would be found", finds_bad_ones(), None
    for path in objects:
        name, data = Path(path).stem, Path(path).read_bytes()
        yield f"{name} has code for every architecture, and PTX", missing(data), None
        yield f"{name} rounds every operation by itself", bad_ptx(data), None
        cuobjdump = shutil.which("cuobjdump")
        if name in ("adamw_kernel", "fp8_kernels"):
            continue
        yield f"{name} has no fused operation in its code", \
            fused(cuobjdump, path) if cuobjdump else [], None if cuobjdump else "no cuobjdump"
    yield "every kernel is prepared", uncounted(objects), None
    yield "libfsdp has it all", missing(Path(library).read_bytes()), None
    yield "libfsdp loads without CUDA", [so for so in needed(library) if "cuda" in so or "nvidia" in so], None


def main():
    number = failed = 0
    for what, broken, skipped in cases(sys.argv[1], sys.argv[2:]):
        number += 1
        failed += bool(broken)
        print(f"{'not ok' if broken else 'ok'} {number} - {what}{' # SKIP ' + skipped if skipped else ''}")
        for line in broken:
            print(f"# {line}")
    print(f"1..{number}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
