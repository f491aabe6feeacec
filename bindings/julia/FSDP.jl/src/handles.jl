# SPDX-License-Identifier: Apache-2.0
# Which thread destroys a handle, and when. A finalizer runs wherever Julia collects, perhaps within a call of the
# library or on another rank's thread, so it only counts. The next call on the context destroys handles whose objects
# were collected. Creating a context destroys what is left of collected contexts, and the end of the process destroys
# the rest.

"A handle of the library. Its owners are the object that has it, and the arrays over its memory."
mutable struct Handle{S}
    number::Ptr{Cvoid}
    destroy::Function
    owners::Threads.Atomic{Int}
    state::S
end

"A context's handles."
mutable struct State
    number::Ptr{fsdp_context}
    handles::Vector{Handle{State}}
    lock::Threads.SpinLock  # for the list: finalizers do not touch it
    unowned::Threads.Atomic{Int}
    kept::Any  # what the context's options point to
end

# Every context that has handles. Objects and arrays may end in any order.
const STATES = State[]
const STATES_LOCK = ReentrantLock()

function new_state(number, kept)
    state = State(number, [], Threads.SpinLock(), Threads.Atomic{Int}(0), kept)
    lock(() -> push!(STATES, state), STATES_LOCK)
    return state, add_handle(state, number, fsdp_destroy_context)
end

function add_handle(state::State, number, destroy)
    handle = Handle{State}(Ptr{Cvoid}(number), destroy, Threads.Atomic{Int}(1), state)
    lock(() -> push!(state.handles, handle), state.lock)
    return handle
end

"One owner less. All that a finalizer does: it allocates nothing, and waits for nothing."
function release(handle::Handle)
    Threads.atomic_sub!(handle.owners, 1) == 1 && Threads.atomic_add!(handle.state.unowned, 1)
    return nothing
end

"An owner more: the handle lives as long as the array."
function lend(handle::Handle, array::Array)
    Threads.atomic_add!(handle.owners, 1)
    finalizer(_ -> release(handle), memory_of(array))
    return array
end

# Since Julia 1.11 arrays that are made of an array share its memory object, not the array.
@static if VERSION >= v"1.11-"
    memory_of(array) = array.ref.mem
else
    memory_of(array) = array
end

"Destroys a context's handles that have no owner. On whichever thread: the library lets every one."
function destroy_unowned(state::State)
    handles = lock(state.lock) do
        found = filter(handle -> handle.owners[] == 0, state.handles)
        filter!(handle -> handle.owners[] != 0, state.handles)  # perhaps more by now: they are in neither
        found
    end
    Threads.atomic_sub!(state.unowned, length(handles))
    foreach(destroy, handles)
    isempty(state.handles) && lock(() -> filter!(!=(state), STATES), STATES_LOCK)
    return nothing
end

destroy(handle::Handle) = handle.destroy(handle.number)

"What is left of contexts whose objects were all collected, so that no call of theirs comes any more."
function destroy_left()
    states = lock(() -> copy(STATES), STATES_LOCK)
    foreach(state -> state.unowned[] > 0 && destroy_unowned(state), states)
end

"""
Destroys all handles at the end of the process, in the order of their creation. Handles of contexts that are in a call
now end with the process: a call on another thread, or on this one if a signal ended the process.
"""
function destroy_all()
    busy = [caller.context for caller in CALLERS[]]
    for state in copy(STATES)
        state.number in busy || foreach(destroy, state.handles)
        empty!(state.handles)
    end
    empty!(STATES)
end

"An object with a handle, which `close` gives back."
abstract type Owner end

"The object owns the handle until it is closed or collected."
function own(owner::Owner)
    finalizer(owner -> is_closed(owner) || release(owner.handle), owner)
    return owner
end

is_closed(owner::Owner) = owner.number == C_NULL

"""
    close(object)

Give the handle back. May be called again. Later calls with the object are `INVALID_HANDLE`.
"""
function Base.close(owner::Owner)
    is_closed(owner) && return nothing
    owner.number = C_NULL
    release(owner.handle)
    destroy_unowned(owner.handle.state)
    return nothing
end

"`f(object)`, which is closed then."
function closing(f, object)
    try
        return f(object)
    finally
        close(object)
    end
end
