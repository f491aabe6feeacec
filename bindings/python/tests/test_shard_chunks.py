# SPDX-License-Identifier: Apache-2.0
"""An optimizer of the caller's own on shards at home in a file, chunk by chunk."""

import unittest

import libfsdp as fsdp
from helper import flat, floats

ROWS, COLUMNS = 100, 300
COUNT = ROWS * COLUMNS
SEGMENT = 8192  # elements of two fp32 planes in 64 KiB


def filed_model(context, home=fsdp.Home.FILE, **options):
    model = context.create_model(
        state_home=home, main_home=home, home_directory="/var/tmp", turn_bytes=65536, grad_dtype=fsdp.Dtype.FLOAT32,
        **options
    )
    params = [
        fsdp.Param("w", (ROWS, COLUMNS), fsdp.Dtype.BFLOAT16, optimizer=fsdp.Optimizer.CALLER),
        fsdp.Param("b", (COLUMNS,), fsdp.Dtype.BFLOAT16),
    ]
    group = model.create_group("layer", params)
    model.add_optimizer_state("momentum")
    model.seal()
    group.load_param("w", floats(*range(COUNT)))
    model.publish_weights()
    return model, group


def finish_grads(model, group):
    group.put_grad("w", floats(*range(COUNT)))
    group.put_grad("b", floats(*[1.0] * COLUMNS))
    group.reduce_grad()
    model.finish_grads()


def update(part):
    """SGD with momentum, in numbers that are exact."""
    weight, grad, momentum = (
        memoryview(array).cast("B").cast("f") for array in (part.main_weight, part.main_grad, part.state("momentum"))
    )
    for i in range(part.element_count):
        momentum[i] = 0.5 * momentum[i] + grad[i]
        weight[i] -= 0.25 * momentum[i]


class ShardChunks(unittest.TestCase):
    def test_an_own_optimizer_updates_chunk_by_chunk(self):
        def rank(context):
            model, group = filed_model(context)
            with model:
                elements = []
                for _ in range(2):
                    finish_grads(model, group)
                    for chunk in model.shard_chunks():
                        self.assertIsInstance(chunk, fsdp.Shard)
                        self.assertEqual((chunk.name, chunk.group, chunk.state_count), ("w", group, 1))
                        self.assertLessEqual(chunk.element_count, SEGMENT)
                        self.assertEqual(chunk.row_offset, chunk.element_offset // COLUMNS)
                        elements += range(chunk.element_offset, chunk.element_offset + chunk.element_count)
                        update(chunk)
                    model.step_adamw(0.5)
                return elements, flat(group.read_param("w")), flat(group.read_state("w", "momentum"))

        given = []
        for elements, w, momentum in fsdp.run_local(2, rank):
            given += elements
            self.assertEqual(w, [i - 0.625 * i for i in range(COUNT)])
            self.assertEqual(momentum, [1.5 * i for i in range(COUNT)])
        self.assertEqual(sorted(given), sorted(2 * list(range(COUNT))))

    def test_a_new_loop_goes_on_after_a_break(self):
        def rank(context):
            model, group = filed_model(context)
            with model:
                finish_grads(model, group)
                for chunk in model.shard_chunks():
                    update(chunk)
                    break
                with self.assertRaisesRegex(fsdp.InvalidState, "fsdp_next_shard_chunk until"):
                    model.step_adamw(0.5)
                chunks = model.shard_chunks()
                for chunk in chunks:
                    update(chunk)
                self.assertEqual(list(chunks), [])
                with self.assertRaisesRegex(fsdp.InvalidState, "no chunk of a shard is given"):
                    chunk.state("momentum")
                model.step_adamw(0.5)
                with self.assertRaisesRegex(fsdp.InvalidState, "the update window is closed"):
                    next(model.shard_chunks())
                return flat(group.read_param("w"))

        self.assertEqual(fsdp.run_local(1, rank)[0], [0.75 * i for i in range(COUNT)])

    def test_chunks_name_the_states_that_they_have(self):
        def rank(context):
            model, group = filed_model(context)
            with model:
                finish_grads(model, group)
                for chunk in model.shard_chunks():
                    with self.assertRaisesRegex(fsdp.InvalidArgument, "no optimizer state 'exp_avg'.*'momentum'"):
                        chunk.state("exp_avg")
                model.publish_weights()

        fsdp.run_local(1, rank)

    def test_a_model_in_memory_has_none(self):
        def rank(context):
            model, group = filed_model(context, home=fsdp.Home.DEVICE)
            with model:
                finish_grads(model, group)
                self.assertEqual(list(model.shard_chunks()), [])
                model.publish_weights()

        fsdp.run_local(1, rank)


if __name__ == "__main__":
    unittest.main()
