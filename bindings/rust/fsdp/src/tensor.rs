// SPDX-License-Identifier: Apache-2.0
use crate::enums::{DeviceKind, Dtype, Status};
use crate::error::{Error, Result};
use crate::sys;
use std::marker::PhantomData;
use std::os::raw::c_void;

mod sealed {
    pub trait Sealed {}
}

/// What a tensor may consist of.
///
/// # Safety
/// `DTYPE` is what the type's bytes are, and every pattern of bytes is a value.
pub unsafe trait Element: Copy + Default + sealed::Sealed + 'static {
    /// The dtype of such elements.
    const DTYPE: Dtype;
}

/// A bfloat16 as its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// An IEEE half as its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

/// A code of quantized weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// A scale of MXFP8 weights: 2^(self.0 - 127), 255 is NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct ScaleE8m0(pub u8);

impl From<Bf16> for f32 {
    fn from(value: Bf16) -> f32 {
        f32::from_bits(u32::from(value.0) << 16)
    }
}

impl From<f32> for Bf16 {
    /// Rounds to nearest, ties to even.
    fn from(value: f32) -> Bf16 {
        let bits = value.to_bits();
        if value.is_nan() {
            return Bf16((bits >> 16) as u16 | 0x40);
        }
        Bf16(((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16)
    }
}

impl Dtype {
    /// Bytes of one element.
    pub fn size(self) -> u64 {
        unsafe { sys::fsdp_get_dtype_size(self as i32) }
    }
}

macro_rules! elements {
    ($($kind:ty: $dtype:ident),*) => {$(
        impl sealed::Sealed for $kind {}
        // SAFETY: of the dtype's size, and a number whatever its bits.
        unsafe impl Element for $kind {
            const DTYPE: Dtype = Dtype::$dtype;
        }
    )*};
}
elements!(f32: Float32, Bf16: Bfloat16, F16: Float16, E4m3: Float8E4m3, ScaleE8m0: E8m0, u8: Uint8);

/// Where a tensor lies and what it is. The address is for foreign code: reading through it is `unsafe`, and legal as long as
/// the text of the call that gave it says.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    raw: sys::fsdp_tensor,
    owner: PhantomData<&'a ()>,
}

impl<'a> Tensor<'a> {
    pub(crate) fn new(raw: sys::fsdp_tensor) -> Self {
        Tensor { raw, owner: PhantomData }
    }

    /// The first element, contiguous in C order; on a GPU an address of its memory.
    pub fn data(&self) -> *mut c_void {
        self.raw.data
    }

    /// The sizes, outermost first.
    pub fn shape(&self) -> &'a [u64] {
        if self.raw.dimension_count == 0 {
            return &[];
        }
        // SAFETY: it lives as long as the model, which 'a does not outlive.
        unsafe { std::slice::from_raw_parts(self.raw.shape, self.raw.dimension_count as usize) }
    }

    /// How many elements it has.
    pub fn element_count(&self) -> u64 {
        self.raw.element_count
    }

    /// What its elements are.
    pub fn dtype(&self) -> Dtype {
        Dtype::from_raw(self.raw.dtype).expect("a dtype of this release")
    }

    /// Where it lies.
    pub fn device(&self) -> DeviceKind {
        DeviceKind::from_raw(self.raw.device).expect("a device of this release")
    }

    /// The GPU, as CUDA counts them; 0 on the host.
    pub fn device_index(&self) -> i32 {
        self.raw.device_index
    }

    /// Writing through the address is an error.
    pub fn is_read_only(&self) -> bool {
        self.raw.flags & sys::FSDP_TENSOR_READ_ONLY != 0
    }
}

/// The first element, if the tensor is of `T` and on the host.
#[inline]
pub(crate) fn typed<T: Element>(tensor: &sys::fsdp_tensor) -> Result<*mut T> {
    if tensor.dtype != T::DTYPE as i32 || tensor.device != sys::FSDP_DEVICE_HOST || tensor.data.is_null() {
        return Err(refuse(tensor, T::DTYPE));
    }
    Ok(tensor.data.cast())
}

#[cold]
fn refuse(tensor: &sys::fsdp_tensor, wanted: Dtype) -> Error {
    if tensor.data.is_null() {
        return Error::new(
            Status::InvalidState,
            "there is no such tensor (a gradient of a frozen parameter? weights of a quantized one?)",
        );
    }
    if tensor.device != sys::FSDP_DEVICE_HOST {
        return Error::new(Status::Unsupported, "memory of a GPU is no slice: tensor() gives its address");
    }
    let has = Dtype::from_raw(tensor.dtype);
    Error::new(Status::InvalidArgument, format!("the tensor is of {has:?}, and {wanted:?} was asked for"))
}
