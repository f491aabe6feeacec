// SPDX-License-Identifier: Apache-2.0
// The arithmetic of the host device, on the calling thread. Every kernel gives the same bits on every SIMD target,
// for any alignment and split of its input, and whatever rounding and flush modes the caller has set. The payload of a
// NaN that arithmetic makes is the one thing left open. Pointers are aligned to their elements; nothing may overlap
// except where a comment says so.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/device.h"

namespace fsdp::device::kernels {

void copy_bytes(void *to, const void *from, size_t bytes);

// Round to nearest even, subnormals kept, overflow to Inf; a NaN stays one, quiet, with the top of its payload.
void cast(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count);

// to += from in fp32, rounded once to to's dtype.
void add(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count);

void scale(float *values, float factor, uint64_t count);

// In one pass: starts from rank 0's value and adds the others in rank order; no multiplication if factor is 1. out
// may be the slice of one of the ranks, at the same elements. Large outputs elsewhere are written past the caches.
void rank_sum(const RankSum &sum);

// The order of the additions is at norm_piece in device/work.h. granule 0: all is one granule.
double sum_squares(const float *values, uint64_t count, uint64_t granule);

double sum_values(const double *values, uint64_t count);
Norm find_norm(const NormShares &shares);

uint64_t count_nonfinite(const float *values, uint64_t count);

// See adamw_kernel.cpp for the order of operations.
void adamw(const AdamW &step, std::span<const AdamWSpan> spans);

// From this size of the output on, what is not read again is written past the caches.
constexpr uint64_t streaming_bytes = uint64_t{8} << 20;

}  // namespace fsdp::device::kernels
