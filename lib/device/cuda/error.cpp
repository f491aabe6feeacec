// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/error.h"

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

// By number where CUDA 12.8, which the library can be built with too, may lack the name.
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

// CUDA keeps the error for the thread's next cudaGetLastError: the program must not find there what the library
// reports.
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

}  // namespace fsdp::device::cuda
