// SPDX-License-Identifier: Apache-2.0
#include "engine/dequantize.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/float_environment.h"
#include "memory/quantization.h"

namespace fsdp::engine {
namespace {

// Where the scale of an element is: blocks of each matrix, in C order.
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
  // How many elements from this one on have the same scale and lie behind each other, up to `most`.
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

}  // namespace fsdp::engine
