// SPDX-License-Identifier: Apache-2.0
//! The layers of the tiny GPT. Each takes its weights and gives its gradients as slices, whatever owns them.
use crate::math::*;

pub const LAYERS: usize = 2;
pub const WIDTH: usize = 64;
pub const HEADS: usize = 2;
pub const CONTEXT: usize = 32;
pub const VOCABULARY: usize = 256;

/// A parameter's name and shape. Their order is that of the slices below.
pub type Shape = (&'static str, &'static [u64]);
const C: u64 = WIDTH as u64;
pub const EMBEDDING: &[Shape] = &[("tokens.weight", &[VOCABULARY as u64, C]), ("places.weight", &[CONTEXT as u64, C])];
pub const BLOCK: &[Shape] = &[
    ("norm1.weight", &[C]),
    ("norm1.bias", &[C]),
    ("qkv.weight", &[3 * C, C]),
    ("proj.weight", &[C, C]),
    ("norm2.weight", &[C]),
    ("norm2.bias", &[C]),
    ("up.weight", &[4 * C, C]),
    ("up.bias", &[4 * C]),
    ("down.weight", &[C, 4 * C]),
    ("down.bias", &[C]),
];
pub const HEAD: &[Shape] = &[("norm.weight", &[C]), ("norm.bias", &[C]), ("head.weight", &[VOCABULARY as u64, C])];

pub type Weights<'a> = [&'a [f32]];
pub type Grads<'a> = [&'a mut [f32]];

pub fn embed(w: &Weights, tokens: &[u8]) -> Vec<f32> {
    let mut x = Vec::with_capacity(tokens.len() * WIDTH);
    for (place, &token) in tokens.iter().enumerate() {
        let (token, place) = (row(w[0], token as usize), row(w[1], place % CONTEXT));
        x.extend(token.iter().zip(place).map(|(a, b)| a + b));
    }
    x
}

pub fn embed_backward(g: &mut Grads, tokens: &[u8], dx: &[f32]) {
    for ((place, &token), d) in tokens.iter().enumerate().zip(dx.chunks_exact(WIDTH)) {
        add(&mut g[0][token as usize * WIDTH..][..WIDTH], 1.0, d);
        add(&mut g[1][place % CONTEXT * WIDTH..][..WIDTH], 1.0, d);
    }
}

fn row(matrix: &[f32], index: usize) -> &[f32] {
    &matrix[index * WIDTH..][..WIDTH]
}

/// What a block's backward pass needs of its forward pass.
pub struct Kept {
    norms: [Normed; 2],
    normed: [Vec<f32>; 2],
    qkv: Vec<f32>,
    probabilities: Vec<Vec<f32>>,
    mixed: Vec<f32>,
    up: Vec<f32>,
    activated: Vec<f32>,
}

/// Adds to x what the block has to say.
pub fn block(w: &Weights, x: &mut [f32]) -> Kept {
    let (normed1, norm1) = norm(x, w[0], w[1]);
    let qkv = linear(&normed1, w[2], WIDTH);
    let (mut mixed, mut probabilities) = (Vec::new(), Vec::new());
    for sequence in qkv.chunks_exact(3 * WIDTH * CONTEXT) {
        let (part, kept) = attention(sequence, WIDTH, HEADS);
        mixed.extend(part);
        probabilities.push(kept);
    }
    add(x, 1.0, &linear(&mixed, w[3], WIDTH));
    let (normed2, norm2) = norm(x, w[4], w[5]);
    let mut up = linear(&normed2, w[6], WIDTH);
    add_bias(&mut up, w[7]);
    let activated = gelu(&up);
    add(x, 1.0, &linear(&activated, w[8], 4 * WIDTH));
    add_bias(x, w[9]);
    Kept { norms: [norm1, norm2], normed: [normed1, normed2], qkv, probabilities, mixed, up, activated }
}

/// Turns the gradient of the block's output into that of its input.
pub fn block_backward(w: &Weights, g: &mut Grads, kept: &Kept, dx: &mut [f32]) {
    bias_backward(dx, g[9]);
    let mut dup = linear_backward(dx, &kept.activated, w[8], 4 * WIDTH, g[8]);
    gelu_backward(&mut dup, &kept.up);
    bias_backward(&dup, g[7]);
    let dnormed = linear_backward(&dup, &kept.normed[1], w[6], WIDTH, g[6]);
    backward_of_norm(dx, &dnormed, &kept.norms[1], w[4], &mut g[4..6]);
    let dmixed = linear_backward(dx, &kept.mixed, w[3], WIDTH, g[3]);
    let sequences = dmixed.chunks_exact(WIDTH * CONTEXT).zip(kept.qkv.chunks_exact(3 * WIDTH * CONTEXT));
    let dqkv: Vec<f32> = sequences
        .zip(&kept.probabilities)
        .flat_map(|((d, qkv), probabilities)| attention_backward(d, qkv, probabilities, WIDTH, HEADS))
        .collect();
    let dnormed = linear_backward(&dqkv, &kept.normed[0], w[2], WIDTH, g[2]);
    backward_of_norm(dx, &dnormed, &kept.norms[0], w[0], &mut g[0..2]);
}

fn backward_of_norm(dx: &mut [f32], dnormed: &[f32], kept: &Normed, gain: &[f32], g: &mut Grads) {
    let (dgain, dbias) = g.split_at_mut(1);
    add(dx, 1.0, &norm_backward(dnormed, kept, gain, dgain[0], dbias[0]));
}

/// The mean loss of the sequences, the gradient of x, and the head's gradients: forward and backward in one go.
pub fn head(w: &Weights, g: &mut Grads, x: &[f32], targets: &[u8]) -> (f64, Vec<f32>) {
    let (normed, kept) = norm(x, w[0], w[1]);
    let (mut logits, count) = (linear(&normed, w[2], WIDTH), targets.len() as f32);
    let mut loss = 0.0;
    for (row, &target) in logits.chunks_exact_mut(VOCABULARY).zip(targets) {
        softmax(row);
        loss -= f64::from(row[target as usize]).ln() / f64::from(count);
        row[target as usize] -= 1.0;
        row.iter_mut().for_each(|d| *d /= count);
    }
    let dnormed = linear_backward(&logits, &normed, w[2], WIDTH, g[2]);
    let mut dx = vec![0.0; x.len()];
    backward_of_norm(&mut dx, &dnormed, &kept, w[0], &mut g[0..2]);
    (loss, dx)
}
