// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Plane, Status};
use crate::error::{c_path, c_string, check, text, Error, Result};
use crate::model::{as_root, no_slices};
use crate::param::find;
use crate::{
    sys, AdamwOptions, Element, Group, LoadOptions, Loaded, Matrices, MatrixOptions, Mesh, Model, ParamKey, Rename,
    Shard, ShardChunks, State,
};
use std::ops::Deref;
use std::os::raw::c_void;
use std::path::Path;
use std::ptr::null;

/// The update window: the only time when main weights may be written. [`step_adamw`](Window::step_adamw),
/// [`publish`](Window::publish) or [`discard`](Window::discard) ends it. It borrows the model alone, so no view lives.
///
/// A window that is dropped stays open in the library, as does one whose step fails before anything was written:
/// [`Model::window`] gives it again.
#[must_use = "step_adamw, publish or discard ends the window"]
pub struct Window<'m> {
    model: &'m mut Model,
}

impl Deref for Window<'_> {
    type Target = Model;
    fn deref(&self) -> &Model {
        self.model
    }
}

impl<'m> Window<'m> {
    pub(crate) fn open(model: &'m mut Model) -> Self {
        model.window_open = true;
        Window { model }
    }

    /// Ends the window by a call that returned this status. A hook's panic continues from here, and [`Model::window`]
    /// then still gives the window.
    pub(crate) fn opened_by(model: &'m mut Model, status: sys::fsdp_status) -> Result<Self> {
        model.window_open |= status == sys::FSDP_OK;
        check(status)?;
        Ok(Self::open(model))
    }

    // ---- its ends -----------------------------------------------------------------------------------------------

    /// One step of AdamW on this rank's shards, then publish.
    pub fn step_adamw(self, lr: f64, options: &AdamwOptions) -> Result<()> {
        let options = options.as_raw()?;
        self.end(|raw, stream| unsafe { sys::fsdp_step_adamw(raw, lr, &options, stream) })
    }

    /// Turns the main weights into compute weights and raises their version.
    pub fn publish(self) -> Result<()> {
        self.end(|raw, stream| unsafe { sys::fsdp_publish_weights(raw, stream) })
    }

    /// Discards the step; the main weights must not have been written.
    pub fn discard(self) -> Result<()> {
        self.end(|raw, stream| unsafe { sys::fsdp_discard_step(raw, stream) })
    }

    /// After a failure the window is open still, but in a context that has failed, where peers may be anywhere.
    fn end(self, call: impl FnOnce(*mut sys::fsdp_model, sys::fsdp_stream) -> sys::fsdp_status) -> Result<()> {
        let status = call(self.model.raw, self.model.stream.get());
        self.model.window_open = status != sys::FSDP_OK; // before a hook's panic goes on: the weights are shared again
        let result = check(status);
        if matches!(&result, Err(error) if error.context_failed) {
            self.model.window_open = false;
        }
        result
    }

    // ---- gradients ----------------------------------------------------------------------------------------------

    /// The L2 norm of all main grads, the same on every rank.
    pub fn grad_norm(&mut self) -> Result<f64> {
        self.norm_over(null())
    }

    /// The L2 norm of all main grads, also of the parts of the network that the mesh's other ranks have.
    pub fn grad_norm_over(&mut self, mesh: &Mesh) -> Result<f64> {
        self.norm_over(mesh.raw)
    }

    fn norm_over(&mut self, mesh: *const sys::fsdp_mesh) -> Result<f64> {
        let mut norm = 0.0;
        check(unsafe { sys::fsdp_get_grad_norm(self.model.raw, mesh, self.model.stream.get(), &mut norm) })?;
        Ok(norm)
    }

    /// Scales all main grads by max_norm / norm if the norm is larger, and returns the norm before clipping. If the
    /// norm is not finite, the gradients stay as they are, so test it.
    pub fn clip_grads(&mut self, max_norm: f64) -> Result<f64> {
        self.clip_over(null(), max_norm)
    }

    /// Scales all main grads as `clip_grads` does, by the norm over the mesh.
    pub fn clip_grads_over(&mut self, mesh: &Mesh, max_norm: f64) -> Result<f64> {
        self.clip_over(mesh.raw, max_norm)
    }

