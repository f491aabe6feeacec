// SPDX-License-Identifier: Apache-2.0
use crate::enums::{DeviceKind, ValueOp};
use crate::error::{c_path, c_string, check, read_text, text, Error, Result};
use crate::hooks::{self, Hooks};
use crate::options::ContextOptions;
use crate::{sys, LogLevel, Mesh};
use std::ffi::CString;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::AtomicI32;
use std::sync::Arc;

/// One rank's membership in the job. Dropping it destroys it and never waits; a good run ends with [`Context::close`].
///
/// Models and meshes need not be dropped before it: their calls fail with [`Status::InvalidHandle`](crate::Status) then.
#[derive(Debug)]
pub struct Context {
    pub(crate) raw: *mut sys::fsdp_context,
    pub(crate) hooks: Arc<Hooks>,
    pub(crate) on_host: bool,
}

// SAFETY: the library takes calls from any thread, one at a time inside a context (else BUSY), and hooks are Send and Sync.
unsafe impl Send for Context {}

impl Context {
    /// Joins the job: `fsdp_create_context`. Without a world the launcher's variables say which; none set: a world of one.
    pub fn new(options: &ContextOptions) -> Result<Self> {
        Self::create(options, |raw, out| unsafe { sys::fsdp_create_context(raw, out) })
    }

    /// A context that only plans, rank `rank` of an imagined world: `fsdp_create_plan_context`.
    pub fn plan(world_size: u32, rank: u32, options: &ContextOptions) -> Result<Self> {
        Self::create(options, |raw, out| unsafe { sys::fsdp_create_plan_context(world_size, rank, raw, out) })
    }

    /// A context for each thread of this process that will act as a rank: `fsdp_create_local_contexts`.
    pub fn local(world_size: u32, options: &ContextOptions) -> Result<Vec<Self>> {
        let (raw, hooks) = hooks::hand_over(options)?;
        let mut made = vec![null_mut(); world_size as usize];
        // SAFETY: an array of world_size.
        check(unsafe { sys::fsdp_create_local_contexts(world_size, &raw, made.as_mut_ptr()) })?;
        let on_host = is_host(options);
        Ok(made.into_iter().map(|raw| Context { raw, hooks: hooks.clone(), on_host }).collect())
    }

    fn create(
        options: &ContextOptions,
        call: impl FnOnce(&sys::fsdp_context_options, &mut *mut sys::fsdp_context) -> sys::fsdp_status,
    ) -> Result<Self> {
        let (options_raw, hooks) = hooks::hand_over(options)?;
        let mut raw = null_mut();
        let status = call(&options_raw, &mut raw);
        let made = Context { raw, hooks, on_host: is_host(options) };
        check(status).map(|()| made)
    }

    /// Leaves the job in good order: waits until every rank has called it.
    pub fn close(self) -> Result<()> {
        check(unsafe { sys::fsdp_close_context(self.raw) })
    }

    /// Fails the context for good, and wakes its waiting calls here and on the other ranks.
    pub fn abort(&self, reason: &str) -> Result<()> {
        self.abort_handle().abort(reason)
    }

