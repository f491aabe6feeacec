# SPDX-License-Identifier: Apache-2.0
"""Matrices that come whole to one rank inside the update window, and go back."""

import unittest
from unittest import mock

import libfsdp as fsdp
from helper import flat, floats
from libfsdp import dlpack

try:
    import numpy
except ImportError:
    numpy = None

SHAPES = {"qkv": (6, 2), "bias": (6,), "stack": (3, 3, 5)}
SPLITS = {"qkv": (4, 1, 1), "stack": (3,)}
COUNTS = {"qkv": 12, "bias": 6, "stack": 45}


def matrices_model(context, **options):
    """qkv has splits of 4, 1 and 1 rows, stack has three matrices, bias has none."""
    model = context.create_model(**options)
    params = [
        fsdp.Param("qkv", SHAPES["qkv"], splits=[4, 1, 1]),
        fsdp.Param("bias", SHAPES["bias"]),
        fsdp.Param("stack", SHAPES["stack"], matrix=True),
    ]
    group = model.create_group("net", params)
    if options.get("optimizer") == fsdp.Optimizer.CALLER:
        model.add_optimizer_state("momentum")
    model.seal()
    model.publish_weights()
    return model, group


def grad_of(name):
    """What the ranks' mean is. All of its numbers are exact in bfloat16."""
    return [float(i + 1) for i in range(COUNTS[name])]


def finish_grads(model, group):
    for name in SHAPES:
        group.put_grad(name, floats(*grad_of(name)))
    group.reduce_grad()
    model.finish_grads()


def changed_matrix(numbers, columns, batch, split):
    """The last row comes first, and each number is multiplied."""
    rows = [numbers[i : i + columns] for i in range(0, len(numbers), columns)]
    return [(1 + split + 2 * batch) * number for row in reversed(rows) for number in row]


