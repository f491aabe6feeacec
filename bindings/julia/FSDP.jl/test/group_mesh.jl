# SPDX-License-Identifier: Apache-2.0
# A group with a mesh of its own: each of two ranks has experts that it shares with no other rank.

"Dense weights of both ranks, and this rank's half of a stack."
function experts_model(context; fields...)
    model = create_model(context)
    dense = create_group(model, "dense", [Param("dense", 4)])
    half = Param("experts", 4, 1; global_dims = (4, 2), global_offset = (0, rank(context)))
    experts = create_mesh(context; ranks = [rank(context)]) do mesh
        create_group(model, "experts", [half]; mesh = mesh, fields...)
    end
    seal(model)
    publish_weights(model)
    return model, dense, experts
end

function reduce_all(model, groups, value)
    for group in groups
        put_grad(group, 1, fill(Float32(value), group.params[1].dims))
        reduce_grad(group)
    end
    finish_grads(model)
end

@testset "The mean is over the ranks of the model" begin
    run_local(2) do context
        model, dense, experts = experts_model(context)
        reduce_all(model, (dense, experts), 2 * rank(context) + 2)
        @test read_grad(dense, 1) == fill(3f0, 4)
        @test read_grad(experts, 1) == fill(Float32(rank(context) + 1), 4, 1)
        @test grad_norm(model) == sqrt(4 * 3^2 + 4 * 1^2 + 4 * 2^2)
        info = FSDP.group_info(experts)
        @test (info.replicate_size, info.shard_size) == (1, 1)
        @test (info.grad_op, info.outer_strategy) == (FSDP.GRAD_OP_MEAN, FSDP.OUTER_NO_SHARD)
        @test info.grad_factor == 0.5
    end
end

@testset "A group has a factor of its own" begin
    run_local(2) do context
        model, dense, experts = experts_model(context; grad_op = FSDP.GRAD_OP_FACTOR, grad_factor = 0.75)
        reduce_all(model, (dense, experts), 2)
        @test read_grad(experts, 1) == fill(1.5f0, 4, 1)
        @test [FSDP.group_info(group).grad_factor for group in (dense, experts)] == [0.5, 0.75]
    end
end

@testset "A closed mesh is refused" begin
    run_local(2) do context
        model, mesh = create_model(context), create_mesh(context; ranks = [rank(context)])
        close(mesh)
        @test thrown(() -> create_group(model, "experts", [Param("w", 4)]; mesh = mesh)) isa ArgumentError
        @test thrown(() -> create_model(context; mesh = mesh)) isa ArgumentError
    end
end
