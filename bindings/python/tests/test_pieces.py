# SPDX-License-Identifier: Apache-2.0
"""Pieces of a group: holds of their own, visits, and groups that BACKWARD does not read."""

import unittest

import libfsdp as fsdp
from helper import flat, floats

COUNT = 8
FORWARD, BACKWARD = fsdp.Phase.FORWARD, fsdp.Phase.BACKWARD
VISITS = [(g, FORWARD, p) for g in (0, 1) for p in (0, 1)]
VISITS += [(1, BACKWARD, 1), (1, BACKWARD, 0), (0, BACKWARD, None), (0, BACKWARD)]


def pieces_model(context, kind=fsdp.ScheduleKind.SEQUENTIAL, visits=None, held_groups=0):
    """Three matrices in the pieces 0, 1 and 1 of each of the groups "a" and "b". "b" is not read in BACKWARD."""
    model = context.create_model(unshard_mode=fsdp.UnshardMode.COPIED, flags=fsdp.ModelFlag.NO_PREFETCH)
    kinds = {"a": fsdp.BackwardWeights.GATHERED, "b": fsdp.BackwardWeights.NONE}
    groups = [
        model.create_group(
            name, [fsdp.Param(f"{name}{p}", (4, 2), piece=(p + 1) // 2) for p in range(3)], backward_weights=kinds[name]
        )
        for name in kinds
    ]
    model.set_schedule(kind, visits, held_groups)
    model.seal()
    for g, group in enumerate(groups):
        for p in range(3):
            group.load_param(p, floats(*values(g, p)))
    model.publish_weights()
    return model, groups


def values(g, p):
    return [3.0 * g + p + 1] * COUNT


def step(model, groups, pieces):
    """Every gradient is the weight as the forward pass sees it."""
    for group in groups:
        for piece in pieces:
            with group.unsharded(piece=piece) as weights:
                for name, weight in weights.items():
                    group.put_grad(name, floats(*flat(weight)))
    for group in reversed(groups):
        group.reduce_grad()
    model.finish_grads()
    model.step_adamw(0.125)


class Pieces(unittest.TestCase):
    def test_show_their_own_parameters_only(self):
        schedules = (
            (fsdp.ScheduleKind.SEQUENTIAL, None, 0),
            (fsdp.ScheduleKind.VISITS, VISITS, 0),
            (fsdp.ScheduleKind.ANY, None, 2),
        )

        def rank(context, schedule):
            model, (group, _) = pieces_model(context, *schedule)
            with model:
                self.assertEqual(group.param_info("a2").piece, 1)
                for _ in range(2):
                    with group.unsharded(piece=1) as weights:
                        self.assertEqual(list(weights), ["a1", "a2"])
                        for p in (1, 2):
                            self.assertEqual(flat(weights[f"a{p}"]), values(0, p))
                        with self.assertRaisesRegex(KeyError, "'a0' is in piece 0 of group 'a', .* of piece 1"):
                            weights["a0"]
                        with self.assertRaisesRegex(KeyError, "not 'a9'"):
                            weights["a9"]
                        with self.assertRaisesRegex(fsdp.InvalidState, "piece 0"):
                            group.tensors(piece=0)
                        with self.assertRaisesRegex(fsdp.InvalidState, "piece 0"):
                            group.tensors()
                        self.assertEqual(list(group.tensors(piece=1)), ["a1", "a2"])

        for schedule in schedules:
            with self.subTest(schedule[0].name):
                fsdp.run_local(2, lambda context: rank(context, schedule))

    def test_are_gathered_by_themselves_and_the_group_gathers_the_rest(self):
        def rank(context):
            model, (group, _) = pieces_model(context)
            seen = [0]

            def gathered():
                seen.append(model.stats.gathers)
                return seen[-1] - seen[-2]

            with model:
                with group.unsharded(piece=0):
                    self.assertEqual(gathered(), 1)
                    with group.unsharded() as weights:
                        self.assertEqual(gathered(), 1)
                        self.assertEqual(list(weights), ["a0", "a1", "a2"])
                        group.unshard(piece=1)
                        group.reshard(piece=1)
                        self.assertEqual(gathered(), 0)
                self.assertEqual(model.stats.gathered_groups, 0)
                with group.unsharded():
                    self.assertEqual(gathered(), 2)

        fsdp.run_local(2, rank)

    def test_are_returned_as_they_were_taken(self):
        def rank(context):
            model, (group, _) = pieces_model(context)
            with model:
                group.unshard(piece=1)
                with self.assertRaisesRegex(fsdp.InvalidState, "piece 1 FORWARD x 1"):
                    group.reshard()
                with self.assertRaisesRegex(fsdp.InvalidState, "piece 0"):
                    group.reshard(piece=0)
                group.reshard(piece=1)
                with self.assertRaisesRegex(RuntimeError, "in the middle"), group.unsharded(piece=1):
                    raise RuntimeError("in the middle")
                self.assertEqual(model.stats.gathered_groups, 0)

        fsdp.run_local(2, rank)

    def test_that_do_not_exist_are_refused(self):
        def rank(context):
            model, (group, _) = pieces_model(context)
            with model:
                for call in (group.unshard, group.reshard):
                    with self.assertRaisesRegex(fsdp.InvalidArgument, "the pieces 0 to 1"):
                        call(piece=2)
                for piece in (-1, 2**32 - 1, 2**32):
                    with self.assertRaisesRegex(ValueError, "numbered from 0"):
                        group.unshard(piece=piece)
                with self.assertRaisesRegex(ValueError, "'a' has no piece 2"):
                    group.tensors(piece=2)
            with context.create_model() as model:
                model.create_group("g", [fsdp.Param("w", (4,))])
                with self.assertRaisesRegex(ValueError, "numbered from 0"):
                    model.set_schedule(fsdp.ScheduleKind.VISITS, [(0, FORWARD, -1), (0, BACKWARD)])
                model.set_schedule(fsdp.ScheduleKind.VISITS, [(0, FORWARD, 1), (0, BACKWARD)])
                with self.assertRaisesRegex(fsdp.InvalidArgument, "piece"):
                    model.seal()

        fsdp.run_local(1, rank)

    def test_train_the_bits_of_whole_groups(self):
        def rank(context, by_piece):
            kind = fsdp.ScheduleKind.VISITS if by_piece else fsdp.ScheduleKind.SEQUENTIAL
            model, groups = pieces_model(context, kind, VISITS if by_piece else None)
            with model:
                for _ in range(4):
                    step(model, groups, (0, 1) if by_piece else (None,))
                return [flat(group.read_param(p)) for group in groups for p in range(3)]

        whole, pieces = (fsdp.run_local(2, lambda context: rank(context, by_piece)) for by_piece in (False, True))
        self.assertEqual(whole, pieces)
        self.assertNotEqual(whole[0][0], values(0, 0))

    def test_of_quantized_parameters_have_planes(self):
        def rank(context):
            quantized = fsdp.Param("q", (1, 2), quantization=fsdp.Quantization.FP8_BLOCK, piece=1)
            with context.create_model() as model:
                group = model.create_group("layer", [fsdp.Param("w", (4,)), quantized])
                model.seal()
                group.load_param("q", floats(448, 1))
                model.publish_weights()
                with group.unsharded(piece=1) as weights:
                    with self.assertRaisesRegex(KeyError, "'q' is quantized: see plane"):
                        weights["q"]
                    self.assertEqual(bytes(group.plane("q").memoryview()), b"\x7e\x38")

        fsdp.run_local(2, rank)

    def test_of_groups_without_weights_in_backward_are_not_held_there(self):
        def rank(context):
            model, (_, group) = pieces_model(context)
            with model:
                for piece in (None, 0):
                    with self.assertRaisesRegex(fsdp.InvalidState, "FSDP_BACKWARD_WEIGHTS_NONE"):
                        with group.unsharded(BACKWARD, piece=piece):
                            self.fail("it is held")
                with group.unsharded(fsdp.Phase.RECOMPUTE, piece=1) as weights:
                    self.assertEqual(flat(weights["b1"]), values(1, 1))

        fsdp.run_local(2, rank)


if __name__ == "__main__":
    unittest.main()
