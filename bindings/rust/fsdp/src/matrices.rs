// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Dtype, Status};
use crate::error::{check, text, Error, Result};
use crate::model::no_slices;
use crate::{sys, Element, Group, MatrixOptions, Model};
use std::marker::PhantomData;
use std::os::raw::c_void;

/// Matrices on their way, from [`Window::collect_matrices`](crate::Window::collect_matrices) to
/// [`give_back`](Matrices::give_back). They borrow the window, and a [`Matrix`] borrows them: no two live at once.
///
/// Dropping it gives nothing back, because that is a collective call that is legal only when [`next`](Matrices::next) has
/// given all matrices: discard the step then.
///
/// ```compile_fail,E0499
/// # fn two_at_once(mut window: fsdp::Window<'_>) -> fsdp::Result<()> {
/// let mut matrices = window.collect_matrices(&Default::default())?;
/// let one = matrices.next()?;
/// let two = matrices.next()?; // takes the memory of the first one back
/// drop((one, two));
/// # Ok(()) }
/// ```
#[must_use = "the rows come back with give_back; after next has given all matrices"]
pub struct Matrices<'w> {
    model: &'w mut Model,
}

impl<'w> Matrices<'w> {
    pub(crate) fn collect(model: &'w mut Model, options: &MatrixOptions) -> Result<Self> {
        let options = options.as_raw()?;
        check(unsafe { sys::fsdp_collect_matrices(model.raw, &options, model.stream.get()) })?;
        Ok(Matrices { model })
    }

    /// The next matrices of this rank, until there are no more. Those of the call before are given back.
    #[allow(clippy::should_implement_trait)] // an Iterator's items would outlive the next call
    pub fn next(&mut self) -> Result<Option<Matrix<'_>>> {
        let mut raw = sys::fsdp_matrix::default();
        check(unsafe { sys::fsdp_next_matrix(self.model.raw, self.model.stream.get(), &mut raw) })?;
        match raw.data.is_null() {
            true => Ok(None),
            false => Matrix::new(self.model, raw).map(Some),
        }
    }

    /// Brings all rows back to the target.
    pub fn give_back(self) -> Result<()> {
        check(unsafe { sys::fsdp_return_matrices(self.model.raw, self.model.stream.get()) })
    }
}

/// Some equal matrices of one parameter, which this rank has whole.
#[non_exhaustive]
pub struct Matrix<'a> {
    /// The parameter's group.
    pub group: Group,
    /// Its number there.
    pub param_index: usize,
    /// Its name.
    pub name: String,
    /// The number of the first matrix in the dimensions before the last two, taken as one.
    pub batch_index: u64,
    /// The number of the split.
    pub split_index: u64,
    /// The first row of the split.
    pub row_offset: u64,
    /// The rows of each matrix.
    pub rows: usize,
    /// The columns of each matrix.
    pub columns: usize,
    /// How many matrices there are: that of `batch_index` and the next ones.
    pub count: usize,
    /// What the numbers are.
    pub dtype: Dtype,
    raw: sys::fsdp_matrix,
    on_host: bool,
    owner: PhantomData<&'a mut ()>,
}

impl<'a> Matrix<'a> {
    fn new(model: &'a Model, raw: sys::fsdp_matrix) -> Result<Self> {
        Ok(Matrix {
            group: model.group_of(raw.group)?,
            param_index: raw.param_index as usize,
            // SAFETY: a name of the model's.
            name: unsafe { text(raw.name) }.unwrap_or_default(),
            batch_index: raw.batch_index,
            split_index: raw.split_index,
            row_offset: raw.row_offset,
            rows: raw.rows as usize,
            columns: raw.columns as usize,
            count: raw.count as usize,
            dtype: Dtype::from_raw(raw.dtype).expect("a dtype of this release"),
            raw,
            on_host: model.on_host,
            owner: PhantomData,
        })
    }

    /// One of the matrices (0 to `count - 1`) as a slice of rows x columns numbers in C order, to be changed in place.
    pub fn get<T: Element>(&mut self, number: usize) -> Result<&mut [T]> {
        if !self.on_host {
            return Err(no_slices());
        }
        if self.raw.dtype != T::DTYPE as i32 {
            let what =
                format!("the matrices of {} are of {:?}, and {:?} was asked for", self.name, self.dtype, T::DTYPE);
            return Err(Error::new(Status::InvalidArgument, what));
        }
        if number >= self.raw.count as usize {
            let (count, name) = (self.raw.count, &self.name);
            let what = format!("there are {count} matrices of {name} here, and number {number} was asked for");
            return Err(Error::new(Status::InvalidArgument, what));
        }
        let data = self.data(number as u64);
        // SAFETY: so many elements. They are this rank's alone until the next call on the matrices, which this borrows, and
        // this matrix is borrowed alone.
        Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), (self.raw.rows * self.raw.columns) as usize) })
    }

    /// The address of one of the matrices; on a GPU one of its memory.
    pub fn data(&self, number: u64) -> *mut c_void {
        self.raw.data.cast::<u8>().wrapping_add((number * self.raw.stride_bytes) as usize).cast()
    }
}
