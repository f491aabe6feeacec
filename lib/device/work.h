// SPDX-License-Identifier: Apache-2.0
// What kernels are given, on the host and on GPUs: plain data, since it travels in the arguments of kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fsdp.h"

namespace fsdp::device {

// An exponential average takes x as a = keep * a + (rest * x - less * a), with rest = 1 - beta and beta = keep - less.
// The fp32 next to a beta near 1 is off by much of 1 - beta, and so would be all that is made from it; rest and less
// are not.
struct Average {
  float rest, keep, less;
};

inline Average average_of(double beta) {
  const auto rest = static_cast<float>(1.0 - beta);
  if (beta > 0.5) return {rest, 1.0f, rest};
  return {rest, 0.0f, -static_cast<float>(beta)};  // beta 0 forgets at once, whatever a was
}

struct AdamW {
  float lr;  // times the parameter's lr_scale
  Average first, second;
  float epsilon, weight_decay;     // decay 0 for NO_DECAY
  float correction1, correction2;  // 1 - beta^step, computed on the host in double
};

// One piece of AdamW: count elements. compute may be NULL or equal to weight (fp32 weights that are the compute
// weights).
struct AdamWSpan {
  float *weight;
  const float *grad;
  float *exp_avg;
  float *exp_avg_sq;
  void *compute;
  fsdp_dtype compute_dtype;
  uint64_t count;
};

// A rank-order sum: out[i] (+)= factor * sum over r in order of round(source_r[i]), in fp32; source_r = base + r *
// stride bytes.
struct RankSum {
  const std::byte *base;
  uint64_t stride;
  uint32_t ranks;
  fsdp_dtype source_dtype;
  fsdp_dtype wire_dtype;  // each addend is rounded to it first; equal to source_dtype for no rounding
  float *out;
  uint64_t count;
  float factor;
  bool accumulate;
  bool in_place = false;  // out is a slice of a source, perhaps at another address: its lines are cached when written
};

// A sum of squares in fp64, of granules that are cut into pieces of so many elements from their start, the last one
// shorter. A piece has 16 partial sums of double(x) * double(x), element i going to number i % 16; they are folded in
// halves (j += j + 8, then + 4, + 2, + 1). The pieces are numbered over all granules and their sums added in the same
// way, as if each were an element's square. So a GPU's threads can share the work, and find the same bits.
constexpr uint64_t norm_piece = 4096, norm_sums = 16;

// One sum of many: as above, of count values in granules of so many; 0: all is one granule.
struct SquaresSpan {
  double *result;
  const float *values;
  uint64_t count, granule;
};

// One array of many that are scaled.
struct FloatSpan {
  float *values;
  uint64_t count;
};

// The norm of what ranks hold in parts: the root of the sum of their shares, which are sums of squares. Added in the
// order of slots: the share of slot s is shares[s % slices * inner + s / slices] (layout/mesh.h).
struct NormShares {
  const double *shares;
  uint32_t slots, slices, inner;
  double max_norm;  // 0: nothing is to be scaled
};

// factor: fp32 max_norm / norm where that is what brings a finite norm down to max_norm, else 1.
struct Norm {
  double squares, norm;
  float factor;
};

}  // namespace fsdp::device
