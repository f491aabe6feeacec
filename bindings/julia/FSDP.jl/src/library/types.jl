# SPDX-License-Identifier: Apache-2.0
# Written by bindings/julia/generate.py from bindings/abi/abi.json: do not edit.
# Handles, constants and structs as fsdp.h has them.
struct fsdp_context end
struct fsdp_mesh end
struct fsdp_model end
struct fsdp_group end
struct fsdp_checkpoint end
struct fsdp_capture end

const FSDP_VERSION_MAJOR = UInt32(0)
const FSDP_VERSION_MINOR = UInt32(2)
const FSDP_VERSION_PATCH = UInt32(0)
const FSDP_EVERY_RANK = Int32(-1)

const fsdp_status = Int32
const FSDP_OK = Int32(0)
const FSDP_INVALID_ARGUMENT = Int32(1)
const FSDP_INVALID_HANDLE = Int32(2)
const FSDP_INVALID_STATE = Int32(3)
const FSDP_UNSUPPORTED = Int32(4)
const FSDP_OUT_OF_MEMORY = Int32(5)
const FSDP_BUSY = Int32(6)
const FSDP_MISMATCH = Int32(7)
const FSDP_PEER_FAILED = Int32(8)
const FSDP_TIMEOUT = Int32(9)
const FSDP_ABORTED = Int32(10)
const FSDP_INTERRUPTED = Int32(11)
const FSDP_SYSTEM = Int32(12)
const FSDP_INTERNAL = Int32(13)

const fsdp_origin = Int32
const FSDP_ORIGIN_FSDP = Int32(1)
const FSDP_ORIGIN_OS = Int32(2)
const FSDP_ORIGIN_CUDA = Int32(3)
const FSDP_ORIGIN_NCCL = Int32(4)
const FSDP_ORIGIN_UCX = Int32(5)

const fsdp_dtype = Int32
const FSDP_FLOAT32 = Int32(1)
const FSDP_BFLOAT16 = Int32(2)
const FSDP_FLOAT16 = Int32(3)
const FSDP_FLOAT8_E4M3 = Int32(4)
const FSDP_E8M0 = Int32(6)
const FSDP_UINT8 = Int32(7)

const fsdp_device_kind = Int32
const FSDP_DEVICE_HOST = Int32(1)
const FSDP_DEVICE_CUDA = Int32(2)

const FSDP_TENSOR_READ_ONLY = UInt32(8388608)

const fsdp_log_level = Int32
const FSDP_LOG_ERROR = Int32(1)
const FSDP_LOG_WARNING = Int32(2)
const FSDP_LOG_INFO = Int32(3)
const FSDP_LOG_DEBUG = Int32(4)

const FSDP_CONTEXT_DEBUG = UInt32(256)
const FSDP_CONTEXT_NO_OVERLAP = UInt32(512)
const FSDP_CONTEXT_TRACE = UInt32(1024)

const fsdp_device_transport = Int32
const FSDP_TRANSPORT_NCCL = Int32(1)
const FSDP_TRANSPORT_STAGING = Int32(2)

const fsdp_value_op = Int32
const FSDP_VALUE_SUM = Int32(1)
const FSDP_VALUE_MIN = Int32(2)
const FSDP_VALUE_MAX = Int32(3)
const FSDP_VALUE_MEAN = Int32(4)

const fsdp_strategy = Int32
const FSDP_STRATEGY_NO_SHARD = Int32(1)
const FSDP_STRATEGY_OPTIM = Int32(2)
const FSDP_STRATEGY_OPTIM_GRADS = Int32(3)
const FSDP_STRATEGY_OPTIM_GRADS_PARAMS = Int32(4)

const fsdp_grad_op = Int32
const FSDP_GRAD_OP_MEAN = Int32(1)
const FSDP_GRAD_OP_SUM = Int32(2)
const FSDP_GRAD_OP_FACTOR = Int32(3)

const fsdp_unshard_mode = Int32
const FSDP_UNSHARD_MAPPED = Int32(1)
const FSDP_UNSHARD_COPIED = Int32(2)

const fsdp_view_kind = Int32
const FSDP_VIEWS_READ_ONLY = Int32(1)
const FSDP_VIEWS_PRIVATE = Int32(2)

const fsdp_reduce_policy = Int32
const FSDP_REDUCE_POLICY_EACH = Int32(1)
const FSDP_REDUCE_POLICY_LAST = Int32(2)

const fsdp_outer_strategy = Int32
const FSDP_OUTER_NO_SHARD = Int32(1)
const FSDP_OUTER_OPTIM = Int32(2)

const fsdp_optimizer = Int32
const FSDP_OPTIMIZER_ADAMW = Int32(1)
const FSDP_OPTIMIZER_CALLER = Int32(2)
const FSDP_OPTIMIZER_ADAMW_8BIT = Int32(3)

const fsdp_main_storage = Int32
const FSDP_MAIN_FLOAT32 = Int32(1)
const FSDP_MAIN_SPLIT16 = Int32(2)
const FSDP_MAIN_NONE = Int32(3)

const fsdp_home = Int32
const FSDP_HOME_DEVICE = Int32(1)
const FSDP_HOME_HOST = Int32(2)
const FSDP_HOME_FILE = Int32(3)

