// SPDX-License-Identifier: Apache-2.0
#include "engine/gradients/weight_norms.h"

#include <algorithm>
#include <optional>

#include "base/dtype.h"
#include "engine/weights/compact_numbers.h"
#include "engine/weights/quantizer.h"

namespace fsdp::engine {
namespace {

bool is_main_in_file(const memory::PlanePlan &plane) {
  return plane.in_file() && (plane.kind == PlaneKind::main || plane.kind == PlaneKind::rest);
}

}  // namespace

// Frozen parameters have no main weights, so their compute weights are measured.
WeightNorms::WeightNorms(Runtime &runtime, double *values) : runtime_(runtime) {
  for_each_slice(runtime, {PlaneKind::main, PlaneKind::compute}, [&](const PlaneSlice &weights) {
    const Bucket &bucket = weights.bucket;
    const fsdp_dtype dtype = weights.plane.dtype();
    if (&weights.plane != &bucket.owned_plane() || !is_number(dtype)) return;
    const layout::Slice counted =
        runtime.slice_of(bucket.plan->layout, weights.tensor, Extent::shard, bucket.plan->mesh);
    if (counted.count == 0 || !runtime.answers_for(weights.group, weights.param_index)) return;
    const uint64_t granule = runtime.placement(weights.group.places[weights.param_index]).granule;
    double *const result = values + weights.ordinal;
    if (std::ranges::any_of(bucket.plan->planes, is_main_in_file))
      return in_file_.push_back({result, &bucket, weights.tensor, weights.slice, counted, granule});
    const std::byte *const at = weights.plane.at(counted);
    if (dtype == FSDP_FLOAT32)
      return plain_.push_back({result, reinterpret_cast<const float *>(at), counted.count, granule});
    const std::byte *const rest = bucket.has(PlaneKind::rest) ? bucket.plane(PlaneKind::rest).at(counted) : nullptr;
    compact_.push_back({result, reinterpret_cast<const uint16_t *>(at), reinterpret_cast<const int16_t *>(rest), dtype,
                        counted.count, granule});
  });
}

void WeightNorms::measure(device::Stream &caller) {
  caller.sum_all_squares(plain_);
  caller.sum_all_compact_squares(compact_);
  caller.record(*runtime_.marks.order);
  if (!runtime_.marks.order->done()) runtime_.context.device().synchronize(*runtime_.marks.order);
  for (const FileWeights &weights : in_file_) *weights.result = sum_squares(weights);
}

// Reads the numbers as checkpoints do, because a norm of weights is rare.
double WeightNorms::sum_squares(const FileWeights &weights) const {
  constexpr uint64_t at_once = uint64_t{1} << 18;
  const Plane &main = weights.bucket->plane(PlaneKind::main);
  const uint64_t first = weights.counted.tensor_offset - weights.own.tensor_offset, count = weights.counted.count;
  std::vector<float> numbers(std::min(at_once, count));
  std::optional<CompactNumbers> compact;
  if (CompactNumbers::has(*weights.bucket, main))
    compact.emplace(runtime_, *weights.bucket, main, weights.tensor, numbers.size());
  OrderedSquares squares(weights.granule);
  for (uint64_t done = 0; done < count; done += at_once) {
    const std::span<float> some = std::span(numbers).first(std::min(at_once, count - done));
    if (compact)
      compact->read_as(first + done, some.size(), reinterpret_cast<std::byte *>(some.data()), FSDP_FLOAT32);
    else
      runtime_.storage->transfer(some.data(), FSDP_FLOAT32,
                                 main.at(weights.own) + (first + done) * dtype_size(main.dtype()), main.dtype(),
                                 some.size());
    squares.add(some);
  }
  return squares.sum();
}

double OrderedSquares::fold(Sums sums) {
  for (uint64_t half = device::norm_sums / 2; half > 0; half /= 2)
    for (uint64_t j = 0; j < half; ++j) sums[j] += sums[j + half];
  return sums[0];
}

void OrderedSquares::end_piece() {
  of_all_[pieces_++ % device::norm_sums] += fold(of_piece_);
  of_piece_ = {};
  in_piece_ = 0;
}

void OrderedSquares::add(std::span<const float> numbers) {
  for (const float number : numbers) {
    of_piece_[in_piece_ % device::norm_sums] += static_cast<double>(number) * static_cast<double>(number);
    const bool ends_granule = ++in_granule_ == granule_;
    if (++in_piece_ == device::norm_piece || ends_granule) end_piece();
    if (ends_granule) in_granule_ = 0;
  }
}

double OrderedSquares::sum() {
  if (in_piece_) end_piece();
  return fold(of_all_);
}

}  // namespace fsdp::engine
