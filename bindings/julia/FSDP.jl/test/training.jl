# SPDX-License-Identifier: Apache-2.0

@testset "two ranks train" begin
    steps = run_local(2) do context
        model, group = small_model(context)
        @test (rank(context), world_size(context)) in ((0, 2), (1, 2))
        unshard(group) do weights
            @test weights["w"] == ramp() && weights[2] == [1, 2, 3, 4]
            @test size(weights["w"]) == (4, 8)
            @test thrown(() -> weights["w"][1] = 0) isa ReadOnlyMemoryError
        end
        train(model, group)
        @test read_param(group, "w") ≈ ramp() .- 0.5
        @test read_param(group, "w"; root = 1) === nothing || rank(context) == 1
        owned = shards(model)
        @test all_reduce_values(context, sum(shard.element_count for shard in owned)) == 36
        @test all(shard -> all(≈(0.1f0), state(shard, "exp_avg")), owned)
        grads = acquire_grads(group)
        grads["w"] .+= 2
        grads["b"] .+= 0
        reduce_grad(group)
        finish_grads(model)
        @test grad_norm(model) ≈ sqrt(32 * 4)
        @test param_grad_norms(model)["b"] == 0
        @test count_zero_grads(model) == 4
        norms = param_weight_norms(model)
        discard_step(model)
        @test param_weight_norms(model) == norms && norms["w"] > 0
        @test all_reduce_values(context, rank(context) + 1, FSDP.VALUE_SUM) == 3.0
        FSDP.stats(model).step
    end
    @test steps == [1, 1]
end

"A matrix in bf16 that is all 1, not yet published."
function narrow_model(context; options...)
    model = create_model(context; options...)
    group = create_group(model, "g", [Param("w", BFloat16, 64, 64)])
    seal(model)
    load_param(group, "w", ones(Float32, 64, 64))
    return model, group
end

@testset "main weights and states in fewer bits" begin
    run_local(1) do context
        model, group = narrow_model(context; main_storage = FSDP.MAIN_SPLIT16)
        @test shards(model)[1].main_weight === nothing
        @test all(==(1), read_param(group, "w"))
        model, group = narrow_model(context; main_home = FSDP.HOME_FILE, state_home = FSDP.HOME_FILE, home_directory = tempdir())
        @test shards(model)[1].main_weight === nothing
        @test state(shards(model)[1], "exp_avg") === nothing
        @test all(==(1), read_param(group, "w"))
        model, group = narrow_model(context; main_storage = FSDP.MAIN_NONE, rounding_seed = 5)
        shard = shards(model)[1]
        @test eltype(shard.main_weight) == BFloat16
        round_stochastic(shard, fill(1f0 + 2f0^-9, 4000), 1; offset = 96)
        @test 800 < count(>(1), read_param(group, "w")) < 1200  # a quarter of them
        @test_throws DimensionMismatch round_stochastic(shard, ones(Float32, 4000), 1; offset = 97)
        model, group = narrow_model(context; optimizer = FSDP.OPTIMIZER_ADAMW_8BIT)
        publish_weights(model)
        apply_grads(model, [fill(0.5f0, 64, 64)], 0.125)
        @test all(==(255), state(shards(model)[1], "exp_avg"))
        @test state(shards(model)[1], "exp_avg.absmax") == fill(0.05f0, 16)
        @test all(==(0.05f0), read_state(group, "w", "exp_avg"))
    end
end

@testset "whole gradients are read and replaced" begin
    run_local(2) do context
        model, group = small_model(context)
        put_grad(group, "w", ramp(); wait = false)
        put_grad(group, "b", nothing; wait = false)
        acquire_grads(group; wait = false)["b"] .+= 1
        @test last(acquire_grad(group, "w"; wait = false))
        reduce_grad(group; is_last = false)
        finish_grads(model, 2; is_last = true)
        @test read_grad(group, "w") == 2 .* ramp()
        @test (read_grad(group, "b"; root = 1) === nothing) == (rank(context) == 0)
        load_grad(group, "b", rank(context) == 1 ? Float32[4, 3, 2, 1] : nothing; root = 1)
        @test read_grad(group, "b") == [4, 3, 2, 1]
        step_adamw(model, 0.5)
        @test read_param(group, "b") ≈ [0.5, 1.5, 2.5, 3.5]
        @test thrown(() -> read_grad(group, "w")).status == FSDP.INVALID_STATE
        close(model)
    end
