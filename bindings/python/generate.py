#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes libfsdp/_abi.py, the low-level layer, out of bindings/abi/abi.json.

usage: generate.py            writes it
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
ABI = HERE.parent / "abi" / "abi.json"
TARGET = HERE / "libfsdp" / "_abi.py"
NUMBERS = {
    "int32_t": "c_int32",
    "uint32_t": "c_uint32",
    "int64_t": "c_int64",
    "uint64_t": "c_uint64",
    "double": "c_double",
}
HEAD = '''# SPDX-License-Identifier: Apache-2.0
# Written by generate.py out of bindings/abi/abi.json: do not edit.
"""What fsdp.h declares, for ctypes: constants, structs and the prototypes of its calls, by their names in C."""
from ctypes import (CFUNCTYPE, POINTER, Structure, c_char, c_char_p, c_double, c_int32, c_int64, c_uint32, c_uint64,
                    c_void_p, sizeof)


class Sized(Structure):
    """A struct whose struct_size is set when it is made; zero in another field is its default."""

    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self.struct_size = sizeof(self)

'''


def ctype(text, described, returned=False):
    """The ctypes type of a type of C. Handles and memory are addresses: integers or None."""
    text = text.replace("const ", "").strip()
    if array := re.fullmatch(r"char\[(\d+)\]", text):
        return f"c_char * {array[1]}"
    if text == "char *":
        return "c_char_p"
    if text in ("void *", "float *", "char * const") or text == "fsdp_stream":
        return "c_void_p"
    pointed = text.removesuffix("*").strip() if text.endswith("*") else None
    if pointed is None:
        hooks = {hook["name"] for hook in described["hooks"]}
        return text if text in hooks else NUMBERS.get(text, "c_int32" if text in described["integers"] else None)
    if pointed in described["handles"]:
        return "c_void_p"
    if pointed in {struct["name"] for struct in described["structs"]}:
        return f"POINTER({pointed})"
    if pointed.endswith("*"):  # a handle, or text, that the call sets
        inner = pointed.removesuffix("*").strip()
        return f"POINTER({'c_char_p' if inner == 'char' else 'c_void_p'})"
    return f"POINTER({ctype(pointed, described)})"


def docstring(text, indent):
    if not text or text.startswith("----"):  # none, or the heading of a section
        return []
    lines = textwrap.dedent("  " + text.replace("\n ", "\n ")).strip().splitlines()
    lines = [line.strip().replace("\\", "\\\\") for line in lines]
    ends = '"""' if len(lines) == 1 else "\n" + indent + '"""'
    return [indent + ('"""' + ("\n" + indent).join(lines) + ends)]


def write_constants(described):
    for name, value in described["macros"].items():
        yield f"{name} = {value}"
    for family in described["constants"]:
        yield ""
        if family["type"]:
            yield f"# {family['type']}"
        for name, value in family["values"].items():
            yield f"{name} = {value}"


def write_hooks(described):
    for hook in described["hooks"]:
        arguments = [ctype(argument["type"], described) for argument in hook["arguments"]]
        returns = "None" if hook["returns"] == "void" else ctype(hook["returns"], described)
        yield f"{hook['name']} = CFUNCTYPE({', '.join([returns, *arguments])})"


def write_struct(struct, described):
    base = "Sized" if struct["fields"][0]["name"] == "struct_size" else "Structure"
    yield f"class {struct['name']}({base}):"
    yield from docstring(struct["doc"], "    ")
    yield "    _fields_ = ["
    for field in struct["fields"]:
        comment = f"  # {' '.join(field['doc'].split())}" if field["doc"] else ""
        yield f'        ("{field["name"]}", {ctype(field["type"], described)}),{comment}'
    yield "    ]"
    yield ""
    yield ""


def write_sizes(described):
    yield "# What the compiler says of each struct, in bytes."
    sizes = ", ".join(f"{struct['name']}: {struct['size']}" for struct in described["structs"])
    yield from textwrap.wrap(f"SIZES = {{{sizes}}}", 120, subsequent_indent="         ")


def write_calls(described):
    yield "# name: (what it returns, its arguments, its docstring)"
    yield "CALLS = {"
    for call in described["calls"]:
        returns = "None" if call["returns"] == "void" else ctype(call["returns"], described)
        arguments = ", ".join(ctype(argument["type"], described) for argument in call["arguments"])
        yield f'    "{call["name"]}": ({returns}, [{arguments}], {" ".join(call["doc"].split())!r}),'
    yield "}"


def write():
    described = json.loads(ABI.read_text())
    lines = [*write_constants(described), "", *write_hooks(described), "", ""]
    for struct in described["structs"]:
        lines += write_struct(struct, described)
    return HEAD + "\n".join([*lines, *write_sizes(described), "", *write_calls(described)]) + "\n"


def main():
    return write_or_compare(__doc__, {TARGET: write()}, "bindings/abi/abi.json")


if __name__ == "__main__":
    sys.exit(main())
