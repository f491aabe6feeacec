// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Dtype, Phase, Role, Status};
use crate::error::{c_path, c_string, check, read_text, Error, Result};
use crate::group::{foreign, GroupEntry};
use crate::hooks::Hooks;
use crate::param::find;
use crate::schedule::raw_visit;
use crate::{
    sys, AdamwOptions, Context, Element, FullGrad, Grads, Group, GroupInfo, GroupOptions, ModelOptions, Param,
    ParamInfo, ParamKey, SaveOptions, Schedule, State, Tensor, Weights, Window,
};
use std::cell::Cell;
use std::os::raw::c_void;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// What a sealed model consists of: `fsdp_model_info`.
pub type ModelInfo = sys::fsdp_model_info;
/// Counters of one rank's model since its seal: `fsdp_stats`.
pub type Stats = sys::fsdp_stats;
/// Which part of a parameter a rank has to load: `fsdp_chunk`.
pub type Chunk = sys::fsdp_chunk;

const EVERY_RANK: i32 = sys::FSDP_EVERY_RANK;

/// The groups that train together. Dropping it destroys it and never waits for peers.
///
/// What lends weights or gradients borrows it, and what ends a step borrows it alone: `finish_grads` does not compile while a
/// view lives, nor does dropping the model.
///
/// ```compile_fail,E0502
/// # fn finish_with_a_live_view(mut model: fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
/// let weights = model.unshard(layer, fsdp::Phase::Forward)?;
/// let w: &[f32] = weights.get("weight")?;
/// model.finish_grads(1.0)?; // peers may write from here on
/// println!("{}", w[0]);
/// # Ok(()) }
/// ```
///
/// ```compile_fail,E0505
/// # fn dropped_under_a_view(model: fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
/// let weights = model.unshard(layer, fsdp::Phase::Forward)?;
/// drop(model); // unmaps what weights lends
/// let w: &[f32] = weights.get("weight")?;
/// # Ok(()) }
/// ```
///
/// It can be sent to another thread, and not be shared with one:
///
/// ```compile_fail,E0277
/// # fn shared<T: Sync>() {}
/// shared::<fsdp::Model>();
/// ```
pub struct Model {
    pub(crate) raw: *mut sys::fsdp_model,
    pub(crate) hooks: Arc<Hooks>,
    pub(crate) on_host: bool,
    pub(crate) stream: Cell<sys::fsdp_stream>,
    pub(crate) window_open: bool,
    /// The names of the states; AdamW's come first, if it is the model's optimizer.
    pub(crate) states: Vec<String>,
    pub(crate) adamw_states: usize,
    /// AdamW's states, the first two, may be codes with scales.
    pub(crate) has_codes: bool,
    /// Whether views of gathered weights keep their addresses.
    pub(crate) has_fixed_addresses: bool,
    rank: u32,
    number: u64,
    groups: Vec<GroupEntry>,
}

// SAFETY: as for Context; the cells inside belong to the thread that has the model.
unsafe impl Send for Model {}

// ---- declaring --------------------------------------------------------------------------------------------------

impl Model {
    /// An empty model: `fsdp_create_model`.
    pub fn new(context: &Context, options: &ModelOptions) -> Result<Self> {
        static MADE: AtomicU64 = AtomicU64::new(1);
        let options = options.as_raw()?;
        let mut raw = null_mut();
        check(unsafe { sys::fsdp_create_model(context.raw, &options, &mut raw) })?;
        let adamw = options.optimizer != sys::FSDP_OPTIMIZER_CALLER;
        let states = if adamw { vec!["exp_avg".to_string(), "exp_avg_sq".to_string()] } else { Vec::new() };
        Ok(Model {
            raw,
            hooks: context.hooks.clone(),
            on_host: context.on_host,
            stream: Cell::new(null_mut()),
            window_open: false,
            adamw_states: states.len(),
            states,
            has_codes: options.optimizer == sys::FSDP_OPTIMIZER_ADAMW_8BIT,
            has_fixed_addresses: true,
            rank: context.rank(),
            number: MADE.fetch_add(1, Ordering::Relaxed),
            groups: Vec::new(),
        })
    }

