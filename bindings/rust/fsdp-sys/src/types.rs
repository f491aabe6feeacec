// SPDX-License-Identifier: Apache-2.0
// Written by bindings/rust/generate.py from bindings/abi/abi.json.
use std::os::raw::{c_char, c_void};

/// A number that names an object of the library; nothing can be read through it.
#[repr(C)]
pub struct fsdp_context {
    _private: [u8; 0],
}

/// A number that names an object of the library; nothing can be read through it.
#[repr(C)]
pub struct fsdp_mesh {
    _private: [u8; 0],
}

/// A number that names an object of the library; nothing can be read through it.
#[repr(C)]
pub struct fsdp_model {
    _private: [u8; 0],
}

/// A number that names an object of the library; nothing can be read through it.
#[repr(C)]
pub struct fsdp_group {
    _private: [u8; 0],
}

/// A number that names an object of the library; nothing can be read through it.
#[repr(C)]
pub struct fsdp_checkpoint {
    _private: [u8; 0],
}

/// A number that names an object of the library; nothing can be read through it.
#[repr(C)]
pub struct fsdp_capture {
    _private: [u8; 0],
}

/// The very type of cudaStream_t; null on the host.
pub type fsdp_stream = *mut CUstream_st;
#[repr(C)]
pub struct CUstream_st {
    _private: [u8; 0],
}

pub type fsdp_status = i32;

pub type fsdp_origin = i32;

pub type fsdp_dtype = i32;

/// ```text
/// Where a context keeps the memory of its models.
///
/// On a CUDA device all memory that a call works on (weights, gradients, states) is GPU memory, and calls enqueue their
/// work. fsdp_unshard makes the given stream wait for the weights and returns; fsdp_reduce_grad takes the gradients in
/// the order of the given stream and returns. Where a docstring says "Blocks: peers on the host device", the call does
/// not block on a CUDA device.
///   Streams      A call may name any stream of the device. The work that the call enqueues runs after all earlier work
///                that it depends on, also if that work is on other streams. A stream named by fsdp_acquire_grad must
///                live until fsdp_reduce_grad. Ranks that are threads of one process and share a GPU each need streams
///                of their own. NULL, the legacy default stream, is one stream for all of these ranks: the work of one
///                rank would queue behind the work of another rank that waits for it.
///   Waits        Only these calls wait for the GPU: fsdp_get_grad_norm, fsdp_clip_grads and fsdp_apply_grads where norm
///                is not NULL, fsdp_get_last_norm, fsdp_get_param_grad_norms, fsdp_get_param_weight_norms,
///                fsdp_count_zero_grads, fsdp_check_grads, fsdp_check_replicas, fsdp_wait_stream, the calls that load
///                and read parameters, main gradients and states, fsdp_discard_step, fsdp_begin_capture,
///                fsdp_prepare_replay while 64 replays are under way, and of models with planes in a file
///                (FSDP_HOME_FILE) the calls that open the update window, or use these planes in it. Ranks still
///                synchronize on the host where a call says "Blocks: peers".
///   Gathers      Gathers and reduces are collective: the ranks of a shard axis must make the same fsdp_unshard,
///                fsdp_reshard, fsdp_prefetch, fsdp_complete_grad and fsdp_reduce_grad calls in the same order. If two
///                ranks share a shard axis on one host in each of two models, both ranks must interleave the calls of
///                the two models in the same way. If the calls differ, MISMATCH comes at the latest at the end of the
///                step.
///   Unshard      fsdp_unshard always copies (FSDP_UNSHARD_COPIED), except where one rank has everything: a GPU does not
///                map the memory of other GPUs.
///   Pointers     Memory given to fsdp_put_grad and fsdp_apply_grads must be readable by the GPU, and memory given to
///                fsdp_set_arena must be the GPU's own. fsdp_load_param and fsdp_read_param take host or device memory.
/// ```
pub type fsdp_device_kind = i32;

pub type fsdp_log_level = i32;

/// How ranks exchange data that is in GPU memory.
pub type fsdp_device_transport = i32;

pub type fsdp_value_op = i32;

pub type fsdp_strategy = i32;

pub type fsdp_grad_op = i32;

pub type fsdp_unshard_mode = i32;

