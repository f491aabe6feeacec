#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the built GPU kernels consist of; needs no GPU. usage: code_test.py LIBFSDP OBJECT...

The kernels promise the bits of the host's. In PTX an addition or a multiplication that names its rounding is never
contracted to a fused one, so the PTX may hold nothing else. The machine code is made from the same source with the same
flags; cuobjdump, where it is installed, shows that it has no fused operation either, but for kernels that divide or
take roots: ptxas makes both of them.
"""
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

WANTED = {("code", 80), ("code", 90), ("code", 100), ("ptx", 100)}
# As many as cuda::kernels::prepare (lib/device/cuda/prepare.cpp) runs once, so that none is loaded in the middle of a step.
KERNELS = 69
KINDS = {1: "ptx", 2: "code"}
# All that may be done to floating-point numbers: these are rounded to nearest once, or exact.
ALLOWED = re.compile(r"((add|sub|mul|div|sqrt)\.rn|(ld|st)\.[a-z0-9.]+|mov|selp|setp\.[a-z]+|cvt\.(f64|rn\.f32|rn\.satfinite\.e(4m3|5m2)x2))\.f(32|64)")
FLOAT = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*\.(?:f16x2|bf16x2|f16|bf16|tf32|f32|f64)(?:\.\w+)*)\s", re.M)
# Fused operations of single and double precision in machine code, and what is made of them there.
FUSED = re.compile(r"\b(?:FFMA2?|DFMA)\b(?:\.[A-Z0-9]+)*")
DIVISION = re.compile(r"\b(?:div|sqrt)\.rn\.f(?:32|64)\s")
ENTRY = re.compile(r"\.entry\s+(\w+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)", re.M)


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


def sections(heading, text):
    """(name, text) of what each heading begins, up to the next one."""
    parts = heading.split(text)[1:]
    return list(zip(parts[::2], parts[1::2]))


def fused(ptx, code):
    """Fused operations of functions whose PTX neither divides nor takes a root. The subroutines that do so are in the
    section of the function that calls them; an architecture each has one of its name."""
    functions = sections(FUNCTION, code)
    if not functions:
        return ["cuobjdump shows no function"]
    divide = {name for name, body in sections(ENTRY, ptx) if DIVISION.search(body)}
    return sorted({f"{name} has {operation}" for name, body in functions if name not in divide
                   for operation in FUSED.findall(body)})


def fused_in(cuobjdump, path, data):
    ptx = "".join(payload.decode() for kind, _, payload in entries(data) if kind == "ptx")
    return fused(ptx, subprocess.run([cuobjdump, "-sass", path], capture_output=True, text=True, check=True).stdout)


def needed(library):
    text = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"NEEDED.*\[(.*)\]", text)


def finds_bad_ones():
    bad = ["fma.rn.f32", "add.f32", "add.rn.ftz.f32", "div.full.f32", "sqrt.approx.f32", "mul.ftz.f32", "fma.rn.f64",
           "add.rn.bf16x2", "rcp.rn.f32"]
    text = "".join(f"\t@%p1 {name} \t%f1, %f2;\n" for name in bad) + "\tadd.rn.f32 \t%f1, %f2, %f3;\n"
    return [f"{name} was not found" for name in sorted(set(bad) - set(inexact(text)))] + \
        [f"{name} was found" for name in sorted(set(inexact(text)) - set(bad))]


FIXTURE_PTX = """
.visible .entry divides(
	.param .u64 divides_param_0
)
{
	div.rn.f64 	%fd3, %fd1, %fd2;
}
.visible .entry roots(
)
{
	sqrt.rn.f32 	%f2, %f1;
}
.visible .entry adds(
)
{
	div.u64 	%rd3, %rd1, %rd2;
	add.rn.f32 	%f3, %f1, %f2;
}
"""
FIXTURE_CODE = """
	code for sm_80
		Function : divides
        /*0010*/                   DFMA.RP R4, R2, R2, R4 ;
        /*0020*/                   CALL.REL.NOINC 0x40 ;
        /*0030*/                   EXIT ;
        /*0040*/                   FFMA R0, R0, R1, R0 ;
		Function : roots
        /*0010*/                   FFMA.RM R4, R2, R2, R4 ;
		Function : adds
        /*0010*/                   FADD R4, R2, R3 ;
"""


def finds_fused_ones():
    """A message for each of these whose answer is not the expected one."""
    planted = "        /*0020*/                   FFMA.FTZ R4, R2, R2, R4 ;\n        /*0030*/              @P0 DFMA R4, R2, R2, R4 ;\n"
    unknown = FIXTURE_CODE.replace("Function : roots", "Function : of_no_entry")
    for code, expected in (FIXTURE_CODE, []), (FIXTURE_CODE + planted, ["adds has DFMA", "adds has FFMA.FTZ"]), \
            (unknown, ["of_no_entry has FFMA.RM"]), ("Fatbin elf code:\n", ["cuobjdump shows no function"]):
        if fused(FIXTURE_PTX, code) != expected:
            yield f"{fused(FIXTURE_PTX, code)}, not {expected}"


def cases(library, objects):
    yield "bad instructions would be found", finds_bad_ones(), None
    yield "fused operations would be found, where nothing is divided", list(finds_fused_ones()), None
    for path in objects:
        name, data = Path(path).stem, Path(path).read_bytes()
        yield f"{name} has code for every architecture, and PTX", missing(data), None
        yield f"{name} rounds every operation by itself", bad_ptx(data), None
        cuobjdump = shutil.which("cuobjdump")
        yield f"{name} has no fused operation in its code, but for divisions and roots", \
            fused_in(cuobjdump, path, data) if cuobjdump else [], None if cuobjdump else "no cuobjdump"
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
