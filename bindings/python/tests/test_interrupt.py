# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends a wait, wherever it is, within a second and with KeyboardInterrupt."""

import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest
import uuid
from unittest import mock

import libfsdp as fsdp
from libfsdp import context as context_module

PYTHON = pathlib.Path(__file__).resolve().parents[1]
HEAD = f"""
import signal, sys, time
sys.path[:0] = [{str(PYTHON)!r}, {str(PYTHON / "tests")!r}]
import libfsdp as fsdp
from helper import small_model, train
signal.signal(signal.SIGINT, signal.default_int_handler)
def waits(function):
    print("waits", flush=True)
    try:
        function()
    except KeyboardInterrupt as error:
        print("interrupted", flush=True)
"""


class Interrupt(unittest.TestCase):
    def start(self, program, **environment):
        process = subprocess.Popen(
            [sys.executable, "-c", HEAD + program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=dict(os.environ, **environment),
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def interrupt(self, process):
        """The seconds from the signal to the exception."""
        self.assertEqual(process.stdout.readline(), "waits\n")
        time.sleep(0.5)  # into the wait; where it is not there yet the signal is seen sooner
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.stdout.readline(), "interrupted\n")
        return time.monotonic() - began

    def test_while_the_job_forms(self):
        name = uuid.uuid4().hex
        process = self.start(f"waits(lambda: fsdp.Context(world_size=2, rank=0, rendezvous={name!r}))")
        self.assertLess(self.interrupt(process), 10.0)
        self.assertEqual(process.wait(10), 0)

    def test_in_a_step(self):
        name = uuid.uuid4().hex
        program = f"""
context = fsdp.Context(world_size=2, rank=RANK, rendezvous={name!r})
model, group = small_model(context)
if context.rank == 1:
    print("waits", flush=True)
    time.sleep(60)
waits(model.begin_update)
assert context.error.status == fsdp.Status.INTERRUPTED, context.error
context.destroy()
"""
        peer = self.start(program.replace("RANK", "1"))
        process = self.start(program.replace("RANK", "0"))
        self.assertEqual(peer.stdout.readline(), "waits\n")
        self.assertLess(self.interrupt(process), 10.0)
        self.assertEqual(process.wait(10), 0)

    def test_of_ranks_that_are_threads(self):
        program = """
import threading
def run():
    held = threading.Event()
    def rank(context):
        if context.rank == 1:
            held.wait(60)
        else:
            try:
                small_model(context)
            finally:
                held.set()
    fsdp.run_local(2, rank)
waits(run)
"""
        process = self.start(program)
        self.assertLess(self.interrupt(process), 10.0)
        self.assertEqual(process.wait(10), 0)

    def test_as_a_line_is_logged(self):
        """The signal arrives while the library logs: libc's raise() is the hook that says whether a wait goes on."""
        program = """
import ctypes, logging, threading
logging.basicConfig(level=logging.DEBUG)
from libfsdp import _abi
signalled = ctypes.cast(ctypes.CDLL(None)["raise"], _abi.fsdp_interrupted_hook)
signal.signal(signal.SIGINT, signal.SIG_IGN)
peers = []
peer = threading.Thread(target=lambda: peers.append(fsdp.Context(world_size=2, rank=1, rendezvous=NAME)))
peer.start()
context = fsdp.Context(world_size=2, rank=0, rendezvous=NAME, timeout_ms=1000,
    interrupted=signalled, interrupted_data=int(signal.SIGINT))
peer.join()
signal.signal(signal.SIGINT, signal.default_int_handler)
waits(lambda: context.all_reduce_values(1.0))
print(context.error.status.name, flush=True)
""".replace("NAME", repr(uuid.uuid4().hex))
        process = self.start(program)
        output, errors = process.communicate(timeout=10)
        self.assertEqual(output, "waits\ninterrupted\nTIMEOUT\n", errors)
        self.assertRegex(errors, "ERROR:libfsdp:.*the context has failed")  # the line itself is shown
        self.assertNotIn("Exception ignored", errors)

    def test_a_context_that_was_made_all_the_same_is_given_back(self):
        def held():
            return set(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

        # Threads that were joined are listed for a moment: those of an earlier test before, the context's after.
        def is_given_back():
            threads, files = held()
            return threads <= before[0] and files <= before[1]

        watch, create_context = context_module._Watch(), fsdp.lib.create_context

        def create(*arguments):
            self.assertEqual(create_context(*arguments), 0)
            self.assertFalse(is_given_back())
            watch.raised = KeyboardInterrupt("as the call ended")
            return 0

        before = held()
        with (
            mock.patch.object(context_module, "_Watch", lambda: watch),
            mock.patch.object(fsdp.lib, "create_context", create),
            self.assertRaisesRegex(KeyboardInterrupt, "as the call ended"),
        ):
            fsdp.Context(world_size=1, rendezvous=uuid.uuid4().hex)
        end = time.monotonic() + 10
        while not is_given_back() and time.monotonic() < end:
            time.sleep(0.01)
        self.assertTrue(is_given_back(), (held(), before))

    def test_what_was_made_all_the_same_is_given_back(self):
        made = []

        def create(*arguments):
            status = fsdp.lib.create_mesh(*arguments)
            context._watch.raised = KeyboardInterrupt("as the call ended")
            made.append((status, arguments[-1].value))
            return status

        def destroy(number):
            made.append(number)
            fsdp.lib.destroy_mesh(number)

        with fsdp.create_local_contexts(1)[0] as context:
            with self.assertRaisesRegex(KeyboardInterrupt, "as the call ended"):
                context.own(destroy, create, context.handle, None)
            (status, number), *destroyed = made
            self.assertEqual((status, destroyed), (0, [number]))

    def test_what_a_last_line_raises_is_not_lost(self):
        def destroy_context(number):
            real(number)
            context._watch.raised = KeyboardInterrupt("as the context ended")

        context, real = fsdp.create_local_contexts(1)[0], fsdp.lib.destroy_context
        with (
            mock.patch.object(fsdp.lib, "destroy_context", destroy_context),
            self.assertRaisesRegex(KeyboardInterrupt, "as the context ended"),
        ):
            context.destroy()
        self.assertTrue(context.is_closed)

    def test_other_handlers_exceptions_end_a_wait_too(self):
        name = uuid.uuid4().hex
        program = f"""
def alarm(number, frame):
    raise TimeoutError("enough")
signal.signal(signal.SIGALRM, alarm)
signal.setitimer(signal.ITIMER_REAL, 0.3)
began = time.monotonic()
try:
    fsdp.Context(world_size=2, rank=0, rendezvous={name!r})
except TimeoutError as error:
    print(error, time.monotonic() - began < 1.3, flush=True)
"""
        process = self.start(program)
        self.assertEqual(process.stdout.readline(), "enough True\n")


if __name__ == "__main__":
    unittest.main()
