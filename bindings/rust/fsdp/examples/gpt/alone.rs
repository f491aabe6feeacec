// SPDX-License-Identifier: Apache-2.0
//! The same training without the library: vectors, and AdamW written out (Loshchilov and Hutter, arXiv:1711.05101).
use crate::layers::{self, LAYERS};
use crate::{LEARNING_RATE, WEIGHT_DECAY};

type Groups = Vec<Vec<Vec<f32>>>;

/// The losses of all steps, and the last weights.
pub fn train(mut weights: Groups, batches: impl Iterator<Item = (Vec<u8>, Vec<u8>)>) -> (Vec<f64>, Groups) {
    let (mut exp_avg, mut exp_avg_sq) = (zeros_like(&weights), zeros_like(&weights));
    let mut losses = Vec::new();
    for (tokens, targets) in batches {
        let mut grads = zeros_like(&weights);
        losses.push(find_grads(&weights, &mut grads, &tokens, &targets));
        let states = exp_avg.iter_mut().flatten().zip(exp_avg_sq.iter_mut().flatten());
        for ((w, g), (m, v)) in weights.iter_mut().flatten().zip(grads.iter().flatten()).zip(states) {
            step_adamw(losses.len() as i32, w, g, m, v);
        }
    }
    (losses, weights)
}

fn zeros_like(groups: &Groups) -> Groups {
    groups.iter().map(|params| params.iter().map(|values| vec![0.0; values.len()]).collect()).collect()
}

fn find_grads(weights: &Groups, grads: &mut Groups, tokens: &[u8], targets: &[u8]) -> f64 {
    let w: Vec<Vec<&[f32]>> = weights.iter().map(|params| params.iter().map(|p| &p[..]).collect()).collect();
    let mut g: Vec<Vec<&mut [f32]>> =
        grads.iter_mut().map(|params| params.iter_mut().map(|p| &mut p[..]).collect()).collect();
    let mut x = layers::embed(&w[0], tokens);
    let kept: Vec<_> = (1..=LAYERS).map(|layer| layers::block(&w[layer], &mut x)).collect();
    let (loss, mut dx) = layers::head(&w[LAYERS + 1], &mut g[LAYERS + 1], &x, targets);
    for layer in (1..=LAYERS).rev() {
        layers::block_backward(&w[layer], &mut g[layer], &kept[layer - 1], &mut dx);
    }
    layers::embed_backward(&mut g[0], tokens, &dx);
    loss
}

fn step_adamw(step: i32, w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    let (correct1, correct2) = (1.0 - 0.9f64.powi(step), 1.0 - 0.999f64.powi(step));
    let (size, decay) = ((LEARNING_RATE / correct1) as f32, (1.0 - LEARNING_RATE * WEIGHT_DECAY) as f32);
    for i in 0..w.len() {
        m[i] = 0.9 * m[i] + 0.1 * g[i];
        v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
        w[i] = decay * w[i] - size * m[i] / (v[i].sqrt() / correct2.sqrt() as f32 + 1e-8);
    }
}
