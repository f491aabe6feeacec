# SPDX-License-Identifier: Apache-2.0

"""
    local_contexts(world_size; options...)

A context for each of `world_size` threads that act as ranks of this process. `run_local` also runs them.
"""
function local_contexts(world_size; fields...)
    wanted = context_options(fields)
    numbers = fill(Ptr{fsdp_context}(C_NULL), world_size)
    contexts = Context[]
    try
        caller = enter(C_NULL)
        status = fsdp_create_local_contexts(world_size, wanted, numbers)
        append!(contexts, [own(Context(n, new_state(n, wanted)...)) for n in numbers if n != C_NULL])
        leave_with(caller, nothing, status)
    catch
        foreach(close_at_once, contexts)
        rethrow()
    end
    return contexts
end

"""
    run_local(f, world_size; options...)

Call `f(context)` on a separate thread for each rank; rank 0 uses the caller's thread. Returns the results in the order
of the ranks. Julia
must have been started with as many threads (`julia -t 2`). An exception of a rank aborts its context, so that the other
ranks end. When all ranks have ended, the exception is thrown here. Ctrl-C reaches the rank on Julia's first thread, and
ends all of them.
"""
function run_local(f, world_size::Integer; fields...)
    threads = filter(!=(Threads.threadid()), rank_threads())
    length(threads) + 1 >= world_size ||
        throw(ArgumentError("$world_size ranks need as many threads: start julia -t $world_size, or set JULIA_NUM_THREADS"))
    contexts = local_contexts(world_size; fields...)
    # Idle threads serve input and output in such a region: a rank may print while the first thread waits in a call.
    ccall(:jl_enter_threaded_region, Cvoid, ())
    tasks = [start_on(() -> run_rank(f, contexts[r]), threads[r-1]) for r in 2:world_size]
    results, errors = Any[], Any[]
    try
        collect_result(() -> run_rank(f, contexts[1]), results, errors)
        foreach(task -> collect_result(() -> fetch_rank(task, contexts), results, errors), tasks)
    finally
        ccall(:jl_exit_threaded_region, Cvoid, ())
    end
    isempty(errors) || throw(first_cause(errors))
    return [result for result in results]
end

rank_threads() = isdefined(Threads, :threadpooltids) ? Threads.threadpooltids(:default) : 1:Threads.nthreads()

"A task on that thread and no other, as those of `Threads.@threads` are."
function start_on(f, thread)
    task = Task(f)
    task.sticky = true
    ccall(:jl_set_task_tid, Cint, (Any, Cint), task, thread - 1)
    return schedule(task)
end

function collect_result(f, results, errors)
    try
        push!(results, f())
    catch error
        push!(errors, error)
    end
end

"The rank's result. Ctrl-C meanwhile aborts all ranks, and is told when they have ended."
function fetch_rank(task, contexts)
    interrupted = nothing
    while !istaskdone(task)
        try
            wait(task)
        catch error
            error isa InterruptException || break
            interrupted = error
            foreach(abort_quietly, contexts)
        end
    end
    interrupted === nothing || throw(interrupted)
    istaskfailed(task) && throw(task.exception)
    return task.result
end

abort_quietly(context) = is_closed(context) || fsdp_abort_context(context.number, "InterruptException")

"Errors that only tell of a peer came of what the peer has thrown."
function first_cause(errors)
    at = findfirst(error -> !(error isa Error && error.status in (PEER_FAILED, ABORTED)), errors)
    return errors[at === nothing ? 1 : at]
end
