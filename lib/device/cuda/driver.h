// SPDX-License-Identifier: Apache-2.0
// The driver's own functions, found at run time through the CUDA runtime: the library links neither libcuda nor a stub
// of it.
#pragma once

#include <string_view>

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "base/failure.h"

namespace fsdp::device::cuda {

// What CUDA's functions return, as errors of the library. Every call of the library into CUDA goes through here.

// CUDA's errors of the driver have the numbers of those of the runtime.
inline cudaError_t runtime_error(CUresult code) { return static_cast<cudaError_t>(code); }

fsdp_status status_of(cudaError_t code) noexcept;
// After one of these the process can use the GPU no more: whatever is called returns it again.
bool is_sticky(cudaError_t code) noexcept;
// "cudaMemcpyAsync failed with cudaErrorInvalidValue (1, invalid argument): copy on stream 'gather'"
std::string describe(cudaError_t code, const char *call, std::string_view what);

// Throws what a call returned, unless that is success. What is sticky fails the context too: the call that meets it is
// rarely the one that caused it.
class Checker {
 public:
  explicit Checker(Failure &failure) : failure_(failure) {}
  // call: CUDA's function or the library's kernel; what: for what it was called.
  void operator()(cudaError_t code, const char *call, std::string_view what) const {
    if (code != cudaSuccess) raise(code, call, what);
  }
  void operator()(CUresult code, const char *call, std::string_view what) const {
    (*this)(runtime_error(code), call, what);
  }
  // Where nothing may be thrown: what is sticky fails the context, the rest is dropped.
  void note(cudaError_t code, const char *call, std::string_view what) const noexcept;

 private:
  [[noreturn]] void raise(cudaError_t code, const char *call, std::string_view what) const;

  Failure &failure_;
};

}  // namespace fsdp::device::cuda

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