const FSDP_MODEL_NO_PREFETCH = UInt32(2048)
const FSDP_MODEL_FORCE_COMMUNICATION = UInt32(4096)

const fsdp_scale_rounding = Int32
const FSDP_SCALE_EXACT = Int32(1)
const FSDP_SCALE_POWER_OF_TWO = Int32(2)

const fsdp_scale_rule = Int32
const FSDP_SCALE_ROUND_UP = Int32(1)
const FSDP_SCALE_FLOOR = Int32(2)

const fsdp_plane_policy = Int32
const FSDP_PLANES_BY_PHASE = Int32(1)
const FSDP_PLANES_BY_PHASE_AND_RECOMPUTE = Int32(2)
const FSDP_PLANES_BOTH = Int32(3)

const fsdp_phase = Int32
const FSDP_FORWARD = Int32(1)
const FSDP_BACKWARD = Int32(2)
const FSDP_RECOMPUTE = Int32(3)
const FSDP_EVAL = Int32(4)

const fsdp_schedule_kind = Int32
const FSDP_SCHEDULE_SEQUENTIAL = Int32(1)
const FSDP_SCHEDULE_INTERLEAVED = Int32(2)
const FSDP_SCHEDULE_VISITS = Int32(3)
const FSDP_SCHEDULE_ANY = Int32(4)

const fsdp_role = Int32
const FSDP_ROLE_ALL = Int32(0)
const FSDP_ROLE_COMPUTE = Int32(1)
const FSDP_ROLE_MAIN = Int32(2)
const FSDP_ROLE_GRAD = Int32(3)
const FSDP_ROLE_OPTIMIZER = Int32(4)
const FSDP_ROLE_GATHER = Int32(5)
const FSDP_ROLE_REDUCE = Int32(6)
const FSDP_ROLE_STAGING = Int32(7)
const FSDP_ROLE_MATRIX = Int32(8)
const FSDP_ROLE_HOME = Int32(9)

const fsdp_granule = Int32
const FSDP_GRANULE_ROW = Int32(1)
const FSDP_GRANULE_BLOCK = Int32(2)
const FSDP_GRANULE_TENSOR = Int32(3)

const FSDP_PARAM_FROZEN = UInt32(8192)
const FSDP_PARAM_NO_DECAY = UInt32(16384)
const FSDP_PARAM_LR_ZERO = UInt32(32768)

const fsdp_quantization = Int32
const FSDP_QUANTIZE_FP8 = Int32(1)
const FSDP_QUANTIZE_MXFP8 = Int32(2)
const FSDP_QUANTIZE_FP8_BLOCK = Int32(3)

const fsdp_missing_grad = Int32
const FSDP_MISSING_GRAD_ZEROS = Int32(1)
const FSDP_MISSING_GRAD_SKIP = Int32(2)

const fsdp_matrix_layout = Int32
const FSDP_MATRIX_LAST_TWO = Int32(1)

const FSDP_GROUP_RESIDENT = UInt32(65536)
const FSDP_GROUP_ROOT = UInt32(4194304)

const fsdp_backward_weights = Int32
const FSDP_BACKWARD_WEIGHTS_GATHERED = Int32(1)
const FSDP_BACKWARD_WEIGHTS_NONE = Int32(2)

const fsdp_plane = Int32
const FSDP_PLANE_ROW = Int32(1)
const FSDP_PLANE_ROW_SCALE = Int32(2)
const FSDP_PLANE_COLUMN = Int32(3)
const FSDP_PLANE_COLUMN_SCALE = Int32(4)

const FSDP_GRAD_ZEROED = UInt32(131072)
const FSDP_GRAD_NO_WAIT = UInt32(1024)

const FSDP_LAST = UInt32(262144)

const FSDP_ADAMW_BETA1_ZERO = UInt32(524288)
const FSDP_ADAMW_BETA2_ZERO = UInt32(1048576)
const FSDP_ADAMW_EPSILON_ZERO = UInt32(2097152)

const FSDP_SAVE_REPLACE = UInt32(16777216)
const FSDP_SAVE_COMMIT_MANIFEST = UInt32(256)

const FSDP_LOAD_WEIGHTS_ONLY = UInt32(33554432)
const FSDP_LOAD_ALLOW_MISSING = UInt32(67108864)
const FSDP_LOAD_ALLOW_UNEXPECTED = UInt32(134217728)
const FSDP_LOAD_FALLBACK = UInt32(268435456)
const FSDP_LOAD_IF_ANY = UInt32(536870912)
const FSDP_LOAD_ONE_REPLICA = UInt32(512)

const FSDP_RENAME_TRANSPOSED = UInt32(1073741824)

const fsdp_bytes_owner = Int32
const FSDP_BYTES_ONCE = Int32(1)
const FSDP_BYTES_PER_RANK = Int32(2)

const fsdp_checkpoint_state = Int32
const FSDP_CHECKPOINT_OPEN = Int32(1)
const FSDP_CHECKPOINT_COPYING = Int32(2)
const FSDP_CHECKPOINT_WRITING = Int32(3)
const FSDP_CHECKPOINT_COMMITTED = Int32(4)
const FSDP_CHECKPOINT_FAILED = Int32(5)
const FSDP_CHECKPOINT_OPENED = Int32(6)

