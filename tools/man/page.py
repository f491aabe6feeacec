#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a tool's man page from its --help, and from the --help of its commands.

usage: page.py VERSION TOOL     the page, to standard output; of today, or of SOURCE_DATE_EPOCH's day
"""
import datetime
import os
import pathlib
import re
import subprocess
import sys
import time

HEADING = re.compile(r"(\w[\w ]*):$")
TERM = re.compile(r"  (\S.*)$")


def ask(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, universal_newlines=True).stdout.split("\n")


def escaped(text):
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def term(signature):
    """An option's names in bold, what it takes in italics, without CLI11's words for types that say nothing."""
    names, _, takes = signature.partition(" ")
    takes = re.sub(r"\b(UINT|INT|TEXT|FLOAT):(?=\S)", "", takes)
    takes = re.sub(r"\bINT in (\[[^]]*\])", r"N in \1", takes)
    names = re.sub(r"\{\w+\}$", "", names).replace(",", ", ")
    takes = re.sub(r",(?=\w)", ", ", takes)  # a list of names may be longer than a line
    return f"\\fB{escaped(names)}\\fR" + (f" \\fI{escaped(takes)}\\fR" if takes else "")


def entries(lines):
    """The options, arguments or commands of a section as [signature, description]."""
    found = []
    for line in lines:
        match = TERM.match(line)
        if match and not line.startswith("     "):
            parts = re.split(r"  +", match[1].strip(), maxsplit=1)
            found.append([parts[0], parts[1] if len(parts) > 1 else ""])
        elif line.strip() and found:
            found[-1][1] = f"{found[-1][1]} {line.strip()}".strip()
    return found


def split(lines):
    """Takes --help apart: a line about the tool, the usage, its sections, and the text behind them."""
    about, usage, sections, rest = lines[0], "", [], []
    for line in lines[1:]:
        heading = HEADING.fullmatch(line)
        if line.startswith("Usage: "):
            usage = line[len("Usage: "):]
        elif heading and not rest and heading[1].lower() != "examples":
            sections.append((heading[1], []))
        elif sections and (line.startswith("  ") or not line) and not rest:
            sections[-1][1].append(line)
        elif line or rest:
            rest.append(line)
    while rest and not rest[-1]:
        rest.pop()
    return about, usage, [(name, entries(block)) for name, block in sections], rest


def prose(lines):
    """Writes text: lines that are indented, as those of examples, are kept as they are."""
    as_is = False
    for line in lines:
        indented = line.startswith("  ")
        if indented != as_is and line:
            yield ".nf" if indented else ".fi"
            as_is = indented
        yield escaped(line) if line else "" if as_is else ".PP"
    if as_is:
        yield ".fi"


def options(sections, level):
    for name, block in sections:
        if name.lower() == "subcommands":
            continue
        yield f".{level} {name.upper() if level == 'SH' else name}"
        for signature, text in block:
            yield from (".TP", term(signature), escaped(text))


def command_page(tool, command, shared):
    about, usage, sections, rest = split(ask(tool, command, "--help"))
    yield from (f".SS {command}", ".B " + escaped(usage), ".PP", escaped(about))
    for _, block in sections:
        for signature, text in block:
            yield from (".TP", term(signature), escaped(text))
    if rest != shared:
        yield from (".PP", *prose(rest))


def page(version, tool, date):
    name = pathlib.Path(tool).name
    about, usage, sections, rest = split(ask(tool, "--help"))
    about = about.split(f": {name}")[0].rstrip(".")
    yield from (f'.TH {name.upper()} 1 {date} "libfsdp {version}" "libfsdp"', ".SH NAME",
                f"{escaped(name)} \\- {escaped(about[0].lower() + about[1:])}", ".SH SYNOPSIS", ".B " + escaped(usage))
    yield from options(sections, "SH")
    commands = [entry[0] for section, block in sections if section.lower() == "subcommands" for entry in block]
    if commands:
        yield ".SH COMMANDS"
        for command in commands:
            yield from command_page(tool, command, rest)
    if any(rest):
        yield from (".SH NOTES", *prose(rest))
    others = [other for other in ("ckpt", "info", "perf", "plan", "run") if f"fsdp-{other}" != name]
    yield from (".SH SEE ALSO", ", ".join(f"\\fBfsdp\\-{other}\\fR(1)" for other in others))


def main():
    version, tool = sys.argv[1:]
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    lines = list(page(version, tool, datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).date()))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
