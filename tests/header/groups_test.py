#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/dev/header_groups.py turns the sections of fsdp.h into groups of Doxygen and changes nothing but comments.
usage: groups_test.py ROOT     Reports in the Test Anything Protocol.
"""

import re
import sys
from pathlib import Path

ROOT = Path(sys.argv[1])
sys.path.insert(0, str(ROOT / "tools" / "dev"))
from header_groups import write_groups  # noqa: E402

HEADER = (ROOT / "include" / "fsdp.h").read_text(encoding="utf-8")
MADE = write_groups(HEADER)
ONE = '''#define FSDP_API
/* ---- first one ---- */
/**
 * Calls fsdp_b with <x> and "Blocks: no" in
 * two lines. Collective: no. Errors: FSDP_BAD,
 * FSDP_OTHER. Since 0.2.
 *   Table  stays
 */
FSDP_API int fsdp_a(void);
enum { FSDP_BAD = 1 /* as fsdp_a
                       says */ };
/* ---- second ---- */
FSDP_API int fsdp_b(void);
#ifdef __cplusplus
}
#endif
'''
number = 0


def case(name, passed, told=""):
    global number
    number += 1
    print(f"{'ok' if passed else 'not ok'} {number} - {name}{f' # {told}' if not passed else ''}")
    return passed


def code(text):
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S).split()


def words(text):
    return re.findall(r"[a-zA-Z_]+", " ".join(re.findall(r"/\*.*?\*/", text, re.S)))


def sections():
    return re.findall(r"^/\* -{4} (.+?) -+ \*/$", HEADER, re.M)


def main():
    groups = re.findall(r"@defgroup \w+ (.+)\n", MADE)
    lost = set(words(HEADER)) - set(words(MADE)) - {"Since"}
    small = write_groups(ONE)
    return all(
        [
            case("the code is that of the header", code(MADE) == code(HEADER)),
            case("each section is a group", [name.lower() for name in groups] == [name.lower() for name in sections()]),
            case("every group ends", MADE.count("@{") == MADE.count("@}") == len(sections()) > 10),
            case("no word of a comment is lost", not lost, lost),
            case("names link to calls", "Calls #fsdp_b with" in small, small),
            case("unknown names do not link", "#FSDP_BAD, FSDP_OTHER." in small, small),
            case("marks of HTML are escaped", "\\<x\\>" in small, small),
            case("topics are paragraphs", "@par Collective\nno.\n\n@par Errors\n" in small, small),
            case("quoted topics are none", '"Blocks: no" in two lines.\n' in small, small),
            case("the release is named", "@since 0.2\n" in small and "Since" not in small, small),
            case("tables stay as they are", "@verbatim\n  Table  stays\n@endverbatim" in small, small),
            case("comments behind values are theirs", "/**< as #fsdp_a says */" in small, small),
        ]
    )


if __name__ == "__main__":
    passed = main()
    print(f"1..{number}")
    sys.exit(0 if passed else 1)
