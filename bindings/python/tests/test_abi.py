# SPDX-License-Identifier: Apache-2.0
"""The low-level layer is abi.json's, and every call of the header can be reached."""

import ctypes
import json
import pathlib
import re
import subprocess
import sys
import unittest

import libfsdp as fsdp
from libfsdp import _abi

PYTHON = pathlib.Path(__file__).resolve().parents[1]
DESCRIBED = json.loads((PYTHON.parent / "abi" / "abi.json").read_text())


class Abi(unittest.TestCase):
    def test_is_what_the_generator_writes(self):
        done = subprocess.run([sys.executable, PYTHON / "generate.py", "--check"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_structs_are_the_compilers(self):
        for struct in DESCRIBED["structs"]:
            made = getattr(_abi, struct["name"])
            self.assertEqual(ctypes.sizeof(made), struct["size"], struct["name"])
            for field in struct["fields"]:
                found = getattr(made, field["name"])
                self.assertEqual(
                    (found.offset, found.size), (field["offset"], field["size"]), f"{struct['name']}.{field['name']}"
                )

    def test_constants_are_all_there(self):
        for family in DESCRIBED["constants"]:
            for name, value in family["values"].items():
                self.assertEqual(getattr(_abi, name), value)

    def test_every_call_has_a_place_in_the_package(self):
        source = "".join(path.read_text() for path in (PYTHON / "libfsdp").glob("*.py") if path.name != "_abi.py")
        used = set(re.findall(r"\blib\.(\w+)", source))
        # By status name and message errors are made of fsdp_error; the size of a dtype is Python's own.
        left = {"get_status_name", "get_last_message", "get_dtype_size", "get_group", "get_group_count"}
        self.assertEqual({call["name"][len("fsdp_") :] for call in DESCRIBED["calls"]} - used, left)
        for name in left:
            self.assertTrue(callable(getattr(fsdp.lib, name)))

    def test_enums_have_the_names_of_the_header(self):
        self.assertEqual(fsdp.Strategy.OPTIM_GRADS_PARAMS, _abi.FSDP_STRATEGY_OPTIM_GRADS_PARAMS)
        self.assertEqual(fsdp.Status(7).name, "MISMATCH")
        for status in fsdp.Status:
            self.assertEqual(fsdp.lib.get_status_name(status).decode(), "FSDP_" + status.name)
        self.assertEqual(
            int(fsdp.ParamFlag.FROZEN | fsdp.ParamFlag.NO_DECAY), _abi.FSDP_PARAM_FROZEN | _abi.FSDP_PARAM_NO_DECAY
        )


if __name__ == "__main__":
    unittest.main()
