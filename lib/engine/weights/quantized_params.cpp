// SPDX-License-Identifier: Apache-2.0

#include "engine/weights/quantized_params.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/float_environment.h"
#include "engine/weights/quantizer.h"
#include "memory/plane.h"

namespace fsdp::engine {

namespace {

// Finds the scale of an element. Each matrix has its blocks' scales, in C order.
class ScaleIndex {
 public:
  explicit ScaleIndex(const memory::ParamSpec &param) : block_(memory::block_size(param.quantization, 0)) {
    if (!block_.rows) return;
    columns_ = param.shape.back(), rows_ = param.shape[param.shape.size() - 2];
    across_ = divide_up(columns_, block_.columns), down_ = divide_up(rows_, block_.rows);
  }
  uint64_t of(uint64_t element) const {
    if (!block_.rows) return 0;
    const uint64_t row = element / columns_;
    return (row / rows_ * down_ + row % rows_ / block_.rows) * across_ + element % columns_ / block_.columns;
  }
  // The number of consecutive elements with the same scale, starting at this one; at most `most`.
  uint64_t run(uint64_t element, uint64_t most) const {
    if (!block_.rows) return most;
    const uint64_t column = element % columns_;
    return std::min({most, columns_ - column, block_.columns - column % block_.columns});
  }

