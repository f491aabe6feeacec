# SPDX-License-Identifier: Apache-2.0
# The calls of the interpreter: `call(rank, Val(NAME), words, keys)` gives the text of what came, or anything else.

const REAL_KEYS = (:grad_factor, :beta1, :beta2, :epsilon, :weight_decay, :lr_scale)

"Keys as integers, or as doubles where they are written so."
numbers(keys) = (; (key => key in REAL_KEYS ? parse(Float64, value) : parse(Int, value) for (key, value) in keys)...)

"The array of five integers."
function values_of(rank, words, count, T = Float32; shift = 0)
    a, b, c, m, k = parse.(Int, words)
    return T[T(Float32(mod(a * i + b + shift + c * rank.rank, m) - m ÷ 2) / 2f0^k) for i in 0:count-1]
end

# Indices count from 1 in Julia. 0 elements more than there are parameters: 1.
param_at(index) = parse(Int, index) + 1
function elements(rank, group, index)
    params = get(rank.params, group, Param[])
    return param_at(index) <= length(params) ? prod(params[param_at(index)].dims) : 1
end
element_type(dtype) = FSDP.element_type(parse(Int, dtype))

function declare(rank, line)
    dims = reverse(parse.(Int, line.words[3:end]))
    T = element_type(get(line.keys, :dtype, "1"))
    keys = numbers(filter(pair -> !(pair.first in (:dtype, :splits)), line.keys))
    splits = haskey(line.keys, :splits) ? parse.(Int, split(line.keys[:splits], ',')) : nothing
    push!(rank.declared, Param(line.words[2], T, dims...; keys..., splits = splits))
end

function call(rank, ::Val{:create_mesh}, words, keys)
    ranks = length(words) > 1 ? parse.(Int, words[2:end]) : nothing
    rank.named[words[1]] = FSDP.create_mesh(rank.context; ranks = ranks, numbers(keys)...)
end
# The mesh that `mesh=` names, and the other keys as numbers.
function mesh_and_numbers(rank, keys)
    mesh = haskey(keys, :mesh) ? rank.named[keys[:mesh]] : nothing
    return mesh, numbers(filter(pair -> pair.first != :mesh, keys))
end
function call(rank, ::Val{:create_model}, words, keys)
    mesh, fields = mesh_and_numbers(rank, keys)
    rank.named[words[1]] = FSDP.create_model(rank.context; mesh = mesh, fields...)
end
function call(rank, ::Val{:create_group}, words, keys)
    declared, rank.declared = rank.declared, Param[]
    haskey(rank.params, words[2]) || push!(rank.order, words[2])
    get!(rank.params, words[2], declared)
    mesh, fields = mesh_and_numbers(rank, keys)
    rank.named[words[2]] = FSDP.create_group(rank.named[words[1]], words[2], declared; mesh = mesh, fields...)
end
function call(rank, ::Val{:set_schedule}, words, keys)
    visits, rank.visits = isempty(rank.visits) ? nothing : rank.visits, []
    FSDP.set_schedule(rank.named[words[1]], FSDP.ScheduleKind(parse(Int, words[2])), visits; numbers(keys)...)
end
call(rank, ::Val{:find_group}, words, keys) = FSDP.find_group(rank.named[words[1]], words[2])
call(rank, ::Val{:seal_model}, words, keys) = FSDP.seal(rank.named[words[1]])
const Destroyed = Union{Val{:destroy_model},Val{:destroy_mesh},Val{:destroy_checkpoint}}
call(rank, ::Destroyed, words, keys) = close(rank.named[words[1]])
call(rank, ::Val{:close_context}, words, keys) =
    FSDP.@call rank.context.state LibFSDP.fsdp_close_context(rank.context.number)
call(rank, ::Val{:abort_context}, words, keys) = FSDP.abort(rank.context, "conformance")

