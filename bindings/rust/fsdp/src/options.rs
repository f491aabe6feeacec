// SPDX-License-Identifier: Apache-2.0
// Written by bindings/rust/generate.py from bindings/abi/abi.json.
use crate::enums::*;
use crate::error::{as_pointer, c_string, Result};
use crate::hooks::OwnContextOptions;
use crate::sys;
use std::ffi::CString;

/// `fsdp_context_options` of fsdp.h; what is not set has its default.
#[derive(Clone, Default)]
pub struct ContextOptions {
    pub(crate) raw: sys::fsdp_context_options,
    rendezvous: Option<Result<CString>>,
    trace_directory: Option<Result<CString>>,
    flight_directory: Option<Result<CString>>,
    pub(crate) own: OwnContextOptions,
}

impl ContextOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets `FSDP_CONTEXT_DEBUG`.
    pub fn debug(mut self) -> Self {
        self.raw.flags |= sys::FSDP_CONTEXT_DEBUG;
        self
    }

    /// Sets `FSDP_CONTEXT_NO_OVERLAP`.
    pub fn no_overlap(mut self) -> Self {
        self.raw.flags |= sys::FSDP_CONTEXT_NO_OVERLAP;
        self
    }

    /// Sets `FSDP_CONTEXT_TRACE`.
    pub fn trace(mut self) -> Self {
        self.raw.flags |= sys::FSDP_CONTEXT_TRACE;
        self
    }

    /// this number of neighbouring ranks counts as one host, for plans and to try a job of several hosts on one host;
    /// 0: the real hosts
    pub fn ranks_per_host(mut self, ranks_per_host: u32) -> Self {
        self.raw.ranks_per_host = ranks_per_host;
        self
    }

    /// counts only with world_size: where the ranks of the job meet. It is a name (ranks of one host),
    /// tcp://HOST:PORT or file:///DIRECTORY; NULL: FSDP_RENDEZVOUS, else the launcher's
    pub fn rendezvous(mut self, rendezvous: &str) -> Self {
        self.rendezvous = Some(c_string(rendezvous));
        self
    }

    /// 0: FSDP_DEVICE_HOST
    pub fn device(mut self, device: DeviceKind) -> Self {
        self.raw.device = device as i32;
        self
    }

    /// counts only with FSDP_DEVICE_CUDA; 0: NCCL if it can serve the ranks, else staging
    pub fn device_transport(mut self, device_transport: DeviceTransport) -> Self {
        self.raw.device_transport = device_transport as i32;
        self
    }

    /// longest wait for peers in one operation; 0: FSDP_TIMEOUT of the environment, in seconds, else 300,000
    pub fn timeout_ms(mut self, timeout_ms: u32) -> Self {
        self.raw.timeout_ms = timeout_ms;
        self
    }

    /// a rank or host that is silent for this time counts as lost; at least 1,000; 0: 8,000
    pub fn heartbeat_timeout_ms(mut self, heartbeat_timeout_ms: u32) -> Self {
        self.raw.heartbeat_timeout_ms = heartbeat_timeout_ms;
        self
    }

    /// 0: FSDP_LOG of the environment, else FSDP_LOG_WARNING
    pub fn log_level(mut self, log_level: LogLevel) -> Self {
        self.raw.log_level = log_level as i32;
        self
    }

    /// trace-RANK.json is written into it when the context is destroyed, and a trace is kept for this file; NULL:
    /// FSDP_TRACE of the environment, else nowhere
    pub fn trace_directory(mut self, trace_directory: &str) -> Self {
        self.trace_directory = Some(c_string(trace_directory));
        self
    }

    /// number of events to keep, 64 bytes each; counts only if a trace is kept; 0: 65,536
    pub fn trace_events(mut self, trace_events: u64) -> Self {
        self.raw.trace_events = trace_events;
        self
    }

    /// flight-RANK.json is written into it if the context fails (an earlier file becomes flight-RANK.json.1, and so
    /// on); NULL: FSDP_FLIGHT_DIRECTORY, else nowhere
    pub fn flight_directory(mut self, flight_directory: &str) -> Self {
        self.flight_directory = Some(c_string(flight_directory));
        self
    }

    /// number of recent calls, and of collectives, that the flight recorder keeps, 64 bytes each; 0: 1,024
    pub fn flight_events(mut self, flight_events: u32) -> Self {
        self.raw.flight_events = flight_events;
        self
    }

    /// longest random delay before every piece of library work, to find races; 0: none
    pub fn debug_delay_us(mut self, debug_delay_us: u32) -> Self {
        self.raw.debug_delay_us = debug_delay_us;
        self
    }

    /// `debug_delay_seed` of fsdp.h.
    pub fn debug_delay_seed(mut self, debug_delay_seed: u64) -> Self {
        self.raw.debug_delay_seed = debug_delay_seed;
        self
    }

    /// make the n-th allocation of memory for a role fail, n from 1; 0: none
    pub fn debug_failed_allocation(mut self, debug_failed_allocation: u64) -> Self {
        self.raw.debug_failed_allocation = debug_failed_allocation;
        self
    }

    /// The struct for a call; it points into `self`.
    pub(crate) fn as_raw(&self) -> Result<sys::fsdp_context_options> {
        let mut raw = self.raw;
        raw.rendezvous = as_pointer(&self.rendezvous)?;
        raw.trace_directory = as_pointer(&self.trace_directory)?;
        raw.flight_directory = as_pointer(&self.flight_directory)?;
        Ok(raw)
    }
}

