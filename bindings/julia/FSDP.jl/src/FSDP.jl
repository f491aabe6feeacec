# SPDX-License-Identifier: Apache-2.0
"""
Fully sharded data parallel training over libfsdp: the library owns weights, gradients and optimizer state and shards
them over ranks; the program does the math on arrays over its memory. The README has a program, and says how Julia's
names and shapes map to those of fsdp.h; `FSDP.LibFSDP` is the header itself.
"""
module FSDP

include("library.jl")
using .LibFSDP
import Logging
using Logging: @logmsg

include("enums.jl")
include("numbers.jl")
include("options.jl")
include("errors.jl")
include("handles.jl")
include("calls.jl")
include("tensor.jl")
include("context.jl")
include("local.jl")
include("group.jl")
include("model.jl")
include("gather.jl")
include("gradient.jl")
include("optimizer.jl")
include("matrices.jl")
include("checkpoint.jl")
include("capture.jl")

export BFloat16, Capture, Checkpoint, Context, Group, Mesh, Model, Param, Shard, Tensor, Weights
export create_group, create_mesh, create_model, find_group, find_param, run_local, plan_context, local_contexts
export acquire_grad, acquire_grads, complete_grad, prefetch, put_grad, reduce_grad, reshard, restore_view, unshard
export load_chunk, load_grad, load_param, load_plane, load_state, read_grad, read_param, read_state, set_param_lr_scale,
    set_param_trainable
export apply_grads, begin_update, check_grads, check_replicas, clip_grads, count_zero_grads, discard_step, finish_grads,
    foreach_matrix, foreach_shard_chunk, grad_norm, last_norm, param_grad_norms, param_weight_norms, publish_weights,
    round_stochastic, scale_grads, seal, shards, state, step_adamw
export abort, all_reduce_values, rank, world_size

function __init__()
    LibFSDP.open_library()
    begin_callers()
    atexit(destroy_all)
end

end
