// SPDX-License-Identifier: Apache-2.0
// Written by bindings/rust/generate.py from bindings/abi/abi.json.
use crate::sys;

/// `fsdp_status` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Status {
    /// `FSDP_OK`
    Ok = sys::FSDP_OK,
    /// `FSDP_INVALID_ARGUMENT`
    InvalidArgument = sys::FSDP_INVALID_ARGUMENT,
    /// `FSDP_INVALID_HANDLE`
    InvalidHandle = sys::FSDP_INVALID_HANDLE,
    /// `FSDP_INVALID_STATE`
    InvalidState = sys::FSDP_INVALID_STATE,
    /// `FSDP_UNSUPPORTED`
    Unsupported = sys::FSDP_UNSUPPORTED,
    /// `FSDP_OUT_OF_MEMORY`
    OutOfMemory = sys::FSDP_OUT_OF_MEMORY,
    /// `FSDP_BUSY`
    Busy = sys::FSDP_BUSY,
    /// `FSDP_MISMATCH`
    Mismatch = sys::FSDP_MISMATCH,
    /// `FSDP_PEER_FAILED`
    PeerFailed = sys::FSDP_PEER_FAILED,
    /// `FSDP_TIMEOUT`
    Timeout = sys::FSDP_TIMEOUT,
    /// `FSDP_ABORTED`
    Aborted = sys::FSDP_ABORTED,
    /// `FSDP_INTERRUPTED`
    Interrupted = sys::FSDP_INTERRUPTED,
    /// `FSDP_SYSTEM`
    System = sys::FSDP_SYSTEM,
    /// `FSDP_INTERNAL`
    Internal = sys::FSDP_INTERNAL,
}

impl Status {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_OK => Status::Ok,
            sys::FSDP_INVALID_ARGUMENT => Status::InvalidArgument,
            sys::FSDP_INVALID_HANDLE => Status::InvalidHandle,
            sys::FSDP_INVALID_STATE => Status::InvalidState,
            sys::FSDP_UNSUPPORTED => Status::Unsupported,
            sys::FSDP_OUT_OF_MEMORY => Status::OutOfMemory,
            sys::FSDP_BUSY => Status::Busy,
            sys::FSDP_MISMATCH => Status::Mismatch,
            sys::FSDP_PEER_FAILED => Status::PeerFailed,
            sys::FSDP_TIMEOUT => Status::Timeout,
            sys::FSDP_ABORTED => Status::Aborted,
            sys::FSDP_INTERRUPTED => Status::Interrupted,
            sys::FSDP_SYSTEM => Status::System,
            sys::FSDP_INTERNAL => Status::Internal,
            _ => return None,
        })
    }
}

/// `fsdp_origin` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Origin {
    /// `FSDP_ORIGIN_FSDP`
    Fsdp = sys::FSDP_ORIGIN_FSDP,
    /// `FSDP_ORIGIN_OS`
    Os = sys::FSDP_ORIGIN_OS,
    /// `FSDP_ORIGIN_CUDA`
    Cuda = sys::FSDP_ORIGIN_CUDA,
    /// `FSDP_ORIGIN_NCCL`
    Nccl = sys::FSDP_ORIGIN_NCCL,
    /// `FSDP_ORIGIN_UCX`
    Ucx = sys::FSDP_ORIGIN_UCX,
}

impl Origin {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_ORIGIN_FSDP => Origin::Fsdp,
            sys::FSDP_ORIGIN_OS => Origin::Os,
            sys::FSDP_ORIGIN_CUDA => Origin::Cuda,
            sys::FSDP_ORIGIN_NCCL => Origin::Nccl,
            sys::FSDP_ORIGIN_UCX => Origin::Ucx,
            _ => return None,
        })
    }
}

/// `fsdp_dtype` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Dtype {
    /// `FSDP_FLOAT32`
    Float32 = sys::FSDP_FLOAT32,
    /// `FSDP_BFLOAT16`
    Bfloat16 = sys::FSDP_BFLOAT16,
    /// `FSDP_FLOAT16`
    Float16 = sys::FSDP_FLOAT16,
    /// `FSDP_FLOAT8_E4M3`
    Float8E4m3 = sys::FSDP_FLOAT8_E4M3,
    /// `FSDP_E8M0`
    E8m0 = sys::FSDP_E8M0,
    /// `FSDP_UINT8`
    Uint8 = sys::FSDP_UINT8,
}

