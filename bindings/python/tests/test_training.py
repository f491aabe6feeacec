# SPDX-License-Identifier: Apache-2.0
"""Training, errors as exceptions, and what an exception in the middle of a step leaves behind."""

import logging
import math
import os
import tempfile
import threading
import unittest

import libfsdp as fsdp
from helper import COUNT, flat, floats, ramp, small_model, train


class Training(unittest.TestCase):
    def test_two_ranks_step_with_the_mean_of_their_gradients(self):
        def rank(context):
            model, group = small_model(context)
            with model:
                with self.assertRaisesRegex(fsdp.InvalidState, "no norm"):
                    model.last_norm
                group.put_grad("w", floats(*[1.0 + 2 * context.rank] * COUNT))
                group.put_grad("b", None)
                group.reduce_grad()
                model.finish_grads()
                norm = model.get_grad_norm()
                model.step_adamw(0.5)
                return flat(group.read_param("w")), flat(group.read_state("w", "exp_avg")), norm, model.last_norm

        for weights, average, norm, last in fsdp.run_local(2, rank):
            for i, weight in enumerate(weights):
                self.assertAlmostEqual(weight, i - 0.5, places=5)  # m / sqrt(v) of a first step is the gradient's sign
            for value in average:
                self.assertAlmostEqual(value, 0.1 * 2, places=6)  # (1 - beta1) times the mean of 1 and 3
            self.assertEqual(norm, last)
            self.assertAlmostEqual(norm, math.sqrt(COUNT * 4), places=9)

    def test_adds_to_gradients_that_are_lent(self):
        def rank(context):
            model, group = small_model(context)
            with model:
                grads = group.acquire_grads()
                self.assertEqual(set(grads), {"w", "b"})
                memoryview(grads["w"]).cast("B").cast("f")[0] = 5.0
                grad, adds = group.acquire_grad("b")
                self.assertTrue(adds)
                group.reduce_grad()
                model.finish_grads()
                shards = {shard.name: flat(shard.main_grad) for shard in model.shards()}
                norms = model.get_param_grad_norms()
                zeros = model.count_zero_grads()
                inside = model.get_param_weight_norms()
                self.assertIsNone(model.check_grads())
                model.step_adamw(0.1)
                self.assertNotEqual(model.get_param_weight_norms()["w"], inside["w"])
                return shards, norms, zeros, inside

        shards, norms, zeros, inside = fsdp.run_local(1, rank)[0]
        self.assertEqual(zeros, sum(len(grad) for grad in shards.values()) - 1)
        self.assertEqual(set(inside), {"w", "b"})
        self.assertEqual(shards["w"], [5.0] + [0.0] * 31)
        self.assertEqual(norms, {"w": 5.0, "b": 0.0})

    def test_whole_gradients_are_read_and_replaced(self):
        def rank(context):
            model, group = small_model(context)
            with model:
                group.put_grad("w", floats(*[1.0 + 2 * context.rank] * COUNT))
                group.put_grad("b", None)
                group.reduce_grad(is_last=False)
                model.finish_grads(0.5, is_last=True)
                before = flat(group.read_grad("w"))
                on_one = group.read_grad("b", root=1)
                group.load_grad("w", ramp() if context.rank == 0 else None, root=0)
                after = flat(group.read_grad("w"))
                model.step_adamw(0.5)
                with self.assertRaisesRegex(fsdp.InvalidState, "the update window is closed"):
                    group.read_grad("w")
                return before, on_one is None, after, flat(group.read_param("w"))

        for number, (before, is_none, after, weights) in enumerate(fsdp.run_local(2, rank)):
            self.assertEqual(before, [1.0] * COUNT)
            self.assertEqual(is_none, number == 0)
            self.assertEqual(after, list(ramp()))
            for i, weight in enumerate(weights):
                self.assertAlmostEqual(weight, i - (0.5 if i else 0), places=5)

    def test_a_step_that_was_given_nothing_has_zeros(self):
        def rank(context):
            model, group = small_model(context)
            with model:
                model.finish_grads(is_last=True)
                norm = model.get_grad_norm()
                model.step_adamw(0.5)
                return norm, flat(group.read_param("w"))

        self.assertEqual(fsdp.run_local(2, rank), [(0.0, list(ramp()))] * 2)

    def test_buffers_that_peers_have_yet_to_read_are_busy(self):
        asked = threading.Event()

        def rank(context):
            model = context.create_model(max_pending_groups=1)
            groups = [model.create_group(name, [fsdp.Param(f"{name}.w", (8, 4))]) for name in ("first", "second")]
            model.seal()
            model.publish_weights()
            with model:
                if context.rank == 1:
                    asked.wait(60)
                groups[1].put_grad(0, ramp(), wait=False)
                groups[1].reduce_grad()
                if context.rank == 0:
                    try:
                        for call in (
                            lambda: groups[0].acquire_grad(0, wait=False),
                            lambda: groups[0].acquire_grads(wait=False),
                            lambda: groups[0].put_grad(0, None, wait=False),
                        ):
                            with self.assertRaisesRegex(fsdp.Busy, "'first' needs .* that of group 'second'"):
                                call()
                    finally:
                        asked.set()
                groups[0].put_grad(0, ramp(2.0))
                groups[0].reduce_grad()
                model.finish_grads()
                found = [flat(group.read_grad(0)) for group in groups]
                model.discard_step()
                return found

        self.assertEqual(fsdp.run_local(2, rank), [[list(ramp(2.0)), list(ramp())]] * 2)

    def test_update_window_and_shards(self):
        def rank(context):
            model, group = small_model(context)
            with model:
                with model.update():
                    for shard in model.shards():
                        memoryview(shard.main_weight).cast("B").cast("f")[:] = floats(*[7.0] * shard.element_count)
                with group.unsharded(fsdp.Phase.EVAL) as weights:
                    return flat(weights["w"])

        self.assertEqual(fsdp.run_local(2, rank), [[7.0] * 32] * 2)

    def narrow_shard(self, context, **options):
        """(model, group, its only shard on this rank) of a matrix in bf16, in the update window."""
        model = context.create_model(**options)
        group = model.create_group("layer", [fsdp.Param("w", (64, 64), fsdp.Dtype.BFLOAT16)])
        model.seal()
        group.load_param("w", floats(*[1.0] * 4096))
        return model, group, model.shards()[0]

    def test_main_weights_in_fewer_bits(self):
        with fsdp.create_local_contexts(1)[0] as context:
            model, group, shard = self.narrow_shard(context, main_storage=fsdp.MainStorage.SPLIT16)
            with model:
                self.assertIsNone(shard.main_weight)
                self.assertEqual(set(flat(group.read_param("w"))), {1.0})
                with self.assertRaises(fsdp.InvalidArgument):
                    context.create_model(main_storage=fsdp.MainStorage.SPLIT16, optimizer=fsdp.Optimizer.CALLER)
            model, group, shard = self.narrow_shard(context, main_storage=fsdp.MainStorage.NONE, rounding_seed=5)
            with model:
                self.assertEqual(shard.main_weight.nbytes, 2 * 4096)
                shard.round_stochastic(floats(*[1.0 + 2**-9] * 4000), step=1, offset=96)
                found = flat(group.read_param("w"))
                self.assertEqual(set(found[:96]), {1.0})
                self.assertEqual(set(found[96:]), {1.0, 1.0078125})
                self.assertTrue(800 < sum(x > 1 for x in found) < 1200)  # a quarter of them
                for numbers, offset in ((4000, 97), (1, -1)):
                    with self.assertRaises(ValueError):
                        shard.round_stochastic(floats(*[0.0] * numbers), step=1, offset=offset)

    def test_states_and_main_weights_in_a_file(self):
        weights = []
        for home in (fsdp.Home.DEVICE, fsdp.Home.FILE):
            with fsdp.create_local_contexts(1)[0] as context, tempfile.TemporaryDirectory() as folder:
                model, group, shard = self.narrow_shard(context, state_home=home, main_home=home, home_directory=folder)
                with model:
                    self.assertEqual(shard.main_weight is None, home == fsdp.Home.FILE)
                    self.assertEqual(shard.state("exp_avg") is None, home == fsdp.Home.FILE)
                    self.assertEqual(os.listdir(folder), [])
                    model.publish_weights()
                    model.apply_grads([floats(*range(4096))], lr=0.01)
                    weights.append(flat(group.read_param("w")) + flat(group.read_state("w", "exp_avg")))
        self.assertEqual(*weights)
        self.assertNotEqual(set(weights[0]), {1.0})

    def test_states_in_codes(self):
        with fsdp.create_local_contexts(1)[0] as context:
            model, group, shard = self.narrow_shard(context, optimizer=fsdp.Optimizer.ADAMW_8BIT)
            with model:
                model.publish_weights()
                group.put_grad("w", floats(*[0.5] * 4096))
                group.reduce_grad()
                model.finish_grads()
                model.step_adamw(0.5)
                self.assertEqual(set(bytes(shard.state("exp_avg"))), {255})
                scales = flat(shard.state("exp_avg.absmax"))
                self.assertEqual((len(scales), scales[0]), (16, floats(0.05)[0]))
                self.assertEqual(set(flat(group.read_state("w", "exp_avg"))), {floats(0.05)[0]})

    def test_apply_grads_save_and_load(self):
        with tempfile.TemporaryDirectory() as folder:

            def saves(context):
                model, group = small_model(context)
                with model:
                    self.assertAlmostEqual(
                        model.apply_grads([ramp(), None], 0.01, max_norm=1.0), math.sqrt(sum(i * i for i in range(32)))
                    )
                    model.save(folder)
                    with context.begin_checkpoint(folder, step=9) as checkpoint:
                        checkpoint.add_model(model)
                        checkpoint.add_bytes("place", b"somewhere")
                        checkpoint.commit()
                        checkpoint.wait()
                        self.assertEqual(checkpoint.status.state, fsdp.CheckpointState.COMMITTED)
                    return flat(group.read_param("w"))

            def loads(context):
                model = context.create_model(strategy=fsdp.Strategy.NO_SHARD)
                with model:
                    group = model.create_group("layer", [fsdp.Param("w", (8, 4)), fsdp.Param("b", (4,))])
                    model.seal()
                    with context.open_checkpoint(folder) as checkpoint:
                        loaded = checkpoint.load_model(model)
                        self.assertEqual((loaded.step, loaded.loaded_tensors, loaded.missing_tensors), (9, 8, 0))
                        self.assertEqual(model.describe_load()["loaded"][:2], ["w", "state.w.exp_avg"])
                        self.assertEqual(checkpoint.read_bytes("place"), b"somewhere")
                    model.publish_weights()
                    return flat(group.read_param("w"))

            saved = fsdp.run_local(2, saves)
            self.assertEqual([listed["step"] for listed in fsdp.list_checkpoints(folder)["checkpoints"]], [9, 1])
            self.assertEqual(fsdp.run_local(1, loads), saved[:1])