raw"""
Detail of a failed call. Output only: set struct_size before the call.
"""
struct fsdp_error
    struct_size::UInt64
    status::Int32
    origin::Int32
    # errno, cudaError_t, ... of that origin; 0 if none
    origin_code::Int64
    # the rank to blame, -1 if none; where ranks differ, the lowest rank that differs from the first rank of
    # its mesh
    rank::Int32
    # 1 if the context has failed for good and can only be destroyed
    context_failed::Int32
    # NUL-terminated; cut at the end if it is longer
    message::NTuple{1024, UInt8}
end

raw"""
```text
A view of memory that libfsdp owns, with the fields that DLPack needs (the strides are those of C order). Output
only: set struct_size before the call.
```
"""
struct fsdp_tensor
    struct_size::UInt64
    # first element, contiguous in C order; NULL if there is no such tensor
    data::Ptr{Cvoid}
    # dimension_count sizes, outermost first; lives as long as the model
    shape::Ptr{UInt64}
    element_count::UInt64
    dimension_count::UInt32
    dtype::Int32
    # bytes of one element
    element_size::UInt32
    # FSDP_TENSOR_*
    flags::UInt32
    device::Int32
    # index of the GPU, as CUDA counts; 0 on the host
    device_index::Int32
end

struct fsdp_context_options
    struct_size::UInt64
    # FSDP_CONTEXT_*; FSDP_DEBUG=1 in the environment adds FSDP_CONTEXT_DEBUG
    flags::UInt32
    # 0: the launcher's variables say it; otherwise rank and rendezvous count
    world_size::UInt32
    # counts only with world_size
    rank::UInt32
    # this number of neighbouring ranks counts as one host, for plans and to try a job of several hosts on one
    # host; 0: the real hosts
    ranks_per_host::UInt32
    # counts only with world_size: where the ranks of the job meet. It is a name (ranks of one host),
    # tcp://HOST:PORT or file:///DIRECTORY; NULL: FSDP_RENDEZVOUS, else the launcher's
    rendezvous::Cstring
    # 0: FSDP_DEVICE_HOST
    device::Int32
    # counts only with FSDP_DEVICE_CUDA: FSDP_DEVICE_INDEX(i) for GPU i; 0: the calling thread's current GPU
    device_index::Int32
    # counts only with FSDP_DEVICE_CUDA; 0: NCCL if it can serve the ranks, else staging
    device_transport::Int32
    # longest wait for peers in one operation; 0: FSDP_TIMEOUT of the environment, in seconds, else 300,000
    timeout_ms::UInt32
    # a rank or host that is silent for this time counts as lost; at least 1,000; 0: 8,000
    heartbeat_timeout_ms::UInt32
    # 0: FSDP_LOG of the environment, else FSDP_LOG_WARNING
    log_level::Int32
    # read atomically while a call waits: non-zero gives up the wait, as the hook does. It must outlive the
    # context; NULL: none
    interrupted_flag::Ptr{Int32}
    # NULL: none
    interrupted::Ptr{Cvoid}
    interrupted_data::Ptr{Cvoid}
    # NULL: none, or standard error if FSDP_LOG is set
    log::Ptr{Cvoid}
    log_data::Ptr{Cvoid}
    # trace-RANK.json is written into it when the context is destroyed, and a trace is kept for this file;
    # NULL: FSDP_TRACE of the environment, else nowhere
    trace_directory::Cstring
    # number of events to keep, 64 bytes each; counts only if a trace is kept; 0: 65,536
    trace_events::UInt64
    # flight-RANK.json is written into it if the context fails (an earlier file becomes flight-RANK.json.1,
    # and so on); NULL: FSDP_FLIGHT_DIRECTORY, else nowhere
    flight_directory::Cstring
    # number of recent calls, and of collectives, that the flight recorder keeps, 64 bytes each; 0: 1,024
    flight_events::UInt32
    # longest random delay before every piece of library work, to find races; 0: none
    debug_delay_us::UInt32
    debug_delay_seed::UInt64
    # make the n-th allocation of memory for a role fail, n from 1; 0: none
    debug_failed_allocation::UInt64
end

struct fsdp_mesh_options
    struct_size::UInt64
    # 0: number of ranks / shard_size; 1 if shard_size is 0 too
    replicate_size::UInt32
    # 0: number of ranks / replicate_size
    shard_size::UInt32
    # the ranks of the mesh in the mesh's order; NULL: all ranks of the job
    ranks::Ptr{UInt32}
    # number of ranks; 0 if ranks is NULL
    rank_count::UInt32
    # 0: see fsdp_create_mesh
    reduction_block_size::UInt32
end

