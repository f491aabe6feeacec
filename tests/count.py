#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints "passed failed skipped" of one Meson test run. usage: count.py TESTLOG_JSON EXIT_STATUS

If a program reports its cases (GoogleTest's summary, TAP), these are counted; otherwise the program is one case. A
program
that failed without a failing case (a crash, a sanitizer's report, a timeout) is one failure, and so is a run that failed
without any, and a GoogleTest program that ran no case.
"""
import json
import re
import sys

PASSING = {"OK", "EXPECTEDFAIL"}


def last_number(pattern, text):
    found = re.findall(pattern, text, re.M)
    return int(found[-1]) if found else 0


def count_cases(text):
    if re.search(r"^\[==========\]", text, re.M):
        return [last_number(rf"^\[  {word} +\] (\d+) tests?\b", text) for word in ("PASSED", "FAILED", "SKIPPED")]
    cases = re.findall(r"^(ok|not ok)\b([^\n]*)", text, re.M)
    skipped = sum("# SKIP" in rest for _, rest in cases)
    failed = sum(word == "not ok" for word, _ in cases)
    return [len(cases) - skipped - failed, failed, skipped]


def has_run_nothing(test):
    """A filter that no longer names a case would otherwise count as a success."""
    text = test.get("stdout", "")
    return test["result"] in PASSING and bool(re.search(r"^\[==========\]", text, re.M)) and not any(count_cases(text))


def count_test(test):
    if test["result"] == "SKIP":
        return [0, 0, 1]
    passed, failed, skipped = count_cases(test.get("stdout", ""))
    if test["result"] not in PASSING or has_run_nothing(test):
        return [passed, max(failed, 1), skipped]
    return [passed, failed, skipped] if passed + failed + skipped else [1, 0, 0]


def explain(test):
    """Meson names the failing cases of a TAP program but does not show what it printed about them."""
    lines = [line for line in test.get("stdout", "").splitlines() if re.match(r"not ok\b|#", line)]
    if test["result"] not in PASSING and test["result"] != "SKIP" and lines:
        print(f"== {test['name']}", *lines, sep="\n", file=sys.stderr)
    if has_run_nothing(test):
        print(f"== {test['name']}: not one of its cases was run", file=sys.stderr)


def main():
    path, status = sys.argv[1], int(sys.argv[2])
    totals = [0, 0, 0]
    try:
        with open(path, encoding="utf-8") as log:
            for line in log:
                test = json.loads(line)
                totals = [a + b for a, b in zip(totals, count_test(test))]
                explain(test)
    except OSError as error:
        print(f"count.py: {error}", file=sys.stderr)
    if totals[1] == 0 and (status != 0 or sum(totals) == 0):
        totals[1] = 1
    print(*totals)


if __name__ == "__main__":
    main()
