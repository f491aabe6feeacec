// SPDX-License-Identifier: Apache-2.0
// Which kind of device memory this GPU, driver and container can give.
#include "device/cuda/memory.h"

namespace fsdp::device::cuda {

MemoryPlan::MemoryPlan(const Core &core) {
  const QuietScope scope(core);
  const std::string what = format_text("GPU {}", core.index);
  core.check(core.driver.device_get(&device_, core.index), "cuDeviceGet", what);
  if (!attribute(core, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) {
    description_ = "cudaMalloc, since the GPU has no virtual memory management";
    return;
  }
  properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
  choose(core);
}

bool MemoryPlan::attribute(const Core &core, CUdevice_attribute which) const {
  int value = 0;
  core.check(core.driver.device_get_attribute(&value, which, device_), "cuDeviceGetAttribute", "kinds of memory");
  return value != 0;
}

// What a container or driver does not allow shows only when it is tried.
void MemoryPlan::choose(const Core &core) {
  const bool exportable = attribute(core, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  const bool rdma = attribute(core, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  properties_.requestedHandleTypes = exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
  properties_.allocFlags.gpuDirectRDMACapable = rdma ? 1 : 0;
  core.check(
      core.driver.mem_get_allocation_granularity(&granularity_, &properties_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
      "cuMemGetAllocationGranularity", "device memory");
  const CUresult full = probe(core);
  if (full == CUDA_SUCCESS) {
    virtual_ = true;
    description_ = format_text("cuMemCreate{}{}", exportable ? ", exportable" : "", rdma ? ", GPUDirect RDMA" : "");
    return;
  }
  const auto reason = describe(runtime_error(full), "cuMemCreate", "trying it");
  properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
  properties_.allocFlags.gpuDirectRDMACapable = 0;
  virtual_ = probe(core) == CUDA_SUCCESS;
  description_ = format_text("{}, since {}", virtual_ ? "cuMemCreate, not exportable" : "cudaMalloc", reason);
}

CUresult MemoryPlan::probe(const Core &core) const {
  CUmemGenericAllocationHandle handle = 0;
  const CUresult created = core.driver.mem_create(&handle, granularity_, &properties_, 0);
  return created == CUDA_SUCCESS ? core.driver.mem_release(handle) : created;
}

}  // namespace fsdp::device::cuda