struct fsdp_model_options
    struct_size::UInt64
    # NULL: 1 x world
    mesh::Ptr{fsdp_mesh}
    # FSDP_MODEL_*
    flags::UInt32
    # 0: FSDP_STRATEGY_OPTIM_GRADS_PARAMS
    strategy::Int32
    # 0: FSDP_OUTER_NO_SHARD; FSDP_OUTER_OPTIM needs a mesh with replicas
    outer_strategy::Int32
    # 0: FSDP_UNSHARD_MAPPED, but FSDP_UNSHARD_COPIED with FSDP_CONTEXT_DEBUG and on a CUDA device, which has
    # no other mode
    unshard_mode::Int32
    # dtype of full gradients; 0: the parameter's dtype. Give FSDP_FLOAT32 where several micro-batches add up
    # in full gradients (FSDP_REDUCE_POLICY_LAST): 256 + 1 - 256 is 0 in bfloat16
    grad_dtype::Int32
    # dtype to which gradients are rounded before they are summed in fp32; 0: grad_dtype
    reduce_dtype::Int32
    # 0: FSDP_GRAD_OP_MEAN
    grad_op::Int32
    # 0: EACH, but LAST with FSDP_STRATEGY_NO_SHARD; FSDP_STRATEGY_OPTIM always has LAST
    reduce_policy::Int32
    # counts only with FSDP_GRAD_OP_FACTOR, where it is finite and not 0
    grad_factor::Float64
    # 0: FSDP_OPTIMIZER_ADAMW
    optimizer::Int32
    # number of transient full gradient buffers alive at once, besides one for each FSDP_GROUP_ROOT; 0: 2
    max_pending_groups::UInt32
    # for this number of next visits (of groups, or of pieces) there is room to gather ahead; 0: 1, but none
    # with FSDP_MODEL_NO_PREFETCH
    prefetch_depth::UInt32
    # kind of views of weights that are not copied; 0: FSDP_VIEWS_READ_ONLY, the only kind on a CUDA device
    view_kind::Int32
    # limit of the bytes that are gathered ahead by prefetch; 0: no limit
    prefetch_bytes::UInt64
    # memory of role STAGING for saves, at least 32 MiB. A save copies its data into this memory and writes it
    # from there. The update window opens when all data is copied: if the memory is smaller than the data, the
    # caller waits for the disk. 0: none is planned, and each save takes 32 MiB while it runs
    save_staging_bytes::UInt64
    # 0: FSDP_SCALE_EXACT
    scale_rounding::Int32
    # dtype to which main weights are rounded before they are quantized. 0: FSDP_FLOAT32, no rounding. With
    # FSDP_BFLOAT16 codes are rounded twice, and scales come from rounded magnitudes too. MXFP8 with
    # FSDP_BFLOAT16 and FSDP_SCALE_ROUND_UP has the bits of TransformerEngine, except in blocks with a NaN
    quantize_from::Int32
    # 0: FSDP_SCALE_ROUND_UP
    scale_rule::Int32
    # 0: FSDP_PLANES_BY_PHASE
    plane_policy::Int32
    # limit of the bytes of all transient full gradient buffers. A group that does not fit is divided into
    # parts of consecutive parameters. Each part is lent and reduced by itself: it is reduced once
    # fsdp_complete_grad was called for all of its parameters. max_pending_groups then counts parts; if that
    # many do not fit, fewer are alive at once. A single parameter is never divided. Debug mode needs more
    # memory. 0: no limit, and each group is one part
    max_pending_bytes::UInt64
    # 0: FSDP_MAIN_FLOAT32
    main_storage::Int32
    # must be 0
    reserved::UInt32
    # with FSDP_MAIN_NONE: the key of the random bits; any number, but the same on every rank
    rounding_seed::UInt64
    # limit of the matrices that one rank gets at once (fsdp_collect_matrices). A matrix counts with its bytes
    # in fp32, rounded up to 256 bytes; one above the limit is refused. The model has memory for at most twice
    # the limit, and for rows of other ranks' matrices. 0: 64 MiB, or the largest matrix if that is larger
    matrix_bytes::UInt64
    # of optimizer states; 0: FSDP_HOME_DEVICE. With FSDP_HOME_FILE the scales of states in codes
    # (FSDP_OPTIMIZER_ADAMW_8BIT) stay in memory
    state_home::Int32
    # of main weights that are not the compute weights, or of their rests (FSDP_MAIN_SPLIT16); 0:
    # FSDP_HOME_DEVICE. With FSDP_HOME_FILE no trained parameter can be quantized
    main_home::Int32
    # directory for the file of this rank, on a local disk; ranks may have different ones. Counts only with
    # FSDP_HOME_FILE, which needs it
    home_directory::Cstring
    # limit of the bytes of one segment of the file, at least 65536; 0: 64 MiB
    turn_bytes::UInt64
    # number of buffers of turn_bytes (role STAGING), from 2 to 16: one segment is updated while the next is
    # read and the last is written; 0: 3
    turns::UInt32
    # of main gradients that have memory of their own. Gradients of FSDP_STRATEGY_NO_SHARD, and sums that
    # FSDP_REDUCE_POLICY_LAST makes in full gradients, stay where they are. If no others are left, the seal
    # refuses a home. 0: FSDP_HOME_DEVICE. With FSDP_HOME_FILE a reduce makes its sums in one of two buffers
    # (role STAGING), and a thread of the library writes them to the file. A later contribution reads them
    # first, and adds to them
    grad_home::Int32
end

