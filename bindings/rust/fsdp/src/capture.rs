// SPDX-License-Identifier: Apache-2.0
use crate::enums::Status;
use crate::error::{check, Error, Result};
use crate::hooks::Hooks;
use crate::{sys, Model};
use std::ptr::null_mut;
use std::sync::Arc;

/// A part of a step that was captured into a CUDA graph.
pub struct Capture {
    raw: *mut sys::fsdp_capture,
    model: *mut sys::fsdp_model, // compared, never followed
    window_open: bool,
    _hooks: Arc<Hooks>,
}

// SAFETY: as for Context.
unsafe impl Send for Capture {}

impl Model {
    /// From here to [`end_capture`](Model::end_capture) the model's calls record their work into the graph that the model's
    /// stream is being captured into. `fsdp_begin_capture` says which calls may.
    ///
    /// # Safety
    /// The stream that was set is being captured.
    pub unsafe fn begin_capture(&mut self) -> Result<()> {
        check(sys::fsdp_begin_capture(self.raw, self.stream.get()))
    }

    /// Ends it, and puts the model back into the state of before: whether the update window was open then is passed.
    ///
    /// # Safety
    /// As for `begin_capture`; the window was open, or was not, when it was called.
    pub unsafe fn end_capture(&mut self, window_was_open: bool) -> Result<Capture> {
        let mut raw = null_mut();
        let window_open = self.window_open;
        self.window_open = window_was_open;
        check(sys::fsdp_end_capture(self.raw, self.stream.get(), &mut raw))?;
        Ok(Capture { raw, model: self.raw, window_open, _hooks: self.hooks.clone() })
    }

    /// Before each launch of the graph on the model's stream; lr counts only if the capture has a step.
    ///
    /// # Safety
    /// The stream lives until [`commit_replay`](Model::commit_replay) or [`cancel_replay`](Model::cancel_replay).
    pub unsafe fn prepare_replay(&mut self, capture: &Capture, lr: f64) -> Result<()> {
        self.owns(capture)?;
        check(sys::fsdp_prepare_replay(capture.raw, lr, self.stream.get()))
    }

    /// After the graph was launched: the model goes on as if the captured calls had been made.
    ///
    /// # Safety
    /// The graph was launched on the model's stream.
    pub unsafe fn commit_replay(&mut self, capture: &Capture) -> Result<()> {
        self.owns(capture)?;
        check(sys::fsdp_commit_replay(capture.raw, self.stream.get()))?;
        self.window_open = capture.window_open;
        Ok(())
    }

    /// Instead, where the graph was not launched.
    ///
    /// # Safety
    /// It was not.
    pub unsafe fn cancel_replay(&mut self, capture: &Capture) -> Result<()> {
        self.owns(capture)?;
        check(sys::fsdp_cancel_replay(capture.raw, self.stream.get()))
    }

    fn owns(&self, capture: &Capture) -> Result<()> {
        if capture.model == self.raw {
            return Ok(());
        }
        Err(Error::new(Status::InvalidHandle, "the capture is of another model"))
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        unsafe { sys::fsdp_destroy_capture(self.raw) };
    }
}
