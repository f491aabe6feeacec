# SPDX-License-Identifier: Apache-2.0
"""The program of the README trains, on one rank and on two alike."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy
except ImportError:
    numpy = None

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


@unittest.skipUnless(numpy, "no numpy")
class Readme(unittest.TestCase):
    def setUp(self):
        program = re.search(r"```python\n(.*?)```", README.read_text(), re.S)[1]
        self.assertLessEqual(program.count("\n"), 40)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.program = pathlib.Path(folder.name) / "train.py"
        self.program.write_text(program)

    def losses(self, *launcher):
        done = subprocess.run([*launcher, sys.executable, self.program], capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]

    def test_trains(self):
        alone = self.losses()
        self.assertEqual(len(alone), 3)
        self.assertLess(alone[2], alone[0] / 2)

    @unittest.skipUnless("FSDP_RUN" in os.environ, "FSDP_RUN does not name fsdp-run")
    def test_two_ranks_are_one(self):
        one, two = self.losses(), self.losses(os.environ["FSDP_RUN"], "-n", "2", "--no-prefix", "--")
        self.assertAlmostEqual(one[0], two[0], delta=1.1e-5)  # five digits are printed
        for a, b in zip(one, two):
            self.assertAlmostEqual(a, b, delta=0.01 * a)  # sums are rounded in another order, and steps carry it on


if __name__ == "__main__":
    unittest.main()
