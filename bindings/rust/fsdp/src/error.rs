// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Origin, Status};
use crate::{hooks, sys};
use std::ffi::{CStr, CString};
use std::fmt;
use std::os::raw::c_char;

/// What every call returns.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a call failed: `fsdp_error` of fsdp.h.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// What kind of failure it is.
    pub status: Status,
    /// What failed: the library, the operating system, CUDA, ...
    pub origin: Origin,
    /// errno, cudaError_t, ... of that origin; 0 if none.
    pub origin_code: i64,
    /// The rank to blame.
    pub rank: Option<u32>,
    /// The context has failed for good, and can only be dropped.
    pub context_failed: bool,
    /// What was wrong, in a sentence that names the call that helps.
    pub message: String,
}

impl Error {
    /// An error that these bindings find before the library is asked.
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Error {
            status,
            origin: Origin::Fsdp,
            origin_code: 0,
            rank: None,
            context_failed: false,
            message: message.into(),
        }
    }

    fn of_last_call(status: sys::fsdp_status) -> Self {
        let mut detail = sys::fsdp_error::default();
        // SAFETY: an output struct with its size.
        let found = unsafe { sys::fsdp_get_last_error(std::ptr::null(), &mut detail) } == sys::FSDP_OK;
        if !found || detail.status != status {
            return Error::new(Status::from_raw(status).unwrap_or(Status::Internal), status_name(status));
        }
        Error::from_raw(&detail)
    }

    pub(crate) fn from_raw(detail: &sys::fsdp_error) -> Self {
        Error {
            status: Status::from_raw(detail.status).unwrap_or(Status::Internal),
            origin: Origin::from_raw(detail.origin).unwrap_or(Origin::Fsdp),
            origin_code: detail.origin_code,
            rank: u32::try_from(detail.rank).ok(),
            context_failed: detail.context_failed != 0,
            message: array_text(&detail.message),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.status, self.message)
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&status_name(*self as i32))
    }
}

fn status_name(status: i32) -> String {
    // SAFETY: a static string, never null.
    unsafe { text(sys::fsdp_get_status_name(status)) }.unwrap_or_default()
}

/// Turns a status into a result. If a hook of the caller has panicked during the call, the panic continues here.
#[inline]
pub(crate) fn check(status: sys::fsdp_status) -> Result<()> {
    hooks::resume_panic();
    if status == sys::FSDP_OK {
        Ok(())
    } else {
        Err(Error::of_last_call(status))
    }
}

/// The message of the last failing call of this thread, or "".
pub fn get_last_message() -> String {
    // SAFETY: it lives until the thread's next failing call.
    unsafe { text(sys::fsdp_get_last_message()) }.unwrap_or_default()
}

pub(crate) fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::new(Status::InvalidArgument, format!("{text:?} has a zero byte")))
}

/// A string of an options struct as the struct wants it.
pub(crate) fn as_pointer(text: &Option<Result<CString>>) -> Result<*const c_char> {
    match text {
        None => Ok(std::ptr::null()),
        Some(Ok(text)) => Ok(text.as_ptr()),
        Some(Err(error)) => Err(error.clone()),
    }
}

pub(crate) fn c_path(path: &std::path::Path) -> Result<CString> {
    use std::os::unix::ffi::OsStrExt;
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::new(Status::InvalidArgument, format!("{} has a zero byte", path.display())))
}

/// A string of the library's. Null gives `None`.
///
/// # Safety
/// It is null or NUL-terminated.
pub(crate) unsafe fn text(pointer: *const c_char) -> Option<String> {
    (!pointer.is_null()).then(|| CStr::from_ptr(pointer).to_string_lossy().into_owned())
}

/// The text in an array of a struct: up to its NUL.
pub(crate) fn array_text(array: &[c_char]) -> String {
    let bytes: Vec<u8> = array.iter().take_while(|letter| **letter != 0).map(|letter| *letter as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Text from a call with a buffer: asks for the size, then for the text. What it describes may grow in between.
pub(crate) fn read_text(call: impl Fn(*mut c_char, *mut u64) -> sys::fsdp_status) -> Result<String> {
    let mut size = 0;
    check(call(std::ptr::null_mut(), &mut size))?;
    for _ in 0..8 {
        let mut buffer = vec![0u8; size as usize];
        let room = size;
        let status = call(buffer.as_mut_ptr().cast(), &mut size);
        if status == sys::FSDP_OK || size <= room {
            check(status)?;
            let end = buffer.iter().position(|letter| *letter == 0).unwrap_or(buffer.len());
            return Ok(String::from_utf8_lossy(&buffer[..end]).into_owned());
        }
    }
    Err(Error::new(Status::Internal, "a text grew each time that it was asked for"))
}
