# SPDX-License-Identifier: Apache-2.0
"""Views of the library's memory: for how long, on which thread, and handles that are never given back."""

import ctypes
import gc
import itertools
import mmap
import subprocess
import sys
import tempfile
import unittest
import weakref
from unittest import mock

import libfsdp as fsdp
from helper import COUNT, flat, floats, ramp, small_model, train

try:
    import numpy
except ImportError:
    numpy = None


def mappings():
    """How often the library's shared memory is mapped."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return sum("fsdp" in line and "memfd" in line for line in maps)


class Views(unittest.TestCase):
    def test_are_made_once_and_show_each_version(self):
        def rank(context):
            model, group = small_model(context)
            with model:
                with group.unsharded() as first:
                    kept = first["w"]
                    self.assertEqual(flat(kept), list(ramp()))
                train(model, group)
                with group.unsharded() as second:
                    self.assertIs(second["w"], kept)
                    self.assertAlmostEqual(flat(kept)[3], 2.5, places=5)

        fsdp.run_local(2, rank)

    def test_are_where_their_own_hold_has_them(self):
        """Three groups of different values take turns in two buffers, so that weights move."""

        def rank(context):
            model = context.create_model(unshard_mode=fsdp.UnshardMode.COPIED)
            groups = [model.create_group(name, [fsdp.Param(name, (6,))]) for name in "abc"]
            model.set_schedule(fsdp.ScheduleKind.ANY, held_groups=2)
            with model:
                model.seal()
                for value, group in enumerate(groups):
                    group.load_param(0, floats(*[value] * 6))
                model.publish_weights()
                addresses = [set() for _ in groups]
                for turn in range(6):
                    one, other, third = ((turn + i) % 3 for i in range(3))
                    with groups[one].unsharded() as first, groups[other].unsharded() as second:
                        for g, weights in ((one, first), (other, second)):
                            self.assertEqual(flat(*weights.values()), [g] * 6)
                            addresses[g].add(groups[g].tensors()["abc"[g]].address)
                        with self.assertRaisesRegex(fsdp.InvalidState, "held_groups"):
                            groups[third].unshard()
                self.assertEqual([len(seen) for seen in addresses], [2, 2, 2])

        fsdp.run_local(2, rank)

    def test_weights_are_read_only(self):
        def rank(context):
            model, group = small_model(context)
            with model, group.unsharded() as weights:
                with self.assertRaises((ValueError, TypeError)):
                    weights["w"][0, 0] = 1.0
                self.assertTrue(group.tensors()["w"].is_read_only)

        fsdp.run_local(2, rank)

    def test_quantized_parameters_are_codes_and_scales(self):
        def rank(context):
            model = context.create_model()
            params = [fsdp.Param("q", (1, 2), quantization=fsdp.Quantization.FP8_BLOCK), fsdp.Param("b", (4,))]
            group = model.create_group("layer", params)
            with model:
                model.seal()
                group.load_param("q", floats(448, 1))
                model.publish_weights()
                with group.unsharded() as weights:
                    self.assertEqual(list(weights), ["b"])
                    codes, scales = group.plane("q"), group.plane("q", fsdp.Plane.ROW_SCALE)
                    self.assertEqual((codes.dtype, codes.shape), (fsdp.Dtype.FLOAT8_E4M3, (1, 2)))
                    self.assertEqual(bytes(codes.memoryview()), b"\x7e\x38")
                    self.assertEqual(bytes(codes.array()), b"\x7e\x38")
                    self.assertEqual(flat(scales.array()), [1.0])
                    with self.assertRaises(fsdp.Error):
                        group.plane("b")

        fsdp.run_local(2, rank)

    def test_frozen_planes_and_bytes_are_loaded_as_they_are(self):
        def rank(context):
            model = context.create_model()
            frozen = {"flags": fsdp.ParamFlag.FROZEN}
            group = model.create_group(
                "base",
                [
                    fsdp.Param("q", (32, 32), quantization=fsdp.Quantization.MXFP8, **frozen),
                    fsdp.Param("s", (1, 2), quantization=fsdp.Quantization.FP8, **frozen),
                    fsdp.Param("nf4", (3,), fsdp.Dtype.UINT8, **frozen),
                ],
            )
            codes, scales = bytes(range(256)) * 4, bytes(range(100, 132))
            with model:
                model.seal()
                for plane in (fsdp.Plane.ROW, fsdp.Plane.COLUMN):
                    group.load_plane("q", plane, codes if context.rank == 1 else None, root=1)
                for plane in (fsdp.Plane.ROW_SCALE, fsdp.Plane.COLUMN_SCALE):
                    group.load_plane("q", plane, scales)
                group.load_plane("s", fsdp.Plane.ROW, b"\x7e\x38")
                group.load_plane("s", fsdp.Plane.ROW_SCALE, floats(0.5))
                group.load_param("nf4", b"\x00\xff\x07")
                model.publish_weights()
                with group.unsharded() as weights:
                    self.assertEqual(bytes(group.plane("q").memoryview()), codes)
                    self.assertEqual(bytes(group.plane("q", fsdp.Plane.ROW_SCALE).memoryview()), scales)
                    self.assertEqual(bytes(weights["nf4"]), b"\x00\xff\x07")
                self.assertEqual(flat(group.read_param("s")), [224, 0.5])
                self.assertEqual(bytes(group.read_param("nf4", fsdp.Dtype.UINT8)), b"\x00\xff\x07")

        fsdp.run_local(2, rank)

    def test_scales_are_swizzled(self):
        def rank(context):
            model = context.create_model()
            params = [fsdp.Param("w", (32, 32), quantization=fsdp.Quantization.MXFP8)]
            group = model.create_group("layer", params)
            with model:
                model.seal()
                group.load_param("w", floats(*([448] * 32 + [896] + [448] * 991)))
                model.publish_weights()
                with group.unsharded():
                    scales = group.swizzle_scales("w")
                    self.assertEqual((len(scales), scales[0], scales[1], scales[16]), (512, 127, 0, 128))
                    with self.assertRaises(fsdp.Error):
                        group.swizzle_scales("w", fsdp.Plane.ROW)

        fsdp.run_local(1, rank)

    def test_stay_mapped_after_close(self):
        def rank(context):
            model, group = small_model(context)
            with model, group.unsharded(fsdp.Phase.EVAL) as weights:
                kept = weights["b"]
            return kept

        gc.collect()
        before = mappings()
        kept = fsdp.run_local(2, rank)
        self.assertEqual([flat(view) for view in kept], [[1, 2, 3, 4]] * 2)
        self.assertGreater(mappings(), before)
        del kept
        gc.collect()
        self.assertEqual(mappings(), before)

    def test_a_closed_model_refuses_calls_while_views_are_there(self):
        def rank(context):
            model, group = small_model(context)
            with group.unsharded() as weights:
                kept = weights["w"]
            model.close()
            for call in (group.unshard, model.finish_grads, lambda: model.stats):
                with self.assertRaises(fsdp.InvalidHandle):
                    call()
            return flat(kept)

        self.assertEqual(fsdp.run_local(1, rank), [list(ramp())])

    def test_leaked_handles_end_in_any_order(self):
        def leak(order):
            context = fsdp.create_local_contexts(1)[0]
            model, group = small_model(context)
            things = {
                "context": context,
                "model": model,
                "group": group,
                "views": group.weights(),
                "mesh": context.create_mesh(),
            }
            del context, model, group
            for name in order:
                del things[name]
                gc.collect()

        gc.collect()
        before = mappings()
        for order in itertools.permutations(("context", "model", "group", "views", "mesh")):
            leak(order)
        self.assertEqual(mappings(), before)

    def arena_model(self, context):
        """(a model whose main weights lie in an arena, a weak reference to it)"""

        def declare(context):
            model = context.create_model()
            return model, model.create_group("layer", [fsdp.Param("w", (8, 4), fsdp.Dtype.BFLOAT16)])

        planned = fsdp.Context.plan(1)
        model = declare(planned)[0]
        model.seal()
        size = model.role_bytes(fsdp.Role.MAIN)
        planned.destroy()
        arena = mmap.mmap(-1, size)
        model, group = declare(context)
        address = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        model.set_arena(fsdp.Role.MAIN, address, size, arena)
        model.seal()
        group.load_param("w", ramp())
        shard = model.shards()[0].main_weight
        self.assertEqual(arena[: COUNT * 4], bytes(memoryview(shard).cast("B")))  # it lies there
        return model, weakref.ref(arena)

    def test_keep_the_owner_of_an_arena(self):
        with fsdp.create_local_contexts(1)[0] as context:
            model, arena = self.arena_model(context)
            view = model.shards()[0].main_weight
            model.close()
            del model
            gc.collect()
            self.assertIsNotNone(arena())
            self.assertEqual(flat(view), list(ramp()))
            del view
            gc.collect()
            self.assertIsNone(arena())

    def test_a_save_keeps_the_owner_of_an_arena(self):
        with tempfile.TemporaryDirectory() as folder, fsdp.create_local_contexts(1)[0] as context:
            model, arena = self.arena_model(context)
            model.publish_weights()
            checkpoint = context.begin_checkpoint(folder, step=1)
            checkpoint.add_model(model)
            checkpoint.commit()
            checkpoint.close()
            model.close()
            del checkpoint, model
            gc.collect()
            self.assertIsNotNone(arena())
            context.close()
            self.assertIsNone(arena())
            self.assertEqual([found["step"] for found in fsdp.list_checkpoints(folder)["checkpoints"]], [1])

    def test_leaked_handles_end_with_the_process(self):
        program = (
            "import sys; sys.path.insert(0, sys.argv[1]); import libfsdp as fsdp; from helper import small_model\n"
            "kept = [small_model(context) for context in fsdp.create_local_contexts(1)]\n"
            "weights = kept[0][1].weights(); mesh = kept[0][0].context.create_mesh(); print('left')"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, __file__.rpartition("/")[0]], capture_output=True, text=True, timeout=60
        )
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "left\n", ""))


class Dlpack(unittest.TestCase):
    def test_both_ways_without_a_copy(self):
        """The capsule of a tensor, read as a consumer does: the same address, type, shape."""
        from libfsdp import dlpack

        def rank(context):
            model, group = small_model(context)
            with model, group.unsharded():
                view = group.tensors()["w"]
                for max_version in (None, (1, 0)):
                    capsule = view.__dlpack__(max_version=max_version)
                    self.assertEqual(len(dlpack._exported), 1)

                    class Producer:
                        def __dlpack__(self, **_):
                            return capsule

                    address, dtype, shape, kept, device = dlpack.read(Producer())
                    self.assertEqual((address, dtype, shape), (view.address, fsdp.Dtype.FLOAT32, (8, 4)))
                    self.assertEqual(device, fsdp.DeviceKind.HOST)
                    del capsule, kept, Producer
                    self.assertEqual(len(dlpack._exported), 0)  # not consumed
                group.put_grad("w", group.tensors()["w"])  # any array is a gradient
                group.put_grad("b", None)
                group.reduce_grad()
            context.abort("the step is not ended")

        with self.assertRaises(fsdp.Error):
            fsdp.run_local(1, rank)

    def test_memory_of_another_device_is_refused(self):
        """What a capsule says of its device counts: reading a GPU's memory on the host would end the process."""
        from libfsdp import dlpack

        memory = ramp()
        like = fsdp.Tensor.of(memory.buffer_info()[0], (8, 4), fsdp.Dtype.FLOAT32, memory, (fsdp.DeviceKind.CUDA, 3))

        class OnGpu:
            def __dlpack_device__(self):
                return like.__dlpack_device__()

            def __dlpack__(self, **versions):
                return like.__dlpack__(**versions)

        def rank(context):
            model, group = small_model(context)
            with model:
                grad = "a gradient in memory of CUDA, for a context on HOST"
                value = "values in memory of CUDA, for a context on HOST"
                for array in (OnGpu(), like):
                    for text, call in (
                        (grad, lambda: group.put_grad("w", array)),
                        (grad, lambda: model.apply_grads([array, None], 0.1)),
                        (value, lambda: group.load_param("w", array)),
                        (value, lambda: group.load_state("w", "exp_avg", array)),
                        (value, lambda: group.load_chunk("w", array, 0, 8)),
                    ):
                        with self.assertRaisesRegex(ValueError, text):
                            call()
                train(model, group)

        self.assertEqual(OnGpu().__dlpack_device__(), (dlpack.CUDA, 3))
        fsdp.run_local(1, rank)

    def on_gpu(self, context, index, **options):
        """A model that the binding takes for one on a GPU, since what it reads of views says so."""
        model = context.create_model(**options)
        model.create_group("layer", [fsdp.Param("w", (8, 4))])
        if options:
            model.add_optimizer_state("momentum")
        model.seal()
        context.device = fsdp.DeviceKind.CUDA
        get_shard_state = fsdp.lib.get_shard_state

        def get(model, shard_index, name, found):
            status = get_shard_state(model, shard_index, name, found)
            found.device, found.device_index = fsdp.DeviceKind.CUDA, index
            return status

        return model, mock.patch.object(fsdp.lib, "get_shard_state", get)

    def test_shards_are_on_the_gpu_that_the_library_names(self):
        for options in ({}, {"optimizer": fsdp.Optimizer.CALLER}):
            with fsdp.create_local_contexts(1)[0] as context:
                model, patched = self.on_gpu(context, 3, **options)
                with model, patched:
                    shard = model.shards()[0]
                    for view in (shard.main_weight, shard.main_grad):
                        self.assertEqual(view.__dlpack_device__(), (2, 3))

    def test_shards_on_a_gpu_that_nothing_names_are_refused(self):
        with fsdp.create_local_contexts(1)[0] as context:
            model = context.create_model(optimizer=fsdp.Optimizer.CALLER)
            model.create_group("layer", [fsdp.Param("w", (8, 4))])
            model.seal()
            self.assertEqual(model.device, (fsdp.DeviceKind.HOST, 0))
            context.device = fsdp.DeviceKind.CUDA
            with self.assertRaisesRegex(ValueError, "name it by device_index"):
                model.shards()
            context.device_index = 5
            self.assertEqual(model.shards()[0].main_weight.__dlpack_device__(), (2, 5))
            model.close()

    def test_an_empty_gradient_is_not_none(self):
        """A gradient without memory or elements is refused too: the library would take it for none, which trains with
        zeros."""
        unmapped = fsdp.Tensor.of(None, (8, 4), fsdp.Dtype.FLOAT32, None)
        empty = fsdp.Tensor.of(ramp().buffer_info()[0], (0, 4), fsdp.Dtype.FLOAT32, None)

        class Lent:
            def __dlpack__(self, **versions):
                return unmapped.__dlpack__(**versions)

        def rank(context):
            model, group = small_model(context)
            with model:
                for grad in (unmapped, empty, Lent()):
                    with self.assertRaisesRegex(ValueError, "an empty gradient"):
                        group.put_grad("w", grad)
                    with self.assertRaisesRegex(ValueError, "an empty gradient"):
                        model.apply_grads([grad, None], 0.1)
                train(model, group)

        fsdp.run_local(1, rank)

    def test_memory_that_both_devices_read_suits_both(self):
        from libfsdp import dlpack
        from libfsdp.tensor import read_grad

        memory = ramp()

        class Pinned:
            def __dlpack__(self, **_):
                capsule = fsdp.Tensor.of(memory.buffer_info()[0], (8, 4), fsdp.Dtype.FLOAT32, memory).__dlpack__()
                dlpack._Managed.from_address(dlpack._get(capsule, b"dltensor")).tensor.device_type = self.device_type
                return capsule

        array = Pinned()
        for array.device_type in (dlpack.CUDA_HOST, dlpack.CUDA_MANAGED):
            for kind in fsdp.DeviceKind:
                self.assertEqual(read_grad(array, kind)[0], memory.buffer_info()[0])
        array.device_type = 8  # Metal
        with self.assertRaisesRegex(ValueError, "DLPack's type 8"):
            read_grad(array, fsdp.DeviceKind.HOST)
        with self.assertRaisesRegex(ValueError, "memory of HOST, for a context on CUDA"):
            read_grad(memory, fsdp.DeviceKind.CUDA)

    @unittest.skipUnless(numpy, "no numpy")
    def test_numpy(self):
        def rank(context):
            model, group = small_model(context)
            with model:
                with group.unsharded() as weights:
                    self.assertIsInstance(weights["w"], numpy.ndarray)
                    self.assertFalse(weights["w"].flags.writeable)
                    there = numpy.from_dlpack(group.tensors()["w"])
                    self.assertEqual(there.__array_interface__["data"][0], weights["w"].__array_interface__["data"][0])
                group.put_grad("w", numpy.full((8, 4), 2, numpy.float32).T.copy().T)  # not in C order: a copy is made
                group.put_grad("b", [1.0, 1.0, 1.0, 1.0])
                with self.assertRaisesRegex(ValueError, "float64"):
                    group.put_grad("b", numpy.ones(4))
                group.reduce_grad()
                model.finish_grads()
                model.step_adamw(0.5)
                numpy.testing.assert_allclose(group.read_param("w"), numpy.arange(32).reshape(8, 4) - 0.5, atol=1e-5)

        fsdp.run_local(2, rank)


if __name__ == "__main__":
    unittest.main()
