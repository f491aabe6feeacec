// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/memory.h"

#include <cstring>

namespace fsdp::device::cuda {
namespace {

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

CUdeviceptr address_of(const std::byte *data) { return reinterpret_cast<CUdeviceptr>(data); }

}  // namespace

DeviceMemory::DeviceMemory(Core &core, const MemoryPlan &plan, uint64_t bytes, const char *what)
    : core_(core), virtual_(plan.is_virtual()), bytes_(bytes) {
  if (bytes == 0) return;
  const QuietScope scope(core);
  const std::string purpose = format_text("{} bytes on GPU {} for {}", bytes, core.index, what);
  if (!virtual_) {
    void *data = nullptr;
    core.check(cudaMalloc(&data, bytes), "cudaMalloc", purpose);
    data_ = static_cast<std::byte *>(data);
    return;
  }
  try {
    reserve(plan, purpose);
    map(plan, purpose);
  } catch (...) {
    core.end(remnant());
    throw;
  }
}

void DeviceMemory::reserve(const MemoryPlan &plan, const std::string &what) {
  const uint64_t bytes = round_up(bytes_, plan.granularity());
  CUdeviceptr address = 0;
  core_.check(core_.driver.mem_address_reserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve", what);
  data_ = reinterpret_cast<std::byte *>(address);
  reserved_bytes_ = bytes;
}

// The mapping keeps the memory alive: its handle is not needed further.
void DeviceMemory::map(const MemoryPlan &plan, const std::string &what) {
  CUmemGenericAllocationHandle handle = 0;
  core_.check(core_.driver.mem_create(&handle, reserved_bytes_, &plan.properties(), 0), "cuMemCreate", what);
  const CUresult mapped = core_.driver.mem_map(address_of(data_), reserved_bytes_, 0, handle, 0);
  const CUresult released = core_.driver.mem_release(handle);
  mapped_ = mapped == CUDA_SUCCESS;
  core_.check(mapped, "cuMemMap", what);
  core_.check(released, "cuMemRelease", what);
  core_.check(
      core_.driver.mem_set_access(address_of(data_), reserved_bytes_, plan.accesses().data(), plan.accesses().size()),
      "cuMemSetAccess", what);
}

DeviceMemory::~DeviceMemory() { core_.give_back(remnant()); }

Remnant DeviceMemory::remnant() const noexcept {
  if (!virtual_) return {Remnant::memory, data_, bytes_};
  return {mapped_ ? Remnant::mapped_memory : Remnant::addresses, data_, reserved_bytes_};
}

PinnedMemory::PinnedMemory(Core &core, uint64_t bytes, const char *what) : core_(core), bytes_(bytes) {
  if (bytes == 0) return;
  const QuietScope scope(core);
  core.check(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc",
             format_text("{} bytes of page-locked memory for {}", bytes, what));
  std::memset(data_, 0, bytes);
}

PinnedMemory::~PinnedMemory() { core_.give_back({Remnant::pinned_memory, data_, bytes_}); }

}  // namespace fsdp::device::cuda
