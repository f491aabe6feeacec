# SPDX-License-Identifier: Apache-2.0
# Pieces of a group: holds of their own, visits, and groups that BACKWARD does not read.

values_of(g, p) = fill(Float32(3g + p), 2, 4)

"Three matrices in the pieces 0, 1 and 1 of each of the groups a and b, of which b is not read in BACKWARD."
function pieces_model(context, kind = FSDP.SCHEDULE_SEQUENTIAL; visits = groups -> nothing, held_groups = 0)
    model = create_model(context; unshard_mode = FSDP.UNSHARD_COPIED, flags = FSDP.MODEL_NO_PREFETCH)
    kinds = [("a", FSDP.BACKWARD_WEIGHTS_GATHERED), ("b", FSDP.BACKWARD_WEIGHTS_NONE)]
    params(name) = [Param("$name$p", 2, 4; piece = (p + 1) ÷ 2) for p in 0:2]
    groups = [create_group(model, name, params(name); backward_weights = reads) for (name, reads) in kinds]
    FSDP.set_schedule(model, kind, visits(groups); held_groups = held_groups)
    seal(model)
    for g in 1:2, p in 1:3
        load_param(groups[g], p, values_of(g, p))
    end
    publish_weights(model)
    return model, groups
end

function visits_of_pieces(groups)
    forward = [(group, FSDP.FORWARD, piece) for group in groups for piece in 0:1]
    backward = [(groups[2], FSDP.BACKWARD, 1), (groups[2], FSDP.BACKWARD, 0), groups[1] => FSDP.BACKWARD]
    return Any[forward..., backward..., (groups[1], FSDP.BACKWARD, nothing)]
end

# Every gradient is the weight as the forward pass sees it.
function train_pieces(model, groups, pieces)
    for group in groups, piece in pieces
        unshard(group; piece = piece) do weights
            foreach(name -> put_grad(group, name, copy(weights[name])), keys(weights))
        end
    end
    foreach(reduce_grad, reverse(groups))
    finish_grads(model)
    step_adamw(model, 0.125)
end

@testset "a hold of a piece shows its parameters only" begin
    for kind in (FSDP.SCHEDULE_SEQUENTIAL, FSDP.SCHEDULE_VISITS, FSDP.SCHEDULE_ANY)
        run_local(2) do context
            visits = kind == FSDP.SCHEDULE_VISITS ? visits_of_pieces : _ -> nothing
            held = kind == FSDP.SCHEDULE_ANY ? 2 : 0
            model, (group, _) = pieces_model(context, kind; visits = visits, held_groups = held)
            @test FSDP.param_info(group, "a2").fields.piece == 1
            for _ in 1:2
                unshard(group; piece = 1) do weights
                    @test keys(weights) == ["a1", "a2"] && length(weights) == 2
                    @test weights[2] == values_of(1, 2) && weights["a2"] == values_of(1, 3)
                    error = thrown(() -> weights["a0"])
                    @test error.status == FSDP.INVALID_STATE
                    @test occursin("a0 is in piece 0 of group a", error.message)
                    @test occursin("weights are of piece 1", error.message)
                    @test thrown(() -> weights["a9"]) isa KeyError
                    @test thrown(() -> FSDP.tensors(group)).status == FSDP.INVALID_STATE
                    @test length(FSDP.tensors(group; piece = 1)) == 2
                end
            end
            close(model)
        end
    end
end

@testset "pieces are gathered by themselves and the group gathers the rest" begin
    run_local(2) do context
        model, (group, _) = pieces_model(context)
        gathers() = FSDP.stats(model).gathers
        first = unshard(group; piece = 0)
        @test gathers() == 1
        unshard(group) do weights
            @test gathers() == 2 && length(weights) == 3
            unshard(again -> (@test pointer(again["a2"]) == pointer(weights["a2"])), group; piece = 1)
            @test gathers() == 2
        end
        refused = thrown(() -> reshard(group, FSDP.FORWARD))
        @test refused.status == FSDP.INVALID_STATE && occursin("piece 0 FORWARD x 1", refused.message)
        reshard(first)
        @test FSDP.stats(model).gathered_groups == 0
        @test_throws ErrorException unshard(weights -> error("in the middle"), group; piece = 1)
        @test FSDP.stats(model).gathered_groups == 0
        unshard(weights -> nothing, group)
        @test gathers() == 5
        close(model)
    end
end

@testset "pieces that do not exist are refused" begin
    run_local(1) do context
        model, (group, _) = pieces_model(context)
        for call in (piece -> unshard(group; piece = piece), piece -> reshard(group, FSDP.FORWARD; piece = piece))
            error = thrown(() -> call(2))
            @test error.status == FSDP.INVALID_ARGUMENT && occursin("the pieces 0 to 1", error.message)
            @test thrown(() -> call(-1)) isa ArgumentError
        end
        other = create_model(context)
        only = create_group(other, "g", [Param("w", 4)])
        visits(piece) = [(only, FSDP.FORWARD, piece), only => FSDP.BACKWARD]
        @test thrown(() -> FSDP.set_schedule(other, FSDP.SCHEDULE_VISITS, visits(-1))) isa ArgumentError
        FSDP.set_schedule(other, FSDP.SCHEDULE_VISITS, visits(1))
        @test thrown(() -> seal(other)).status == FSDP.INVALID_ARGUMENT
        close(other)
        close(model)
    end
end

@testset "pieces of quantized parameters have planes" begin
    run_local(2) do context
        model = create_model(context)
        quantized = Param("q", 2, 1; quantization = FSDP.QUANTIZE_FP8_BLOCK, piece = 1)
        group = create_group(model, "g", [Param("w", 4), quantized])
        seal(model)
        load_param(group, "q", Float32[448, 1])
        publish_weights(model)
        unshard(group; piece = 1) do weights
            @test weights["q"] === nothing && FSDP.array(FSDP.plane(group, "q"))[1] == 0x7e
            @test FSDP.tensors(group; piece = 1)[1].address == C_NULL
        end
        close(model)
    end
end

@testset "pieces train the bits of whole groups" begin
    function trained(pieces, kind; visits = groups -> nothing)
        return run_local(2) do context
            model, groups = pieces_model(context, kind; visits = visits)
            foreach(_ -> train_pieces(model, groups, pieces), 1:4)
            found = [read_param(group, p) for group in groups for p in 1:3]
            close(model)
            found
        end
    end
    whole = trained((nothing,), FSDP.SCHEDULE_SEQUENTIAL)
    @test whole == trained((0, 1), FSDP.SCHEDULE_VISITS; visits = visits_of_pieces)
    @test whole[1][1] != values_of(1, 1)
end

@testset "groups without weights in BACKWARD are not held there" begin
    run_local(2) do context
        model, (_, group) = pieces_model(context)
        for piece in (nothing, 0)
            error = thrown(() -> unshard(weights -> nothing, group, FSDP.BACKWARD; piece = piece))
            @test error.status == FSDP.INVALID_STATE && occursin("FSDP_BACKWARD_WEIGHTS_NONE", error.message)
        end
        unshard(group, FSDP.RECOMPUTE; piece = 1) do weights
            @test weights["b1"] == values_of(2, 2)
        end
        close(model)
    end
end
