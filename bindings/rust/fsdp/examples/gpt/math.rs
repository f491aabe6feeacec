// SPDX-License-Identifier: Apache-2.0
//! Operations over rows of floats, forward and backward. Weight gradients are added up, input gradients are returned.

/// y[n][m] = x[n][k] w[m][k]^T.
pub fn linear(x: &[f32], w: &[f32], k: usize) -> Vec<f32> {
    let mut y = Vec::with_capacity(x.len() / k * (w.len() / k));
    for row in x.chunks_exact(k) {
        y.extend(w.chunks_exact(k).map(|w_row| dot(row, w_row)));
    }
    y
}

pub fn linear_backward(dy: &[f32], x: &[f32], w: &[f32], k: usize, dw: &mut [f32]) -> Vec<f32> {
    let mut dx = vec![0.0; x.len()];
    let rows = dx.chunks_exact_mut(k).zip(x.chunks_exact(k)).zip(dy.chunks_exact(w.len() / k));
    for ((dx_row, x_row), dy_row) in rows {
        for ((&d, w_row), dw_row) in dy_row.iter().zip(w.chunks_exact(k)).zip(dw.chunks_exact_mut(k)) {
            add(dx_row, d, w_row);
            add(dw_row, d, x_row);
        }
    }
    dx
}

pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// y += factor x
pub fn add(y: &mut [f32], factor: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// Adds the bias to each row.
pub fn add_bias(x: &mut [f32], bias: &[f32]) {
    x.chunks_exact_mut(bias.len()).for_each(|row| add(row, 1.0, bias));
}

/// Adds up the rows.
pub fn bias_backward(dy: &[f32], dbias: &mut [f32]) {
    dy.chunks_exact(dbias.len()).for_each(|row| add(dbias, 1.0, row));
}

/// What a LayerNorm keeps for its backward pass: its output before gain and bias, and 1 / deviation of each row.
pub struct Normed {
    scaled: Vec<f32>,
    factors: Vec<f32>,
}

const EPSILON: f32 = 1e-5;

pub fn norm(x: &[f32], gain: &[f32], bias: &[f32]) -> (Vec<f32>, Normed) {
    let (size, mut y) = (gain.len() as f32, Vec::with_capacity(x.len()));
    let mut kept = Normed { scaled: Vec::with_capacity(x.len()), factors: Vec::new() };
    for row in x.chunks_exact(gain.len()) {
        let mean = row.iter().sum::<f32>() / size;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / size;
        let factor = 1.0 / (variance + EPSILON).sqrt();
        kept.factors.push(factor);
        kept.scaled.extend(row.iter().map(|x| (x - mean) * factor));
        let scaled = &kept.scaled[y.len()..];
        y.extend(scaled.iter().zip(gain).zip(bias).map(|((s, gain), bias)| s * gain + bias));
    }
    (y, kept)
}

pub fn norm_backward(dy: &[f32], kept: &Normed, gain: &[f32], dgain: &mut [f32], dbias: &mut [f32]) -> Vec<f32> {
    let (width, mut dx) = (gain.len(), Vec::with_capacity(dy.len()));
    bias_backward(dy, dbias);
    for ((row, scaled), factor) in dy.chunks_exact(width).zip(kept.scaled.chunks_exact(width)).zip(&kept.factors) {
        for i in 0..width {
            dgain[i] += row[i] * scaled[i];
        }
        let mean = dot(row, gain) / width as f32;
        let along = (0..width).map(|i| row[i] * gain[i] * scaled[i]).sum::<f32>() / width as f32;
        dx.extend((0..width).map(|i| factor * (row[i] * gain[i] - mean - scaled[i] * along)));
    }
    dx
}

const GELU_FACTOR: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_CUBE: f32 = 0.044715;

/// The approximation by tanh: Hendrycks and Gimpel, arXiv:1606.08415.
pub fn gelu(x: &[f32]) -> Vec<f32> {
    x.iter().map(|&x| 0.5 * x * (1.0 + (GELU_FACTOR * (x + GELU_CUBE * x * x * x)).tanh())).collect()
}

/// Turns the gradient of its output into that of its input.
pub fn gelu_backward(dy: &mut [f32], x: &[f32]) {
    for (d, &x) in dy.iter_mut().zip(x) {
        let tanh = (GELU_FACTOR * (x + GELU_CUBE * x * x * x)).tanh();
        let inner = GELU_FACTOR * (1.0 + 3.0 * GELU_CUBE * x * x);
        *d *= 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner;
    }
}

/// In place.
pub fn softmax(row: &mut [f32]) {
    let largest = row.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
    row.iter_mut().for_each(|x| *x = (*x - largest).exp());
    let sum = row.iter().sum::<f32>();
    row.iter_mut().for_each(|x| *x /= sum);
}

/// One head's part of the rows of queries, keys and values that lie beside each other in qkv.
#[derive(Clone, Copy)]
struct Head {
    stride: usize,
    offset: usize,
    size: usize,
}

impl Head {
    /// part: 0 queries, 1 keys, 2 values.
    fn range(self, place: usize, part: usize) -> std::ops::Range<usize> {
        let start = place * self.stride + part * self.stride / 3 + self.offset;
        start..start + self.size
    }
}

fn heads(width: usize, count: usize) -> impl Iterator<Item = Head> {
    let size = width / count;
    (0..count).map(move |head| Head { stride: 3 * width, offset: head * size, size })
}

/// Causal attention of one sequence: qkv[length][3 width] to [length][width], and the probabilities.
pub fn attention(qkv: &[f32], width: usize, head_count: usize) -> (Vec<f32>, Vec<f32>) {
    let length = qkv.len() / (3 * width);
    let (mut mixed, mut kept) = (vec![0.0; length * width], Vec::new());
    for head in heads(width, head_count) {
        for to in 0..length {
            let query = &qkv[head.range(to, 0)];
            let score = |from| dot(query, &qkv[head.range(from, 1)]) / (head.size as f32).sqrt();
            let mut row: Vec<f32> = (0..=to).map(score).collect();
            softmax(&mut row);
            let start = to * width + head.offset;
            for (from, &p) in row.iter().enumerate() {
                add(&mut mixed[start..start + head.size], p, &qkv[head.range(from, 2)]);
            }
            kept.extend(row);
        }
    }
    (mixed, kept)
}

pub fn attention_backward(dmixed: &[f32], qkv: &[f32], kept: &[f32], width: usize, head_count: usize) -> Vec<f32> {
    let (length, mut dqkv, mut rest) = (qkv.len() / (3 * width), vec![0.0; qkv.len()], kept);
    for head in heads(width, head_count) {
        let scale = 1.0 / (head.size as f32).sqrt();
        for to in 0..length {
            let (row, later) = rest.split_at(to + 1);
            rest = later;
            let d = &dmixed[to * width + head.offset..][..head.size];
            let drow: Vec<f32> = (0..=to).map(|from| dot(d, &qkv[head.range(from, 2)])).collect();
            let mean = dot(&drow, row);
            for from in 0..=to {
                let dscore = row[from] * (drow[from] - mean) * scale;
                add(&mut dqkv[head.range(from, 2)], row[from], d);
                add(&mut dqkv[head.range(to, 0)], dscore, &qkv[head.range(from, 1)]);
                add(&mut dqkv[head.range(from, 1)], dscore, &qkv[head.range(to, 0)]);
            }
        }
    }
    dqkv
}
