#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests of this folder and reports in the Test Anything Protocol, for Meson. usage: run.py
[NAME_OF_A_TEST_FILE...]

FSDP_LIBRARY names the library, FSDP_RUN the launcher. `python3 -m unittest discover -s bindings/python/tests` or pytest
do, too.
"""

import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]


class Tap(unittest.TestResult):
    number = 0

    def line(self, passed, test, more=""):
        self.number += 1
        print(f"{'ok' if passed else 'not ok'} {self.number} - {test.id()}{more}", flush=True)

    def addSuccess(self, test):
        super().addSuccess(test)
        self.line(True, test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.line(True, test, f" # SKIP {reason}")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.line(False, test)
        print("# " + self.failures[-1][1].replace("\n", "\n# "))

    def addSubTest(self, test, part, error):
        super().addSubTest(test, part, error)
        if error:
            self.line(False, part)
            print("# " + (self.failures + self.errors)[-1][1].replace("\n", "\n# "))

    def addError(self, test, error):
        super().addError(test, error)
        self.line(False, test)
        print("# " + self.errors[-1][1].replace("\n", "\n# "))


def main():
    loader = unittest.TestLoader()
    suite = loader.loadTestsFromNames(sys.argv[1:]) if sys.argv[1:] else loader.discover(str(HERE))
    result = suite.run(Tap())
    print(f"1..{result.number}")
    return 0 if result.wasSuccessful() and result.number else 1


if __name__ == "__main__":
    sys.exit(main())
