// SPDX-License-Identifier: Apache-2.0
// Memory for direct I/O: whole pages.
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

namespace fsdp::checkpoint {

// The alignment that direct I/O requires of addresses, offsets and sizes: a page, which is a multiple of the block size
// of all devices.
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

// A file of a checkpoint of which parts are read, past the page cache if the file system supports that.
// Caches of other programs consist of links. In our checkpoints a link is damage.
enum class LinkPolicy : uint8_t { refused, followed };

class InFile {
 public:
  // Opens a name in an open folder. Anything that is no regular file is refused, and so is a link unless links are
  // followed. `shown` is the path for messages. All functions throw SYSTEM with the path, the action and its bytes, and
  // errno.
  InFile(int folder, const std::string &name, std::string shown, LinkPolicy links = LinkPolicy::refused);

  uint64_t bytes() const { return bytes_; }
  const std::string &shown() const { return shown_; }
  // Reads bytes [offset, offset + count) and returns them as a part of `buffer`. The buffer is that of an AlignedBytes
  // with room for needed_for(offset, count). The range must lie within the file as it was when it was opened.
  std::span<const std::byte> read(uint64_t offset, uint64_t count, std::span<std::byte> buffer) const;
  static uint64_t needed_for(uint64_t offset, uint64_t count);

 private:
  // Reads whole pages, as far as the file goes.
  void read_pages(uint64_t offset, std::span<std::byte> to, uint64_t needed) const;

  std::string shown_;
  Fd fd_;
  uint64_t bytes_ = 0;
};

// A new file of a checkpoint. It is written by direct I/O, past the page cache, if the file system supports that, else
// through the cache and then to the disk.

class OutFile {
 public:
  // Creates the file in an open folder, under a plain name that must be free. `shown` is the path for messages. All
  // functions throw SYSTEM with the path, the action and its bytes, and errno.
  OutFile(int folder, const std::string &name, std::string shown);

  // Address, offset and size are multiples of io_alignment.
  void write(uint64_t offset, std::span<const std::byte> data);
  // Cuts the file to `bytes`, closes it, and returns when all of it is on the disk.
  void finish(uint64_t bytes);
  bool is_direct() const { return direct_; }

 private:
  void open(int folder, const std::string &name);
  bool leave_direct();
  [[noreturn]] void fail_at(int code, const char *what, uint64_t offset, uint64_t bytes) const;

  std::string shown_;
  Fd fd_;
  bool direct_ = true;
};

}  // namespace fsdp::checkpoint