raw"""
```text
One stop of an explicit schedule. group_index counts groups in the order of their creation. This struct may grow, so
 arrays of it come with a stride.
```
"""
struct fsdp_visit
    group_index::UInt32
    # FSDP_FORWARD, FSDP_BACKWARD, or FSDP_RECOMPUTE. Weights of RECOMPUTE visits are gathered ahead as well;
    # in a schedule without such visits a recompute belongs to a BACKWARD visit
    phase::Int32
    # 0: the whole group; FSDP_PIECE(p), not p itself: its piece p. If any visit names a piece of the group,
    # each of its pieces has a buffer of its own, planned for the visits of the piece and of the group
    piece::UInt32
end

struct fsdp_schedule_options
    struct_size::UInt64
    # counts only with FSDP_SCHEDULE_VISITS; every trainable group needs a BACKWARD visit
    visits::Ptr{fsdp_visit}
    visit_count::UInt64
    # sizeof(fsdp_visit); counts only with visits
    visit_stride::UInt64
    # with FSDP_SCHEDULE_ANY: number of buffers for copied weights, one for each group that is held or
    # gathered ahead (if planes are gathered by phase, see fsdp_plane_policy, one for each set of planes); 0:
    # 4. Other schedules need 0
    held_groups::UInt32
    # must be 0
    reserved::UInt32
end

raw"""
The size and layout of a sealed model, the same on every rank. Output only: set struct_size before the call.
"""
struct fsdp_model_info
    struct_size::UInt64
    group_count::UInt64
    # number of parameters in all groups
    param_count::UInt64
    # elements of all whole parameters that this rank declares, without padding
    element_count::UInt64
    # elements of padding in what this rank declares, counted over all ranks of its meshes
    padding_count::UInt64
    # size of the pool of gathered weights
    gather_pool_bytes::UInt64
    # gathered bytes alive at the schedule's peak: no pool can be smaller
    gather_lower_bound_bytes::UInt64
    # size of the pool of full gradients
    reduce_pool_bytes::UInt64
    # bytes of full gradients alive at the peak: no pool can be smaller
    reduce_lower_bound_bytes::UInt64
    layout_hash::UInt64
end

raw"""
Counters of a model on one rank since its seal. Output only: set struct_size before the call.
"""
struct fsdp_stats
    struct_size::UInt64
    # version of the published weights, from 1; 0: none yet
    version::UInt64
    # number of the last AdamW step; 0: none yet
    step::UInt64
    # times that weights became gathered, also if no bytes were moved
    gathers::UInt64
    # collectives that moved bytes
    all_gathers::UInt64
    # bytes that these collectives copied on this rank
    gathered_bytes::UInt64
    # number of groups gathered now
    gathered_groups::UInt64
    peak_gathered_groups::UInt64
    # gathers started ahead
    prefetches::UInt64
    # gathers started ahead whose weights were given back unused
    dropped_prefetches::UInt64
    # contributions reduced; each part of a group counts. 0 if there is one rank
    reduces::UInt64
    # bytes that this rank has read in these reduces, of the full gradients of all ranks
    reduced_bytes::UInt64
    # number of reduce-scatter collectives
    reduce_scatters::UInt64
    # bytes that they read on this rank
    reduce_scatter_bytes::UInt64
    # number of all-reduce collectives
    all_reduces::UInt64
    # bytes that they read on this rank, in both halves: the sum and the gather
    all_reduce_bytes::UInt64
    # transient full-gradient buffers in use now; each belongs to a group or a part
    pending_grad_groups::UInt64
    peak_pending_grad_groups::UInt64
    outer_all_gathers::UInt64
    outer_reduce_scatters::UInt64
    outer_all_reduces::UInt64
    # bytes that this rank has sent in these collectives
    outer_sent_bytes::UInt64
    # the sum of the next three
    wait_ns::UInt64
    # waits for copies of weights
    gather_wait_ns::UInt64
    # waits for reduces to end, or for a gradient buffer to be free
    reduce_wait_ns::UInt64
    # waits for peers to publish, to end the step, to exchange norms and parameters
    peer_wait_ns::UInt64
    # the wait of the rank that waited longest, minus that of the rank that waited least
    last_rank_lag_ns::UInt64
    # the rank that waited least, so that all other ranks have waited for it; -1: none yet, or a mesh of one
    last_rank::Int32
    # 0
    reserved::UInt32
    # allocations of memory for roles, shared or not, by all models of the context since the context was made
    allocations::UInt64
    # time that the caller waited at the opening of update windows, because a save was still copying memory
    # that may be written in the window; not a part of wait_ns
    checkpoint_stall_ns::UInt64
    # bytes of ROW planes, including planes that serve all phases
    gathered_row_bytes::UInt64
    # bytes of COLUMN planes, which only MXFP8 has
    gathered_column_bytes::UInt64
    # bytes read from the file
    home_read_bytes::UInt64
    # bytes written to the file
    home_written_bytes::UInt64
    # time that calls waited for the disk, but for fsdp_reduce_grad; not in wait_ns
    home_wait_ns::UInt64
end

