// SPDX-License-Identifier: Apache-2.0
// The driver's own functions, found at run time through the CUDA runtime, because the library is not linked to libcuda.
#pragma once

#include <string_view>

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "base/failure.h"

namespace fsdp::device::cuda {

// Turns results of CUDA's functions into errors of the library. The result of every call of CUDA is checked here.

// Errors of the driver have the same numbers as errors of the runtime.
inline cudaError_t runtime_error(CUresult code) { return static_cast<cudaError_t>(code); }

fsdp_status status_of(cudaError_t code) noexcept;
// Is the error sticky? After a sticky error the process can no longer use the GPU: every later call returns the error
// again.
bool is_sticky(cudaError_t code) noexcept;
// "cudaMemcpyAsync failed with cudaErrorInvalidValue (1, invalid argument): copy on stream 'gather'"
std::string describe(cudaError_t code, const char *call, std::string_view what);

// Throws the error that a call returned, if there is one. A sticky error also fails the context, because the call that
// returns it is rarely the call that caused it.
class Checker {
 public:
  explicit Checker(Failure &failure) : failure_(failure) {}
  // `call` is the name of CUDA's function or of the library's kernel; `what` is the purpose of the call.
  void operator()(cudaError_t code, const char *call, std::string_view what) const {
    if (code != cudaSuccess) raise(code, call, what);
  }
  void operator()(CUresult code, const char *call, std::string_view what) const {
    (*this)(runtime_error(code), call, what);
  }
  // For code that must not throw: a sticky error fails the context, and other errors are dropped.
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
  // Throws UNSUPPORTED, which names the function, if the driver lacks one of them.
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
