# SPDX-License-Identifier: Apache-2.0

"""
A hold on a group, or on one of its pieces, from `unshard` to `reshard`: `weights["name"]`, or `weights[number]`, is an
Array over the full compute weights, reversed to Julia's order of dims. Read it while the hold lasts;
`weights["w"]::Matrix{Float32}` tells the compiler its type. The weights of a piece have its parameters.
"""
mutable struct Weights
    group::Group
    phase::Phase
    piece::Union{Nothing,Int}
    stream::Ptr{Cvoid}
    views::Vector{Any}  # of all parameters; where they are of a piece, `nothing` for those of others
    is_held::Bool
end

"""
    unshard(group, phase = FORWARD; piece, stream)
    unshard(f, group, phase = FORWARD; piece, stream)

Make the group's full compute weights readable: `Weights`, which `reshard` takes, as the end of a do-block does. With
`piece` (0, 1, ...) only this piece is gathered and held.
"""
function unshard(group::Group, phase::Phase = FORWARD; piece = nothing, stream = C_NULL)
    stream = Ptr{Cvoid}(stream)
    piece === nothing || return unshard_piece(group, piece_number(piece), phase, stream)
    @call group.state fsdp_unshard(group.number, Int32(phase), UInt32(0), stream)
    views = group.views[Int(phase)]
    return Weights(group, phase, nothing, stream, views === nothing ? find_views(group, phase) : views, true)
end

function unshard_piece(group, piece, phase, stream)
    @call group.state fsdp_unshard_piece(group.number, UInt32(piece), Int32(phase), UInt32(0), stream)
    views = get(() -> find_views(group, phase, piece), group.piece_views, (piece, Int(phase)))
    return Weights(group, phase, piece, stream, views, true)
end

function unshard(f, group::Group, phase::Phase = FORWARD; piece = nothing, stream = C_NULL)
    weights = unshard(group, phase; piece = piece, stream = stream)
    result = try
        f(weights)
    catch
        give_up(weights)
        rethrow()
    end
    weights.is_held && reshard(weights)
    return result
end

"After an exception, which is told instead of what this call may say: the step was discarded, perhaps."
function give_up(weights)
    weights.is_held = false
    group, phase, piece = weights.group.number, Int32(weights.phase), weights.piece
    piece === nothing ? fsdp_reshard(group, phase, 0, weights.stream) :
    fsdp_reshard_piece(group, UInt32(piece), phase, 0, weights.stream)
end

"""
    reshard(weights; stream)

Return the hold. (`reshard(group, phase; piece)` returns a hold of that phase.)
"""
function reshard(weights::Weights; stream = weights.stream)
    weights.is_held = false
    reshard(weights.group, weights.phase; piece = weights.piece, stream = stream)
end
function reshard(group::Group, phase::Phase; piece = nothing, stream = C_NULL)
    stream = Ptr{Cvoid}(stream)
    piece === nothing && return @call group.state fsdp_reshard(group.number, Int32(phase), UInt32(0), stream)
    @call group.state fsdp_reshard_piece(group.number, UInt32(piece_number(piece)), Int32(phase), UInt32(0), stream)
end

"The number of a piece, from 0, as the header has room for it."
function piece_number(piece::Integer)
    0 <= piece < typemax(UInt32) || throw(ArgumentError("piece $piece: pieces are numbered from 0"))
    return Int(piece)
end

"Show the true weights of a group again after a write through views of them."
restore_view(group::Group) = @call group.state fsdp_restore_view(group.number)

function Base.getindex(weights::Weights, param)
    group = weights.group
    weights.is_held || throw(misuse(INVALID_STATE, "the hold on group $(group.name) was returned: unshard it"))
    index = index_of(group, param)
    weights.piece === nothing || require_piece(group, index, weights.piece)
    return weights.views[index]
end

function require_piece(group, index, piece)
    own = piece_of(group.params[index])
    own == piece && return nothing
    what = "$(group.params[index].name) is in piece $own of group $(group.name)"
    throw(misuse(INVALID_STATE, "$what, and these weights are of piece $piece: unshard(group; piece = $own)"))
end

