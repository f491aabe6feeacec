# SPDX-License-Identifier: Apache-2.0

"""
The ordered set of groups that train together, made by `create_model`. Declare groups, `seal`, load parameters,
`publish_weights`; then train.
"""
mutable struct Model <: Owner
    number::Ptr{fsdp_model}
    state::State
    handle::Handle{State}
    context::Context
    groups::Vector{Group}
    has_fixed_addresses::Bool  # of gathered weights
end

"""
    create_model(context; mesh, options...)
    create_model(f, context; mesh, options...)

Keywords are the fields of `fsdp_model_options`. With a do-block the model is closed at its end.
"""
function create_model(context::Context; mesh = nothing, fields...)
    wanted = options(fsdp_model_options, fields)
    setfield(wanted, :mesh, number_or_null(mesh))
    handle = create(context.state, fsdp_destroy_model, fsdp_model) do number
        fsdp_create_model(context.number, wanted, number)
    end
    return own(Model(handle.number, context.state, handle, context, [], true))
end
create_model(f, context::Context; fields...) = closing(f, create_model(context; fields...))

Base.show(io::IO, model::Model) = print(io, "Model(", model.groups, ")")

"""
    close(model)

Give the handle back. The memory is unmapped with the last array over it, for example when an array of an earlier
`unshard` is collected. This call tries to collect such arrays.
"""
function Base.close(model::Model)
    is_closed(model) && return nothing
    foreach(forget, model.groups)
    invoke(close, Tuple{Owner}, model)
    # A full collection takes some 50 ms and stops all other ranks of the process, so young objects are collected first.
    for whole in (false, true)
        model.handle.owners[] > 0 || break
        GC.gc(whole)
        destroy_unowned(model.state)
    end
    return nothing
end

"The model is closed: calls are refused from here on; arrays that the program keeps stay readable."
function forget(group::Group)
    group.number = C_NULL
    group.views .= nothing
    empty!(group.piece_views)
    group.grads .= nothing
end

"""
    create_group(model, name, params; mesh, options...)

Declare a group of `Param`s. `mesh` has the ranks that share the group, by default all ranks of the model. Other
keywords are the fields of `fsdp_group_options`.
"""
function create_group(model::Model, name, params; mesh = nothing, fields...)
    params = collect(Param, params)
    made = declared.(params)
    array = fsdp_param[one.memory[] for one in made]
    number, wanted = Ref{Ptr{fsdp_group}}(C_NULL), options(fsdp_group_options, fields)
    setfield(wanted, :mesh, number_or_null(mesh))
    GC.@preserve made @call model.state fsdp_create_group(model.number, name, array, length(array), sizeof(fsdp_param),
        wanted, number)
    indices = Dict(param.name => index for (index, param) in enumerate(params))
    views = Union{Nothing,Vector{Any}}[nothing for _ in instances(Phase)]
    group = Group(number[], model.state, model.handle, model, name, params, indices, views, Dict(),
        Any[nothing for _ in params])
    push!(model.groups, group)
    return group
end

"""
    set_schedule(model, kind, visits; held_groups)

`SCHEDULE_SEQUENTIAL`, `SCHEDULE_INTERLEAVED`, `SCHEDULE_VISITS` with `visits`: `group => phase` of each, or
`(group, phase, piece)` of a piece (0, 1, ...) alone; or `SCHEDULE_ANY`, in which up to `held_groups` (0: 4) groups of
copied weights are held at once, in any order.
"""
function set_schedule(model::Model, kind::ScheduleKind, visits = nothing; held_groups = 0)
    wanted = blank(fsdp_schedule_options)
    setfield(wanted, :held_groups, held_groups)
    if visits !== nothing
        list = [declared_visit(visit...) for visit in visits]
        setfield(wanted, :visits, list)
        setfield(wanted, :visit_count, length(list))
        setfield(wanted, :visit_stride, sizeof(fsdp_visit))
    end
    @call model.state fsdp_set_schedule(model.number, Int32(kind), wanted)
    model.has_fixed_addresses = kind != SCHEDULE_ANY
    return nothing
end

"The header counts the pieces of visits from 1; 0 is the whole group."
declared_visit(group, phase, piece = nothing) =
    fsdp_visit(group_info(group).group_index, Int32(phase), piece === nothing ? 0 : piece_number(piece) + 1)

"Add a named state for the caller's own optimizer; the model must have `OPTIMIZER_CALLER`."
add_optimizer_state(model::Model, name, T::DataType = Float32) =
    @call model.state fsdp_add_optimizer_state(model.number, name, Int32(dtype_of(T)))

"Memory of the caller's for a role: an array that starts at a multiple of 4096 bytes, and is kept as long as the model."
function set_arena(model::Model, role::Role, memory)
    @call model.state fsdp_set_arena(model.number, Int32(role), address(memory), sizeof(memory))
    push!(model.state.kept.kept, memory)
    return nothing
end

"What `seal` would refuse, a violation a line; \"\" if nothing."
check_model(model::Model) = read_text((text, size) -> fsdp_check_model(model.number, text, size))

"Fix the layout, allocate all memory, compare all ranks. Afterwards the update window is open."
seal(model::Model) = @call model.state fsdp_seal_model(model.number)

group_of(model, number) = model.groups[findfirst(group -> group.number == number, model.groups)]

"The group of that name, or of that place in the order of creation, from 1."
function find_group(model::Model, name::AbstractString)
    number = Ref{Ptr{fsdp_group}}(C_NULL)
    check(fsdp_find_group(model.number, name, number))
    return group_of(model, number[])
end
function find_group(model::Model, place::Integer)
    number = Ref{Ptr{fsdp_group}}(C_NULL)
    check(fsdp_get_group(model.number, (place - 1) % UInt64, number))
    return group_of(model, number[])
end

"How many groups were created."
function group_count(model::Model)
    count = Ref{UInt64}(0)
    check(fsdp_get_group_count(model.number, count))
    return Int(count[])
end

"The group and number in it, from 1, of the parameter of that name."
function find_param(model::Model, name)
    number, index = Ref{Ptr{fsdp_group}}(C_NULL), Ref{UInt64}(0)
    check(fsdp_find_param(model.number, name, number, index))
    return group_of(model, number[]), Int(index[]) + 1
end

"What a sealed model consists of: fields of `fsdp_model_info`."
function model_info(model::Model)
    found = blank(fsdp_model_info)
    check(fsdp_get_model_info(model.number, found))
    return told(found)
end

"This rank's counters: fields of `fsdp_stats`."
function stats(model::Model)
    found = blank(fsdp_stats)
    check(fsdp_get_stats(model.number, found))
    return told(found)
end

"The layout of a sealed model, as JSON."
describe_model(model::Model) = read_text((text, size) -> fsdp_describe_model(model.number, text, size))

"The planned bytes of a role on a rank, this one's if none is given."
function role_bytes(model::Model, role::Role = ROLE_ALL, rank_of = rank(model.context))
    bytes = Ref{UInt64}(0)
    check(fsdp_get_role_bytes(model.number, Int32(role), rank_of, bytes))
    return Int(bytes[])
end

"The bytes of a role that this rank has allocated."
function allocated_bytes(model::Model, role::Role = ROLE_ALL)
    bytes = Ref{UInt64}(0)
    check(fsdp_get_allocated_bytes(model.number, Int32(role), bytes))
    return Int(bytes[])
end
