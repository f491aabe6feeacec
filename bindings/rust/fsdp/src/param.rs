// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Dtype, Granule, MissingGrad, Optimizer, Quantization, Status};
use crate::error::{c_string, text, Error, Result};
use crate::group::GroupEntry;
use crate::sys;
use std::ffi::CString;
use std::os::raw::c_void;

/// A parameter to be declared: `fsdp_param`.
#[derive(Clone)]
pub struct Param {
    raw: sys::fsdp_param,
    name: String,
    shape: Vec<u64>,
    global: Option<(Vec<u64>, Vec<u64>)>,
    matrix_splits: Option<Vec<u64>>,
}

impl Param {
    /// An fp32 parameter of that shape, outermost size first; a scalar has none. Names are unique in the model.
    pub fn new(name: &str, shape: &[u64]) -> Self {
        Param {
            raw: Default::default(),
            name: name.to_string(),
            shape: shape.to_vec(),
            global: None,
            matrix_splits: None,
        }
    }

    /// Sets the dtype of the compute weights.
    pub fn dtype(mut self, dtype: Dtype) -> Self {
        self.raw.dtype = dtype as i32;
        self
    }

    /// No gradient, no optimizer state.
    pub fn frozen(mut self) -> Self {
        self.raw.flags |= sys::FSDP_PARAM_FROZEN;
        self
    }

    /// No weight decay in `step_adamw`.
    pub fn no_decay(mut self) -> Self {
        self.raw.flags |= sys::FSDP_PARAM_NO_DECAY;
        self
    }

    /// The optimizer leaves the weights alone, but keeps its states.
    pub fn lr_zero(mut self) -> Self {
        self.raw.flags |= sys::FSDP_PARAM_LR_ZERO;
        self
    }

    /// Multiplies the step's learning rate for this parameter.
    pub fn lr_scale(mut self, lr_scale: f64) -> Self {
        self.raw.lr_scale = lr_scale;
        self
    }

    /// Sets where boundaries between ranks may fall.
    pub fn granule(mut self, granule: Granule) -> Self {
        self.raw.granule = granule as i32;
        self
    }

    /// Lets rank boundaries fall between blocks of this number of rows.
    pub fn granule_rows(mut self, granule_rows: u64) -> Self {
        self.raw.granule = sys::FSDP_GRANULE_BLOCK;
        self.raw.granule_rows = granule_rows;
        self
    }

    /// Sets how its compute weights are stored; [`Weights::plane`](crate::Weights::plane) shows them.
    pub fn quantization(mut self, quantization: Quantization) -> Self {
        self.raw.quantization = quantization as i32;
        self
    }

    /// Sets what a step does to it if no rank has given it a gradient.
    pub fn missing_grad(mut self, missing_grad: MissingGrad) -> Self {
        self.raw.missing_grad = missing_grad as i32;
        self
    }

    /// Sets in how many of its leading dimensions ranks may divide it: with 2, the matrices of a stack `[E, R, C]`.
    pub fn row_dimensions(mut self, row_dimensions: u32) -> Self {
        self.raw.row_dimensions = row_dimensions;
        self
    }

    /// Puts it into that piece of its group, which [`Model::unshard_piece`](crate::Model::unshard_piece) gathers by
    /// itself. The first parameter is in piece 0, and each next one in the same piece or in the next one.
    pub fn piece(mut self, piece: u32) -> Self {
        self.raw.piece = piece;
        self
    }

    /// Which optimizer updates it: in a model with AdamW, [`Optimizer::Caller`] leaves it to the caller, in the update
    /// window. It then has none of AdamW's states.
    pub fn optimizer(mut self, optimizer: Optimizer) -> Self {
        self.raw.optimizer = optimizer as i32;
        self
    }

    /// Its last two dimensions are a matrix, which [`Window::collect_matrices`](crate::Window::collect_matrices) brings
    /// whole to one rank; the dimensions before them count matrices.
    pub fn matrix(mut self) -> Self {
        self.raw.matrix = sys::FSDP_MATRIX_LAST_TWO;
        self
    }

    /// Declares matrices and cuts them into matrices with these numbers of rows, for example q, k and v.
    pub fn matrix_splits(mut self, rows: &[u64]) -> Self {
        self.matrix_splits = Some(rows.to_vec());
        self.matrix()
    }

    /// Declares it as a box of a larger tensor, by the shape of that tensor and the place where the box begins.
    /// Checkpoints describe the larger tensor.
    pub fn global(mut self, shape: &[u64], offset: &[u64]) -> Self {
        self.global = Some((shape.to_vec(), offset.to_vec()));
        self
    }

    /// Kept for the program, and never read: [`ParamInfo::user_data`] gives it back.
    pub fn user_data(mut self, user_data: *mut c_void) -> Self {
        self.raw.user_data = user_data;
        self
    }

    pub(crate) fn element_count(&self) -> u64 {
        self.shape.iter().fold(1, |count, size| count.saturating_mul(*size))
    }

    pub(crate) fn is_quantized(&self) -> bool {
        self.raw.quantization != 0
    }

