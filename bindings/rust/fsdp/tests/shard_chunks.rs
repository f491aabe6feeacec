// SPDX-License-Identifier: Apache-2.0
//! An optimizer of the caller's own on shards at home in a file, chunk by chunk.
mod common;
use common::{ramp, run_ranks};
use fsdp::{Context, Dtype, Group, Home, Model, ModelOptions, Optimizer, Param, Shard, Status, Window};

const ROWS: u64 = 100;
const COLUMNS: u64 = 300;
const COUNT: usize = (ROWS * COLUMNS) as usize;

/// The caller updates "w", and AdamW updates "b".
fn filed_model(context: &Context, home: Home) -> (Model, Group) {
    let options = ModelOptions::new()
        .state_home(home)
        .main_home(home)
        .home_directory("/var/tmp")
        .turn_bytes(65536)
        .grad_dtype(Dtype::Float32);
    let mut model = Model::new(context, &options).unwrap();
    let params = [
        Param::new("w", &[ROWS, COLUMNS]).dtype(Dtype::Bfloat16).optimizer(Optimizer::Caller),
        Param::new("b", &[COLUMNS]).dtype(Dtype::Bfloat16),
    ];
    let group = model.create_group("layer", &params, &Default::default()).unwrap();
    model.add_optimizer_state("momentum", Dtype::Float32).unwrap();
    let mut window = model.seal().unwrap();
    window.load_param(group, "w", &ramp(COUNT)).unwrap();
    window.publish().unwrap();
    (model, group)
}

fn finish_grads(model: &mut Model, group: Group) -> Window<'_> {
    let mut grads = model.grads(group).unwrap();
    grads.put("w", Some(&ramp(COUNT)[..])).unwrap();
    grads.put("b", Some(&ramp(COLUMNS as usize)[..])).unwrap();
    grads.reduce_last().unwrap();
    model.finish_grads(1.0).unwrap()
}

/// SGD with momentum, in numbers that are exact.
fn update(chunk: Shard<'_>) {
    let Shard { mut main_weight, main_grad, mut states, .. } = chunk;
    let momentum = states[0].get::<f32>().unwrap();
    for ((w, g), m) in main_weight.float32().unwrap().iter_mut().zip(main_grad).zip(momentum) {
        *m = 0.5 * *m + *g;
        *w -= 0.25 * *m;
    }
}

#[test]
fn chunks_come_one_after_the_other_to_an_own_optimizer() {
    run_ranks(2, |context| {
        let (mut model, group) = filed_model(&context, Home::File);
        let mut elements = 0;
        for _ in 0..2 {
            let mut window = finish_grads(&mut model, group);
            let mut chunks = window.shard_chunks().unwrap();
            while let Some(chunk) = chunks.next().unwrap() {
                assert_eq!((&chunk.name[..], &chunk.states[0].name[..]), ("w", "momentum"));
                assert_eq!(chunk.row_offset, chunk.element_offset / COLUMNS);
                assert!(chunk.main_grad.len() <= 8192);
                elements += chunk.main_grad.len();
                update(chunk);
            }
            window.step_adamw(0.5, &Default::default()).unwrap();
        }
        assert_eq!(elements, COUNT); // half of them in each of two steps
        let weights: Vec<f32> = model.read_param(group, "w").unwrap();
        assert!(weights.iter().zip(ramp(COUNT)).all(|(w, start)| *w == start - 0.625 * start));
        let momentum: Vec<f32> = model.read_state(group, "w", "momentum").unwrap();
        assert!(momentum.iter().zip(ramp(COUNT)).all(|(m, grad)| *m == 1.5 * grad));
    });
}

#[test]
fn a_pass_that_was_dropped_goes_on() {
    run_ranks(1, |context| {
        let (mut model, group) = filed_model(&context, Home::File);
        let mut window = finish_grads(&mut model, group);
        update(window.shard_chunks().unwrap().next().unwrap().unwrap());
        let error = window.step_adamw(0.5, &Default::default()).unwrap_err();
        assert_eq!(error.status, Status::InvalidState);
        assert!(error.to_string().contains("fsdp_next_shard_chunk"), "{error}");
        let mut window = model.window().unwrap();
        let mut chunks = window.shard_chunks().unwrap();
        while let Some(chunk) = chunks.next().unwrap() {
            update(chunk);
        }
        window.step_adamw(0.5, &Default::default()).unwrap();
        let weights: Vec<f32> = model.read_param(group, "w").unwrap();
        assert!(weights.iter().zip(ramp(COUNT)).all(|(w, start)| *w == 0.75 * start));
    });
}

#[test]
fn a_model_in_memory_has_no_chunks() {
    run_ranks(1, |context| {
        let (mut model, group) = filed_model(&context, Home::Device);
        let mut window = finish_grads(&mut model, group);
        assert!(window.shard_chunks().unwrap().next().unwrap().is_none());
        window.publish().unwrap();
    });
}
