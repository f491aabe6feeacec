# SPDX-License-Identifier: Apache-2.0
"""A group with a mesh of its own: each of two ranks has experts that it shares with no other rank."""

import unittest

import libfsdp as fsdp

from helper import floats


def experts_model(context, **options):
    """Dense weights of both ranks, and this rank's half of a stack."""
    model = context.create_model()
    dense = model.create_group("dense", [fsdp.Param("dense", (4,))])
    half = fsdp.Param("experts", (1, 4), global_shape=(2, 4), global_offset=(context.rank, 0))
    with context.create_mesh(ranks=[context.rank]) as mesh:
        experts = model.create_group("experts", [half], mesh=mesh, **options)
    model.seal()
    model.publish_weights()
    return model, dense, experts


def reduce(model, groups, value):
    for group in groups:
        group.put_grad(0, floats(*[value] * 4))
        group.reduce_grad()
    model.finish_grads()


class GroupMesh(unittest.TestCase):
    def test_mean_is_over_the_ranks_of_the_model(self):
        def rank(context):
            model, dense, experts = experts_model(context)
            reduce(model, (dense, experts), 2.0 * context.rank + 2)
            grads = [memoryview(group.read_grad(0)).cast("B").cast("f").tolist() for group in (dense, experts)]
            info = experts.info
            shape = (info.replicate_size, info.shard_size)
            return grads, shape, info.grad_op, info.grad_factor, model.get_grad_norm()

        norm = (4 * 3**2 + 4 * 1**2 + 4 * 2**2) ** 0.5
        for number, found in enumerate(fsdp.run_local(2, rank)):
            wanted = [[3.0] * 4, [number + 1.0] * 4]
            self.assertEqual(found, (wanted, (1, 1), fsdp.GradOp.MEAN, 0.5, norm))

    def test_group_has_a_factor_of_its_own(self):
        def rank(context):
            model, dense, experts = experts_model(context, grad_op=fsdp.GradOp.FACTOR, grad_factor=0.75)
            reduce(model, (dense, experts), 2.0)
            infos = [(group.info.grad_op, group.info.grad_factor) for group in (dense, experts)]
            return memoryview(experts.read_grad(0)).cast("B").cast("f").tolist(), infos

        wanted = ([1.5] * 4, [(fsdp.GradOp.MEAN, 0.5), (fsdp.GradOp.FACTOR, 0.75)])
        self.assertEqual(fsdp.run_local(2, rank), [wanted, wanted])

    def test_closed_mesh_is_refused(self):
        def rank(context):
            model, mesh = context.create_model(), context.create_mesh(ranks=[context.rank])
            mesh.close()
            for call in (
                lambda: model.create_group("experts", [fsdp.Param("w", (4,))], mesh=mesh),
                lambda: context.create_model(mesh=mesh),
                lambda: context.all_reduce_values(1, mesh=mesh),
            ):
                with self.assertRaisesRegex(ValueError, "the mesh is closed"):
                    call()
            with self.assertRaisesRegex(fsdp.Error, "outer_strategy"):
                model.create_group("w", [fsdp.Param("w", (4,))], outer_strategy=fsdp.OuterStrategy.OPTIM)

        fsdp.run_local(2, rank)
