# SPDX-License-Identifier: Apache-2.0

"""
A hold on a group, from `unshard` to `reshard`: `weights["name"]`, or `weights[number]`, is an Array over the full compute
weights, reversed to Julia's order of dims. It is for reading while the hold is there; `weights["w"]::Matrix{Float32}`
tells the compiler its type.
"""
mutable struct Weights
    group::Group
    phase::Phase
    stream::Ptr{Cvoid}
    views::Vector{Any}
    is_held::Bool
end

"""
    unshard(group, phase = FORWARD; stream)
    unshard(f, group, phase = FORWARD; stream)

Make the group's full compute weights readable: `Weights`, which `reshard` takes, as the end of a do-block does.
"""
function unshard(group::Group, phase::Phase = FORWARD; stream = C_NULL)
    stream = Ptr{Cvoid}(stream)
    @call group.state fsdp_unshard(group.number, Int32(phase), UInt32(0), stream)
    views = group.views[Int(phase)]
    return Weights(group, phase, stream, views === nothing ? find_views(group, phase) : views, true)
end

function unshard(f, group::Group, phase::Phase = FORWARD; stream = C_NULL)
    weights = unshard(group, phase; stream = stream)
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
    fsdp_reshard(weights.group.number, Int32(weights.phase), 0, weights.stream)
end

"""
    reshard(weights; stream)

Return the hold. (`reshard(group, phase)` returns one of that phase.)
"""
function reshard(weights::Weights; stream = weights.stream)
    weights.is_held = false
    reshard(weights.group, weights.phase; stream = stream)
end
function reshard(group::Group, phase::Phase; stream = C_NULL)
    stream = Ptr{Cvoid}(stream)
    @call group.state fsdp_reshard(group.number, Int32(phase), UInt32(0), stream)
end

"Show the true weights of a group again after a write through views of them."
restore_view(group::Group) = @call group.state fsdp_restore_view(group.number)

function Base.getindex(weights::Weights, param)
    weights.is_held || throw(misuse(INVALID_STATE, "the hold on group $(weights.group.name) was returned: unshard it"))
    return weights.views[index_of(weights.group, param)]
end
Base.keys(weights::Weights) = [param.name for param in weights.group.params]
Base.length(weights::Weights) = length(weights.views)
Base.show(io::IO, weights::Weights) = print(io, "Weights(", weights.group, ", ", weights.phase, ")")

"Views of all parameters, made once for each phase where their addresses are fixed: with `SCHEDULE_ANY` each hold has its own."
@noinline function find_views(group, phase)
    views = Any[tensor.address == C_NULL ? nothing : view_of(tensor) for tensor in tensors(group, phase)]
    group.model.has_fixed_addresses && (group.views[Int(phase)] = views)
    return views
end

"""
    tensors(group, phase = FORWARD)

A `Tensor` for each parameter, while the group is unsharded; of a quantized one its address is `C_NULL`.
"""
function tensors(group::Group, phase::Phase = FORWARD)
    found = Vector{fsdp_tensor}(undef, length(group.params))
    @call group.state fsdp_get_params(group.number, Int32(phase), found, length(found), sizeof(fsdp_tensor))
    return [Tensor(one, group.handle) for one in found]
end

"That of one parameter."
function tensor(group::Group, param, phase::Phase = FORWARD)
    found = blank(fsdp_tensor)
    @call group.state fsdp_get_param(group.number, param_index(group, param), Int32(phase), found)
    return Tensor(found.memory[], group.handle)
end

"""
    plane(group, param, which = PLANE_ROW, phase = FORWARD)

The `Tensor` of a quantized parameter's codes, as their bits, or with `PLANE_ROW_SCALE` of their scales; of MXFP8 parameters
there are COLUMN planes, too, and a phase has one of the two.
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
