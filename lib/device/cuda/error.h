// SPDX-License-Identifier: Apache-2.0
// What CUDA's functions return, as errors of the library. Every call of the library into CUDA goes through here.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string_view>

#include "base/failure.h"

namespace fsdp::device::cuda {

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