/// What happens on a write through a view of mapped weights. Such a write is an error of the program.
pub type fsdp_view_kind = i32;

pub type fsdp_reduce_policy = i32;

/// What the replicas of a mesh divide among themselves.
pub type fsdp_outer_strategy = i32;

pub type fsdp_optimizer = i32;

/// ```text
/// How the main weights of a parameter with bfloat16 compute weights are kept. Parameters in float32 are their own main
///  weights, whatever you choose. With SPLIT16 and NONE no trainable parameter can be float16 or quantized.
/// ```
pub type fsdp_main_storage = i32;

/// ```text
/// Where this rank keeps planes that only reduces and the update window use: main gradients, main weights or optimizer
///  state. The home changes no bit of any result. Bytes at home on the host or in a file are of FSDP_ROLE_HOME.
/// ```
pub type fsdp_home = i32;

/// How the factor f is rounded. Weights are multiplied by f before they become FP8 codes (fsdp_quantization).
pub type fsdp_scale_rounding = i32;

/// How the scale of an MXFP8 block follows from the largest magnitude in the block.
pub type fsdp_scale_rule = i32;

/// For parameters that are stored in two forms (MXFP8): which of their planes an unshard gathers.
pub type fsdp_plane_policy = i32;

pub type fsdp_phase = i32;

pub type fsdp_schedule_kind = i32;

pub type fsdp_role = i32;

pub type fsdp_granule = i32;

/// ```text
/// The form in which the compute weights of a parameter are stored. Codes and scales are computed from the fp32 main
/// weights whenever these are published. Gradients, main weights and states are those of an unquantized parameter of the
/// same dtype. A FROZEN parameter has only codes and scales. fsdp_load_param computes them from numbers, with the bits
/// that a publish would give; fsdp_load_plane takes them as they are. fsdp_read_param returns codes times scales of the
/// ROW planes; checkpoints contain the planes. fsdp_get_plane shows what is stored. Later releases may add kinds; a
/// value that this header does not name is INVALID_ARGUMENT.
///   FP8         E4M3 codes and one fp32 scale for all of them; number = code times scale. Let f be 448 / the largest
///               magnitude of the parameter (1 where that magnitude is 0 or not finite; with FSDP_SCALE_POWER_OF_TWO
///               rounded down to a power of two). The codes are the numbers times f, rounded to nearest, ties to even,
///               with a magnitude of at most 448; NaN stays NaN. The scale is 1 / f. One plane serves all phases. Any
///               shape and granule are legal. In a publish, the ranks that hold different parts exchange their largest
///               magnitudes, 4 bytes a parameter, for all parameters at once, and the publish blocks for this exchange.
///               A FROZEN parameter with FP8 cannot be a box of a larger tensor. FP8 is refused in a group whose mesh or
///               outer_strategy is not the model's.
///   MXFP8       E4M3 codes and an E8M0 scale for each 32 of them (OCP MX 1.0); number = code times scale. There are two
///               forms. ROW planes have blocks of 32 in a row, for a product with the matrix; COLUMN planes have blocks
///               of 32 in a column, for a product with its transpose. The codes are in C order in both. fsdp_scale_rule
///               gives the scales. The codes are the numbers divided by the scale, rounded to nearest, ties to even; a
///               NaN makes its whole block NaN. Rows and columns must be multiples of 32; with three or more dimensions
///               this holds for each matrix. 32 rows of a matrix stay together on a rank. An unshard gathers one form,
///               by phase: see fsdp_plane_policy. FSDP_GROUP_RESIDENT groups, and groups whose strategy keeps weights
///               whole, have both forms. A FROZEN box of a larger tensor must not cut a block of that tensor.
///   FP8_BLOCK   E4M3 codes and an fp32 scale for each block of 128 x 128; blocks at the right and lower edges are
///               smaller. number = code times scale; each block gets codes and scale as FP8 makes them for the whole
///               parameter. One plane serves all phases. The matrix is that of the last two dimensions; with more than
///               two dimensions, the last but one must be a multiple of 128. Rank boundaries fall between blocks:
///               whatever the granule, 128 rows of a matrix stay together, and granules of BLOCK must be multiples of
///               that. A FROZEN box of a larger tensor must not cut a block of that tensor.
/// ```
pub type fsdp_quantization = i32;