def changed(name):
    """What change() makes of all matrices."""
    numbers, columns, result = grad_of(name), SHAPES[name][-1], []
    for batch in range(len(numbers) // (sum(SPLITS[name]) * columns)):
        for split, rows in enumerate(SPLITS[name]):
            own, numbers = numbers[: rows * columns], numbers[rows * columns :]
            result += changed_matrix(own, columns, batch, split)
    return result


def change(matrix):
    for number in range(len(matrix)):
        view, batch = matrix[number], matrix.batch_index + number
        numbers = floats(*changed_matrix(flat(view), matrix.columns, batch, matrix.split_index))
        if hasattr(view, "reshape"):
            view[:] = numpy.reshape(numbers, view.shape)
        else:
            view.cast("B").cast("f")[:] = numbers


class Matrices(unittest.TestCase):
    def test_are_whole_on_one_rank_and_their_rows_come_back(self):
        def rank(context):
            model, group = matrices_model(context)
            with model:
                finish_grads(model, group)
                elements = 0
                for matrix in model.matrices():
                    first = (3 * matrix.batch_index + matrix.row_offset) * matrix.columns
                    self.assertEqual(flat(matrix[0])[0], grad_of(matrix.name)[first])
                    self.assertIs(matrix.group, group)
                    self.assertEqual(group.params[matrix.param_index].name, matrix.name)
                    self.assertEqual(matrix.dtype, fsdp.Dtype.FLOAT32)
                    elements += matrix.count * matrix.rows * matrix.columns
                    change(matrix)
                found = [flat(group.read_grad(name)) for name in SHAPES]
                self.assertEqual(found, [changed("qkv"), grad_of("bias"), changed("stack")])
                model.step_adamw(0.1)
                return elements

        for world in (1, 2, 3):
            self.assertEqual(sum(fsdp.run_local(world, rank)), 12 + 45)

    @unittest.skipUnless(numpy, "no numpy here")
    def test_are_arrays_of_count_rows_and_columns(self):
        """A single rank has the whole stack, with room between its matrices."""

        def rank(context):
            model, group = matrices_model(context)
            with model:
                finish_grads(model, group)
                for matrix in model.matrices():
                    array = matrix.array
                    self.assertEqual(array.shape, (matrix.count, matrix.rows, matrix.columns))
                    there = numpy.from_dlpack(matrix.tensor)
                    self.assertTrue(numpy.shares_memory(there, array))
                    numpy.testing.assert_array_equal(there, array)
                    if matrix.name == "stack":
                        self.assertEqual(len(matrix), 3)
                        self.assertFalse(array.flags.c_contiguous)
                        numpy.testing.assert_array_equal(array.ravel(), grad_of("stack"))
                        self.refuse_as_contiguous(group, matrix.tensor)
                        with self.assertRaisesRegex(IndexError, "matrix 3 of Matrix.'stack', 3 x 3 x 5, FLOAT32"):
                            matrix[3]
                    else:
                        self.assertEqual(flat(matrix.tensor.memoryview()), array.ravel().tolist())
                    matrix.array[:] = 2 * matrix.array
                self.assertEqual(flat(group.read_grad("stack")), [2 * number for number in grad_of("stack")])
                model.publish_weights()

        fsdp.run_local(1, rank)

    def refuse_as_contiguous(self, group, tensor):
        for call in (tensor.memoryview, lambda: group.put_grad("stack", tensor), lambda: dlpack.read(tensor)):
            with self.assertRaisesRegex(ValueError, "is not contiguous"):
                call()

    def test_are_memoryviews_without_numpy(self):
        def rank(context):
            model, group = matrices_model(context)
            with model:
                finish_grads(model, group)
                for matrix in model.matrices():
                    shapes = [view.shape for view in matrix.array]
                    self.assertEqual(shapes, matrix.count * [(matrix.rows, matrix.columns)])
                    change(matrix)
                self.assertEqual(flat(group.read_grad("stack")), changed("stack"))
                model.publish_weights()

        with mock.patch("libfsdp.tensor.numpy", None), mock.patch("libfsdp.matrices.numpy", None):
            fsdp.run_local(2, rank)

    def test_go_from_one_state_to_another(self):
        def rank(context):
            model, group = matrices_model(context, optimizer=fsdp.Optimizer.CALLER)
            with model:
                finish_grads(model, group)
                for matrix in model.matrices(target="momentum", dtype=fsdp.Dtype.BFLOAT16):
                    self.assertEqual(matrix.dtype, fsdp.Dtype.BFLOAT16)
                    self.assertEqual(matrix[0].nbytes, 2 * matrix.rows * matrix.columns)
                self.assertEqual(flat(group.read_state("stack", "momentum")), grad_of("stack"))
                self.assertEqual(flat(group.read_state("bias", "momentum")), 6 * [0.0])
                for matrix in model.matrices("momentum", "main_weight"):
                    change(matrix)
                self.assertEqual(flat(group.read_param("qkv")), changed("qkv"))
                with self.assertRaisesRegex(fsdp.InvalidArgument, "source is 'velocity'"):
                    model.matrices("velocity")
                model.publish_weights()

        fsdp.run_local(2, rank)

    def test_of_a_loop_that_is_left_are_told_by_the_next_call(self):
        def rank(context):
            model, group = matrices_model(context)
            with model:
                finish_grads(model, group)
                for _ in model.matrices():
                    break
                for call in (lambda: model.step_adamw(0.1), model.publish_weights, model.get_grad_norm, model.matrices):
                    with self.assertRaisesRegex(fsdp.InvalidState, "fsdp_return_matrices"):
                        call()
                model.discard_step()
                finish_grads(model, group)
                matrices = model.matrices()
                for matrix in matrices:
                    change(matrix)
                self.assertEqual(list(matrices), [])  # their end is there once
                self.assertEqual(flat(group.read_grad("stack")), changed("stack"))
                model.step_adamw(0.1)

        fsdp.run_local(2, rank)

    def test_have_a_plan_and_memory(self):
        def rank(context):
            model, _ = matrices_model(context, matrix_bytes=256)
            with model:
                plan = model.matrix_plan()
                self.assertEqual(plan["matrix_bytes"], 256)
                names = [matrix["name"] for wave in plan["waves"] for matrix in wave["matrices"]]
                self.assertEqual(sorted(names), 3 * ["qkv"] + 3 * ["stack"])
                self.assertEqual({matrix["owner"] for wave in plan["waves"] for matrix in wave["matrices"]}, {0, 1})
                self.assertGreater(model.role_bytes(fsdp.Role.MATRIX), 0)

        fsdp.run_local(2, rank)

    def test_that_are_declared_wrongly_are_refused(self):
        def rank(context):
            for fields, told in (
                ({"splits": [4, 1]}, "add up to 5 rows"),
                ({"splits": []}, "there are matrix_splits"),
                ({"splits": [6], "matrix": False}, "the parameter has no matrices"),
                ({"matrix": True, "flags": fsdp.ParamFlag.FROZEN}, "is FROZEN"),
                ({"matrix": 7}, "FSDP_MATRIX_LAST_TWO"),
            ):
                with context.create_model() as model, self.assertRaisesRegex(fsdp.InvalidArgument, told):
                    model.create_group("g", [fsdp.Param("w", (6, 2), **fields)])
            with context.create_model() as model:
                one = fsdp.Param("w", (6, 2), matrix=fsdp.MatrixLayout.LAST_TWO)
                model.create_group("g", [one, fsdp.Param("b", (6, 2))])
                model.seal()
                waves = model.matrix_plan()["waves"]
                self.assertEqual([matrix["name"] for wave in waves for matrix in wave["matrices"]], ["w"])

        fsdp.run_local(1, rank)


if __name__ == "__main__":
    unittest.main()