class Errors(unittest.TestCase):
    def test_have_status_rank_and_message(self):
        def rank(context):
            model, group = small_model(context)
            with model:
                with self.assertRaises(fsdp.InvalidState) as caught:
                    group.reshard()
                self.assertIn("no FORWARD hold", caught.exception.message)
                self.assertEqual((caught.exception.status, caught.exception.rank), (fsdp.Status.INVALID_STATE, None))
                self.assertFalse(caught.exception.context_failed)
                with self.assertRaises(ValueError):  # also what Python calls it
                    group.put_grad("w", floats(1, 2, 3))
                with self.assertRaisesRegex(KeyError, "not 'nothing'"):
                    group.put_grad("nothing", ramp())
                with self.assertRaisesRegex(TypeError, "no field 'strategi'"):
                    context.create_model(strategi=1)
                group.put_grad("w", ramp())
                group.put_grad("b", None)
                group.reduce_grad()
                model.finish_grads()
                with self.assertRaises(fsdp.Mismatch) as caught:
                    model.step_adamw(0.1 if context.rank == 0 else 0.2)
                self.assertEqual(caught.exception.rank, 1)
                model.discard_step()
                train(model, group)

        fsdp.run_local(2, rank)

    def test_an_exception_in_a_forward_leaves_a_model_that_trains_on(self):
        class Spoilt(Exception):
            pass

        def rank(context):
            model, group = small_model(context)
            with model:
                for _ in range(2):
                    with self.assertRaises(Spoilt):
                        with group.unsharded() as weights:
                            group.put_grad("w", ramp(1000.0))
                            raise Spoilt(len(weights))
                    with self.assertRaisesRegex(fsdp.InvalidState, "no FORWARD hold"):  # the block has returned its own
                        group.reshard()
                    model.discard_step()
                train(model, group)
                return flat(group.read_param("w"))

        def undisturbed(context):
            model, group = small_model(context)
            with model:
                train(model, group)
                return flat(group.read_param("w"))

        self.assertEqual(fsdp.run_local(2, rank), fsdp.run_local(2, undisturbed))

    def test_an_exception_that_leaves_a_context_tells_the_peers(self):
        told = []

        def rank(context):
            model, group = small_model(context)
            if context.rank == 1:
                raise ZeroDivisionError("out of luck")
            try:
                model.begin_update()
            except fsdp.PeerFailed as error:
                told.append(
                    (
                        error.rank,
                        "ZeroDivisionError: out of luck" in error.message,
                        context.error.rank,
                        context.failed_ranks,
                    )
                )
                raise

        with self.assertLogs("libfsdp", logging.ERROR), self.assertRaises(ZeroDivisionError):
            fsdp.run_local(2, rank)
        self.assertEqual(told, [(1, True, 1, [1])])

    def test_log_lines_go_to_logging(self):
        with (
            self.assertLogs("libfsdp", logging.INFO) as logs,
            fsdp.Context(world_size=1, rendezvous="logged", log_level=fsdp.LogLevel.INFO),
        ):
            pass
        self.assertTrue(any("rank 0" in line for line in logs.output), logs.output)


if __name__ == "__main__":
    unittest.main()
