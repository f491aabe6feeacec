# SPDX-License-Identifier: Apache-2.0
"""Hooks and flags among a context's options live as long as the library may use them, and no longer."""

import ctypes
import gc
import unittest
import uuid
import weakref

import libfsdp as fsdp
from libfsdp import _abi


class Lines:
    """A hook that the options alone keep alive."""

    def __init__(self, texts):
        self.texts = texts

    def __call__(self, user_data, level, message):
        self.texts.append(message.decode())


class Flag(ctypes.c_int32):
    """An integer that can be asked whether it is still there."""


CREATE = {
    "context": lambda **options: fsdp.Context(world_size=1, rendezvous=uuid.uuid4().hex, **options),
    "local": lambda **options: fsdp.create_local_contexts(1, **options)[0],
    "plan": lambda **options: fsdp.Context.plan(2, **options),
}


class Numbers(unittest.TestCase):
    def test_what_a_field_cannot_hold_is_refused(self):
        with fsdp.Context.plan(2) as context:
            for value, error in ((2**64, OverflowError), (-1, OverflowError), ("seven", TypeError)):
                with self.assertRaisesRegex(error, "rounding_seed is"):
                    fsdp.Model(context, rounding_seed=value)
            fsdp.Model(context, rounding_seed=2**64 - 1).close()


class Options(unittest.TestCase):
    def ends_with(self, context, kept):
        gc.collect()
        self.assertIsNotNone(kept())
        context.destroy()
        gc.collect()
        self.assertIsNone(kept())

    def test_a_log_hook_is_called_as_long_as_the_context_is_there(self):
        for name, create in CREATE.items():
            with self.subTest(name):
                lines = Lines([])
                texts, kept = lines.texts, weakref.ref(lines)
                context = create(log=_abi.fsdp_log_hook(lines), log_level=fsdp.LogLevel.DEBUG)
                del lines
                gc.collect()
                self.assertIsNotNone(kept())
                context.abort("told at the end")
                self.ends_with(context, kept)
                if name != "plan":
                    self.assertTrue(any("told at the end" in text for text in texts), texts)

    def test_an_interrupted_flag_is_there_as_long_as_the_context(self):
        for name, create in CREATE.items():
            with self.subTest(name):
                flag = Flag(0)
                kept = weakref.ref(flag)
                context = create(interrupted_flag=ctypes.cast(ctypes.pointer(flag), ctypes.POINTER(ctypes.c_int32)))
                del flag
                self.ends_with(context, kept)

    def test_a_context_that_only_plans_ends_with_its_block(self):
        with fsdp.Context.plan(2, rank=1) as planned:
            self.assertEqual((planned.rank, planned.world_size), (1, 2))
        self.assertTrue(planned.is_closed)

    def test_local_contexts_share_a_flag_that_ends_a_wait(self):
        flag = Flag(0)
        kept = weakref.ref(flag)
        first, second = fsdp.create_local_contexts(
            2, interrupted_flag=ctypes.cast(ctypes.pointer(flag), ctypes.POINTER(ctypes.c_int32))
        )
        flag.value = 1
        del flag
        with self.assertRaises(fsdp.Interrupted):
            first.all_reduce_values(1.0)
        first.destroy()
        gc.collect()
        self.assertIsNotNone(kept())
        self.ends_with(second, kept)


if __name__ == "__main__":
    unittest.main()
