// SPDX-License-Identifier: Apache-2.0
//! Pieces of a group: guards of their own, visits, and groups that BACKWARD does not read.
mod common;
use common::run_ranks;
use fsdp::{
    BackwardWeights, Context, Dtype, E4m3, Group, GroupOptions, Model, ModelOptions, Param, Phase, Plane, Quantization,
    Schedule, Status, UnshardMode, Weights,
};
use std::sync::Mutex;

/// Three matrices in the pieces 0, 1 and 1 of each of the groups "a" and "b", of which "b" is not read in BACKWARD.
fn pieces_model(context: &Context, schedule: impl Fn(&[Group]) -> VisitsOr) -> (Model, Vec<Group>) {
    let options = ModelOptions::new().unshard_mode(UnshardMode::Copied).no_prefetch();
    let mut model = Model::new(context, &options).unwrap();
    let mut groups = Vec::new();
    for (name, reads) in [("a", BackwardWeights::Gathered), ("b", BackwardWeights::None)] {
        let param = |p: u32| Param::new(&format!("{name}{p}"), &[4, 2]).piece((p + 1) / 2);
        let options = GroupOptions::new().backward_weights(reads);
        groups.push(model.create_group(name, &[0, 1, 2].map(param), &options).unwrap());
    }
    match schedule(&groups) {
        VisitsOr::Visits(visits) => model.set_schedule(Schedule::PieceVisits(&visits)).unwrap(),
        VisitsOr::Other(schedule) => model.set_schedule(schedule).unwrap(),
    }
    let mut window = model.seal().unwrap();
    for (g, group) in groups.iter().enumerate() {
        (0..3).for_each(|p| window.load_param(*group, p, &values(g, p)).unwrap());
    }
    window.publish().unwrap();
    (model, groups)
}