end

@testset "frozen planes and bytes are loaded as they are" begin
    run_local(2) do context
        model = create_model(context)
        codes = Param("q", Float32, 2, 1; flags = FSDP.PARAM_FROZEN, quantization = FSDP.QUANTIZE_FP8)
        group = create_group(model, "base", [codes, Param("nf4", UInt8, 3; flags = FSDP.PARAM_FROZEN)])
        seal(model)
        @test_throws DimensionMismatch load_plane(group, "q", FSDP.PLANE_ROW, zeros(UInt8, 1, 2))
        @test_throws DimensionMismatch load_plane(group, "q", FSDP.PLANE_ROW_SCALE, zeros(Float32, 2))
        load_plane(group, "q", FSDP.PLANE_ROW, rank(context) == 1 ? UInt8[0x7e, 0x38] : nothing; root = 1)
        load_plane(group, "q", FSDP.PLANE_ROW_SCALE, Float32[0.5])
        load_param(group, "nf4", UInt8[0, 255, 7])
        publish_weights(model)
        @test vec(read_param(group, "q")) == [224, 0.5]
        @test read_param(group, "nf4", UInt8) == [0, 255, 7]
        unshard(group) do weights
            @test weights["nf4"] == [0, 255, 7]
        end
        close(model)
    end
end

# Three groups of different values take turns in two buffers, so that weights move.
@testset "weights are read where their own hold has them" begin
    run_local(2) do context
        model = create_model(context; unshard_mode = FSDP.UNSHARD_COPIED)
        groups = [create_group(model, name, [Param(name, 6)]) for name in ("a", "b", "c")]
        FSDP.set_schedule(model, FSDP.SCHEDULE_ANY; held_groups = 2)
        seal(model)
        foreach(g -> load_param(groups[g], 1, fill(Float32(g), 6)), 1:3)
        publish_weights(model)
        addresses = [Set() for _ in groups]
        for turn in 0:5
            held = [turn % 3 + 1, (turn + 1) % 3 + 1]
            holds = unshard.(groups[held])
            for (g, weights) in zip(held, holds)
                @test weights[1] == fill(Float32(g), 6)
                push!(addresses[g], pointer(weights[1]))
            end
            error = thrown(() -> unshard(groups[(turn+2)%3+1]))
            @test error.status == FSDP.INVALID_STATE && occursin("held_groups", error.message)
            foreach(reshard, holds)
        end
        @test length.(addresses) == [2, 2, 2]
        close(model)
    end
end

@testset "checkpoints" begin
    folder = mktempdir()
    run_local(2) do context
        model, group = small_model(context)
        train(model, group)
        FSDP.save(model, folder)
        saved = FSDP.begin_checkpoint(context, folder; step = 7)
        FSDP.add_model(saved, model)
        FSDP.add_bytes(saved, "place", UInt8[1, 2, 3])
        FSDP.commit(saved)
        wait(saved)
        @test FSDP.checkpoint_status(saved).state == FSDP.CHECKPOINT_COMMITTED
        FSDP.open_checkpoint(context, folder) do opened
            @test FSDP.read_bytes(opened, "place") == [1, 2, 3]
        end
        begin_update(model) do
            load_param(group, "w", zeros(Float32, 4, 8))
            loaded = FSDP.load(model, folder)
            @test loaded.step == 7 && loaded.loaded_tensors > 0 && loaded.missing_tensors == 0
        end
        @test occursin("\"missing\":[]", FSDP.describe_load(model))
        @test read_param(group, "w") ≈ ramp() .- 0.5
    end
    @test occursin("step-0000000007", FSDP.list_checkpoints(folder))
