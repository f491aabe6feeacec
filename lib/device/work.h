// SPDX-License-Identifier: Apache-2.0
// The arguments of kernels on the host and on GPUs. They are plain data, because they are copied into the launches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/main_weight.h"
#include "fsdp.h"

namespace fsdp::device {

// An exponential average takes in x as a = keep * a + (rest * x - less * a). Here rest = 1 - beta and beta = keep -
// less. If beta is near 1, rounding beta to fp32 changes 1 - beta, and so everything computed from beta, by much.
// Rounding rest and less does not.
struct Average {
  float rest, keep, less;
};

inline Average average_of(double beta) {
  const auto rest = static_cast<float>(1.0 - beta);
  if (beta > 0.5) return {rest, 1.0f, rest};
  return {rest, 0.0f, -static_cast<float>(beta)};  // with beta 0 the old average has no effect, whatever its value is
}

struct AdamW {
  float lr;  // learning rate times the parameter's lr_scale
  Average first, second;
  float epsilon, weight_decay;     // weight_decay is 0 for NO_DECAY
  float correction1, correction2;  // 1 - beta^step, computed on the host in double
  uint32_t number;                 // number of the step
  uint64_t seed;                   // for weights that are rounded stochastically
};

// One piece of AdamW, of `count` elements. `compute` may be NULL, or equal to `weight` if the compute weights are fp32.
struct AdamWSpan {
  float *weight;
  const float *grad;
  float *exp_avg;
  float *exp_avg_sq;
  void *compute;
  fsdp_dtype compute_dtype;
  uint64_t count;
};

// Like AdamWSpan, for weights or states that take fewer bits than fp32.
struct CompactSpan {
  void *weight;   // in the form `form`
  int16_t *rest;  // for MainForm::split16
  const float *grad;
  void *exp_avg, *exp_avg_sq;                 // fp32, or codes if there are scales
  float *exp_avg_scales, *exp_avg_sq_scales;  // of blocks of state_block elements, the first at the span's start;
                                              // NULL: the states are fp32
  void *compute;                              // for MainForm::float32, as in AdamWSpan
  fsdp_dtype compute_dtype;
  MainForm form;
  uint32_t name;  // see RoundingKey; for MainForm::rounded, as is the next member
  ElementNumbers numbers;
  uint64_t count;
};

// A sum in rank order, in fp32: out[i] (+)= factor * (sum over r of round(source_r[i])), where source_r begins at
// base + r * stride bytes.
struct RankSum {
  const std::byte *base;
  uint64_t stride;
  uint32_t ranks;
  fsdp_dtype source_dtype;
  fsdp_dtype wire_dtype;  // each addend is first rounded to this dtype; source_dtype means no rounding
  float *out;
  uint64_t count;
  float factor;
  bool accumulate;
  bool in_place = false;  // `out` is a slice of a source, perhaps at another address, so its lines are already cached
  uint64_t results_bytes = 0;  // bytes that are written, `out` among them, before any of them is read; 0: not known
};

// A sum of squares in fp64. Each granule is divided, from its start, into pieces of norm_piece elements; the last piece
// may be shorter. A piece has 16 partial sums of double(x) * double(x): element i goes to partial sum i % 16. The
// partial sums are folded in halves (sum j += sum j + 8, then + 4, + 2, + 1). The pieces are numbered over all
// granules, and their sums are added in the same way, as if each were the square of an element. So the threads of a GPU
// can share the work and still get the same bits.
constexpr uint64_t norm_piece = 4096, norm_sums = 16;

// One of many such sums of squares: of `count` values in granules of `granule` values; 0: all values are one granule.
struct SquaresSpan {
  double *result;
  const float *values;
  uint64_t count, granule;
};

// The same for numbers of 16 bits with this dtype. With `rest` they are the upper halves of fp32 numbers, as in
// device/main_weight.h.
struct CompactSquaresSpan {
  double *result;
  const uint16_t *values;
  const int16_t *rest;
  fsdp_dtype dtype;
  uint64_t count, granule;
};

// One of many arrays to scale.
struct FloatSpan {
  float *values;
  uint64_t count;
};

// The norm of values that ranks hold in parts: the square root of the sum of the ranks' shares, which are sums of
// squares. The shares are added in the order of slots: the share of slot s is shares[s % slices * inner + s / slices]
// (layout/mesh.h).
struct NormShares {
  const double *shares;
  uint32_t slots, slices, inner;
  double max_norm;  // 0: nothing is scaled
};

// `factor` is max_norm / norm in fp32 if a finite norm must be reduced to max_norm, else 1.
struct Norm {
  double squares, norm;
  float factor;
};

}  // namespace fsdp::device
