# SPDX-License-Identifier: Apache-2.0

function settle()
    for _ in 1:3
        GC.gc()
    end
    FSDP.destroy_left()
end

@noinline function leak(order)
    context = FSDP.local_contexts(1)[1]
    model, group = small_model(context)
    views = unshard(weights -> weights["w"], group, FSDP.EVAL)
    things = Dict{Symbol,Any}(:context => context, :model => model, :group => group, :views => views,
        :mesh => create_mesh(context))
    context = model = group = views = nothing
    for name in order
        delete!(things, name)
        GC.gc(false)
    end
end

@testset "leaked handles end in any order" begin
    leak((:context, :model, :group, :views, :mesh))
    settle()
    before, states = mappings(), length(FSDP.STATES)
    for order in ((:mesh, :views, :group, :model, :context), (:model, :context, :views, :mesh, :group),
                  (:group, :mesh, :context, :model, :views), (:views, :context, :group, :model, :mesh))
        leak(order)
    end
    settle()
    @test length(FSDP.STATES) <= states
    @test mappings() <= before + 2  # Julia's own heap may have grown
end

@noinline function kept_view(context)
    model, group = small_model(context)
    kept = unshard(weights -> weights["b"], group, FSDP.EVAL)
    close(model)
    return kept
end

@testset "an array keeps the memory, a finalizer only counts" begin
    context = FSDP.local_contexts(1)[1]
    kept = kept_view(context)
    close(context)
    settle()
    @test kept == [1, 2, 3, 4]
    state = FSDP.STATES[findfirst(state -> !isempty(state.handles), FSDP.STATES)]
    count = length(state.handles)
    finalize(kept)
    @test length(state.handles) == count
end

@testset "what is left ends with the process" begin
    program = """
        using FSDP
        include($(repr(joinpath(@__DIR__, "helper.jl"))))
        const kept = [small_model(context) for context in FSDP.local_contexts(1)]
        const held = unshard(kept[1][2])
        println("left")
    """
    said = read(pipeline(`$(Base.julia_cmd()) --startup-file=no -e $program`; stderr = stdout), String)
    @test said == "left\n"
end
