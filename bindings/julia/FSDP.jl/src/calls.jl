# SPDX-License-Identifier: Apache-2.0
# What happens around a call of the library: Ctrl-C and garbage collection while it waits, log lines, errors, handles of
# objects that were collected.

"What a thread does in the library. Hooks run on the thread that called, so they find it by the thread's number."
mutable struct Caller
    context::Ptr{fsdp_context}  # whose call it is in; C_NULL: in none
    is_interrupted::Bool
    lines::Vector{Tuple{Int32,String}}
end

const CALLERS = Ref(Caller[])
const INTERRUPTED_HOOK = Ref(C_NULL)
const LOG_HOOK = Ref(C_NULL)

thread_count() = isdefined(Threads, :maxthreadid) ? Threads.maxthreadid() : Threads.nthreads()

# Julia may take up threads that C has made: they have numbers beyond those of the beginning.
function grow_callers()
    lock(STATES_LOCK) do
        more = [Caller(C_NULL, false, []) for _ in length(CALLERS[])+1:thread_count()]
        isempty(more) || (CALLERS[] = [CALLERS[]; more])
    end
end

"""
Runs on the thread that waits, about every 20 ms. Here garbage can be collected for other threads, and here Ctrl-C
arrives, which is deferred in the rest of the call: nothing may be thrown through C. It must not yield either.
"""
function interrupted_hook(_::Ptr{Cvoid})::Int32
    caller = CALLERS[][Threads.threadid()]
    try
        Base.sigatomic_end()
        GC.safepoint()
        Base.sigatomic_begin()
    catch  # an InterruptException; the deferral is that of the beginning again
        caller.is_interrupted = true
    end
    return caller.is_interrupted
end

"Julia's loggers may yield, which must not be while C is below: lines are told when the call has returned."
function log_hook(_::Ptr{Cvoid}, level::Int32, message::Ptr{UInt8})::Cvoid
    push!(CALLERS[][Threads.threadid()].lines, (level, unsafe_string(message)))
    return nothing
end

# Below its hooks: a @cfunction of what is not there yet cannot be precompiled.
function begin_callers()
    CALLERS[] = [Caller(C_NULL, false, []) for _ in 1:thread_count()]
    INTERRUPTED_HOOK[] = @cfunction(interrupted_hook, Int32, (Ptr{Cvoid},))
    LOG_HOOK[] = @cfunction(log_hook, Cvoid, (Ptr{Cvoid}, Int32, Ptr{UInt8}))
end

const LOGGED = Dict(FSDP_LOG_ERROR => Logging.Error, FSDP_LOG_WARNING => Logging.Warn, FSDP_LOG_INFO => Logging.Info,
    FSDP_LOG_DEBUG => Logging.Debug)

tell((level, message)::Tuple{Int32,String}) =
    @logmsg get(LOGGED, level, Logging.Debug) message _module = FSDP _group = :libfsdp _file = nothing _line = nothing

@inline function enter(number)
    caller = @inbounds CALLERS[][Threads.threadid()]
    Base.sigatomic_begin()
    caller.context = number
    return caller
end

"Ctrl-C that came meanwhile is thrown here."
@inline function leave(caller, state, status)
    if status == FSDP_OK && !caller.is_interrupted && isempty(caller.lines) && state.unowned[] <= 0
        caller.context = C_NULL
        Base.sigatomic_end()
    else
        leave_with(caller, state, status)
    end
    return nothing
end

@noinline function leave_with(caller, state, status)
    caller.context = C_NULL
    error = status == FSDP_OK ? nothing : last_error(status)
    is_interrupted, lines = caller.is_interrupted, caller.lines
    caller.is_interrupted, caller.lines = false, []
    Base.sigatomic_end()
    foreach(tell, lines)
    state === nothing || state.unowned[] > 0 && destroy_unowned(state)
    is_interrupted && throw(InterruptException())
    error === nothing || throw(error)
    return nothing
end

"""
    @call state fsdp_name(arguments...)

The call; throws what its status stands for, and InterruptException after Ctrl-C.
"""
macro call(state, call)
    return quote
        local state = $(esc(state))
        local caller = enter(state.number)
        local status = $(esc(call))
        leave(caller, state, status)
    end
end

"`f(reference)` creates a handle: an object's, as soon as there is one, so that Ctrl-C loses none."
function create(f, state::State, destroy, ::Type{T}) where {T}
    number, handle = Ref{Ptr{T}}(C_NULL), nothing
    try  # with enter inside: at the end of a try block Julia defers Ctrl-C as at its beginning
        caller = enter(state.number)
        status = f(number)
        handle = status == FSDP_OK ? add_handle(state, number[], destroy) : nothing
        leave(caller, state, status)
    catch
        handle === nothing || release(handle)
        rethrow()
    end
    return handle
end

"The text that `f(buffer, size_bytes)` writes."
function read_text(f)
    size = Ref{UInt64}(0)
    check(f(C_NULL, size))
    while true
        buffer = Vector{UInt8}(undef, size[])
        status = f(buffer, size)
        status == FSDP_INVALID_ARGUMENT && size[] > length(buffer) && continue
        check(status)
        return GC.@preserve buffer unsafe_string(pointer(buffer))
    end
end

"For calls that any thread may make at any time: they run no hook."
check(status) = status == FSDP_OK ? nothing : throw(last_error(status))
