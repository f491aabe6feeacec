# SPDX-License-Identifier: Apache-2.0

"""
    acquire_grad(group, param; flags = 0, stream, wait = true)

Return the full gradient as an Array to write into until `reduce_grad`, and whether to add to it instead of overwriting
it. With `wait = false` the call throws an error of status `BUSY` and changes nothing if peers have yet to read a buffer
that it needs. The same holds for `acquire_grads` and `put_grad`.
"""
function acquire_grad(group::Group, param; flags = 0, stream = C_NULL, wait = true)
    found, accumulate = blank(fsdp_tensor), Ref{Int32}(0)
    index, flags = param_index(group, param), UInt32(flags) | waiting(wait)
    @call group.state fsdp_acquire_grad(group.number, index, flags, Ptr{Cvoid}(stream), found, accumulate)
    return grad_view(group, Int(index) + 1, found.memory[]), accumulate[] != 0
end

"""
    acquire_grads(group; stream, wait = true)

Return the full gradients of all trained parameters, by name, to add to.
"""
function acquire_grads(group::Group; stream = C_NULL, wait = true)
    found, flags = Vector{fsdp_tensor}(undef, length(group.params)), FSDP_GRAD_ZEROED | waiting(wait)
    @call group.state fsdp_acquire_grads(group.number, flags, Ptr{Cvoid}(stream), found, length(found),
        sizeof(fsdp_tensor), C_NULL)
    return Dict{String,Any}(group.params[index].name => grad_view(group, index, one)
                            for (index, one) in enumerate(found) if one.data != C_NULL)
end

waiting(wait) = wait ? UInt32(0) : UInt32(FSDP_GRAD_NO_WAIT)

"The array of the last time, if it lies there again."
function grad_view(group, index, found::fsdp_tensor)
    kept = group.grads[index]
    kept isa Array && Ptr{Cvoid}(pointer(kept)) == found.data && return kept
    return group.grads[index] = view_of(Tensor(found, group.handle))
end

"""
    put_grad(group, param, grad; stream, wait = true)

Hand in a full gradient; `nothing` means "no gradient".
"""
function put_grad(group::Group, param, grad::AbstractArray; stream = C_NULL, wait = true)
    data, dtype = full(group, param, grad)
    stream = Ptr{Cvoid}(stream)
    GC.@preserve data @call group.state fsdp_put_grad(group.number, param_index(group, param), address(data), Int32(dtype),
        length(data), waiting(wait), stream)
end
put_grad(group::Group, param, ::Nothing; stream = C_NULL, wait = true) =
    @call group.state fsdp_put_grad(group.number, param_index(group, param), C_NULL, FSDP_FLOAT32, 0, waiting(wait),
        Ptr{Cvoid}(stream))

"""
    complete_grad(group, param; stream)

Declare this gradient complete: nothing more is written into it in this contribution. With `max_pending_bytes`, its part
of the group is reduced once all gradients of the part are complete.
"""
complete_grad(group::Group, param; stream = C_NULL) =
    @call group.state fsdp_complete_grad(group.number, param_index(group, param), 0, Ptr{Cvoid}(stream))

"""
    reduce_grad(group; is_last = true, stream)

End this contribution: its gradients are complete. `is_last` marks the last contribution of the step.
"""
reduce_grad(group::Group; is_last = true, stream = C_NULL) =
    @call group.state fsdp_reduce_grad(group.number, is_last ? FSDP_LAST : UInt32(0), Ptr{Cvoid}(stream))
