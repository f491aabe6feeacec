// SPDX-License-Identifier: Apache-2.0
// A file of a checkpoint, to read parts of: past the page cache where the file system has that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/fd.h"

namespace fsdp::checkpoint {

// Caches of others are made of links. In checkpoints of ours a link is damage.
enum class LinkPolicy : uint8_t { refused, followed };

class InFile {
 public:
  // A name in an open folder; a pipe or whatever else is no file is refused, and so is a link unless it is to be
  // followed. `shown` is its path for messages. All of these throw SYSTEM with the path, what was done to which bytes,
  // and errno.
  InFile(int folder, const std::string &name, std::string shown, LinkPolicy links = LinkPolicy::refused);

  uint64_t bytes() const { return bytes_; }
  const std::string &shown() const { return shown_; }
  // Bytes [offset, offset + count), as a part of `buffer`, which is that of an AlignedBytes with room for
  // needed_for(offset, count). They lie within the file, as it was when it was opened.
  std::span<const std::byte> read(uint64_t offset, uint64_t count, std::span<std::byte> buffer) const;
  static uint64_t needed_for(uint64_t offset, uint64_t count);

 private:
  // Whole pages; as far as the file goes.
  void read_pages(uint64_t offset, std::span<std::byte> to, uint64_t needed) const;

  std::string shown_;
  Fd fd_;
  uint64_t bytes_ = 0;
};

}  // namespace fsdp::checkpoint