    fn clip_over(&mut self, mesh: *const sys::fsdp_mesh, max_norm: f64) -> Result<f64> {
        let (mut norm, stream) = (0.0, self.model.stream.get());
        check(unsafe { sys::fsdp_clip_grads(self.model.raw, mesh, max_norm, stream, &mut norm) })?;
        Ok(norm)
    }

    /// The L2 norm of each parameter's main grad, in the order of declaration.
    pub fn param_grad_norms(&mut self) -> Result<Vec<f64>> {
        let mut norms = vec![0.0; self.model.info()?.param_count as usize];
        let (pointer, count, stream) = (norms.as_mut_ptr(), norms.len() as u64, self.model.stream.get());
        check(unsafe { sys::fsdp_get_param_grad_norms(self.model.raw, stream, pointer, count) })?;
        Ok(norms)
    }

    /// As [`Model::param_weight_norms`], of the weights as they are in this window.
    pub fn param_weight_norms(&mut self) -> Result<Vec<f64>> {
        self.model.param_weight_norms()
    }

    /// The number of zeros in the main grads with which the step will change weights.
    pub fn count_zero_grads(&mut self) -> Result<u64> {
        let (mut zeros, stream) = (0, self.model.stream.get());
        check(unsafe { sys::fsdp_count_zero_grads(self.model.raw, stream, &mut zeros) })?;
        Ok(zeros)
    }

    /// Multiplies this rank's main grads; every rank gives the same factors.
    pub fn scale_grads(&mut self, factor: f64) -> Result<()> {
        check(unsafe { sys::fsdp_scale_grads(self.model.raw, factor, self.model.stream.get()) })
    }

    /// The first parameter whose main grads have Inf or NaN on any rank.
    pub fn check_grads(&mut self) -> Result<Option<String>> {
        let (mut found, mut name, stream) = (0, null(), self.model.stream.get());
        check(unsafe { sys::fsdp_check_grads(self.model.raw, stream, &mut found, &mut name) })?;
        // SAFETY: a name of the model's.
        Ok(if found == 0 { None } else { Some(unsafe { text(name) }.unwrap_or_default()) })
    }

    // ---- whole matrices -----------------------------------------------------------------------------------------