struct fsdp_param
    struct_size::UInt64
    # unique in the model, 1-255 bytes
    name::Cstring
    # dimension_count sizes of 1 or more, in C order; copied
    shape::Ptr{UInt64}
    # at most 16; 0: a scalar
    dimension_count::UInt32
    # dtype of the compute weights, unless the parameter is quantized; 0: FSDP_FLOAT32. Only a FROZEN
    # parameter that is not quantized can have FSDP_UINT8
    dtype::Int32
    # FSDP_PARAM_*
    flags::UInt32
    # 0: FSDP_GRANULE_ROW
    granule::Int32
    # number of rows in a block; counts only with FSDP_GRANULE_BLOCK. A number above the parameter's rows
    # means all of its rows. For a parameter that is quantized in blocks it must be a multiple of the rows of
    # a block, also if it is above the parameter's rows. A block has 32 rows of a matrix with MXFP8 and 128
    # with FP8_BLOCK
    granule_rows::UInt64
    # 0: 1 (see FSDP_PARAM_LR_ZERO)
    lr_scale::Float64
    # kept and returned by fsdp_get_param_info; never read
    user_data::Ptr{Cvoid}
    global_shape::Ptr{UInt64}
    global_offset::Ptr{UInt64}
    # 0: none
    quantization::Int32
    # 0: FSDP_MISSING_GRAD_ZEROS
    missing_grad::Int32
    # in how many leading dimensions ranks may divide the parameter; 0: 1; at most dimension_count. A row
    # spans the other dimensions. With 1, a stack of E matrices [E, R, C] has E rows of R x C elements. With 2
    # it has E x R rows of C elements, and a rank's part may begin inside a matrix. With dimension_count,
    # every element is a row. The view of the weights stays one tensor [E, R, C]. granule_rows,
    # fsdp_get_chunk, fsdp_load_chunk and fsdp_shard count these rows; fsdp_rename counts rows of the first
    # dimension
    row_dimensions::UInt32
    # number of the piece of the group that the parameter is in. The first parameter of a group has piece 0;
    # each later one has the piece of the parameter before it, or the next. fsdp_unshard_piece gathers a piece
    # by itself. Each rank keeps an equal share of each piece, so each piece has padding of its own
    piece::UInt32
    # which optimizer updates the parameter; 0: the model's. With FSDP_OPTIMIZER_CALLER in a model with AdamW
    # the caller updates it in the window: it has none of AdamW's states, and fsdp_step_adamw publishes its
    # main weights as they are. FSDP_OPTIMIZER_ADAMW is legal in models with AdamW only, and means the model's
    # AdamW, with states in fp32 or in 8 bits. A FROZEN parameter must have 0
    optimizer::Int32
    # 0: the parameter has none
    matrix::Int32
    # cuts the R rows of the last two dimensions into several matrices, for example into q, k and v: the
    # number of rows of each. Their sum is R; copied. NULL: one matrix of R rows
    matrix_splits::Ptr{UInt64}
    # 0 with matrix_splits NULL
    matrix_split_count::UInt64
end

struct fsdp_group_options
    struct_size::UInt64
    # FSDP_GROUP_*
    flags::UInt32
    # 0: the model's
    strategy::Int32
    # 0: the model's
    grad_dtype::Int32
    # 0: the model's
    reduce_dtype::Int32
    # 0: the model's
    main_storage::Int32
    # 0: FSDP_BACKWARD_WEIGHTS_GATHERED
    backward_weights::Int32
    # the ranks that share this group; NULL: the model's mesh. They are some of the model's ranks, and this
    # rank is one of them. The meshes that the model's ranks name for a group are equal in shape and disjoint,
    # and together they have all ranks of the model (see fsdp_create_group)
    mesh::Ptr{fsdp_mesh}
    # 0: the model's. FSDP_GRAD_OP_MEAN divides by the number of the MODEL's ranks for every group, because
    # the gradient of an expert is a sum over the tokens of all ranks. The seal refuses a mean for a trained
    # group whose ranks may be tensor-parallel: if meshes have equal boxes, or if they have boxes of one
    # tensor and no group is on the model's mesh
    grad_op::Int32
    # 0: the model's, if the mesh has replicas; FSDP_OUTER_OPTIM needs a mesh with replicas
    outer_strategy::Int32
    # counts only with FSDP_GRAD_OP_FACTOR in grad_op, where it is finite and not 0
    grad_factor::Float64
end

raw"""
The declaration of a group, with defaults filled in. Output only: set struct_size before the call.
"""
struct fsdp_group_info
    struct_size::UInt64
    name::Cstring
    param_count::UInt64
    # index in the order of creation
    group_index::UInt32
    # FSDP_GROUP_*
    flags::UInt32
    strategy::Int32
    reduce_policy::Int32
    # 0: the dtype of each parameter
    grad_dtype::Int32
    # 0: the dtype of the gradient
    reduce_dtype::Int32
    main_storage::Int32
    backward_weights::Int32
    # at least 1
    piece_count::UInt64
    # shape of the group's mesh
    replicate_size::UInt32
    shard_size::UInt32
    grad_op::Int32
    outer_strategy::Int32
    # the number by which sums of gradients are multiplied
    grad_factor::Float64
end

