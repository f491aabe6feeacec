# SPDX-License-Identifier: Apache-2.0

"""
    Context(; options...)
    Context(f; options...)

This process's rank of the job, from the launcher's variables or from `world_size`, `rank` and `rendezvous`. Keywords
are
the fields of `fsdp_context_options`.

With a do-block the context is closed at its end, or, after an exception, aborted with the exception as the reason, so
that other ranks end at once. Log lines are told through Julia's logging when the call has returned. Ctrl-C ends every
wait with `InterruptException`; the context has then failed.
"""
mutable struct Context <: Owner
    number::Ptr{fsdp_context}
    state::State
    handle::Handle{State}
end

function Context(; fields...)
    wanted = context_options(fields)
    return new_context(number -> fsdp_create_context(wanted, number), wanted)
end
Context(f; fields...) = run_rank(f, Context(; fields...))

"""
    plan_context(world_size, rank; options...)

A context that only plans: models are declared and sealed, but nothing is allocated and no peer is contacted.
"""
function plan_context(world_size, rank = 0; fields...)
    wanted = context_options(fields)
    return new_context(number -> fsdp_create_plan_context(world_size, rank, wanted, number), wanted)
end

const OWN_FIELDS = (:interrupted, :interrupted_data, :log, :log_data)

function context_options(fields)
    for name in keys(fields)
        name in OWN_FIELDS && throw(ArgumentError("$name is set here: Ctrl-C and Julia's logging are what it serves"))
    end
    grow_callers()
    destroy_left()
    wanted = options(fsdp_context_options, fields)
    setfield(wanted, :interrupted, INTERRUPTED_HOOK[])
    return setfield(wanted, :log, LOG_HOOK[])
end

function new_context(f, wanted)
    number, context = Ref{Ptr{fsdp_context}}(C_NULL), nothing
    try
        caller = enter(C_NULL)
        status = f(number)
        context = status == FSDP_OK ? own(Context(number[], new_state(number[], wanted)...)) : nothing
        leave_with(caller, nothing, status)
    catch
        context === nothing || close_at_once(context)
        rethrow()
    end
    return context
end

"The function with the context, which is closed or aborted then."
function run_rank(f, context::Context)
    result = try
        f(context)
    catch error
        abort(context, sprint(showerror, error))
        close_at_once(context)
        rethrow()
    end
    close(context)
    return result
end

"""
    close(context)

Leave the job in good order, which waits for all ranks, and give the handle back, also if that fails.
"""
function Base.close(context::Context)
    is_closed(context) && return nothing
    try
        @call context.state fsdp_close_context(context.number)
    finally
        close_at_once(context)
    end
end

"""
    close_at_once(context)

Give the handle back without waiting for peers. Peers that wait for this rank take it for failed.
"""
close_at_once(context::Context) = invoke(close, Tuple{Owner}, context)

"""
    abort(context, reason)

Fail the context on this rank and for its peers. Any thread may call this, also while another call runs.
"""
abort(context::Context, reason = nothing) =
    check(fsdp_abort_context(context.number, reason === nothing ? C_NULL : replace(string(reason), '\0' => ' ')))

function number_of(f, context)
    number = Ref{UInt32}(0)
    check(f(context.number, number))
    return Int(number[])
end

"This context's rank, from 0."
rank(context::Context) = number_of(fsdp_get_rank, context)
"The number of ranks of the job."
world_size(context::Context) = number_of(fsdp_get_world_size, context)

"The Error that failed the context for good, or `nothing`."
function context_error(context::Context)
    found = blank(fsdp_error)
    check(fsdp_get_context_error(context.number, found))
    return error_of(found)
end

"The ranks that the error blames, ascending."
function failed_ranks(context::Context)
    count = Ref{UInt64}(0)
    check(fsdp_get_failed_ranks(context.number, C_NULL, count))
    ranks = Vector{UInt32}(undef, count[])
    check(fsdp_get_failed_ranks(context.number, ranks, count))
    return Int.(ranks)
end

"""
    all_reduce_values(context, values, op; mesh)

Reduce a few doubles over the ranks of a mesh, or of the job: `VALUE_SUM`, `VALUE_MIN`, `VALUE_MAX` or `VALUE_MEAN` of a
number, or of an array element by element.
"""
function all_reduce_values(context::Context, values::AbstractArray, op::ValueOp = VALUE_SUM; mesh = nothing)
    reduced = Array{Float64}(values)
    @call context.state fsdp_all_reduce_values(context.number, number_or_null(mesh), reduced, length(reduced), Int32(op))
    return reduced
end
all_reduce_values(context::Context, value::Real, op::ValueOp = VALUE_SUM; mesh = nothing) =
    all_reduce_values(context, [value], op; mesh = mesh)[1]

# Without a mesh the number is C_NULL, which means all ranks; so a closed mesh is refused here.
number_or_null(::Nothing) = C_NULL
number_or_null(mesh) = is_closed(mesh) ? throw(ArgumentError("the mesh is closed")) : mesh.number

"Wait until all that the stream was given is done; with a `timeout_ms` of the caller's own, if that is not 0."
wait_stream(context::Context, stream = C_NULL; timeout_ms = 0) =
    @call context.state fsdp_wait_stream(context.number, Ptr{Cvoid}(stream), timeout_ms)

"Ranks as replicate x shard, made by `create_mesh`. Models that were made from it keep what they need."
mutable struct Mesh <: Owner
    number::Ptr{fsdp_mesh}
    handle::Handle{State}
    context::Context
end

"""
    create_mesh(context; ranks, replicate_size, shard_size, reduction_block_size)

`ranks` are the ranks of the mesh in its order; without them the mesh has all ranks of the job.
"""
function create_mesh(context::Context; ranks = nothing, fields...)
    wanted = options(fsdp_mesh_options, fields)
    ranks === nothing || setfield(setfield(wanted, :ranks, UInt32.(ranks)), :rank_count, length(ranks))
    handle = create(context.state, fsdp_destroy_mesh, fsdp_mesh) do number
        fsdp_create_mesh(context.number, wanted, number)
    end
    return own(Mesh(handle.number, handle, context))
end
create_mesh(f, context::Context; fields...) = closing(f, create_mesh(context; fields...))

"""
    span(f, context, name)

A span in the timeline around a do-block.
"""
function span(f, context::Context, name)
    @call context.state fsdp_begin_span(context.number, name)
    try
        return f()
    finally
        fsdp_end_span(context.number)
    end
end

"This rank's timeline, as a file of the Trace Event Format."
write_trace(context::Context, path) = check(fsdp_write_trace(context.number, path))
"This rank's flight record: its last calls and what it waits for."
write_flight_record(context::Context, path) = check(fsdp_write_flight_record(context.number, path))

"The version of the library."
library_version() = VersionNumber(unsafe_string(fsdp_get_version()))
"What the library was built with, as lines of `key: value`."
describe_build() = read_text(fsdp_describe_build)
