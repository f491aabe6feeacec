// SPDX-License-Identifier: Apache-2.0
// The state that the driver's cuMem functions manage: memory that is a file without a name, addresses, and the mappings
// of memory to addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "simulated_cuda/memory_file.h"

namespace simulated {

struct Device;

struct Physical {
  Physical(Device &device, MemoryFile file, size_t size, int handle_types)
      : device(device), file(std::move(file)), size(size), handle_types(handle_types) {}
  ~Physical();  // returns the bytes to the device when destroyed
  Physical(const Physical &) = delete;
  Physical &operator=(const Physical &) = delete;

  Device &device;
  MemoryFile file;
  const size_t size;
  const int handle_types;  // handle types that it can be exported as
};

struct VirtualMemory {
  using Owner = std::shared_ptr<Physical>;  // exists while it has a handle or is mapped

  std::mutex mutex;
  uint64_t next_handle = 0x55000000;
  std::map<uint64_t, Owner> handles;
  std::map<uintptr_t, Owner> mappings;  // a mapping has all of the memory
  std::map<uintptr_t, size_t> reservations;

  void clear() {
    handles.clear();
    mappings.clear();
    reservations.clear();
  }
};

}  // namespace simulated
