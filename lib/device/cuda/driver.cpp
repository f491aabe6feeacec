// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/driver.h"

namespace fsdp::device::cuda {
namespace {

// version: that of CUDA in which the function got the form that is wanted.
template <class Function>
void find(Function &function, const char *symbol, unsigned version, const Checker &check) {
  void *address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  // NULL is the legacy stream there too, whatever the program was compiled for.
  check(cudaGetDriverEntryPointByVersion(symbol, &address, version, cudaEnableLegacyStream, &found),
        "cudaGetDriverEntryPointByVersion", symbol);
  if (found != cudaDriverEntryPointSuccess || !address)
    fail(FSDP_UNSUPPORTED, "the NVIDIA driver has no {} as of CUDA {}.{} (it answers {})", symbol, version / 1000,
         version % 1000 / 10, static_cast<int>(found));
  function = reinterpret_cast<Function>(address);
}

}  // namespace

Driver::Driver(const Checker &check) {
  find(device_get, "cuDeviceGet", 2000, check);
  find(device_get_attribute, "cuDeviceGetAttribute", 2000, check);
  find(primary_context_retain, "cuDevicePrimaryCtxRetain", 7000, check);
  find(primary_context_release, "cuDevicePrimaryCtxRelease", 11000, check);
  find(context_get_current, "cuCtxGetCurrent", 4000, check);
  find(context_push, "cuCtxPushCurrent", 4000, check);
  find(context_pop, "cuCtxPopCurrent", 4000, check);
  find(stream_wait_value, "cuStreamWaitValue32", 11070, check);
  find(stream_write_value, "cuStreamWriteValue32", 11070, check);
  find(mem_get_allocation_granularity, "cuMemGetAllocationGranularity", 10020, check);
  find(mem_create, "cuMemCreate", 10020, check);
  find(mem_release, "cuMemRelease", 10020, check);
  find(mem_address_reserve, "cuMemAddressReserve", 10020, check);
  find(mem_address_free, "cuMemAddressFree", 10020, check);
  find(mem_map, "cuMemMap", 10020, check);
  find(mem_unmap, "cuMemUnmap", 10020, check);
  find(mem_set_access, "cuMemSetAccess", 10020, check);
}

}  // namespace fsdp::device::cuda
