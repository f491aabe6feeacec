// SPDX-License-Identifier: Apache-2.0
use crate::enums::{BytesOwner, CheckpointState, Status};
use crate::error::{array_text, c_path, c_string, check, read_text, Result};
use crate::hooks::Hooks;
use crate::{sys, Context, LoadOptions, Model, SaveOptions, Window};
use std::ffi::CString;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

/// A checkpoint that is being saved while training goes on, or one that was opened to be read.
///
/// A save goes on when it is dropped; [`Context::close`] waits for it.
pub struct Checkpoint {
    raw: *mut sys::fsdp_checkpoint,
    _hooks: Arc<Hooks>,
}

// SAFETY: as for Context.
unsafe impl Send for Checkpoint {}

impl Checkpoint {
    /// Begins a checkpoint for the folder; nothing of it is in the folder yet.
    pub fn begin(context: &Context, folder: impl AsRef<Path>, options: &SaveOptions) -> Result<Self> {
        let (folder, options, mut raw) = (c_path(folder.as_ref())?, options.as_raw()?, null_mut());
        check(unsafe { sys::fsdp_begin_checkpoint(context.raw, folder.as_ptr(), &options, &mut raw) })?;
        Ok(Checkpoint { raw, _hooks: context.hooks.clone() })
    }

    /// Opens the folder's newest checkpoint, or the checkpoint that the folder itself is.
    pub fn open(context: &Context, folder: impl AsRef<Path>) -> Result<Self> {
        let (folder, mut raw) = (c_path(folder.as_ref())?, null_mut());
        check(unsafe { sys::fsdp_open_checkpoint(context.raw, folder.as_ptr(), &mut raw) })?;
        Ok(Checkpoint { raw, _hooks: context.hooks.clone() })
    }

    /// Adds a model to the checkpoint, with the data that it will have at the commit.
    pub fn add_model(&mut self, name: &str, model: &Model) -> Result<()> {
        let name = c_string(name)?;
        check(unsafe { sys::fsdp_add_checkpoint_model(self.raw, name.as_ptr(), model.raw) })
    }

    /// Adds bytes of the program's own to the checkpoint.
    pub fn add_bytes(&mut self, name: &str, data: &[u8], owner: BytesOwner) -> Result<()> {
        let (name, size) = (c_string(name)?, data.len() as u64);
        check(unsafe {
            sys::fsdp_add_checkpoint_bytes(self.raw, name.as_ptr(), data.as_ptr().cast(), size, owner as i32)
        })
    }

    /// Saves it while training goes on.
    pub fn commit(&mut self) -> Result<()> {
        check(unsafe { sys::fsdp_commit_checkpoint(self.raw) })
    }

    /// Its progress.
    pub fn status(&self) -> Result<CheckpointStatus> {
        let mut raw = sys::fsdp_checkpoint_status::default();
        check(unsafe { sys::fsdp_get_checkpoint_status(self.raw, &mut raw) })?;
        Ok(CheckpointStatus {
            state: CheckpointState::from_raw(raw.state).expect("a state of this release"),
            status: Status::from_raw(raw.status).unwrap_or(Status::Internal),
            bytes: raw.bytes,
            bytes_in_all: raw.bytes_in_all,
            step: raw.step,
            ranks: raw.ranks,
            name: array_text(&raw.name),
        })
    }

    /// Waits until it is saved or is known to have failed.
    pub fn wait(&mut self) -> Result<()> {
        check(unsafe { sys::fsdp_wait_checkpoint(self.raw) })
    }

    /// Loads a model out of an opened checkpoint.
    pub fn load_model(&mut self, name: &str, window: &mut Window<'_>, options: &LoadOptions) -> Result<Loaded> {
        let (name, options, mut loaded) = (c_string(name)?, options.as_raw()?, sys::fsdp_loaded::default());
        let model = window.as_raw();
        check(unsafe { sys::fsdp_load_checkpoint_model(self.raw, name.as_ptr(), model, &options, &mut loaded) })?;
        Ok(Loaded::from_raw(&loaded))
    }

    /// Reads bytes out of an opened checkpoint.
    pub fn read_bytes(&mut self, name: &str) -> Result<Vec<u8>> {
        let (name, mut size) = (c_string(name)?, 0);
        check(unsafe { sys::fsdp_read_checkpoint_bytes(self.raw, name.as_ptr(), null_mut(), &mut size) })?;
        let mut data = vec![0; size as usize];
        check(unsafe {
            sys::fsdp_read_checkpoint_bytes(self.raw, name.as_ptr(), data.as_mut_ptr().cast(), &mut size)
        })?;
        Ok(data)
    }

