#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what include/fsdp.h declares as JSON: constants, handles, hooks, structs with offsets and defaults, calls.
Also writes the list of exports, lib/fsdp.map: a call that no node has goes into the node of the header's version, and
nodes of other versions stay.

usage: abi.py            writes bindings/abi/abi.json and lib/fsdp.map
       abi.py --check    compares; the differences are printed, and the status is 1

So a change of the ABI is visible in the commit that makes it. Bindings are generated from the JSON file. The script
needs pycparser (python3-pycparser) and a C compiler, from which it gets values, sizes and offsets.
"""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from pycparser import c_ast, c_generator, c_parser

from written_files import write_or_compare

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / "include" / "fsdp.h"
TARGET = ROOT / "bindings" / "abi" / "abi.json"
MAP = ROOT / "lib" / "fsdp.map"
INTEGERS = {"int32_t": "int", "uint32_t": "unsigned", "int64_t": "long", "uint64_t": "unsigned long"}


def compiler():
    return os.environ.get("CC", "cc").split()


def parse(text):
    """The header's declarations, without what it includes and what only compilers need."""
    source = "".join(f"typedef {meaning} {name};\n" for name, meaning in INTEGERS.items())
    source += text.replace("#include <stdint.h>", "")
    plain = subprocess.run([*compiler(), "-E", "-P", "-x", "c", "-D__attribute__(x)=", "-"], input=source, text=True,
                           check=True, capture_output=True).stdout
    declared = c_parser.CParser().parse(plain).ext
    return [node for node in declared if getattr(node, "name", None) not in INTEGERS]


def write_type(node):
    return c_generator.CGenerator().visit(node).strip()


def name_type(declaration):
    """The type of a field or argument as C text without its name."""
    anonymous = c_ast.Typename(None, [], None, declaration.type)
    return re.sub(r"\s+", " ", re.sub(rf"\b{declaration.name}\b", "", write_type(anonymous))).replace(" [", "[").strip()


def comment_before(text, position):
    """The comment that ends right before the position, without its frame."""
    before = text[:position].rstrip()
    if not before.endswith("*/"):
        return ""
    lines = before[before.rindex("/*"):-2].lstrip("/*").splitlines()
    return "\n".join(re.sub(r"^\s*\* ?", "", line).rstrip() for line in lines).strip()


def comment_of(text, pattern):
    found = re.search(pattern, text)
    return comment_before(text, found.start()) if found else ""


def field_comment(body, name):
    found = re.search(rf"\b{name}(\[\w+\])?;[ \t]*/\*(.*?)\*/", body, re.S)
    return re.sub(r"\s+", " ", found.group(2)).strip() if found else ""


def is_integer(node):
    return isinstance(node, c_ast.Typedef) and isinstance(node.type, c_ast.TypeDecl) and \
        isinstance(node.type.type, c_ast.IdentifierType)


def read_families(nodes):
    """(family, names) of each enum: the integer type that was declared right before it, or None for flags."""
    families, last = [], None
    for node in nodes:
        if isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.Enum):
            families.append((last, [entry.name for entry in node.type.values.enumerators]))
        last = node.name if is_integer(node) else None
    return families


def read_structs(nodes):
    typedefs = [node for node in nodes if isinstance(node, c_ast.Typedef) and isinstance(node.type, c_ast.TypeDecl)]
    declared = [(node.name, node.type.type) for node in typedefs if isinstance(node.type.type, c_ast.Struct)]
    structs = {name: [(field.name, name_type(field)) for field in struct.decls] for name, struct in declared if struct.decls}
    handles = [name for name, struct in declared if not struct.decls and name == struct.name]
    return structs, handles


def read_hooks(nodes):
    def is_hook(node):
        return isinstance(node, c_ast.Typedef) and isinstance(node.type, c_ast.PtrDecl) and \
            isinstance(node.type.type, c_ast.FuncDecl)
    return {node.name: node.type.type for node in nodes if is_hook(node)}


def read_arguments(function):
    arguments = function.args.params if function.args else []
    return [{"name": argument.name, "type": name_type(argument)} for argument in arguments
            if getattr(argument, "name", None)]


