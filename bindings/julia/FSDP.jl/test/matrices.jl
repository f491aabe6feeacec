# SPDX-License-Identifier: Apache-2.0
# Matrices that come whole to one rank inside the update window, and go back.

const MATRIX_DIMS = Dict("qkv" => (2, 6), "bias" => (6,), "stack" => (5, 3, 3))
const MATRIX_SPLITS = Dict("qkv" => [4, 1, 1], "stack" => [3])

"qkv has splits of 4, 1 and 1 rows, stack has three matrices, bias has none."
function matrices_model(context; fields...)
    model = create_model(context; fields...)
    params = [Param("qkv", 2, 6; splits = MATRIX_SPLITS["qkv"]), Param("bias", 6), Param("stack", 5, 3, 3; matrix = true)]
    group = create_group(model, "net", params)
    get(fields, :optimizer, nothing) == FSDP.OPTIMIZER_CALLER && FSDP.add_optimizer_state(model, "momentum")
    seal(model)
    publish_weights(model)
    return model, group
end

"What the ranks' mean is. All of its numbers are exact in bfloat16."
matrix_grad(name) = reshape(Float32.(1:prod(MATRIX_DIMS[name])), MATRIX_DIMS[name])

function finish_matrix_grads(model, group)
    foreach(param -> put_grad(group, param.name, matrix_grad(param.name)), group.params)
    reduce_grad(group)
    finish_grads(model)
end

"The last row comes first, and each number is multiplied."
changed(matrix, batch, split) = (1 + split + 2 * batch) * matrix[:, end:-1:1]
function change(matrices)
    for (number, matrix) in enumerate(matrices)
        matrix .= changed(matrix, matrices.batch_index + number - 1, matrices.split_index)
    end
end

"What `change` makes of all matrices."
function all_changed(name)
    grad = copy(matrix_grad(name))
    for batch in 1:size(grad, 3)
        first = 1
        for (split, rows) in enumerate(MATRIX_SPLITS[name])
            part = first:first+rows-1
            grad[:, part, batch] = changed(grad[:, part, batch], batch - 1, split - 1)
            first += rows
        end
    end
    return grad
end

@testset "Matrices are whole on one rank, and their rows come back" begin
    for ranks in 1:2
        elements = run_local(ranks) do context
            model, group = matrices_model(context)
            finish_matrix_grads(model, group)
            count = 0
            foreach_matrix(model) do matrices
                @test matrices.group === group && group.params[matrices.param_index].name == matrices.name
                @test all(matrix -> matrix isa Matrix{Float32}, matrices)
                @test size(matrices[1]) == (matrices.columns, matrices.rows)
                own = matrices.row_offset+1:matrices.row_offset+matrices.rows
                @test matrices[1] == matrix_grad(matrices.name)[:, own, matrices.batch_index+1]
                count += sum(length, matrices)
                change(matrices)
            end
            @test read_grad(group, "qkv") == all_changed("qkv")
            @test read_grad(group, "bias") == matrix_grad("bias")
            @test read_grad(group, "stack") == all_changed("stack")
            step_adamw(model, 0.1)
            count
        end
        @test sum(elements) == 12 + 45
    end
end

@testset "Matrices go from one state to another" begin
    run_local(2) do context
        model, group = matrices_model(context; optimizer = FSDP.OPTIMIZER_CALLER)
        finish_matrix_grads(model, group)
        foreach_matrix(model; target = "momentum", dtype = BFloat16) do matrices
            @test all(matrix -> matrix isa Matrix{BFloat16}, matrices)
        end
        @test read_state(group, "stack", "momentum") == matrix_grad("stack")
        @test read_state(group, "bias", "momentum") == zeros(6)
        foreach_matrix(change, model; source = "momentum", target = "main_weight")
        @test read_param(group, "qkv") == all_changed("qkv")
        unknown = thrown(() -> foreach_matrix(change, model; source = "velocity"))
        @test unknown isa FSDP.Error && unknown.status == FSDP.INVALID_ARGUMENT
        publish_weights(model)
    end
end

@testset "Matrices of an exception are told by the next call" begin
    run_local(2) do context
        model, group = matrices_model(context)
        finish_matrix_grads(model, group)
        @test thrown(() -> foreach_matrix(_ -> error("the math has failed"), model)) isa ErrorException
        refused = thrown(() -> step_adamw(model, 0.1))
        @test refused isa FSDP.Error && refused.status == FSDP.INVALID_STATE
        @test occursin("fsdp_return_matrices", refused.message)
        discard_step(model)
        finish_matrix_grads(model, group)
        foreach_matrix(change, model)
        @test read_grad(group, "stack") == all_changed("stack")
        step_adamw(model, 0.1)
    end
end

@testset "Matrices have a plan, memory and a declaration" begin
    run_local(2) do context
        model, group = matrices_model(context; matrix_bytes = 256)
        plan = FSDP.matrix_plan(model)
        @test occursin("\"matrix_bytes\": 256,", plan)
        @test occursin("\"name\": \"stack\", \"batch\": 2,", plan)
        @test FSDP.role_bytes(model, FSDP.ROLE_MATRIX) > 0
        splits = [FSDP.param_info(group, name).fields.splits for name in ("qkv", "bias", "stack")]
        @test splits == [[4, 1, 1], nothing, [3]]
        again = create_group(create_model(context), "again", [FSDP.param_info(group, "qkv")])
        @test FSDP.param_info(again, 1).fields.splits == [4, 1, 1]
        for (wrong, told) in ([4, 1] => "add up to 5 rows", Int[] => "there are matrix_splits")
            refused = thrown(() -> create_group(create_model(context), "wrong", [Param("w", 2, 6; splits = wrong)]))
            @test refused isa FSDP.Error && occursin(told, refused.message)
        end
    end
end