    /// Begins to bring each matrix of the model whole to one rank. Take them by [`Matrices::next`] until there are no
    /// more, then call [`Matrices::give_back`].
    pub fn collect_matrices(&mut self, options: &MatrixOptions) -> Result<Matrices<'_>> {
        Matrices::collect(self.model, options)
    }

    // ---- the rank's own part ------------------------------------------------------------------------------------

    /// How many shards this rank owns.
    pub fn shard_count(&self) -> Result<u64> {
        let mut count = 0;
        check(unsafe { sys::fsdp_get_shard_count(self.model.raw, &mut count) })?;
        Ok(count)
    }

    /// One shard with its addresses, for memory of a GPU.
    pub fn shard_as_raw(&self, index: u64) -> Result<sys::fsdp_shard> {
        let mut shard = sys::fsdp_shard::default();
        check(unsafe { sys::fsdp_get_shard(self.model.raw, index, &mut shard) })?;
        Ok(shard)
    }

    /// One of this rank's shards, in the order of declaration.
    pub fn shard(&mut self, index: u64) -> Result<Shard<'_>> {
        self.lend_shard(index)
    }

    /// All shards of this rank, which may be written at the same time.
    pub fn shards(&mut self) -> Result<Vec<Shard<'_>>> {
        (0..self.shard_count()?).map(|index| self.lend_shard(index)).collect()
    }

    /// This rank's shards at home in a file ([`Home::File`](crate::Home)), chunk by chunk: take them by
    /// [`ShardChunks::next`] until there are no more, for an optimizer of your own.
    pub fn shard_chunks(&mut self) -> Result<ShardChunks<'_>> {
        ShardChunks::begin(self.model)
    }

    /// The callers borrow the window alone, and lend no shard twice.
    fn lend_shard(&self, index: u64) -> Result<Shard<'_>> {
        if !self.model.on_host {
            return Err(no_slices());
        }
        let raw = self.shard_as_raw(index)?;
        let states = self.model.states_of(&raw, |name| self.shard_state(index, name))?;
        // SAFETY: the memory is this rank's alone while the window is open; shards do not overlap.
        unsafe { Shard::lend(self.model, &raw, states) }
    }

    fn shard_state(&self, index: u64, name: &str) -> Result<State<'_>> {
        let (c_name, mut tensor) = (c_string(name)?, sys::fsdp_tensor::default());
        check(unsafe { sys::fsdp_get_shard_state(self.model.raw, index, c_name.as_ptr(), &mut tensor) })?;
        Ok(State::new(name, tensor))
    }

    // ---- loading ------------------------------------------------------------------------------------------------

    /// Loads a whole parameter; every rank passes the same data.
    pub fn load_param<T: Element>(&mut self, group: Group, param: impl ParamKey, data: &[T]) -> Result<()> {
        self.load_whole(sys::FSDP_EVERY_RANK, group, param, Some(data), |raw, index, data, count, root| unsafe {
            sys::fsdp_load_param(raw, index, data, T::DTYPE as i32, count, root, 0)
        })
    }

    /// As the call above, but only rank `root` passes the data.
    pub fn load_param_from<T: Element>(
        &mut self,
        root: u32,
        group: Group,
        param: impl ParamKey,
        data: Option<&[T]>,
    ) -> Result<()> {
        self.load_whole(as_root(root)?, group, param, data, |raw, index, data, count, root| unsafe {
            sys::fsdp_load_param(raw, index, data, T::DTYPE as i32, count, root, 0)
        })
    }

    /// Loads a whole plane of a frozen quantized parameter as it is: [`E4m3`](crate::E4m3) codes,
    /// [`ScaleE8m0`](crate::ScaleE8m0) or `f32` scales. Every rank passes the same data.
    pub fn load_plane<T: Element>(
        &mut self,
        group: Group,
        param: impl ParamKey,
        plane: Plane,
        data: &[T],
    ) -> Result<()> {
        self.load_whole(sys::FSDP_EVERY_RANK, group, param, Some(data), |raw, index, data, count, root| unsafe {
            sys::fsdp_load_plane(raw, index, plane as i32, data, T::DTYPE as i32, count, root, 0)
        })
    }

    /// As the call above, but only rank `root` passes the data.
    pub fn load_plane_from<T: Element>(
        &mut self,
        root: u32,
        group: Group,
        param: impl ParamKey,
        plane: Plane,
        data: Option<&[T]>,
    ) -> Result<()> {
        self.load_whole(as_root(root)?, group, param, data, |raw, index, data, count, root| unsafe {
            sys::fsdp_load_plane(raw, index, plane as i32, data, T::DTYPE as i32, count, root, 0)
        })
    }

    /// Loads a whole optimizer state of a parameter; every rank passes the same data.
    pub fn load_state<T: Element>(&mut self, group: Group, param: impl ParamKey, name: &str, data: &[T]) -> Result<()> {
        let name = c_string(name)?;
        self.load_whole(sys::FSDP_EVERY_RANK, group, param, Some(data), |raw, index, data, count, root| unsafe {
            sys::fsdp_load_state(raw, index, name.as_ptr(), data, T::DTYPE as i32, count, root, 0)
        })
    }

    /// As the call above, but only rank `root` passes the data.
    pub fn load_state_from<T: Element>(
        &mut self,
        root: u32,
        group: Group,
        param: impl ParamKey,
        name: &str,
        data: Option<&[T]>,
    ) -> Result<()> {
        let name = c_string(name)?;
        self.load_whole(as_root(root)?, group, param, data, |raw, index, data, count, root| unsafe {
            sys::fsdp_load_state(raw, index, name.as_ptr(), data, T::DTYPE as i32, count, root, 0)
        })
    }

    /// Replaces a whole main gradient; every rank passes the same data.
    pub fn load_grad<T: Element>(&mut self, group: Group, param: impl ParamKey, data: &[T]) -> Result<()> {
        self.load_whole(sys::FSDP_EVERY_RANK, group, param, Some(data), |raw, index, data, count, root| unsafe {
            sys::fsdp_load_grad(raw, index, data, T::DTYPE as i32, count, root, 0)
        })
    }

    /// As the call above, but only rank `root` passes the data.
    pub fn load_grad_from<T: Element>(
        &mut self,
        root: u32,
        group: Group,
        param: impl ParamKey,
        data: Option<&[T]>,
    ) -> Result<()> {
        self.load_whole(as_root(root)?, group, param, data, |raw, index, data, count, root| unsafe {
            sys::fsdp_load_grad(raw, index, data, T::DTYPE as i32, count, root, 0)
        })
    }

    /// A whole main gradient as the optimizer will see it, on every rank.
    pub fn read_grad<T: Element>(&self, group: Group, param: impl ParamKey) -> Result<Vec<T>> {
        self.model.read_whole(group, param, |raw, index, data, count| unsafe {
            sys::fsdp_read_grad(raw, index, data, T::DTYPE as i32, count, sys::FSDP_EVERY_RANK, 0)
        })
    }

    /// As the call above, but only rank `root` gets the data; the others get `None`.
    pub fn read_grad_on<T: Element>(&self, root: u32, group: Group, param: impl ParamKey) -> Result<Option<Vec<T>>> {
        let root = as_root(root)?;
        self.model.read_whole_on(root, group, param, |raw, index, data, count| unsafe {
            sys::fsdp_read_grad(raw, index, data, T::DTYPE as i32, count, root, 0)
        })
    }

    fn load_whole<T: Element>(
        &mut self,
        root: i32,
        group: Group,
        param: impl ParamKey,
        data: Option<&[T]>,
        call: impl FnOnce(*mut sys::fsdp_group, u64, *const c_void, u64, i32) -> sys::fsdp_status,
    ) -> Result<()> {
        let entry = self.model.entry(group)?;
        let index = find(entry, param)?;
        let (pointer, count) = match data {
            Some(data) => (data.as_ptr(), data.len() as u64),
            None => (null(), entry.element_counts[index]),
        };
        check(call(entry.raw, index as u64, pointer.cast(), count, root))
    }

    /// Loads rows of a parameter that this rank owns, from `row_offset` on.
    pub fn load_chunk<T: Element>(
        &mut self,
        group: Group,
        param: impl ParamKey,
        data: &[T],
        row_offset: u64,
    ) -> Result<()> {
        let entry = self.model.entry(group)?;
        let index = find(entry, param)?;
        let rows = self.model.param_info(group, index)?.shape.first().copied().unwrap_or(1);
        let row_size = entry.element_counts[index] / rows;
        if data.len() as u64 % row_size != 0 {
            let what = format!("{} elements are no whole rows of {row_size}", data.len());
            return Err(Error::new(Status::InvalidArgument, what));
        }
        let (pointer, row_count) = (data.as_ptr().cast(), data.len() as u64 / row_size);
        check(unsafe {
            sys::fsdp_load_chunk(entry.raw, index as u64, pointer, T::DTYPE as i32, row_offset, row_count, 0)
        })
    }

    /// Loads the folder's newest whole checkpoint, or the checkpoint that it is: `fsdp_load`.
    pub fn load(&mut self, folder: impl AsRef<Path>, options: &LoadOptions) -> Result<Loaded> {
        let (folder, options) = (c_path(folder.as_ref())?, options.as_raw()?);
        let mut loaded = sys::fsdp_loaded::default();
        check(unsafe { sys::fsdp_load(self.model.raw, folder.as_ptr(), &options, &mut loaded) })?;
        Ok(Loaded::from_raw(&loaded))
    }

    /// Loads weights alone, out of safetensors files that any library wrote: `fsdp_load_weights`.
    pub fn load_weights(
        &mut self,
        path: impl AsRef<Path>,
        renames: &[Rename],
        options: &LoadOptions,
    ) -> Result<Loaded> {
        let (path, options) = (c_path(path.as_ref())?, options.as_raw()?);
        let names = renames.iter().map(Rename::c_names).collect::<Result<Vec<_>>>()?;
        let raws: Vec<_> = renames.iter().zip(&names).map(|(rename, names)| rename.as_raw(names)).collect();
        let (pointer, count) = (raws.as_ptr(), raws.len() as u64);
        let (stride, mut loaded) = (std::mem::size_of::<sys::fsdp_rename>() as u64, sys::fsdp_loaded::default());
        check(unsafe {
            sys::fsdp_load_weights(self.model.raw, path.as_ptr(), pointer, count, stride, &options, &mut loaded)
        })?;
        Ok(Loaded::from_raw(&loaded))
    }
}
