# SPDX-License-Identifier: Apache-2.0

"""
    finish_grads(model, scale = 1.0; is_last = false, stream)

End the step's gradients, multiplied by `scale`, and open the update window. With `is_last`, on all ranks, this call
ends contributions that were reduced without it. A group without any contribution gets zeros.
"""
finish_grads(model::Model, scale = 1.0; is_last = false, stream = C_NULL) =
    @call model.state fsdp_finish_grads(model.number, scale, is_last ? FSDP_LAST : UInt32(0), Ptr{Cvoid}(stream))

"The L2 norm of all main grads; with a mesh, of all models of its ranks."
function grad_norm(model::Model; mesh = nothing, stream = C_NULL)
    norm = Ref(0.0)
    @call model.state fsdp_get_grad_norm(model.number, number_or_null(mesh), Ptr{Cvoid}(stream), norm)
    return norm[]
end

"The norm that `grad_norm`, `clip_grads` or `apply_grads` found last, before clipping."
function last_norm(model::Model)
    norm = Ref(0.0)
    @call model.state fsdp_get_last_norm(model.number, norm)
    return norm[]
end

param_names(model::Model) = [param.name for group in model.groups for param in group.params]

"The norm of each parameter's main grad, by its name."
function param_grad_norms(model::Model; stream = C_NULL)
    norms = zeros(length(param_names(model)))
    @call model.state fsdp_get_param_grad_norms(model.number, Ptr{Cvoid}(stream), norms, length(norms))
    return Dict(zip(param_names(model), norms))
end

"The norm of each parameter's main weights, by its name; NaN if it is frozen and has no numbers. At any time."
function param_weight_norms(model::Model; stream = C_NULL)
    norms = zeros(length(param_names(model)))
    @call model.state fsdp_get_param_weight_norms(model.number, Ptr{Cvoid}(stream), norms, length(norms))
    return Dict(zip(param_names(model), norms))
end

"The number of zeros in the main grads with which the step will change weights."
function count_zero_grads(model::Model; stream = C_NULL)
    found = Ref{UInt64}(0)
    @call model.state fsdp_count_zero_grads(model.number, Ptr{Cvoid}(stream), found)
    return Int(found[])
end

"Multiply this rank's main grads, alike on every rank."
scale_grads(model::Model, factor; stream = C_NULL) =
    @call model.state fsdp_scale_grads(model.number, factor, Ptr{Cvoid}(stream))

"Scale all main grads so that their norm is at most `max_norm`; gives the norm from before."
function clip_grads(model::Model, max_norm; mesh = nothing, stream = C_NULL)
    norm = Ref(0.0)
    @call model.state fsdp_clip_grads(model.number, number_or_null(mesh), max_norm, Ptr{Cvoid}(stream), norm)
    return norm[]
end

"The name of the first parameter whose gradient has Inf or NaN on any rank, or `nothing`."
function check_grads(model::Model; stream = C_NULL)
    found, name = Ref{Int32}(0), Ref{Ptr{UInt8}}(C_NULL)
    @call model.state fsdp_check_grads(model.number, Ptr{Cvoid}(stream), found, name)
    return found[] == 0 ? nothing : unsafe_string(name[])
end

"""
    step_adamw(model, lr; options...)

One step of AdamW, which publishes. Keywords are the fields of `fsdp_adamw_options`.
"""
function step_adamw(model::Model, lr; stream = C_NULL, fields...)
    wanted = options(fsdp_adamw_options, fields)
    @call model.state fsdp_step_adamw(model.number, lr, wanted, Ptr{Cvoid}(stream))
end

"""
    apply_grads(model, grads, lr; max_norm = 0, options...)

Take a whole step. `grads` has a full gradient, or `nothing`, for each parameter that was not declared frozen, group by
group. Returns the norm before clipping. Keywords are the fields of `fsdp_adamw_options`.
"""
function apply_grads(model::Model, grads, lr; max_norm = 0.0, stream = C_NULL, fields...)
    trained = [(group, index) for group in model.groups for (index, p) in enumerate(group.params) if is_trainable(p)]
    arrays = Any[at <= length(trained) && grad !== nothing ? full(trained[at]..., grad)[1] : grad
                 for (at, grad) in enumerate(grads)]
    list = [one === nothing ? fsdp_grad(C_NULL, 0, FSDP_FLOAT32, 0) :
            fsdp_grad(address(one), length(one), Int32(dtype_of(eltype(one))), 0) for one in arrays]
    wanted, norm = options(fsdp_adamw_options, fields), Ref(0.0)
    GC.@preserve arrays @call model.state fsdp_apply_grads(model.number, list, length(list), sizeof(fsdp_grad), lr,
        max_norm, wanted, Ptr{Cvoid}(stream), norm)
    return norm[]
end

"Turn main weights into compute weights and close the update window."
publish_weights(model::Model; stream = C_NULL) =
    @call model.state fsdp_publish_weights(model.number, Ptr{Cvoid}(stream))

"""
    begin_update(model; stream)
    begin_update(f, model; stream)

Open the update window outside a training step. With a do-block the weights are published at its end.
"""
begin_update(model::Model; stream = C_NULL) = @call model.state fsdp_begin_update(model.number, Ptr{Cvoid}(stream))
function begin_update(f, model::Model; stream = C_NULL)
    begin_update(model; stream = stream)
    result = f()
    publish_weights(model; stream = stream)
    return result
end