/// `fsdp_mesh_options` of fsdp.h; what is not set has its default.
#[derive(Clone, Default)]
pub struct MeshOptions {
    pub(crate) raw: sys::fsdp_mesh_options,
    ranks: Vec<u32>,
}

impl MeshOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// 0: number of ranks / shard_size; 1 if shard_size is 0 too
    pub fn replicate_size(mut self, replicate_size: u32) -> Self {
        self.raw.replicate_size = replicate_size;
        self
    }

    /// 0: number of ranks / replicate_size
    pub fn shard_size(mut self, shard_size: u32) -> Self {
        self.raw.shard_size = shard_size;
        self
    }

    /// the ranks of the mesh in the mesh's order; NULL: all ranks of the job
    pub fn ranks(mut self, ranks: &[u32]) -> Self {
        self.ranks = ranks.to_vec();
        self
    }

    /// 0: see fsdp_create_mesh
    pub fn reduction_block_size(mut self, reduction_block_size: u32) -> Self {
        self.raw.reduction_block_size = reduction_block_size;
        self
    }

    /// The struct for a call; it points into `self`.
    pub(crate) fn as_raw(&self) -> Result<sys::fsdp_mesh_options> {
        let mut raw = self.raw;
        if !self.ranks.is_empty() {
            raw.ranks = self.ranks.as_ptr();
            raw.rank_count = self.ranks.len() as u32;
        }
        Ok(raw)
    }
}

/// `fsdp_model_options` of fsdp.h; what is not set has its default.
#[derive(Clone, Default)]
pub struct ModelOptions {
    pub(crate) raw: sys::fsdp_model_options,
    home_directory: Option<Result<CString>>,
}

