// SPDX-License-Identifier: Apache-2.0
use crate::enums::{Phase, ScheduleKind};
use crate::{sys, Group};

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
    /// These visits, each of a whole group (`None`) or of one of its pieces (0, 1, ...). If a visit names a piece of a
    /// group, each piece of this group has a buffer of its own.
    PieceVisits(&'v [(Group, Phase, Option<u32>)]),
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
            Schedule::Visits(_) | Schedule::PieceVisits(_) => ScheduleKind::Visits,
            Schedule::Any { .. } => ScheduleKind::Any,
        }
    }

    pub(crate) fn visits(&self) -> Vec<(Group, Phase, Option<u32>)> {
        match self {
            Schedule::Visits(visits) => visits.iter().map(|&(group, phase)| (group, phase, None)).collect(),
            Schedule::PieceVisits(visits) => visits.to_vec(),
            _ => Vec::new(),
        }
    }

    pub(crate) fn held_groups(&self) -> u32 {
        match self {
            Schedule::Any { held_groups } => *held_groups,
            _ => 0,
        }
    }
}

/// The header counts pieces from 1 here. The largest number, which no piece has, is left alone.
pub(crate) fn raw_visit(&(group, phase, piece): &(Group, Phase, Option<u32>)) -> sys::fsdp_visit {
    let piece = piece.map_or(0, |number| number.saturating_add(1));
    sys::fsdp_visit { group_index: group.index, phase: phase as i32, piece }
}