"Forget this step, from any state between two publishes: the way out after an exception in the middle of a pass."
discard_step(model::Model; stream = C_NULL) = @call model.state fsdp_discard_step(model.number, Ptr{Cvoid}(stream))

"Compare what several ranks store alike; a difference is `MISMATCH`."
check_replicas(model::Model; stream = C_NULL) =
    @call model.state fsdp_check_replicas(model.number, 0, Ptr{Cvoid}(stream))

"""
What this rank owns of one parameter: `main_weight` and `main_grad` are vectors over the library's memory, for writing
in the update window only; other fields are those of `fsdp_shard`, `param_index` from 1, offsets from 0. With
`MAIN_SPLIT16` `main_weight` is `nothing`: `read_param` and `load_param` convert. At home in a file both are `nothing`:
`foreach_shard_chunk` brings them. With `MAIN_NONE` the weights are of `BFloat16`, and `round_stochastic` writes it.
"""
struct Shard
    model::Model
    number::Int # 0: a chunk of a shard
    group::Group
    param_index::Int
    name::String
    main_weight::Any
    main_grad::Any
    element_offset::Int
    element_count::Int
    row_offset::Int
    row_count::Int
    lr_scale::Float64
    flags::UInt32
    state_count::Int
end

Base.show(io::IO, shard::Shard) = print(io, "Shard(", repr(shard.name), ", ", shard.element_count, " elements)")

"This rank's shards, in the order of declaration."
function shards(model::Model)
    count = Ref{UInt64}(0)
    check(fsdp_get_shard_count(model.number, count))
    return [shard(model, number) for number in 1:Int(count[])]
end

function shard(model, number)
    found = blank(fsdp_shard)
    check(fsdp_get_shard(model.number, number - 1, found))
    return Shard(model, number, found.memory[])
end

function Shard(model::Model, number, raw::fsdp_shard)
    of_memory(data, dtype) = data == C_NULL ? nothing : view_of(Tensor(data, element_type(dtype), (Int(raw.element_count),), device_of(model)...,
        false, model.handle))
    return Shard(model, number, group_of(model, raw.group), raw.param_index + 1, unsafe_string(raw.name),
        of_memory(raw.main_weight, raw.main_weight_dtype), of_memory(raw.main_grad, raw.main_grad_dtype),
        raw.element_offset, raw.element_count, raw.row_offset, raw.row_count, raw.lr_scale, raw.flags, raw.state_count)
end

# As in the context's options, where device_index counts from 1.
function device_of(model)
    options = model.state.kept
    device = getfield_of(options, :device)
    return something(device, DEVICE_HOST), max(Int(getfield_of(options, :device_index)) - 1, 0)
end

"""
    state(shard, name)

A vector over the elements of a named optimizer state: `"exp_avg"` and `"exp_avg_sq"` of AdamW, or the caller's own. The
elements of 8-bit states are codes (`UInt8`). Their scales, one for each 256 elements, are the states `"exp_avg.absmax"`
and `"exp_avg_sq.absmax"`. `nothing` if the state is at home in a file (`HOME_FILE`), from which `foreach_shard_chunk`
brings it.
"""
function state(shard::Shard, name)
    found = blank(fsdp_tensor)
    if shard.number == 0
        @call shard.model.state fsdp_get_shard_chunk_state(shard.model.number, name, found)
    else
        @call shard.model.state fsdp_get_shard_state(shard.model.number, shard.number - 1, name, found)
    end
    found.memory[].data == C_NULL && return nothing
    return vec(view_of(Tensor(found.memory[], shard.model.handle)))
end

"""
    foreach_shard_chunk(f, model; stream)

Call `f(chunk)` for each chunk of this rank's shards at home in a file (`HOME_FILE`), for an optimizer of your own in
the update window. A chunk is a `Shard` of some elements, which are in memory until `f` returns:

    foreach_shard_chunk(model) do chunk
        chunk.main_weight .-= lr .* chunk.main_grad
    end

An exception of `f` leaves the pass unfinished: call it again for the chunks that are left before you publish.
"""
function foreach_shard_chunk(f, model::Model; stream = C_NULL)
    while true
        found = blank(fsdp_shard)
        @call model.state fsdp_next_shard_chunk(model.number, Ptr{Cvoid}(stream), found)
        found.memory[].element_count == 0 && break
        f(Shard(model, 0, found.memory[]))
    end
end

"""
    round_stochastic(shard, numbers, step; offset = 0, stream)

Round `Float32` numbers stochastically into the main weights, from element `offset` of this shard on, counted from 0.
This is for an optimizer of the caller's own with `MAIN_NONE`. `step` is the number of the optimizer's step.
"""
function round_stochastic(shard::Shard, numbers, step; offset = 0, stream = C_NULL)
    eltype(numbers) === Float32 || throw(ArgumentError("Float32 is rounded, not $(eltype(numbers))"))
    count = length(numbers)
    0 <= offset <= shard.element_count - count ||
        throw(DimensionMismatch("$count numbers from $offset on, of a shard of $(shard.element_count)"))
    to = address_or_null(shard.main_weight)
    to == C_NULL || (to += offset * sizeof(BFloat16))
    GC.@preserve numbers shard @call shard.model.state fsdp_round_stochastic(shard.group.number, shard.param_index - 1,
        shard.element_offset + offset, Ptr{Float32}(address(numbers)), to, count, step, Ptr{Cvoid}(stream))
end

address_or_null(::Nothing) = C_NULL
address_or_null(tensor::Tensor) = tensor.address
address_or_null(array) = address(array)