 private:
  memory::BlockSize block_;
  uint64_t columns_ = 0, rows_ = 0, across_ = 0, down_ = 0;
};

std::array<float, 256> list_codes() {
  std::array<float, 256> values;
  for (size_t code = 0; code < values.size(); ++code) values[code] = device::E4M3::value(static_cast<uint8_t>(code));
  return values;
}

float scale_at(const StoredRows &rows, uint64_t index) {
  if (rows.scale_dtype == FSDP_E8M0) return device::E8M0::value(static_cast<uint8_t>(rows.scales[index]));
  float scale = 0;
  std::memcpy(&scale, rows.scales + index * sizeof scale, sizeof scale);
  return scale;
}

}  // namespace

void dequantize(device::Device &device, const memory::ParamSpec &param, const StoredRows &rows, std::byte *to,
                fsdp_dtype dtype) {
  const FloatEnvironment standard;
  const ScaleIndex index(param);
  const std::array<float, 256> values = list_codes();
  std::array<float, 4096> piece;
  for (uint64_t done = 0; done < param.element_count;) {
    const uint64_t count = std::min(param.element_count - done, uint64_t{piece.size()});
    for (uint64_t i = 0; i < count;) {
      const float scale = scale_at(rows, index.of(done + i));
      for (const uint64_t end = i + index.run(done + i, count - i); i < end; ++i)
        piece[i] = values[static_cast<uint8_t>(rows.codes[done + i])] * scale;
    }
    device.transfer(to + done * dtype_size(dtype), dtype, piece.data(), FSDP_FLOAT32, count);
    done += count;
  }
}

namespace {

constexpr uint64_t max_in_piece = 64 * 1024;

// The slice of this rank's scales that belongs to the rows. If all rows have one scale, the slice tells whether this
// rank stores it.
layout::Slice find_scales(const Runtime &runtime, const memory::ParamSpec &param, const ParamPlace &place,
                          const layout::Slice &rows) {
  const memory::BucketPlan &bucket = *runtime.bucket(place).plan;
  const memory::Extent owned = bucket.owned_plane().owned;
  layout::Slice scales = runtime.slice_of(*bucket.scale_layout, place.tensor, owned, bucket.mesh);
  if (memory::scales_whole_tensors(param.quantization)) return scales;
  const layout::Slice own = runtime.slice_of(bucket.layout, place.tensor, owned, bucket.mesh);
  const uint64_t before = (rows.tensor_offset - own.tensor_offset) / bucket.layout.tensors[place.tensor].row;
  const uint64_t skipped = memory::count_scales(param, before);
  scales.tensor_offset += skipped, scales.full_offset += skipped;
  scales.shard_offset += skipped, scales.group_offset += skipped;
  return scales;
}

}  // namespace

FrozenLoad::FrozenLoad(Runtime &runtime, const memory::ParamSpec &param, const ParamPlace &place,
                       const layout::Slice &rows)
    : runtime_(runtime),
      param_(param),
      place_(place),
      rows_(rows),
      scales_(rows.count || memory::scales_whole_tensors(param.quantization) ? find_scales(runtime, param, place, rows)
                                                                             : layout::Slice{}),
      whole_(memory::scales_whole_tensors(param.quantization) && (rows.count || scales_.count)),
      piece_count_(whole_ ? std::min(param.element_count, max_in_piece) : 0),
      piece_number_(whole_ ? divide_up(param.element_count, piece_count_) : 0) {
  const uint64_t values = round_up(rows.count, layout::alignment, "numbers that are loaded");
  const uint64_t piece = round_up(piece_count_, layout::alignment, "numbers that are loaded");
  const uint64_t floats = values + piece + (whole_ ? piece_number_ + 2 : 0);
  if (!floats) return;
  memory_ = runtime.context.device().allocate(checked_multiply(floats, sizeof(float), "numbers that are loaded"),
                                              "numbers on their way into planes");
  values_ = reinterpret_cast<float *>(memory_->data());
  piece_ = values_ + values;
  amaxes_ = piece_ + piece;
}

void FrozenLoad::take(const std::byte *from, fsdp_dtype dtype, uint64_t first, uint64_t count) {
  const uint64_t element = dtype_size(dtype);
  const uint64_t begin = std::max(first, rows_.tensor_offset);
  const uint64_t end = std::min(first + count, rows_.tensor_offset + rows_.count);
  if (begin < end)
    runtime_.context.device().transfer(values_ + (begin - rows_.tensor_offset), FSDP_FLOAT32,
                                       from + (begin - first) * element, dtype, end - begin);
  if (whole_) measure(from, dtype, count);
}

void FrozenLoad::measure(const std::byte *from, fsdp_dtype dtype, uint64_t count) {
  while (count) {
    const uint64_t some = std::min(count, piece_count_ - in_piece_);
    runtime_.context.device().transfer(piece_ + in_piece_, FSDP_FLOAT32, from, dtype, some);
    in_piece_ += some, count -= some;
    from += some * dtype_size(dtype);
    if (in_piece_ == piece_count_) find_amax();
  }
}

// Finds the largest magnitude of the piece. The next transfer into the piece comes after this search, on the same
// stream.
void FrozenLoad::find_amax() {
  if (!in_piece_) return;
  runtime_.context.device().caller_stream(nullptr).find_amax(amaxes_ + pieces_++, piece_, in_piece_,
                                                             runtime_.spec.quantize_from == FSDP_BFLOAT16);
  in_piece_ = 0;
}

void FrozenLoad::store() {
  if (!memory_) return;
  device::Stream &stream = runtime_.context.device().caller_stream(nullptr);
  if (whole_)
    store_whole(stream);
  else
    store_blocks(stream);
  runtime_.synchronize(stream);
}

// Stores the codes of a whole tensor, and its scale. All ranks find the same scale, and one of the ranks with slots
// writes it.
void FrozenLoad::store_whole(device::Stream &stream) {
  find_amax();
  const Bucket &bucket = runtime_.bucket(place_);
  float *const scale = amaxes_ + piece_number_, *const inverse = scale + 1;
  stream.find_fp8_scales({amaxes_, static_cast<uint32_t>(piece_number_), 1,
                          runtime_.spec.scale_rounding == FSDP_SCALE_POWER_OF_TWO, scale, inverse});
  if (rows_.count)
    stream.quantize_fp8({.from = values_,
                         .count = rows_.count,
                         .via_bf16 = runtime_.spec.quantize_from == FSDP_BFLOAT16,
                         .scale = scale,
                         .codes = reinterpret_cast<uint8_t *>(bucket.plane(PlaneKind::compute).at(rows_))});
  if (scales_.count) stream.copy(bucket.plane(PlaneKind::compute_scales).at(scales_), inverse, sizeof(float));
}

void FrozenLoad::store_blocks(device::Stream &stream) {
  quantize(stream, make_block_work(runtime_.spec, {runtime_.bucket(place_), param_, rows_, scales_, values_}));
}

}  // namespace fsdp::engine
