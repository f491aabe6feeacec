// SPDX-License-Identifier: Apache-2.0
mod common;
use common::{adamw, assert_close, ramp, run_ranks, step, two_groups};
use std::sync::atomic::{AtomicBool, Ordering};

use fsdp::{
    Bf16, Dtype, FullGrad, Home, MainStorage, MainWeight, Model, ModelOptions, Optimizer, Param, Phase, Schedule,
    Shard, Status, Strategy, UnshardMode,
};

const STRATEGIES: [Strategy; 4] =
    [Strategy::NoShard, Strategy::Optim, Strategy::OptimGrads, Strategy::OptimGradsParams];

#[test]
fn every_strategy_trains_as_one_whole_copy_does() {
    for world_size in [1, 2, 4] {
        for strategy in STRATEGIES {
            run_ranks(world_size, |context| {
                let (mut model, first, second) = two_groups(&context, &ModelOptions::new().strategy(strategy));
                (0..5).for_each(|_| step(&mut model, &[first, second], 0.125).unwrap());
                assert_close(&model.read_param::<f32>(first, "first.weight").unwrap(), &adamw(&ramp(12), 5, 0.125));
                assert_close(&model.read_param::<f32>(first, "first.bias").unwrap(), &adamw(&ramp(4), 5, 0.125));
                assert_close(&model.read_param::<f32>(second, 0).unwrap(), &adamw(&ramp(10), 5, 0.125));
                assert_eq!(model.stats().unwrap().step, 5);
                drop(model);
                context.close().unwrap();
            });
        }
    }
}