enum VisitsOr {
    Visits(Vec<(Group, Phase, Option<u32>)>),
    Other(Schedule<'static>),
}

fn sequential(_: &[Group]) -> VisitsOr {
    VisitsOr::Other(Schedule::Sequential)
}

fn any_order(_: &[Group]) -> VisitsOr {
    VisitsOr::Other(Schedule::Any { held_groups: 2 })
}

fn by_piece(groups: &[Group]) -> VisitsOr {
    let mut visits = Vec::new();
    for group in groups {
        visits.extend([0, 1].map(|piece| (*group, Phase::Forward, Some(piece))));
    }
    visits.extend([(groups[1], Phase::Backward, Some(1)), (groups[1], Phase::Backward, Some(0))]);
    visits.push((groups[0], Phase::Backward, None));
    VisitsOr::Visits(visits)
}

fn values(g: usize, p: usize) -> Vec<f32> {
    vec![(3 * g + p + 1) as f32; 8]
}

fn gathers(model: &Model) -> u64 {
    model.stats().unwrap().gathers
}

#[test]
fn a_guard_shows_the_parameters_of_its_piece_only() {
    for schedule in [sequential as fn(&[Group]) -> VisitsOr, by_piece, any_order] {
        run_ranks(2, |context| {
            let (model, groups) = pieces_model(&context, schedule);
            assert_eq!(model.param_info(groups[0], "a2").unwrap().piece, 1);
            for _ in 0..2 {
                let weights = model.unshard_piece(groups[0], 1, Phase::Forward).unwrap();
                assert_eq!((weights.len(), weights.indices()), (2, 1..3));
                for p in weights.indices() {
                    assert_eq!(weights.get::<f32>(p).unwrap(), values(0, p));
                }
                assert_eq!(weights.tensor("a2").unwrap().shape(), [4, 2]);
                let error = weights.get::<f32>("a0").unwrap_err();
                assert_eq!(error.status, Status::InvalidState);
                assert!(error.message.contains("a0 is in piece 0 of group a"), "{error}");
                assert!(error.message.contains("of piece 1"), "{error}");
                assert!(weights.tensor(0).is_err());
                assert_eq!(weights.get::<f32>(3).unwrap_err().status, Status::InvalidArgument);
            }
            drop(model);
            context.close().unwrap();
        });
    }
}

#[test]
fn pieces_are_gathered_by_themselves_and_the_group_gathers_the_rest() {
    run_ranks(2, |context| {
        let (model, groups) = pieces_model(&context, sequential);
        let first = model.unshard_piece(groups[0], 0, Phase::Forward).unwrap();
        assert_eq!(gathers(&model), 1);
        let all = model.unshard(groups[0], Phase::Forward).unwrap();
        assert_eq!(gathers(&model), 2);
        let again = model.unshard_piece(groups[0], 1, Phase::Forward).unwrap();
        assert_eq!(gathers(&model), 2);
        assert_eq!(all.get::<f32>(2).unwrap().as_ptr(), again.get::<f32>(2).unwrap().as_ptr());
        first.reshard().unwrap();
        all.reshard().unwrap();
        drop(again);
        assert_eq!(model.stats().unwrap().gathered_groups, 0);
        model.unshard(groups[0], Phase::Forward).unwrap().reshard().unwrap();
        assert_eq!(gathers(&model), 4);
        let error = model.unshard_piece(groups[0], 2, Phase::Forward).map(drop).unwrap_err();
        assert_eq!(error.status, Status::InvalidArgument);
        assert!(error.message.contains("the pieces 0 to 1"), "{error}");
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn a_leaked_hold_of_a_piece_is_returned_by_its_number() {
    run_ranks(2, |context| {
        let (model, groups) = pieces_model(&context, sequential);
        std::mem::forget(model.unshard_piece(groups[0], 1, Phase::Forward).unwrap());
        let whole = unsafe { model.reshard(groups[0], Phase::Forward) };
        let other = unsafe { model.reshard_piece(groups[0], 0, Phase::Forward) };
        assert_eq!([whole, other].map(|wrong| wrong.unwrap_err().status), [Status::InvalidState; 2]);
        unsafe { model.reshard_piece(groups[0], 1, Phase::Forward) }.unwrap();
        assert_eq!(model.stats().unwrap().gathered_groups, 0);
        drop(model);
        context.close().unwrap();
    });
}

/// Every gradient is the weight as the forward pass sees it.
fn step(model: &mut Model, groups: &[Group], pieces: &[Option<u32>]) {
    for group in groups {
        let mut grads = model.grads(*group).unwrap();
        for piece in pieces {
            let weights: Weights<'_> = match piece {
                Some(piece) => model.unshard_piece(*group, *piece, Phase::Forward).unwrap(),
                None => model.unshard(*group, Phase::Forward).unwrap(),
            };
            for index in weights.indices() {
                grads.get::<f32>(index).unwrap().data.copy_from_slice(weights.get(index).unwrap());
            }
        }
        grads.reduce_last().unwrap();
    }
    model.finish_grads(1.0).unwrap().step_adamw(0.125, &Default::default()).unwrap();
}

#[test]
fn pieces_train_the_bits_of_whole_groups() {
    let trained = Mutex::new(Vec::new());
    for (schedule, pieces) in [(sequential as fn(&[Group]) -> VisitsOr, vec![None]), (by_piece, vec![Some(0), Some(1)])]
    {
        run_ranks(2, |context| {
            let (mut model, groups) = pieces_model(&context, schedule);
            (0..4).for_each(|_| step(&mut model, &groups, &pieces));
            let read = |group: &Group| [0, 1, 2].map(|p| model.read_param::<f32>(*group, p).unwrap());
            let all: Vec<_> = groups.iter().map(read).collect();
            trained.lock().unwrap().push(all);
            drop(model);
            context.close().unwrap();
        });
    }
    let trained = trained.into_inner().unwrap();
    assert_eq!(trained.len(), 4);
    assert!(trained.iter().all(|one| *one == trained[0]));
    assert_ne!(trained[0][0][0], values(0, 0));
}

#[test]
fn groups_without_weights_in_backward_are_not_held_there() {
    run_ranks(2, |context| {
        let (model, groups) = pieces_model(&context, sequential);
        let whole = model.unshard(groups[1], Phase::Backward).map(drop).unwrap_err();
        let piece = model.unshard_piece(groups[1], 0, Phase::Backward).map(drop).unwrap_err();
        for error in [whole, piece] {
            assert_eq!(error.status, Status::InvalidState);
            assert!(error.message.contains("FSDP_BACKWARD_WEIGHTS_NONE"), "{error}");
        }
        let weights = model.unshard_piece(groups[1], 1, Phase::Recompute).unwrap();
        assert_eq!(weights.get::<f32>("b1").unwrap(), values(1, 1));
        drop(weights);
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn pieces_of_quantized_parameters_have_planes() {
    run_ranks(2, |context| {
        let mut model = Model::new(&context, &ModelOptions::new()).unwrap();
        let quantized = Param::new("q", &[1, 2]).quantization(Quantization::Fp8Block).piece(1);
        let group = model.create_group("g", &[Param::new("w", &[4]), quantized], &Default::default()).unwrap();
        let mut window = model.seal().unwrap();
        window.load_param(group, "q", &[448f32, 1.0]).unwrap();
        window.publish().unwrap();
        let weights = model.unshard_piece(group, 1, Phase::Forward).unwrap();
        assert_eq!(weights.plane::<E4m3>("q", Plane::Row).unwrap()[0], E4m3(0x7e));
        let none = weights.tensor("q").unwrap();
        assert!(none.data().is_null());
        assert_eq!((none.shape(), none.element_count(), none.dtype()), (&[1, 2][..], 2, Dtype::Float32));
        assert_eq!(weights.get::<f32>("q").unwrap_err().status, Status::InvalidState);
        assert_eq!(weights.plane::<E4m3>("w", Plane::Row).unwrap_err().status, Status::InvalidState);
        drop(weights);
        drop(model);
        context.close().unwrap();
    });
}

/// A visit counts pieces from 0, as everything else does.
#[test]
fn visits_of_pieces_that_do_not_exist_are_refused() {
    run_ranks(1, |context| {
        for piece in [1, u32::MAX] {
            let mut model = Model::new(&context, &ModelOptions::new()).unwrap();
            let group = model.create_group("g", &[Param::new("w", &[4])], &Default::default()).unwrap();
            let visits = [(group, Phase::Forward, Some(piece)), (group, Phase::Backward, None)];
            model.set_schedule(Schedule::PieceVisits(&visits)).unwrap();
            assert_eq!(model.seal().map(drop).unwrap_err().status, Status::InvalidArgument);
        }
    });
}