# Parameters and states. What the objects have no words for goes to the low-level layer.
function call(rank, ::Val{:load_param}, words, keys)
    group, data = rank.named[words[1]], values_of(rank, words[3:end], elements(rank, words[1], words[2]))
    root = parse(Int, get(keys, :root, "-1"))
    if all(key -> key == :root, collect(Base.keys(keys))) && param_at(words[2]) <= length(group.params)
        return FSDP.load_param(group, param_at(words[2]), data; root = root)
    end
    number(key, default) = parse(Int, get(keys, key, string(default)))
    FSDP.@call group.state LibFSDP.fsdp_load_param(group.number, parse(UInt64, words[2]), data, number(:dtype, 1),
        number(:element_count, length(data)), root, number(:flags, 0))
end
call(rank, ::Val{:read_param}, words, keys) =
    hash_of(FSDP.read_param(rank.named[words[1]], param_at(words[2]), element_type(get(keys, :dtype, "1"))))
call(rank, ::Val{:load_state}, words, keys) = FSDP.load_state(rank.named[words[1]], param_at(words[2]), words[3],
    values_of(rank, words[4:end], elements(rank, words[1], words[2])))
call(rank, ::Val{:read_state}, words, keys) =
    hash_of(FSDP.read_state(rank.named[words[1]], param_at(words[2]), words[3]))
call(rank, ::Val{:load_grad}, words, keys) = FSDP.load_grad(rank.named[words[1]], param_at(words[2]),
    values_of(rank, words[3:end], elements(rank, words[1], words[2])); root = parse(Int, get(keys, :root, "-1")))
call(rank, ::Val{:read_grad}, words, keys) =
    hash_of(FSDP.read_grad(rank.named[words[1]], param_at(words[2]), element_type(get(keys, :dtype, "1"))))
call(rank, ::Val{:set_param_lr_scale}, words, keys) =
    FSDP.set_param_lr_scale(rank.named[words[1]], param_at(words[2]), parse(Float64, words[3]))
call(rank, ::Val{:set_param_trainable}, words, keys) =
    FSDP.set_param_trainable(rank.named[words[1]], param_at(words[2]), words[3] == "1")

# Gathers and gradients.
phase(word) = FSDP.Phase(parse(Int, word))
piece_in(keys) = haskey(keys, :piece) ? parse(Int, keys[:piece]) : nothing
function call(rank, ::Val{:unshard}, words, keys)
    group, number = rank.named[words[1]], parse(Int, words[2])
    number in Int.(instances(FSDP.Phase)) && return FSDP.unshard(group, phase(words[2]); piece = piece_in(keys))
    FSDP.@call group.state LibFSDP.fsdp_unshard(group.number, number, 0, C_NULL)
end
call(rank, ::Val{:reshard}, words, keys) =
    FSDP.reshard(rank.named[words[1]], phase(words[2]); piece = piece_in(keys))
call(rank, ::Val{:restore_view}, words, keys) = FSDP.restore_view(rank.named[words[1]])
call(rank, ::Val{:prefetch}, words, keys) = FSDP.prefetch(rank.named[words[1]], phase(words[2]))
"A second hold of the piece, for the time of the call; where there is no first one, the library says so."
function call(rank, ::Val{:get_param}, words, keys)
    group, index, when = rank.named[words[1]], param_at(words[2]), phase(words[3])
    FSDP.tensor(group, index, when)
    return FSDP.unshard(weights -> hash_of(weights[index]), group, when; piece = FSDP.piece_of(group.params[index]))
end
call(rank, ::Val{:get_params}, words, keys) =
    hash_of(FSDP.array.(FSDP.tensors(rank.named[words[1]], phase(words[2])))...)
plane_of(words) = param_at(words[2]), FSDP.Plane(parse(Int, words[4])), phase(words[3])
call(rank, ::Val{:get_plane}, words, keys) = hash_of(FSDP.array(FSDP.plane(rank.named[words[1]], plane_of(words)...)))
call(rank, ::Val{:swizzle_scales}, words, keys) = hash_of(FSDP.swizzle_scales(rank.named[words[1]], plane_of(words)...))
function call(rank, ::Val{:acquire_grad}, words, keys)
    grad, adds = FSDP.acquire_grad(rank.named[words[1]], param_at(words[2]))
    write_grad(rank, grad, words[3:end], adds, 0)
