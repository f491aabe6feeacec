// SPDX-License-Identifier: Apache-2.0
// Records which addresses belong to which device, and which are page-locked. Device memory has its own pages between
// pages that may not be touched, and its addresses are never reused. So an access past its end or after cudaFree
// faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>

namespace simulated {

// Memory that was never written contains bytes that every floating type reads as NaN.
inline constexpr int unwritten = 0xff;

struct Place {
  enum Kind { pageable, pinned, device };
  Kind kind = pageable;
  int device_index = -1;  // pinned: the device that was current at allocation
  bool inside = true;     // false: part of the range lies outside memory that is allocated
  uintptr_t begin = 0;    // first address of the allocation
  size_t size = 0;
  bool allocated = false;  // pinned: cudaHostAlloc made it, and it was not registered
  uint32_t readers = ~0u;  // bit i: device i may access this memory
};

class Memory {
 public:
  void *allocate(int device, size_t bytes);  // Returns nullptr if the system has no more memory.
  // Returns the size of the device allocation that allocate() made at this address, or 0 if there is none. Its pages
  // are released.
  size_t free(void *pointer);

  void *allocate_pinned(int device, size_t bytes);
  bool free_pinned(void *pointer);
  bool register_pinned(int device, void *pointer, size_t bytes);  // false: partly registered already
  bool unregister_pinned(void *pointer);

  // Reserves addresses of the device without memory behind them, for driver_memory.cpp, which maps device memory into
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
    size_t mapped = 0;       // allocate(): includes the pages around it; 0: memory of the program
    bool allocated = false;  // allocate_pinned() made it
    uint32_t readers = ~0u;
  };
  using Ranges = std::map<uintptr_t, Range>;
  static const Ranges::value_type *at(const Ranges &ranges, uintptr_t address);
  static bool overlaps(const Ranges &ranges, uintptr_t begin, size_t bytes);

  mutable std::shared_mutex mutex_;
  Ranges device_, pinned_;
  Ranges reserved_;  // bytes of the device, allocated or freed
};

}  // namespace simulated