def ask_compiler(structs, constants):
    """What the compiler says of the header: {"S name": size, "F struct.field": (offset, size), "C name": value}."""
    lines = ['#include <stddef.h>', '#include <stdio.h>', f'#include "{HEADER}"', "int main(void) {"]
    for name, fields in structs.items():
        lines.append(f'  printf("S {name} %zu\\n", sizeof({name}));')
        for field, _ in fields:
            lines.append(f'  printf("F {name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
    lines += [f'  printf("C {name} %lld\\n", (long long)({name}));' for name in constants]
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "ask"
        subprocess.run([*compiler(), "-x", "c", "-", "-o", str(program)], input="\n".join(lines + ["  return 0;", "}", ""]),
                       text=True, check=True)
        answers = subprocess.run([str(program)], text=True, check=True, capture_output=True).stdout
    return {tuple(line.split()[:2]): [int(number) for number in line.split()[2:]] for line in answers.splitlines()}


def describe_structs(text, structs, answers):
    described = []
    for name, fields in structs.items():
        body = re.search(rf"typedef struct {name} \{{(.*?)\}} {name};", text, re.S).group(1)
        described.append({
            "name": name, "size": answers["S", name][0], "doc": comment_of(text, rf"typedef struct {name} \{{"),
            "fields": [{"name": field, "type": kind, "offset": answers["F", f"{name}.{field}"][0],
                        "size": answers["F", f"{name}.{field}"][1], "doc": field_comment(body, field)}
                       for field, kind in fields]})
    return described


def describe_calls(text, nodes):
    calls = []
    for node in nodes:
        if not (isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl)):
            continue
        returns = c_ast.Typename(None, [], None, node.type.type)
        calls.append({"name": node.name, "returns": re.sub(rf"\s*\b{node.name}\b", "", write_type(returns)).strip(),
                      "arguments": read_arguments(node.type),
                      "doc": comment_of(text, rf"(?m)^FSDP_API [^\n]*\b{node.name}\(")})
    return calls


def describe(text):
    nodes = parse(text)
    structs, handles = read_structs(nodes)
    families = read_families(nodes)
    macros = re.findall(r"(?m)^#define (FSDP_(?:VERSION_\w+|EVERY_RANK))\b", text)
    answers = ask_compiler(structs, [name for _, names in families for name in names] + macros)
    integers = [node.name for node in nodes if is_integer(node)]
    return {
        "macros": {name: answers["C", name][0] for name in macros},
        "integers": {name: comment_of(text, rf"(?m)^typedef int32_t {name};") for name in integers},
        "constants": [{"type": family, "values": {name: answers["C", name][0] for name in names}}
                      for family, names in families],
        "handles": handles,
        "hooks": [{"name": name, "returns": write_type(hook.type).split()[0], "arguments": read_arguments(hook),
                   "doc": comment_of(text, rf"(?m)^typedef [^\n]*\(\*{name}\)")} for name, hook in read_hooks(nodes).items()],
        "structs": describe_structs(text, structs, answers),
        "calls": describe_calls(text, nodes),
    }


def read_map(text):
    """[(node, names)] in the order of their releases."""
    return [(node, re.findall(r"(?m)^    (fsdp_\w+);", body)) for node, body in re.findall(r"(?ms)^(FSDP_[\d.]+) \{(.*?)^\}", text)]


def write_map(described, text):
    """The map with new calls in its last node. A node that is not released yet loses the calls that the header no
    longer has."""
    current = "FSDP_{FSDP_VERSION_MAJOR}.{FSDP_VERSION_MINOR}".format(**described["macros"])
    calls = [call["name"] for call in described["calls"]]
    nodes = dict(read_map(text))
    released = {name for node, names in nodes.items() if node != current for name in names}
    if missing := released - set(calls):
        sys.exit(f"The header lacks what a release has exported: {', '.join(sorted(missing))}")
    nodes[current] = sorted(set(calls) - released)
    lines = ["/* One node per release; a node that was released never changes. Written by tools/dev/abi.py. */"]
    before = ""
    for node, names in nodes.items():
        lines += [f"{node} {{", "  global:", *(f"    {name};" for name in names)]
        lines += [f"}} {before};"] if before else ["  local:", "    *;", "};"]
        before = node
    return "\n".join(lines) + "\n"


def main():
    described = describe(HEADER.read_text())
    files = {TARGET: json.dumps(described, indent=1) + "\n", MAP: write_map(described, MAP.read_text())}
    return write_or_compare(__doc__, files, "include/fsdp.h")


if __name__ == "__main__":
    sys.exit(main())
