// SPDX-License-Identifier: Apache-2.0
use crate::tensor::typed;
use crate::{sys, Element, Group, Result, Tensor};
use std::marker::PhantomData;

/// What this rank owns of one parameter, writable while the update window is open.
#[non_exhaustive]
pub struct Shard<'w> {
    /// The parameter's group.
    pub group: Group,
    /// Its number there.
    pub param_index: usize,
    /// Its name.
    pub name: String,
    /// The rank's main weights.
    pub main_weight: &'w mut [f32],
    /// The rank's main grads.
    pub main_grad: &'w mut [f32],
    /// Optimizer states, in the order of their declaration; AdamW's are exp_avg and exp_avg_sq.
    pub states: Vec<State<'w>>,
    /// Of the first element, in the parameter.
    pub element_offset: u64,
    /// Of the first row.
    pub row_offset: u64,
    /// How many rows.
    pub row_count: u64,
    /// Of now.
    pub lr_scale: f64,
    /// `FSDP_PARAM_*`, of now.
    pub flags: u32,
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

    /// Its elements, as many as the main weights.
    pub fn get<T: Element>(&mut self) -> Result<&mut [T]> {
        let data = typed::<T>(&self.raw)?;
        // SAFETY: so many elements, of the window that is borrowed, and this state borrowed alone.
        Ok(unsafe { std::slice::from_raw_parts_mut(data, self.raw.element_count as usize) })
    }

    /// Where it lies and what it is.
    pub fn tensor(&self) -> Tensor<'_> {
        Tensor::new(self.raw)
    }
}
