// SPDX-License-Identifier: Apache-2.0
//! Ranks as threads of the test's process.
#![allow(dead_code)] // each test uses some of it
use fsdp::{Context, ContextOptions, Group, Model, ModelOptions, Param, Phase};

/// Runs the rank on `world_size` threads with a context each; a rank that panics fails the test.
pub fn run_ranks(world_size: u32, rank: impl Fn(Context) + Sync) {
    run_ranks_with(world_size, &ContextOptions::new().timeout_ms(20_000), rank);
}

pub fn run_ranks_with(world_size: u32, options: &ContextOptions, rank: impl Fn(Context) + Sync) {
    let contexts = Context::local(world_size, options).unwrap();
    std::thread::scope(|scope| {
        let rank = &rank;
        for context in contexts {
            scope.spawn(move || rank(context));
        }
    });
}

/// Two groups: "first" with weight 3 x 4 and bias 4, "second" with weight 5 x 2.
pub fn two_groups(context: &Context, options: &ModelOptions) -> (Model, Group, Group) {
    let mut model = Model::new(context, options).unwrap();
    let params = [Param::new("first.weight", &[3, 4]), Param::new("first.bias", &[4])];
    let first = model.create_group("first", &params, &Default::default()).unwrap();
    let second = model.create_group("second", &[Param::new("second.weight", &[5, 2])], &Default::default()).unwrap();
    let mut window = model.seal().unwrap();
    window.load_param(first, 0, &ramp(12)).unwrap();
    window.load_param(first, 1, &ramp(4)).unwrap();
    window.load_param(second, 0, &ramp(10)).unwrap();
    window.publish().unwrap();
    (model, first, second)
}

/// 0.5, 1.0, 1.5, ...: exact in fp32.
pub fn ramp(count: usize) -> Vec<f32> {
    (1..=count).map(|i| i as f32 * 0.5).collect()
}

/// A step in which every gradient is the weight itself.
pub fn step(model: &mut Model, groups: &[Group], lr: f64) -> fsdp::Result<()> {
    for group in groups {
        let weights = model.unshard(*group, Phase::Backward)?;
        let mut grads = model.grads(*group)?;
        for index in 0..weights.len() {
            let weight: &[f32] = weights.get(index)?;
            grads.get::<f32>(index)?.data.copy_from_slice(weight);
        }
        drop(weights);
        grads.reduce_last()?;
    }
    model.finish_grads(1.0)?.step_adamw(lr, &Default::default())
}

/// AdamW as its paper defines it, in doubles, on the whole parameter: what `steps` of `step` must give.
pub fn adamw(weights: &[f32], steps: i32, lr: f64) -> Vec<f64> {
    let train = |start: f32| {
        let (mut w, mut m, mut v) = (f64::from(start), 0.0, 0.0);
        for step in 1..=steps {
            let g = w;
            m = 0.9 * m + 0.1 * g;
            v = 0.999 * v + 0.001 * g * g;
            let (c1, c2) = (1.0 - 0.9f64.powi(step), 1.0 - 0.999f64.powi(step));
            w -= lr * (m / c1) / ((v / c2).sqrt() + 1e-8);
        }
        w
    };
    weights.iter().map(|start| train(*start)).collect()
}

pub fn assert_close(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let difference = (f64::from(*found) - expected).abs();
        assert!(difference < 2e-6 * expected.abs().max(1.0), "{found} is not {expected}");
        // fp32 over a few steps
    }
}
