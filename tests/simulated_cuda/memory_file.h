// SPDX-License-Identifier: Apache-2.0
// The file without a name that backs memory of the driver's cuMem functions.
#pragma once

#include <atomic>
#include <cstddef>

namespace simulated {

class MemoryFile {
 public:
  // Fills the file with the byte `unwritten`. number() is -1 if the system has no more memory.
  explicit MemoryFile(size_t size);
  // Opens memory that was exported as `file`. number() is a new descriptor of the same file, or -1.
  static MemoryFile imported(int file);
  // Keeps the pages for the next file of this size, unless the file was exported or imported.
  ~MemoryFile();
  MemoryFile(MemoryFile &&from) noexcept;
  MemoryFile &operator=(MemoryFile &&) = delete;

  int number() const noexcept { return number_; }
  // Returns a new descriptor of the file, which the caller closes, or -1 if the system has no more.
  int exported();

 private:
  struct Imported {};
  MemoryFile(Imported, int file);

  int number_ = -1;
  size_t size_ = 0;
  std::atomic<bool> shared_{false};
};

}  // namespace simulated
