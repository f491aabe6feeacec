// SPDX-License-Identifier: Apache-2.0
//! What is found at run time, and what leaked guards and handles leave behind.
mod common;
use common::{ramp, run_ranks, step, two_groups};
use fsdp::{Dtype, E4m3, Model, ModelOptions, Param, Phase, Plane, Quantization, Schedule, Status, UnshardMode};
use std::collections::HashSet;

#[test]
fn a_second_claim_of_gradients_is_an_error_until_the_first_ends() {
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        let mut claim = model.grads(first).unwrap();
        assert!(!claim.get::<f32>("first.weight").unwrap().accumulate);
        let error = model.grads(first).map(drop).unwrap_err();
        assert_eq!(error.status, Status::InvalidState);
        assert!(error.message.contains("first"), "{error}");
        model.grads(second).map(drop).unwrap();
        claim.get::<f32>("first.weight").unwrap().data.copy_from_slice(&ramp(12));
        drop(claim);
        // A tied parameter: the second writer adds.
        let mut claim = model.grads(first).unwrap();
        let grad = claim.get::<f32>("first.weight").unwrap();
        assert!(grad.accumulate);
        grad.data.iter_mut().zip(ramp(12)).for_each(|(g, more)| *g += more);
        claim.put::<f32>("first.bias", None).unwrap();
        claim.reduce_last().unwrap();
        let mut claim = model.grads(second).unwrap();
        claim.put::<f32>(0, None).unwrap();
        claim.reduce_last().unwrap();
        let mut window = model.finish_grads(1.0).unwrap();
        for shard in window.shards().unwrap().iter().filter(|shard| shard.name == "first.weight") {
            assert_eq!(shard.main_grad[0], 2.0 * ramp(12)[shard.element_offset as usize]);
        }
        window.discard().unwrap();
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn a_group_of_another_model_is_refused() {
    run_ranks(1, |context| {
        let (model, first, _) = two_groups(&context, &ModelOptions::new());
        let (other, _, _) = two_groups(&context, &ModelOptions::new());
        assert_eq!(other.unshard(first, Phase::Eval).map(drop).unwrap_err().status, Status::InvalidHandle);
        assert_eq!(model.group("first").unwrap(), first);
        assert_eq!(model.find_param("first.bias").unwrap(), (first, 1));
        assert_eq!(model.group_at(0).unwrap(), first);
        assert_eq!(model.group("no such").unwrap_err().status, Status::InvalidArgument);
        let weights = model.unshard(first, Phase::Eval).unwrap();
        let error = weights.get::<f32>("no such").unwrap_err();
        assert!(error.message.contains("first.weight, first.bias"), "{error}");
        assert!(weights.get::<f32>(2).is_err());
    });
}

#[test]
fn a_slice_of_a_wrong_length_is_refused() {
    run_ranks(1, |context| {
        let (mut model, first, _) = two_groups(&context, &ModelOptions::new());
        let mut grads = model.grads(first).unwrap();
        for length in [11, 13] {
            let refused = grads.put(0, Some(&vec![0f32; length][..]));
            assert_eq!(refused.unwrap_err().status, Status::InvalidArgument);
        }
        drop(grads);
        let mut window = model.begin_update_after_discard();
        for length in [11, 13] {
            assert_eq!(window.load_param(first, 0, &vec![0f32; length]).unwrap_err().status, Status::InvalidArgument);
            assert!(window.load_state(first, 0, "exp_avg", &vec![0f32; length]).is_err());
            assert!(window.load_chunk(first, 0, &vec![0f32; length], 0).is_err());
        }
        window.load_chunk(first, 0, &[7f32; 4], 2).unwrap();
        window.publish().unwrap();
        assert_eq!(model.read_param::<f32>(first, 0).unwrap()[7..9], [4.0, 7.0]);
    });
}

trait AfterDiscard {
    fn begin_update_after_discard(&mut self) -> fsdp::Window<'_>;
}

impl AfterDiscard for Model {
    /// What was put must be forgotten before weights can be edited.
    fn begin_update_after_discard(&mut self) -> fsdp::Window<'_> {
        self.discard_step().unwrap();
        self.begin_update().unwrap()
    }
}

