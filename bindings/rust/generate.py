#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what the Rust crates take from bindings/abi/abi.json: all of fsdp-sys but its lib.rs, and the enums and options of fsdp.

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
HEAD = "// SPDX-License-Identifier: Apache-2.0\n// Written by bindings/rust/generate.py from bindings/abi/abi.json.\n"
PLAIN = {"uint32_t": "u32", "uint64_t": "u64", "int32_t": "i32", "int64_t": "i64", "float": "f32", "double": "f64", "char": "c_char",
         "void": "c_void"}
KEYWORDS = {"type", "ref", "in", "box", "move", "match", "use", "where", "impl", "fn"}
HOOKS = {hook["name"] for hook in ABI["hooks"]}

# Options of the safe crate: the prefix of their flags, and the fields that its own code sets, with the type they are kept in.
OPTIONS = {
    "fsdp_context_options": ("FSDP_CONTEXT_", {"interrupted_flag": None, "interrupted": None, "interrupted_data": None,
                                               "log": None, "log_data": None, "world_size": None, "rank": None,
                                               "device_index": None}),
    "fsdp_mesh_options": (None, {"ranks": "Vec<u32>", "rank_count": None}),
    "fsdp_model_options": ("FSDP_MODEL_", {"mesh": None}),
    "fsdp_group_options": ("FSDP_GROUP_", {"mesh": None}),
    "fsdp_adamw_options": ("FSDP_ADAMW_", {}),
    "fsdp_matrix_options": (None, {}),
    "fsdp_save_options": ("FSDP_SAVE_", {}),
    "fsdp_load_options": ("FSDP_LOAD_", {}),
}


def rust_type(text):
    """The Rust spelling of a C type: "const fsdp_mesh *" is *const fsdp_mesh."""
    array = re.fullmatch(r"(\w+)\[(\d+)\]", text)
    if array:
        return f"[{rust_type(array[1])}; {array[2]}]"
    stars = text.count("*")
    base = text.replace("*", "").replace("const", "").strip()
    written = PLAIN.get(base, base)
    for level in range(stars):
        written = ("*const " if level == 0 and text.startswith("const") else "*mut ") + written
    return written


def safe_name(name):
    return f"r#{name}" if name in KEYWORDS else name


def camel(name):
    return "".join(part.capitalize() for part in re.sub("^fsdp_", "", name.lower()).split("_"))


def doc(text, indent=""):
    """A docstring of the header, as it is: its columns have a meaning."""
    text = re.sub(r"^-+ .*? -+$", "", text).strip()
    if not text:
        return ""
    if "\n" not in text and "  " not in text:
        return "".join(f"{indent}/// {escape(line)}\n" for line in textwrap.wrap(text, 110))
    lines = [line.rstrip() for line in text.splitlines()]
    return "".join(f"{indent}///{' ' + line if line else ''}\n" for line in ["```text", *lines, "```"])


def doc_or(text, fallback, indent=""):
    return doc(text, indent) or f"{indent}/// {fallback}\n"


def escape(line):
    return re.sub(r"([\[\]<>*])", r"\\\1", line)


def sys_types():
    out = [HEAD, "use std::os::raw::{c_char, c_void};\n"]
    for name in ABI["handles"]:
        out.append(f"\n/// A number that names an object of the library; nothing can be read through it.\n"
                   f"#[repr(C)]\npub struct {name} {{\n    _private: [u8; 0],\n}}\n")
    out.append("\n/// The very type of cudaStream_t; null on the host.\npub type fsdp_stream = *mut CUstream_st;\n"
               "#[repr(C)]\npub struct CUstream_st {\n    _private: [u8; 0],\n}\n")
    for name, text in ABI["integers"].items():
        out.append(f"\n{doc(text)}pub type {name} = i32;\n")
    for hook in ABI["hooks"]:
        arguments = ", ".join(f"{a['name']}: {rust_type(a['type'])}" for a in hook["arguments"])
        returns = "" if hook["returns"] == "void" else f" -> {rust_type(hook['returns'])}"
        out.append(f"\n{doc(hook['doc'])}pub type {hook['name']} = Option<unsafe extern \"C\" fn({arguments}){returns}>;\n")
    out.append("\n")
    for name, value in ABI["macros"].items():
        out.append(f"pub const {name}: {'i32' if value < 0 else 'u32'} = {value};\n")
    for family in ABI["constants"]:
        for name, value in family["values"].items():
            out.append(f"pub const {name}: {family['type'] or 'u32'} = {value};\n")
    return "".join(out)