Base.keys(weights::Weights) = [param.name for param in weights.group.params if has_param(weights.piece, param)]
Base.length(weights::Weights) = count(param -> has_param(weights.piece, param), weights.group.params)
function Base.show(io::IO, weights::Weights)
    print(io, "Weights(", weights.group, ", ", weights.phase)
    weights.piece === nothing || print(io, ", piece = ", weights.piece)
    print(io, ")")
end
has_param(piece, param) = piece === nothing || piece_of(param) == piece

"""
Views of all parameters, or of those of a piece, made once for each phase where their addresses are fixed: with
`SCHEDULE_ANY` each hold has its own.
"""
@noinline function find_views(group, phase, piece = nothing)
    views = Any[nothing for _ in group.params]
    indices = findall(param -> has_param(piece, param), group.params)
    for (index, tensor) in zip(indices, tensors(group, phase; piece = piece))
        tensor.address == C_NULL || (views[index] = view_of(tensor))
    end
    if group.model.has_fixed_addresses
        piece === nothing ? (group.views[Int(phase)] = views) : (group.piece_views[(piece, Int(phase))] = views)
    end
    return views
end

"""
    tensors(group, phase = FORWARD; piece)

A `Tensor` for each parameter of the group, or of the piece, while it is unsharded. For a quantized parameter the
address is `C_NULL`.
"""
function tensors(group::Group, phase::Phase = FORWARD; piece = nothing)
    if piece !== nothing
        own = filter(param -> piece_of(param) == piece, group.params)
        return Tensor[piece_tensor(group, param, phase) for param in own]
    end
    found = Vector{fsdp_tensor}(undef, length(group.params))
    @call group.state fsdp_get_params(group.number, Int32(phase), found, length(found), sizeof(fsdp_tensor))
    return [Tensor(one, group.handle) for one in found]
end

# Without data no device counts.
piece_tensor(group, param, phase) = is_quantized(param) ?
    Tensor(C_NULL, param.type, param.dims, DEVICE_HOST, 0, true, group.handle) : tensor(group, param.name, phase)

"That of one parameter."
function tensor(group::Group, param, phase::Phase = FORWARD)
    found = blank(fsdp_tensor)
    @call group.state fsdp_get_param(group.number, param_index(group, param), Int32(phase), found)
    return Tensor(found.memory[], group.handle)
end

"""
    plane(group, param, which = PLANE_ROW, phase = FORWARD)

The `Tensor` of a quantized parameter's codes, as bits, or with `PLANE_ROW_SCALE` of their scales. MXFP8 parameters also
have COLUMN planes; each phase has one of the two forms.
"""
function plane(group::Group, param, which::Plane = PLANE_ROW, phase::Phase = FORWARD)
    found = blank(fsdp_tensor)
    @call group.state fsdp_get_plane(group.number, param_index(group, param), Int32(phase), Int32(which), found)
    return Tensor(found.memory[], group.handle)
end

"""
    swizzle_scales(group, param, which = PLANE_ROW_SCALE, phase = FORWARD; to, stream)

The scales of an MXFP8 plane in the order in which GEMMs read them: bytes of the host, or written into `to`, an array of bytes of
the model's device.
"""
function swizzle_scales(group::Group, param, which::Plane = PLANE_ROW_SCALE, phase::Phase = FORWARD; to = nothing, stream = C_NULL)
    index, size, stream = param_index(group, param), Ref{UInt64}(0), Ptr{Cvoid}(stream)
    if to === nothing
        @call group.state fsdp_swizzle_scales(group.number, index, Int32(phase), Int32(which), C_NULL, size, stream)
        to = zeros(UInt8, size[])
    end
    size[] = sizeof(to)
    GC.@preserve to @call group.state fsdp_swizzle_scales(group.number, index, Int32(phase), Int32(which), address(to), size, stream)
    return to
end

"Start gathering a group ahead of its unshard, where the order is not that of the schedule."
prefetch(group::Group, phase::Phase = FORWARD; stream = C_NULL) =
    @call group.state fsdp_prefetch(group.number, Int32(phase), UInt32(0), Ptr{Cvoid}(stream))