impl ModelOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets `FSDP_MODEL_NO_PREFETCH`.
    pub fn no_prefetch(mut self) -> Self {
        self.raw.flags |= sys::FSDP_MODEL_NO_PREFETCH;
        self
    }

    /// Sets `FSDP_MODEL_FORCE_COMMUNICATION`.
    pub fn force_communication(mut self) -> Self {
        self.raw.flags |= sys::FSDP_MODEL_FORCE_COMMUNICATION;
        self
    }

    /// 0: FSDP_STRATEGY_OPTIM_GRADS_PARAMS
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.raw.strategy = strategy as i32;
        self
    }

    /// 0: FSDP_OUTER_NO_SHARD; FSDP_OUTER_OPTIM needs a mesh with replicas
    pub fn outer_strategy(mut self, outer_strategy: OuterStrategy) -> Self {
        self.raw.outer_strategy = outer_strategy as i32;
        self
    }

    /// 0: FSDP_UNSHARD_MAPPED, but FSDP_UNSHARD_COPIED with FSDP_CONTEXT_DEBUG and on a CUDA device, which has no
    /// other mode
    pub fn unshard_mode(mut self, unshard_mode: UnshardMode) -> Self {
        self.raw.unshard_mode = unshard_mode as i32;
        self
    }

    /// dtype of full gradients; 0: the parameter's dtype. Give FSDP_FLOAT32 where several micro-batches add up in
    /// full gradients (FSDP_REDUCE_POLICY_LAST): 256 + 1 - 256 is 0 in bfloat16
    pub fn grad_dtype(mut self, grad_dtype: Dtype) -> Self {
        self.raw.grad_dtype = grad_dtype as i32;
        self
    }

    /// dtype to which gradients are rounded before they are summed in fp32; 0: grad_dtype
    pub fn reduce_dtype(mut self, reduce_dtype: Dtype) -> Self {
        self.raw.reduce_dtype = reduce_dtype as i32;
        self
    }

    /// 0: FSDP_GRAD_OP_MEAN
    pub fn grad_op(mut self, grad_op: GradOp) -> Self {
        self.raw.grad_op = grad_op as i32;
        self
    }

    /// 0: EACH, but LAST with FSDP_STRATEGY_NO_SHARD; FSDP_STRATEGY_OPTIM always has LAST
    pub fn reduce_policy(mut self, reduce_policy: ReducePolicy) -> Self {
        self.raw.reduce_policy = reduce_policy as i32;
        self
    }

    /// counts only with FSDP_GRAD_OP_FACTOR, where it is finite and not 0
    pub fn grad_factor(mut self, grad_factor: f64) -> Self {
        self.raw.grad_factor = grad_factor;
        self
    }

    /// 0: FSDP_OPTIMIZER_ADAMW
    pub fn optimizer(mut self, optimizer: Optimizer) -> Self {
        self.raw.optimizer = optimizer as i32;
        self
    }

    /// number of transient full gradient buffers alive at once, besides one for each FSDP_GROUP_ROOT; 0: 2
    pub fn max_pending_groups(mut self, max_pending_groups: u32) -> Self {
        self.raw.max_pending_groups = max_pending_groups;
        self
    }

    /// for this number of next visits (of groups, or of pieces) there is room to gather ahead; 0: 1, but none with
    /// FSDP_MODEL_NO_PREFETCH
    pub fn prefetch_depth(mut self, prefetch_depth: u32) -> Self {
        self.raw.prefetch_depth = prefetch_depth;
        self
    }

    /// kind of views of weights that are not copied; 0: FSDP_VIEWS_READ_ONLY, the only kind on a CUDA device
    pub fn view_kind(mut self, view_kind: ViewKind) -> Self {
        self.raw.view_kind = view_kind as i32;
        self
    }

    /// limit of the bytes that are gathered ahead by prefetch; 0: no limit
    pub fn prefetch_bytes(mut self, prefetch_bytes: u64) -> Self {
        self.raw.prefetch_bytes = prefetch_bytes;
        self
    }

    /// memory of role STAGING for saves, at least 32 MiB. A save copies its data into this memory and writes it from
    /// there. The update window opens when all data is copied: if the memory is smaller than the data, the caller
    /// waits for the disk. 0: none is planned, and each save takes 32 MiB while it runs
    pub fn save_staging_bytes(mut self, save_staging_bytes: u64) -> Self {
        self.raw.save_staging_bytes = save_staging_bytes;
        self
    }

    /// 0: FSDP_SCALE_EXACT
    pub fn scale_rounding(mut self, scale_rounding: ScaleRounding) -> Self {
        self.raw.scale_rounding = scale_rounding as i32;
        self
    }

    /// dtype to which main weights are rounded before they are quantized. 0: FSDP_FLOAT32, no rounding. With
    /// FSDP_BFLOAT16 codes are rounded twice, and scales come from rounded magnitudes too. MXFP8 with FSDP_BFLOAT16
    /// and FSDP_SCALE_ROUND_UP has the bits of TransformerEngine, except in blocks with a NaN
    pub fn quantize_from(mut self, quantize_from: Dtype) -> Self {
        self.raw.quantize_from = quantize_from as i32;
        self
    }

    /// 0: FSDP_SCALE_ROUND_UP
    pub fn scale_rule(mut self, scale_rule: ScaleRule) -> Self {
        self.raw.scale_rule = scale_rule as i32;
        self
    }

    /// 0: FSDP_PLANES_BY_PHASE
    pub fn plane_policy(mut self, plane_policy: PlanePolicy) -> Self {
        self.raw.plane_policy = plane_policy as i32;
        self
    }

    /// limit of the bytes of all transient full gradient buffers. A group that does not fit is divided into parts of
    /// consecutive parameters. Each part is lent and reduced by itself: it is reduced once fsdp_complete_grad was
    /// called for all of its parameters. max_pending_groups then counts parts; if that many do not fit, fewer are
    /// alive at once. A single parameter is never divided. Debug mode needs more memory. 0: no limit, and each group
    /// is one part
    pub fn max_pending_bytes(mut self, max_pending_bytes: u64) -> Self {
        self.raw.max_pending_bytes = max_pending_bytes;
        self
    }

    /// 0: FSDP_MAIN_FLOAT32
    pub fn main_storage(mut self, main_storage: MainStorage) -> Self {
        self.raw.main_storage = main_storage as i32;
        self
    }

    /// with FSDP_MAIN_NONE: the key of the random bits; any number, but the same on every rank
    pub fn rounding_seed(mut self, rounding_seed: u64) -> Self {
        self.raw.rounding_seed = rounding_seed;
        self
    }

    /// limit of the matrices that one rank gets at once (fsdp_collect_matrices). A matrix counts with its bytes in
    /// fp32, rounded up to 256 bytes; one above the limit is refused. The model has memory for at most twice the
    /// limit, and for rows of other ranks' matrices. 0: 64 MiB, or the largest matrix if that is larger
    pub fn matrix_bytes(mut self, matrix_bytes: u64) -> Self {
        self.raw.matrix_bytes = matrix_bytes;
        self
    }

    /// of optimizer states; 0: FSDP_HOME_DEVICE. With FSDP_HOME_FILE the scales of states in codes
    /// (FSDP_OPTIMIZER_ADAMW_8BIT) stay in memory
    pub fn state_home(mut self, state_home: Home) -> Self {
        self.raw.state_home = state_home as i32;
        self
    }

    /// of main weights that are not the compute weights, or of their rests (FSDP_MAIN_SPLIT16); 0: FSDP_HOME_DEVICE.
    /// With FSDP_HOME_FILE no trained parameter can be quantized
    pub fn main_home(mut self, main_home: Home) -> Self {
        self.raw.main_home = main_home as i32;
        self
    }

    /// directory for the file of this rank, on a local disk; ranks may have different ones. Counts only with
    /// FSDP_HOME_FILE, which needs it
    pub fn home_directory(mut self, home_directory: &str) -> Self {
        self.home_directory = Some(c_string(home_directory));
        self
    }

    /// limit of the bytes of one segment of the file, at least 65536; 0: 64 MiB
    pub fn turn_bytes(mut self, turn_bytes: u64) -> Self {
        self.raw.turn_bytes = turn_bytes;
        self
    }

    /// number of buffers of turn_bytes (role STAGING), from 2 to 16: one segment is updated while the next is read
    /// and the last is written; 0: 3
    pub fn turns(mut self, turns: u32) -> Self {
        self.raw.turns = turns;
        self
    }

    /// of main gradients that have memory of their own. Gradients of FSDP_STRATEGY_NO_SHARD, and sums that
    /// FSDP_REDUCE_POLICY_LAST makes in full gradients, stay where they are. If no others are left, the seal refuses
    /// a home. 0: FSDP_HOME_DEVICE. With FSDP_HOME_FILE a reduce makes its sums in one of two buffers (role STAGING),
    /// and a thread of the library writes them to the file. A later contribution reads them first, and adds to them
    pub fn grad_home(mut self, grad_home: Home) -> Self {
        self.raw.grad_home = grad_home as i32;
        self
    }

    /// The struct for a call; it points into `self`.
    pub(crate) fn as_raw(&self) -> Result<sys::fsdp_model_options> {
        let mut raw = self.raw;
        raw.home_directory = as_pointer(&self.home_directory)?;
        Ok(raw)
    }
}

