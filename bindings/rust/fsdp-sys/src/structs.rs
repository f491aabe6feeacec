// SPDX-License-Identifier: Apache-2.0
// Written by bindings/rust/generate.py from bindings/abi/abi.json.
use crate::types::*;
use std::os::raw::{c_char, c_void};

/// Detail of a failed call. Output only: set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_error {
    pub struct_size: u64,
    pub status: fsdp_status,
    pub origin: fsdp_origin,
    /// errno, cudaError_t, ... of that origin; 0 if none
    pub origin_code: i64,
    /// the rank to blame, -1 if none; where ranks differ, the lowest rank that differs from the first rank of its
    /// mesh
    pub rank: i32,
    /// 1 if the context has failed for good and can only be destroyed
    pub context_failed: i32,
    /// NUL-terminated; cut at the end if it is longer
    pub message: [c_char; 1024],
}

impl Default for fsdp_error {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// ```text
/// A view of memory that libfsdp owns, with the fields that DLPack needs (the strides are those of C order). Output
/// only: set struct_size before the call.
/// ```
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_tensor {
    pub struct_size: u64,
    /// first element, contiguous in C order; NULL if there is no such tensor
    pub data: *mut c_void,
    /// dimension_count sizes, outermost first; lives as long as the model
    pub shape: *const u64,
    pub element_count: u64,
    pub dimension_count: u32,
    pub dtype: fsdp_dtype,
    /// bytes of one element
    pub element_size: u32,
    /// FSDP_TENSOR_\*
    pub flags: u32,
    pub device: fsdp_device_kind,
    /// index of the GPU, as CUDA counts; 0 on the host
    pub device_index: i32,
}

impl Default for fsdp_tensor {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_context_options {
    pub struct_size: u64,
    /// FSDP_CONTEXT_\*; FSDP_DEBUG=1 in the environment adds FSDP_CONTEXT_DEBUG
    pub flags: u32,
    /// 0: the launcher's variables say it; otherwise rank and rendezvous count
    pub world_size: u32,
    /// counts only with world_size
    pub rank: u32,
    /// this number of neighbouring ranks counts as one host, for plans and to try a job of several hosts on one host;
    /// 0: the real hosts
    pub ranks_per_host: u32,
    /// counts only with world_size: where the ranks of the job meet. It is a name (ranks of one host),
    /// tcp://HOST:PORT or file:///DIRECTORY; NULL: FSDP_RENDEZVOUS, else the launcher's
    pub rendezvous: *const c_char,
    /// 0: FSDP_DEVICE_HOST
    pub device: fsdp_device_kind,
    /// counts only with FSDP_DEVICE_CUDA: FSDP_DEVICE_INDEX(i) for GPU i; 0: the calling thread's current GPU
    pub device_index: i32,
    /// counts only with FSDP_DEVICE_CUDA; 0: NCCL if it can serve the ranks, else staging
    pub device_transport: fsdp_device_transport,
    /// longest wait for peers in one operation; 0: FSDP_TIMEOUT of the environment, in seconds, else 300,000
    pub timeout_ms: u32,
    /// a rank or host that is silent for this time counts as lost; at least 1,000; 0: 8,000
    pub heartbeat_timeout_ms: u32,
    /// 0: FSDP_LOG of the environment, else FSDP_LOG_WARNING
    pub log_level: fsdp_log_level,
    /// read atomically while a call waits: non-zero gives up the wait, as the hook does. It must outlive the context;
    /// NULL: none
    pub interrupted_flag: *const i32,
    /// NULL: none
    pub interrupted: fsdp_interrupted_hook,
    pub interrupted_data: *mut c_void,
    /// NULL: none, or standard error if FSDP_LOG is set
    pub log: fsdp_log_hook,
    pub log_data: *mut c_void,
    /// trace-RANK.json is written into it when the context is destroyed, and a trace is kept for this file; NULL:
    /// FSDP_TRACE of the environment, else nowhere
    pub trace_directory: *const c_char,
    /// number of events to keep, 64 bytes each; counts only if a trace is kept; 0: 65,536
    pub trace_events: u64,
    /// flight-RANK.json is written into it if the context fails (an earlier file becomes flight-RANK.json.1, and so
    /// on); NULL: FSDP_FLIGHT_DIRECTORY, else nowhere
    pub flight_directory: *const c_char,
    /// number of recent calls, and of collectives, that the flight recorder keeps, 64 bytes each; 0: 1,024
    pub flight_events: u32,
    /// longest random delay before every piece of library work, to find races; 0: none
    pub debug_delay_us: u32,
    pub debug_delay_seed: u64,
    /// make the n-th allocation of memory for a role fail, n from 1; 0: none
    pub debug_failed_allocation: u64,
}

impl Default for fsdp_context_options {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_mesh_options {
    pub struct_size: u64,
    /// 0: number of ranks / shard_size; 1 if shard_size is 0 too
    pub replicate_size: u32,
    /// 0: number of ranks / replicate_size
    pub shard_size: u32,
    /// the ranks of the mesh in the mesh's order; NULL: all ranks of the job
    pub ranks: *const u32,
    /// number of ranks; 0 if ranks is NULL
    pub rank_count: u32,
    /// 0: see fsdp_create_mesh
    pub reduction_block_size: u32,
}

impl Default for fsdp_mesh_options {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_model_options {
    pub struct_size: u64,
    /// NULL: 1 x world
    pub mesh: *const fsdp_mesh,
    /// FSDP_MODEL_\*
    pub flags: u32,
    /// 0: FSDP_STRATEGY_OPTIM_GRADS_PARAMS
    pub strategy: fsdp_strategy,
    /// 0: FSDP_OUTER_NO_SHARD; FSDP_OUTER_OPTIM needs a mesh with replicas
    pub outer_strategy: fsdp_outer_strategy,
    /// 0: FSDP_UNSHARD_MAPPED, but FSDP_UNSHARD_COPIED with FSDP_CONTEXT_DEBUG and on a CUDA device, which has no
    /// other mode
    pub unshard_mode: fsdp_unshard_mode,
    /// dtype of full gradients; 0: the parameter's dtype. Give FSDP_FLOAT32 where several micro-batches add up in
    /// full gradients (FSDP_REDUCE_POLICY_LAST): 256 + 1 - 256 is 0 in bfloat16
    pub grad_dtype: fsdp_dtype,
    /// dtype to which gradients are rounded before they are summed in fp32; 0: grad_dtype
    pub reduce_dtype: fsdp_dtype,
    /// 0: FSDP_GRAD_OP_MEAN
    pub grad_op: fsdp_grad_op,
    /// 0: EACH, but LAST with FSDP_STRATEGY_NO_SHARD; FSDP_STRATEGY_OPTIM always has LAST
    pub reduce_policy: fsdp_reduce_policy,
    /// counts only with FSDP_GRAD_OP_FACTOR, where it is finite and not 0
    pub grad_factor: f64,
    /// 0: FSDP_OPTIMIZER_ADAMW
    pub optimizer: fsdp_optimizer,
    /// number of transient full gradient buffers alive at once, besides one for each FSDP_GROUP_ROOT; 0: 2
    pub max_pending_groups: u32,
    /// for this number of next visits (of groups, or of pieces) there is room to gather ahead; 0: 1, but none with
    /// FSDP_MODEL_NO_PREFETCH
    pub prefetch_depth: u32,
    /// kind of views of weights that are not copied; 0: FSDP_VIEWS_READ_ONLY, the only kind on a CUDA device
    pub view_kind: fsdp_view_kind,
    /// limit of the bytes that are gathered ahead by prefetch; 0: no limit
    pub prefetch_bytes: u64,
    /// memory of role STAGING for saves, at least 32 MiB. A save copies its data into this memory and writes it from
    /// there. The update window opens when all data is copied: if the memory is smaller than the data, the caller
    /// waits for the disk. 0: none is planned, and each save takes 32 MiB while it runs
    pub save_staging_bytes: u64,
    /// 0: FSDP_SCALE_EXACT
    pub scale_rounding: fsdp_scale_rounding,
    /// dtype to which main weights are rounded before they are quantized. 0: FSDP_FLOAT32, no rounding. With
    /// FSDP_BFLOAT16 codes are rounded twice, and scales come from rounded magnitudes too. MXFP8 with FSDP_BFLOAT16
    /// and FSDP_SCALE_ROUND_UP has the bits of TransformerEngine, except in blocks with a NaN
    pub quantize_from: fsdp_dtype,
    /// 0: FSDP_SCALE_ROUND_UP
    pub scale_rule: fsdp_scale_rule,
    /// 0: FSDP_PLANES_BY_PHASE
    pub plane_policy: fsdp_plane_policy,
    /// limit of the bytes of all transient full gradient buffers. A group that does not fit is divided into parts of
    /// consecutive parameters. Each part is lent and reduced by itself: it is reduced once fsdp_complete_grad was
    /// called for all of its parameters. max_pending_groups then counts parts; if that many do not fit, fewer are
    /// alive at once. A single parameter is never divided. Debug mode needs more memory. 0: no limit, and each group
    /// is one part
    pub max_pending_bytes: u64,
    /// 0: FSDP_MAIN_FLOAT32
    pub main_storage: fsdp_main_storage,
    /// must be 0
    pub reserved: u32,
    /// with FSDP_MAIN_NONE: the key of the random bits; any number, but the same on every rank
    pub rounding_seed: u64,
    /// limit of the matrices that one rank gets at once (fsdp_collect_matrices). A matrix counts with its bytes in
    /// fp32, rounded up to 256 bytes; one above the limit is refused. The model has memory for at most twice the
    /// limit, and for rows of other ranks' matrices. 0: 64 MiB, or the largest matrix if that is larger
    pub matrix_bytes: u64,
    /// of optimizer states; 0: FSDP_HOME_DEVICE. With FSDP_HOME_FILE the scales of states in codes
    /// (FSDP_OPTIMIZER_ADAMW_8BIT) stay in memory
    pub state_home: fsdp_home,
    /// of main weights that are not the compute weights, or of their rests (FSDP_MAIN_SPLIT16); 0: FSDP_HOME_DEVICE.
    /// With FSDP_HOME_FILE no trained parameter can be quantized
    pub main_home: fsdp_home,
    /// directory for the file of this rank, on a local disk; ranks may have different ones. Counts only with
    /// FSDP_HOME_FILE, which needs it
    pub home_directory: *const c_char,
    /// limit of the bytes of one segment of the file, at least 65536; 0: 64 MiB
    pub turn_bytes: u64,
    /// number of buffers of turn_bytes (role STAGING), from 2 to 16: one segment is updated while the next is read
    /// and the last is written; 0: 3
    pub turns: u32,
    /// of main gradients that have memory of their own. Gradients of FSDP_STRATEGY_NO_SHARD, and sums that
    /// FSDP_REDUCE_POLICY_LAST makes in full gradients, stay where they are. If no others are left, the seal refuses
    /// a home. 0: FSDP_HOME_DEVICE. With FSDP_HOME_FILE a reduce makes its sums in one of two buffers (role STAGING),
    /// and a thread of the library writes them to the file. A later contribution reads them first, and adds to them
    pub grad_home: fsdp_home,
}

impl Default for fsdp_model_options {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// ```text
/// One stop of an explicit schedule. group_index counts groups in the order of their creation. This struct may grow, so
///  arrays of it come with a stride.
/// ```
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_visit {
    pub group_index: u32,
    /// FSDP_FORWARD, FSDP_BACKWARD, or FSDP_RECOMPUTE. Weights of RECOMPUTE visits are gathered ahead as well; in a
    /// schedule without such visits a recompute belongs to a BACKWARD visit
    pub phase: fsdp_phase,
    /// 0: the whole group; FSDP_PIECE(p), not p itself: its piece p. If any visit names a piece of the group, each of
    /// its pieces has a buffer of its own, planned for the visits of the piece and of the group
    pub piece: u32,
}

impl Default for fsdp_visit {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let made: Self = unsafe { std::mem::zeroed() };
        made
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_schedule_options {
    pub struct_size: u64,
    /// counts only with FSDP_SCHEDULE_VISITS; every trainable group needs a BACKWARD visit
    pub visits: *const fsdp_visit,
    pub visit_count: u64,
    /// sizeof(fsdp_visit); counts only with visits
    pub visit_stride: u64,
    /// with FSDP_SCHEDULE_ANY: number of buffers for copied weights, one for each group that is held or gathered
    /// ahead (if planes are gathered by phase, see fsdp_plane_policy, one for each set of planes); 0: 4. Other
    /// schedules need 0
    pub held_groups: u32,
    /// must be 0
    pub reserved: u32,
}

impl Default for fsdp_schedule_options {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// The size and layout of a sealed model, the same on every rank. Output only: set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_model_info {
    pub struct_size: u64,
    pub group_count: u64,
    /// number of parameters in all groups
    pub param_count: u64,
    /// elements of all whole parameters that this rank declares, without padding
    pub element_count: u64,
    /// elements of padding in what this rank declares, counted over all ranks of its meshes
    pub padding_count: u64,
    /// size of the pool of gathered weights
    pub gather_pool_bytes: u64,
    /// gathered bytes alive at the schedule's peak: no pool can be smaller
    pub gather_lower_bound_bytes: u64,
    /// size of the pool of full gradients
    pub reduce_pool_bytes: u64,
    /// bytes of full gradients alive at the peak: no pool can be smaller
    pub reduce_lower_bound_bytes: u64,
    pub layout_hash: u64,
}

impl Default for fsdp_model_info {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// Counters of a model on one rank since its seal. Output only: set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_stats {
    pub struct_size: u64,
    /// version of the published weights, from 1; 0: none yet
    pub version: u64,
    /// number of the last AdamW step; 0: none yet
    pub step: u64,
    /// times that weights became gathered, also if no bytes were moved
    pub gathers: u64,
    /// collectives that moved bytes
    pub all_gathers: u64,
    /// bytes that these collectives copied on this rank
    pub gathered_bytes: u64,
    /// number of groups gathered now
    pub gathered_groups: u64,
    pub peak_gathered_groups: u64,
    /// gathers started ahead
    pub prefetches: u64,
    /// gathers started ahead whose weights were given back unused
    pub dropped_prefetches: u64,
    /// contributions reduced; each part of a group counts. 0 if there is one rank
    pub reduces: u64,
    /// bytes that this rank has read in these reduces, of the full gradients of all ranks
    pub reduced_bytes: u64,
    /// number of reduce-scatter collectives
    pub reduce_scatters: u64,
    /// bytes that they read on this rank
    pub reduce_scatter_bytes: u64,
    /// number of all-reduce collectives
    pub all_reduces: u64,
    /// bytes that they read on this rank, in both halves: the sum and the gather
    pub all_reduce_bytes: u64,
    /// transient full-gradient buffers in use now; each belongs to a group or a part
    pub pending_grad_groups: u64,
    pub peak_pending_grad_groups: u64,
    pub outer_all_gathers: u64,
    pub outer_reduce_scatters: u64,
    pub outer_all_reduces: u64,
    /// bytes that this rank has sent in these collectives
    pub outer_sent_bytes: u64,
    /// the sum of the next three
    pub wait_ns: u64,
    /// waits for copies of weights
    pub gather_wait_ns: u64,
    /// waits for reduces to end, or for a gradient buffer to be free
    pub reduce_wait_ns: u64,
    /// waits for peers to publish, to end the step, to exchange norms and parameters
    pub peer_wait_ns: u64,
    /// the wait of the rank that waited longest, minus that of the rank that waited least
    pub last_rank_lag_ns: u64,
    /// the rank that waited least, so that all other ranks have waited for it; -1: none yet, or a mesh of one
    pub last_rank: i32,
    /// 0
    pub reserved: u32,
    /// allocations of memory for roles, shared or not, by all models of the context since the context was made
    pub allocations: u64,
    /// time that the caller waited at the opening of update windows, because a save was still copying memory that may
    /// be written in the window; not a part of wait_ns
    pub checkpoint_stall_ns: u64,
    /// bytes of ROW planes, including planes that serve all phases
    pub gathered_row_bytes: u64,
    /// bytes of COLUMN planes, which only MXFP8 has
    pub gathered_column_bytes: u64,
    /// bytes read from the file
    pub home_read_bytes: u64,
    /// bytes written to the file
    pub home_written_bytes: u64,
    /// time that calls waited for the disk, but for fsdp_reduce_grad; not in wait_ns
    pub home_wait_ns: u64,
}

impl Default for fsdp_stats {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_param {
    pub struct_size: u64,
    /// unique in the model, 1-255 bytes
    pub name: *const c_char,
    /// dimension_count sizes of 1 or more, in C order; copied
    pub shape: *const u64,
    /// at most 16; 0: a scalar
    pub dimension_count: u32,
    /// dtype of the compute weights, unless the parameter is quantized; 0: FSDP_FLOAT32. Only a FROZEN parameter that
    /// is not quantized can have FSDP_UINT8
    pub dtype: fsdp_dtype,
    /// FSDP_PARAM_\*
    pub flags: u32,
    /// 0: FSDP_GRANULE_ROW
    pub granule: fsdp_granule,
    /// number of rows in a block; counts only with FSDP_GRANULE_BLOCK. A number above the parameter's rows means all
    /// of its rows. For a parameter that is quantized in blocks it must be a multiple of the rows of a block, also if
    /// it is above the parameter's rows. A block has 32 rows of a matrix with MXFP8 and 128 with FP8_BLOCK
    pub granule_rows: u64,
    /// 0: 1 (see FSDP_PARAM_LR_ZERO)
    pub lr_scale: f64,
    /// kept and returned by fsdp_get_param_info; never read
    pub user_data: *mut c_void,
    pub global_shape: *const u64,
    pub global_offset: *const u64,
    /// 0: none
    pub quantization: fsdp_quantization,
    /// 0: FSDP_MISSING_GRAD_ZEROS
    pub missing_grad: fsdp_missing_grad,
    /// in how many leading dimensions ranks may divide the parameter; 0: 1; at most dimension_count. A row spans the
    /// other dimensions. With 1, a stack of E matrices \[E, R, C\] has E rows of R x C elements. With 2 it has E x R
    /// rows of C elements, and a rank's part may begin inside a matrix. With dimension_count, every element is a row.
    /// The view of the weights stays one tensor \[E, R, C\]. granule_rows, fsdp_get_chunk, fsdp_load_chunk and
    /// fsdp_shard count these rows; fsdp_rename counts rows of the first dimension
    pub row_dimensions: u32,
    /// number of the piece of the group that the parameter is in. The first parameter of a group has piece 0; each
    /// later one has the piece of the parameter before it, or the next. fsdp_unshard_piece gathers a piece by itself.
    /// Each rank keeps an equal share of each piece, so each piece has padding of its own
    pub piece: u32,
    /// which optimizer updates the parameter; 0: the model's. With FSDP_OPTIMIZER_CALLER in a model with AdamW the
    /// caller updates it in the window: it has none of AdamW's states, and fsdp_step_adamw publishes its main weights
    /// as they are. FSDP_OPTIMIZER_ADAMW is legal in models with AdamW only, and means the model's AdamW, with states
    /// in fp32 or in 8 bits. A FROZEN parameter must have 0
    pub optimizer: fsdp_optimizer,
    /// 0: the parameter has none
    pub matrix: fsdp_matrix_layout,
    /// cuts the R rows of the last two dimensions into several matrices, for example into q, k and v: the number of
    /// rows of each. Their sum is R; copied. NULL: one matrix of R rows
    pub matrix_splits: *const u64,
    /// 0 with matrix_splits NULL
    pub matrix_split_count: u64,
}

impl Default for fsdp_param {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_group_options {
    pub struct_size: u64,
    /// FSDP_GROUP_\*
    pub flags: u32,
    /// 0: the model's
    pub strategy: fsdp_strategy,
    /// 0: the model's
    pub grad_dtype: fsdp_dtype,
    /// 0: the model's
    pub reduce_dtype: fsdp_dtype,
    /// 0: the model's
    pub main_storage: fsdp_main_storage,
    /// 0: FSDP_BACKWARD_WEIGHTS_GATHERED
    pub backward_weights: fsdp_backward_weights,
    /// the ranks that share this group; NULL: the model's mesh. They are some of the model's ranks, and this rank is
    /// one of them. The meshes that the model's ranks name for a group are equal in shape and disjoint, and together
    /// they have all ranks of the model (see fsdp_create_group)
    pub mesh: *const fsdp_mesh,
    /// 0: the model's. FSDP_GRAD_OP_MEAN divides by the number of the MODEL's ranks for every group, because the
    /// gradient of an expert is a sum over the tokens of all ranks. The seal refuses a mean for a trained group whose
    /// ranks may be tensor-parallel: if meshes have equal boxes, or if they have boxes of one tensor and no group is
    /// on the model's mesh
    pub grad_op: fsdp_grad_op,
    /// 0: the model's, if the mesh has replicas; FSDP_OUTER_OPTIM needs a mesh with replicas
    pub outer_strategy: fsdp_outer_strategy,
    /// counts only with FSDP_GRAD_OP_FACTOR in grad_op, where it is finite and not 0
    pub grad_factor: f64,
}

impl Default for fsdp_group_options {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// The declaration of a group, with defaults filled in. Output only: set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_group_info {
    pub struct_size: u64,
    pub name: *const c_char,
    pub param_count: u64,
    /// index in the order of creation
    pub group_index: u32,
    /// FSDP_GROUP_\*
    pub flags: u32,
    pub strategy: fsdp_strategy,
    pub reduce_policy: fsdp_reduce_policy,
    /// 0: the dtype of each parameter
    pub grad_dtype: fsdp_dtype,
    /// 0: the dtype of the gradient
    pub reduce_dtype: fsdp_dtype,
    pub main_storage: fsdp_main_storage,
    pub backward_weights: fsdp_backward_weights,
    /// at least 1
    pub piece_count: u64,
    /// shape of the group's mesh
    pub replicate_size: u32,
    pub shard_size: u32,
    pub grad_op: fsdp_grad_op,
    pub outer_strategy: fsdp_outer_strategy,
    /// the number by which sums of gradients are multiplied
    pub grad_factor: f64,
}

impl Default for fsdp_group_info {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// The part of a parameter that a rank has to load.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_chunk {
    pub struct_size: u64,
    /// offset in the parameter, in C order
    pub element_offset: u64,
    /// 0: this rank owns nothing of the parameter
    pub element_count: u64,
    /// rows as fsdp_param.row_dimensions makes them
    pub row_offset: u64,
    pub row_count: u64,
}

impl Default for fsdp_chunk {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// ```text
/// The part of one parameter that this rank owns. A FROZEN parameter has no shard, and neither has a parameter of which
///  this rank owns nothing.
/// ```
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_shard {
    pub struct_size: u64,
    pub group: *mut fsdp_group,
    pub param_index: u64,
    pub name: *const c_char,
    /// element_count elements; writable in the update window only. NULL with FSDP_MAIN_SPLIT16, or at home in a file
    pub main_weight: *mut c_void,
    /// element_count elements; complete in the update window. NULL at home in a file
    pub main_grad: *mut c_void,
    /// FSDP_FLOAT32; FSDP_BFLOAT16 with FSDP_MAIN_NONE; 0 with FSDP_MAIN_SPLIT16
    pub main_weight_dtype: fsdp_dtype,
    /// FSDP_FLOAT32
    pub main_grad_dtype: fsdp_dtype,
    /// offset of the first element in the parameter
    pub element_offset: u64,
    /// never 0
    pub element_count: u64,
    /// rows as fsdp_param.row_dimensions makes them
    pub row_offset: u64,
    pub row_count: u64,
    /// the current value, at the time of this call
    pub lr_scale: f64,
    /// FSDP_PARAM_\*, the current value. FSDP_PARAM_FROZEN means here that this step must leave weights and states
    /// unchanged, because of fsdp_set_param_trainable or FSDP_MISSING_GRAD_SKIP
    pub flags: u32,
    /// number of optimizer states that the parameter has: AdamW's two first, then one for each call of
    /// fsdp_add_optimizer_state, in call order (see fsdp_param.optimizer)
    pub state_count: u32,
}

impl Default for fsdp_shard {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_adamw_options {
    pub struct_size: u64,
    /// 0: 0.9 (see FSDP_ADAMW_BETA1_ZERO)
    pub beta1: f64,
    /// 0: 0.999 (see FSDP_ADAMW_BETA2_ZERO)
    pub beta2: f64,
    /// 0: 1e-8 (see FSDP_ADAMW_EPSILON_ZERO)
    pub epsilon: f64,
    /// 0: none
    pub weight_decay: f64,
    /// the number of this step, from 1; 0: one more than the last step's number
    pub step: u64,
    /// FSDP_ADAMW_\*
    pub flags: u32,
    /// must be 0
    pub reserved: u32,
}

impl Default for fsdp_adamw_options {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// ```text
/// One or more whole matrices of equal size that this rank owns: rows of a parameter with fsdp_param.matrix.
///  Output only: set struct_size before the call.
/// ```
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_matrix {
    pub struct_size: u64,
    pub group: *mut fsdp_group,
    /// name of the parameter
    pub name: *const c_char,
    pub param_index: u64,
    /// index of the first matrix, if the dimensions before the last two are taken as one
    pub batch_index: u64,
    /// index in matrix_splits
    pub split_index: u64,
    /// first row of the split
    pub row_offset: u64,
    pub rows: u64,
    pub columns: u64,
    /// number of matrices: those of batch_index, batch_index + 1 and so on
    pub count: u64,
    /// bytes from one matrix to the next
    pub stride_bytes: u64,
    /// rows x columns numbers in C order; to be changed in place. NULL: there are no more
    pub data: *mut c_void,
    /// of data
    pub dtype: fsdp_dtype,
    pub reserved: u32,
}

impl Default for fsdp_matrix {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_matrix_options {
    pub struct_size: u64,
    /// what is collected: NULL for the main grads, "main_weight", or the name of a state
    pub source: *const c_char,
    /// where returned matrices are written, named like source; NULL: to the source
    pub target: *const c_char,
    /// of the matrices, and of messages between ranks; 0: FSDP_FLOAT32
    pub dtype: fsdp_dtype,
    /// must be 0
    pub reserved: u32,
}

impl Default for fsdp_matrix_options {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// One full gradient for fsdp_apply_grads. This struct may grow, so arrays of it come with a stride.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_grad {
    /// NULL: there is no gradient; it counts as zeros (but see fsdp_missing_grad)
    pub data: *const c_void,
    pub element_count: u64,
    pub dtype: fsdp_dtype,
    /// must be 0
    pub reserved: u32,
}

impl Default for fsdp_grad {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let made: Self = unsafe { std::mem::zeroed() };
        made
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_save_options {
    pub struct_size: u64,
    /// the checkpoint's step, at most 2^53. 0: the number of AdamW's last step; with FSDP_OPTIMIZER_CALLER the step
    /// of the loaded checkpoint plus the number of updates published since. The first publish of loaded or initial
    /// weights is not such an update
    pub step: u64,
    /// number of the folder's newest checkpoints that stay, besides the loaded one; 0: all stay
    pub keep: u32,
    /// FSDP_SAVE_\*
    pub flags: u32,
}

impl Default for fsdp_save_options {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_load_options {
    pub struct_size: u64,
    /// FSDP_LOAD_\*
    pub flags: u32,
    /// must be 0
    pub reserved: u32,
}

impl Default for fsdp_load_options {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// What a load has done. Output only: set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_loaded {
    pub struct_size: u64,
    /// the checkpoint's step
    pub step: u64,
    /// the checkpoint's number, which rises with every checkpoint of a folder
    pub sequence: u64,
    /// bytes of the checkpoint's files that this rank keeps; with ONE_REPLICA its share of them
    pub wanted_bytes: u64,
    /// bytes that this rank has read for them: files are read and verified in blocks of 256 KiB
    pub read_bytes: u64,
    /// number of ranks of the job that saved the checkpoint
    pub ranks: u32,
    /// number of damaged checkpoints that FALLBACK has passed over; each of them is, or may be, newer than the loaded
    /// one. The same on every rank
    pub passed_over: u32,
    /// the checkpoint's name in the folder, "step-0000001200". It is "" if FSDP_LOAD_IF_ANY has loaded nothing, and
    /// always after fsdp_load_weights, which has no checkpoint; step, sequence and ranks are then 0
    pub name: [c_char; 32],
    /// tensors of the model that the files have: weights and, unless WEIGHTS_ONLY, states
    pub loaded_tensors: u64,
    /// tensors of the model that the files lack; with ALLOW_MISSING they stay as they were
    pub missing_tensors: u64,
    /// tensors of the files that the model lacks, see FSDP_LOAD_ALLOW_UNEXPECTED
    pub unexpected_tensors: u64,
}

impl Default for fsdp_loaded {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

/// ```text
/// Which rows of a tensor in another program's files become which rows of a parameter. "theirs" is the tensor in the
///  files, "ours" the parameter of the model. This struct may grow, so arrays of it come with a stride.
/// ```
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_rename {
    /// the tensor's name in the files; one '\*' in it stands for any text
    pub theirs: *const c_char,
    /// the parameter's name; a '\*' in it stands for the same text
    pub ours: *const c_char,
    /// the first row of theirs, counted after it was transposed
    pub from_row: u64,
    /// the row of ours that from_row becomes
    pub to_row: u64,
    /// 0: all rows of theirs from from_row on
    pub row_count: u64,
    /// FSDP_RENAME_\*
    pub flags: u32,
    /// must be 0
    pub reserved: u32,
}

impl Default for fsdp_rename {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let made: Self = unsafe { std::mem::zeroed() };
        made
    }
}

/// The progress of a checkpoint. Output only: set struct_size before the call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct fsdp_checkpoint_status {
    pub struct_size: u64,
    pub state: fsdp_checkpoint_state,
    /// if FAILED: the status that fsdp_wait_checkpoint returns
    pub status: fsdp_status,
    /// bytes of its files that this rank has written
    pub bytes: u64,
    /// bytes of its files that this rank will have written; if OPENED: bytes of all its files
    pub bytes_in_all: u64,
    /// the checkpoint's step, once it is known
    pub step: u64,
    /// if OPENED: number of ranks that have saved it
    pub ranks: u32,
    /// 0
    pub reserved: u32,
    /// the checkpoint's name in the folder, "step-0000001200"; "" if it is not committed
    pub name: [c_char; 32],
}

impl Default for fsdp_checkpoint_status {
    fn default() -> Self {
        // SAFETY: zero is a value of every field: integers, doubles, null pointers, no hook.
        let mut made: Self = unsafe { std::mem::zeroed() };
        made.struct_size = std::mem::size_of::<Self>() as u64;
        made
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! offset {
        ($kind:ident, $field:ident) => {{
            let made = $kind::default();
            std::ptr::addr_of!(made.$field) as usize - std::ptr::addr_of!(made) as usize
        }};
    }

    #[test]
    fn fsdp_error_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_error>(), 1056);
        assert_eq!(offset!(fsdp_error, struct_size), 0);
        assert_eq!(offset!(fsdp_error, status), 8);
        assert_eq!(offset!(fsdp_error, origin), 12);
        assert_eq!(offset!(fsdp_error, origin_code), 16);
        assert_eq!(offset!(fsdp_error, rank), 24);
        assert_eq!(offset!(fsdp_error, context_failed), 28);
        assert_eq!(offset!(fsdp_error, message), 32);
    }

