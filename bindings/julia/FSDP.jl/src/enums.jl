# SPDX-License-Identifier: Apache-2.0
# Written by bindings/julia/generate.py from bindings/abi/abi.json: do not edit.
# Values of fsdp.h without their prefix: an enum for each type, flags as numbers.

@enum Status::Int32 begin
    OK = LibFSDP.FSDP_OK
    INVALID_ARGUMENT = LibFSDP.FSDP_INVALID_ARGUMENT
    INVALID_HANDLE = LibFSDP.FSDP_INVALID_HANDLE
    INVALID_STATE = LibFSDP.FSDP_INVALID_STATE
    UNSUPPORTED = LibFSDP.FSDP_UNSUPPORTED
    OUT_OF_MEMORY = LibFSDP.FSDP_OUT_OF_MEMORY
    BUSY = LibFSDP.FSDP_BUSY
    MISMATCH = LibFSDP.FSDP_MISMATCH
    PEER_FAILED = LibFSDP.FSDP_PEER_FAILED
    TIMEOUT = LibFSDP.FSDP_TIMEOUT
    ABORTED = LibFSDP.FSDP_ABORTED
    INTERRUPTED = LibFSDP.FSDP_INTERRUPTED
    SYSTEM = LibFSDP.FSDP_SYSTEM
    INTERNAL = LibFSDP.FSDP_INTERNAL
end

@enum Origin::Int32 begin
    ORIGIN_FSDP = LibFSDP.FSDP_ORIGIN_FSDP
    ORIGIN_OS = LibFSDP.FSDP_ORIGIN_OS
    ORIGIN_CUDA = LibFSDP.FSDP_ORIGIN_CUDA
    ORIGIN_NCCL = LibFSDP.FSDP_ORIGIN_NCCL
    ORIGIN_UCX = LibFSDP.FSDP_ORIGIN_UCX
end

@enum Dtype::Int32 begin
    FLOAT32 = LibFSDP.FSDP_FLOAT32
    BFLOAT16 = LibFSDP.FSDP_BFLOAT16
    FLOAT16 = LibFSDP.FSDP_FLOAT16
    FLOAT8_E4M3 = LibFSDP.FSDP_FLOAT8_E4M3
    E8M0 = LibFSDP.FSDP_E8M0
    UINT8 = LibFSDP.FSDP_UINT8
end

@enum DeviceKind::Int32 begin
    DEVICE_HOST = LibFSDP.FSDP_DEVICE_HOST
    DEVICE_CUDA = LibFSDP.FSDP_DEVICE_CUDA
end

const TENSOR_READ_ONLY = LibFSDP.FSDP_TENSOR_READ_ONLY

@enum LogLevel::Int32 begin
    LOG_ERROR = LibFSDP.FSDP_LOG_ERROR
    LOG_WARNING = LibFSDP.FSDP_LOG_WARNING
    LOG_INFO = LibFSDP.FSDP_LOG_INFO
    LOG_DEBUG = LibFSDP.FSDP_LOG_DEBUG
end

const CONTEXT_DEBUG = LibFSDP.FSDP_CONTEXT_DEBUG
const CONTEXT_NO_OVERLAP = LibFSDP.FSDP_CONTEXT_NO_OVERLAP
const CONTEXT_TRACE = LibFSDP.FSDP_CONTEXT_TRACE

@enum DeviceTransport::Int32 begin
    TRANSPORT_NCCL = LibFSDP.FSDP_TRANSPORT_NCCL
    TRANSPORT_STAGING = LibFSDP.FSDP_TRANSPORT_STAGING
end

@enum ValueOp::Int32 begin
    VALUE_SUM = LibFSDP.FSDP_VALUE_SUM
    VALUE_MIN = LibFSDP.FSDP_VALUE_MIN
    VALUE_MAX = LibFSDP.FSDP_VALUE_MAX
    VALUE_MEAN = LibFSDP.FSDP_VALUE_MEAN
end

@enum Strategy::Int32 begin
    STRATEGY_NO_SHARD = LibFSDP.FSDP_STRATEGY_NO_SHARD
    STRATEGY_OPTIM = LibFSDP.FSDP_STRATEGY_OPTIM
    STRATEGY_OPTIM_GRADS = LibFSDP.FSDP_STRATEGY_OPTIM_GRADS
    STRATEGY_OPTIM_GRADS_PARAMS = LibFSDP.FSDP_STRATEGY_OPTIM_GRADS_PARAMS
