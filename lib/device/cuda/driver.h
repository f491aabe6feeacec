// SPDX-License-Identifier: Apache-2.0
// The driver's own functions, found at run time through the CUDA runtime: the library links neither libcuda nor a stub
// of it.
#pragma once

#include <cudaTypedefs.h>

#include "device/cuda/error.h"

#if CUDART_VERSION < 12050
#error "libfsdp needs the headers of CUDA 12.5 or newer (cudaGetDriverEntryPointByVersion)"
#endif

namespace fsdp::device::cuda {

struct Driver {
  // UNSUPPORTED, naming the function, if the driver lacks one.
  explicit Driver(const Checker &check);

  PFN_cuDeviceGet_v2000 device_get;
  PFN_cuDeviceGetAttribute_v2000 device_get_attribute;
  PFN_cuDevicePrimaryCtxRetain_v7000 primary_context_retain;
  PFN_cuDevicePrimaryCtxRelease_v11000 primary_context_release;
  PFN_cuCtxGetCurrent_v4000 context_get_current;
  PFN_cuCtxPushCurrent_v4000 context_push;
  PFN_cuCtxPopCurrent_v4000 context_pop;
  PFN_cuStreamWaitValue32_v11070 stream_wait_value;
  PFN_cuStreamWriteValue32_v11070 stream_write_value;
  PFN_cuMemGetAllocationGranularity_v10020 mem_get_allocation_granularity;
  PFN_cuMemCreate_v10020 mem_create;
  PFN_cuMemRelease_v10020 mem_release;
  PFN_cuMemAddressReserve_v10020 mem_address_reserve;
  PFN_cuMemAddressFree_v10020 mem_address_free;
  PFN_cuMemMap_v10020 mem_map;
  PFN_cuMemUnmap_v10020 mem_unmap;
  PFN_cuMemSetAccess_v10020 mem_set_access;
};

}  // namespace fsdp::device::cuda
