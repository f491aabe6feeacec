// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Phase, Plane};
use crate::error::{check, Result};
use crate::group::GroupEntry;
use crate::param::find;
use crate::tensor::typed;
use crate::{sys, Element, Model, ParamKey, ScaleE8m0, Tensor};
use std::borrow::Cow;

/// The full compute weights of an unsharded group: a hold, which ends with the guard.
///
/// Views do not outlive it:
///
/// ```compile_fail,E0505
/// # fn view_after_reshard(model: &fsdp::Model, layer: fsdp::Group) -> fsdp::Result<()> {
/// let weights = model.unshard(layer, fsdp::Phase::Forward)?;
/// let w: &[f32] = weights.get("weight")?;
/// weights.reshard()?; // the buffer is another group's from here on
/// println!("{}", w[0]);
/// # Ok(()) }
/// ```
///
/// A guard that is leaked keeps its hold: the step then cannot be finished, only discarded.
#[must_use = "the group is resharded when the guard is dropped"]
pub struct Weights<'m> {
    model: &'m Model,
    entry: &'m GroupEntry,
    views: Cow<'m, [sys::fsdp_tensor]>,
    phase: Phase,
}

impl<'m> Weights<'m> {
    #[inline]
    pub(crate) fn unshard(model: &'m Model, entry: &'m GroupEntry, phase: Phase) -> Result<Self> {
        check(unsafe { sys::fsdp_unshard(entry.raw, phase as i32, 0, model.stream.get()) })?;
        // Its drop returns the hold if the next call fails.
        let mut weights = Weights { model, entry, views: Cow::Borrowed(&[]), phase };
        weights.views = match model.has_fixed_addresses {
            true => Cow::Borrowed(entry.kept_views(phase)?),
            false => Cow::Owned(entry.ask_for_views(phase)?),
        };
        Ok(weights)
    }

    /// A parameter's weights as a slice; fails where they are of another type, or memory of a GPU.
    #[inline]
    pub fn get<T: Element>(&self, param: impl ParamKey) -> Result<&[T]> {
        let view = &self.views[find(self.entry, param)?];
        let data = typed::<T>(view)?;
        // SAFETY: so many elements, readable while the hold lasts, which is as long as self. No thread writes them meanwhile: ranks
        // write only when all have entered finish_grads with no hold left, and that is checked by the library, leaked or not.
        Ok(unsafe { std::slice::from_raw_parts(data, view.element_count as usize) })
    }

    /// Where a parameter's weights lie, what they are, and their shape.
    pub fn tensor(&self, param: impl ParamKey) -> Result<Tensor<'_>> {
        Ok(Tensor::new(self.views[find(self.entry, param)?]))
    }

    /// A plane of a quantized parameter as a slice: codes are [`E4m3`](crate::E4m3), scales `f32` or of MXFP8
    /// [`ScaleE8m0`](crate::ScaleE8m0).
    pub fn plane<T: Element>(&self, param: impl ParamKey, plane: Plane) -> Result<&[T]> {
        let (index, mut view) = (find(self.entry, param)?, sys::fsdp_tensor::default());
        check(unsafe {
            sys::fsdp_get_plane(self.entry.raw, index as u64, self.phase as i32, plane as i32, &mut view)
        })?;
        let data = typed::<T>(&view)?;
        // SAFETY: as in get.
        Ok(unsafe { std::slice::from_raw_parts(data, view.element_count as usize) })
    }

    /// The scales of an MXFP8 plane in the order in which a GEMM reads them, on the host device.
    pub fn swizzled_scales(&self, param: impl ParamKey, plane: Plane) -> Result<Vec<ScaleE8m0>> {
        let index = find(self.entry, param)?;
        self.plane::<ScaleE8m0>(index, plane)?;
        let swizzle = |data: *mut ScaleE8m0, size: &mut u64| {
            let (raw, phase, stream) = (self.entry.raw, self.phase as i32, self.model.stream.get());
            // SAFETY: the plane is on the host, so data is memory of its device.
            check(unsafe {
                sys::fsdp_swizzle_scales(raw, index as u64, phase, plane as i32, data.cast(), size, stream)
            })
        };
        let mut size = 0;
        swizzle(std::ptr::null_mut(), &mut size)?;
        let mut scales = vec![ScaleE8m0(0); size as usize];
        swizzle(scales.as_mut_ptr(), &mut size)?;
        Ok(scales)
    }

    /// How many parameters the group has.
    pub fn len(&self) -> usize {
        self.views.len()
    }

    /// Groups without parameters are legal.
    pub fn is_empty(&self) -> bool {
        self.views.is_empty()
    }

    /// Returns the hold, as dropping does, and tells if that fails.
    #[inline]
    pub fn reshard(mut self) -> Result<()> {
        let status = self.return_hold();
        self.views = Cow::Borrowed(&[]); // what they own is given back, which forget would not do
        std::mem::forget(self);
        check(status)
    }

    #[inline]
    fn return_hold(&self) -> sys::fsdp_status {
        unsafe { sys::fsdp_reshard(self.entry.raw, self.phase as i32, 0, self.model.stream.get()) }
    }
}

impl Drop for Weights<'_> {
    #[inline]
    fn drop(&mut self) {
        let _ = self.return_hold(); // it fails where the hold has gone already: in a context that has failed
    }
}
