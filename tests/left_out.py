#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Names the tests of builds that no run of any of them has run. usage: left_out.py LOG_JSON...

A log lies in BUILD/meson-logs. A test that was run and skipped has been run. Succeeds if there is none.
"""
import json
import subprocess
import sys
from pathlib import Path


def defined(build):
    """Meson's own list, by name: two tests of one name could not be told apart."""
    done = subprocess.run(["meson", "introspect", "--tests", str(build)], capture_output=True, text=True, check=True)
    tests = {}
    for test in json.loads(done.stdout):
        if tests.setdefault(test["name"], test) is not test:
            sys.exit(f"left_out.py: {build} has two tests of the name '{test['name']}'")
    return tests


def ran(log):
    """A log has "project:suite+suite / name"."""
    with open(log, encoding="utf-8") as lines:
        return {json.loads(line)["name"].rpartition(" / ")[2] for line in lines}


def main():
    logs = [Path(log) for log in sys.argv[1:] if Path(log).is_file()]
    tests = {}
    for build in {log.parent.parent for log in logs}:
        tests.update(defined(build))
    done = set().union(*map(ran, logs))
    for name in sorted(tests.keys() - done):
        suites = ", ".join(suite.rpartition(":")[2] for suite in tests[name]["suite"])
        print(f"FAILED: no stage of tests/run.sh has run the test '{name}' (suites: {suites})")
    print(f"{len(tests.keys() & done)} of {len(tests)} tests were run")
    return 0 if tests and not tests.keys() - done else 1


if __name__ == "__main__":
    sys.exit(main())
