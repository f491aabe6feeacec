// SPDX-License-Identifier: Apache-2.0
#include "device/cuda/cuda_device.h"

#include "device/cuda/kernels.h"
#include "device/cuda/lane.h"
#include "device/cuda/stream.h"

namespace fsdp::device::cuda {

CudaDevice::CudaDevice(int index, const Options &options, const Waiter &waiter, Failure &failure)
    : core_(index, options, waiter, failure),
      plan_(core_),
      callers_(core_),
      calling_thread_(core_, std::make_unique<device::HostCallerStream>(waiter), false),
      transfer_(core_, callers_) {
  transfer_.load_kernels();
}

std::unique_ptr<Stream> CudaDevice::create_stream(const std::string &name) {
  return std::make_unique<LibraryStream>(core_, name);
}

std::unique_ptr<Event> CudaDevice::create_event() { return std::make_unique<CudaEvent>(core_); }

std::unique_ptr<Memory> CudaDevice::allocate(uint64_t bytes, const char *what) {
  count_allocation(bytes, what);
  auto memory = std::make_unique<DeviceMemory>(core_, plan_, bytes, what);
  transfer_.clear(memory->data(), bytes);
  return memory;
}

std::unique_ptr<Memory> CudaDevice::allocate_host(uint64_t bytes, const char *what) {
  count_allocation(bytes, what);
  return std::make_unique<PinnedMemory>(core_, bytes, what);
}

Stream &CudaDevice::caller_stream(fsdp_stream stream) { return callers_.at(stream); }

std::unique_ptr<HostLane> CudaDevice::create_host_lane(const std::string &name) {
  std::lock_guard lock(mutex_);
  progress_.push_back(std::make_unique<Progress>(name));
  return std::make_unique<CudaLane>(core_, name, *progress_.back());
}

void CudaDevice::register_host(void *data, uint64_t bytes) {
  const QuietScope scope(core_);
  core_.check(cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped), "cudaHostRegister",
              format_text("{} bytes of the host's memory at {}", bytes, data));
}

bool CudaDevice::unregister_host(void *data, uint64_t bytes) noexcept {
  const Remnant remnant{Remnant::registered_memory, data, bytes};
  if (core_.drain()) return core_.end(remnant);
  core_.keep(remnant);
  return false;
}

void CudaDevice::count_allocation(uint64_t bytes, const char *what) {
  const uint64_t count = allocations_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (count == core_.options.failed_allocation)
    fail(FSDP_OUT_OF_MEMORY, "{}: allocation {} of {} bytes fails because debug_failed_allocation says so", what, count,
         bytes);
}

std::string CudaDevice::description() const {
  cudaDeviceProp properties{};
  const DeviceScope scope(core_);
  core_.check(cudaGetDeviceProperties(&properties, core_.index), "cudaGetDeviceProperties", "the log");
  return format_text("GPU {} ({}, compute capability {}.{}, {} MiB); device memory by {}", core_.index, properties.name,
                     properties.major, properties.minor, properties.totalGlobalMem >> 20, plan_.description());
}

}  // namespace fsdp::device::cuda