end

@enum GradOp::Int32 begin
    GRAD_OP_MEAN = LibFSDP.FSDP_GRAD_OP_MEAN
    GRAD_OP_SUM = LibFSDP.FSDP_GRAD_OP_SUM
    GRAD_OP_FACTOR = LibFSDP.FSDP_GRAD_OP_FACTOR
end

@enum UnshardMode::Int32 begin
    UNSHARD_MAPPED = LibFSDP.FSDP_UNSHARD_MAPPED
    UNSHARD_COPIED = LibFSDP.FSDP_UNSHARD_COPIED
end

@enum ViewKind::Int32 begin
    VIEWS_READ_ONLY = LibFSDP.FSDP_VIEWS_READ_ONLY
    VIEWS_PRIVATE = LibFSDP.FSDP_VIEWS_PRIVATE
end

@enum ReducePolicy::Int32 begin
    REDUCE_POLICY_EACH = LibFSDP.FSDP_REDUCE_POLICY_EACH
    REDUCE_POLICY_LAST = LibFSDP.FSDP_REDUCE_POLICY_LAST
end

@enum OuterStrategy::Int32 begin
    OUTER_NO_SHARD = LibFSDP.FSDP_OUTER_NO_SHARD
    OUTER_OPTIM = LibFSDP.FSDP_OUTER_OPTIM
end

@enum Optimizer::Int32 begin
    OPTIMIZER_ADAMW = LibFSDP.FSDP_OPTIMIZER_ADAMW
    OPTIMIZER_CALLER = LibFSDP.FSDP_OPTIMIZER_CALLER
    OPTIMIZER_ADAMW_8BIT = LibFSDP.FSDP_OPTIMIZER_ADAMW_8BIT
end

@enum MainStorage::Int32 begin
    MAIN_FLOAT32 = LibFSDP.FSDP_MAIN_FLOAT32
    MAIN_SPLIT16 = LibFSDP.FSDP_MAIN_SPLIT16
    MAIN_NONE = LibFSDP.FSDP_MAIN_NONE
end

@enum Home::Int32 begin
    HOME_DEVICE = LibFSDP.FSDP_HOME_DEVICE
    HOME_HOST = LibFSDP.FSDP_HOME_HOST
    HOME_FILE = LibFSDP.FSDP_HOME_FILE
end

const MODEL_NO_PREFETCH = LibFSDP.FSDP_MODEL_NO_PREFETCH
const MODEL_FORCE_COMMUNICATION = LibFSDP.FSDP_MODEL_FORCE_COMMUNICATION

@enum ScaleRounding::Int32 begin
    SCALE_EXACT = LibFSDP.FSDP_SCALE_EXACT
    SCALE_POWER_OF_TWO = LibFSDP.FSDP_SCALE_POWER_OF_TWO
end

@enum ScaleRule::Int32 begin
    SCALE_ROUND_UP = LibFSDP.FSDP_SCALE_ROUND_UP
    SCALE_FLOOR = LibFSDP.FSDP_SCALE_FLOOR
end

@enum PlanePolicy::Int32 begin
    PLANES_BY_PHASE = LibFSDP.FSDP_PLANES_BY_PHASE
    PLANES_BY_PHASE_AND_RECOMPUTE = LibFSDP.FSDP_PLANES_BY_PHASE_AND_RECOMPUTE
    PLANES_BOTH = LibFSDP.FSDP_PLANES_BOTH
end

@enum Phase::Int32 begin
    FORWARD = LibFSDP.FSDP_FORWARD
    BACKWARD = LibFSDP.FSDP_BACKWARD
    RECOMPUTE = LibFSDP.FSDP_RECOMPUTE
    EVAL = LibFSDP.FSDP_EVAL
end

@enum ScheduleKind::Int32 begin
    SCHEDULE_SEQUENTIAL = LibFSDP.FSDP_SCHEDULE_SEQUENTIAL
    SCHEDULE_INTERLEAVED = LibFSDP.FSDP_SCHEDULE_INTERLEAVED
    SCHEDULE_VISITS = LibFSDP.FSDP_SCHEDULE_VISITS
    SCHEDULE_ANY = LibFSDP.FSDP_SCHEDULE_ANY
