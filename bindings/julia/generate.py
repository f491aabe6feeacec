#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes FSDP.jl/src/library/ (the low-level layer) and FSDP.jl/src/enums.jl out of bindings/abi/abi.json.

usage: generate.py            writes the files
       generate.py --check    compares; the differences are printed, and the status is 1
"""

import json
import pathlib
import re
import sys
import textwrap

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "dev"))
from written_files import write_or_compare  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
ABI = json.loads((HERE.parent / "abi" / "abi.json").read_text())
SOURCE = HERE / "FSDP.jl" / "src"
HEAD = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# Written by bindings/julia/generate.py from bindings/abi/abi.json: do not edit.\n"
)
PLAIN = {
    "uint32_t": "UInt32",
    "uint64_t": "UInt64",
    "int32_t": "Int32",
    "int64_t": "Int64",
    "float": "Float32",
    "double": "Float64",
    "char": "UInt8",
    "void": "Cvoid",
}
HOOKS = {hook["name"] for hook in ABI["hooks"]}


def julia_type(text):
    """The Julia spelling of a C type: "const fsdp_mesh *" is Ptr{fsdp_mesh}."""
    text = text.replace("const", "").strip()
    if array := re.fullmatch(r"char\[(\d+)\]", text):
        return f"NTuple{{{array[1]}, UInt8}}"
    if text in HOOKS or text == "fsdp_stream":
        return "Ptr{Cvoid}"
    base, stars = text.replace("*", "").strip(), text.count("*")
    written = PLAIN.get(base, "Int32" if base in ABI["integers"] else base)
    for _ in range(stars):
        written = f"Ptr{{{written}}}"
    return written


def argument_type(text):
    """... as a field, or an argument of a call, which takes a String for text that it reads."""
    return "Cstring" if text == "const char *" else julia_type(text)


def short(name):
    """FSDP_FORWARD -> FORWARD: the name inside of the module."""
    return name[len("FSDP_") :]


def type_name(name):
    """fsdp_value_op -> ValueOp"""
    return "".join(part.capitalize() for part in name[len("fsdp_") :].split("_"))


def doc(text):
    """A docstring of the header, as it is: its columns have a meaning."""
    text = re.sub(r"^-+ .*? -+$", "", text).strip()
    if not text:
        return []
    body = "\n".join(line.rstrip() for line in text.splitlines())
    fence = ["```text", body, "```"] if "\n" in body else [body]
    return ['raw"""', *fence, '"""']


def write_types():
    yield "# Handles, constants and structs as fsdp.h has them."
    for name in ABI["handles"]:
        yield f"struct {name} end"
    yield ""
    for name, value in ABI["macros"].items():
        yield f"const {name} = {'Int32' if value < 0 else 'UInt32'}({value})"
    for family in ABI["constants"]:
        kind = "Int32" if family["type"] else "UInt32"
        yield ""
        if family["type"]:
            yield f"const {family['type']} = Int32"
        for name, value in family["values"].items():
            yield f"const {name} = {kind}({value})"
    for struct in ABI["structs"]:
        yield from write_struct(struct)
    yield ""
    yield "# What the compiler of C says: size, and offsets of the fields, in bytes."
    yield "const LAYOUTS = ("
    for struct in ABI["structs"]:
        offsets = " ".join(f"{field['offset']}," for field in struct["fields"])
        line = f"({struct['name']}, {struct['size']}, ({offsets})),"
        yield from textwrap.wrap(line, 116, initial_indent="    ", subsequent_indent="     ")
    yield ")"


def write_struct(struct):
    yield ""
    yield from doc(struct["doc"])
    yield f"struct {struct['name']}"
    for field in struct["fields"]:
        comment = " ".join(field["doc"].split())
        yield from textwrap.wrap(comment, 110, initial_indent="    # ", subsequent_indent="    # ")
        yield f"    {field['name']}::{argument_type(field['type'])}"
    yield "end"


def blocks(call):
    """True if the call may wait, so that Julia's garbage collection should not wait for it."""
    text = " ".join(call["doc"].split())
    return "Blocks: no" not in text and ("Blocks" in text or "Threads: any" not in text)


def write_calls():
    yield "# The calls of fsdp.h. @waits is for those that may take long."
    for call in ABI["calls"]:
        names = [argument["name"] for argument in call["arguments"]]
        typed = ", ".join(f"{a['name']}::{argument_type(a['type'])}" for a in call["arguments"])
        how = "@waits" if blocks(call) else "@returns"
        yield ""
        yield from doc(call["doc"])
        yield from broken(f"@inline {call['name']}({', '.join(names)}) =", "    ")
        yield from broken(f"    {how} libfsdp.{call['name']}({typed})::{julia_or_text(call['returns'])}", "        ")


def julia_or_text(text):
    return "Cstring" if text == "const char *" else julia_type(text)


def broken(line, indent):
    return textwrap.wrap(line, 120, subsequent_indent=indent, break_long_words=False) if len(line) > 120 else [line]


def write_enums():
    yield "# Values of fsdp.h without their prefix: an enum for each type, flags as numbers."
    for family in ABI["constants"]:
        yield ""
        if family["type"]:
            yield f"@enum {type_name(family['type'])}::Int32 begin"
            for name in family["values"]:
                yield f"    {short(name)} = LibFSDP.{name}"
            yield "end"
        else:
            for name in family["values"]:
                yield f"const {short(name)} = LibFSDP.{name}"
    yield ""
    for name in ABI["macros"]:
        yield f"const {short(name)} = LibFSDP.{name}"
    yield ""
    yield "# The enums that fields of structs are of."
    yield "const FIELD_ENUMS = Dict("
    for struct in ABI["structs"]:
        for field in struct["fields"]:
            if field["type"] in ABI["integers"]:
                yield f"    (LibFSDP.{struct['name']}, :{field['name']}) => {type_name(field['type'])},"
    yield ")"
    yield ""
    yield "# Every name above with its value in fsdp.h."
    yield "const CONSTANTS = ("
    for family in ABI["constants"]:
        for name, value in family["values"].items():
            yield f"    ({short(name)}, {value}),"
    for name, value in ABI["macros"].items():
        yield f"    ({short(name)}, {value}),"
    yield ")"


FILES = {
    SOURCE / "library" / "types.jl": write_types,
    SOURCE / "library" / "calls.jl": write_calls,
    SOURCE / "enums.jl": write_enums,
}


def main():
    files = {path: HEAD + "\n".join(write()) + "\n" for path, write in FILES.items()}
    return write_or_compare(__doc__, files, "bindings/abi/abi.json")


if __name__ == "__main__":
    sys.exit(main())
