// SPDX-License-Identifier: Apache-2.0
use crate::error::{check, Result};
use crate::hooks::Hooks;
use crate::{sys, Context, GroupOptions, MeshOptions, ModelOptions};
use std::sync::Arc;

/// Ranks arranged as replicate x shard. Models made from it keep what they need.
pub struct Mesh {
    pub(crate) raw: *mut sys::fsdp_mesh,
    _hooks: Arc<Hooks>,
}

// SAFETY: as for Context.
unsafe impl Send for Mesh {}

impl Mesh {
    /// `fsdp_create_mesh`; collective over its ranks.
    pub fn new(context: &Context, options: &MeshOptions) -> Result<Self> {
        let options = options.as_raw()?;
        let mut raw = std::ptr::null_mut();
        check(unsafe { sys::fsdp_create_mesh(context.raw, &options, &mut raw) })?;
        Ok(Mesh { raw, _hooks: context.hooks.clone() })
    }

    /// The handle, for calls of [`sys`].
    pub fn as_raw(&self) -> *mut sys::fsdp_mesh {
        self.raw
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        unsafe { sys::fsdp_destroy_mesh(self.raw) };
    }
}

impl ModelOptions {
    /// The mesh that the model is sharded over; without one, 1 x world. It must live until [`Model::new`](crate::Model::new).
    pub fn mesh(mut self, mesh: &Mesh) -> Self {
        self.raw.mesh = mesh.raw; // a number: that of a mesh that has gone is an error of the call
        self
    }
}

impl GroupOptions {
    /// The mesh of the ranks that share the group, for example those that have the same experts; without one, the
    /// model's. It must live until [`Model::create_group`](crate::Model::create_group).
    pub fn mesh(mut self, mesh: &Mesh) -> Self {
        self.raw.mesh = mesh.raw;
        self
    }
}