    /// An object with which any thread may abort this context, at any time.
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle { raw: self.raw as usize }
    }

    /// This context's rank, from 0.
    pub fn rank(&self) -> u32 {
        let mut rank = 0;
        check(unsafe { sys::fsdp_get_rank(self.raw, &mut rank) }).expect("a context that lives has a rank");
        rank
    }

    /// The number of ranks of the job.
    pub fn world_size(&self) -> u32 {
        let mut size = 0;
        check(unsafe { sys::fsdp_get_world_size(self.raw, &mut size) }).expect("a context that lives has a world");
        size
    }

    /// The error that failed the context for good.
    pub fn error(&self) -> Result<Option<Error>> {
        let mut detail = sys::fsdp_error::default();
        check(unsafe { sys::fsdp_get_context_error(self.raw, &mut detail) })?;
        Ok((detail.status != sys::FSDP_OK).then(|| Error::from_raw(&detail)))
    }

    /// The ranks that this error blames, ascending.
    pub fn failed_ranks(&self) -> Result<Vec<u32>> {
        let mut count = 0;
        check(unsafe { sys::fsdp_get_failed_ranks(self.raw, null_mut(), &mut count) })?;
        let mut ranks = vec![0; count as usize];
        check(unsafe { sys::fsdp_get_failed_ranks(self.raw, ranks.as_mut_ptr(), &mut count) })?;
        ranks.truncate(count as usize);
        Ok(ranks)
    }

    /// Reduces a few numbers over all ranks of the job, in place.
    pub fn all_reduce_values(&self, values: &mut [f64], op: ValueOp) -> Result<()> {
        self.reduce_values(std::ptr::null(), values, op)
    }

    /// Reduces a few numbers over the ranks of a mesh, in place.
    pub fn all_reduce_values_over(&self, mesh: &Mesh, values: &mut [f64], op: ValueOp) -> Result<()> {
        self.reduce_values(mesh.raw, values, op)
    }

    fn reduce_values(&self, mesh: *const sys::fsdp_mesh, values: &mut [f64], op: ValueOp) -> Result<()> {
        let (data, count) = (values.as_mut_ptr(), values.len() as u64);
        check(unsafe { sys::fsdp_all_reduce_values(self.raw, mesh, data, count, op as i32) })
    }

    /// Waits for all that the stream was given: `fsdp_wait_stream`. `timeout_ms` 0: the context's.
    ///
    /// # Safety
    /// The stream is null, or one that lives.
    pub unsafe fn wait_stream(&self, stream: sys::fsdp_stream, timeout_ms: u32) -> Result<()> {
        check(sys::fsdp_wait_stream(self.raw, stream, timeout_ms))
    }

    /// Writes this rank's timeline to a file.
    pub fn write_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = c_path(path.as_ref())?;
        check(unsafe { sys::fsdp_write_trace(self.raw, path.as_ptr()) })
    }

    /// Writes this rank's last calls and collectives to a file.
    pub fn write_flight_record(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = c_path(path.as_ref())?;
        check(unsafe { sys::fsdp_write_flight_record(self.raw, path.as_ptr()) })
    }

    /// Begins a span of the timeline; spans nest.
    pub fn begin_span(&self, name: &str) -> Result<()> {
        let name = c_string(name)?;
        check(unsafe { sys::fsdp_begin_span(self.raw, name.as_ptr()) })
    }

    /// Ends the span that was begun last.
    pub fn end_span(&self) -> Result<()> {
        check(unsafe { sys::fsdp_end_span(self.raw) })
    }

    /// The handle, for calls of [`sys`].
    pub fn as_raw(&self) -> *mut sys::fsdp_context {
        self.raw
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        unsafe { sys::fsdp_destroy_context(self.raw) };
    }
}

impl std::fmt::Debug for Hooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooks")
    }
}

impl ContextOptions {
    /// Rank `rank` of `world_size`, which meet at the rendezvous; no launcher is asked.
    pub fn world(mut self, world_size: u32, rank: u32) -> Self {
        self.raw.world_size = world_size;
        self.raw.rank = rank;
        self
    }

    /// GPU `index`, as CUDA counts them.
    pub fn gpu(mut self, index: u32) -> Self {
        self.raw.device = sys::FSDP_DEVICE_CUDA;
        self.raw.device_index = index as i32 + 1;
        self
    }

    /// Gets the library's log lines, on the thread that calls. A panic of the hook continues when the call has
    /// returned.
    pub fn log(mut self, hook: impl Fn(LogLevel, &str) + Send + Sync + 'static) -> Self {
        self.own.log = Some(Arc::new(hook));
        self
    }

    /// Called about every 20 ms while a call waits; returning true gives up the wait.
    pub fn interrupted(mut self, hook: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.own.interrupted = Some(Arc::new(hook));
        self
    }

    /// Read while a call waits; a value other than 0 gives up the wait. A signal handler may set it.
    pub fn interrupted_flag(mut self, flag: Arc<AtomicI32>) -> Self {
        self.own.interrupted_flag = Some(flag);
        self
    }
}

fn is_host(options: &ContextOptions) -> bool {
    options.raw.device != DeviceKind::Cuda as i32
}

/// Aborts a context from any thread; once the context is gone, with an error.
#[derive(Clone, Copy, Debug)]
pub struct AbortHandle {
    raw: usize, // handles are numbers, so the number of a destroyed context is harmless
}

impl AbortHandle {
    /// Fails the context for good, and wakes its waiting calls here and on the other ranks.
    pub fn abort(&self, reason: &str) -> Result<()> {
        let reason = CString::new(reason.replace('\0', " ")).expect("it has no zero byte now");
        check(unsafe { sys::fsdp_abort_context(self.raw as *mut sys::fsdp_context, reason.as_ptr()) })
    }
}

/// The library's version, "0.2.0".
pub fn get_version() -> String {
    // SAFETY: a static string.
    unsafe { text(sys::fsdp_get_version()) }.unwrap_or_default()
}

/// What this build of the library contains, as lines of "key: value".
pub fn describe_build() -> Result<String> {
    read_text(|buffer, size| unsafe { sys::fsdp_describe_build(buffer, size) })
}