#[test]
fn a_leaked_hold_is_found_and_the_model_trains_on() {
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        std::mem::forget(model.unshard(first, Phase::Forward).unwrap());
        let error = step(&mut model, &[first, second], 0.5).unwrap_err();
        assert_eq!(error.status, Status::InvalidState);
        assert!(error.message.contains("first"), "{error}");
        model.discard_step().unwrap();
        step(&mut model, &[first, second], 0.5).unwrap();
        std::mem::forget(model.unshard(first, Phase::Forward).unwrap());
        unsafe { model.reshard(first, Phase::Forward) }.unwrap(); // no other code will return it
        step(&mut model, &[first, second], 0.5).unwrap();
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn leaked_gradients_end_with_the_step() {
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        std::mem::forget(model.grads(first).unwrap());
        assert_eq!(model.grads(first).map(drop).unwrap_err().status, Status::InvalidState);
        model.discard_step().unwrap();
        step(&mut model, &[first, second], 0.5).unwrap();
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn a_window_that_was_dropped_is_still_open() {
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        assert_eq!(model.window().map(drop).unwrap_err().status, Status::InvalidState);
        drop(model.begin_update().unwrap());
        assert_eq!(model.unshard(first, Phase::Forward).map(drop).unwrap_err().status, Status::InvalidState);
        drop(model.window().unwrap());
        model.window().unwrap().publish().unwrap();
        assert_eq!(model.window().map(drop).unwrap_err().status, Status::InvalidState);
        step(&mut model, &[first, second], 0.5).unwrap();
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn a_step_that_a_peer_refuses_leaves_the_window_open() {
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        let lr = 0.5 + f64::from(context.rank()); // must be alike
        assert_eq!(step(&mut model, &[first, second], lr).unwrap_err().status, Status::Mismatch);
        model.window().unwrap().discard().unwrap();
        step(&mut model, &[first, second], 0.5).unwrap();
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn handles_may_be_dropped_in_any_order_and_leaked() {
    for order in 0..4 {
        run_ranks(2, |context| {
            let (model, first, _) = two_groups(&context, &ModelOptions::new());
            match order {
                0 => drop((context, model)),
                1 => drop((model, context)),
                2 => {
                    let weights = model.unshard(first, Phase::Forward).unwrap();
                    drop(context);
                    assert_eq!(weights.get::<f32>(0).unwrap(), ramp(12)); // the memory is the model's
                    drop(weights);
                    assert_eq!(
                        model.unshard(first, Phase::Forward).map(drop).unwrap_err().status,
                        Status::InvalidHandle
                    );
                }
                _ => {
                    std::mem::forget(model.unshard(first, Phase::Forward).unwrap());
                    std::mem::forget((context, model));
                }
            }
        });
    }
}

#[test]
fn a_panic_in_a_forward_leaves_a_model_that_trains_on() {
    run_ranks(2, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        let forward = std::panic::AssertUnwindSafe(|| {
            let _weights = model.unshard(first, Phase::Forward).unwrap();
            let _grads = model.grads(second).unwrap();
            std::panic::resume_unwind(Box::new("the math has failed")); // without the message of a panic
        });
        assert!(std::panic::catch_unwind(forward).is_err());
        model.discard_step().unwrap();
        step(&mut model, &[first, second], 0.5).unwrap();
        drop(model);
        context.close().unwrap();
    });
}

#[test]
fn handles_go_to_other_threads() {
    run_ranks(1, |context| {
        let (mut model, first, second) = two_groups(&context, &ModelOptions::new());
        let model = std::thread::scope(|scope| {
            scope
                .spawn(move || {
                    step(&mut model, &[first, second], 0.5).unwrap();
                    model
                })
                .join()
                .unwrap()
        });
        assert_eq!(model.stats().unwrap().step, 1);
    });
}

#[test]
fn memory_of_a_gpu_is_no_slice() {
    let context = fsdp::Context::plan(2, 0, &fsdp::ContextOptions::new().gpu(0)).unwrap();
    let mut model = Model::new(&context, &ModelOptions::new()).unwrap();
    let group = model.create_group("g", &[Param::new("w", &[8])], &Default::default()).unwrap();
    let mut window = model.seal().unwrap();
    assert_eq!(window.shard(0).map(drop).unwrap_err().status, Status::Unsupported);
    drop(window);
    let mut grads = model.grads(group).unwrap();
    assert_eq!(grads.put(0, Some(&[0f32; 8][..])).unwrap_err().status, Status::Unsupported);
}

#[test]
fn scales_are_swizzled() {
    run_ranks(1, |context| {
        let mut model = Model::new(&context, &ModelOptions::new()).unwrap();
        let param = Param::new("w", &[32, 32]).quantization(Quantization::Mxfp8);
        let group = model.create_group("only", &[param], &Default::default()).unwrap();
        let mut window = model.seal().unwrap();
        let mut values = [448.0f32; 1024];
        values[32] = 896.0;
        window.load_param(group, 0, &values).unwrap();
        window.publish().unwrap();
        let weights = model.unshard(group, Phase::Forward).unwrap();
        let scales = weights.swizzled_scales("w", Plane::RowScale).unwrap();
        assert_eq!(scales.len(), 512);
        assert_eq!([scales[0].0, scales[1].0, scales[16].0], [127, 0, 128]);
        assert_eq!(weights.swizzled_scales("w", Plane::Row).unwrap_err().status, Status::InvalidArgument);
    });
}

#[test]
fn a_quantized_parameter_is_codes_and_scales() {
    run_ranks(2, |context| {
        let mut model = Model::new(&context, &ModelOptions::new()).unwrap();
        let param = Param::new("w", &[1, 2]).quantization(Quantization::Fp8Block);
        let group = model.create_group("only", &[param], &Default::default()).unwrap();
        let mut window = model.seal().unwrap();
        window.load_param(group, 0, &[448.0f32, 1.0]).unwrap();
        window.publish().unwrap();
        let weights = model.unshard(group, Phase::Forward).unwrap();
        assert_eq!(weights.plane::<E4m3>("w", Plane::Row).unwrap(), [E4m3(0x7e), E4m3(0x38)]);
        assert_eq!(weights.plane::<f32>(0, Plane::RowScale).unwrap(), [1.0]);
        let error = weights.get::<f32>("w").unwrap_err();
        assert!(error.message.contains("quantized"), "{error}");
        assert_eq!(weights.plane::<f32>("w", Plane::Row).unwrap_err().status, Status::InvalidArgument);
    });
}

#[test]
fn frozen_planes_and_bytes_are_loaded_as_they_are() {
    run_ranks(2, |context| {
        let mut model = Model::new(&context, &ModelOptions::new()).unwrap();
        let codes = Param::new("q", &[1, 2]).quantization(Quantization::Fp8).frozen();
        let bytes = Param::new("nf4", &[3]).dtype(Dtype::Uint8).frozen();
        let group = model.create_group("base", &[codes, bytes], &Default::default()).unwrap();
        let mut window = model.seal().unwrap();
        let given = [E4m3(0x7e), E4m3(0x38)];
        let data = (context.rank() == 1).then_some(&given[..]);
        window.load_plane_from(1, group, "q", Plane::Row, data).unwrap();
        window.load_plane(group, "q", Plane::RowScale, &[0.5f32]).unwrap();
        window.load_param(group, "nf4", &[0u8, 255, 7]).unwrap();
        window.publish().unwrap();
        assert_eq!(model.read_param::<f32>(group, "q").unwrap(), [224.0, 0.5]);
        assert_eq!(model.read_param::<u8>(group, "nf4").unwrap(), [0, 255, 7]);
        let weights = model.unshard(group, Phase::Forward).unwrap();
        assert_eq!(weights.get::<u8>("nf4").unwrap(), [0, 255, 7]);
    });
}

/// Three groups of different values take turns in two buffers, so that weights move.
#[test]
fn weights_are_read_where_their_own_hold_has_them() {
    run_ranks(2, |context| {
        let mut model = Model::new(&context, &ModelOptions::new().unshard_mode(UnshardMode::Copied)).unwrap();
        let groups = ["a", "b", "c"]
            .map(|name| model.create_group(name, &[Param::new(name, &[6])], &Default::default()).unwrap());
        model.set_schedule(Schedule::Any { held_groups: 2 }).unwrap();
        let mut window = model.seal().unwrap();
        for (g, group) in groups.iter().enumerate() {
            window.load_param(*group, 0, &[g as f32; 6]).unwrap();
        }
        window.publish().unwrap();
        let mut addresses = [(); 3].map(|_| HashSet::new());
        for turn in 0..6 {
            let held = [turn % 3, (turn + 1) % 3];
            let guards = held.map(|g| (g, model.unshard(groups[g], Phase::Forward).unwrap()));
            let again = model.unshard(groups[held[0]], Phase::Forward).unwrap();
            for (g, weights) in &guards {
                assert_eq!(weights.get::<f32>(0).unwrap(), [*g as f32; 6]);
                addresses[*g].insert(weights.tensor(0).unwrap().data() as usize);
            }
            assert_eq!(again.get::<f32>(0).unwrap().as_ptr(), guards[0].1.get::<f32>(0).unwrap().as_ptr());
            again.reshard().unwrap();
            let third = model.unshard(groups[(turn + 2) % 3], Phase::Forward).map(drop).unwrap_err();
            assert_eq!(third.status, Status::InvalidState);
            assert!(third.message.contains("held_groups"), "{third}");
        }
        assert!(addresses.iter().any(|of_one| of_one.len() == 2), "no weights have moved: {addresses:?}");
        drop(model);
        context.close().unwrap();
    });
}
