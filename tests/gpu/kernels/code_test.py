#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the built GPU kernels consist of; needs no GPU. usage: code_test.py LIBFSDP OBJECT...

The kernels promise the bits of the host's. In PTX an addition or a multiplication that names its rounding is never
contracted to a fused one, so the PTX may hold nothing else. The machine code is made from the same source with the same
flags; cuobjdump, where it and nvdisasm are installed, shows that it has no fused operation either, but for kernels that
divide or take roots: ptxas makes both of them.

No kernel keeps anything in local memory, which is shown by the object files alone. The disassembly also shows how many
instructions an element takes in the kernels of 8-bit numbers: see LIMITS.
"""
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import machine_code

WANTED = {("code", 80), ("code", 90), ("code", 100), ("ptx", 100)}
# cuda::kernels::prepare (lib/device/cuda/prepare.cpp) runs this many kernels once, so that none is loaded in the middle
# of a step.
KERNELS = 68
KINDS = {1: "ptx", 2: "code"}
# Only these operations on floating-point numbers are allowed: they are exact, or round to nearest once.
ALLOWED = re.compile(r"((add|sub|mul|div|sqrt)\.rn|(ld|st)\.[a-z0-9.]+|mov|selp|setp\.[a-z]+|cvt\.(f64|rn\.f32|rn\.bf16x2|rn\.satfinite\.e(4m3|5m2)x2)|abs|copysign|max\.NaN)\.f(32|64)")
FLOAT = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*\.(?:f16x2|bf16x2|f16|bf16|tf32|f32|f64)(?:\.\w+)*)\s", re.M)
# Limits the instructions an element by architecture. A kernel without a loop over elements is counted along its longest
# path, divided by the elements of a thread. The path includes the rounding to bf16, and the slower of the forms for
# aligned and other arrays. Searches for a span, and sums of elements that are not finite, count once. In a kernel with
# a loop over elements, the shortest loop that loads four times 16 bytes is counted and divided by its 16 elements.
# sm_80 has no instruction for 8-bit numbers. The limits leave room for the code of other compilers.
WHOLE, LOOP = "whole", "loop"
LIMITS = {
    "QuantizeTiles": (WHOLE, 32, {80: 50, 90: 30, 100: 30}),
    "QuantizeBlocks": (WHOLE, 32, {80: 45, 90: 32, 100: 32}),
    "10FindAmaxesEEEv": (LOOP, 16, {80: 3, 90: 3, 100: 3}),
}
# Fused operations of single and double precision in machine code, and the PTX operations that compile to them.
FUSED = re.compile(r"\b(?:FFMA2?|DFMA)\b(?:\.[A-Z0-9]+)*")
DIVISION = re.compile(r"\b(?:div|sqrt)\.rn\.f(?:32|64)\s")
ENTRY = re.compile(r"\.entry\s+(\w+)")


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


def fused(ptx, code):
    """Fused operations of functions whose PTX neither divides nor takes a root. The subroutines that do so are in the
    section of the function that calls them; an architecture each has one of its name."""
    functions = machine_code.parts(machine_code.FUNCTION, code)
    if not functions:
        return ["cuobjdump shows no function"]
    divide = {name for name, body in machine_code.parts(ENTRY, ptx) if DIVISION.search(body)}
    return sorted({f"{name} has {operation}" for name, body in functions if name not in divide
                   for operation in FUSED.findall(body)})


def fused_in(disassembly, data):
    ptx = "".join(payload.decode() for kind, _, payload in entries(data) if kind == "ptx")
    return fused(ptx, disassembly)


def local_memory(data):
    """Functions whose code has a frame in local memory, for arrays or for spilled registers."""
    frames = [(architecture, machine_code.frames(payload))
              for kind, architecture, payload in entries(data) if kind == "code"]
    if not all(found for _, found in frames):
        return ["code has no frame of any function"]
    return [f"sm_{architecture}: {name} keeps {size} bytes in local memory"
            for architecture, found in frames for name, size in found.items() if size]


def instructions(form, function):
    """None if the kernel has another form."""
    if form == LOOP:
        return function.loop_with("LDG.E.128", 4)
    return None if function.works_in_loops() else function.longest()


def counts(disassemblies, limits=LIMITS):
    """(kernel, architecture, instructions an element or None, the limit) of each kernel that has a limit."""
    found = {key: function for text in disassemblies for key, function in machine_code.functions(text).items()}
    for kernel, (form, elements, limit) in limits.items():
        for architecture, most in limit.items():
            one = [function for (sm, name), function in found.items() if sm == architecture and kernel in name]
            count = instructions(form, one[0]) if len(one) == 1 else None
            yield kernel, architecture, count and count / elements, most


def too_long(disassemblies, limits=LIMITS):
    return [f"sm_{architecture}: {kernel} has " + (f"{count:.1f} instructions an element, not {most} at most"
                                                  if count else "no code of its form")
            for kernel, architecture, count, most in counts(disassemblies, limits) if not count or count > most]


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


FIXTURE_LOOP = """
	code for sm_90
		Function : loads_and_leaves
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 BRA 0x90 ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/               @P1 BRA 0x60 ;
        /*0040*/                   FADD R4, R4, R5 ;
        /*0050*/                   FADD R4, R4, R5 ;
        /*0060*/               @P2 BRA 0x20 ;
        /*0070*/                   STG.E desc[UR4][R2.64], R4 ;
        /*0080*/                   EXIT ;
        /*0090*/                   EXIT ;
        /*00a0*/                   BRA 0xa0;
        /*00b0*/                   NOP;
