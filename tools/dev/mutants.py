# SPDX-License-Identifier: Apache-2.0
"""The mutants of C++ source: each is one line, changed in one place. Pure: text in, mutants out."""
import collections
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int  # from 1
    kind: str
    before: str
    after: str
    occurrence: int = 1  # the first, second ... line of the file with this text

    @property
    def key(self):
        nth = f"|{self.occurrence}" if self.occurrence > 1 else ""
        return f"{self.file}|{self.before.strip()}|{self.after.strip()}{nth}"

    def diff(self):
        return f"--- {self.file}:{self.line} ({self.kind})\n-{self.before}\n+{self.after}"


CALL = re.compile(r"^\s*(?:if \([^;{}]*\) |else )?[A-Za-z_][\w:.\->*()\[\]]*\(.*\);$")
# Beginnings of statements that are not calls, and of calls without which the code would not compile.
NO_CALL = re.compile(r"^\s*(?:return|throw|using|typedef|static_assert|delete|goto|case|co_\w+|for|while|do|switch|#)\b|^\s*\}")
DECLARATION = re.compile(r"^\s*(?:const |constexpr |static |std::|[\w:<>,*& ]+ )[\w:<>,*& ]*\s\**&?\w+\(.*\)(?: const)?(?: noexcept)?;$")
ARGUMENTS = re.compile(r"\(([\w.\->\[\]]+), ([\w.\->\[\]]+)\)")
RELATIONS = [(" < ", " <= "), (" <= ", " < "), (" > ", " >= "), (" >= ", " > "), (" == ", " != "), (" != ", " == "),
             (" && ", " || "), (" || ", " && ")]
NUMBER = re.compile(r"(?<![\w.\"'])(\d+)(?![\w.'])")


def blank_literals(line):
    """The line with blanks in place of comments and quoted text, where no mutant is made."""
    text = re.sub(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])+\'', lambda m: m[0][0] + " " * (len(m[0]) - 2) + m[0][-1], line)
    at = text.find("//")
    return text if at < 0 else text[:at] + " " * (len(text) - at)


def replaced(line, begin, end, text):
    return line[:begin] + text + line[end:]


def drop_call(line, code):
    text = code.rstrip()
    if not CALL.match(text) or NO_CALL.match(text) or DECLARATION.match(text):
        return
    head = re.match(r"^\s*(?:if \((?:[^()]|\([^()]*\))*\) |else )?", text)[0]
    if text[len(head):].count("(") == text[len(head):].count(")"):
        yield line[:len(head)] + "static_cast<void>(0);" + line[len(text):]


def negate(line, code):
    match = re.search(r"\b(?:if|while) \((?!const |auto )", code)
    if not match:
        return
    depth, at = 1, match.end()
    while at < len(code) and depth:
        depth += {"(": 1, ")": -1}.get(code[at], 0)
        at += 1
    inside = code[match.end():at - 1]
    if depth == 0 and ";" not in inside and not re.match(r"[\w:]+ \*?\w+ = ", inside):
        yield replaced(line, match.end(), at - 1, f"!({line[match.end():at - 1]})")


def relate(line, code):
    for old, new in RELATIONS:
        if old == " && " and re.search(r"&& \w+\)? (?:noexcept|=)|auto &&", code):
            continue
        start = 0
        while (at := code.find(old, start)) >= 0:
            start = at + 1
            if "template" not in code and "operator" not in code:
                yield replaced(line, at, at + len(old), new)


def off_by_one(line, code):
    for match in re.finditer(r" ([+-]) 1\b(?!\.)", code):
        yield replaced(line, match.start(), match.end(), "")
    for match in re.finditer(r"\[(\w+)\]", code):
        if not match[1].isdigit() and not re.search(r"\b(?:operator|\[\[)", code):
            yield replaced(line, match.start(1), match.end(1), f"{match[1]} ? {match[1]} - 1 : 0")


def swap_arguments(line, code):
    for match in ARGUMENTS.finditer(code):
        if match[1] != match[2] and not re.match(r"^\s*(?:for|if constexpr)", code):
            yield replaced(line, match.start(), match.end(), f"({match[2]}, {match[1]})")


def drop_term(line, code):
    for match in re.finditer(r" ([+*/%-]|&|\|) ([\w.\->]+)(\([\w., ]*\))?(?=[;,) ])", code):
        if match[2] != "1" and not re.search(r"[\w>] [*&] \w+ =", code):
            yield replaced(line, match.start(), match.end(), "")


def constant(line, code):
    for match in NUMBER.finditer(code):
        if re.search(r"\b(?:std::get<|alignas|\[\d+\]$)", code):
            continue
        yield replaced(line, match.start(), match.end(), str(int(match[1]) + 1))
    for old, new in (("true", "false"), ("false", "true")):
        for match in re.finditer(rf"\b{old}\b", code):
            yield replaced(line, match.start(), match.end(), new)


def extreme(line, code):
    for old, new in (("std::max", "std::min"), ("std::min", "std::max"), ("++", "--"), (" += ", " -= ")):
        start = 0
        while (at := code.find(old, start)) >= 0:
            start = at + len(old)
            follows = code[start:start + 1]
            if old.startswith("std") and (follows.isalnum() or follows == "_"):
                continue
            if old == "++" and re.match(r"^\s*for ", code):
                continue
            yield replaced(line, at, at + len(old), new)


KINDS = {"call dropped": drop_call, "condition negated": negate, "relation": relate, "off by one": off_by_one,
         "arguments swapped": swap_arguments, "term dropped": drop_term, "constant": constant, "extreme": extreme}


def of_text(file, text, executable=None):
    """Mutants of a file, in order; executable: the lines that code was made of (all where it is None)."""
    found, occurrences = [], collections.Counter()
    for number, line in enumerate(text.splitlines(), 1):
        code = blank_literals(line)
        occurrences[line.strip()] += 1
        if executable is not None and number not in executable:
            continue
        if not code.strip() or code.lstrip().startswith(("#", "namespace", "}", "template", "using")):
            continue
        seen = set()
        for kind, make in KINDS.items():
            for after in make(line, code):
                if after != line and after not in seen:
                    seen.add(after)
                    found.append(Mutant(file, number, kind, line, after, occurrences[line.strip()]))
    return found
