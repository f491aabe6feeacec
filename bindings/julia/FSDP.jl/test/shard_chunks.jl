# SPDX-License-Identifier: Apache-2.0
# An optimizer of the caller's own on shards at home in a file, chunk by chunk.

const CHUNKED_DIMS = (300, 100)

"The caller updates w, and AdamW updates b."
function filed_model(context; home = FSDP.HOME_FILE)
    model = create_model(context; state_home = home, main_home = home, home_directory = "/var/tmp", turn_bytes = 65536,
        grad_dtype = Float32)
    params = [Param("w", BFloat16, CHUNKED_DIMS...; optimizer = FSDP.OPTIMIZER_CALLER), Param("b", BFloat16, 300)]
    group = create_group(model, "layer", params)
    FSDP.add_optimizer_state(model, "momentum")
    seal(model)
    load_param(group, "w", chunked_ramp())
    publish_weights(model)
    return model, group
end

chunked_ramp() = reshape(Float32.(1:prod(CHUNKED_DIMS)), CHUNKED_DIMS)

function finish_chunked_grads(model, group)
    put_grad(group, "w", chunked_ramp())
    put_grad(group, "b", ones(Float32, 300))
    reduce_grad(group)
    finish_grads(model)
end

"SGD with momentum, in numbers that are exact."
function update_chunk(chunk)
    momentum = state(chunk, "momentum")
    momentum .= 0.5f0 .* momentum .+ chunk.main_grad
    chunk.main_weight .-= 0.25f0 .* momentum
end

@testset "an own optimizer updates chunk by chunk" begin
    run_local(2) do context
        model, group = filed_model(context)
        elements = 0
        for _ in 1:2
            finish_chunked_grads(model, group)
            foreach_shard_chunk(model) do chunk
                @test chunk.name == "w" && chunk.element_count <= 8192
                elements += chunk.element_count
                update_chunk(chunk)
            end
            step_adamw(model, 0.5)
        end
        @test elements == prod(CHUNKED_DIMS) # half of them in each of two steps
        @test read_param(group, "w") == 0.375f0 .* chunked_ramp()
        @test read_state(group, "w", "momentum") == 1.5f0 .* chunked_ramp()
        close(model)
    end
end

@testset "a pass that an exception ended goes on" begin
    run_local(1) do context
        model, group = filed_model(context)
        finish_chunked_grads(model, group)
        @test_throws ErrorException foreach_shard_chunk(chunk -> error("the math has failed"), model)
        @test_throws FSDP.Error step_adamw(model, 0.5)
        foreach_shard_chunk(update_chunk, model)
        step_adamw(model, 0.5)
        close(model)
    end
end