def sys_struct(struct):
    fields = struct["fields"]
    has_size = fields[0]["name"] == "struct_size"
    out = [f"\n{doc(struct['doc'])}#[repr(C)]\n#[derive(Clone, Copy)]\npub struct {struct['name']} {{\n"]
    for field in fields:
        out.append(doc(field["doc"], "    ") + f"    pub {safe_name(field['name'])}: {rust_type(field['type'])},\n")
    size = "made.struct_size = std::mem::size_of::<Self>() as u64;" if has_size else ""
    out.append(f"}}\n\nimpl Default for {struct['name']} {{\n    fn default() -> Self {{\n"
               "        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.\n"
               f"        {'let mut made: Self' if has_size else 'let made: Self'} = unsafe {{ std::mem::zeroed() }};\n"
               + (f"        {size}\n" if size else "") + "        made\n    }\n}\n")
    return "".join(out)


def layout_test():
    out = ["\n#[cfg(test)]\nmod tests {\n    use super::*;\n\n"
           "    macro_rules! offset {\n        ($kind:ident, $field:ident) => {{\n"
           "            let made = $kind::default();\n"
           "            std::ptr::addr_of!(made.$field) as usize - std::ptr::addr_of!(made) as usize\n        }};\n    }\n"]
    for struct in ABI["structs"]:
        out.append(f"\n    #[test]\n    fn {struct['name']}_is_laid_out_as_the_compiler_says() {{\n"
                   f"        assert_eq!(std::mem::size_of::<{struct['name']}>(), {struct['size']});\n")
        out += [f"        assert_eq!(offset!({struct['name']}, {safe_name(f['name'])}), {f['offset']});\n"
                for f in struct["fields"]]
        out.append("    }\n")
    return "".join(out) + "}\n"


def sys_structs():
    body = "".join(sys_struct(struct) for struct in ABI["structs"])
    return HEAD + "use crate::types::*;\nuse std::os::raw::{c_char, c_void};\n" + body + layout_test()


def sys_calls():
    out = [HEAD, "use crate::structs::*;\nuse crate::types::*;\nuse std::os::raw::{c_char, c_void};\n\nextern \"C\" {\n"]
    for number, call in enumerate(ABI["calls"]):
        arguments = ", ".join(f"{safe_name(a['name'])}: {rust_type(a['type'])}" for a in call["arguments"])
        returns = "" if call["returns"] == "void" else f" -> {rust_type(call['returns'])}"
        out.append(("\n" if number else "") + doc(call["doc"], "    "))
        if call["returns"] == "fsdp_status":
            out.append("    #[must_use]\n")
        out.append(f"    pub fn {call['name']}({arguments}){returns};\n")
    out.append("}\n\n#[cfg(test)]\nmod tests {\n    use super::*;\n\n"
               "    /// Linking it is the test: the library has every call that the header declares.\n"
               "    #[test]\n    fn every_call_links() {\n        let addresses = [\n")
    out += [f"            {call['name']} as *const () as usize,\n" for call in ABI["calls"]]
    out.append("        ];\n        assert!(addresses.iter().all(|address| *address != 0));\n    }\n}\n")
    return "".join(out)


def strip_prefix(names):
    """What names of one family begin with, up to a '_'; of a single name FSDP and a word."""
    first = min(names, key=len).split("_")
    count = len(first) - 1 if len(names) > 1 else 2
    while not all(name.split("_")[:count] == first[:count] for name in names):
        count -= 1
    return "_".join(first[:count]) + "_"


def safe_enum(family):
    prefix = strip_prefix(list(family["values"]))
    variants = {name: camel(name[len(prefix):]) for name in family["values"]}
    kind = camel(family["type"])
    out = [f"\n{doc_or(ABI['integers'][family['type']], '`' + family['type'] + '` of fsdp.h.')}"
           "#[non_exhaustive]\n#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]\n#[repr(i32)]\n"
           f"pub enum {kind} {{\n"]
    for name, variant in variants.items():
        out.append(f"    /// `{name}`\n    {variant} = sys::{name},\n")
    out.append(f"}}\n\nimpl {kind} {{\n    /// The value of that number in fsdp.h; `None` for one of a later release.\n"
               "    pub fn from_raw(raw: i32) -> Option<Self> {\n        Some(match raw {\n")
    out += [f"            sys::{name} => {kind}::{variant},\n" for name, variant in variants.items()]
    out.append("            _ => return None,\n        })\n    }\n}\n")
    return "".join(out)


