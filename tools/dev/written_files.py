# SPDX-License-Identifier: Apache-2.0
"""What a script writes into the repository, and what CI compares with it."""
import argparse
import difflib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def compare(path, written, source):
    kept = path.read_text() if path.exists() else ""
    name = str(path.relative_to(ROOT))
    for line in difflib.unified_diff(kept.splitlines(), written.splitlines(), name, source, lineterm=""):
        print(line)
    if kept != written:
        script = pathlib.Path(sys.argv[0]).resolve().relative_to(ROOT)
        print(f"{source} and {name} differ: python3 {script} writes it anew.", file=sys.stderr)
    return kept == written


def write_or_compare(description, files, source):
    """files: {path: text}, made from what `source` names. Returns the status to exit with: 1 if --check finds a difference."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        return 0 if all([compare(path, text, source) for path, text in files.items()]) else 1
    for path, text in files.items():
        path.write_text(text)
    return 0
