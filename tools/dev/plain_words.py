#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts what makes comments and documents hard to read: who, whoever, nobody, somebody and the like, which hide what is
meant, and sentences of more than 35 words.

usage: plain_words.py [--list] [ROOT]
  --list  show each one with its file and line

Read are the comments of C++, C, CUDA, Rust, Julia, Python, shell and Meson files, and the prose of Markdown files. Tables,
drawings, code blocks and what a release froze are left out.
"""
import re
import subprocess
import sys
from pathlib import Path

LONGEST = 35
HIDING = re.compile(r"\b(who|whoever|whom|nobody|somebody|everybody|anybody)\b", re.I)
SLASHES = {".cpp", ".h", ".hpp", ".cu", ".cuh", ".c", ".rs"}
HASHES = {".py", ".sh", ".jl", ".build"}
ROOMS = ("lib", "include", "tools", "bindings", "examples", "tests", "docs")


def files(root):
    listed = subprocess.run(["git", "-C", str(root), "ls-files"], capture_output=True, text=True)
    names = listed.stdout.split("\n") if listed.returncode == 0 and listed.stdout else (
        path.relative_to(root).as_posix() for path in sorted(root.rglob("*")))
    for name in names:
        path = root / name
        room = name.split("/")[0] if "/" in name else "docs"
        if room in ROOMS and path.is_file() and "/frozen/" not in name and not name.endswith("must_die.json"):
            yield name, room, path


def comments(text, mark):
    """(line, text) of each block of comments: neighbouring lines that are nothing else, or the end of one line."""
    block, start, inside = [], 0, False
    for number, line in enumerate(text.split("\n"), 1):
        said = None
        if mark == "//" and (inside or line.lstrip().startswith("/*")):
            said = re.sub(r"^\s*/?\*+/?|\*/.*$", "", line)
            inside = "*/" not in line
        elif match := re.match(r"\s*" + mark + r"+[/!]*(.*)", line):
            said = match[1]
        if said is not None:
            start = start or number
            drawn = "SPDX-License" in said or re.match(r"\s\s|\s*[-*|+#]", said) or "   " in said.strip() or " -> " in said
            block.append("" if drawn else said.strip())
            continue
        if block:
            yield start, "\n".join(block)
        block, start = [], 0
        if match := re.search(r"\s" + mark + r"+<?\s(.*)", re.sub(r'"(\\.|[^"\\])*"', '""', line)):
            yield number, match[1]
    if block:
        yield start, "\n".join(block)


def paragraphs(text):
    """(line, text) of each paragraph or item of a Markdown file; tables, code and headings are not prose."""
    block, start, code = [], 0, False
    for number, line in enumerate(text.split("\n") + [""], 1):
        fence = line.lstrip().startswith("```")
        code ^= fence
        item = re.match(r"\s*([-*]|\d+\.)\s", line)
        prose = not (code or fence or not line.strip() or line.lstrip().startswith(("|", "#", "<", ">")))
        if block and (item or not prose):
            yield start, "\n".join(block)
            block = []
        if prose:
            start = start if block else number
            block.append(line.strip())


def sentences(text):
    text = re.sub(r"`[^`]*`|\[([^]]*)\]\([^)]*\)", lambda match: match[1] or "code", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*] )", text):
        yield from re.split(r"(?<=[.!?])[)*]*\s+", paragraph)


def blocks(path):
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix in SLASHES:
        return comments(text, "//")
    if path.suffix in HASHES:
        return comments(text, "#")
    return paragraphs(text) if path.suffix == ".md" else ()


def findings(root):
    """(room, file, line, kind, words) of each word that hides what is meant, and of each long sentence."""
    for name, room, path in files(Path(root)):
        for number, text in blocks(path):
            for word in HIDING.findall(text):
                yield room, name, number, "hiding word", word
            for sentence in sentences(text):
                if len(sentence.split()) > LONGEST:
                    yield room, name, number, "long sentence", " ".join(sentence.split())


def main():
    shows = "--list" in sys.argv[1:]
    roots = [word for word in sys.argv[1:] if not word.startswith("-")]
    found = list(findings(roots[0] if roots else Path(__file__).resolve().parents[2]))
    if shows:
        for _, name, number, kind, words in found:
            print(f"{name}:{number}: {kind}: {words}")
    print(f"{'room':10} {'hiding words':>12} {'long sentences':>14}")
    for room in (*ROOMS, "all"):
        counts = [sum(kind == wanted and room in (at, "all") for at, _, _, kind, _ in found)
                  for wanted in ("hiding word", "long sentence")]
        print(f"{room:10} {counts[0]:12} {counts[1]:14}")


if __name__ == "__main__":
    main()