    #[test]
    fn fsdp_tensor_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_tensor>(), 56);
        assert_eq!(offset!(fsdp_tensor, struct_size), 0);
        assert_eq!(offset!(fsdp_tensor, data), 8);
        assert_eq!(offset!(fsdp_tensor, shape), 16);
        assert_eq!(offset!(fsdp_tensor, element_count), 24);
        assert_eq!(offset!(fsdp_tensor, dimension_count), 32);
        assert_eq!(offset!(fsdp_tensor, dtype), 36);
        assert_eq!(offset!(fsdp_tensor, element_size), 40);
        assert_eq!(offset!(fsdp_tensor, flags), 44);
        assert_eq!(offset!(fsdp_tensor, device), 48);
        assert_eq!(offset!(fsdp_tensor, device_index), 52);
    }

    #[test]
    fn fsdp_context_options_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_context_options>(), 144);
        assert_eq!(offset!(fsdp_context_options, struct_size), 0);
        assert_eq!(offset!(fsdp_context_options, flags), 8);
        assert_eq!(offset!(fsdp_context_options, world_size), 12);
        assert_eq!(offset!(fsdp_context_options, rank), 16);
        assert_eq!(offset!(fsdp_context_options, ranks_per_host), 20);
        assert_eq!(offset!(fsdp_context_options, rendezvous), 24);
        assert_eq!(offset!(fsdp_context_options, device), 32);
        assert_eq!(offset!(fsdp_context_options, device_index), 36);
        assert_eq!(offset!(fsdp_context_options, device_transport), 40);
        assert_eq!(offset!(fsdp_context_options, timeout_ms), 44);
        assert_eq!(offset!(fsdp_context_options, heartbeat_timeout_ms), 48);
        assert_eq!(offset!(fsdp_context_options, log_level), 52);
        assert_eq!(offset!(fsdp_context_options, interrupted_flag), 56);
        assert_eq!(offset!(fsdp_context_options, interrupted), 64);
        assert_eq!(offset!(fsdp_context_options, interrupted_data), 72);
        assert_eq!(offset!(fsdp_context_options, log), 80);
        assert_eq!(offset!(fsdp_context_options, log_data), 88);
        assert_eq!(offset!(fsdp_context_options, trace_directory), 96);
        assert_eq!(offset!(fsdp_context_options, trace_events), 104);
        assert_eq!(offset!(fsdp_context_options, flight_directory), 112);
        assert_eq!(offset!(fsdp_context_options, flight_events), 120);
        assert_eq!(offset!(fsdp_context_options, debug_delay_us), 124);
        assert_eq!(offset!(fsdp_context_options, debug_delay_seed), 128);
        assert_eq!(offset!(fsdp_context_options, debug_failed_allocation), 136);
    }

