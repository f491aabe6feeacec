// SPDX-License-Identifier: Apache-2.0
use crate::enums::{BackwardWeights, Dtype, GradOp, MainStorage, OuterStrategy, Phase, ReducePolicy, Status, Strategy};
use crate::error::{check, text, Error, Result};
use crate::sys;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;

/// Names a group of a model; a number, and so copied freely.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Group {
    pub(crate) model: u64,
    pub(crate) index: u32,
}

impl Group {
    /// Its number, in the order of creation.
    pub fn index(self) -> usize {
        self.index as usize
    }
}

/// What a group was declared as, with defaults filled in.
#[derive(Clone, Debug)]
pub struct GroupInfo {
    /// Its name, unique in the model.
    pub name: String,
    /// The number of its parameters.
    pub param_count: u64,
    /// Its number in the order of creation.
    pub group_index: u32,
    /// `FSDP_GROUP_*`.
    pub flags: u32,
    /// What is sharded.
    pub strategy: Strategy,
    /// When gradients are reduced.
    pub reduce_policy: ReducePolicy,
    /// The dtype of full gradients; `None`: that of each parameter.
    pub grad_dtype: Option<Dtype>,
    /// The dtype in which gradients are sent; `None`: that of the gradient.
    pub reduce_dtype: Option<Dtype>,
    /// How main weights of bf16 parameters are kept.
    pub main_storage: MainStorage,
    /// Whether BACKWARD reads its weights.
    pub backward_weights: BackwardWeights,
    /// The number of its pieces, at least 1.
    pub piece_count: u64,
    /// The number of replicas in the group's mesh.
    pub replicate_size: u32,
    /// The number of ranks in a shard axis of the group's mesh.
    pub shard_size: u32,
    /// How gradients are added over ranks.
    pub grad_op: GradOp,
    /// What the replicas of the group's mesh divide among themselves.
    pub outer_strategy: OuterStrategy,
    /// The number by which sums of gradients are multiplied.
    pub grad_factor: f64,
}

impl GroupInfo {
    pub(crate) fn from_raw(raw: &sys::fsdp_group_info) -> Self {
        GroupInfo {
            name: unsafe { text(raw.name) }.unwrap_or_default(),
            param_count: raw.param_count,
            group_index: raw.group_index,
            flags: raw.flags,
            strategy: Strategy::from_raw(raw.strategy).expect("a strategy of this release"),
            reduce_policy: ReducePolicy::from_raw(raw.reduce_policy).expect("a policy of this release"),
            grad_dtype: Dtype::from_raw(raw.grad_dtype),
            reduce_dtype: Dtype::from_raw(raw.reduce_dtype),
            main_storage: MainStorage::from_raw(raw.main_storage).expect("a storage of this release"),
            backward_weights: BackwardWeights::from_raw(raw.backward_weights).expect("a kind of this release"),
            piece_count: raw.piece_count,
            replicate_size: raw.replicate_size,
            shard_size: raw.shard_size,
            grad_op: GradOp::from_raw(raw.grad_op).expect("an operation of this release"),
            outer_strategy: OuterStrategy::from_raw(raw.outer_strategy).expect("a strategy of this release"),
            grad_factor: raw.grad_factor,
        }
    }
}

/// What a model keeps about one of its groups.
pub(crate) struct GroupEntry {
    pub(crate) raw: *mut sys::fsdp_group,
    pub(crate) name: String,
    pub(crate) names: Vec<String>,
    pub(crate) element_counts: Vec<u64>,
    /// The piece of each parameter, which never falls.
    pub(crate) pieces: Vec<u32>,
    are_quantized: Vec<bool>,
    /// A `Grads` of it lives, or was leaked.
    pub(crate) lent: Cell<bool>,
    views: [ViewTable; 4],
    piece_views: Vec<[ViewTable; 4]>,
}

/// Addresses of views, which are asked for once if they are fixed from the seal on. They are not references: each guard
/// makes new slices from them.
#[derive(Default)]
struct ViewTable(UnsafeCell<Option<Box<[sys::fsdp_tensor]>>>);

