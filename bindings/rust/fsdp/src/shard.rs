// SPDX-License-Identifier: Apache-2.0
use crate::enums::{MainStorage, Status};
use crate::error::{c_string, check, text, Error};
use crate::model::no_slices;
use crate::tensor::typed;
use crate::{sys, Bf16, Element, Group, Model, Result, Tensor};
use std::marker::PhantomData;

/// What this rank owns of one parameter, writable while the update window is open.
#[non_exhaustive]
pub struct Shard<'w> {
    pub(crate) raw_group: *mut sys::fsdp_group,
    pub(crate) stream: sys::fsdp_stream,
    /// The parameter's group.
    pub group: Group,
    /// Its number there.
    pub param_index: usize,
    /// Its name.
    pub name: String,
    /// The rank's main weights.
    pub main_weight: MainWeight<'w>,
    /// The rank's main grads. Empty at home in a file: [`Window::shard_chunks`](crate::Window::shard_chunks) brings them.
    pub main_grad: &'w mut [f32],
    /// The optimizer states that the parameter has, in the order of their declaration; AdamW's are exp_avg and
    /// exp_avg_sq. The elements of an 8-bit state are codes (`u8`), and the next state has its scales, such as
    /// exp_avg.absmax.
    pub states: Vec<State<'w>>,
    /// The offset of the first element in the parameter.
    pub element_offset: u64,
    /// The number of the first row.
    pub row_offset: u64,
    /// The number of rows.
    pub row_count: u64,
    /// The current lr_scale.
    pub lr_scale: f64,
    /// `FSDP_PARAM_*`, the current value.
    pub flags: u32,
}

impl<'w> Shard<'w> {
    /// # Safety
    /// The memory of `raw` is this rank's alone for 'w.
    pub(crate) unsafe fn lend(model: &'w Model, raw: &sys::fsdp_shard, states: Vec<State<'w>>) -> Result<Self> {
        Ok(Shard {
            raw_group: raw.group,
            stream: model.stream.get(),
            group: model.group_of(raw.group)?,
            param_index: raw.param_index as usize,
            name: text(raw.name).unwrap_or_default(),
            main_weight: MainWeight::lend(raw),
            main_grad: match raw.main_grad.is_null() {
                true => &mut [],
                false => std::slice::from_raw_parts_mut(raw.main_grad.cast::<f32>(), raw.element_count as usize),
            },
            states,
            element_offset: raw.element_offset,
            row_offset: raw.row_offset,
            row_count: raw.row_count,
            lr_scale: raw.lr_scale,
            flags: raw.flags,
        })
    }

    /// Rounds numbers stochastically into the main weights, from element `offset` of this shard on, with
    /// [`MainStorage::None`]. `step` is the number of the optimizer's step: `fsdp_round_stochastic`.
    pub fn round_stochastic(&mut self, offset: usize, from: &[f32], step: u64) -> Result<()> {
        let (index, first) = (self.param_index as u64, self.element_offset + offset as u64);
        let refuse = |status, what: String| Error::new(status, format!("this shard of '{}' has no {what}", self.name));
        let all = self.main_weight.bfloat16();
        let all = all.ok_or_else(|| refuse(Status::InvalidState, "bfloat16 main weights: MainStorage::None".into()))?;
        let to = all.get_mut(offset..).and_then(|all| all.get_mut(..from.len()));
        let what = || format!("{} elements from {offset} on", from.len());
        let to = to.ok_or_else(|| refuse(Status::InvalidArgument, what()))?.as_mut_ptr().cast();
        let (from, count) = (from.as_ptr(), from.len() as u64);
        check(unsafe { sys::fsdp_round_stochastic(self.raw_group, index, first, from, to, count, step, self.stream) })
    }
}