/// `fsdp_group_options` of fsdp.h; what is not set has its default.
#[derive(Clone, Default)]
pub struct GroupOptions {
    pub(crate) raw: sys::fsdp_group_options,
}

impl GroupOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets `FSDP_GROUP_RESIDENT`.
    pub fn resident(mut self) -> Self {
        self.raw.flags |= sys::FSDP_GROUP_RESIDENT;
        self
    }

    /// Sets `FSDP_GROUP_ROOT`.
    pub fn root(mut self) -> Self {
        self.raw.flags |= sys::FSDP_GROUP_ROOT;
        self
    }

    /// 0: the model's
    pub fn strategy(mut self, strategy: Strategy) -> Self {
        self.raw.strategy = strategy as i32;
        self
    }

    /// 0: the model's
    pub fn grad_dtype(mut self, grad_dtype: Dtype) -> Self {
        self.raw.grad_dtype = grad_dtype as i32;
        self
    }

    /// 0: the model's
    pub fn reduce_dtype(mut self, reduce_dtype: Dtype) -> Self {
        self.raw.reduce_dtype = reduce_dtype as i32;
        self
    }

    /// 0: the model's
    pub fn main_storage(mut self, main_storage: MainStorage) -> Self {
        self.raw.main_storage = main_storage as i32;
        self
    }

    /// 0: FSDP_BACKWARD_WEIGHTS_GATHERED
    pub fn backward_weights(mut self, backward_weights: BackwardWeights) -> Self {
        self.raw.backward_weights = backward_weights as i32;
        self
    }

    /// 0: the model's. FSDP_GRAD_OP_MEAN divides by the number of the MODEL's ranks for every group, because the
    /// gradient of an expert is a sum over the tokens of all ranks. The seal refuses a mean for a trained group whose
    /// ranks may be tensor-parallel: if meshes have equal boxes, or if they have boxes of one tensor and no group is
    /// on the model's mesh
    pub fn grad_op(mut self, grad_op: GradOp) -> Self {
        self.raw.grad_op = grad_op as i32;
        self
    }

    /// 0: the model's, if the mesh has replicas; FSDP_OUTER_OPTIM needs a mesh with replicas
    pub fn outer_strategy(mut self, outer_strategy: OuterStrategy) -> Self {
        self.raw.outer_strategy = outer_strategy as i32;
        self
    }

    /// counts only with FSDP_GRAD_OP_FACTOR in grad_op, where it is finite and not 0
    pub fn grad_factor(mut self, grad_factor: f64) -> Self {
        self.raw.grad_factor = grad_factor;
        self
    }

    /// The struct for a call; it points into `self`.
    pub(crate) fn as_raw(&self) -> Result<sys::fsdp_group_options> {
        Ok(self.raw)
    }
}