    /// Declares a group: `fsdp_create_group`.
    pub fn create_group(&mut self, name: &str, params: &[Param], options: &GroupOptions) -> Result<Group> {
        let names = params.iter().map(Param::c_name).collect::<Result<Vec<_>>>()?;
        let raws = params.iter().zip(&names).map(|(param, name)| param.as_raw(name)).collect::<Result<Vec<_>>>()?;
        let (c_name, options) = (c_string(name)?, options.as_raw()?);
        let (count, stride) = (raws.len() as u64, std::mem::size_of::<sys::fsdp_param>() as u64);
        let mut raw = null_mut();
        check(unsafe {
            sys::fsdp_create_group(self.raw, c_name.as_ptr(), raws.as_ptr(), count, stride, &options, &mut raw)
        })?;
        self.groups.push(GroupEntry::new(raw, name, params));
        Ok(Group { model: self.number, index: self.groups.len() as u32 - 1 })
    }

    /// The order in which groups will be visited.
    pub fn set_schedule(&mut self, schedule: Schedule<'_>) -> Result<()> {
        let visits = schedule.visits();
        let raw = visits.iter().map(|visit| self.entry(visit.0).map(|_| raw_visit(visit)));
        let visits = raw.collect::<Result<Vec<_>>>()?;
        let mut options = sys::fsdp_schedule_options { held_groups: schedule.held_groups(), ..Default::default() };
        if !visits.is_empty() {
            options.visits = visits.as_ptr();
            options.visit_count = visits.len() as u64;
            options.visit_stride = std::mem::size_of::<sys::fsdp_visit>() as u64;
        }
        let status = unsafe { sys::fsdp_set_schedule(self.raw, schedule.kind() as i32, &options) };
        if status == sys::FSDP_OK {
            self.has_fixed_addresses = !matches!(schedule, Schedule::Any { .. });
        }
        check(status)
    }

    /// A state tensor for the caller's own optimizer, zeroed at the seal.
    pub fn add_optimizer_state(&mut self, name: &str, dtype: Dtype) -> Result<()> {
        let c_name = c_string(name)?;
        check(unsafe { sys::fsdp_add_optimizer_state(self.raw, c_name.as_ptr(), dtype as i32) })?;
        self.states.push(name.to_string());
        Ok(())
    }

    /// Hands in the memory of a role.
    ///
    /// # Safety
    /// It is `size_bytes` long, aligned to 4096, not used by anything else, and outlives the model; on a GPU it is memory of that GPU.
    pub unsafe fn set_arena(&mut self, role: Role, data: *mut c_void, size_bytes: u64) -> Result<()> {
        check(sys::fsdp_set_arena(self.raw, role as i32, data, size_bytes))
    }

    /// What the seal would refuse in this rank's declarations, one violation a line.
    pub fn check(&self) -> Result<String> {
        read_text(|buffer, size| unsafe { sys::fsdp_check_model(self.raw, buffer, size) })
    }

