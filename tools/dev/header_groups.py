#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes include/fsdp.h as Doxygen reads it: sections as groups, docstrings as paragraphs. It is the INPUT_FILTER of
docs/Doxyfile.in, so the header itself has no command of Doxygen. Only comments are changed.

usage: header_groups.py HEADER
"""

import re
import sys
from pathlib import Path

SECTION = re.compile(r"^/\* -{4} (.+?) -+ \*/$", re.M)
COMMENT = re.compile(r"/\*.*?\*/", re.S)
TOPICS = ("Collective", "Blocks", "Window", "Streams?", "Memory", "Threads", "Errors")
TOPIC = re.compile(rf'(?<![\w"])({"|".join(TOPICS)}): ')
NAME = re.compile(r"\b(?:fsdp|FSDP)_\w*[a-zA-Z0-9]\b(?!\*)")
ESCAPED = re.compile(r"[\\@#<>&%]")
END = "#ifdef __cplusplus\n}\n#endif\n"


def write_groups(text):
    """The header with the comments that Doxygen reads."""
    targets, sections = linked_names(text), []

    def replace(found):
        comment, before = found[0], text[text.rfind("\n", 0, found.start()) + 1 : found.start()]
        if section := SECTION.match(comment):
            sections.append(section[1])
            return ("/** @} */\n" if len(sections) > 1 else "") + begin_group(section[1])
        if comment.startswith("/**"):
            return docstring(lines_of(comment), targets)
        if before.strip() and not before.lstrip().startswith("#"):
            return "/**< " + inline(" ".join(" ".join(lines_of(comment)).split()), targets) + " */"
        return main_page(lines_of(comment)) if "fsdp.h - " in comment else comment

    made = COMMENT.sub(replace, text)
    at = made.rindex(END)
    return made[:at] + "/** @} */\n" + made[at:]


def begin_group(section):
    slug = re.sub(r"\W+", "_", section.lower()).strip("_")
    return f"/** @defgroup {slug} {section[0].upper()}{section[1:]}\n * @{{ */"


def linked_names(text):
    """What a docstring can link to: calls, constants and macros. Doxygen links structs by itself."""
    code = COMMENT.sub("", text)
    calls = re.findall(r"\b(fsdp_\w+)\(", code)
    constants = re.findall(r"^\s+(FSDP_\w+)(?= =)|[{,] (FSDP_\w+)(?= =)", code, re.M)
    return set(calls) | {name for pair in constants for name in pair if name}


def lines_of(comment):
    """The text of a comment without its marks."""
    body = re.sub(r"^/\*+|\*/$", "", comment)
    return [re.sub(r"^\s*\* ?", "", line).rstrip() if at else line.strip() for at, line in enumerate(body.split("\n"))]


def docstring(lines, targets):
    """Indented lines are tables, and stay as they are."""
    blocks = []
    for line in lines:
        is_table = line.startswith("  ") and bool(line.strip())
        if not blocks or blocks[-1][0] != is_table:
            blocks.append((is_table, []))
        blocks[-1][1].append(line)
    return "/**\n" + "\n".join(table(own) if is_table else prose(own, targets) for is_table, own in blocks) + "\n */"


def table(lines):
    return "@verbatim\n" + "\n".join(lines) + "\n@endverbatim"


def prose(lines, targets):
    paragraphs = "\n".join(lines).split("\n\n")
    return "\n\n".join(topics(" ".join(each.split("\n")).strip(), targets) for each in paragraphs)


def topics(paragraph, targets):
    """Each of "Collective: ... Blocks: ... Errors: ..." becomes a paragraph with a title."""
    paragraph, since = re.subn(r"\s*\bSince (\d+\.\d+)\.$", "", paragraph), re.search(r"Since (\d+\.\d+)\.$", paragraph)
    parts = TOPIC.split(paragraph[0])
    made = [inline(parts[0].strip(), targets)]
    for title, text in zip(parts[1::2], parts[2::2]):
        made.append(f"@par {title}\n{inline(text.strip(), targets)}")
    if since:
        made.append(f"@since {since[1]}")
    return "\n\n".join(each for each in made if each)


def inline(text, targets):
    """Escapes what Doxygen would take for a command, and links names."""
    text = ESCAPED.sub(lambda found: "\\" + found[0], text)
    return NAME.sub(lambda found: "#" + found[0] if found[0] in targets else found[0], text)


def main_page(lines):
    body = "\n".join(line.replace("*/", "") for line in lines)
    return "/** @mainpage fsdp.h\n@verbatim\n" + body + "\n@endverbatim\n */"


if __name__ == "__main__":
    sys.stdout.write(write_groups(Path(sys.argv[1]).read_text(encoding="utf-8")))
