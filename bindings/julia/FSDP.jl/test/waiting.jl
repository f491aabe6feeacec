# SPDX-License-Identifier: Apache-2.0

@testset "garbage collection is not held up by a wait" begin
    took = run_local(2) do context
        model, group = small_model(context)
        all_reduce_values(context, 0.0)
        if rank(context) == 0
            begin_update(model)  # waits for rank 1
            return 0.0
        end
        sleep_until = time() + 0.3
        while time() < sleep_until
        end
        seconds = minimum(@elapsed(GC.gc()) for _ in 1:5)  # others may have the processor in some of them
        begin_update(model)
        seconds
    end
    @test 0 < maximum(took) < 60  # one that waited for the call would never return: the call waits for this rank
end

# A process that says "waits", and then how long it took from the signal to the exception.
function interrupted(program)
    head = "using FSDP; Base.exit_on_sigint(false); include($(repr(joinpath(@__DIR__, "helper.jl"))));"
    process = open(`$(Base.julia_cmd()) --startup-file=no -t 2 -e $(head * program)`, "r")
    @test readline(process) == "waits"
    sleep(0.5)
    began = time()
    kill(process, Base.SIGINT)
    line = readline(process)
    took = time() - began
    wait(process)
    return line, took
end

@testset "Ctrl-C ends a wait" begin
    line, took = interrupted("""
        println("waits")
        try
            Context(; world_size = 2, rank = 0, rendezvous = "julia-$(getpid())")
        catch error
            println(typeof(error))
        end
    """)
    @test line == "InterruptException" && took < 10
    line, took = interrupted("""
        contexts = FSDP.local_contexts(2)
        println("waits")
        try
            all_reduce_values(contexts[1], 1.0)
        catch error
            println(typeof(error), " ", FSDP.context_error(contexts[1]).status)
        end
        foreach(FSDP.close_at_once, contexts)
    """)
    @test line == "InterruptException INTERRUPTED" && took < 10
end
