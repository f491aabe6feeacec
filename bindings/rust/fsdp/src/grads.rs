// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Dtype, Status};
use crate::error::{check, Error, Result};
use crate::group::GroupEntry;
use crate::model::no_slices;
use crate::param::find;
use crate::tensor::typed;
use crate::{sys, Element, Model, ParamKey, Tensor};
use std::marker::PhantomData;
use std::os::raw::c_void;
use std::ptr::null;

/// A full gradient to write into.
#[derive(Debug)]
pub struct Grad<'g, T> {
    /// All of it, in C order.
    pub data: &'g mut [T],
    /// False: overwrite it all. True: add to it.
    pub accumulate: bool,
}

/// The claim on a group's full gradients of one contribution: write them, then reduce them.
///
/// After its reduce a gradient is out of reach:
///
/// ```compile_fail,E0382
/// # fn gradient_after_reduce(model: &fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
/// let mut grads = model.grads(layer)?;
/// grads.get::<f32>("weight")?.data.fill(1.0);
/// grads.reduce_last()?; // the library reads them from here on
/// grads.get::<f32>("weight")?.data.fill(2.0);
/// # Ok(()) }
/// ```
///
/// ```compile_fail,E0505
/// # fn slice_after_reduce(model: &fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
/// let mut grads = model.grads(layer)?;
/// let grad = grads.get::<f32>("weight")?;
/// grads.reduce_last()?;
/// grad.data.fill(2.0);
/// # Ok(()) }
/// ```
///
/// Dropping it ends the claim and keeps what was written: for a parameter that is used twice, claim again and add.
#[must_use = "gradients count once they are reduced"]
pub struct Grads<'m> {
    model: &'m Model,
    entry: &'m GroupEntry,
    waiting: u32,
}

impl<'m> Grads<'m> {
    pub(crate) fn claim(model: &'m Model, entry: &'m GroupEntry) -> Result<Self> {
        if entry.lent.replace(true) {
            let what = format!("the gradients of group {} are lent: reduce or drop that Grads first", entry.name);
            return Err(Error::new(Status::InvalidState, what));
        }
        Ok(Grads { model, entry, waiting: 0 })
    }

    /// From here on a call that would wait for peers to read a buffer fails with [`Status::Busy`] and changes nothing.
    pub fn no_wait(mut self) -> Self {
        self.waiting = sys::FSDP_GRAD_NO_WAIT;
        self
    }