/// The main weights of a shard, in the form that its [`MainStorage`] requires.
#[derive(Debug)]
pub enum MainWeight<'w> {
    /// In fp32. All parameters with fp32 compute weights have this form.
    Float32(&'w mut [f32]),
    /// With [`MainStorage::None`]: the compute weights.
    Bfloat16(&'w mut [Bf16]),
    /// With [`MainStorage::Split16`]: they have no address. Calls such as `read_param` and `load_param` convert.
    Split,
    /// In fp32 at home in a file ([`Home::File`](crate::Home)): they have no address either;
    /// [`Window::shard_chunks`](crate::Window::shard_chunks) brings them.
    File,
}

impl<'w> MainWeight<'w> {
    /// # Safety
    /// The shard's memory is this rank's alone for 'w.
    pub(crate) unsafe fn lend(raw: &sys::fsdp_shard) -> Self {
        let count = raw.element_count as usize;
        match raw.main_weight_dtype {
            0 => MainWeight::Split,
            _ if raw.main_weight.is_null() => MainWeight::File,
            sys::FSDP_BFLOAT16 => MainWeight::Bfloat16(std::slice::from_raw_parts_mut(raw.main_weight.cast(), count)),
            _ => MainWeight::Float32(std::slice::from_raw_parts_mut(raw.main_weight.cast(), count)),
        }
    }

    /// What they are kept in; [`MainStorage::Float32`] also where the compute weights are fp32.
    pub fn storage(&self) -> MainStorage {
        match self {
            MainWeight::Float32(_) | MainWeight::File => MainStorage::Float32,
            MainWeight::Bfloat16(_) => MainStorage::None,
            MainWeight::Split => MainStorage::Split16,
        }
    }

    /// The elements, if they are fp32.
    pub fn float32(&mut self) -> Option<&mut [f32]> {
        match self {
            MainWeight::Float32(all) => Some(all),
            _ => None,
        }
    }

    /// The elements, if they are bfloat16.
    pub fn bfloat16(&mut self) -> Option<&mut [Bf16]> {
        match self {
            MainWeight::Bfloat16(all) => Some(all),
            _ => None,
        }
    }
}

/// A named optimizer state of a shard.
pub struct State<'w> {
    /// Its name.
    pub name: String,
    raw: sys::fsdp_tensor,
    owner: PhantomData<&'w mut ()>,
}

impl State<'_> {
    pub(crate) fn new(name: &str, raw: sys::fsdp_tensor) -> Self {
        State { name: name.to_string(), raw, owner: PhantomData }
    }

    /// Its elements: as many as the shard has. A state of scales has one for each 256 of these.
    pub fn get<T: Element>(&mut self) -> Result<&mut [T]> {
        let data = typed::<T>(&self.raw)?;
        // SAFETY: so many elements, of the window that is borrowed, and this state borrowed alone.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, self.raw.element_count as usize) })
    }

    /// Its address, dtype and size.
    pub fn tensor(&self) -> Tensor<'_> {
        Tensor::new(self.raw)
    }
}

/// A pass over this rank's shards at home in a file, from [`Window::shard_chunks`](crate::Window::shard_chunks). A chunk
/// is a [`Shard`] of some elements, whose memory is lent until the next one.
///
/// Publishing is refused until [`next`](ShardChunks::next) has given all chunks. If this is dropped earlier, the next pass
/// goes on with the chunks that are left.
///
/// ```compile_fail,E0499
/// # fn two_at_once(mut window: fsdp::Window<'_>) -> fsdp::Result<()> {
/// let mut chunks = window.shard_chunks()?;
/// let one = chunks.next()?;
/// let two = chunks.next()?; // writes the first one to the file
/// drop((one, two));
/// # Ok(()) }
/// ```
#[must_use = "the chunks come by next, until there are no more"]
pub struct ShardChunks<'w> {
    model: &'w mut Model,
}

impl<'w> ShardChunks<'w> {
    pub(crate) fn begin(model: &'w mut Model) -> Result<Self> {
        match model.on_host {
            true => Ok(ShardChunks { model }),
            false => Err(no_slices()),
        }
    }

    /// The next chunk of this rank, until all are written to the file. That of the call before is written.
    #[allow(clippy::should_implement_trait)] // an Iterator's items would outlive the next call
    pub fn next(&mut self) -> Result<Option<Shard<'_>>> {
        let mut raw = sys::fsdp_shard::default();
        check(unsafe { sys::fsdp_next_shard_chunk(self.model.raw, self.model.stream.get(), &mut raw) })?;
        if raw.element_count == 0 {
            return Ok(None);
        }
        let states = self.model.states_of(&raw, |name| self.state(name))?;
        // SAFETY: the memory is this rank's alone until the next call, which this borrows.
        unsafe { Shard::lend(self.model, &raw, states) }.map(Some)
    }

    fn state(&self, name: &str) -> Result<State<'_>> {
        let (c_name, mut tensor) = (c_string(name)?, sys::fsdp_tensor::default());
        check(unsafe { sys::fsdp_get_shard_chunk_state(self.model.raw, c_name.as_ptr(), &mut tensor) })?;
        Ok(State::new(name, tensor))
    }
}
