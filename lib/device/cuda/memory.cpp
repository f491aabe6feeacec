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
  const ObjectScope scope(core);
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
    core.give_back_now(remnant());
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

// The handle is no longer needed, because the mapping keeps the memory alive.
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
  const ObjectScope scope(core);
  core.check(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc",
             format_text("{} bytes of page-locked memory for {}", bytes, what));
  std::memset(data_, 0, bytes);
}

PinnedMemory::~PinnedMemory() { core_.give_back({Remnant::pinned_memory, data_, bytes_}); }

// Finds the kind of device memory that this GPU, driver and container allow.

namespace {

CUmemAccessDesc access_of(CUdevice device) {
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return access;
}

}  // namespace

MemoryPlan::MemoryPlan(Core &core) {
  const ObjectScope scope(core);
  const std::string what = format_text("GPU {}", core.index);
  core.check(core.driver.device_get(&device_, core.index), "cuDeviceGet", what);
  if (!attribute(core, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
    description_ = "cudaMalloc, since the GPU has no virtual memory management";
    return;
  }
  properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
  accesses_ = {access_of(device_)};
  choose(core);
  if (virtual_) choose_readers(core);
}

// If the driver does not know the attribute, it does not support the feature.
bool MemoryPlan::attribute(const Core &core, CUdevice_attribute which) const {
  int value = 0;
  const CUresult answer = core.driver.device_get_attribute(&value, which, device_);
  if (answer == CUDA_ERROR_INVALID_VALUE && which == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED) return false;
  core.check(answer, "cuDeviceGetAttribute", "kinds of memory");
  return value != 0;
}

// Only a trial shows whether the container and the driver allow a kind of memory. Between hosts that share NVLink
// (NVL72), NCCL can register only memory with handles for the fabric, which needs IMEX channels.
void MemoryPlan::choose(const Core &core) {
  const bool exportable = attribute(core, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  const bool fabric = attribute(core, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED);
  const bool rdma = attribute(core, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  const int files = exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  const std::string extras = rdma ? ", GPUDirect RDMA" : "";
  const auto reason = [](CUresult code) { return describe(runtime_error(code), "cuMemCreate", "trying it"); };
  virtual_ = true;
  CUresult answer = CUDA_ERROR_NOT_SUPPORTED;
  if (fabric && (answer = attempt(core, files | CU_MEM_HANDLE_TYPE_FABRIC, rdma)) == CUDA_SUCCESS) {
    description_ = format_text("cuMemCreate, exportable, also over the fabric{}", extras);
    return;
  }
  const std::string without = fabric ? format_text("; not over the fabric, since {}", reason(answer)) : "";
  if ((answer = attempt(core, files, rdma)) == CUDA_SUCCESS) {
    description_ = format_text("cuMemCreate{}{}{}", exportable ? ", exportable" : "", extras, without);
    return;
  }
  virtual_ = attempt(core, CU_MEM_HANDLE_TYPE_NONE, false) == CUDA_SUCCESS;
  description_ = format_text("{}, since {}", virtual_ ? "cuMemCreate, not exportable" : "cudaMalloc", reason(answer));
}

CUresult MemoryPlan::attempt(const Core &core, int handle_types, bool rdma) {
  properties_.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(handle_types);
  properties_.allocFlags.gpuDirectRDMACapable = rdma ? 1 : 0;
  core.check(
      core.driver.mem_get_allocation_granularity(&granularity_, &properties_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
      "cuMemGetAllocationGranularity", "device memory");
  CUmemGenericAllocationHandle handle = 0;
  const CUresult created = core.driver.mem_create(&handle, granularity_, &properties_, 0);
  return created == CUDA_SUCCESS ? core.driver.mem_release(handle) : created;
}

// Gives access to the process's other GPUs, for ranks that are threads of one process. NCCL before 2.24 accesses the
// memory of all these ranks by its address, which faults on a GPU without access.
void MemoryPlan::choose_readers(Core &core) {
  const std::string what = format_text("which GPUs reach the memory of GPU {}", core.index);
  int count = 0;
  core.check(cudaGetDeviceCount(&count), "cudaGetDeviceCount", what);
  for (int peer = 0; peer < count; ++peer) {
    int reaches = 0;
    if (peer == core.index) continue;
    core.check(cudaDeviceCanAccessPeer(&reaches, peer, core.index), "cudaDeviceCanAccessPeer", what);
    CUdevice device = 0;
    core.check(core.driver.device_get(&device, peer), "cuDeviceGet", what);
    if (reaches) accesses_.push_back(access_of(device));
  }
  if (accesses_.size() == 1) return;
  try {
    const DeviceMemory trial(core, *this, granularity_, "a trial of which GPUs reach it");
  } catch (const Error &error) {
    core.failure.check();
    accesses_.resize(1);
    description_ += format_text("; for this GPU alone, since {}", error.message);
  }
}

}  // namespace fsdp::device::cuda