    /// Borrows the gradient of a parameter, in the model's grad_dtype.
    pub fn get<T: Element>(&mut self, param: impl ParamKey) -> Result<Grad<'_, T>> {
        let (tensor, accumulate) = self.acquire(param, 0)?;
        // SAFETY: so many elements, lent to this claim, which is borrowed alone, until the reduce.
        let data = unsafe { std::slice::from_raw_parts_mut(typed::<T>(&tensor)?, tensor.element_count as usize) };
        Ok(Grad { data, accumulate })
    }

    /// Borrows the gradient of a parameter for code that only adds: it is cleared where it would be overwritten.
    pub fn get_zeroed<T: Element>(&mut self, param: impl ParamKey) -> Result<&mut [T]> {
        let (tensor, _) = self.acquire(param, sys::FSDP_GRAD_ZEROED)?;
        // SAFETY: as in get.
        Ok(unsafe { std::slice::from_raw_parts_mut(typed::<T>(&tensor)?, tensor.element_count as usize) })
    }

    /// Borrows the gradients of all parameters at once, in their order; `None` for frozen ones.
    pub fn all<T: Element>(&mut self) -> Result<Vec<Option<Grad<'_, T>>>> {
        let count = self.entry.names.len();
        let mut tensors = vec![sys::fsdp_tensor::default(); count];
        let mut accumulate = vec![0; count];
        let (pointer, stride) = (tensors.as_mut_ptr(), std::mem::size_of::<sys::fsdp_tensor>() as u64);
        let stream = self.model.stream.get();
        check(unsafe {
            let flags = accumulate.as_mut_ptr();
            sys::fsdp_acquire_grads(self.entry.raw, self.waiting, stream, pointer, count as u64, stride, flags)
        })?;
        let one = |(tensor, accumulate): (&sys::fsdp_tensor, &i32)| {
            if tensor.data.is_null() {
                return Ok(None);
            }
            // SAFETY: as in get; gradients of different parameters do not overlap.
            let data = unsafe { std::slice::from_raw_parts_mut(typed::<T>(tensor)?, tensor.element_count as usize) };
            Ok(Some(Grad { data, accumulate: *accumulate != 0 }))
        };
        tensors.iter().zip(&accumulate).map(one).collect()
    }

    /// Where the gradient lies, and whether to add to it: for memory of a GPU.
    pub fn tensor(&mut self, param: impl ParamKey) -> Result<(Tensor<'_>, bool)> {
        let (tensor, accumulate) = self.acquire(param, 0)?;
        Ok((Tensor::new(tensor), accumulate))
    }

    fn acquire(&self, param: impl ParamKey, flags: u32) -> Result<(sys::fsdp_tensor, bool)> {
        let (index, stream) = (find(self.entry, param)? as u64, self.model.stream.get());
        let (mut tensor, mut accumulate, flags) = (sys::fsdp_tensor::default(), 0, flags | self.waiting);
        check(unsafe { sys::fsdp_acquire_grad(self.entry.raw, index, flags, stream, &mut tensor, &mut accumulate) })?;
        Ok((tensor, accumulate != 0))
    }

    /// Hands in the caller's own gradient, copied or added; `None` counts as zeros.
    pub fn put<T: Element>(&mut self, param: impl ParamKey, data: Option<&[T]>) -> Result<()> {
        if !self.model.on_host && data.is_some() {
            return Err(no_slices());
        }
        let index = find(self.entry, param)?;
        let (pointer, count) = match data {
            Some(data) => (data.as_ptr(), data.len() as u64),
            None => (null::<T>(), self.entry.element_counts[index]),
        };
        // SAFETY: so many elements, copied before the call returns.
        unsafe { self.put_raw(index, pointer.cast(), T::DTYPE, count) }
    }

    /// Hands in the caller's own gradient, from any address that the device can read.
    ///
    /// # Safety
    /// It has `element_count` elements of the dtype, there in the order of the model's stream.
    pub unsafe fn put_raw(
        &mut self,
        param: impl ParamKey,
        data: *const c_void,
        dtype: Dtype,
        element_count: u64,
    ) -> Result<()> {
        let (index, stream) = (find(self.entry, param)? as u64, self.model.stream.get());
        check(sys::fsdp_put_grad(self.entry.raw, index, data, dtype as i32, element_count, self.waiting, stream))
    }

    /// Declares this gradient complete: nothing more is written into it in this contribution. With `max_pending_bytes`,
    /// its part of the group is reduced once all gradients of the part are complete.
    pub fn complete(&mut self, param: impl ParamKey) -> Result<()> {
        let (index, stream) = (find(self.entry, param)? as u64, self.model.stream.get());
        check(unsafe { sys::fsdp_complete_grad(self.entry.raw, index, 0, stream) })
    }

    /// The contribution is complete: its gradients are reduced into the main grads.
    pub fn reduce(self) -> Result<()> {
        self.reduce_with(0)
    }

    /// Reduces the contribution, which is the last one of this step.
    pub fn reduce_last(self) -> Result<()> {
        self.reduce_with(sys::FSDP_LAST)
    }

    fn reduce_with(self, flags: u32) -> Result<()> {
        check(unsafe { sys::fsdp_reduce_grad(self.entry.raw, flags, self.model.stream.get()) })
    }
}

impl Drop for Grads<'_> {
    fn drop(&mut self) {
        self.entry.lent.set(false);
    }
}

/// One full gradient for [`Model::apply_grads`].
#[derive(Clone, Copy)]
pub struct FullGrad<'a> {
    pub(crate) raw: sys::fsdp_grad,
    pub(crate) is_slice: bool,
    data: PhantomData<&'a ()>,
}

impl<'a> FullGrad<'a> {
    /// A gradient in memory of the host.
    pub fn new<T: Element>(data: &'a [T]) -> Self {
        // SAFETY: it has so many elements for as long as 'a.
        let made = unsafe { Self::from_raw(data.as_ptr().cast(), T::DTYPE, data.len() as u64) };
        FullGrad { is_slice: true, ..made }
    }

    /// No gradient, which counts as zeros.
    pub fn none() -> Self {
        FullGrad { raw: Default::default(), is_slice: false, data: PhantomData }
    }

    /// A gradient at any address that the device can read.
    ///
    /// # Safety
    /// It has `element_count` elements of the dtype while the step is under way.
    pub unsafe fn from_raw(data: *const c_void, dtype: Dtype, element_count: u64) -> Self {
        let raw = sys::fsdp_grad { data, element_count, dtype: dtype as i32, reserved: 0 };
        FullGrad { raw, is_slice: false, data: PhantomData }
    }
}
