#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the table of calls of docs/bindings.md: what each call of fsdp.h is called in each language.

usage: table.py            writes the table
       table.py --check    compares; the differences are printed, and the status is 1

It reads the bindings: a call belongs to the function of a class that makes it. Where that is one which users do not
name, IDIOMS says what they write instead, in words that must stand in the binding.
"""
import ast
import difflib
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "bindings.md"
BEGIN, END = "<!-- calls: written by bindings/table.py -->\n", "<!-- calls end -->\n"
CALLS = [call["name"] for call in json.loads((HERE / "abi" / "abi.json").read_text())["calls"]]


def enclosed(text, scope, function, call):
    """{call: ["Class.function"]} of a language whose lines tell where classes and functions begin."""
    found, owner, name = {}, "", ""
    for line in re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S).split("\n"):
        entered, begun = scope(line), function(line, owner)
        owner = owner if entered is None else entered
        name = name if begun is None else begun
        for made in re.findall(call, line):
            found.setdefault(made, []).append((owner, name))
    return found


def cpp(text):
    def scope(line):
        match = re.match(r"(?:class|struct) (\w+)[^;]*\{|(\})", line)
        return match and (match[1] or "")

    def function(line, owner):
        indent = "  " if owner else ""
        several = r"(?:[\w:<>,&*\[\]]+ )*?(?:[\w:<>,*&]+[ &*]+)?((?:\w+::)?~?\w+)\([^;]*(?:[{:,(]|&&|try)\s*[^;]*$"
        one = r"(?:[\w:<>,&*]+ )+[&*]?(~?\w+)\(.*\{.*\}$"
        match = re.match(f"{indent}{several}|{indent}{one}", line)
        return match and (match[1] or match[2])

    return enclosed(text, scope, function, r"\b(fsdp_\w+)\b")


def rust(text):
    def scope(line):
        match = re.match(r"(?:unsafe )?impl(?:<[^>]*>)? (?:(\w+)(?:<[^>]*>)? for )?(\w+)", line)
        if match:
            return ("Drop of " if match[1] == "Drop" else "") + match[2]
        return "" if line.startswith("}") else None

    def function(line, owner):
        match = re.match(r"\s*(pub(?:\(crate\))? )?(?:const )?(?:unsafe )?fn (\w+)", line)
        return match and ("" if match[1] == "pub " or owner.startswith("Drop") else "-") + match[2]

    return enclosed(text, scope, function, r"sys::(fsdp_\w+)\b")


def python(text):
    found = {}

    def visit(node, owner, name):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, child.name, "")
            elif isinstance(child, ast.FunctionDef):
                visit(child, owner, name or child.name)
            else:
                if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id == "lib":
                    found.setdefault("fsdp_" + child.attr, []).append((owner, name))
                visit(child, owner, name)

    visit(ast.parse(text), "", "")
    return found


def julia(text):
    """The function at the margin that a line is in; a definition of one line ends with it."""
    def function(line, owner):
        match = re.match(r"(?:@inline )?(?:function )?(?:Base\.)?([\w!]+)\(|\S", line)
        return match and (match[1] or "")

    code = re.sub(r'"""(?:[^"]|"(?!""))*"""|#[^\n]*', "", text)
    return enclosed(code, lambda line: None, function, r"\b(fsdp_\w+)\b")


LANGUAGES = {
    "C++": ("::", cpp, "cpp/fsdp/*.hpp"),
    "Rust": ("::", rust, "rust/fsdp/src/*.rs"),
    "Julia": (".", julia, "julia/FSDP.jl/src/*.jl"),
    "Python": (".", python, "python/libfsdp/*.py"),
}
# What users write where the call is made by something that they do not name.
IDIOMS = {
    "C++": {
        "fsdp_get_last_error": "`Error`, `Context::last_error`",
        "fsdp_get_status_name": "`get_status_name`, `Error`",
        "fsdp_get_params": "`Group::unshard`: `Weights`",
        "fsdp_unshard": "`Group::unshard`",
        "fsdp_reshard": "`Weights::reshard`, or its end",
        "fsdp_unshard_piece": "`Group::unshard_piece`",
        "fsdp_reshard_piece": "`Weights::reshard`, or its end",
        "fsdp_get_param": "`Group::get_param`",
        "fsdp_get_param_info": "`Group::param_info`",
        "fsdp_get_shard": "`Model::shards`",
        "fsdp_next_shard_chunk": "`Model::shard_chunks`, `for_each_shard_chunk`",
        "fsdp_round_stochastic": "`Shard::round_stochastic`",
        "fsdp_create_mesh": "`Mesh`",
        "fsdp_collect_matrices": "`Model::collect_matrices`, `for_each_matrix`",
    },
    "Rust": {
        "fsdp_get_last_error": "`Error`",
        "fsdp_get_status_name": "`Status`'s `Display`",
        "fsdp_all_reduce_values": "`Context::all_reduce_values`",
        "fsdp_get_params": "`Model::unshard`: `Weights::get`",
        "fsdp_unshard": "`Model::unshard`",
        "fsdp_reshard": "`Weights::reshard`, or its end",
        "fsdp_unshard_piece": "`Model::unshard_piece`",
        "fsdp_reshard_piece": "`Weights::reshard`, or its end",
        "fsdp_get_param": "`Model::param`",
        "fsdp_get_param_info": "`Model::param_info`",
        "fsdp_acquire_grad": "`Model::grads`: `Grads::get`",
        "fsdp_put_grad": "`Grads::put`",
        "fsdp_reduce_grad": "`Grads::reduce`, `reduce_last`",
        "fsdp_get_shard": "`Window::shards`",
        "fsdp_get_shard_state": "`Shard::states`",
        "fsdp_next_shard_chunk": "`Window::shard_chunks`",
        "fsdp_get_shard_chunk_state": "`Shard::states` of a chunk",
        "fsdp_get_grad_norm": "`Window::grad_norm`",
        "fsdp_clip_grads": "`Window::clip_grads`",
        "fsdp_collect_matrices": "`Window::collect_matrices`",
    },
    "Julia": {
        "fsdp_get_last_error": "`Error`",
        "fsdp_get_dtype_size": "`sizeof` of a type",
        "fsdp_abort_context": "`abort`",
        "fsdp_get_params": "`unshard`: `Weights`",
        "fsdp_unshard": "`unshard`",
        "fsdp_reshard": "the block's end, `reshard`",
        "fsdp_unshard_piece": "`unshard` with `piece`",
        "fsdp_reshard_piece": "the block's end, `reshard` with `piece`",
        "fsdp_get_shard": "`shards`",
        "fsdp_get_shard_chunk_state": "`state` of a chunk",
        "fsdp_begin_span": "`span`",
        "fsdp_end_span": "the block's end",
        "fsdp_collect_matrices": "`foreach_matrix`",
        "fsdp_next_matrix": "`WholeMatrices` of its block",
        "fsdp_return_matrices": "its end",
    },
    "Python": {
        "fsdp_get_shard_state": "`Shard.state`",
        "fsdp_get_shard_count": "`Model.shards`",
        "fsdp_get_last_error": "`Error`",
        "fsdp_get_version": "`__version__`",
        "fsdp_create_local_contexts": "`run_local`, `create_local_contexts`",
        "fsdp_create_model": "`Context.create_model`",
        "fsdp_create_mesh": "`Context.create_mesh`",
        "fsdp_get_params": "`with Group.unsharded()`: `Group.tensors`",
        "fsdp_unshard": "`with Group.unsharded()`, `Group.unshard`",
        "fsdp_reshard": "its end, `Group.reshard`",
        "fsdp_unshard_piece": "`with Group.unsharded(piece=0)`, `Group.unshard`",
        "fsdp_reshard_piece": "its end, `Group.reshard`",
        "fsdp_get_param": "`Group.tensors` of a piece",
        "fsdp_get_shard": "`Model.shards`",
        "fsdp_next_shard_chunk": "`for chunk in Model.shard_chunks()`",
        "fsdp_get_shard_chunk_state": "`ShardChunk.state`",
        "fsdp_put_grad": "`Group.put_grad`",
        "fsdp_begin_span": "`with Context.span()`",
        "fsdp_end_span": "its end",
        "fsdp_collect_matrices": "`for matrix in Model.matrices()`",
        "fsdp_next_matrix": "its next `Matrix`",
        "fsdp_return_matrices": "its end",
    },
}


class Binding:
    """A language's column."""

    def __init__(self, language, paths):
        self.language = language
        self.mark, reader, _ = LANGUAGES[language]
        self.text = "\n".join(path.read_text() for path in paths)
        self.found = {}
        for path in paths:
            for call, places in reader(path.read_text()).items():
                self.found.setdefault(call, []).extend(places)

    def spelled(self, owner, name):
        if name == "__init__" or name == "new" and self.language != "Rust":
            return owner
        return name if not owner or "::" in name or name == owner else f"{owner}{self.mark}{name}"

    def cell(self, call):
        if call in IDIOMS[self.language]:
            text = IDIOMS[self.language][call]
            named = set(re.findall(r"\w+", " ".join(re.findall("`([^`]*)`", text))))
            missing = sorted(word for word in named if not re.search(rf"\b{word}\b", self.text))
            if missing:
                raise SystemExit(f"table.py: IDIOMS names {', '.join(missing)} for {call}, which {self.language} has not")
            return text
        places = list(dict.fromkeys(self.found.get(call, [])))
        if call.startswith("fsdp_destroy_") and places:
            return f"end of `{call[len('fsdp_destroy_'):].capitalize()}`"
        hidden = [name for _, name in places if not name or name[0] in "-_" and name != "__init__"]
        if hidden:
            raise SystemExit(f"table.py: IDIOMS must say what {self.language} writes for {call}, made by {hidden}")
        low = {"Python": f"lib.{call[len('fsdp_'):]}", "Julia": f"LibFSDP.{call}"}.get(self.language, call)
        return ", ".join(f"`{self.spelled(*place)}`" for place in places) or f"`{low}`"


def table():
    there = {language: sorted(HERE.glob(files)) for language, (_, _, files) in LANGUAGES.items()}
    bindings = [Binding(language, files) for language, files in there.items() if files]
    lines = ["| C: fsdp.h | " + " | ".join(binding.language for binding in bindings) + " |",
             "|" + " --- |" * (len(bindings) + 1)]
    lines += [f"| `{call}` | " + " | ".join(binding.cell(call) for binding in bindings) + " |" for call in CALLS]
    return "\n".join(lines) + "\n"


def main():
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    wanted = head + BEGIN + table() + END + rest.split(END)[1]
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted)
        return 0
    texts = page.split("\n"), wanted.split("\n")
    difference = list(difflib.unified_diff(*texts, "docs/bindings.md", "as table.py writes it", "", "", 1))
    print("\n".join(difference) or f"{len(CALLS)} calls: as the bindings have them")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
