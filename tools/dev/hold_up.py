#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs tests while threads are held up at random (hold_up.c), so that races of tests show without a busy machine.

usage: tools/dev/hold_up.py BUILD PATTERN... [--seed S] [--every N] [--ms M] [--jobs J]

PATTERN: names of suites or tests, such as 'waiting*'. The last line is "N passed, N failed"; the output of failed tests
stays in BUILD/held-up/.
"""
import argparse
import concurrent.futures
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 1200


def matches(test, patterns):
    words = [test["name"], *(suite.split(":")[-1] for suite in test["suite"])]
    return any(fnmatch.fnmatch(word, pattern) for word in words for pattern in patterns)


def run_test(test, library, folder, arguments):
    environment = {**os.environ, **test["env"], "HOLD_UP_SEED": str(arguments.seed), "HOLD_UP_EVERY": str(arguments.every),
                   "HOLD_UP_MS": str(arguments.ms)}
    environment["LD_PRELOAD"] = ":".join(filter(None, [str(library), environment.get("LD_PRELOAD")]))
    output = folder / f"{test['name'].replace('/', '_').replace(' ', '_')}.{arguments.seed}"
    with open(output, "wb") as file:
        try:
            code = subprocess.run(test["cmd"], env=environment, cwd=test["workdir"] or arguments.build, stdin=subprocess.DEVNULL,
                                  stdout=file, stderr=subprocess.STDOUT, timeout=LIMIT_S).returncode
        except subprocess.TimeoutExpired:
            code = "no end"
    passed = code in (0, 77) and b"\nnot ok" not in b"\n" + output.read_bytes()
    if passed:
        output.unlink()
    return test["name"], passed, code, output


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("patterns", nargs="+")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=300)
    parser.add_argument("--ms", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=6)
    arguments = parser.parse_args()
    asked = ["meson", "introspect", "--tests", str(arguments.build)]
    tests = [t for t in json.loads(subprocess.run(asked, check=True, capture_output=True).stdout) if matches(t, arguments.patterns)]
    if not tests:
        sys.exit(f"hold_up.py: no test of {arguments.build} is of {' or '.join(arguments.patterns)}")
    folder = arguments.build / "held-up"
    folder.mkdir(exist_ok=True)
    failed = 0
    with tempfile.TemporaryDirectory() as built, concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        library = Path(built) / "hold_up.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, Path(__file__).with_suffix(".c"), "-ldl"], check=True)
        waiting = [pool.submit(run_test, test, library, folder, arguments) for test in tests]
        for done in concurrent.futures.as_completed(waiting):
            name, passed, code, output = done.result()
            failed += not passed
            print(f"{'ok' if passed else 'FAILED'} {name}" + ("" if passed else f": {code}, see {output}"), flush=True)
    print(f"{len(tests) - failed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
