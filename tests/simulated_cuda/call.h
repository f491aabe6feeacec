// SPDX-License-Identifier: Apache-2.0
// Every CUDA function begins and ends with these steps: they count the call, fail it if a test wants that, return the
// failure of the device, and remember the error for cudaGetLastError.
#pragma once

#include <cuda.h>

#include <exception>
#include <new>

#include "simulated_cuda/runtime.h"

namespace simulated {

// States what must hold before a function may go on.
struct Need {
  bool device = true;            // needs a device that has not failed
  bool outside_capture = false;  // is "potentially unsafe" in the sense of cudaThreadExchangeStreamCaptureMode
  bool context = true;           // needs a current context: the runtime makes one current, the driver does not
  bool lost = false;             // accepts a device that has failed
};
inline constexpr Need healthy_device{};
inline constexpr Need nothing{false, false, false};
inline constexpr Need no_capture{true, true};
inline constexpr Need any_device{true, false, true, true};
inline constexpr Need no_context{true, false, false};  // the function names this device
inline constexpr Need driver_healthy{true, false, false};
inline constexpr Need driver_no_capture{true, true, false};

// Returns cudaSuccess if the function may go on.
cudaError_t admit(const char *name, Need need);

template <class Body>
cudaError_t guarded(const char *name, Need need, Body &body) {
  try {
    if (const cudaError_t error = admit(name, need)) return error;
    return body();
  } catch (const std::bad_alloc &) {
    return cudaErrorMemoryAllocation;
  } catch (const std::exception &) {
    return cudaErrorOperatingSystem;
  }
}

template <class Body>
cudaError_t call(const char *name, Need need, Body body) {
  const cudaError_t error = guarded(name, need, body);
  if (error != cudaSuccess) this_thread().last = error;
  return error;
}

// Driver functions return CUresult, which has the numbers of cudaError_t for errors that both have. They do not change
// cudaGetLastError.
template <class Body>
CUresult driver_call(const char *name, Need need, Body body) {
  auto inner = [&] { return static_cast<cudaError_t>(body()); };
  return static_cast<CUresult>(guarded(name, need, inner));
}

}  // namespace simulated
