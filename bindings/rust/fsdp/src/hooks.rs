// SPDX-License-Identifier: Apache-2.0
//! Closures that the library calls. They live as long as any handle of their context. If one panics, the panic
//! continues only when the library has returned, so that no panic crosses its frames.
use crate::enums::LogLevel;
use crate::options::ContextOptions;
use crate::{sys, Result};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::CStr;
use std::os::raw::{c_char, c_void};
use std::panic::{catch_unwind, resume_unwind, AssertUnwindSafe};
use std::sync::atomic::AtomicI32;
use std::sync::Arc;

type LogHook = Arc<dyn Fn(LogLevel, &str) + Send + Sync>;
type InterruptedHook = Arc<dyn Fn() -> bool + Send + Sync>;

/// What the options of a context have besides numbers and strings.
#[derive(Clone, Default)]
pub(crate) struct OwnContextOptions {
    pub(crate) log: Option<LogHook>,
    pub(crate) interrupted: Option<InterruptedHook>,
    pub(crate) interrupted_flag: Option<Arc<AtomicI32>>,
}

/// Shared by the handles of a context.
pub(crate) type Hooks = OwnContextOptions;

/// The options as the library takes them, and what must outlive the context.
pub(crate) fn hand_over(options: &ContextOptions) -> Result<(sys::fsdp_context_options, Arc<Hooks>)> {
    let hooks = Arc::new(options.own.clone());
    let mut raw = options.as_raw()?;
    let data = Arc::as_ptr(&hooks) as *mut c_void;
    if hooks.log.is_some() {
        raw.log = Some(log);
        raw.log_data = data;
    }
    if hooks.interrupted.is_some() {
        raw.interrupted = Some(interrupted);
        raw.interrupted_data = data;
    }
    if let Some(flag) = &hooks.interrupted_flag {
        raw.interrupted_flag = Arc::as_ptr(flag).cast();
    }
    Ok((raw, hooks))
}

thread_local! {
    static PANICKED: Cell<bool> = const { Cell::new(false) };
    static PAYLOAD: RefCell<Option<Box<dyn Any + Send>>> = RefCell::new(None);
}

/// Hooks run on the thread that calls the library, so what panicked during a call lies here afterwards.
#[inline]
pub(crate) fn resume_panic() {
    if PANICKED.with(Cell::get) {
        go_on_panicking();
    }
}

#[cold]
fn go_on_panicking() {
    PANICKED.with(|panicked| panicked.set(false));
    if let Some(payload) = PAYLOAD.with(|kept| kept.borrow_mut().take()) {
        resume_unwind(payload);
    }
}

/// Runs a hook; the first panic is kept for the caller, and `otherwise` is the answer.
fn guarded<T>(otherwise: T, hook: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(hook)).unwrap_or_else(|payload| {
        PAYLOAD.with(|kept| {
            kept.borrow_mut().get_or_insert(payload);
        });
        PANICKED.with(|panicked| panicked.set(true));
        otherwise
    })
}

unsafe extern "C" fn log(data: *mut c_void, level: sys::fsdp_log_level, message: *const c_char) {
    // SAFETY: the handle that is in a call keeps the hooks alive; the message is NUL-terminated.
    let (hooks, message) = (&*data.cast::<Hooks>(), CStr::from_ptr(message).to_string_lossy());
    guarded((), || {
        if let Some(hook) = &hooks.log {
            hook(LogLevel::from_raw(level).unwrap_or(LogLevel::Debug), &message);
        }
    });
}

/// A hook that has panicked ends the wait.
unsafe extern "C" fn interrupted(data: *mut c_void) -> i32 {
    // SAFETY: as above.
    let hooks = &*data.cast::<Hooks>();
    guarded(true, || hooks.interrupted.as_ref().map_or(false, |hook| hook())).into()
}