    /// The handle, for calls of [`sys`].
    pub fn as_raw(&self) -> *mut sys::fsdp_checkpoint {
        self.raw
    }
}

impl Drop for Checkpoint {
    fn drop(&mut self) {
        unsafe { sys::fsdp_destroy_checkpoint(self.raw) };
    }
}

/// The checkpoints of a folder as JSON, the newest first.
pub fn list_checkpoints(folder: impl AsRef<Path>) -> Result<String> {
    let folder = c_path(folder.as_ref())?;
    read_text(|buffer, size| unsafe { sys::fsdp_list_checkpoints(folder.as_ptr(), buffer, size) })
}

/// The progress of a checkpoint: `fsdp_checkpoint_status`.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct CheckpointStatus {
    /// Its state.
    pub state: CheckpointState,
    /// If it has failed: the status that its wait returns.
    pub status: Status,
    /// Bytes of its files that this rank has written.
    pub bytes: u64,
    /// Bytes of its files that this rank will have written; if it was opened, bytes of all its files.
    pub bytes_in_all: u64,
    /// The checkpoint's step, once it is known.
    pub step: u64,
    /// If it was opened: the number of ranks that saved it.
    pub ranks: u32,
    /// Its name in the folder; empty if it is not committed.
    pub name: String,
}

/// What was loaded: `fsdp_loaded`.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The checkpoint's step.
    pub step: u64,
    /// The checkpoint's number, which rises with every checkpoint of a folder.
    pub sequence: u64,
    /// Bytes of the checkpoint's files that this rank keeps.
    pub wanted_bytes: u64,
    /// Bytes that this rank has read for them.
    pub read_bytes: u64,
    /// The number of ranks that saved it.
    pub ranks: u32,
    /// The number of damaged checkpoints that were passed over; each is or may be newer.
    pub passed_over: u32,
    /// The checkpoint's name in the folder; empty if nothing was loaded.
    pub name: String,
    /// The number of the model's tensors that the files have. `Model::describe_load` has their names, and those of the
    /// tensors counted below.
    pub loaded_tensors: u64,
    /// The number of the model's tensors that the files lack, which stay as they were.
    pub missing_tensors: u64,
    /// The number of tensors of the files that the model lacks.
    pub unexpected_tensors: u64,
}

impl Loaded {
    pub(crate) fn from_raw(raw: &sys::fsdp_loaded) -> Self {
        Loaded {
            step: raw.step,
            sequence: raw.sequence,
            wanted_bytes: raw.wanted_bytes,
            read_bytes: raw.read_bytes,
            ranks: raw.ranks,
            passed_over: raw.passed_over,
            name: array_text(&raw.name),
            loaded_tensors: raw.loaded_tensors,
            missing_tensors: raw.missing_tensors,
            unexpected_tensors: raw.unexpected_tensors,
        }
    }
}

/// Where a weight of another library's files goes: `fsdp_rename`.
#[derive(Clone, Debug)]
pub struct Rename {
    theirs: String,
    ours: String,
    raw_rows: (u64, u64, u64),
    flags: u32,
}

impl Rename {
    /// A tensor's name in the files, and the parameter's; a `*` stands for the same text in both.
    pub fn new(theirs: &str, ours: &str) -> Self {
        Rename { theirs: theirs.to_string(), ours: ours.to_string(), raw_rows: (0, 0, 0), flags: 0 }
    }

    /// `row_count` rows of theirs from `from_row` on become ours from `to_row` on; a count of 0: all from there on.
    pub fn rows(mut self, from_row: u64, to_row: u64, row_count: u64) -> Self {
        self.raw_rows = (from_row, to_row, row_count);
        self
    }

    /// Theirs is a matrix whose columns are the rows of ours.
    pub fn transposed(mut self) -> Self {
        self.flags |= sys::FSDP_RENAME_TRANSPOSED;
        self
    }

    pub(crate) fn c_names(&self) -> Result<(CString, CString)> {
        Ok((c_string(&self.theirs)?, c_string(&self.ours)?))
    }

    pub(crate) fn as_raw(&self, names: &(CString, CString)) -> sys::fsdp_rename {
        let (from_row, to_row, row_count) = self.raw_rows;
        let (theirs, ours) = (names.0.as_ptr(), names.1.as_ptr());
        sys::fsdp_rename { theirs, ours, from_row, to_row, row_count, flags: self.flags, reserved: 0 }
    }
}