impl Dtype {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_FLOAT32 => Dtype::Float32,
            sys::FSDP_BFLOAT16 => Dtype::Bfloat16,
            sys::FSDP_FLOAT16 => Dtype::Float16,
            sys::FSDP_FLOAT8_E4M3 => Dtype::Float8E4m3,
            sys::FSDP_E8M0 => Dtype::E8m0,
            sys::FSDP_UINT8 => Dtype::Uint8,
            _ => return None,
        })
    }
}

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
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum DeviceKind {
    /// `FSDP_DEVICE_HOST`
    Host = sys::FSDP_DEVICE_HOST,
    /// `FSDP_DEVICE_CUDA`
    Cuda = sys::FSDP_DEVICE_CUDA,
}

impl DeviceKind {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_DEVICE_HOST => DeviceKind::Host,
            sys::FSDP_DEVICE_CUDA => DeviceKind::Cuda,
            _ => return None,
        })
    }
}

/// `fsdp_log_level` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum LogLevel {
    /// `FSDP_LOG_ERROR`
    Error = sys::FSDP_LOG_ERROR,
    /// `FSDP_LOG_WARNING`
    Warning = sys::FSDP_LOG_WARNING,
    /// `FSDP_LOG_INFO`
    Info = sys::FSDP_LOG_INFO,
    /// `FSDP_LOG_DEBUG`
    Debug = sys::FSDP_LOG_DEBUG,
}

impl LogLevel {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_LOG_ERROR => LogLevel::Error,
            sys::FSDP_LOG_WARNING => LogLevel::Warning,
            sys::FSDP_LOG_INFO => LogLevel::Info,
            sys::FSDP_LOG_DEBUG => LogLevel::Debug,
            _ => return None,
        })
    }
}

/// How ranks exchange data that is in GPU memory.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum DeviceTransport {
    /// `FSDP_TRANSPORT_NCCL`
    Nccl = sys::FSDP_TRANSPORT_NCCL,
    /// `FSDP_TRANSPORT_STAGING`
    Staging = sys::FSDP_TRANSPORT_STAGING,
}

impl DeviceTransport {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_TRANSPORT_NCCL => DeviceTransport::Nccl,
            sys::FSDP_TRANSPORT_STAGING => DeviceTransport::Staging,
            _ => return None,
        })
    }
}

/// `fsdp_value_op` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ValueOp {
    /// `FSDP_VALUE_SUM`
    Sum = sys::FSDP_VALUE_SUM,
    /// `FSDP_VALUE_MIN`
    Min = sys::FSDP_VALUE_MIN,
    /// `FSDP_VALUE_MAX`
    Max = sys::FSDP_VALUE_MAX,
    /// `FSDP_VALUE_MEAN`
    Mean = sys::FSDP_VALUE_MEAN,
}

impl ValueOp {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_VALUE_SUM => ValueOp::Sum,
            sys::FSDP_VALUE_MIN => ValueOp::Min,
            sys::FSDP_VALUE_MAX => ValueOp::Max,
            sys::FSDP_VALUE_MEAN => ValueOp::Mean,
            _ => return None,
        })
    }
}

/// `fsdp_strategy` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Strategy {
    /// `FSDP_STRATEGY_NO_SHARD`
    NoShard = sys::FSDP_STRATEGY_NO_SHARD,
    /// `FSDP_STRATEGY_OPTIM`
    Optim = sys::FSDP_STRATEGY_OPTIM,
    /// `FSDP_STRATEGY_OPTIM_GRADS`
    OptimGrads = sys::FSDP_STRATEGY_OPTIM_GRADS,
    /// `FSDP_STRATEGY_OPTIM_GRADS_PARAMS`
    OptimGradsParams = sys::FSDP_STRATEGY_OPTIM_GRADS_PARAMS,
}

impl Strategy {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_STRATEGY_NO_SHARD => Strategy::NoShard,
            sys::FSDP_STRATEGY_OPTIM => Strategy::Optim,
            sys::FSDP_STRATEGY_OPTIM_GRADS => Strategy::OptimGrads,
            sys::FSDP_STRATEGY_OPTIM_GRADS_PARAMS => Strategy::OptimGradsParams,
            _ => return None,
        })
    }
}

