# SPDX-License-Identifier: Apache-2.0
"""Reports cases in the Test Anything Protocol, which Meson counts. usage of a test: NAME_test.py RANK_PROGRAM

FSDP_NET says over what: tcp (the default) or ucx."""
import os
import sys
import traceback

import nodes

MANY = bool(os.environ.get("FSDP_TEST_MANY"))  # the large counts are for a release, or for a suspicion


def note(text):
    print("\n".join("# " + line for line in str(text).splitlines()), flush=True)


OVER_UCX = os.environ.get("FSDP_NET") == "ucx"


def run(cases):
    """cases: (name, function); a function that raises has failed. Ends the program."""
    reason = nodes.missing()
    failed = 0
    print(f"1..{len(cases)}")
    for number, (name, case) in enumerate(cases, 1):
        if reason:
            print(f"ok {number} - {name} # SKIP {reason}")
            continue
        try:
            case()
            print(f"ok {number} - {name}", flush=True)
        except nodes.Unable as lack:
            print(f"ok {number} - {name} # SKIP {lack}", flush=True)
        except Exception:  # a case must not end the others
            failed += 1
            note(traceback.format_exc())
            print(f"not ok {number} - {name}", flush=True)
    sys.exit(1 if failed else 0)
