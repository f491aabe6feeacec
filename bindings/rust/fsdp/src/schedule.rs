// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Phase, ScheduleKind};
use crate::Group;

/// The order in which groups will be visited, for [`Model::set_schedule`](crate::Model::set_schedule).
///
/// ```no_run
/// # fn declare(mut model: fsdp::Model) -> fsdp::Result<()> {
/// model.set_schedule(fsdp::Schedule::Any { held_groups: 3 })
/// # }
/// ```
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule<'v> {
    /// In declared order forward, reversed backward: that of a model without a schedule.
    Sequential,
    /// 1F1B: a forward and a backward pass run at once.
    Interleaved,
    /// These visits, one after the other.
    Visits(&'v [(Group, Phase)]),
    /// No order: each gather takes one of so many buffers for copied weights (0: 4), and a guard's weights may lie elsewhere
    /// than those of the last one.
    Any {
        /// How many groups are held at once.
        held_groups: u32,
    },
}

impl Schedule<'_> {
    /// The value of the header that says which it is.
    pub fn kind(&self) -> ScheduleKind {
        match self {
            Schedule::Sequential => ScheduleKind::Sequential,
            Schedule::Interleaved => ScheduleKind::Interleaved,
            Schedule::Visits(_) => ScheduleKind::Visits,
            Schedule::Any { .. } => ScheduleKind::Any,
        }
    }

    pub(crate) fn visits(&self) -> &[(Group, Phase)] {
        match self {
            Schedule::Visits(visits) => visits,
            _ => &[],
        }
    }

    pub(crate) fn held_groups(&self) -> u32 {
        match self {
            Schedule::Any { held_groups } => *held_groups,
            _ => 0,
        }
    }
}
