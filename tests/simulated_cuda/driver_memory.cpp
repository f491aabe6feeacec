// SPDX-License-Identifier: Apache-2.0
// Implements the driver's virtual memory. It maps only whole allocations (offset 0).
#include <sys/mman.h>
#include <sys/stat.h>

#include <utility>

#include "simulated_cuda/call.h"
#include "simulated_cuda/device_memory.h"
#include "simulated_cuda/driver.h"

namespace simulated {
namespace {

constexpr size_t granularity = size_t{2} << 20;

VirtualMemory &state() { return runtime().virtual_memory; }

bool whole(size_t bytes) { return bytes != 0 && bytes % granularity == 0; }

bool valid(const CUmemAllocationProp *properties) {
  return properties && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE && runtime().device(properties->location.id) &&
         (properties->requestedHandleTypes & ~(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC)) ==
             0;
}

// The GPU supports this handle type, but the program is not allowed to use it, as on a machine without IMEX channels or
// in a container without files.
bool may_not(const CUmemAllocationProp &properties) {
  const int types = properties.requestedHandleTypes;
  return ((types & CU_MEM_HANDLE_TYPE_FABRIC) && !runtime().fabric) ||
         ((types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) && !runtime().files);
}

CUresult add_handle(CUmemGenericAllocationHandle *handle, VirtualMemory::Owner owner) {
  const std::lock_guard lock(state().mutex);
  *handle = state().next_handle += 16;
  state().handles[*handle] = std::move(owner);
  return CUDA_SUCCESS;
}

VirtualMemory::Owner find_handle(CUmemGenericAllocationHandle handle) {
  const std::lock_guard lock(state().mutex);
  const auto found = state().handles.find(handle);
  return found == state().handles.end() ? nullptr : found->second;
}

void *address(CUdeviceptr pointer) { return reinterpret_cast<void *>(pointer); }

// Reserves aligned addresses without memory; nullptr means that none are left.
void *reserve_aligned(size_t size) {
  void *all = mmap(nullptr, size + granularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return nullptr;
  const auto first = reinterpret_cast<uintptr_t>(all);
  const uintptr_t begin = (first + granularity - 1) / granularity * granularity;
  if (begin != first) munmap(all, begin - first);
  const size_t rest = first + granularity - begin;
  if (rest) munmap(reinterpret_cast<void *>(begin + size), rest);
  return reinterpret_cast<void *>(begin);
}

// The caller must hold the mutex.
bool is_reserved(CUdeviceptr pointer, size_t size) {
  auto next = state().reservations.upper_bound(pointer);
  if (next == state().reservations.begin()) return false;
  --next;
  return pointer - next->first < next->second && size <= next->second - (pointer - next->first);
}

bool overlaps_mapping(CUdeviceptr pointer, size_t size) {
  for (const auto &[begin, owner] : state().mappings) {
    if (begin < pointer + size && pointer < begin + owner->size) return true;
  }
  return false;
}

// Visits the mappings if they fill the range exactly. Otherwise it visits nothing and returns false.
template <class Visit>
bool for_each_mapping(CUdeviceptr pointer, size_t size, Visit visit) {
  CUdeviceptr end = pointer;
  auto &mappings = state().mappings;
  for (auto at = mappings.find(pointer); at != mappings.end() && at->first == end && end < pointer + size; ++at) {
    end += at->second->size;
  }
  if (end != pointer + size) return false;
  for (auto at = mappings.find(pointer); at != mappings.end() && at->first < end;) {
    const auto present = at++;
    visit(present->first, *present->second);
  }
  return true;
}

}  // namespace

Physical::~Physical() { give_back(device, size); }

CUresult CUDAAPI memory_create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                               unsigned long long flags) {
  return driver_call("cuMemCreate", driver_no_capture, [&] {
    if (!handle || flags != 0 || !whole(size) || !valid(properties)) return CUDA_ERROR_INVALID_VALUE;
    if (may_not(*properties)) return CUDA_ERROR_NOT_PERMITTED;
    Device &device = *runtime().device(properties->location.id);
    if (!take(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    MemoryFile file(size);
    const int types = properties->requestedHandleTypes;
    if (file.number() >= 0) return add_handle(handle, std::make_shared<Physical>(device, std::move(file), size, types));
    give_back(device, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
  });
}

CUresult CUDAAPI memory_release(CUmemGenericAllocationHandle handle) {
  return driver_call("cuMemRelease", driver_no_capture, [&] {
    const std::lock_guard lock(state().mutex);
    return state().handles.erase(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

// Returns the handle of the memory that is mapped there. Memory of cudaMalloc has no handle.
CUresult CUDAAPI retain_handle(CUmemGenericAllocationHandle *handle, void *pointer) {
  return driver_call("cuMemRetainAllocationHandle", driver_no_capture, [&] {
    VirtualMemory::Owner owner;
    {
      const std::lock_guard lock(state().mutex);
      const auto at = reinterpret_cast<uintptr_t>(pointer);
      auto next = state().mappings.upper_bound(at);
      if (next != state().mappings.begin() && at - (--next)->first < next->second->size) owner = next->second;
    }
    if (!handle || !owner) return CUDA_ERROR_INVALID_VALUE;
    return add_handle(handle, std::move(owner));
  });
}

CUresult CUDAAPI address_reserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr,
                                 unsigned long long flags) {
  return driver_call("cuMemAddressReserve", driver_no_capture, [&] {
    if (!pointer || flags != 0 || !whole(size) || alignment > granularity) return CUDA_ERROR_INVALID_VALUE;
    void *begin = reserve_aligned(size);
    if (!begin) return CUDA_ERROR_OUT_OF_MEMORY;
    *pointer = reinterpret_cast<CUdeviceptr>(begin);
    runtime().memory.reserve(begin, size, runtime().current().index);
    const std::lock_guard lock(state().mutex);
    state().reservations[*pointer] = size;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI address_free(CUdeviceptr pointer, size_t size) {
  return driver_call("cuMemAddressFree", driver_no_capture, [&] {
    const std::lock_guard lock(state().mutex);
    const auto found = state().reservations.find(pointer);
    if (found == state().reservations.end() || found->second != size || overlaps_mapping(pointer, size)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    state().reservations.erase(found);
    runtime().memory.release(address(pointer));
    munmap(address(pointer), size);
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI memory_map(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                            unsigned long long flags) {
  return driver_call("cuMemMap", driver_no_capture, [&] {
    const VirtualMemory::Owner owner = find_handle(handle);
    if (!owner || offset != 0 || flags != 0 || size != owner->size) return CUDA_ERROR_INVALID_VALUE;
    const std::lock_guard lock(state().mutex);
    if (!is_reserved(pointer, size) || overlaps_mapping(pointer, size)) return CUDA_ERROR_INVALID_VALUE;
    if (mmap(address(pointer), size, PROT_NONE, MAP_SHARED | MAP_FIXED, owner->file.number(), 0) == MAP_FAILED) {
      return CUDA_ERROR_OUT_OF_MEMORY;
    }
    state().mappings[pointer] = owner;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI memory_unmap(CUdeviceptr pointer, size_t size) {
  return driver_call("cuMemUnmap", driver_no_capture, [&] {
    const std::lock_guard lock(state().mutex);
    const bool found = for_each_mapping(pointer, size, [](uintptr_t begin, const Physical &physical) {
      runtime().memory.unmap(address(begin), physical.size);
      mmap(address(begin), physical.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      state().mappings.erase(begin);
    });
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

// Before this call no access to the memory is allowed.
CUresult CUDAAPI memory_set_access(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *descriptions,
                                   size_t count) {
  return driver_call("cuMemSetAccess", driver_no_capture, [&] {
    if (!descriptions || count == 0) return CUDA_ERROR_INVALID_VALUE;
    uint32_t readers = 0;
    for (size_t index = 0; index < count; ++index) {
      const CUmemAccessDesc &access = descriptions[index];
      if (access.location.type != CU_MEM_LOCATION_TYPE_DEVICE || !runtime().device(access.location.id) ||
          access.flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
        return CUDA_ERROR_INVALID_VALUE;
      }
      readers |= 1u << access.location.id;
    }
    const std::lock_guard lock(state().mutex);
    const bool found = for_each_mapping(pointer, size, [&](uintptr_t begin, const Physical &physical) {
      mprotect(address(begin), physical.size, PROT_READ | PROT_WRITE);
      runtime().memory.map(address(begin), physical.size, physical.device.index, readers);
    });
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  });
}

CUresult CUDAAPI memory_get_access(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer) {
  return driver_call("cuMemGetAccess", driver_healthy, [&] {
    const Place place = runtime().memory.find(address(pointer), 1);
    if (!flags || !location || place.kind != Place::device || !place.inside || !runtime().device(location->id))
      return CUDA_ERROR_INVALID_VALUE;
    const bool allowed = place.readers >> location->id & 1;
    *flags = allowed ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI allocation_granularity(size_t *bytes, const CUmemAllocationProp *properties,
                                        CUmemAllocationGranularity_flags) {
  return driver_call("cuMemGetAllocationGranularity", driver_healthy, [&] {
    if (!bytes || !valid(properties)) return CUDA_ERROR_INVALID_VALUE;
    *bytes = granularity;
    return CUDA_SUCCESS;
  });
}

CUresult CUDAAPI export_handle(void *handle_out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                               unsigned long long flags) {
  return driver_call("cuMemExportToShareableHandle", driver_no_capture, [&] {
    const VirtualMemory::Owner owner = find_handle(handle);
    if (!owner || !handle_out || flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        (owner->handle_types & type) == 0) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    const int file = owner->file.exported();
    if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
    *static_cast<int *>(handle_out) = file;
    return CUDA_SUCCESS;
  });
}

// The caller keeps the file. The memory counts for the current device, because the file does not name its device.
CUresult CUDAAPI import_handle(CUmemGenericAllocationHandle *handle, void *handle_in, CUmemAllocationHandleType type) {
  return driver_call("cuMemImportFromShareableHandle", driver_no_capture, [&] {
    if (!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
    struct stat status {};
    const int given = static_cast<int>(reinterpret_cast<intptr_t>(handle_in));
    if (fstat(given, &status) != 0) return CUDA_ERROR_INVALID_VALUE;
    const auto size = static_cast<size_t>(status.st_size);
    Device &device = runtime().current();
    if (!take(device, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    MemoryFile file = MemoryFile::imported(given);
    if (file.number() >= 0) return add_handle(handle, std::make_shared<Physical>(device, std::move(file), size, type));
    give_back(device, size);
    return CUDA_ERROR_OPERATING_SYSTEM;
  });
}

}  // namespace simulated
