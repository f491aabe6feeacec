// SPDX-License-Identifier: Apache-2.0
// Which addresses belong to which device, which are page-locked. Device memory has pages of its own between pages that
// may not be touched, and its addresses are not reused, so that an access past its end or after cudaFree faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>

namespace simulated {

// Memory that was never written has bytes of which every floating type makes NaN.
inline constexpr int unwritten = 0xff;

struct Place {
  enum Kind { pageable, pinned, device };
  Kind kind = pageable;
  int device_index = -1;  // pinned: the current one when it was allocated
  bool inside = true;     // false: some of it lies outside what is alive
  uintptr_t begin = 0;    // of the allocation
  size_t size = 0;
  bool allocated = false;  // pinned: by cudaHostAlloc, not registered
  uint32_t readers = ~0u;  // of a device: which devices may access it, by bit
};

class Memory {
 public:
  void *allocate(int device, size_t bytes);  // nullptr: the system has no more
  // Size of the device allocation that starts there and that allocate() made; 0: none. Its pages are gone then.
  size_t free(void *pointer);

  void *allocate_pinned(int device, size_t bytes);
  bool free_pinned(void *pointer);
  bool register_pinned(int device, void *pointer, size_t bytes);  // false: some of it is already
  bool unregister_pinned(void *pointer);

  // Addresses that are the device's without memory behind them, for driver_memory.cpp. Device memory is mapped into
  // them.
  void reserve(void *pointer, size_t bytes, int device);
  void release(void *pointer);
  void map(void *pointer, size_t bytes, int device, uint32_t readers);
  bool unmap(void *pointer, size_t bytes);

  Place find(const void *pointer, size_t bytes) const;
  size_t pinned_bytes() const;
  void clear();

 private:
  struct Range {
    size_t size;
    int device;
    size_t mapped = 0;       // allocate(): with the pages around it; 0: memory of the program
    bool allocated = false;  // allocate_pinned()
    uint32_t readers = ~0u;
  };
  using Ranges = std::map<uintptr_t, Range>;
  static const Ranges::value_type *at(const Ranges &ranges, uintptr_t address);
  static bool overlaps(const Ranges &ranges, uintptr_t begin, size_t bytes);

  mutable std::shared_mutex mutex_;
  Ranges device_, pinned_;
  Ranges reserved_;  // of the device, alive or not
};

}  // namespace simulated