/// `fsdp_grad_op` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum GradOp {
    /// `FSDP_GRAD_OP_MEAN`
    Mean = sys::FSDP_GRAD_OP_MEAN,
    /// `FSDP_GRAD_OP_SUM`
    Sum = sys::FSDP_GRAD_OP_SUM,
    /// `FSDP_GRAD_OP_FACTOR`
    Factor = sys::FSDP_GRAD_OP_FACTOR,
}

impl GradOp {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_GRAD_OP_MEAN => GradOp::Mean,
            sys::FSDP_GRAD_OP_SUM => GradOp::Sum,
            sys::FSDP_GRAD_OP_FACTOR => GradOp::Factor,
            _ => return None,
        })
    }
}

/// `fsdp_unshard_mode` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum UnshardMode {
    /// `FSDP_UNSHARD_MAPPED`
    Mapped = sys::FSDP_UNSHARD_MAPPED,
    /// `FSDP_UNSHARD_COPIED`
    Copied = sys::FSDP_UNSHARD_COPIED,
}

impl UnshardMode {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_UNSHARD_MAPPED => UnshardMode::Mapped,
            sys::FSDP_UNSHARD_COPIED => UnshardMode::Copied,
            _ => return None,
        })
    }
}

/// What happens on a write through a view of mapped weights. Such a write is an error of the program.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ViewKind {
    /// `FSDP_VIEWS_READ_ONLY`
    ReadOnly = sys::FSDP_VIEWS_READ_ONLY,
    /// `FSDP_VIEWS_PRIVATE`
    Private = sys::FSDP_VIEWS_PRIVATE,
}

impl ViewKind {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_VIEWS_READ_ONLY => ViewKind::ReadOnly,
            sys::FSDP_VIEWS_PRIVATE => ViewKind::Private,
            _ => return None,
        })
    }
}

/// `fsdp_reduce_policy` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ReducePolicy {
    /// `FSDP_REDUCE_POLICY_EACH`
    Each = sys::FSDP_REDUCE_POLICY_EACH,
    /// `FSDP_REDUCE_POLICY_LAST`
    Last = sys::FSDP_REDUCE_POLICY_LAST,
}

impl ReducePolicy {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_REDUCE_POLICY_EACH => ReducePolicy::Each,
            sys::FSDP_REDUCE_POLICY_LAST => ReducePolicy::Last,
            _ => return None,
        })
    }
}

/// What the replicas of a mesh divide among themselves.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum OuterStrategy {
    /// `FSDP_OUTER_NO_SHARD`
    NoShard = sys::FSDP_OUTER_NO_SHARD,
    /// `FSDP_OUTER_OPTIM`
    Optim = sys::FSDP_OUTER_OPTIM,
}

impl OuterStrategy {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_OUTER_NO_SHARD => OuterStrategy::NoShard,
            sys::FSDP_OUTER_OPTIM => OuterStrategy::Optim,
            _ => return None,
        })
    }
}

/// `fsdp_optimizer` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Optimizer {
    /// `FSDP_OPTIMIZER_ADAMW`
    Adamw = sys::FSDP_OPTIMIZER_ADAMW,
    /// `FSDP_OPTIMIZER_CALLER`
    Caller = sys::FSDP_OPTIMIZER_CALLER,
    /// `FSDP_OPTIMIZER_ADAMW_8BIT`
    Adamw8bit = sys::FSDP_OPTIMIZER_ADAMW_8BIT,
}

impl Optimizer {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_OPTIMIZER_ADAMW => Optimizer::Adamw,
            sys::FSDP_OPTIMIZER_CALLER => Optimizer::Caller,
            sys::FSDP_OPTIMIZER_ADAMW_8BIT => Optimizer::Adamw8bit,
            _ => return None,
        })
    }
}

/// ```text
/// How the main weights of a parameter with bfloat16 compute weights are kept. Parameters in float32 are their own main
///  weights, whatever you choose. With SPLIT16 and NONE no trainable parameter can be float16 or quantized.
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum MainStorage {
    /// `FSDP_MAIN_FLOAT32`
    Float32 = sys::FSDP_MAIN_FLOAT32,
    /// `FSDP_MAIN_SPLIT16`
    Split16 = sys::FSDP_MAIN_SPLIT16,
    /// `FSDP_MAIN_NONE`
    None = sys::FSDP_MAIN_NONE,
}

