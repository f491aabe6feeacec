// SPDX-License-Identifier: Apache-2.0
// Direct I/O on open files: whole pages that bypass the page cache. If a file system refuses direct I/O, also after the
// file was opened, the same calls go on through the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>

#include "base/checked.h"
#include "base/error.h"
#include "base/fd.h"

namespace fsdp {

// The alignment that direct I/O requires of addresses, offsets and sizes: a page, which is a multiple of the block size
// of all devices.
inline constexpr uint64_t io_alignment = 4096;

constexpr uint64_t page_of(uint64_t offset) { return offset / io_alignment * io_alignment; }

// Memory for direct I/O: whole pages.
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

bool is_direct(const Fd &file) noexcept;
// Makes later calls go through the page cache. Returns false if the file cannot be changed.
bool leave_direct(const Fd &file) noexcept;

// Reads pages from `offset` on into `to`, or up to the end of the file; at least the first `needed` bytes must exist.
// `shown` names the file in errors. Throws SYSTEM with the name, the bytes, the offset and errno.
void read_pages(const Fd &file, uint64_t offset, std::span<std::byte> to, uint64_t needed, const std::string &shown);
// Address, offset and size must be multiples of io_alignment. Throws like read_pages().
void write_pages(const Fd &file, uint64_t offset, std::span<const std::byte> data, const std::string &shown);

}  // namespace fsdp
