// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/cuda.h"

#include <cuda_runtime_api.h>

#include <cstring>

#include "base/error.h"

namespace fsdp::transport::nccl {
namespace {

void check(cudaError_t code, const char *call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  throw Error(FSDP_SYSTEM, format_text("{} for NCCL: {} ({})", call, cudaGetErrorString(code), cudaGetErrorName(code)),
              -1, FSDP_ORIGIN_CUDA, code);
}

}  // namespace

GpuIdentity gpu_identity(int32_t index) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  GpuIdentity identity{{}, properties.pciDomainID, properties.pciBusID, properties.pciDeviceID};
  static_assert(sizeof properties.uuid == sizeof identity.number);
  std::memcpy(identity.number.data(), &properties.uuid, identity.number.size());
  return identity;
}

std::string GpuIdentity::place() const { return format_text("{:04x}:{:02x}:{:02x}", domain, bus, slot); }

int32_t gpu_generation(int32_t index) {
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "cudaDeviceGetAttribute");
  return major;
}

void make_current(int32_t index) noexcept { (void)cudaSetDevice(index); }

void allow_calls_during_captures() noexcept {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

}  // namespace fsdp::transport::nccl