impl MainStorage {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_MAIN_FLOAT32 => MainStorage::Float32,
            sys::FSDP_MAIN_SPLIT16 => MainStorage::Split16,
            sys::FSDP_MAIN_NONE => MainStorage::None,
            _ => return None,
        })
    }
}

/// ```text
/// Where this rank keeps planes that only reduces and the update window use: main gradients, main weights or optimizer
///  state. The home changes no bit of any result. Bytes at home on the host or in a file are of FSDP_ROLE_HOME.
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Home {
    /// `FSDP_HOME_DEVICE`
    Device = sys::FSDP_HOME_DEVICE,
    /// `FSDP_HOME_HOST`
    Host = sys::FSDP_HOME_HOST,
    /// `FSDP_HOME_FILE`
    File = sys::FSDP_HOME_FILE,
}

impl Home {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_HOME_DEVICE => Home::Device,
            sys::FSDP_HOME_HOST => Home::Host,
            sys::FSDP_HOME_FILE => Home::File,
            _ => return None,
        })
    }
}

/// How the factor f is rounded. Weights are multiplied by f before they become FP8 codes (fsdp_quantization).
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ScaleRounding {
    /// `FSDP_SCALE_EXACT`
    Exact = sys::FSDP_SCALE_EXACT,
    /// `FSDP_SCALE_POWER_OF_TWO`
    PowerOfTwo = sys::FSDP_SCALE_POWER_OF_TWO,
}

impl ScaleRounding {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_SCALE_EXACT => ScaleRounding::Exact,
            sys::FSDP_SCALE_POWER_OF_TWO => ScaleRounding::PowerOfTwo,
            _ => return None,
        })
    }
}

/// How the scale of an MXFP8 block follows from the largest magnitude in the block.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ScaleRule {
    /// `FSDP_SCALE_ROUND_UP`
    RoundUp = sys::FSDP_SCALE_ROUND_UP,
    /// `FSDP_SCALE_FLOOR`
    Floor = sys::FSDP_SCALE_FLOOR,
}

impl ScaleRule {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_SCALE_ROUND_UP => ScaleRule::RoundUp,
            sys::FSDP_SCALE_FLOOR => ScaleRule::Floor,
            _ => return None,
        })
    }
}

/// For parameters that are stored in two forms (MXFP8): which of their planes an unshard gathers.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum PlanePolicy {
    /// `FSDP_PLANES_BY_PHASE`
    ByPhase = sys::FSDP_PLANES_BY_PHASE,
    /// `FSDP_PLANES_BY_PHASE_AND_RECOMPUTE`
    ByPhaseAndRecompute = sys::FSDP_PLANES_BY_PHASE_AND_RECOMPUTE,
    /// `FSDP_PLANES_BOTH`
    Both = sys::FSDP_PLANES_BOTH,
}

impl PlanePolicy {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_PLANES_BY_PHASE => PlanePolicy::ByPhase,
            sys::FSDP_PLANES_BY_PHASE_AND_RECOMPUTE => PlanePolicy::ByPhaseAndRecompute,
            sys::FSDP_PLANES_BOTH => PlanePolicy::Both,
            _ => return None,
        })
    }
}

/// `fsdp_phase` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Phase {
    /// `FSDP_FORWARD`
    Forward = sys::FSDP_FORWARD,
    /// `FSDP_BACKWARD`
    Backward = sys::FSDP_BACKWARD,
    /// `FSDP_RECOMPUTE`
    Recompute = sys::FSDP_RECOMPUTE,
    /// `FSDP_EVAL`
    Eval = sys::FSDP_EVAL,
}

impl Phase {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_FORWARD => Phase::Forward,
            sys::FSDP_BACKWARD => Phase::Backward,
            sys::FSDP_RECOMPUTE => Phase::Recompute,
            sys::FSDP_EVAL => Phase::Eval,
            _ => return None,
        })
    }
}

/// `fsdp_schedule_kind` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ScheduleKind {
    /// `FSDP_SCHEDULE_SEQUENTIAL`
    Sequential = sys::FSDP_SCHEDULE_SEQUENTIAL,
    /// `FSDP_SCHEDULE_INTERLEAVED`
    Interleaved = sys::FSDP_SCHEDULE_INTERLEAVED,
    /// `FSDP_SCHEDULE_VISITS`
    Visits = sys::FSDP_SCHEDULE_VISITS,
    /// `FSDP_SCHEDULE_ANY`
    Any = sys::FSDP_SCHEDULE_ANY,
}