/// ```text
/// What a step does to a parameter that has no gradient. A parameter has none if in this step no rank called
///  fsdp_acquire_grad for it, no rank gave non-NULL data to fsdp_put_grad or fsdp_apply_grads, and fsdp_load_grad loaded
///  nothing.
/// ```
pub type fsdp_missing_grad = i32;

/// Which dimensions of a parameter are a matrix.
pub type fsdp_matrix_layout = i32;

/// Does the backward computation of a group read its weights?
pub type fsdp_backward_weights = i32;

pub type fsdp_plane = i32;

pub type fsdp_bytes_owner = i32;

pub type fsdp_checkpoint_state = i32;

/// ```text
/// Returns non-zero to give up the wait. Runs on the thread that waits, about every 20 ms. The hook must return: no
///  exception or longjmp may leave it. On this context it may make only calls that any thread may make at any time.
/// ```
pub type fsdp_interrupted_hook = Option<unsafe extern "C" fn(user_data: *mut c_void) -> i32>;

/// ```text
/// Runs on the caller's thread only: lines of library threads are handed over in the caller's next call. While the job
///  forms, rank 0 gets a FSDP_LOG_WARNING at once for each connection that it refused, with the reason. The hook must
///  return: no exception or longjmp may leave it.
/// ```
pub type fsdp_log_hook = Option<unsafe extern "C" fn(user_data: *mut c_void, level: fsdp_log_level, message: *const c_char)>;