"""


def counts_paths():
    """A message for each count of the fixture that is not the expected one."""
    function = machine_code.functions(FIXTURE_LOOP)[90, "loads_and_leaves"]
    for found, expected in (function.longest(), 9), (function.loop_with("LDG.E.128", 1), 5), \
            (function.loop_with("LDG.E.128", 2), None), (len(function.all), 11):
        if found != expected:
            yield f"{found} instructions, not {expected}"
    straight = FIXTURE_LOOP.replace("BRA 0x20", "BRA 0x90")
    for most, expected in (2.5, []), (2, ["sm_90: loads has 2.2 instructions an element, not 2 at most"]):
        found = too_long([straight], {"loads": (WHOLE, 4, {90: most})})
        if found != expected:
            yield f"{most} at most: {found}"
    for form, kernel in (WHOLE, "stores"), (WHOLE, "loads"), (LOOP, "loads"):  # not there, a loop, loads once
        if too_long([FIXTURE_LOOP], {kernel: (form, 4, {90: 9})}) != [f"sm_90: {kernel} has no code of its form"]:
            yield f"{kernel} has a count as {form}"


def disassemble(path):
    return subprocess.run(["cuobjdump", "-sass", path], capture_output=True, text=True, check=True).stdout


def cases(library, objects):
    yield "bad instructions would be found", finds_bad_ones(), None
    yield "fused operations would be found, where nothing is divided", list(finds_fused_ones()), None
    yield "instructions are counted along the longest path", list(counts_paths()), None
    missing_tool = next((f"no {tool}" for tool in ("cuobjdump", "nvdisasm") if not shutil.which(tool)), None)
    texts = []
    for path in objects:
        name, data = Path(path).stem, Path(path).read_bytes()
        yield f"{name} has code for every architecture, and PTX", missing(data), None
        yield f"{name} rounds every operation by itself", bad_ptx(data), None
        yield f"{name} keeps nothing in local memory", local_memory(data), None
        texts += [] if missing_tool else [disassemble(path)]
        yield f"{name} has no fused operation in its code, but for divisions and roots", \
            [] if missing_tool else fused_in(texts[-1], data), missing_tool
    yield "8-bit kernels take few instructions an element", [] if missing_tool else too_long(texts), missing_tool
    for kernel, architecture, count, _ in counts(texts) if texts else []:
        print(f"# sm_{architecture}: {kernel} takes {count or 0:.1f} instructions an element")
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