impl GroupEntry {
    pub(crate) fn new(raw: *mut sys::fsdp_group, name: &str, params: &[crate::Param]) -> Self {
        GroupEntry {
            raw,
            name: name.to_string(),
            names: params.iter().map(|param| param.name().to_string()).collect(),
            element_counts: params.iter().map(crate::Param::element_count).collect(),
            pieces: params.iter().map(crate::Param::piece_number).collect(),
            are_quantized: params.iter().map(crate::Param::is_quantized).collect(),
            lent: Cell::new(false),
            views: Default::default(),
            piece_views: (0..=params.last().map_or(0, crate::Param::piece_number))
                .map(|_| Default::default())
                .collect(),
        }
    }

    /// The numbers of the parameters of a piece, or of all.
    #[inline]
    pub(crate) fn params_of(&self, piece: Option<u32>) -> Range<usize> {
        match piece {
            None => 0..self.names.len(),
            Some(piece) => {
                self.pieces.partition_point(|own| *own < piece)..self.pieces.partition_point(|own| *own <= piece)
            }
        }
    }

    /// The views of all parameters, or of those of a piece, in a model whose addresses are fixed; they are unsharded.
    #[inline]
    pub(crate) fn kept_views(&self, piece: Option<u32>, phase: Phase) -> Result<&[sys::fsdp_tensor]> {
        let tables = piece.map_or(&self.views, |piece| &self.piece_views[piece as usize]);
        let table = &tables[phase as usize - 1].0;
        // SAFETY: written once, below, where it was None and so nothing borrowed from it; a model is not Sync.
        match unsafe { &*table.get() } {
            Some(views) => Ok(views),
            None => self.keep_views(piece, phase, table),
        }
    }

    #[cold]
    fn keep_views<'a>(
        &'a self,
        piece: Option<u32>,
        phase: Phase,
        table: &'a UnsafeCell<Option<Box<[sys::fsdp_tensor]>>>,
    ) -> Result<&'a [sys::fsdp_tensor]> {
        let views = self.ask_for_views(piece, phase)?;
        // SAFETY: as in kept_views.
        Ok(unsafe { (*table.get()).insert(views.into_boxed_slice()) })
    }

    /// The views of all parameters, or of those of a piece, at this hold's addresses.
    pub(crate) fn ask_for_views(&self, piece: Option<u32>, phase: Phase) -> Result<Vec<sys::fsdp_tensor>> {
        let params = self.params_of(piece);
        let mut views = vec![sys::fsdp_tensor::default(); params.len()];
        if piece.is_none() {
            let (count, stride) = (views.len() as u64, std::mem::size_of::<sys::fsdp_tensor>() as u64);
            check(unsafe { sys::fsdp_get_params(self.raw, phase as i32, views.as_mut_ptr(), count, stride) })?;
            return Ok(views);
        }
        for (index, view) in params.zip(&mut views) {
            match self.are_quantized[index] {
                true => self.describe(index, view)?,
                false => check(unsafe { sys::fsdp_get_param(self.raw, index as u64, phase as i32, view) })?,
            }
        }
        Ok(views)
    }

    /// The view of a quantized parameter, which has planes and no data, as `fsdp_get_params` does. Without data no device
    /// counts.
    fn describe(&self, index: usize, view: &mut sys::fsdp_tensor) -> Result<()> {
        let mut param = sys::fsdp_param::default();
        check(unsafe { sys::fsdp_get_param_info(self.raw, index as u64, &mut param) })?;
        view.shape = param.shape;
        view.dimension_count = param.dimension_count;
        view.dtype = param.dtype;
        view.element_count = self.element_counts[index];
        view.flags = sys::FSDP_TENSOR_READ_ONLY;
        view.device = sys::FSDP_DEVICE_HOST;
        Ok(())
    }
}

#[cold]
pub(crate) fn foreign(group: Group) -> Error {
    Error::new(Status::InvalidHandle, format!("group {} is of another model", group.index))
}