#[test]
fn copied_weights_are_the_mapped_ones() {
    run_ranks(2, |context| {
        let (model, first, _) = two_groups(&context, &ModelOptions::new().unshard_mode(UnshardMode::Copied));
        let weights = model.unshard(first, Phase::Forward).unwrap();
        assert_eq!(weights.get::<f32>("first.weight").unwrap(), ramp(12));
        assert_eq!(weights.tensor("first.weight").unwrap().shape(), [3, 4]);
        assert_eq!(weights.tensor("first.weight").unwrap().dtype(), Dtype::Float32);
        drop(weights);
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn one_call_steps_as_the_single_calls_do() {
    run_ranks(2, |context| {
        let (mut model, first, _) = two_groups(&context, &ModelOptions::new().strategy(Strategy::Optim));
        let grads = [ramp(12), ramp(4), ramp(10)];
        let flat: Vec<_> = grads.iter().map(|grad| FullGrad::new(grad)).collect();
        let norm = model.apply_grads(&flat, 0.125, 0.0, &Default::default()).unwrap();
        let squares: f32 = grads.iter().flatten().map(|g| g * g).sum();
        assert!((norm - f64::from(squares).sqrt()).abs() < 1e-9);
        assert_close(&model.read_param::<f32>(first, 0).unwrap(), &adamw(&ramp(12), 1, 0.125));
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn whole_gradients_are_read_and_replaced() {
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        let mut grads = model.grads(first).unwrap();
        grads.put("first.weight", Some(&ramp(12))).unwrap();
        grads.put::<f32>("first.bias", None).unwrap();
        grads.reduce().unwrap();
        let mut window = model.finish_last_grads(2.0).unwrap(); // the second group was given nothing
        let doubled: Vec<f32> = ramp(12).iter().map(|value| 2.0 * value).collect();
        assert_eq!(window.read_grad::<f32>(first, "first.weight").unwrap(), doubled);
        assert_eq!(window.read_grad_on::<f32>(1, first, 0).unwrap().is_some(), context.rank() == 1);
        assert_eq!(window.read_grad::<f32>(second, 0).unwrap(), [0.0; 10]);
        let values = ramp(10);
        window.load_grad_from(1, second, 0, (context.rank() == 1).then_some(&values[..])).unwrap();
        window.load_grad(first, 1, &ramp(4)).unwrap();
        assert_eq!(window.read_grad::<f32>(second, 0).unwrap(), values);
        window.step_adamw(0.125, &Default::default()).unwrap();
        assert_close(&model.read_param::<f32>(second, 0).unwrap(), &adamw(&ramp(10), 1, 0.125));
        assert_close(&model.read_param::<f32>(first, 1).unwrap(), &adamw(&ramp(4), 1, 0.125));
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn buffers_that_peers_have_yet_to_read_are_busy() {
    let asked = AtomicBool::new(false);
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new().max_pending_groups(1));
        while context.rank() == 1 && !asked.load(Ordering::SeqCst) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let mut grads = model.grads(second).unwrap().no_wait();
        grads.put(0, Some(&ramp(10))).unwrap();
        grads.reduce_last().unwrap();
        let mut grads = model.grads(first).unwrap().no_wait();
        if context.rank() == 0 {
            assert_eq!(grads.get::<f32>(0).unwrap_err().status, Status::Busy);
            assert_eq!(grads.all::<f32>().unwrap_err().status, Status::Busy);
            assert_eq!(grads.put(0, Some(&ramp(12))).unwrap_err().status, Status::Busy);
        }
        asked.store(true, Ordering::SeqCst);
        drop(grads);
        let mut grads = model.grads(first).unwrap();
        grads.put(0, Some(&ramp(12))).unwrap();
        grads.put::<f32>(1, None).unwrap();
        grads.reduce_last().unwrap();
        assert_eq!(model.finish_grads(1.0).unwrap().read_grad::<f32>(first, 0).unwrap(), ramp(12));
        model.discard_step().unwrap();
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn contributions_add_up_and_a_missing_gradient_counts_as_zeros() {
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        for last in [false, true] {
            for group in [first, second] {
                let mut grads = model.grads(group).unwrap();
                grads.put(0, Some(&ramp(if group == first { 12 } else { 10 })[..])).unwrap();
                if group == first {
                    grads.put::<f32>("first.bias", None).unwrap();
                }
                if last { grads.reduce_last() } else { grads.reduce() }.unwrap();
            }
        }
        let mut window = model.finish_grads(0.5).unwrap();
        for shard in window.shards().unwrap() {
            let whole = if shard.name == "first.bias" { vec![0.0; 4] } else { ramp(12) };
            let begin = shard.element_offset as usize;
            assert_eq!(shard.main_grad[..], whole[begin..begin + shard.main_grad.len()]);
        }
        assert_eq!(window.param_grad_norms().unwrap()[1], 0.0);
        assert_eq!(window.check_grads().unwrap(), None);
        assert_eq!(window.count_zero_grads().unwrap(), 4);
        let norms = window.param_weight_norms().unwrap();
        window.discard().unwrap();
        assert_eq!(model.param_weight_norms().unwrap(), norms);
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn the_callers_own_optimizer_writes_its_shards() {
    run_ranks(2, |context| {
        let mut model = fsdp::Model::new(&context, &ModelOptions::new().optimizer(Optimizer::Caller)).unwrap();
        model.add_optimizer_state("momentum", Dtype::Float32).unwrap();
        let group = model.create_group("g", &[Param::new("w", &[4, 2])], &Default::default()).unwrap();
        model.seal().unwrap().publish().unwrap();
        let mut grads = model.grads(group).unwrap();
        grads.get_zeroed("w").unwrap().copy_from_slice(&ramp(8));
        grads.reduce_last().unwrap();
        let mut window = model.finish_grads(1.0).unwrap();
        for mut shard in window.shards().unwrap() {
            let mut states = shard.states;
            assert_eq!(states[0].name, "momentum");
            let momentum = states[0].get::<f32>().unwrap();
            for ((w, g), m) in shard.main_weight.float32().unwrap().iter_mut().zip(shard.main_grad).zip(momentum) {
                *m += *g;
                *w -= 2.0 * *m;
            }
        }
        window.publish().unwrap();
        let expected: Vec<f32> = ramp(8).iter().map(|g| -2.0 * g).collect();
        assert_eq!(model.read_param::<f32>(group, 0).unwrap(), expected);
        assert_eq!(model.read_state::<f32>(group, 0, "momentum").unwrap(), ramp(8));
        let on_root = model.read_state_on::<f32>(1, group, 0, "momentum").unwrap();
        assert_eq!(on_root, (context.rank() == 1).then(|| ramp(8)));
        drop(model);
        context.close().unwrap();
    });
}

/// A matrix in bf16 that is all 1, not yet published.
fn narrow_model(context: &fsdp::Context, options: ModelOptions) -> (fsdp::Model, fsdp::Group) {
    let mut model = fsdp::Model::new(context, &options).unwrap();
    let params = [Param::new("w", &[64, 64]).dtype(Dtype::Bfloat16)];
    let group = model.create_group("g", &params, &Default::default()).unwrap();
    model.seal().unwrap().load_param(group, "w", &[1f32; 4096]).unwrap();
    (model, group)
}

#[test]
fn shards_have_main_weights_in_fewer_bits() {
    run_ranks(1, |context| {
        let (mut split, group) = narrow_model(&context, ModelOptions::new().main_storage(MainStorage::Split16));
        assert_eq!(split.window().unwrap().shard(0).unwrap().main_weight.storage(), MainStorage::Split16);
        assert_eq!(split.read_param::<f32>(group, 0).unwrap(), [1.0; 4096]);
        let home = ModelOptions::new().main_home(Home::File).home_directory("/var/tmp");
        let (mut in_file, group) = narrow_model(&context, home);
        assert!(matches!(in_file.window().unwrap().shard(0).unwrap().main_weight, MainWeight::File));
        assert_eq!(in_file.read_param::<f32>(group, 0).unwrap(), [1.0; 4096]);
        let options = ModelOptions::new().main_storage(MainStorage::None).rounding_seed(5);
        let (mut rounded, group) = narrow_model(&context, options);
        let mut window = rounded.window().unwrap();
        let mut shard = window.shard(0).unwrap();
        assert!(shard.main_weight.float32().is_none());
        assert_eq!(shard.main_weight.bfloat16().unwrap().len(), 4096);
        shard.round_stochastic(96, &[1.001953125; 4000], 1).unwrap();
        let refused = shard.round_stochastic(97, &[1.0; 4000], 1).unwrap_err();
        assert_eq!(refused.status, Status::InvalidArgument);
        let raised = rounded.read_param::<f32>(group, 0).unwrap().iter().filter(|x| **x > 1.0).count();
        assert!((800..1200).contains(&raised), "{raised}"); // a quarter of them
        drop((split, rounded));
        context.close().unwrap();
    });
}

#[test]
fn states_may_be_codes() {
    run_ranks(1, |context| {
        let (mut model, group) = narrow_model(&context, ModelOptions::new().optimizer(Optimizer::Adamw8bit));
        model.window().unwrap().publish().unwrap();
        model.apply_grads(&[FullGrad::new(&[0.5f32; 4096])], 0.125, 0.0, &Default::default()).unwrap();
        assert_eq!(model.read_state::<f32>(group, 0, "exp_avg").unwrap(), [0.05; 4096]);
        let mut window = model.begin_update().unwrap();
        let mut shard = window.shard(0).unwrap();
        let names: Vec<_> = shard.states.iter().map(|state| state.name.clone()).collect();
        assert_eq!(names, ["exp_avg", "exp_avg.absmax", "exp_avg_sq", "exp_avg_sq.absmax"]);
        assert_eq!(shard.states[0].get::<u8>().unwrap()[..], [255; 4096]);
        assert_eq!(shard.states[1].get::<f32>().unwrap()[..], [0.05; 16]);
        drop(shard);
        window.publish().unwrap();
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn the_caller_and_adamw_update_parameters_of_their_own() {
    for optimizer in [Optimizer::Adamw, Optimizer::Adamw8bit] {
        run_ranks(2, |context| {
            let mut model = Model::new(&context, &ModelOptions::new().optimizer(optimizer)).unwrap();
            let params = [
                Param::new("w", &[4, 8]).optimizer(Optimizer::Caller),
                Param::new("b", &[4]),
                Param::new("f", &[4]).frozen(),
            ];
            let group = model.create_group("layer", &params, &Default::default()).unwrap();
            model.add_optimizer_state("momentum", Dtype::Float32).unwrap();
            model.seal().unwrap().publish().unwrap();
            let found: Vec<_> = (0..3).map(|p| model.param_info(group, p).unwrap().optimizer).collect();
            assert_eq!(found, [Some(Optimizer::Caller), Some(Optimizer::Adamw), None]);
            let mut grads = model.grads(group).unwrap();
            grads.put(0, Some(&[1f32; 32])).unwrap();
            grads.put(1, Some(&[1f32; 4])).unwrap();
            grads.reduce_last().unwrap();
            let mut window = model.finish_grads(1.0).unwrap();
            for shard in window.shards().unwrap() {
                let Shard { name, mut main_weight, main_grad, mut states, .. } = shard;
                let names: Vec<_> = states.iter().map(|state| state.name.clone()).collect();
                if name != "w" {
                    assert_eq!(names, ["exp_avg", "exp_avg_sq"]);
                    continue;
                }
                assert_eq!(names, ["momentum"]);
                let momentum = states[0].get::<f32>().unwrap();
                let weights = main_weight.float32().unwrap();
                for i in 0..weights.len() {
                    momentum[i] = 0.5 * momentum[i] + main_grad[i];
                    weights[i] -= 0.25 * momentum[i];
                }
            }
            window.step_adamw(0.5, &Default::default()).unwrap();
            assert_eq!(model.read_param::<f32>(group, 0).unwrap(), [-0.25; 32]);
            assert_eq!(model.read_state::<f32>(group, 0, "momentum").unwrap(), [1.0; 32]);
            assert!(model.read_param::<f32>(group, 1).unwrap().iter().all(|x| (x + 0.5).abs() < 1e-5));
            assert_eq!(model.read_state::<f32>(group, 0, "exp_avg").unwrap_err().status, Status::InvalidArgument);
            drop(model);
            context.close().unwrap();
        });
    }
}

#[test]
fn bf16_weights_are_rounded_main_weights() {
    run_ranks(2, |context| {
        let mut model = fsdp::Model::new(&context, &ModelOptions::new()).unwrap();
        let params = [Param::new("w", &[6]).dtype(Dtype::Bfloat16), Param::new("frozen", &[6]).frozen()];
        let group = model.create_group("g", &params, &Default::default()).unwrap();
        let mut window = model.seal().unwrap();
        let values = [1.0f32, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -2.7, 1e30, 0.0]; // two ties: down to even, up to even
        let root_has = (context.rank() == 1).then_some(&values[..]);
        window.load_param_from(1, group, "w", root_has).unwrap();
        window.publish().unwrap();
        let weights = model.unshard(group, Phase::Forward).unwrap();
        let rounded: Vec<u16> = weights.get::<Bf16>("w").unwrap().iter().map(|w| w.0).collect();
        assert_eq!(rounded[..3], [0x3f80, 0x3f80, 0x3f82]);
        assert_eq!(rounded, values.iter().map(|w| Bf16::from(*w).0).collect::<Vec<_>>());
        assert_eq!(weights.get::<f32>("w").unwrap_err().status, Status::InvalidArgument);
        drop(weights);
        let mut grads = model.grads(group).unwrap();
        assert!(grads.all::<Bf16>().unwrap()[1].is_none());
        grads.all::<Bf16>().unwrap()[0].as_mut().unwrap().data.fill(Bf16::from(1.0));
        assert!(grads.get::<f32>("frozen").is_err());
        grads.reduce_last().unwrap();
        model.finish_grads(1.0).unwrap().step_adamw(0.5, &Default::default()).unwrap();
        assert_close(&model.read_param::<f32>(group, "w").unwrap()[..1], &[0.5]);
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn an_explicit_schedule_is_taken_and_a_plan_has_no_data() {
    let context = fsdp::Context::plan(8, 3, &Default::default()).unwrap();
    let mut model = fsdp::Model::new(&context, &ModelOptions::new()).unwrap();
    let group = model.create_group("g", &[Param::new("w", &[64, 2])], &Default::default()).unwrap();
    let visits = [(group, Phase::Forward), (group, Phase::Backward)];
    model.set_schedule(Schedule::Visits(&visits)).unwrap();
    assert_eq!(model.check().unwrap(), "");
    drop(model.seal().unwrap());
    let chunk = model.chunk(group, "w", 3).unwrap();
    assert_eq!((chunk.row_offset, chunk.row_count), (24, 8));
    assert_eq!(model.info().unwrap().element_count, 128);
    assert!(model.describe().unwrap().contains("\"w\""));
    assert_eq!(model.read_param::<f32>(group, "w").unwrap_err().status, Status::InvalidState);
    assert!(model.window().unwrap().shards().is_err());
}
