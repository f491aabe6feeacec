# SPDX-License-Identifier: Apache-2.0
"""A model in which the caller updates the matrix and AdamW the rest."""

import unittest

import libfsdp as fsdp

from helper import COUNT, flat, floats, ramp


def mixed_model(context, **options):
    model = context.create_model(**options)
    matrix = fsdp.Param("w", (4, 8), optimizer=fsdp.Optimizer.CALLER)
    group = model.create_group("layer", [matrix, fsdp.Param("b", (4,)), fsdp.Param("f", (4,), flags=fsdp.ParamFlag.FROZEN)])
    model.add_optimizer_state("momentum")
    model.seal()
    group.load_param("w", ramp())
    model.publish_weights()
    return model, group


def reduce(model, group):
    group.put_grad("w", floats(*[1.0] * COUNT))
    group.put_grad("b", floats(*[1.0] * 4))
    group.reduce_grad()
    model.finish_grads()


class ParamOptimizer(unittest.TestCase):
    def test_caller_and_adamw_update_their_own_parameters(self):
        def rank(context):
            model, group = mixed_model(context)
            with model:
                reduce(model, group)
                for shard in model.shards():
                    if shard.name == "w":
                        self.assertEqual(shard.state_count, 1)
                        weight, grad, momentum = (
                            memoryview(array).cast("B").cast("f")
                            for array in (shard.main_weight, shard.main_grad, shard.state("momentum"))
                        )
                        for i in range(len(weight)):
                            momentum[i] = 0.5 * momentum[i] + grad[i]
                            weight[i] -= 0.25 * momentum[i]
                        with self.assertRaisesRegex(fsdp.InvalidArgument, "has no optimizer state 'exp_avg'"):
                            shard.state("exp_avg")
                    else:
                        self.assertEqual(shard.state_count, 2)
                model.step_adamw(0.5)
                with self.assertRaisesRegex(fsdp.InvalidArgument, "the caller updates it"):
                    group.read_state("w", "exp_avg_sq")
                return flat(group.read_param("w")), flat(group.read_state("w", "momentum")), flat(group.read_param("b"))

        for w, momentum, b in fsdp.run_local(2, rank):
            self.assertEqual(w, [x - 0.25 for x in flat(ramp())])
            self.assertEqual(momentum, [1.0] * COUNT)
            for x in b:
                self.assertAlmostEqual(x, -0.5, places=5)

    def test_descriptor_names_the_optimizer(self):
        def rank(context):
            model, group = mixed_model(context)
            with model:
                return [group.param_info(name).optimizer for name in ("w", "b", "f")]

        self.assertEqual(fsdp.run_local(1, rank), [[fsdp.Optimizer.CALLER, fsdp.Optimizer.ADAMW, 0]])

    def test_optimizer_that_the_model_lacks_is_refused(self):
        def rank(context):
            with context.create_model(optimizer=fsdp.Optimizer.CALLER) as model:
                with self.assertRaisesRegex(fsdp.InvalidArgument, "create the model with FSDP_OPTIMIZER_ADAMW"):
                    model.create_group("layer", [fsdp.Param("w", (4,), optimizer=fsdp.Optimizer.ADAMW)])

        fsdp.run_local(1, rank)


if __name__ == "__main__":
    unittest.main()
