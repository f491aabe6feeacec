// SPDX-License-Identifier: Apache-2.0
//! A tiny GPT by hand, sharded, beside the same math over vectors of its own. examples/README.md describes it.
//!
//!     fsdp-run -n 2 --no-prefix gpt
mod alone;
mod layers;
mod math;

use fsdp::{AdamwOptions, Context, ContextOptions, Group, Model, ModelOptions, Param, Phase, Role, ValueOp};
use layers::{BLOCK, CONTEXT, EMBEDDING, HEAD, LAYERS};

const BATCH: usize = 4;
const STEPS: usize = 5;
const LEARNING_RATE: f64 = 1e-3;
const WEIGHT_DECAY: f64 = 0.1;
const TEXT: &[u8] = b"Each rank of a sharded job keeps a part of every weight, of every gradient and of the state \
of the optimizer. Before a layer is used its weights are gathered, and after it they are given back. What the ranks' \
gradients add up to goes to the one that keeps the part. So all ranks together need the memory of one copy.";

/// The groups in the order of the forward pass: name and parameters.
fn groups() -> Vec<(String, &'static [layers::Shape])> {
    let blocks = (0..LAYERS).map(|layer| (format!("blocks.{}", layer), BLOCK));
    std::iter::once(("embedding".to_string(), EMBEDDING)).chain(blocks).chain([("head".to_string(), HEAD)]).collect()
}

/// The first weights of parameter `number` of the model: integers of 32 bits, then a division by a power of two.
fn make_weight(number: u32, name: &str, shape: &[u64]) -> Vec<f32> {
    let is_gain = name.contains("norm") && name.ends_with("weight");
    let value = |i: u32| {
        let mut bits = i.wrapping_mul(2_654_435_761).wrapping_add(40503 * number + 1);
        bits ^= bits >> 16;
        bits = bits.wrapping_mul(2_246_822_519);
        bits ^= bits >> 13;
        let value = ((bits & 0xffff) as f32 - 32768.0) / (1 << 19) as f32;
        if is_gain {
            value + 1.0
        } else {
            value
        }
    };
    (0..shape.iter().product::<u64>() as u32).map(value).collect()
}

/// The first weights of each group.
fn make_weights() -> Vec<Vec<Vec<f32>>> {
    let mut number = 0;
    let mut next = |&(name, shape): &layers::Shape| {
        number += 1;
        make_weight(number - 1, name, shape)
    };
    groups().iter().map(|(_, params)| params.iter().map(&mut next).collect()).collect()
}

/// A rank's sequences of a step, and what follows each byte of them.
fn read_batch(step: usize, rank: usize, world_size: usize) -> (Vec<u8>, Vec<u8>) {
    let size = BATCH / world_size;
    let starts = (0..size).map(|b| 11 * (step * BATCH + rank * size + b));
    let cut = |start: usize| TEXT[start..start + CONTEXT].iter().copied();
    (starts.clone().flat_map(cut).collect(), starts.flat_map(|start| cut(start + 1)).collect())
}

/// Everything that a rank has: the model and its groups.
struct Sharded {
    model: Model,
    groups: Vec<Group>,
}

impl Sharded {
    fn new(context: &Context) -> fsdp::Result<Self> {
        let mut model = Model::new(context, &ModelOptions::new())?;
        let mut made = Vec::new();
        for (name, params) in groups() {
            let declare = |&(own, shape): &layers::Shape| Param::new(&format!("{}.{}", name, own), shape);
            let params: Vec<Param> = params.iter().map(declare).collect();
            made.push(model.create_group(&name, &params, &Default::default())?);
        }
        let mut window = model.seal()?;
        for (&group, weights) in made.iter().zip(make_weights()) {
            for (index, values) in weights.iter().enumerate() {
                window.load_param(group, index, values)?;
            }
        }
        window.publish()?;
        Ok(Sharded { model, groups: made })
    }

    /// Runs math with a group's weights.
    fn visit<T>(&self, group: usize, phase: Phase, math: impl FnOnce(&layers::Weights) -> T) -> fsdp::Result<T> {
        let weights = self.model.unshard(self.groups[group], phase)?;
        let slices = (0..weights.len()).map(|i| weights.get(i)).collect::<fsdp::Result<Vec<&[f32]>>>()?;
        Ok(math(&slices))
    }