raw"""
The part of a parameter that a rank has to load.
"""
struct fsdp_chunk
    struct_size::UInt64
    # offset in the parameter, in C order
    element_offset::UInt64
    # 0: this rank owns nothing of the parameter
    element_count::UInt64
    # rows as fsdp_param.row_dimensions makes them
    row_offset::UInt64
    row_count::UInt64
end

raw"""
```text
The part of one parameter that this rank owns. A FROZEN parameter has no shard, and neither has a parameter of which
 this rank owns nothing.
```
"""
struct fsdp_shard
    struct_size::UInt64
    group::Ptr{fsdp_group}
    param_index::UInt64
    name::Cstring
    # element_count elements; writable in the update window only. NULL with FSDP_MAIN_SPLIT16, or at home in a
    # file
    main_weight::Ptr{Cvoid}
    # element_count elements; complete in the update window. NULL at home in a file
    main_grad::Ptr{Cvoid}
    # FSDP_FLOAT32; FSDP_BFLOAT16 with FSDP_MAIN_NONE; 0 with FSDP_MAIN_SPLIT16
    main_weight_dtype::Int32
    # FSDP_FLOAT32
    main_grad_dtype::Int32
    # offset of the first element in the parameter
    element_offset::UInt64
    # never 0
    element_count::UInt64
    # rows as fsdp_param.row_dimensions makes them
    row_offset::UInt64
    row_count::UInt64
    # the current value, at the time of this call
    lr_scale::Float64
    # FSDP_PARAM_*, the current value. FSDP_PARAM_FROZEN means here that this step must leave weights and
    # states unchanged, because of fsdp_set_param_trainable or FSDP_MISSING_GRAD_SKIP
    flags::UInt32
    # number of optimizer states that the parameter has: AdamW's two first, then one for each call of
    # fsdp_add_optimizer_state, in call order (see fsdp_param.optimizer)
    state_count::UInt32
end

struct fsdp_adamw_options
    struct_size::UInt64
    # 0: 0.9 (see FSDP_ADAMW_BETA1_ZERO)
    beta1::Float64
    # 0: 0.999 (see FSDP_ADAMW_BETA2_ZERO)
    beta2::Float64
    # 0: 1e-8 (see FSDP_ADAMW_EPSILON_ZERO)
    epsilon::Float64
    # 0: none
    weight_decay::Float64
    # the number of this step, from 1; 0: one more than the last step's number
    step::UInt64
    # FSDP_ADAMW_*
    flags::UInt32
    # must be 0
    reserved::UInt32
end

raw"""
```text
One or more whole matrices of equal size that this rank owns: rows of a parameter with fsdp_param.matrix.
 Output only: set struct_size before the call.
```
"""
struct fsdp_matrix
    struct_size::UInt64
    group::Ptr{fsdp_group}
    # name of the parameter
    name::Cstring
    param_index::UInt64
    # index of the first matrix, if the dimensions before the last two are taken as one
    batch_index::UInt64
    # index in matrix_splits
    split_index::UInt64
    # first row of the split
    row_offset::UInt64
    rows::UInt64
    columns::UInt64
    # number of matrices: those of batch_index, batch_index + 1 and so on
    count::UInt64
    # bytes from one matrix to the next
    stride_bytes::UInt64
    # rows x columns numbers in C order; to be changed in place. NULL: there are no more
    data::Ptr{Cvoid}
    # of data
    dtype::Int32
    reserved::UInt32
end

struct fsdp_matrix_options
    struct_size::UInt64
    # what is collected: NULL for the main grads, "main_weight", or the name of a state
    source::Cstring
    # where returned matrices are written, named like source; NULL: to the source
    target::Cstring
    # of the matrices, and of messages between ranks; 0: FSDP_FLOAT32
    dtype::Int32
    # must be 0
    reserved::UInt32
end

raw"""
One full gradient for fsdp_apply_grads. This struct may grow, so arrays of it come with a stride.
"""
struct fsdp_grad
    # NULL: there is no gradient; it counts as zeros (but see fsdp_missing_grad)
    data::Ptr{Cvoid}
    element_count::UInt64
    dtype::Int32
    # must be 0
    reserved::UInt32
end

struct fsdp_save_options
    struct_size::UInt64
    # the checkpoint's step, at most 2^53. 0: the number of AdamW's last step; with FSDP_OPTIMIZER_CALLER the
    # step of the loaded checkpoint plus the number of updates published since. The first publish of loaded or
    # initial weights is not such an update
    step::UInt64
    # number of the folder's newest checkpoints that stay, besides the loaded one; 0: all stay
    keep::UInt32
    # FSDP_SAVE_*
    flags::UInt32
end

struct fsdp_load_options
    struct_size::UInt64
    # FSDP_LOAD_*
    flags::UInt32
    # must be 0
    reserved::UInt32
end

