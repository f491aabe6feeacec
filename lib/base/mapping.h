// SPDX-License-Identifier: Apache-2.0
// Memory shared by ranks: a sealed memfd (nothing of it shows in /dev/shm, nothing is left after a crash) and its
// views.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/access.h"
#include "base/fd.h"

namespace fsdp {

uint64_t page_size() noexcept;

// A memfd of `bytes` bytes, allocated in full and sealed against changes of its size. OUT_OF_MEMORY if that fails.
Fd create_memory_file(uint64_t bytes, const std::string &what);
// What came from a peer: throws unless it is sealed as above and has the size expected.
void check_memory_file(const Fd &file, uint64_t bytes, const std::string &what);

// One view of a whole memory file. Not inherited by forked children.
class Mapping {
 public:
  Mapping() = default;
  Mapping(const Fd &file, uint64_t bytes, Access access, const std::string &what);
  // Readable and writable, in pages that are copied when they are written.
  static Mapping copy_on_write(const Fd &file, uint64_t bytes, const std::string &what);
  Mapping(Mapping &&other) noexcept;
  Mapping &operator=(Mapping &&other) noexcept;
  ~Mapping();

  std::byte *data() const noexcept { return data_; }
  uint64_t size_bytes() const noexcept { return bytes_; }
  // offset and bytes are whole pages.
  void set_access(uint64_t offset, uint64_t bytes, Access access, const std::string &what);
  // Put the pages into this view now, so that no access faults later.
  void populate(uint64_t offset, uint64_t bytes, Access access, const std::string &what);

 private:
  std::byte *data_ = nullptr;
  uint64_t bytes_ = 0;
  bool copies_ = false;
};

}  // namespace fsdp
