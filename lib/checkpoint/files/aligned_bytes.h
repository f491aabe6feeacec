// SPDX-License-Identifier: Apache-2.0
// Memory that direct I/O takes: page by page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "base/checked.h"
#include "base/error.h"

namespace fsdp::checkpoint {

// What direct I/O asks of addresses, offsets and sizes: the page, of which the blocks of all devices are parts.
inline constexpr uint64_t io_alignment = 4096;

class AlignedBytes {
 public:
  explicit AlignedBytes(uint64_t bytes) : size_(round_up(bytes, io_alignment)) {
    data_.reset(static_cast<std::byte *>(std::aligned_alloc(io_alignment, size_ ? size_ : io_alignment)));
    if (!data_) fail(FSDP_OUT_OF_MEMORY, "no memory for {} bytes of a file", size_);
  }
  std::span<std::byte> bytes() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(void *data) const noexcept { std::free(data); }
  };
  uint64_t size_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace fsdp::checkpoint