    #[test]
    fn fsdp_mesh_options_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_mesh_options>(), 32);
        assert_eq!(offset!(fsdp_mesh_options, struct_size), 0);
        assert_eq!(offset!(fsdp_mesh_options, replicate_size), 8);
        assert_eq!(offset!(fsdp_mesh_options, shard_size), 12);
        assert_eq!(offset!(fsdp_mesh_options, ranks), 16);
        assert_eq!(offset!(fsdp_mesh_options, rank_count), 24);
        assert_eq!(offset!(fsdp_mesh_options, reduction_block_size), 28);
    }

    #[test]
    fn fsdp_model_options_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_model_options>(), 168);
        assert_eq!(offset!(fsdp_model_options, struct_size), 0);
        assert_eq!(offset!(fsdp_model_options, mesh), 8);
        assert_eq!(offset!(fsdp_model_options, flags), 16);
        assert_eq!(offset!(fsdp_model_options, strategy), 20);
        assert_eq!(offset!(fsdp_model_options, outer_strategy), 24);
        assert_eq!(offset!(fsdp_model_options, unshard_mode), 28);
        assert_eq!(offset!(fsdp_model_options, grad_dtype), 32);
        assert_eq!(offset!(fsdp_model_options, reduce_dtype), 36);
        assert_eq!(offset!(fsdp_model_options, grad_op), 40);
        assert_eq!(offset!(fsdp_model_options, reduce_policy), 44);
        assert_eq!(offset!(fsdp_model_options, grad_factor), 48);
        assert_eq!(offset!(fsdp_model_options, optimizer), 56);
        assert_eq!(offset!(fsdp_model_options, max_pending_groups), 60);
        assert_eq!(offset!(fsdp_model_options, prefetch_depth), 64);
        assert_eq!(offset!(fsdp_model_options, view_kind), 68);
        assert_eq!(offset!(fsdp_model_options, prefetch_bytes), 72);
        assert_eq!(offset!(fsdp_model_options, save_staging_bytes), 80);
        assert_eq!(offset!(fsdp_model_options, scale_rounding), 88);
        assert_eq!(offset!(fsdp_model_options, quantize_from), 92);
        assert_eq!(offset!(fsdp_model_options, scale_rule), 96);
        assert_eq!(offset!(fsdp_model_options, plane_policy), 100);
        assert_eq!(offset!(fsdp_model_options, max_pending_bytes), 104);
        assert_eq!(offset!(fsdp_model_options, main_storage), 112);
        assert_eq!(offset!(fsdp_model_options, reserved), 116);
        assert_eq!(offset!(fsdp_model_options, rounding_seed), 120);
        assert_eq!(offset!(fsdp_model_options, matrix_bytes), 128);
        assert_eq!(offset!(fsdp_model_options, state_home), 136);
        assert_eq!(offset!(fsdp_model_options, main_home), 140);
        assert_eq!(offset!(fsdp_model_options, home_directory), 144);
        assert_eq!(offset!(fsdp_model_options, turn_bytes), 152);
        assert_eq!(offset!(fsdp_model_options, turns), 160);
        assert_eq!(offset!(fsdp_model_options, grad_home), 164);
    }

