// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/remnant.h"

#include "device/cuda/core.h"

namespace fsdp::device::cuda {
namespace {

struct CallOutcome {
  const char *call;
  cudaError_t code;
};

CallOutcome free_addresses(const Remnant &remnant, const Driver &driver) {
  const auto address = reinterpret_cast<CUdeviceptr>(remnant.handle);
  return {"cuMemAddressFree", runtime_error(driver.mem_address_free(address, remnant.bytes))};
}

// Addresses that stay reserved are no memory: once it is unmapped there is nothing to try again.
CallOutcome unmap(const Remnant &remnant, const Core &core) {
  const auto address = reinterpret_cast<CUdeviceptr>(remnant.handle);
  const cudaError_t unmapped = runtime_error(core.driver.mem_unmap(address, remnant.bytes));
  if (unmapped != cudaSuccess) return {"cuMemUnmap", unmapped};
  const CallOutcome freed = free_addresses(remnant, core.driver);
  core.check.note(freed.code, freed.call, "addresses of the GPU's memory");
  return {freed.call, cudaSuccess};
}

CallOutcome give_back(const Remnant &remnant, const Core &core) {
  void *const handle = remnant.handle;
  switch (remnant.kind) {
    case Remnant::memory: return {"cudaFree", cudaFree(handle)};
    case Remnant::mapped_memory: return unmap(remnant, core);
    case Remnant::addresses: return free_addresses(remnant, core.driver);
    case Remnant::pinned_memory: return {"cudaFreeHost", cudaFreeHost(handle)};
    case Remnant::registered_memory: return {"cudaHostUnregister", cudaHostUnregister(handle)};
    case Remnant::stream: return {"cudaStreamDestroy", cudaStreamDestroy(static_cast<cudaStream_t>(handle))};
    case Remnant::event: return {"cudaEventDestroy", core.destroy_event(static_cast<cudaEvent_t>(handle))};
  }
  return {"nothing", cudaErrorInvalidValue};
}

}  // namespace

cudaError_t end(const Remnant &remnant, const Core &core) noexcept {
  const QuietScope scope(core, std::nothrow);
  if (!scope) return cudaErrorNotReady;
  const CallOutcome outcome = give_back(remnant, core);
  core.check.note(outcome.code, outcome.call, "what the library had of the GPU");
  return outcome.code;
}

}  // namespace fsdp::device::cuda
