// SPDX-License-Identifier: Apache-2.0

#include "device/cuda/driver.h"

namespace fsdp::device::cuda {

fsdp_status status_of(cudaError_t code) noexcept {
  if (code >= cudaErrorStreamCaptureUnsupported && code <= cudaErrorStreamCaptureWrongThread) return FSDP_INVALID_STATE;
  switch (code) {
    case cudaErrorMemoryAllocation: return FSDP_OUT_OF_MEMORY;
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorStubLibrary:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorNotSupported:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice: return FSDP_UNSUPPORTED;
    default: return FSDP_SYSTEM;
  }
}

// Errors whose names CUDA 12.8 may lack are listed by number, because the library can also be built with CUDA 12.8.
bool is_sticky(cudaError_t code) noexcept {
  switch (static_cast<int>(code)) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case 226:  // cudaErrorContained
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorContextIsDestroyed:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case 721:  // cudaErrorTensorMemoryLeak
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorUnknown: return true;
    default: return false;
  }
}

std::string describe(cudaError_t code, const char *call, std::string_view what) {
  return format_text("{} failed with {} ({}, {}): {}", call, cudaGetErrorName(code), static_cast<int>(code),
                     cudaGetErrorString(code), what);
}

namespace {

Error make_error(cudaError_t code, const char *call, std::string_view what) {
  std::string text = describe(code, call, what);
  if (is_sticky(code))
    text +=
        "; earlier work on the GPU, of the library or of the program, may have caused it, and the process can use the "
        "GPU no more";
  return {status_of(code), std::move(text), -1, FSDP_ORIGIN_CUDA, static_cast<int64_t>(code)};
}

}  // namespace

// CUDA stores the error for the thread's next cudaGetLastError. It is cleared here, because the program must not find
// an error that the library reports.
void Checker::raise(cudaError_t code, const char *call, std::string_view what) const {
  cudaGetLastError();
  const Error error = make_error(code, call, what);
  if (is_sticky(code)) failure_.set(error);
  throw error;
}

void Checker::note(cudaError_t code, const char *call, std::string_view what) const noexcept {
  if (code == cudaSuccess) return;
  cudaGetLastError();
  if (!is_sticky(code)) return;
  try {
    failure_.set(make_error(code, call, what));
  } catch (...) {
    failure_.set(Error(FSDP_SYSTEM, {}, -1, FSDP_ORIGIN_CUDA, static_cast<int64_t>(code)));
  }
}

namespace {

// `version` is the version of CUDA in which the function got this signature.
template <class Function>
void find(Function &function, const char *symbol, unsigned version, const Checker &check) {
  void *address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  // These functions also treat NULL as the legacy stream, whatever options the program was compiled with.
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