impl ScheduleKind {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_SCHEDULE_SEQUENTIAL => ScheduleKind::Sequential,
            sys::FSDP_SCHEDULE_INTERLEAVED => ScheduleKind::Interleaved,
            sys::FSDP_SCHEDULE_VISITS => ScheduleKind::Visits,
            sys::FSDP_SCHEDULE_ANY => ScheduleKind::Any,
            _ => return None,
        })
    }
}

/// `fsdp_role` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Role {
    /// `FSDP_ROLE_ALL`
    All = sys::FSDP_ROLE_ALL,
    /// `FSDP_ROLE_COMPUTE`
    Compute = sys::FSDP_ROLE_COMPUTE,
    /// `FSDP_ROLE_MAIN`
    Main = sys::FSDP_ROLE_MAIN,
    /// `FSDP_ROLE_GRAD`
    Grad = sys::FSDP_ROLE_GRAD,
    /// `FSDP_ROLE_OPTIMIZER`
    Optimizer = sys::FSDP_ROLE_OPTIMIZER,
    /// `FSDP_ROLE_GATHER`
    Gather = sys::FSDP_ROLE_GATHER,
    /// `FSDP_ROLE_REDUCE`
    Reduce = sys::FSDP_ROLE_REDUCE,
    /// `FSDP_ROLE_STAGING`
    Staging = sys::FSDP_ROLE_STAGING,
    /// `FSDP_ROLE_MATRIX`
    Matrix = sys::FSDP_ROLE_MATRIX,
    /// `FSDP_ROLE_HOME`
    Home = sys::FSDP_ROLE_HOME,
}

impl Role {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_ROLE_ALL => Role::All,
            sys::FSDP_ROLE_COMPUTE => Role::Compute,
            sys::FSDP_ROLE_MAIN => Role::Main,
            sys::FSDP_ROLE_GRAD => Role::Grad,
            sys::FSDP_ROLE_OPTIMIZER => Role::Optimizer,
            sys::FSDP_ROLE_GATHER => Role::Gather,
            sys::FSDP_ROLE_REDUCE => Role::Reduce,
            sys::FSDP_ROLE_STAGING => Role::Staging,
            sys::FSDP_ROLE_MATRIX => Role::Matrix,
            sys::FSDP_ROLE_HOME => Role::Home,
            _ => return None,
        })
    }
}

/// `fsdp_granule` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Granule {
    /// `FSDP_GRANULE_ROW`
    Row = sys::FSDP_GRANULE_ROW,
    /// `FSDP_GRANULE_BLOCK`
    Block = sys::FSDP_GRANULE_BLOCK,
    /// `FSDP_GRANULE_TENSOR`
    Tensor = sys::FSDP_GRANULE_TENSOR,
}

impl Granule {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_GRANULE_ROW => Granule::Row,
            sys::FSDP_GRANULE_BLOCK => Granule::Block,
            sys::FSDP_GRANULE_TENSOR => Granule::Tensor,
            _ => return None,
        })
    }
}

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
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Quantization {
    /// `FSDP_QUANTIZE_FP8`
    Fp8 = sys::FSDP_QUANTIZE_FP8,
    /// `FSDP_QUANTIZE_MXFP8`
    Mxfp8 = sys::FSDP_QUANTIZE_MXFP8,
    /// `FSDP_QUANTIZE_FP8_BLOCK`
    Fp8Block = sys::FSDP_QUANTIZE_FP8_BLOCK,
}

impl Quantization {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_QUANTIZE_FP8 => Quantization::Fp8,
            sys::FSDP_QUANTIZE_MXFP8 => Quantization::Mxfp8,
            sys::FSDP_QUANTIZE_FP8_BLOCK => Quantization::Fp8Block,
            _ => return None,
        })
    }
}

/// ```text
/// What a step does to a parameter that has no gradient. A parameter has none if in this step no rank called
///  fsdp_acquire_grad for it, no rank gave non-NULL data to fsdp_put_grad or fsdp_apply_grads, and fsdp_load_grad loaded
///  nothing.
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum MissingGrad {
    /// `FSDP_MISSING_GRAD_ZEROS`
    Zeros = sys::FSDP_MISSING_GRAD_ZEROS,
    /// `FSDP_MISSING_GRAD_SKIP`
    Skip = sys::FSDP_MISSING_GRAD_SKIP,
}