end

@enum Role::Int32 begin
    ROLE_ALL = LibFSDP.FSDP_ROLE_ALL
    ROLE_COMPUTE = LibFSDP.FSDP_ROLE_COMPUTE
    ROLE_MAIN = LibFSDP.FSDP_ROLE_MAIN
    ROLE_GRAD = LibFSDP.FSDP_ROLE_GRAD
    ROLE_OPTIMIZER = LibFSDP.FSDP_ROLE_OPTIMIZER
    ROLE_GATHER = LibFSDP.FSDP_ROLE_GATHER
    ROLE_REDUCE = LibFSDP.FSDP_ROLE_REDUCE
    ROLE_STAGING = LibFSDP.FSDP_ROLE_STAGING
    ROLE_MATRIX = LibFSDP.FSDP_ROLE_MATRIX
    ROLE_HOME = LibFSDP.FSDP_ROLE_HOME
end

@enum Granule::Int32 begin
    GRANULE_ROW = LibFSDP.FSDP_GRANULE_ROW
    GRANULE_BLOCK = LibFSDP.FSDP_GRANULE_BLOCK
    GRANULE_TENSOR = LibFSDP.FSDP_GRANULE_TENSOR
end

const PARAM_FROZEN = LibFSDP.FSDP_PARAM_FROZEN
const PARAM_NO_DECAY = LibFSDP.FSDP_PARAM_NO_DECAY
const PARAM_LR_ZERO = LibFSDP.FSDP_PARAM_LR_ZERO

@enum Quantization::Int32 begin
    QUANTIZE_FP8 = LibFSDP.FSDP_QUANTIZE_FP8
    QUANTIZE_MXFP8 = LibFSDP.FSDP_QUANTIZE_MXFP8
    QUANTIZE_FP8_BLOCK = LibFSDP.FSDP_QUANTIZE_FP8_BLOCK
end

@enum MissingGrad::Int32 begin
    MISSING_GRAD_ZEROS = LibFSDP.FSDP_MISSING_GRAD_ZEROS
    MISSING_GRAD_SKIP = LibFSDP.FSDP_MISSING_GRAD_SKIP
end

@enum MatrixLayout::Int32 begin
    MATRIX_LAST_TWO = LibFSDP.FSDP_MATRIX_LAST_TWO
end

const GROUP_RESIDENT = LibFSDP.FSDP_GROUP_RESIDENT
const GROUP_ROOT = LibFSDP.FSDP_GROUP_ROOT

@enum BackwardWeights::Int32 begin
    BACKWARD_WEIGHTS_GATHERED = LibFSDP.FSDP_BACKWARD_WEIGHTS_GATHERED
    BACKWARD_WEIGHTS_NONE = LibFSDP.FSDP_BACKWARD_WEIGHTS_NONE
end

@enum Plane::Int32 begin
    PLANE_ROW = LibFSDP.FSDP_PLANE_ROW
    PLANE_ROW_SCALE = LibFSDP.FSDP_PLANE_ROW_SCALE
    PLANE_COLUMN = LibFSDP.FSDP_PLANE_COLUMN
    PLANE_COLUMN_SCALE = LibFSDP.FSDP_PLANE_COLUMN_SCALE
end

const GRAD_ZEROED = LibFSDP.FSDP_GRAD_ZEROED
const GRAD_NO_WAIT = LibFSDP.FSDP_GRAD_NO_WAIT

const LAST = LibFSDP.FSDP_LAST

const ADAMW_BETA1_ZERO = LibFSDP.FSDP_ADAMW_BETA1_ZERO
const ADAMW_BETA2_ZERO = LibFSDP.FSDP_ADAMW_BETA2_ZERO
const ADAMW_EPSILON_ZERO = LibFSDP.FSDP_ADAMW_EPSILON_ZERO

const SAVE_REPLACE = LibFSDP.FSDP_SAVE_REPLACE
const SAVE_COMMIT_MANIFEST = LibFSDP.FSDP_SAVE_COMMIT_MANIFEST