    pub(crate) fn piece_number(&self) -> u32 {
        self.raw.piece
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The descriptor for a call, which points into `self` and `name`.
    pub(crate) fn as_raw(&self, name: &CString) -> Result<sys::fsdp_param> {
        let mut raw = self.raw;
        raw.name = name.as_ptr();
        raw.shape = self.shape.as_ptr();
        raw.dimension_count = self.shape.len() as u32;
        if let Some(splits) = &self.matrix_splits {
            raw.matrix_splits = splits.as_ptr();
            raw.matrix_split_count = splits.len() as u64;
        }
        if let Some((shape, offset)) = &self.global {
            if shape.len() != self.shape.len() || offset.len() != self.shape.len() {
                let what = format!("global of {} needs {} sizes and offsets", self.name, self.shape.len());
                return Err(Error::new(Status::InvalidArgument, what));
            }
            raw.global_shape = shape.as_ptr();
            raw.global_offset = offset.as_ptr();
        }
        Ok(raw)
    }

    pub(crate) fn c_name(&self) -> Result<CString> {
        c_string(&self.name)
    }
}

/// What names a parameter of a group: its number in the order of declaration, or its name.
pub trait ParamKey {
    /// Its number.
    #[doc(hidden)]
    fn find(&self, names: &[String]) -> Option<usize>;
    /// For the error that says there is none.
    #[doc(hidden)]
    fn describe(&self) -> String;
}

impl ParamKey for usize {
    #[inline]
    fn find(&self, names: &[String]) -> Option<usize> {
        (*self < names.len()).then_some(*self)
    }
    fn describe(&self) -> String {
        format!("number {self}")
    }
}

impl ParamKey for &str {
    fn find(&self, names: &[String]) -> Option<usize> {
        names.iter().position(|name| name == self)
    }
    fn describe(&self) -> String {
        format!("{self:?}")
    }
}

#[inline]
pub(crate) fn find(entry: &GroupEntry, key: impl ParamKey) -> Result<usize> {
    match key.find(&entry.names) {
        Some(index) => Ok(index),
        None => Err(missing(entry, key.describe())),
    }
}

#[cold]
fn missing(entry: &GroupEntry, what: String) -> Error {
    let has = entry.names.join(", ");
    Error::new(Status::InvalidArgument, format!("group {} has no parameter {what}; it has {has}", entry.name))
}

/// A parameter as it was declared, with defaults filled in and the current lr_scale.
#[derive(Clone, Debug)]
pub struct ParamInfo {
    /// Unique in the model.
    pub name: String,
    /// Sizes, outermost first.
    pub shape: Vec<u64>,
    /// The dtype of the compute weights.
    pub dtype: Dtype,
    /// `FSDP_PARAM_*`.
    pub flags: u32,
    /// Where rank boundaries may fall.
    pub granule: Granule,
    /// The number of rows in a block, if boundaries fall between blocks of rows.
    pub granule_rows: u64,
    /// In how many of its leading dimensions ranks may divide it.
    pub row_dimensions: u32,
    /// The current lr_scale.
    pub lr_scale: f64,
    /// What a step does to it without a gradient.
    pub missing_grad: MissingGrad,
    /// The piece of the group that it is in.
    pub piece: u32,
    /// Which optimizer updates it; a frozen parameter has none.
    pub optimizer: Option<Optimizer>,
    /// The rows of each matrix of its last two dimensions; empty if it has no matrices.
    pub matrix_splits: Vec<u64>,
    /// The user data as it was given.
    pub user_data: *mut c_void,
    /// The larger tensor's shape, and where this box of it begins.
    pub global: Option<(Vec<u64>, Vec<u64>)>,
}

impl ParamInfo {
    pub(crate) fn from_raw(raw: &sys::fsdp_param) -> Self {
        // SAFETY: so many numbers of the model's, copied at once.
        let list = |from: *const u64, count: u64| match count {
            0 => Vec::new(),
            count => unsafe { std::slice::from_raw_parts(from, count as usize) }.to_vec(),
        };
        let sizes = |from: *const u64| list(from, raw.dimension_count.into());
        ParamInfo {
            name: unsafe { text(raw.name) }.unwrap_or_default(),
            shape: sizes(raw.shape),
            dtype: Dtype::from_raw(raw.dtype).expect("a dtype of this release"),
            flags: raw.flags,
            granule: Granule::from_raw(raw.granule).expect("a granule of this release"),
            granule_rows: raw.granule_rows,
            row_dimensions: raw.row_dimensions,
            lr_scale: raw.lr_scale,
            missing_grad: MissingGrad::from_raw(raw.missing_grad).expect("a missing_grad of this release"),
            piece: raw.piece,
            optimizer: Optimizer::from_raw(raw.optimizer),
            matrix_splits: list(raw.matrix_splits, raw.matrix_split_count),
            user_data: raw.user_data,
            global: (!raw.global_shape.is_null() && !raw.global_offset.is_null())
                .then(|| (sizes(raw.global_shape), sizes(raw.global_offset))),
        }
    }
}
