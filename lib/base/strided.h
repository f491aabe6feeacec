// SPDX-License-Identifier: Apache-2.0
// A caller's array of structs that may be shorter or longer than ours, one every `stride` bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

namespace fsdp {

template <class T>
class Strided {
 public:
  Strided(const T *first, uint64_t count, uint64_t stride) : first_(first), count_(count), stride_(stride) {}

  uint64_t size() const { return count_; }
  // What the caller's struct lacks is zero.
  T operator[](uint64_t index) const {
    T value{};
    std::memcpy(static_cast<void *>(&value), bytes(index), std::min<uint64_t>(stride_, sizeof(T)));
    return value;
  }
  // The first byte of an element that this release does not know and that is not zero.
  std::optional<uint64_t> unknown_byte(uint64_t index) const {
    for (uint64_t byte = sizeof(T); byte < stride_; ++byte)
      if (bytes(index)[byte]) return byte;
    return std::nullopt;
  }

 private:
  const unsigned char *bytes(uint64_t index) const {
    return reinterpret_cast<const unsigned char *>(first_) + index * stride_;
  }

  const T *first_;
  uint64_t count_, stride_;
};

}  // namespace fsdp