pub const FSDP_VERSION_MAJOR: u32 = 0;
pub const FSDP_VERSION_MINOR: u32 = 2;
pub const FSDP_VERSION_PATCH: u32 = 0;
pub const FSDP_EVERY_RANK: i32 = -1;
pub const FSDP_OK: fsdp_status = 0;
pub const FSDP_INVALID_ARGUMENT: fsdp_status = 1;
pub const FSDP_INVALID_HANDLE: fsdp_status = 2;
pub const FSDP_INVALID_STATE: fsdp_status = 3;
pub const FSDP_UNSUPPORTED: fsdp_status = 4;
pub const FSDP_OUT_OF_MEMORY: fsdp_status = 5;
pub const FSDP_BUSY: fsdp_status = 6;
pub const FSDP_MISMATCH: fsdp_status = 7;
pub const FSDP_PEER_FAILED: fsdp_status = 8;
pub const FSDP_TIMEOUT: fsdp_status = 9;
pub const FSDP_ABORTED: fsdp_status = 10;
pub const FSDP_INTERRUPTED: fsdp_status = 11;
pub const FSDP_SYSTEM: fsdp_status = 12;
pub const FSDP_INTERNAL: fsdp_status = 13;
pub const FSDP_ORIGIN_FSDP: fsdp_origin = 1;
pub const FSDP_ORIGIN_OS: fsdp_origin = 2;
pub const FSDP_ORIGIN_CUDA: fsdp_origin = 3;
pub const FSDP_ORIGIN_NCCL: fsdp_origin = 4;
pub const FSDP_ORIGIN_UCX: fsdp_origin = 5;
pub const FSDP_FLOAT32: fsdp_dtype = 1;
pub const FSDP_BFLOAT16: fsdp_dtype = 2;
pub const FSDP_FLOAT16: fsdp_dtype = 3;
pub const FSDP_FLOAT8_E4M3: fsdp_dtype = 4;
pub const FSDP_E8M0: fsdp_dtype = 6;
pub const FSDP_UINT8: fsdp_dtype = 7;
pub const FSDP_DEVICE_HOST: fsdp_device_kind = 1;
pub const FSDP_DEVICE_CUDA: fsdp_device_kind = 2;
pub const FSDP_TENSOR_READ_ONLY: u32 = 8388608;
pub const FSDP_LOG_ERROR: fsdp_log_level = 1;
pub const FSDP_LOG_WARNING: fsdp_log_level = 2;
pub const FSDP_LOG_INFO: fsdp_log_level = 3;
pub const FSDP_LOG_DEBUG: fsdp_log_level = 4;
pub const FSDP_CONTEXT_DEBUG: u32 = 256;
pub const FSDP_CONTEXT_NO_OVERLAP: u32 = 512;
pub const FSDP_CONTEXT_TRACE: u32 = 1024;
pub const FSDP_TRANSPORT_NCCL: fsdp_device_transport = 1;
pub const FSDP_TRANSPORT_STAGING: fsdp_device_transport = 2;
pub const FSDP_VALUE_SUM: fsdp_value_op = 1;
pub const FSDP_VALUE_MIN: fsdp_value_op = 2;
pub const FSDP_VALUE_MAX: fsdp_value_op = 3;
pub const FSDP_VALUE_MEAN: fsdp_value_op = 4;
pub const FSDP_STRATEGY_NO_SHARD: fsdp_strategy = 1;
pub const FSDP_STRATEGY_OPTIM: fsdp_strategy = 2;
pub const FSDP_STRATEGY_OPTIM_GRADS: fsdp_strategy = 3;
pub const FSDP_STRATEGY_OPTIM_GRADS_PARAMS: fsdp_strategy = 4;
pub const FSDP_GRAD_OP_MEAN: fsdp_grad_op = 1;
pub const FSDP_GRAD_OP_SUM: fsdp_grad_op = 2;
pub const FSDP_GRAD_OP_FACTOR: fsdp_grad_op = 3;
pub const FSDP_UNSHARD_MAPPED: fsdp_unshard_mode = 1;
pub const FSDP_UNSHARD_COPIED: fsdp_unshard_mode = 2;
pub const FSDP_VIEWS_READ_ONLY: fsdp_view_kind = 1;
pub const FSDP_VIEWS_PRIVATE: fsdp_view_kind = 2;
pub const FSDP_REDUCE_POLICY_EACH: fsdp_reduce_policy = 1;
pub const FSDP_REDUCE_POLICY_LAST: fsdp_reduce_policy = 2;
pub const FSDP_OUTER_NO_SHARD: fsdp_outer_strategy = 1;
pub const FSDP_OUTER_OPTIM: fsdp_outer_strategy = 2;
pub const FSDP_OPTIMIZER_ADAMW: fsdp_optimizer = 1;
pub const FSDP_OPTIMIZER_CALLER: fsdp_optimizer = 2;
pub const FSDP_OPTIMIZER_ADAMW_8BIT: fsdp_optimizer = 3;
pub const FSDP_MAIN_FLOAT32: fsdp_main_storage = 1;
pub const FSDP_MAIN_SPLIT16: fsdp_main_storage = 2;
pub const FSDP_MAIN_NONE: fsdp_main_storage = 3;
pub const FSDP_HOME_DEVICE: fsdp_home = 1;
pub const FSDP_HOME_HOST: fsdp_home = 2;
pub const FSDP_HOME_FILE: fsdp_home = 3;
pub const FSDP_MODEL_NO_PREFETCH: u32 = 2048;
pub const FSDP_MODEL_FORCE_COMMUNICATION: u32 = 4096;
pub const FSDP_SCALE_EXACT: fsdp_scale_rounding = 1;
pub const FSDP_SCALE_POWER_OF_TWO: fsdp_scale_rounding = 2;
pub const FSDP_SCALE_ROUND_UP: fsdp_scale_rule = 1;
pub const FSDP_SCALE_FLOOR: fsdp_scale_rule = 2;
pub const FSDP_PLANES_BY_PHASE: fsdp_plane_policy = 1;
pub const FSDP_PLANES_BY_PHASE_AND_RECOMPUTE: fsdp_plane_policy = 2;
pub const FSDP_PLANES_BOTH: fsdp_plane_policy = 3;
pub const FSDP_FORWARD: fsdp_phase = 1;
pub const FSDP_BACKWARD: fsdp_phase = 2;
pub const FSDP_RECOMPUTE: fsdp_phase = 3;
pub const FSDP_EVAL: fsdp_phase = 4;
pub const FSDP_SCHEDULE_SEQUENTIAL: fsdp_schedule_kind = 1;
pub const FSDP_SCHEDULE_INTERLEAVED: fsdp_schedule_kind = 2;
pub const FSDP_SCHEDULE_VISITS: fsdp_schedule_kind = 3;
pub const FSDP_SCHEDULE_ANY: fsdp_schedule_kind = 4;
pub const FSDP_ROLE_ALL: fsdp_role = 0;
pub const FSDP_ROLE_COMPUTE: fsdp_role = 1;
pub const FSDP_ROLE_MAIN: fsdp_role = 2;
pub const FSDP_ROLE_GRAD: fsdp_role = 3;
pub const FSDP_ROLE_OPTIMIZER: fsdp_role = 4;
pub const FSDP_ROLE_GATHER: fsdp_role = 5;
pub const FSDP_ROLE_REDUCE: fsdp_role = 6;
pub const FSDP_ROLE_STAGING: fsdp_role = 7;
pub const FSDP_ROLE_MATRIX: fsdp_role = 8;
pub const FSDP_ROLE_HOME: fsdp_role = 9;
pub const FSDP_GRANULE_ROW: fsdp_granule = 1;
pub const FSDP_GRANULE_BLOCK: fsdp_granule = 2;
pub const FSDP_GRANULE_TENSOR: fsdp_granule = 3;
pub const FSDP_PARAM_FROZEN: u32 = 8192;
pub const FSDP_PARAM_NO_DECAY: u32 = 16384;
pub const FSDP_PARAM_LR_ZERO: u32 = 32768;
pub const FSDP_QUANTIZE_FP8: fsdp_quantization = 1;
pub const FSDP_QUANTIZE_MXFP8: fsdp_quantization = 2;
pub const FSDP_QUANTIZE_FP8_BLOCK: fsdp_quantization = 3;
pub const FSDP_MISSING_GRAD_ZEROS: fsdp_missing_grad = 1;
pub const FSDP_MISSING_GRAD_SKIP: fsdp_missing_grad = 2;
pub const FSDP_MATRIX_LAST_TWO: fsdp_matrix_layout = 1;
pub const FSDP_GROUP_RESIDENT: u32 = 65536;
pub const FSDP_GROUP_ROOT: u32 = 4194304;
pub const FSDP_BACKWARD_WEIGHTS_GATHERED: fsdp_backward_weights = 1;
pub const FSDP_BACKWARD_WEIGHTS_NONE: fsdp_backward_weights = 2;
pub const FSDP_PLANE_ROW: fsdp_plane = 1;
pub const FSDP_PLANE_ROW_SCALE: fsdp_plane = 2;
pub const FSDP_PLANE_COLUMN: fsdp_plane = 3;
pub const FSDP_PLANE_COLUMN_SCALE: fsdp_plane = 4;
pub const FSDP_GRAD_ZEROED: u32 = 131072;
pub const FSDP_GRAD_NO_WAIT: u32 = 1024;
pub const FSDP_LAST: u32 = 262144;
pub const FSDP_ADAMW_BETA1_ZERO: u32 = 524288;
pub const FSDP_ADAMW_BETA2_ZERO: u32 = 1048576;
pub const FSDP_ADAMW_EPSILON_ZERO: u32 = 2097152;
pub const FSDP_SAVE_REPLACE: u32 = 16777216;
pub const FSDP_SAVE_COMMIT_MANIFEST: u32 = 256;
pub const FSDP_LOAD_WEIGHTS_ONLY: u32 = 33554432;
pub const FSDP_LOAD_ALLOW_MISSING: u32 = 67108864;
pub const FSDP_LOAD_ALLOW_UNEXPECTED: u32 = 134217728;
pub const FSDP_LOAD_FALLBACK: u32 = 268435456;
pub const FSDP_LOAD_IF_ANY: u32 = 536870912;
pub const FSDP_LOAD_ONE_REPLICA: u32 = 512;
pub const FSDP_RENAME_TRANSPOSED: u32 = 1073741824;
pub const FSDP_BYTES_ONCE: fsdp_bytes_owner = 1;
pub const FSDP_BYTES_PER_RANK: fsdp_bytes_owner = 2;
pub const FSDP_CHECKPOINT_OPEN: fsdp_checkpoint_state = 1;
pub const FSDP_CHECKPOINT_COPYING: fsdp_checkpoint_state = 2;
pub const FSDP_CHECKPOINT_WRITING: fsdp_checkpoint_state = 3;
pub const FSDP_CHECKPOINT_COMMITTED: fsdp_checkpoint_state = 4;
pub const FSDP_CHECKPOINT_FAILED: fsdp_checkpoint_state = 5;
pub const FSDP_CHECKPOINT_OPENED: fsdp_checkpoint_state = 6;
