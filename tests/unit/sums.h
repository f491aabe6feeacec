// SPDX-License-Identifier: Apache-2.0
// Describes the sums and gathers of tests briefly.
#pragma once

#include "transport/collectives.h"

namespace fsdp::transport::test {

// Describes this rank's slice, with this many elements, of the sum over all ranks.
inline Sum slice_sum(const Part &from, uint64_t slice, uint32_t ranks, void *to, float factor = 1) {
  return {.from = from, .to = Part::alone(to), .count = slice * ranks, .factor = factor};
}
inline Sum slice_sum(const Part &from, fsdp_dtype dtype, fsdp_dtype wire, uint64_t slice, uint32_t ranks, void *to,
                     float factor) {
  return {from, Part::alone(to), dtype, wire, slice * ranks, factor};
}
inline Sum everywhere(const Part &from, const Part &to, uint64_t count, float factor) {
  return {.from = from, .to = to, .count = count, .factor = factor, .everywhere = true};
}
inline Sum everywhere_in_place(float *values, uint64_t count) {
  return everywhere(Part::alone(values), Part::alone(values), count, 1);
}
inline Gather in_place(std::byte *whole, uint64_t bytes, uint32_t rank) {
  return {Part::alone(whole + rank * bytes), whole, bytes};
}

}  // namespace fsdp::transport::test