    #[test]
    fn fsdp_visit_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_visit>(), 12);
        assert_eq!(offset!(fsdp_visit, group_index), 0);
        assert_eq!(offset!(fsdp_visit, phase), 4);
        assert_eq!(offset!(fsdp_visit, piece), 8);
    }

    #[test]
    fn fsdp_schedule_options_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_schedule_options>(), 40);
        assert_eq!(offset!(fsdp_schedule_options, struct_size), 0);
        assert_eq!(offset!(fsdp_schedule_options, visits), 8);
        assert_eq!(offset!(fsdp_schedule_options, visit_count), 16);
        assert_eq!(offset!(fsdp_schedule_options, visit_stride), 24);
        assert_eq!(offset!(fsdp_schedule_options, held_groups), 32);
        assert_eq!(offset!(fsdp_schedule_options, reserved), 36);
    }

    #[test]
    fn fsdp_model_info_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_model_info>(), 80);
        assert_eq!(offset!(fsdp_model_info, struct_size), 0);
        assert_eq!(offset!(fsdp_model_info, group_count), 8);
        assert_eq!(offset!(fsdp_model_info, param_count), 16);
        assert_eq!(offset!(fsdp_model_info, element_count), 24);
        assert_eq!(offset!(fsdp_model_info, padding_count), 32);
        assert_eq!(offset!(fsdp_model_info, gather_pool_bytes), 40);
        assert_eq!(offset!(fsdp_model_info, gather_lower_bound_bytes), 48);
        assert_eq!(offset!(fsdp_model_info, reduce_pool_bytes), 56);
        assert_eq!(offset!(fsdp_model_info, reduce_lower_bound_bytes), 64);
        assert_eq!(offset!(fsdp_model_info, layout_hash), 72);
    }

    #[test]
    fn fsdp_stats_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_stats>(), 280);
        assert_eq!(offset!(fsdp_stats, struct_size), 0);
        assert_eq!(offset!(fsdp_stats, version), 8);
        assert_eq!(offset!(fsdp_stats, step), 16);
        assert_eq!(offset!(fsdp_stats, gathers), 24);
        assert_eq!(offset!(fsdp_stats, all_gathers), 32);
        assert_eq!(offset!(fsdp_stats, gathered_bytes), 40);
        assert_eq!(offset!(fsdp_stats, gathered_groups), 48);
        assert_eq!(offset!(fsdp_stats, peak_gathered_groups), 56);
        assert_eq!(offset!(fsdp_stats, prefetches), 64);
        assert_eq!(offset!(fsdp_stats, dropped_prefetches), 72);
        assert_eq!(offset!(fsdp_stats, reduces), 80);
        assert_eq!(offset!(fsdp_stats, reduced_bytes), 88);
        assert_eq!(offset!(fsdp_stats, reduce_scatters), 96);
        assert_eq!(offset!(fsdp_stats, reduce_scatter_bytes), 104);
        assert_eq!(offset!(fsdp_stats, all_reduces), 112);
        assert_eq!(offset!(fsdp_stats, all_reduce_bytes), 120);
        assert_eq!(offset!(fsdp_stats, pending_grad_groups), 128);
        assert_eq!(offset!(fsdp_stats, peak_pending_grad_groups), 136);
        assert_eq!(offset!(fsdp_stats, outer_all_gathers), 144);
        assert_eq!(offset!(fsdp_stats, outer_reduce_scatters), 152);
        assert_eq!(offset!(fsdp_stats, outer_all_reduces), 160);
        assert_eq!(offset!(fsdp_stats, outer_sent_bytes), 168);
        assert_eq!(offset!(fsdp_stats, wait_ns), 176);
        assert_eq!(offset!(fsdp_stats, gather_wait_ns), 184);
        assert_eq!(offset!(fsdp_stats, reduce_wait_ns), 192);
        assert_eq!(offset!(fsdp_stats, peer_wait_ns), 200);
        assert_eq!(offset!(fsdp_stats, last_rank_lag_ns), 208);
        assert_eq!(offset!(fsdp_stats, last_rank), 216);
        assert_eq!(offset!(fsdp_stats, reserved), 220);
        assert_eq!(offset!(fsdp_stats, allocations), 224);
        assert_eq!(offset!(fsdp_stats, checkpoint_stall_ns), 232);
        assert_eq!(offset!(fsdp_stats, gathered_row_bytes), 240);
        assert_eq!(offset!(fsdp_stats, gathered_column_bytes), 248);
        assert_eq!(offset!(fsdp_stats, home_read_bytes), 256);
        assert_eq!(offset!(fsdp_stats, home_written_bytes), 264);
        assert_eq!(offset!(fsdp_stats, home_wait_ns), 272);
    }

    #[test]
    fn fsdp_param_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_param>(), 120);
        assert_eq!(offset!(fsdp_param, struct_size), 0);
        assert_eq!(offset!(fsdp_param, name), 8);
        assert_eq!(offset!(fsdp_param, shape), 16);
        assert_eq!(offset!(fsdp_param, dimension_count), 24);
        assert_eq!(offset!(fsdp_param, dtype), 28);
        assert_eq!(offset!(fsdp_param, flags), 32);
        assert_eq!(offset!(fsdp_param, granule), 36);
        assert_eq!(offset!(fsdp_param, granule_rows), 40);
        assert_eq!(offset!(fsdp_param, lr_scale), 48);
        assert_eq!(offset!(fsdp_param, user_data), 56);
        assert_eq!(offset!(fsdp_param, global_shape), 64);
        assert_eq!(offset!(fsdp_param, global_offset), 72);
        assert_eq!(offset!(fsdp_param, quantization), 80);
        assert_eq!(offset!(fsdp_param, missing_grad), 84);
        assert_eq!(offset!(fsdp_param, row_dimensions), 88);
        assert_eq!(offset!(fsdp_param, piece), 92);
        assert_eq!(offset!(fsdp_param, optimizer), 96);
        assert_eq!(offset!(fsdp_param, matrix), 100);
        assert_eq!(offset!(fsdp_param, matrix_splits), 104);
        assert_eq!(offset!(fsdp_param, matrix_split_count), 112);
    }

    #[test]
    fn fsdp_group_options_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_group_options>(), 56);
        assert_eq!(offset!(fsdp_group_options, struct_size), 0);
        assert_eq!(offset!(fsdp_group_options, flags), 8);
        assert_eq!(offset!(fsdp_group_options, strategy), 12);
        assert_eq!(offset!(fsdp_group_options, grad_dtype), 16);
        assert_eq!(offset!(fsdp_group_options, reduce_dtype), 20);
        assert_eq!(offset!(fsdp_group_options, main_storage), 24);
        assert_eq!(offset!(fsdp_group_options, backward_weights), 28);
        assert_eq!(offset!(fsdp_group_options, mesh), 32);
        assert_eq!(offset!(fsdp_group_options, grad_op), 40);
        assert_eq!(offset!(fsdp_group_options, outer_strategy), 44);
        assert_eq!(offset!(fsdp_group_options, grad_factor), 48);
    }

    #[test]
    fn fsdp_group_info_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_group_info>(), 88);
        assert_eq!(offset!(fsdp_group_info, struct_size), 0);
        assert_eq!(offset!(fsdp_group_info, name), 8);
        assert_eq!(offset!(fsdp_group_info, param_count), 16);
        assert_eq!(offset!(fsdp_group_info, group_index), 24);
        assert_eq!(offset!(fsdp_group_info, flags), 28);
        assert_eq!(offset!(fsdp_group_info, strategy), 32);
        assert_eq!(offset!(fsdp_group_info, reduce_policy), 36);
        assert_eq!(offset!(fsdp_group_info, grad_dtype), 40);
        assert_eq!(offset!(fsdp_group_info, reduce_dtype), 44);
        assert_eq!(offset!(fsdp_group_info, main_storage), 48);
        assert_eq!(offset!(fsdp_group_info, backward_weights), 52);
        assert_eq!(offset!(fsdp_group_info, piece_count), 56);
        assert_eq!(offset!(fsdp_group_info, replicate_size), 64);
        assert_eq!(offset!(fsdp_group_info, shard_size), 68);
        assert_eq!(offset!(fsdp_group_info, grad_op), 72);
        assert_eq!(offset!(fsdp_group_info, outer_strategy), 76);
        assert_eq!(offset!(fsdp_group_info, grad_factor), 80);
    }

    #[test]
    fn fsdp_chunk_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_chunk>(), 40);
        assert_eq!(offset!(fsdp_chunk, struct_size), 0);
        assert_eq!(offset!(fsdp_chunk, element_offset), 8);
        assert_eq!(offset!(fsdp_chunk, element_count), 16);
        assert_eq!(offset!(fsdp_chunk, row_offset), 24);
        assert_eq!(offset!(fsdp_chunk, row_count), 32);
    }

    #[test]
    fn fsdp_shard_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_shard>(), 104);
        assert_eq!(offset!(fsdp_shard, struct_size), 0);
        assert_eq!(offset!(fsdp_shard, group), 8);
        assert_eq!(offset!(fsdp_shard, param_index), 16);
        assert_eq!(offset!(fsdp_shard, name), 24);
        assert_eq!(offset!(fsdp_shard, main_weight), 32);
        assert_eq!(offset!(fsdp_shard, main_grad), 40);
        assert_eq!(offset!(fsdp_shard, main_weight_dtype), 48);
        assert_eq!(offset!(fsdp_shard, main_grad_dtype), 52);
        assert_eq!(offset!(fsdp_shard, element_offset), 56);
        assert_eq!(offset!(fsdp_shard, element_count), 64);
        assert_eq!(offset!(fsdp_shard, row_offset), 72);
        assert_eq!(offset!(fsdp_shard, row_count), 80);
        assert_eq!(offset!(fsdp_shard, lr_scale), 88);
        assert_eq!(offset!(fsdp_shard, flags), 96);
        assert_eq!(offset!(fsdp_shard, state_count), 100);
    }

    #[test]
    fn fsdp_adamw_options_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_adamw_options>(), 56);
        assert_eq!(offset!(fsdp_adamw_options, struct_size), 0);
        assert_eq!(offset!(fsdp_adamw_options, beta1), 8);
        assert_eq!(offset!(fsdp_adamw_options, beta2), 16);
        assert_eq!(offset!(fsdp_adamw_options, epsilon), 24);
        assert_eq!(offset!(fsdp_adamw_options, weight_decay), 32);
        assert_eq!(offset!(fsdp_adamw_options, step), 40);
        assert_eq!(offset!(fsdp_adamw_options, flags), 48);
        assert_eq!(offset!(fsdp_adamw_options, reserved), 52);
    }

    #[test]
    fn fsdp_matrix_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_matrix>(), 104);
        assert_eq!(offset!(fsdp_matrix, struct_size), 0);
        assert_eq!(offset!(fsdp_matrix, group), 8);
        assert_eq!(offset!(fsdp_matrix, name), 16);
        assert_eq!(offset!(fsdp_matrix, param_index), 24);
        assert_eq!(offset!(fsdp_matrix, batch_index), 32);
        assert_eq!(offset!(fsdp_matrix, split_index), 40);
        assert_eq!(offset!(fsdp_matrix, row_offset), 48);
        assert_eq!(offset!(fsdp_matrix, rows), 56);
        assert_eq!(offset!(fsdp_matrix, columns), 64);
        assert_eq!(offset!(fsdp_matrix, count), 72);
        assert_eq!(offset!(fsdp_matrix, stride_bytes), 80);
        assert_eq!(offset!(fsdp_matrix, data), 88);
        assert_eq!(offset!(fsdp_matrix, dtype), 96);
        assert_eq!(offset!(fsdp_matrix, reserved), 100);
    }

    #[test]
    fn fsdp_matrix_options_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_matrix_options>(), 32);
        assert_eq!(offset!(fsdp_matrix_options, struct_size), 0);
        assert_eq!(offset!(fsdp_matrix_options, source), 8);
        assert_eq!(offset!(fsdp_matrix_options, target), 16);
        assert_eq!(offset!(fsdp_matrix_options, dtype), 24);
        assert_eq!(offset!(fsdp_matrix_options, reserved), 28);
    }

    #[test]
    fn fsdp_grad_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_grad>(), 24);
        assert_eq!(offset!(fsdp_grad, data), 0);
        assert_eq!(offset!(fsdp_grad, element_count), 8);
        assert_eq!(offset!(fsdp_grad, dtype), 16);
        assert_eq!(offset!(fsdp_grad, reserved), 20);
    }

    #[test]
    fn fsdp_save_options_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_save_options>(), 24);
        assert_eq!(offset!(fsdp_save_options, struct_size), 0);
        assert_eq!(offset!(fsdp_save_options, step), 8);
        assert_eq!(offset!(fsdp_save_options, keep), 16);
        assert_eq!(offset!(fsdp_save_options, flags), 20);
    }

    #[test]
    fn fsdp_load_options_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_load_options>(), 16);
        assert_eq!(offset!(fsdp_load_options, struct_size), 0);
        assert_eq!(offset!(fsdp_load_options, flags), 8);
        assert_eq!(offset!(fsdp_load_options, reserved), 12);
    }

    #[test]
    fn fsdp_loaded_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_loaded>(), 104);
        assert_eq!(offset!(fsdp_loaded, struct_size), 0);
        assert_eq!(offset!(fsdp_loaded, step), 8);
        assert_eq!(offset!(fsdp_loaded, sequence), 16);
        assert_eq!(offset!(fsdp_loaded, wanted_bytes), 24);
        assert_eq!(offset!(fsdp_loaded, read_bytes), 32);
        assert_eq!(offset!(fsdp_loaded, ranks), 40);
        assert_eq!(offset!(fsdp_loaded, passed_over), 44);
        assert_eq!(offset!(fsdp_loaded, name), 48);
        assert_eq!(offset!(fsdp_loaded, loaded_tensors), 80);
        assert_eq!(offset!(fsdp_loaded, missing_tensors), 88);
        assert_eq!(offset!(fsdp_loaded, unexpected_tensors), 96);
    }

    #[test]
    fn fsdp_rename_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_rename>(), 48);
        assert_eq!(offset!(fsdp_rename, theirs), 0);
        assert_eq!(offset!(fsdp_rename, ours), 8);
        assert_eq!(offset!(fsdp_rename, from_row), 16);
        assert_eq!(offset!(fsdp_rename, to_row), 24);
        assert_eq!(offset!(fsdp_rename, row_count), 32);
        assert_eq!(offset!(fsdp_rename, flags), 40);
        assert_eq!(offset!(fsdp_rename, reserved), 44);
    }

    #[test]
    fn fsdp_checkpoint_status_is_laid_out_as_the_compiler_says() {
        assert_eq!(std::mem::size_of::<fsdp_checkpoint_status>(), 80);
        assert_eq!(offset!(fsdp_checkpoint_status, struct_size), 0);
        assert_eq!(offset!(fsdp_checkpoint_status, state), 8);
        assert_eq!(offset!(fsdp_checkpoint_status, status), 12);
        assert_eq!(offset!(fsdp_checkpoint_status, bytes), 16);
        assert_eq!(offset!(fsdp_checkpoint_status, bytes_in_all), 24);
        assert_eq!(offset!(fsdp_checkpoint_status, step), 32);
        assert_eq!(offset!(fsdp_checkpoint_status, ranks), 40);
        assert_eq!(offset!(fsdp_checkpoint_status, reserved), 44);
        assert_eq!(offset!(fsdp_checkpoint_status, name), 48);
    }
}
