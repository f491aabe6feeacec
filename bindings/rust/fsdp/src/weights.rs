// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Phase, Plane, Status};
use crate::error::{check, Error, Result};
use crate::group::GroupEntry;
use crate::param::find;
use crate::tensor::typed;
use crate::{sys, Element, Model, ParamKey, ScaleE8m0, Tensor};
use std::borrow::Cow;
use std::ops::Range;

/// The full compute weights of an unsharded group, or of one of its pieces: a hold, which ends with the guard.
///
/// A guard of a piece has the weights of the parameters in that piece. Numbers of parameters are those of the group.
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
    /// The number of the first parameter that has a view.
    first: usize,
    piece: Option<u32>,
    phase: Phase,
}

impl<'m> Weights<'m> {
    #[inline]
    pub(crate) fn unshard(model: &'m Model, entry: &'m GroupEntry, piece: Option<u32>, phase: Phase) -> Result<Self> {
        let (raw, raw_phase, stream) = (entry.raw, phase as i32, model.stream.get());
        check(match piece {
            None => unsafe { sys::fsdp_unshard(raw, raw_phase, 0, stream) },
            Some(piece) => unsafe { sys::fsdp_unshard_piece(raw, piece, raw_phase, 0, stream) },
        })?;
        // Its drop returns the hold if the next call fails.
        let first = entry.params_of(piece).start;
        let mut weights = Weights { model, entry, views: Cow::Borrowed(&[]), first, piece, phase };
        weights.views = match model.has_fixed_addresses {
            true => Cow::Borrowed(entry.kept_views(piece, phase)?),
            false => Cow::Owned(entry.ask_for_views(piece, phase)?),
        };
        Ok(weights)
    }

    /// The number of a parameter that is held.
    #[inline]
    fn find(&self, param: impl ParamKey) -> Result<usize> {
        let index = find(self.entry, param)?;
        match index >= self.first && index - self.first < self.views.len() {
            true => Ok(index),
            false => Err(self.of_another_piece(index)),
        }
    }

    #[cold]
    fn of_another_piece(&self, index: usize) -> Error {
        let (name, own, held) = (&self.entry.names[index], self.entry.pieces[index], self.piece.unwrap_or(0));
        let group = &self.entry.name;
        let what = format!(
            "{name} is in piece {own} of group {group}, and these weights are of piece {held}: unshard_piece it"
        );
        Error::new(Status::InvalidState, what)
    }

    #[inline]
    fn view(&self, param: impl ParamKey) -> Result<&sys::fsdp_tensor> {
        Ok(&self.views[self.find(param)? - self.first])
    }

    /// A parameter's weights as a slice; fails where they are of another type, or memory of a GPU.
    #[inline]
    pub fn get<T: Element>(&self, param: impl ParamKey) -> Result<&[T]> {
        let view = self.view(param)?;
        let data = typed::<T>(view)?;
        // SAFETY: so many elements, readable while the hold lasts, which is as long as self. No thread writes them meanwhile: ranks
        // write only when all have entered finish_grads with no hold left, and that is checked by the library, leaked or not.
        Ok(unsafe { std::slice::from_raw_parts(data, view.element_count as usize) })
    }

    /// The address, dtype and shape of a parameter's weights.
    pub fn tensor(&self, param: impl ParamKey) -> Result<Tensor<'_>> {
        Ok(Tensor::new(*self.view(param)?))
    }

    /// A plane of a quantized parameter as a slice: codes are [`E4m3`](crate::E4m3), scales `f32` or of MXFP8
    /// [`ScaleE8m0`](crate::ScaleE8m0).
    pub fn plane<T: Element>(&self, param: impl ParamKey, plane: Plane) -> Result<&[T]> {
        let (index, mut view) = (self.find(param)?, sys::fsdp_tensor::default());
        check(unsafe {
            sys::fsdp_get_plane(self.entry.raw, index as u64, self.phase as i32, plane as i32, &mut view)
        })?;
        let data = typed::<T>(&view)?;
        // SAFETY: as in get.
        Ok(unsafe { std::slice::from_raw_parts(data, view.element_count as usize) })
    }

    /// The scales of an MXFP8 plane in the order in which a GEMM reads them, on the host device.
    pub fn swizzled_scales(&self, param: impl ParamKey, plane: Plane) -> Result<Vec<ScaleE8m0>> {
        let index = self.find(param)?;
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

    /// The numbers of the parameters that have weights here: of all, or of those in the piece.
    pub fn indices(&self) -> Range<usize> {
        self.first..self.first + self.views.len()
    }

    /// How many parameters the group, or the piece, has.
    pub fn len(&self) -> usize {
        self.views.len()
    }

    /// Groups without parameters are legal.
    pub fn is_empty(&self) -> bool {
        self.views.is_empty()
    }

    /// Returns the hold, as dropping does, and reports a failure.
    #[inline]
    pub fn reshard(mut self) -> Result<()> {
        let status = self.return_hold();
        self.views = Cow::Borrowed(&[]); // what they own is given back, which forget would not do
        std::mem::forget(self);
        check(status)
    }

    #[inline]
    fn return_hold(&self) -> sys::fsdp_status {
        let (raw, phase, stream) = (self.entry.raw, self.phase as i32, self.model.stream.get());
        match self.piece {
            None => unsafe { sys::fsdp_reshard(raw, phase, 0, stream) },
            Some(piece) => unsafe { sys::fsdp_reshard_piece(raw, piece, phase, 0, stream) },
        }
    }
}

impl Drop for Weights<'_> {
    #[inline]
    fn drop(&mut self) {
        let _ = self.return_hold(); // it fails where the hold has gone already: in a context that has failed
    }
}
