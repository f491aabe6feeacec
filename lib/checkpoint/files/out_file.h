// SPDX-License-Identifier: Apache-2.0
// A new file of a checkpoint, on its way to the disk. Written by direct I/O, past the page cache, where the file system
// has that; else through the cache, and then to the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/fd.h"

namespace fsdp::checkpoint {

class OutFile {
 public:
  // In an open folder, as a plain name that nothing has yet. `shown` is its path for messages. All of these throw
  // SYSTEM with the path, what was done to which bytes, and errno.
  OutFile(int folder, const std::string &name, std::string shown);

  // Address, offset and size are multiples of io_alignment.
  void write(uint64_t offset, std::span<const std::byte> data);
  // Cuts what the last write had beyond its end, and returns when all of it is on the disk. The file is closed.
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