/// `fsdp_adamw_options` of fsdp.h; what is not set has its default.
#[derive(Clone, Default)]
pub struct AdamwOptions {
    pub(crate) raw: sys::fsdp_adamw_options,
}

impl AdamwOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets `FSDP_ADAMW_BETA1_ZERO`.
    pub fn beta1_zero(mut self) -> Self {
        self.raw.flags |= sys::FSDP_ADAMW_BETA1_ZERO;
        self
    }

    /// Sets `FSDP_ADAMW_BETA2_ZERO`.
    pub fn beta2_zero(mut self) -> Self {
        self.raw.flags |= sys::FSDP_ADAMW_BETA2_ZERO;
        self
    }

    /// Sets `FSDP_ADAMW_EPSILON_ZERO`.
    pub fn epsilon_zero(mut self) -> Self {
        self.raw.flags |= sys::FSDP_ADAMW_EPSILON_ZERO;
        self
    }

    /// 0: 0.9 (see FSDP_ADAMW_BETA1_ZERO)
    pub fn beta1(mut self, beta1: f64) -> Self {
        self.raw.beta1 = beta1;
        self
    }

    /// 0: 0.999 (see FSDP_ADAMW_BETA2_ZERO)
    pub fn beta2(mut self, beta2: f64) -> Self {
        self.raw.beta2 = beta2;
        self
    }

    /// 0: 1e-8 (see FSDP_ADAMW_EPSILON_ZERO)
    pub fn epsilon(mut self, epsilon: f64) -> Self {
        self.raw.epsilon = epsilon;
        self
    }

    /// 0: none
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.raw.weight_decay = weight_decay;
        self
    }

    /// the number of this step, from 1; 0: one more than the last step's number
    pub fn step(mut self, step: u64) -> Self {
        self.raw.step = step;
        self
    }

    /// The struct for a call; it points into `self`.
    pub(crate) fn as_raw(&self) -> Result<sys::fsdp_adamw_options> {
        Ok(self.raw)
    }
}