def flags_of(prefix):
    families = [family["values"] for family in ABI["constants"] if family["type"] is None]
    return [name for values in families for name in values if prefix and name.startswith(prefix)]


def setter(name, text, kind, statement):
    return (f"\n{doc_or(text, '`' + name + '` of fsdp.h.', '    ')}    pub fn {safe_name(name)}(mut self, {kind}) -> Self {{\n"
            f"        {statement}\n        self\n    }}\n")


def safe_options(struct):
    prefix, own = OPTIONS[struct["name"]]
    kind = camel(struct["name"])
    strings = [f["name"] for f in struct["fields"] if f["type"] == "const char *"]
    kept = {name: "Option<Result<CString>>" for name in strings} | {name: held for name, held in own.items() if held}
    extra = "pub(crate) own: OwnContextOptions" if kind == "ContextOptions" else None
    out = [f"\n{doc_or(struct['doc'], '`' + struct['name'] + '` of fsdp.h; what is not set has its default.')}"
           f"#[derive(Clone{', Default' if kind else ''})]\npub struct {kind} {{\n    pub(crate) raw: sys::{struct['name']},\n"]
    out += [f"    {name}: {held},\n" for name, held in kept.items()] + ([f"    {extra},\n"] if extra else [])
    out.append(f"}}\n\nimpl {kind} {{\n    /// All defaults.\n    pub fn new() -> Self {{\n        Self::default()\n    }}\n")
    for name in flags_of(prefix):
        short = name[len(prefix):].lower()
        out.append(f"\n    /// Sets `{name}`.\n    pub fn {short}(mut self) -> Self {{\n        self.raw.flags |= sys::{name};\n"
                   "        self\n    }\n")
    for field in struct["fields"]:
        name, held = field["name"], field["type"]
        if name in ("struct_size", "flags", "reserved") or (name in own and not own[name]):
            continue
        if name in strings:
            out.append(setter(name, field["doc"], f"{name}: &str", f"self.{name} = Some(c_string({name}));"))
        elif name in own:
            out.append(setter(name, field["doc"], f"{name}: &[u32]", f"self.{name} = {name}.to_vec();"))
        elif held in ABI["integers"]:
            out.append(setter(name, field["doc"], f"{name}: {camel(held)}", f"self.raw.{name} = {name} as i32;"))
        else:
            out.append(setter(name, field["doc"], f"{name}: {rust_type(held)}", f"self.raw.{name} = {name};"))
    out.append("\n    /// The struct for a call; it points into `self`.\n"
               f"    pub(crate) fn as_raw(&self) -> Result<sys::{struct['name']}> {{\n")
    pointers = [f"        raw.{name} = as_pointer(&self.{name})?;\n" for name in strings]
    if "ranks" in own:
        pointers.append("        if !self.ranks.is_empty() {\n            raw.ranks = self.ranks.as_ptr();\n"
                        "            raw.rank_count = self.ranks.len() as u32;\n        }\n")
    out.append("        let mut raw = self.raw;\n" + "".join(pointers) + "        Ok(raw)\n    }\n}\n" if pointers
               else "        Ok(self.raw)\n    }\n}\n")
    return "".join(out)


def safe_enums():
    return HEAD + "use crate::sys;\n" + "".join(safe_enum(family) for family in ABI["constants"] if family["type"])


def safe_option_builders():
    structs = [struct for struct in ABI["structs"] if struct["name"] in OPTIONS]
    return (HEAD + "use crate::enums::*;\nuse crate::error::{as_pointer, c_string, Result};\nuse crate::hooks::OwnContextOptions;\n"
            "use crate::sys;\n"
            "use std::ffi::CString;\n" + "".join(safe_options(struct) for struct in structs))


def main():
    files = {"fsdp-sys/src/types.rs": sys_types(), "fsdp-sys/src/structs.rs": sys_structs(), "fsdp-sys/src/calls.rs": sys_calls(),
             "fsdp/src/enums.rs": safe_enums(), "fsdp/src/options.rs": safe_option_builders()}
    return write_or_compare(__doc__, {HERE / name: text for name, text in files.items()}, "bindings/abi/abi.json")


if __name__ == "__main__":
    sys.exit(main())