impl MissingGrad {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_MISSING_GRAD_ZEROS => MissingGrad::Zeros,
            sys::FSDP_MISSING_GRAD_SKIP => MissingGrad::Skip,
            _ => return None,
        })
    }
}

/// Which dimensions of a parameter are a matrix.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum MatrixLayout {
    /// `FSDP_MATRIX_LAST_TWO`
    LastTwo = sys::FSDP_MATRIX_LAST_TWO,
}

impl MatrixLayout {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_MATRIX_LAST_TWO => MatrixLayout::LastTwo,
            _ => return None,
        })
    }
}

/// Does the backward computation of a group read its weights?
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum BackwardWeights {
    /// `FSDP_BACKWARD_WEIGHTS_GATHERED`
    Gathered = sys::FSDP_BACKWARD_WEIGHTS_GATHERED,
    /// `FSDP_BACKWARD_WEIGHTS_NONE`
    None = sys::FSDP_BACKWARD_WEIGHTS_NONE,
}

impl BackwardWeights {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_BACKWARD_WEIGHTS_GATHERED => BackwardWeights::Gathered,
            sys::FSDP_BACKWARD_WEIGHTS_NONE => BackwardWeights::None,
            _ => return None,
        })
    }
}

/// `fsdp_plane` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Plane {
    /// `FSDP_PLANE_ROW`
    Row = sys::FSDP_PLANE_ROW,
    /// `FSDP_PLANE_ROW_SCALE`
    RowScale = sys::FSDP_PLANE_ROW_SCALE,
    /// `FSDP_PLANE_COLUMN`
    Column = sys::FSDP_PLANE_COLUMN,
    /// `FSDP_PLANE_COLUMN_SCALE`
    ColumnScale = sys::FSDP_PLANE_COLUMN_SCALE,
}

impl Plane {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_PLANE_ROW => Plane::Row,
            sys::FSDP_PLANE_ROW_SCALE => Plane::RowScale,
            sys::FSDP_PLANE_COLUMN => Plane::Column,
            sys::FSDP_PLANE_COLUMN_SCALE => Plane::ColumnScale,
            _ => return None,
        })
    }
}

/// `fsdp_bytes_owner` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum BytesOwner {
    /// `FSDP_BYTES_ONCE`
    Once = sys::FSDP_BYTES_ONCE,
    /// `FSDP_BYTES_PER_RANK`
    PerRank = sys::FSDP_BYTES_PER_RANK,
}

impl BytesOwner {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_BYTES_ONCE => BytesOwner::Once,
            sys::FSDP_BYTES_PER_RANK => BytesOwner::PerRank,
            _ => return None,
        })
    }
}

/// `fsdp_checkpoint_state` of fsdp.h.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum CheckpointState {
    /// `FSDP_CHECKPOINT_OPEN`
    Open = sys::FSDP_CHECKPOINT_OPEN,
    /// `FSDP_CHECKPOINT_COPYING`
    Copying = sys::FSDP_CHECKPOINT_COPYING,
    /// `FSDP_CHECKPOINT_WRITING`
    Writing = sys::FSDP_CHECKPOINT_WRITING,
    /// `FSDP_CHECKPOINT_COMMITTED`
    Committed = sys::FSDP_CHECKPOINT_COMMITTED,
    /// `FSDP_CHECKPOINT_FAILED`
    Failed = sys::FSDP_CHECKPOINT_FAILED,
    /// `FSDP_CHECKPOINT_OPENED`
    Opened = sys::FSDP_CHECKPOINT_OPENED,
}

impl CheckpointState {
    /// The value of that number in fsdp.h; `None` for one of a later release.
    pub fn from_raw(raw: i32) -> Option<Self> {
        Some(match raw {
            sys::FSDP_CHECKPOINT_OPEN => CheckpointState::Open,
            sys::FSDP_CHECKPOINT_COPYING => CheckpointState::Copying,
            sys::FSDP_CHECKPOINT_WRITING => CheckpointState::Writing,
            sys::FSDP_CHECKPOINT_COMMITTED => CheckpointState::Committed,
            sys::FSDP_CHECKPOINT_FAILED => CheckpointState::Failed,
            sys::FSDP_CHECKPOINT_OPENED => CheckpointState::Opened,
            _ => return None,
        })
    }
}