/// `fsdp_matrix_options` of fsdp.h; what is not set has its default.
#[derive(Clone, Default)]
pub struct MatrixOptions {
    pub(crate) raw: sys::fsdp_matrix_options,
    source: Option<Result<CString>>,
    target: Option<Result<CString>>,
}

impl MatrixOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// what is collected: NULL for the main grads, "main_weight", or the name of a state
    pub fn source(mut self, source: &str) -> Self {
        self.source = Some(c_string(source));
        self
    }

    /// where returned matrices are written, named like source; NULL: to the source
    pub fn target(mut self, target: &str) -> Self {
        self.target = Some(c_string(target));
        self
    }

    /// of the matrices, and of messages between ranks; 0: FSDP_FLOAT32
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.raw.dtype = dtype as i32;
        self
    }

    /// The struct for a call; it points into `self`.
    pub(crate) fn as_raw(&self) -> Result<sys::fsdp_matrix_options> {
        let mut raw = self.raw;
        raw.source = as_pointer(&self.source)?;
        raw.target = as_pointer(&self.target)?;
        Ok(raw)
    }
}

/// `fsdp_save_options` of fsdp.h; what is not set has its default.
#[derive(Clone, Default)]
pub struct SaveOptions {
    pub(crate) raw: sys::fsdp_save_options,
}

impl SaveOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets `FSDP_SAVE_REPLACE`.
    pub fn replace(mut self) -> Self {
        self.raw.flags |= sys::FSDP_SAVE_REPLACE;
        self
    }

    /// Sets `FSDP_SAVE_COMMIT_MANIFEST`.
    pub fn commit_manifest(mut self) -> Self {
        self.raw.flags |= sys::FSDP_SAVE_COMMIT_MANIFEST;
        self
    }

    /// the checkpoint's step, at most 2^53. 0: the number of AdamW's last step; with FSDP_OPTIMIZER_CALLER the step
    /// of the loaded checkpoint plus the number of updates published since. The first publish of loaded or initial
    /// weights is not such an update
    pub fn step(mut self, step: u64) -> Self {
        self.raw.step = step;
        self
    }

    /// number of the folder's newest checkpoints that stay, besides the loaded one; 0: all stay
    pub fn keep(mut self, keep: u32) -> Self {
        self.raw.keep = keep;
        self
    }

    /// The struct for a call; it points into `self`.
    pub(crate) fn as_raw(&self) -> Result<sys::fsdp_save_options> {
        Ok(self.raw)
    }
}

/// `fsdp_load_options` of fsdp.h; what is not set has its default.
#[derive(Clone, Default)]
pub struct LoadOptions {
    pub(crate) raw: sys::fsdp_load_options,
}

impl LoadOptions {
    /// All defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets `FSDP_LOAD_WEIGHTS_ONLY`.
    pub fn weights_only(mut self) -> Self {
        self.raw.flags |= sys::FSDP_LOAD_WEIGHTS_ONLY;
        self
    }

    /// Sets `FSDP_LOAD_ALLOW_MISSING`.
    pub fn allow_missing(mut self) -> Self {
        self.raw.flags |= sys::FSDP_LOAD_ALLOW_MISSING;
        self
    }

    /// Sets `FSDP_LOAD_ALLOW_UNEXPECTED`.
    pub fn allow_unexpected(mut self) -> Self {
        self.raw.flags |= sys::FSDP_LOAD_ALLOW_UNEXPECTED;
        self
    }

    /// Sets `FSDP_LOAD_FALLBACK`.
    pub fn fallback(mut self) -> Self {
        self.raw.flags |= sys::FSDP_LOAD_FALLBACK;
        self
    }

    /// Sets `FSDP_LOAD_IF_ANY`.
    pub fn if_any(mut self) -> Self {
        self.raw.flags |= sys::FSDP_LOAD_IF_ANY;
        self
    }

    /// Sets `FSDP_LOAD_ONE_REPLICA`.
    pub fn one_replica(mut self) -> Self {
        self.raw.flags |= sys::FSDP_LOAD_ONE_REPLICA;
        self
    }

    /// The struct for a call; it points into `self`.
    pub(crate) fn as_raw(&self) -> Result<sys::fsdp_load_options> {
        Ok(self.raw)
    }
}