    /// Plans and allocates all memory, and compares what every rank declared. The model is then in its first update window:
    /// load parameters, then [`Window::publish`].
    pub fn seal(&mut self) -> Result<Window<'_>> {
        let status = unsafe { sys::fsdp_seal_model(self.raw) };
        Window::opened_by(self, status)
    }

    // ---- asking -------------------------------------------------------------------------------------------------

    pub(crate) fn entry(&self, group: Group) -> Result<&GroupEntry> {
        if group.model != self.number {
            return Err(foreign(group));
        }
        Ok(&self.groups[group.index as usize]) // groups are never taken away
    }

    /// How many groups were created.
    pub fn group_count(&self) -> Result<u64> {
        let mut count = 0;
        check(unsafe { sys::fsdp_get_group_count(self.raw, &mut count) })?;
        Ok(count)
    }

    /// The group of that number, in the order of creation.
    pub fn group_at(&self, index: u64) -> Result<Group> {
        let mut raw = null_mut();
        check(unsafe { sys::fsdp_get_group(self.raw, index, &mut raw) })?;
        self.group_of(raw)
    }

    /// The group of that name.
    pub fn group(&self, name: &str) -> Result<Group> {
        let (name, mut raw) = (c_string(name)?, null_mut());
        check(unsafe { sys::fsdp_find_group(self.raw, name.as_ptr(), &mut raw) })?;
        self.group_of(raw)
    }

    /// The parameter of that name: its group, and its number there.
    pub fn find_param(&self, name: &str) -> Result<(Group, usize)> {
        let (name, mut raw, mut index) = (c_string(name)?, null_mut(), 0);
        check(unsafe { sys::fsdp_find_param(self.raw, name.as_ptr(), &mut raw, &mut index) })?;
        Ok((self.group_of(raw)?, index as usize))
    }

    pub(crate) fn group_of(&self, raw: *mut sys::fsdp_group) -> Result<Group> {
        let index = self.groups.iter().position(|entry| entry.raw == raw);
        let unknown = || Error::new(Status::Internal, "the library knows a group that was not created here");
        Ok(Group { model: self.number, index: index.ok_or_else(unknown)? as u32 })
    }

    /// The states that the parameter of a shard has, with the scales of those that are codes.
    pub(crate) fn states_of<'a>(
        &'a self,
        raw: &sys::fsdp_shard,
        find: impl Fn(&str) -> Result<State<'a>>,
    ) -> Result<Vec<State<'a>>> {
        let mut param = sys::fsdp_param::default();
        check(unsafe { sys::fsdp_get_param_info(raw.group, raw.param_index, &mut param) })?;
        let first = if param.optimizer == sys::FSDP_OPTIMIZER_CALLER { self.adamw_states } else { 0 };
        let mut states = Vec::new();
        for (number, name) in self.states.iter().enumerate().skip(first).take(raw.state_count as usize) {
            let state = find(name)?;
            let has_scales = self.has_codes && number < self.adamw_states && state.tensor().dtype() == Dtype::Uint8;
            states.push(state);
            if has_scales {
                states.push(find(&format!("{name}.absmax"))?);
            }
        }
        Ok(states)
    }

    /// What the group was declared as.
    pub fn group_info(&self, group: Group) -> Result<GroupInfo> {
        let mut info = sys::fsdp_group_info::default();
        check(unsafe { sys::fsdp_get_group_info(self.entry(group)?.raw, &mut info) })?;
        Ok(GroupInfo::from_raw(&info))
    }

    /// The parameter as it was declared.
    pub fn param_info(&self, group: Group, param: impl ParamKey) -> Result<ParamInfo> {
        let entry = self.entry(group)?;
        let (index, mut info) = (find(entry, param)?, sys::fsdp_param::default());
        check(unsafe { sys::fsdp_get_param_info(entry.raw, index as u64, &mut info) })?;
        Ok(ParamInfo::from_raw(&info))
    }

    /// The part of a parameter that a rank stores.
    pub fn chunk(&self, group: Group, param: impl ParamKey, rank: u32) -> Result<Chunk> {
        let entry = self.entry(group)?;
        let (index, mut chunk) = (find(entry, param)?, Chunk::default());
        check(unsafe { sys::fsdp_get_chunk(entry.raw, index as u64, rank, &mut chunk) })?;
        Ok(chunk)
    }

    /// The bytes of a role that a rank holds by plan.
    pub fn role_bytes(&self, role: Role, rank: u32) -> Result<u64> {
        let mut bytes = 0;
        check(unsafe { sys::fsdp_get_role_bytes(self.raw, role as i32, rank, &mut bytes) })?;
        Ok(bytes)
    }

    /// The bytes of a role that this rank has allocated.
    pub fn allocated_bytes(&self, role: Role) -> Result<u64> {
        let mut bytes = 0;
        check(unsafe { sys::fsdp_get_allocated_bytes(self.raw, role as i32, &mut bytes) })?;
        Ok(bytes)
    }

    /// What the model consists of.
    pub fn info(&self) -> Result<ModelInfo> {
        let mut info = ModelInfo::default();
        check(unsafe { sys::fsdp_get_model_info(self.raw, &mut info) })?;
        Ok(info)
    }

    /// Counters since the seal.
    pub fn stats(&self) -> Result<Stats> {
        let mut stats = Stats::default();
        check(unsafe { sys::fsdp_get_stats(self.raw, &mut stats) })?;
        Ok(stats)
    }

    /// The layout as JSON.
    pub fn describe(&self) -> Result<String> {
        read_text(|buffer, size| unsafe { sys::fsdp_describe_model(self.raw, buffer, size) })
    }

    /// The matrices' owners, costs, waves and bytes as JSON.
    pub fn matrix_plan(&self) -> Result<String> {
        read_text(|buffer, size| unsafe { sys::fsdp_get_matrix_plan(self.raw, buffer, size) })
    }

    /// The last load as JSON: the names of what was loaded, missing and unexpected.
    pub fn describe_load(&self) -> Result<String> {
        read_text(|buffer, size| unsafe { sys::fsdp_describe_load(self.raw, buffer, size) })
    }

    /// The norm that the last clip or norm found.
    pub fn last_norm(&self) -> Result<f64> {
        let mut norm = 0.0;
        check(unsafe { sys::fsdp_get_last_norm(self.raw, &mut norm) })?;
        Ok(norm)
    }

    /// The L2 norm of each parameter's main weights, in the order of declaration; NaN if it is frozen and has no
    /// numbers.
    pub fn param_weight_norms(&mut self) -> Result<Vec<f64>> {
        let mut norms = vec![0.0; self.info()?.param_count as usize];
        let (pointer, count, stream) = (norms.as_mut_ptr(), norms.len() as u64, self.stream.get());
        check(unsafe { sys::fsdp_get_param_weight_norms(self.raw, stream, pointer, count) })?;
        Ok(norms)
    }

    /// The handle, for calls of [`sys`].
    pub fn as_raw(&self) -> *mut sys::fsdp_model {
        self.raw
    }

    /// The group's handle, for calls of [`sys`].
    pub fn group_as_raw(&self, group: Group) -> Result<*mut sys::fsdp_group> {
        Ok(self.entry(group)?.raw)
    }

    /// Sets the stream that calls of this model use from now on; it is null at first.
    ///
    /// # Safety
    /// On a GPU it lives until the next call of this, and until the reduce of what was acquired on it. On the host it is null.
    pub unsafe fn set_stream(&self, stream: sys::fsdp_stream) {
        self.stream.set(stream);
    }

    // ---- training -----------------------------------------------------------------------------------------------

    /// Starts gathering a group ahead of its unshard.
    pub fn prefetch(&self, group: Group, phase: Phase) -> Result<()> {
        check(unsafe { sys::fsdp_prefetch(self.entry(group)?.raw, phase as i32, 0, self.stream.get()) })
    }

    /// Shows the true weights of a group again after a write through views of them, of which no guard is alive.
    pub fn restore_view(&mut self, group: Group) -> Result<()> {
        check(unsafe { sys::fsdp_restore_view(self.entry(group)?.raw) })
    }

    /// Makes the full compute weights readable, until the guard ends.
    #[inline]
    pub fn unshard(&self, group: Group, phase: Phase) -> Result<Weights<'_>> {
        Weights::unshard(self, self.entry(group)?, None, phase)
    }

    /// Makes the full compute weights of one piece of the group (0, 1, ...) readable, until the guard ends.
    #[inline]
    pub fn unshard_piece(&self, group: Group, piece: u32, phase: Phase) -> Result<Weights<'_>> {
        Weights::unshard(self, self.entry(group)?, Some(piece), phase)
    }

    /// Returns a hold that no guard will return: that of a leaked one.
    ///
    /// # Safety
    /// No view of a guard of this group and phase is used any more.
    pub unsafe fn reshard(&self, group: Group, phase: Phase) -> Result<()> {
        check(sys::fsdp_reshard(self.entry(group)?.raw, phase as i32, 0, self.stream.get()))
    }

    /// Returns a hold of a piece that no guard will return: that of a leaked one.
    ///
    /// # Safety
    /// No view of a guard of this group, piece and phase is used any more.
    pub unsafe fn reshard_piece(&self, group: Group, piece: u32, phase: Phase) -> Result<()> {
        check(sys::fsdp_reshard_piece(self.entry(group)?.raw, piece, phase as i32, 0, self.stream.get()))
    }

    /// The compute weights' address, without a hold: `fsdp_get_param` says when it may be read.
    pub fn param(&self, group: Group, param: impl ParamKey, phase: Phase) -> Result<Tensor<'_>> {
        let entry = self.entry(group)?;
        let (index, mut tensor) = (find(entry, param)?, sys::fsdp_tensor::default());
        check(unsafe { sys::fsdp_get_param(entry.raw, index as u64, phase as i32, &mut tensor) })?;
        Ok(Tensor::new(tensor))
    }

    /// Claims the group's full gradients, to write them and to reduce them. While a claim lives there is no second one: an
    /// error of [`Status::InvalidState`].
    pub fn grads(&self, group: Group) -> Result<Grads<'_>> {
        Grads::claim(self, self.entry(group)?)
    }

    /// Ends the step's gradients: waits for all reduces, multiplies main grads by scale (1: as they are), and opens the update
    /// window once every rank has come here.
    pub fn finish_grads(&mut self, scale: f64) -> Result<Window<'_>> {
        self.forget_claims();
        let status = unsafe { sys::fsdp_finish_grads(self.raw, scale, 0, self.stream.get()) };
        Window::opened_by(self, status)
    }

    /// Ends the step's gradients if no contribution was marked as the last one: this call ends them, and a group
    /// without any contribution gets zeros. All ranks must call this.
    pub fn finish_last_grads(&mut self, scale: f64) -> Result<Window<'_>> {
        self.forget_claims();
        let status = unsafe { sys::fsdp_finish_grads(self.raw, scale, sys::FSDP_LAST, self.stream.get()) };
        Window::opened_by(self, status)
    }

    /// Opens the update window outside a training step, to load or edit weights.
    pub fn begin_update(&mut self) -> Result<Window<'_>> {
        let status = unsafe { sys::fsdp_begin_update(self.raw, self.stream.get()) };
        Window::opened_by(self, status)
    }

    /// The update window that is open: after a `Window` was dropped, or a step of it has failed and left it open.
    pub fn window(&mut self) -> Result<Window<'_>> {
        if !self.window_open {
            return Err(Error::new(
                Status::InvalidState,
                "no update window is open: finish_grads or begin_update opens one",
            ));
        }
        Ok(Window::open(self))
    }

    /// Discards this step, in any state between two publishes.
    pub fn discard_step(&mut self) -> Result<()> {
        let status = unsafe { sys::fsdp_discard_step(self.raw, self.stream.get()) };
        if status == sys::FSDP_OK {
            self.forget_claims();
            self.window_open = false;
        }
        check(status)
    }

    /// A whole step in one call: `fsdp_apply_grads`. The norm before clipping is returned.
    pub fn apply_grads(
        &mut self,
        grads: &[FullGrad<'_>],
        lr: f64,
        max_norm: f64,
        options: &AdamwOptions,
    ) -> Result<f64> {
        self.forget_claims();
        let options = options.as_raw()?;
        if grads.iter().any(|grad| grad.is_slice && !self.on_host) {
            return Err(no_slices());
        }
        let raws: Vec<_> = grads.iter().map(|grad| grad.raw).collect();
        let (count, stride) = (raws.len() as u64, std::mem::size_of::<sys::fsdp_grad>() as u64);
        let (mut norm, stream) = (0.0, self.stream.get());
        check(unsafe {
            sys::fsdp_apply_grads(self.raw, raws.as_ptr(), count, stride, lr, max_norm, &options, stream, &mut norm)
        })?;
        Ok(norm)
    }

    /// Nothing borrows the model, so what still claims gradients was leaked.
    fn forget_claims(&mut self) {
        self.groups.iter().for_each(|entry| entry.lent.set(false));
    }

    /// Compares what several ranks store alike.
    pub fn check_replicas(&self) -> Result<()> {
        check(unsafe { sys::fsdp_check_replicas(self.raw, 0, self.stream.get()) })
    }

    /// Gives a parameter another lr_scale from the next step on.
    pub fn set_param_lr_scale(&self, group: Group, param: impl ParamKey, lr_scale: f64) -> Result<()> {
        let entry = self.entry(group)?;
        check(unsafe { sys::fsdp_set_param_lr_scale(entry.raw, find(entry, param)? as u64, lr_scale) })
    }

    /// Stops training a parameter, or trains it again. Call this between steps, with the same values on every rank.
    pub fn set_param_trainable(&self, group: Group, param: impl ParamKey, trainable: bool) -> Result<()> {
        let entry = self.entry(group)?;
        check(unsafe { sys::fsdp_set_param_trainable(entry.raw, find(entry, param)? as u64, trainable as i32) })
    }

    // ---- reading ------------------------------------------------------------------------------------------------

    /// A whole parameter's main weights, on every rank.
    pub fn read_param<T: Element>(&self, group: Group, param: impl ParamKey) -> Result<Vec<T>> {
        self.read_whole(group, param, |raw, index, data, count| unsafe {
            sys::fsdp_read_param(raw, index, data, T::DTYPE as i32, count, EVERY_RANK, 0)
        })
    }

    /// As the call above, but only rank `root` gets the data; the others get `None`.
    pub fn read_param_on<T: Element>(&self, root: u32, group: Group, param: impl ParamKey) -> Result<Option<Vec<T>>> {
        let root = as_root(root)?;
        self.read_whole_on(root, group, param, |raw, index, data, count| unsafe {
            sys::fsdp_read_param(raw, index, data, T::DTYPE as i32, count, root, 0)
        })
    }

    /// A whole optimizer state of a parameter, on every rank.
    pub fn read_state<T: Element>(&self, group: Group, param: impl ParamKey, name: &str) -> Result<Vec<T>> {
        let name = c_string(name)?;
        self.read_whole(group, param, |raw, index, data, count| unsafe {
            sys::fsdp_read_state(raw, index, name.as_ptr(), data, T::DTYPE as i32, count, EVERY_RANK, 0)
        })
    }

    /// As the call above, but only rank `root` gets the data; the others get `None`.
    pub fn read_state_on<T: Element>(
        &self,
        root: u32,
        group: Group,
        param: impl ParamKey,
        name: &str,
    ) -> Result<Option<Vec<T>>> {
        let (name, root) = (c_string(name)?, as_root(root)?);
        self.read_whole_on(root, group, param, |raw, index, data, count| unsafe {
            sys::fsdp_read_state(raw, index, name.as_ptr(), data, T::DTYPE as i32, count, root, 0)
        })
    }

    pub(crate) fn read_whole<T: Element>(
        &self,
        group: Group,
        param: impl ParamKey,
        call: impl FnOnce(*mut sys::fsdp_group, u64, *mut c_void, u64) -> sys::fsdp_status,
    ) -> Result<Vec<T>> {
        let entry = self.entry(group)?;
        let index = find(entry, param)?;
        let mut data = vec![T::default(); entry.element_counts[index] as usize];
        check(call(entry.raw, index as u64, data.as_mut_ptr().cast(), data.len() as u64))?;
        Ok(data)
    }

    pub(crate) fn read_whole_on<T: Element>(
        &self,
        root: i32,
        group: Group,
        param: impl ParamKey,
        call: impl FnOnce(*mut sys::fsdp_group, u64, *mut c_void, u64) -> sys::fsdp_status,
    ) -> Result<Option<Vec<T>>> {
        if self.rank as i32 == root {
            return self.read_whole(group, param, call).map(Some);
        }
        let entry = self.entry(group)?;
        let index = find(entry, param)?;
        check(call(entry.raw, index as u64, null_mut(), entry.element_counts[index]))?;
        Ok(None)
    }

    /// Saves a checkpoint of the folder: `fsdp_save`.
    pub fn save(&self, folder: impl AsRef<Path>, options: &SaveOptions) -> Result<()> {
        let (folder, options) = (c_path(folder.as_ref())?, options.as_raw()?);
        check(unsafe { sys::fsdp_save(self.raw, folder.as_ptr(), &options) })
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        unsafe { sys::fsdp_destroy_model(self.raw) };
    }
}

pub(crate) fn no_slices() -> Error {
    Error::new(Status::Unsupported, "a slice is memory of the host; on a GPU give its memory's address")
}

pub(crate) fn as_root(root: u32) -> Result<i32> {
    i32::try_from(root).map_err(|_| Error::new(Status::InvalidArgument, format!("rank {root} is none")))
}