    /// ... and its gradients, which are then reduced.
    fn visit_backward<T>(
        &self,
        group: usize,
        math: impl FnOnce(&layers::Weights, &mut layers::Grads) -> T,
    ) -> fsdp::Result<T> {
        let mut grads = self.model.grads(self.groups[group])?;
        let result = self.visit(group, Phase::Backward, |weights| -> fsdp::Result<T> {
            let mut slices = Vec::new();
            for grad in grads.all::<f32>()?.into_iter().flatten() {
                if !grad.accumulate {
                    grad.data.fill(0.0);
                }
                slices.push(grad.data);
            }
            Ok(math(weights, &mut slices))
        })??;
        grads.reduce_last()?;
        Ok(result)
    }

    /// Returns this rank's loss.
    fn train(&mut self, tokens: &[u8], targets: &[u8]) -> fsdp::Result<f64> {
        let mut x = self.visit(0, Phase::Forward, |w| layers::embed(w, tokens))?;
        let mut kept = Vec::new();
        for layer in 1..=LAYERS {
            kept.push(self.visit(layer, Phase::Forward, |w| layers::block(w, &mut x))?);
        }
        // The last group's forward and backward pass are one.
        let (loss, mut dx) = self.visit_backward(LAYERS + 1, |w, g| layers::head(w, g, &x, targets))?;
        for layer in (1..=LAYERS).rev() {
            self.visit_backward(layer, |w, g| layers::block_backward(w, g, &kept[layer - 1], &mut dx))?;
        }
        self.visit_backward(0, |_, g| layers::embed_backward(g, tokens, &dx))?;
        let options = AdamwOptions::new().weight_decay(WEIGHT_DECAY);
        self.model.finish_grads(1.0)?.step_adamw(LEARNING_RATE, &options)?;
        Ok(loss)
    }

    /// Bytes of a rank's part of weights, gradients and optimizer states, and of all memory.
    fn rank_bytes(&self, rank: u32) -> fsdp::Result<(u64, u64)> {
        let mut state = 0;
        for role in [Role::Compute, Role::Main, Role::Grad, Role::Optimizer] {
            state += self.model.role_bytes(role, rank)?;
        }
        Ok((state, self.model.role_bytes(Role::All, rank)?))
    }

    fn largest_difference(&self, other: &[Vec<Vec<f32>>]) -> fsdp::Result<f32> {
        let mut largest = 0f32;
        for (&group, weights) in self.groups.iter().zip(other) {
            for (index, values) in weights.iter().enumerate() {
                let found: Vec<f32> = self.model.read_param(group, index)?;
                largest = found.iter().zip(values).fold(largest, |most, (a, b)| most.max((a - b).abs()));
            }
        }
        Ok(largest)
    }
}

fn main() -> fsdp::Result<()> {
    let (alone, weights_alone) = alone::train(make_weights(), (0..STEPS).map(|step| read_batch(step, 0, 1)));
    let context = Context::new(&ContextOptions::new())?; // rank and world size from fsdp-run
    let (rank, world_size) = (context.rank(), context.world_size());
    let mut sharded = Sharded::new(&context)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (tokens, targets) = read_batch(step, rank as usize, world_size as usize);
        let mut loss = [sharded.train(&tokens, &targets)?];
        context.all_reduce_values(&mut loss, ValueOp::Mean)?;
        losses.push(loss[0]);
    }
    let weights_differ = sharded.largest_difference(&weights_alone)?;
    if rank == 0 {
        println!("rust {}, {} ranks", env!("CARGO_PKG_VERSION"), world_size);
        for (step, (loss, alone)) in losses.iter().zip(&alone).enumerate() {
            println!("step {}: loss {:.7}, alone {:.7}", step + 1, loss, alone);
        }
        println!("weights differ by at most {:.1e}", weights_differ);
        let one_copy = 16 * weights_alone.iter().flatten().map(Vec::len).sum::<usize>();
        for rank in 0..world_size {
            let (state, all) = sharded.rank_bytes(rank)?;
            println!("rank {}: state {} bytes of {}, {} in all", rank, state, one_copy, all);
        }
    }
    assert!((losses[0] - alone[0]).abs() <= 1e-5, "the first loss is another one alone");
    assert!(losses.iter().zip(&alone).all(|(a, b)| (a - b).abs() <= 1e-4), "a later loss is another one alone");
    assert!(weights_differ <= 1e-4, "the weights are others alone");
    context.close()
}
