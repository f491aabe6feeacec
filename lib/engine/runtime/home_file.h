// SPDX-License-Identifier: Apache-2.0
// The file in which planes are at home (FSDP_HOME_FILE). It has no name, so the kernel frees it when the process ends
// in any way.
//
// Each byte of the file has an address: the file reserves a range of addresses that cannot be read or written. So
// planes in the file have addresses like all others, and an access that does not go through this class faults at once.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/direct_io.h"
#include "base/fd.h"

namespace fsdp::engine {

// A range of addresses without memory.
class ReservedAddresses {
 public:
  explicit ReservedAddresses(uint64_t bytes);
  ~ReservedAddresses();
  ReservedAddresses(const ReservedAddresses &) = delete;
  ReservedAddresses &operator=(const ReservedAddresses &) = delete;

  std::byte *data() const noexcept { return data_; }
  bool contains(const void *address) const noexcept {
    const auto *const byte = static_cast<const std::byte *>(address);
    return byte >= data_ && byte < data_ + bytes_;
  }

 private:
  std::byte *data_;
  uint64_t bytes_;
};

class HomeFile {
 public:
  // Makes a file of zeros in the directory, with room for all of its bytes on the disk. Errors blame `rank`. Throws
  // SYSTEM; without room, with the bytes that are needed and that are free.
  HomeFile(const std::string &directory, uint64_t bytes, uint32_t rank);

  std::byte *data() const noexcept { return addresses_.data(); }
  bool contains(const void *address) const noexcept { return addresses_.contains(address); }
  uint64_t offset_of(const void *address) const noexcept {
    return static_cast<uint64_t>(static_cast<const std::byte *>(address) - data());
  }
  // Any bytes, from any thread. A write of a part of a page reads the page first, so no other thread may write the same
  // page.
  void read(const std::byte *from, std::span<std::byte> to);
  void write(std::byte *to, std::span<const std::byte> from);
  // Whole pages.
  void read_pages(uint64_t offset, std::span<std::byte> to);
  void write_pages(uint64_t offset, std::span<const std::byte> from);

  const std::string &shown() const noexcept { return shown_; }
  int32_t rank() const noexcept { return static_cast<int32_t>(rank_); }  // whose errors these are
  // Is the file in memory after all (tmpfs)?
  bool in_memory() const noexcept;
  uint64_t read_bytes() const noexcept { return read_bytes_.load(std::memory_order_relaxed); }
  uint64_t moved_bytes() const noexcept { return read_bytes() + written_bytes(); }
  uint64_t written_bytes() const noexcept { return written_bytes_.load(std::memory_order_relaxed); }

 private:
  void open(const std::string &directory);
  void allocate(uint64_t bytes);
  template <class Body>
  void blame(Body &&body) const;

  const uint32_t rank_;
  std::string shown_;
  ReservedAddresses addresses_;
  Fd file_;
  ForkClosed fork_closed_;
  std::mutex mutex_;  // of buffer_
  AlignedBytes buffer_;
  std::atomic<uint64_t> read_bytes_{0}, written_bytes_{0};
};

}  // namespace fsdp::engine
