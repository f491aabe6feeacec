// SPDX-License-Identifier: Apache-2.0
use crate::enums::{MainStorage, Status};
use crate::error::{check, Error};
use crate::tensor::typed;
use crate::{sys, Bf16, Element, Group, Result, Tensor};
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
    /// The rank's main grads.
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

impl Shard<'_> {
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
    /// In fp32 at home in a file ([`Home::File`](crate::Home)): they have no address either.
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
