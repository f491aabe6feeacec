#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every call and constant of abi.json is used by a binding. usage: complete.py [--calls] FILE...

--calls: constants are the header's own there. A word of the binding's files counts; comments do not.
"""
import json
import pathlib
import re
import sys

ABI = json.loads((pathlib.Path(__file__).resolve().parent / "abi" / "abi.json").read_text())
# Of the header alone, or for every binding the same as leaving the argument out.
NOT_NEEDED = {"FSDP_VERSION_MAJOR", "FSDP_VERSION_MINOR", "FSDP_VERSION_PATCH"}


def words(paths):
    text = "\n".join(pathlib.Path(path).read_text() for path in paths)
    return set(re.findall(r"\bfsdp_\w+|\bFSDP_\w+", re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)))


def main():
    names = {call["name"] for call in ABI["calls"]}
    paths = sys.argv[1:]
    if paths[:1] == ["--calls"]:
        paths = paths[1:]
    else:
        names |= set(ABI["macros"]) | {name for family in ABI["constants"] for name in family["values"]}
    missing = sorted(names - NOT_NEEDED - words(paths))
    for name in missing:
        print(f"{name} is not reached", file=sys.stderr)
    print(f"{len(names)} names, {len(missing)} missing")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