end

@testset "misuse" begin
    context = FSDP.local_contexts(1)[1]
    model, group = small_model(context)
    @test thrown(() -> reshard(group, FSDP.FORWARD)).status == FSDP.INVALID_STATE
    @test thrown(() -> put_grad(group, "w", zeros(Float32, 8, 4))) isa DimensionMismatch
    @test thrown(() -> put_grad(group, "w", zeros(4, 8))) isa ArgumentError
    @test thrown(() -> put_grad(group, "v", zeros(Float32, 4))) isa KeyError
    weights = unshard(group)
    reshard(weights)
    @test thrown(() -> weights["w"]).status == FSDP.INVALID_STATE
    error = thrown(() -> finish_grads(model))
    @test error.status == FSDP.INVALID_STATE && error.rank == 0 && occursin("layer", error.message)
    discard_step(model)
    close(model)
    @test thrown(() -> finish_grads(model)).status == FSDP.INVALID_HANDLE
    @test thrown(() -> unshard(group)).status == FSDP.INVALID_HANDLE
    close(context)
end

@testset "an exception in a forward, and training goes on" begin
    run_local(2) do context
        model, group = small_model(context)
        @test_throws ErrorException unshard(weights -> error("in the middle"), group)
        acquire_grad(group, "w")
        discard_step(model)
        train(model, group)
        @test read_param(group, "w") ≈ ramp() .- 0.5
    end
end

@testset "an exception of a rank ends the others" begin
    cause = thrown() do
        run_local(2) do context
            rank(context) == 1 && error("rank 1 has no data")
            small_model(context)
        end
    end
    @test cause isa ErrorException && cause.msg == "rank 1 has no data"
end

@testset "log lines go to Julia's logging" begin
    @test_logs (:info,) match_mode = :any close(Context(; world_size = 1, log_level = FSDP.LOG_INFO))
end

@testset "The caller and AdamW update parameters of their own" begin
    run_local(2) do context
        model = create_model(context)
        matrix = Param("w", 4, 8; optimizer = FSDP.OPTIMIZER_CALLER)
        frozen = Param("f", 4; flags = FSDP.PARAM_FROZEN)
        group = create_group(model, "layer", [matrix, Param("b", 4), frozen])
        FSDP.add_optimizer_state(model, "momentum")
        seal(model)
        load_param(group, "w", ramp())
        publish_weights(model)
        found = [FSDP.param_info(group, name).fields.optimizer for name in ("w", "b", "f")]
        @test found == [FSDP.OPTIMIZER_CALLER, FSDP.OPTIMIZER_ADAMW, nothing]
        put_grad(group, "w", fill(1f0, 4, 8))
        put_grad(group, "b", fill(1f0, 4))
        reduce_grad(group)
        finish_grads(model)
        for shard in FSDP.shards(model)
            @test shard.state_count == (shard.name == "w" ? 1 : 2)
            shard.name == "w" || continue
            momentum = FSDP.state(shard, "momentum")
            momentum .= 0.5f0 .* momentum .+ shard.main_grad
            shard.main_weight .-= 0.25f0 .* momentum
            @test thrown(() -> FSDP.state(shard, "exp_avg")).status == FSDP.INVALID_ARGUMENT
        end
        step_adamw(model, 0.5)
        @test read_param(group, "w") == ramp() .- 0.25f0
        @test FSDP.read_state(group, "w", "momentum") == fill(1f0, 4, 8)
        @test read_param(group, "b") ≈ fill(-0.5f0, 4)
        # The descriptor declares the same parameter again.
        again = create_model(context)
        @test create_group(again, "layer", [FSDP.param_info(group, name) for name in ("w", "b", "f")]) isa FSDP.Group
    end
end
