// SPDX-License-Identifier: Apache-2.0
// The file without a name that memory of the driver's cuMem functions is.
#pragma once

#include <atomic>
#include <cstddef>

namespace simulated {

class MemoryFile {
 public:
  // All of it unwritten. number() is -1 where the system has no more.
  explicit MemoryFile(size_t size);
  // That of somebody who has exported it: another number of the same file, or -1.
  static MemoryFile imported(int file);
  // Its pages serve the next file as long: new ones were half of the tests' time. Not where others have it, too.
  ~MemoryFile();
  MemoryFile(MemoryFile &&from) noexcept;
  MemoryFile &operator=(MemoryFile &&) = delete;

  int number() const noexcept { return number_; }
  // Another number of it, which is the caller's; -1: the system has no more.
  int exported();

 private:
  struct Imported {};
  MemoryFile(Imported, int file);

  int number_ = -1;
  size_t size_ = 0;
  std::atomic<bool> shared_{false};
};

}  // namespace simulated