const LOAD_WEIGHTS_ONLY = LibFSDP.FSDP_LOAD_WEIGHTS_ONLY
const LOAD_ALLOW_MISSING = LibFSDP.FSDP_LOAD_ALLOW_MISSING
const LOAD_ALLOW_UNEXPECTED = LibFSDP.FSDP_LOAD_ALLOW_UNEXPECTED
const LOAD_FALLBACK = LibFSDP.FSDP_LOAD_FALLBACK
const LOAD_IF_ANY = LibFSDP.FSDP_LOAD_IF_ANY
const LOAD_ONE_REPLICA = LibFSDP.FSDP_LOAD_ONE_REPLICA

const RENAME_TRANSPOSED = LibFSDP.FSDP_RENAME_TRANSPOSED

@enum BytesOwner::Int32 begin
    BYTES_ONCE = LibFSDP.FSDP_BYTES_ONCE
    BYTES_PER_RANK = LibFSDP.FSDP_BYTES_PER_RANK
end

@enum CheckpointState::Int32 begin
    CHECKPOINT_OPEN = LibFSDP.FSDP_CHECKPOINT_OPEN
    CHECKPOINT_COPYING = LibFSDP.FSDP_CHECKPOINT_COPYING
    CHECKPOINT_WRITING = LibFSDP.FSDP_CHECKPOINT_WRITING
    CHECKPOINT_COMMITTED = LibFSDP.FSDP_CHECKPOINT_COMMITTED
    CHECKPOINT_FAILED = LibFSDP.FSDP_CHECKPOINT_FAILED
    CHECKPOINT_OPENED = LibFSDP.FSDP_CHECKPOINT_OPENED
end

const VERSION_MAJOR = LibFSDP.FSDP_VERSION_MAJOR
const VERSION_MINOR = LibFSDP.FSDP_VERSION_MINOR
const VERSION_PATCH = LibFSDP.FSDP_VERSION_PATCH
const EVERY_RANK = LibFSDP.FSDP_EVERY_RANK

# The enums that fields of structs are of.
const FIELD_ENUMS = Dict(
    (LibFSDP.fsdp_error, :status) => Status,
    (LibFSDP.fsdp_error, :origin) => Origin,
    (LibFSDP.fsdp_tensor, :dtype) => Dtype,
    (LibFSDP.fsdp_tensor, :device) => DeviceKind,
    (LibFSDP.fsdp_context_options, :device) => DeviceKind,
    (LibFSDP.fsdp_context_options, :device_transport) => DeviceTransport,
    (LibFSDP.fsdp_context_options, :log_level) => LogLevel,
    (LibFSDP.fsdp_model_options, :strategy) => Strategy,
    (LibFSDP.fsdp_model_options, :outer_strategy) => OuterStrategy,
    (LibFSDP.fsdp_model_options, :unshard_mode) => UnshardMode,
    (LibFSDP.fsdp_model_options, :grad_dtype) => Dtype,
    (LibFSDP.fsdp_model_options, :reduce_dtype) => Dtype,
    (LibFSDP.fsdp_model_options, :grad_op) => GradOp,
    (LibFSDP.fsdp_model_options, :reduce_policy) => ReducePolicy,
    (LibFSDP.fsdp_model_options, :optimizer) => Optimizer,
    (LibFSDP.fsdp_model_options, :view_kind) => ViewKind,
    (LibFSDP.fsdp_model_options, :scale_rounding) => ScaleRounding,
    (LibFSDP.fsdp_model_options, :quantize_from) => Dtype,
    (LibFSDP.fsdp_model_options, :scale_rule) => ScaleRule,
    (LibFSDP.fsdp_model_options, :plane_policy) => PlanePolicy,
    (LibFSDP.fsdp_model_options, :main_storage) => MainStorage,
    (LibFSDP.fsdp_model_options, :state_home) => Home,
    (LibFSDP.fsdp_model_options, :main_home) => Home,
    (LibFSDP.fsdp_model_options, :grad_home) => Home,
    (LibFSDP.fsdp_visit, :phase) => Phase,
    (LibFSDP.fsdp_param, :dtype) => Dtype,
    (LibFSDP.fsdp_param, :granule) => Granule,
    (LibFSDP.fsdp_param, :quantization) => Quantization,
    (LibFSDP.fsdp_param, :missing_grad) => MissingGrad,
    (LibFSDP.fsdp_param, :optimizer) => Optimizer,
    (LibFSDP.fsdp_param, :matrix) => MatrixLayout,
    (LibFSDP.fsdp_group_options, :strategy) => Strategy,
    (LibFSDP.fsdp_group_options, :grad_dtype) => Dtype,
    (LibFSDP.fsdp_group_options, :reduce_dtype) => Dtype,
    (LibFSDP.fsdp_group_options, :main_storage) => MainStorage,
    (LibFSDP.fsdp_group_options, :backward_weights) => BackwardWeights,
    (LibFSDP.fsdp_group_options, :grad_op) => GradOp,
    (LibFSDP.fsdp_group_options, :outer_strategy) => OuterStrategy,
    (LibFSDP.fsdp_group_info, :strategy) => Strategy,
    (LibFSDP.fsdp_group_info, :reduce_policy) => ReducePolicy,
    (LibFSDP.fsdp_group_info, :grad_dtype) => Dtype,
    (LibFSDP.fsdp_group_info, :reduce_dtype) => Dtype,
    (LibFSDP.fsdp_group_info, :main_storage) => MainStorage,
    (LibFSDP.fsdp_group_info, :backward_weights) => BackwardWeights,
    (LibFSDP.fsdp_group_info, :grad_op) => GradOp,
    (LibFSDP.fsdp_group_info, :outer_strategy) => OuterStrategy,
    (LibFSDP.fsdp_shard, :main_weight_dtype) => Dtype,
    (LibFSDP.fsdp_shard, :main_grad_dtype) => Dtype,
    (LibFSDP.fsdp_matrix, :dtype) => Dtype,
    (LibFSDP.fsdp_matrix_options, :dtype) => Dtype,
    (LibFSDP.fsdp_grad, :dtype) => Dtype,
    (LibFSDP.fsdp_checkpoint_status, :state) => CheckpointState,
    (LibFSDP.fsdp_checkpoint_status, :status) => Status,
)

