// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Dtype, Phase, ReducePolicy, Status, Strategy};
use crate::error::{check, text, Error, Result};
use crate::sys;
use std::cell::{Cell, UnsafeCell};

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
    /// Unique in the model.
    pub name: String,
    /// Of its parameters.
    pub param_count: u64,
    /// In the order of creation.
    pub group_index: u32,
    /// `FSDP_GROUP_*`.
    pub flags: u32,
    /// What is sharded.
    pub strategy: Strategy,
    /// When gradients are reduced.
    pub reduce_policy: ReducePolicy,
    /// `None`: each parameter's own.
    pub grad_dtype: Option<Dtype>,
    /// `None`: the gradient's.
    pub reduce_dtype: Option<Dtype>,
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
        }
    }
}

/// What a model knows of a group of its own.
pub(crate) struct GroupEntry {
    pub(crate) raw: *mut sys::fsdp_group,
    pub(crate) name: String,
    pub(crate) names: Vec<String>,
    pub(crate) element_counts: Vec<u64>,
    /// A `Grads` of it lives, or was leaked.
    pub(crate) lent: Cell<bool>,
    views: [ViewTable; 4],
}

/// Addresses of views, asked for once where they are fixed from the seal on. They are no references: slices are made anew of
/// them for each guard.
#[derive(Default)]
struct ViewTable(UnsafeCell<Option<Box<[sys::fsdp_tensor]>>>);

impl GroupEntry {
    pub(crate) fn new(raw: *mut sys::fsdp_group, name: &str, params: &[crate::Param]) -> Self {
        GroupEntry {
            raw,
            name: name.to_string(),
            names: params.iter().map(|param| param.name().to_string()).collect(),
            element_counts: params.iter().map(crate::Param::element_count).collect(),
            lent: Cell::new(false),
            views: Default::default(),
        }
    }

    /// The views of all parameters, in a model whose addresses are fixed; the group is unsharded.
    #[inline]
    pub(crate) fn kept_views(&self, phase: Phase) -> Result<&[sys::fsdp_tensor]> {
        let table = &self.views[phase as usize - 1].0;
        // SAFETY: written once, below, where it was None and so nothing borrowed from it; a model is not Sync.
        match unsafe { &*table.get() } {
            Some(views) => Ok(views),
            None => self.keep_views(phase, table),
        }
    }

    #[cold]
    fn keep_views<'a>(
        &'a self,
        phase: Phase,
        table: &'a UnsafeCell<Option<Box<[sys::fsdp_tensor]>>>,
    ) -> Result<&'a [sys::fsdp_tensor]> {
        let views = self.ask_for_views(phase)?;
        // SAFETY: as in kept_views.
        Ok(unsafe { (*table.get()).insert(views.into_boxed_slice()) })
    }

    /// The views of all parameters at this hold's addresses.
    pub(crate) fn ask_for_views(&self, phase: Phase) -> Result<Vec<sys::fsdp_tensor>> {
        let mut views = vec![sys::fsdp_tensor::default(); self.names.len()];
        let (count, stride) = (views.len() as u64, std::mem::size_of::<sys::fsdp_tensor>() as u64);
        check(unsafe { sys::fsdp_get_params(self.raw, phase as i32, views.as_mut_ptr(), count, stride) })?;
        Ok(views)
    }
}

#[cold]
pub(crate) fn foreign(group: Group) -> Error {
    Error::new(Status::InvalidHandle, format!("group {} is of another model", group.index))
}
