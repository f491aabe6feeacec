// SPDX-License-Identifier: Apache-2.0
//! A group with a mesh of its own: each of two ranks has experts that it shares with no other rank.
mod common;
use common::run_ranks;
use fsdp::{
    Context, GradOp, Group, GroupOptions, Mesh, MeshOptions, Model, ModelOptions, OuterStrategy, Param, Status,
};

/// Dense weights of both ranks, and this rank's half of a stack.
fn experts_model(context: &Context, options: GroupOptions) -> (Model, Group, Group) {
    let rank = context.rank();
    let mut model = Model::new(context, &ModelOptions::new()).unwrap();
    let dense = model.create_group("dense", &[Param::new("dense", &[4])], &Default::default()).unwrap();
    let half = Param::new("experts", &[1, 4]).global(&[2, 4], &[u64::from(rank), 0]);
    let mesh = Mesh::new(context, &MeshOptions::new().ranks(&[rank])).unwrap();
    let experts = model.create_group("experts", &[half], &options.mesh(&mesh)).unwrap();
    drop(mesh);
    model.seal().unwrap().publish().unwrap();
    (model, dense, experts)
}

fn put_all(model: &mut Model, groups: [Group; 2], value: f32) {
    for group in groups {
        let mut grads = model.grads(group).unwrap();
        grads.put(0, Some(&[value; 4])).unwrap();
        grads.reduce_last().unwrap();
    }
}

#[test]
fn the_mean_is_over_the_ranks_of_the_model() {
    run_ranks(2, |context| {
        let rank = context.rank() as f32;
        let (mut model, dense, experts) = experts_model(&context, GroupOptions::new());
        put_all(&mut model, [dense, experts], 2.0 * rank + 2.0);
        let mut window = model.finish_grads(1.0).unwrap();
        assert_eq!(window.grad_norm().unwrap(), (4.0f64 * 9.0 + 4.0 + 4.0 * 4.0).sqrt());
        window.publish().unwrap();
        let info = model.group_info(experts).unwrap();
        assert_eq!((info.replicate_size, info.shard_size), (1, 1));
        let info_of_dense = model.group_info(dense).unwrap();
        assert_eq!((info_of_dense.replicate_size, info_of_dense.shard_size), (1, 2));
        assert_eq!((info.grad_op, info.outer_strategy), (GradOp::Mean, OuterStrategy::NoShard));
        assert_eq!(info.grad_factor, 0.5);
        context.close().unwrap();
    });
}

#[test]
fn a_group_has_a_factor_of_its_own() {
    run_ranks(2, |context| {
        let options = GroupOptions::new().grad_op(GradOp::Factor).grad_factor(0.75);
        let (mut model, dense, experts) = experts_model(&context, options);
        put_all(&mut model, [dense, experts], 2.0);
        let mut window = model.finish_grads(1.0).unwrap();
        assert_eq!(window.grad_norm().unwrap(), (4.0f64 * 4.0 + 8.0 * 1.5 * 1.5).sqrt());
        window.publish().unwrap();
        let factors = [dense, experts].map(|group| model.group_info(group).unwrap().grad_factor);
        assert_eq!(factors, [0.5, 0.75]);
        context.close().unwrap();
    });
}

#[test]
fn replicas_that_are_not_there_divide_nothing() {
    run_ranks(2, |context| {
        let mut model = Model::new(&context, &ModelOptions::new()).unwrap();
        let options = GroupOptions::new().outer_strategy(OuterStrategy::Optim);
        let error = model.create_group("w", &[Param::new("w", &[4])], &options).unwrap_err();
        assert_eq!(error.status, Status::InvalidArgument);
        assert!(error.to_string().contains("outer_strategy"), "{error}");
        context.close().unwrap();
    });
}
