// SPDX-License-Identifier: Apache-2.0
// Sums of squares of this rank's main weights, for fsdp_get_param_weight_norms.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "engine/runtime/runtime.h"

namespace fsdp::engine {

class WeightNorms {
 public:
  // `values` has an element for each parameter of the model.
  WeightNorms(Runtime &runtime, double *values);
  // Writes the sum of squares of this rank's counted part of each parameter to its value. Parameters of which it counts
  // nothing, or whose weights are not numbers, are left out. The work of the stream is done when the call returns.
  void measure(device::Stream &caller);

 private:
  // The counted part of main weights of which a plane is in a file.
  struct FileWeights {
    double *result;
    const Bucket *bucket;
    uint32_t tensor;
    layout::Slice own, counted;  // this rank's part, and what it counts of it
    uint64_t granule;
  };
  double sum_squares(const FileWeights &weights) const;

  Runtime &runtime_;
  std::vector<device::SquaresSpan> plain_;
  std::vector<device::CompactSquaresSpan> compact_;
  std::vector<FileWeights> in_file_;
};

// A sum of squares of numbers that come in several calls, with the partial sums of device::SquaresSpan.
class OrderedSquares {
 public:
  // `granule`: the number of elements of a granule; 0: all numbers are one granule.
  explicit OrderedSquares(uint64_t granule) : granule_(granule) {}
  void add(std::span<const float> numbers);
  double sum();

 private:
  using Sums = std::array<double, device::norm_sums>;
  static double fold(Sums sums);
  void end_piece();

  uint64_t granule_, in_granule_ = 0, in_piece_ = 0, pieces_ = 0;
  Sums of_piece_{}, of_all_{};
};

}  // namespace fsdp::engine