end
function call(rank, ::Val{:acquire_grads}, words, keys)
    grads = FSDP.acquire_grads(rank.named[words[1]])
    for (index, param) in enumerate(rank.params[words[1]])
        haskey(grads, param.name) && write_grad(rank, grads[param.name], words[2:end], true, index - 1)
    end
end
function write_grad(rank, grad, words, adds, shift)
    data = values_of(rank, words, length(grad), eltype(grad); shift = shift)
    adds ? vec(grad) .+= data : copyto!(grad, data)
end
function call(rank, ::Val{:put_grad}, words, keys)
    group = rank.named[words[1]]
    words[3] == "none" && return FSDP.put_grad(group, param_at(words[2]), nothing)
    count, T = elements(rank, words[1], words[2]), element_type(get(keys, :dtype, "1"))
    data = values_of(rank, words[3:end], count, T)
    param_at(words[2]) <= length(group.params) && return FSDP.put_grad(group, param_at(words[2]), data)
    FSDP.@call group.state LibFSDP.fsdp_put_grad(group.number, parse(UInt64, words[2]), FSDP.address(data),
        Int32(FSDP.dtype_of(T)), count, 0, C_NULL)
end
call(rank, ::Val{:complete_grad}, words, keys) = FSDP.complete_grad(rank.named[words[1]], param_at(words[2]))
function call(rank, ::Val{:reduce_grad}, words, keys)
    group, flags = rank.named[words[1]], parse(Int, get(keys, :flags, "0"))
    flags in (0, FSDP.LAST) && return FSDP.reduce_grad(group; is_last = flags != 0)
    FSDP.@call group.state LibFSDP.fsdp_reduce_grad(group.number, flags, C_NULL)
end
call(rank, ::Val{:finish_grads}, words, keys) =
    FSDP.finish_grads(rank.named[words[1]], parse(Float64, words[2]); is_last = get(keys, :flags, "0") != "0")
call(rank, ::Val{:scale_grads}, words, keys) = FSDP.scale_grads(rank.named[words[1]], parse(Float64, words[2]))
call(rank, ::Val{:get_grad_norm}, words, keys) = hex(FSDP.grad_norm(rank.named[words[1]]))
function hash_of_norms(model, norms)
    return hash_of([norms[name] for name in FSDP.param_names(model)])
end
call(rank, ::Val{:get_param_grad_norms}, words, keys) =
    hash_of_norms(rank.named[words[1]], FSDP.param_grad_norms(rank.named[words[1]]))
call(rank, ::Val{:get_param_weight_norms}, words, keys) =
    hash_of_norms(rank.named[words[1]], FSDP.param_weight_norms(rank.named[words[1]]))
call(rank, ::Val{:count_zero_grads}, words, keys) = string(FSDP.count_zero_grads(rank.named[words[1]]))
call(rank, ::Val{:clip_grads}, words, keys) = hex(FSDP.clip_grads(rank.named[words[1]], parse(Float64, words[2])))
call(rank, ::Val{:check_grads}, words, keys) = string(Int(FSDP.check_grads(rank.named[words[1]]) !== nothing))

# Steps.
call(rank, ::Val{:step_adamw}, words, keys) =
    FSDP.step_adamw(rank.named[words[1]], parse(Float64, words[2]); numbers(keys)...)
function call(rank, ::Val{:round_stochastic}, words, keys)
    data = values_of(rank, words[5:end], elements(rank, words[2], words[3]))
    for shard in FSDP.shards(rank.named[words[1]])
        shard.group === rank.named[words[2]] && shard.param_index == param_at(words[3]) || continue
        own = data[shard.element_offset+1:shard.element_offset+shard.element_count]
        FSDP.round_stochastic(shard, own, parse(Int, words[4]))
    end
end
function matrix_options(keys)
    dtype = element_type(get(keys, :dtype, "1"))
    return (source = get(keys, :source, nothing), target = get(keys, :target, nothing), dtype = dtype)
end
"The last row comes first, and numbers are multiplied by a power of two: they stay exact in BFloat16."
function change_matrices(matrices)
    for (number, matrix) in enumerate(matrices)
        exponent = matrices.param_index - 1 + 2 * matrices.split_index + matrices.batch_index + number - 1
        matrix .= eltype(matrix).(Float32.(matrix[:, end:-1:1]) .* 2f0^(exponent % 4))
    end