raw"""
What a load has done. Output only: set struct_size before the call.
"""
struct fsdp_loaded
    struct_size::UInt64
    # the checkpoint's step
    step::UInt64
    # the checkpoint's number, which rises with every checkpoint of a folder
    sequence::UInt64
    # bytes of the checkpoint's files that this rank keeps; with ONE_REPLICA its share of them
    wanted_bytes::UInt64
    # bytes that this rank has read for them: files are read and verified in blocks of 256 KiB
    read_bytes::UInt64
    # number of ranks of the job that saved the checkpoint
    ranks::UInt32
    # number of damaged checkpoints that FALLBACK has passed over; each of them is, or may be, newer than the
    # loaded one. The same on every rank
    passed_over::UInt32
    # the checkpoint's name in the folder, "step-0000001200". It is "" if FSDP_LOAD_IF_ANY has loaded nothing,
    # and always after fsdp_load_weights, which has no checkpoint; step, sequence and ranks are then 0
    name::NTuple{32, UInt8}
    # tensors of the model that the files have: weights and, unless WEIGHTS_ONLY, states
    loaded_tensors::UInt64
    # tensors of the model that the files lack; with ALLOW_MISSING they stay as they were
    missing_tensors::UInt64
    # tensors of the files that the model lacks, see FSDP_LOAD_ALLOW_UNEXPECTED
    unexpected_tensors::UInt64
end

raw"""
```text
Which rows of a tensor in another program's files become which rows of a parameter. "theirs" is the tensor in the
 files, "ours" the parameter of the model. This struct may grow, so arrays of it come with a stride.
```
"""
struct fsdp_rename
    # the tensor's name in the files; one '*' in it stands for any text
    theirs::Cstring
    # the parameter's name; a '*' in it stands for the same text
    ours::Cstring
    # the first row of theirs, counted after it was transposed
    from_row::UInt64
    # the row of ours that from_row becomes
    to_row::UInt64
    # 0: all rows of theirs from from_row on
    row_count::UInt64
    # FSDP_RENAME_*
    flags::UInt32
    # must be 0
    reserved::UInt32
end

raw"""
The progress of a checkpoint. Output only: set struct_size before the call.
"""
struct fsdp_checkpoint_status
    struct_size::UInt64
    state::Int32
    # if FAILED: the status that fsdp_wait_checkpoint returns
    status::Int32
    # bytes of its files that this rank has written
    bytes::UInt64
    # bytes of its files that this rank will have written; if OPENED: bytes of all its files
    bytes_in_all::UInt64
    # the checkpoint's step, once it is known
    step::UInt64
    # if OPENED: number of ranks that have saved it
    ranks::UInt32
    # 0
    reserved::UInt32
    # the checkpoint's name in the folder, "step-0000001200"; "" if it is not committed
    name::NTuple{32, UInt8}
end

# What the compiler of C says: size, and offsets of the fields, in bytes.
const LAYOUTS = (
    (fsdp_error, 1056, (0, 8, 12, 16, 24, 28, 32,)),
    (fsdp_tensor, 56, (0, 8, 16, 24, 32, 36, 40, 44, 48, 52,)),
    (fsdp_context_options, 144, (0, 8, 12, 16, 20, 24, 32, 36, 40, 44, 48, 52, 56, 64, 72, 80, 88, 96, 104, 112,
     120, 124, 128, 136,)),
    (fsdp_mesh_options, 32, (0, 8, 12, 16, 24, 28,)),
    (fsdp_model_options, 168, (0, 8, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 60, 64, 68, 72, 80, 88, 92, 96, 100,
     104, 112, 116, 120, 128, 136, 140, 144, 152, 160, 164,)),
    (fsdp_visit, 12, (0, 4, 8,)),
    (fsdp_schedule_options, 40, (0, 8, 16, 24, 32, 36,)),
    (fsdp_model_info, 80, (0, 8, 16, 24, 32, 40, 48, 56, 64, 72,)),
    (fsdp_stats, 280, (0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128, 136, 144, 152, 160,
     168, 176, 184, 192, 200, 208, 216, 220, 224, 232, 240, 248, 256, 264, 272,)),
    (fsdp_param, 120, (0, 8, 16, 24, 28, 32, 36, 40, 48, 56, 64, 72, 80, 84, 88, 92, 96, 100, 104, 112,)),
    (fsdp_group_options, 56, (0, 8, 12, 16, 20, 24, 28, 32, 40, 44, 48,)),
    (fsdp_group_info, 88, (0, 8, 16, 24, 28, 32, 36, 40, 44, 48, 52, 56, 64, 68, 72, 76, 80,)),
    (fsdp_chunk, 40, (0, 8, 16, 24, 32,)),
    (fsdp_shard, 104, (0, 8, 16, 24, 32, 40, 48, 52, 56, 64, 72, 80, 88, 96, 100,)),
    (fsdp_adamw_options, 56, (0, 8, 16, 24, 32, 40, 48, 52,)),
    (fsdp_matrix, 104, (0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 100,)),
    (fsdp_matrix_options, 32, (0, 8, 16, 24, 28,)),
    (fsdp_grad, 24, (0, 8, 16, 20,)),
    (fsdp_save_options, 24, (0, 8, 16, 20,)),
    (fsdp_load_options, 16, (0, 8, 12,)),
    (fsdp_loaded, 104, (0, 8, 16, 24, 32, 40, 44, 48, 80, 88, 96,)),
    (fsdp_rename, 48, (0, 8, 16, 24, 32, 40, 44,)),
    (fsdp_checkpoint_status, 80, (0, 8, 12, 16, 24, 32, 40, 44, 48,)),
)
