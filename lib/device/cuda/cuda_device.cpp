// SPDX-License-Identifier: Apache-2.0

#include "device/cuda/cuda_device.h"

#include <array>
#include <cstdio>

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
  const ObjectScope scope(core_);
  core_.check(cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped), "cudaHostRegister",
              format_text("{} bytes of the host's memory at {}", bytes, data));
}

bool CudaDevice::unregister_host(void *data, uint64_t bytes) noexcept {
  const Remnant remnant{Remnant::registered_memory, data, bytes};
  if (core_.drain()) return core_.give_back_now(remnant);
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

namespace fsdp::device {

// Chooses the GPU of a context, and checks whether the library can use it.

namespace {

using namespace cuda;

constexpr int least_major = 8;  // compute capability of the oldest GPUs for which the kernels are compiled

std::string version_text(int version) { return format_text("{}.{}", version / 1000, version % 1000 / 10); }

// Returns a text such as "a driver for CUDA 13.0", or "no driver".
std::string driver_text() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess || version == 0) return "no driver";
  return "a driver for CUDA " + version_text(version);
}

[[noreturn]] void fail_unusable(cudaError_t code, const char *call) {
  cudaGetLastError();
  throw Error(FSDP_UNSUPPORTED,
              format_text("FSDP_DEVICE_CUDA: no GPU can be used: {}",
                          describe(code, call,
                                   format_text("the library has CUDA {}, and there is {}", version_text(CUDART_VERSION),
                                               driver_text()))),
              -1, FSDP_ORIGIN_CUDA, code);
}

int count_gpus() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess && count == 0) fail_unusable(cudaErrorNoDevice, "cudaGetDeviceCount");
  if (code != cudaSuccess) fail_unusable(code, "cudaGetDeviceCount");
  return count;
}

int choose(int32_t index, const Checker &check) {
  const int count = count_gpus();
  int chosen = index;
  if (index == -1) check(cudaGetDevice(&chosen), "cudaGetDevice", "the calling thread's current GPU");
  if (chosen < 0 || chosen >= count)
    fail(FSDP_INVALID_ARGUMENT, "FSDP_DEVICE_CUDA: GPU {} is outside [0, {}), as CUDA counts them in this process",
         index, count);
  return chosen;
}

int attribute(int gpu, cudaDeviceAttr which, const Checker &check) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, gpu), "cudaDeviceGetAttribute", format_text("what GPU {} can do", gpu));
  return value;
}

void check_capability(int gpu, const Checker &check) {
  const int major = attribute(gpu, cudaDevAttrComputeCapabilityMajor, check);
  const int minor = attribute(gpu, cudaDevAttrComputeCapabilityMinor, check);
  if (major < least_major)
    fail(FSDP_UNSUPPORTED, "FSDP_DEVICE_CUDA: GPU {} has compute capability {}.{}, and the library needs {}.0 or newer",
         gpu, major, minor, least_major);
  if (!attribute(gpu, cudaDevAttrUnifiedAddressing, check))
    fail(FSDP_UNSUPPORTED, "FSDP_DEVICE_CUDA: GPU {} and the host do not share one address space (unified addressing)",
         gpu);
}

// Checks that streams can write words of the host and wait for them: see cuda/event.h and cuda/lane.h.
void check_memory_operations(int gpu, const Checker &check) {
  const Driver driver(check);
  CUdevice device = 0;
  int value = 0;
  check(driver.device_get(&device, gpu), "cuDeviceGet", format_text("GPU {}", gpu));
  check(driver.device_get_attribute(&value, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device),
        "cuDeviceGetAttribute", "memory operations of streams");
  if (!value)
    fail(FSDP_UNSUPPORTED,
         "FSDP_DEVICE_CUDA: streams of GPU {} cannot write and wait for memory (stream memory operations)", gpu);
}

}  // namespace

std::unique_ptr<Device> create_cuda_device(int32_t index, const Options &options, const Waiter &waiter,
                                           Failure &failure) {
  const Checker check(failure);
  const int gpu = choose(index, check);
  check_capability(gpu, check);
  check_memory_operations(gpu, check);
  return std::make_unique<CudaDevice>(gpu, options, waiter, failure);
}

const char *cuda_description() noexcept {
  static const auto text = [] {
    std::array<char, 96> characters{};
    std::snprintf(characters.data(), characters.size(), "toolkit %d.%d (" FSDP_CUDA_ARCHITECTURES ")",
                  CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    return characters;
  }();
  return text.data();
}

std::string cuda_at_run_time() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess) return format_text("{}, {} GPU{}", driver_text(), count, count == 1 ? "" : "s");
  cudaGetLastError();
  return format_text("{}, no GPU ({})", driver_text(), cudaGetErrorName(code));
}

}  // namespace fsdp::device