# Every name above with its value in fsdp.h.
const CONSTANTS = (
    (OK, 0),
    (INVALID_ARGUMENT, 1),
    (INVALID_HANDLE, 2),
    (INVALID_STATE, 3),
    (UNSUPPORTED, 4),
    (OUT_OF_MEMORY, 5),
    (BUSY, 6),
    (MISMATCH, 7),
    (PEER_FAILED, 8),
    (TIMEOUT, 9),
    (ABORTED, 10),
    (INTERRUPTED, 11),
    (SYSTEM, 12),
    (INTERNAL, 13),
    (ORIGIN_FSDP, 1),
    (ORIGIN_OS, 2),
    (ORIGIN_CUDA, 3),
    (ORIGIN_NCCL, 4),
    (ORIGIN_UCX, 5),
    (FLOAT32, 1),
    (BFLOAT16, 2),
    (FLOAT16, 3),
    (FLOAT8_E4M3, 4),
    (E8M0, 6),
    (UINT8, 7),
    (DEVICE_HOST, 1),
    (DEVICE_CUDA, 2),
    (TENSOR_READ_ONLY, 8388608),
    (LOG_ERROR, 1),
    (LOG_WARNING, 2),
    (LOG_INFO, 3),
    (LOG_DEBUG, 4),
    (CONTEXT_DEBUG, 256),
    (CONTEXT_NO_OVERLAP, 512),
    (CONTEXT_TRACE, 1024),
    (TRANSPORT_NCCL, 1),
    (TRANSPORT_STAGING, 2),
    (VALUE_SUM, 1),
    (VALUE_MIN, 2),
    (VALUE_MAX, 3),
    (VALUE_MEAN, 4),
    (STRATEGY_NO_SHARD, 1),
    (STRATEGY_OPTIM, 2),
    (STRATEGY_OPTIM_GRADS, 3),
    (STRATEGY_OPTIM_GRADS_PARAMS, 4),
    (GRAD_OP_MEAN, 1),
    (GRAD_OP_SUM, 2),
    (GRAD_OP_FACTOR, 3),
    (UNSHARD_MAPPED, 1),
    (UNSHARD_COPIED, 2),
    (VIEWS_READ_ONLY, 1),
    (VIEWS_PRIVATE, 2),
    (REDUCE_POLICY_EACH, 1),
    (REDUCE_POLICY_LAST, 2),
    (OUTER_NO_SHARD, 1),
    (OUTER_OPTIM, 2),
    (OPTIMIZER_ADAMW, 1),
    (OPTIMIZER_CALLER, 2),
    (OPTIMIZER_ADAMW_8BIT, 3),
    (MAIN_FLOAT32, 1),
    (MAIN_SPLIT16, 2),
    (MAIN_NONE, 3),
    (HOME_DEVICE, 1),
    (HOME_HOST, 2),
    (HOME_FILE, 3),
    (MODEL_NO_PREFETCH, 2048),
    (MODEL_FORCE_COMMUNICATION, 4096),
    (SCALE_EXACT, 1),
    (SCALE_POWER_OF_TWO, 2),
    (SCALE_ROUND_UP, 1),
    (SCALE_FLOOR, 2),
    (PLANES_BY_PHASE, 1),
    (PLANES_BY_PHASE_AND_RECOMPUTE, 2),
    (PLANES_BOTH, 3),
    (FORWARD, 1),
    (BACKWARD, 2),
    (RECOMPUTE, 3),
    (EVAL, 4),
    (SCHEDULE_SEQUENTIAL, 1),
    (SCHEDULE_INTERLEAVED, 2),
    (SCHEDULE_VISITS, 3),
    (SCHEDULE_ANY, 4),
    (ROLE_ALL, 0),
    (ROLE_COMPUTE, 1),
    (ROLE_MAIN, 2),
    (ROLE_GRAD, 3),
    (ROLE_OPTIMIZER, 4),
    (ROLE_GATHER, 5),
    (ROLE_REDUCE, 6),
    (ROLE_STAGING, 7),
    (ROLE_MATRIX, 8),
    (ROLE_HOME, 9),
    (GRANULE_ROW, 1),
    (GRANULE_BLOCK, 2),
    (GRANULE_TENSOR, 3),
    (PARAM_FROZEN, 8192),
    (PARAM_NO_DECAY, 16384),
    (PARAM_LR_ZERO, 32768),
    (QUANTIZE_FP8, 1),
    (QUANTIZE_MXFP8, 2),
    (QUANTIZE_FP8_BLOCK, 3),
    (MISSING_GRAD_ZEROS, 1),
    (MISSING_GRAD_SKIP, 2),
    (MATRIX_LAST_TWO, 1),
    (GROUP_RESIDENT, 65536),
    (GROUP_ROOT, 4194304),
    (BACKWARD_WEIGHTS_GATHERED, 1),
    (BACKWARD_WEIGHTS_NONE, 2),
    (PLANE_ROW, 1),
    (PLANE_ROW_SCALE, 2),
    (PLANE_COLUMN, 3),
    (PLANE_COLUMN_SCALE, 4),
    (GRAD_ZEROED, 131072),
    (GRAD_NO_WAIT, 1024),
    (LAST, 262144),
    (ADAMW_BETA1_ZERO, 524288),
    (ADAMW_BETA2_ZERO, 1048576),
    (ADAMW_EPSILON_ZERO, 2097152),
    (SAVE_REPLACE, 16777216),
    (SAVE_COMMIT_MANIFEST, 256),
    (LOAD_WEIGHTS_ONLY, 33554432),
    (LOAD_ALLOW_MISSING, 67108864),
    (LOAD_ALLOW_UNEXPECTED, 134217728),
    (LOAD_FALLBACK, 268435456),
    (LOAD_IF_ANY, 536870912),
    (LOAD_ONE_REPLICA, 512),
    (RENAME_TRANSPOSED, 1073741824),
    (BYTES_ONCE, 1),
    (BYTES_PER_RANK, 2),
    (CHECKPOINT_OPEN, 1),
    (CHECKPOINT_COPYING, 2),
    (CHECKPOINT_WRITING, 3),
    (CHECKPOINT_COMMITTED, 4),
    (CHECKPOINT_FAILED, 5),
    (CHECKPOINT_OPENED, 6),
    (VERSION_MAJOR, 0),
    (VERSION_MINOR, 2),
    (VERSION_PATCH, 0),
    (EVERY_RANK, -1),
)