end
call(rank, ::Val{:change_matrices}, words, keys) =
    FSDP.foreach_matrix(change_matrices, rank.named[words[1]]; matrix_options(keys)...)
function call(rank, ::Val{:collect_matrices}, words, keys)
    wanted, model = FSDP.options(LibFSDP.fsdp_matrix_options, (source = get(keys, :source, nothing),)), rank.named[words[1]]
    FSDP.@call model.state LibFSDP.fsdp_collect_matrices(model.number, wanted, C_NULL)
end
function call(rank, ::Val{:apply_grads}, words, keys)
    counts = [prod(param.dims) for name in rank.order for param in rank.params[name] if FSDP.is_trainable(param)]
    grads = [values_of(rank, words[4:end], count; shift = j - 1) for (j, count) in enumerate(counts)]
    lr, max_norm = parse.(Float64, words[2:3])
    return hex(FSDP.apply_grads(rank.named[words[1]], grads, lr; max_norm = max_norm, numbers(keys)...))
end
call(rank, ::Val{:publish_weights}, words, keys) = FSDP.publish_weights(rank.named[words[1]])
call(rank, ::Val{:begin_update}, words, keys) = FSDP.begin_update(rank.named[words[1]])
call(rank, ::Val{:discard_step}, words, keys) = FSDP.discard_step(rank.named[words[1]])
call(rank, ::Val{:check_replicas}, words, keys) = FSDP.check_replicas(rank.named[words[1]])
function call(rank, ::Val{:all_reduce_values}, words, keys)
    data = values_of(rank, words[3:end], parse(Int, words[2]))
    return hash_of(FSDP.all_reduce_values(rank.context, data, FSDP.ValueOp(parse(Int, words[1]))))
end
call(rank, ::Val{:get_stats}, words, keys) = string(getfield(FSDP.stats(rank.named[words[1]]), Symbol(words[2])))
call(rank, ::Val{:get_model_info}, words, keys) =
    string(getfield(FSDP.model_info(rank.named[words[1]]), Symbol(words[2])))

# Checkpoints.
save_path(rank, folder) = "$(rank.save_folder)/$(rank.world)/$folder"
load_path(rank, world, folder) = "$(rank.load_folder)/$world/$folder"
call(rank, ::Val{:save}, words, keys) = FSDP.save(rank.named[words[1]], save_path(rank, words[2]))
function call(rank, ::Val{:load}, words, keys)
    loaded = FSDP.load(rank.named[words[1]], load_path(rank, words[2], words[3]); numbers(keys)...)
    return "$(loaded.step)/$(loaded.loaded_tensors)"
end
call(rank, ::Val{:begin_checkpoint}, words, keys) =
    rank.named[words[1]] = FSDP.begin_checkpoint(rank.context, save_path(rank, words[2]))
call(rank, ::Val{:open_checkpoint}, words, keys) =
    rank.named[words[1]] = FSDP.open_checkpoint(rank.context, load_path(rank, words[2], words[3]))
call(rank, ::Val{:add_checkpoint_model}, words, keys) =
    FSDP.add_model(rank.named[words[1]], rank.named[words[3]], words[2])
call(rank, ::Val{:load_checkpoint_model}, words, keys) =
    string(FSDP.load_model(rank.named[words[1]], rank.named[words[3]], words[2]).step)
function call(rank, ::Val{:add_checkpoint_bytes}, words, keys)
    data = bytes_of(values_of(rank, words[5:end], parse(Int, words[4])))
    FSDP.add_bytes(rank.named[words[1]], words[2], data, FSDP.BytesOwner(parse(Int, words[3])))
end
call(rank, ::Val{:read_checkpoint_bytes}, words, keys) = hash_of(FSDP.read_bytes(rank.named[words[1]], words[2]))
call(rank, ::Val{:commit_checkpoint}, words, keys) = FSDP.commit(rank.named[words[1]])
call(rank, ::Val{:wait_checkpoint}, words, keys) = wait(rank.named[words[1]])
