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
  const DeviceScope scope(core);
  const RelaxedScope relaxed;
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
    release();
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
  CUmemAccessDesc access{};
  access.location = plan.properties().location;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  core_.check(core_.driver.mem_set_access(address_of(data_), reserved_bytes_, &access, 1), "cuMemSetAccess", what);
}

DeviceMemory::~DeviceMemory() {
  if (data_ && core_.drain()) release();
}

void DeviceMemory::release() noexcept {
  if (!data_) return;
  const char *what = "memory of the GPU";
  if (!virtual_) return core_.check.note(cudaFree(data_), "cudaFree", what);
  if (mapped_)
    core_.check.note(runtime_error(core_.driver.mem_unmap(address_of(data_), reserved_bytes_)), "cuMemUnmap", what);
  core_.check.note(runtime_error(core_.driver.mem_address_free(address_of(data_), reserved_bytes_)), "cuMemAddressFree",
                   what);
}

PinnedMemory::PinnedMemory(Core &core, uint64_t bytes, const char *what) : core_(core), bytes_(bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(core);
  const RelaxedScope relaxed;
  core.check(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc",
             format_text("{} bytes of page-locked memory for {}", bytes, what));
  std::memset(data_, 0, bytes);
}

PinnedMemory::~PinnedMemory() {
  if (data_ && core_.drain()) core_.check.note(cudaFreeHost(data_), "cudaFreeHost", "page-locked memory");
}

}  // namespace fsdp::device::cuda
