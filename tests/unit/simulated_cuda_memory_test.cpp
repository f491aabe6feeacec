// SPDX-License-Identifier: Apache-2.0
// Tests memory, devices and failures of the CUDA runtime over host threads.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "simulated_cuda/environment.h"
#include "simulated_cuda_fixture.h"

namespace {

using simulated::enqueue;
using simulated::Hold;

TEST_F(SimulatedCuda, MemoryIsWhatItsAddressSays) {
  int *device = device_ints(4), *pinned = pinned_ints(4);
  std::vector<int> plain(1024), registered(1024);
  EXPECT_CUDA(cudaSuccess, cudaHostRegister(registered.data(), 4096, cudaHostRegisterPortable));
  EXPECT_CUDA(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(registered.data() + 1, 8, 0));
  cudaPointerAttributes attributes{};
  const auto type_of = [&](const void *pointer) {
    EXPECT_CUDA(cudaSuccess, cudaPointerGetAttributes(&attributes, pointer));
    return attributes.type;
  };
  EXPECT_EQ(type_of(device + 3), cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 0);
  EXPECT_EQ(type_of(pinned), cudaMemoryTypeHost);
  EXPECT_EQ(type_of(registered.data()), cudaMemoryTypeHost);
  EXPECT_EQ(type_of(plain.data()), cudaMemoryTypeUnregistered);
  EXPECT_TRUE(simulated::is_device(device, 16));
  EXPECT_FALSE(simulated::is_device(device, 17));
  EXPECT_TRUE(simulated::is_pinned(registered.data(), 4096));
  EXPECT_CUDA(cudaSuccess, cudaHostUnregister(registered.data()));
  EXPECT_CUDA(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(registered.data()));
  EXPECT_FALSE(simulated::is_pinned(registered.data()));
}

TEST_F(SimulatedCuda, CopiesOutsideOfMemoryAreRefused) {
  const cudaStream_t s = stream();
  int *device = device_ints(4), *pinned = pinned_ints(8);
  EXPECT_CUDA(cudaErrorInvalidValue, cudaMemcpyAsync(device, pinned, 20, cudaMemcpyHostToDevice, s));
  EXPECT_CUDA(cudaErrorInvalidValue, cudaMemcpyAsync(device, pinned + 6, 16, cudaMemcpyHostToDevice, s));
  EXPECT_CUDA(cudaErrorInvalidMemcpyDirection, cudaMemcpyAsync(pinned, device, 4, cudaMemcpyHostToHost, s));
  EXPECT_CUDA(cudaErrorInvalidValue, cudaMemsetAsync(device + 1, 0, 16, s));
  EXPECT_CUDA(cudaSuccess, cudaFree(device));
  EXPECT_CUDA(cudaErrorInvalidValue, cudaMemcpyAsync(device, pinned, 4, cudaMemcpyDefault, s));
  EXPECT_CUDA(cudaErrorInvalidValue, cudaFree(device));
}

TEST_F(SimulatedCuda, StrictlyAFreeUnderACopyIsAnIllegalAccess) {
  simulated::set_strict(true);
  const cudaStream_t s = stream();
  int *device = device_ints(4), *pinned = pinned_ints(4);
  {
    const Hold hold;
    EXPECT_CUDA(cudaSuccess, cudaMemcpyAsync(device, pinned, 16, cudaMemcpyHostToDevice, s));
    EXPECT_CUDA(cudaSuccess, cudaFree(device));
  }
  EXPECT_CUDA(cudaErrorIllegalAddress, cudaStreamSynchronize(s));
}

TEST_F(SimulatedCuda, AllocationsBeyondTheMemoryFail) {
  simulated::set_device_memory(4096);
  int *first = device_ints(1000);
  void *second = nullptr;
  EXPECT_CUDA(cudaErrorMemoryAllocation, cudaMalloc(&second, 1000));
  EXPECT_CUDA(cudaErrorMemoryAllocation, cudaGetLastError());
  EXPECT_CUDA(cudaSuccess, cudaGetLastError());  // this is no failure of the device
  EXPECT_EQ(simulated::allocated_bytes(), 4000u);
  EXPECT_CUDA(cudaSuccess, cudaFree(first));
  EXPECT_CUDA(cudaSuccess, cudaMalloc(&second, 1000));
  size_t free_bytes = 0, total = 0;
  EXPECT_CUDA(cudaSuccess, cudaMemGetInfo(&free_bytes, &total));
  EXPECT_EQ(free_bytes, 3096u);
  EXPECT_EQ(total, 4096u);
}

TEST_F(SimulatedCuda, PlannedCallsFailOnce) {
  simulated::fail_call("cudaMalloc", 2, cudaErrorMemoryAllocation);
  void *pointer = nullptr;
  EXPECT_CUDA(cudaSuccess, cudaMalloc(&pointer, 8));
  EXPECT_CUDA(cudaErrorMemoryAllocation, cudaMalloc(&pointer, 8));
  EXPECT_CUDA(cudaSuccess, cudaMalloc(&pointer, 8));
  EXPECT_EQ(simulated::calls("cudaMalloc"), 3u);
  simulated::reset_calls();
  EXPECT_EQ(simulated::calls("cudaMalloc"), 0u);
}

TEST_F(SimulatedCuda, AFailedKernelFailsTheDeviceForGood) {
  simulated::set_device_count(2);
  const cudaStream_t s = stream();
  std::atomic<int> ran{0};
  simulated::fail_kernel(2, cudaErrorIllegalAddress);
  {
    const simulated::Hold hold;  // otherwise the third kernel would come after the failure
    for (int i = 0; i < 3; ++i) EXPECT_CUDA(cudaSuccess, enqueue(s, [&] { ++ran; }));
  }
  EXPECT_CUDA(cudaErrorIllegalAddress, cudaStreamSynchronize(s));
  EXPECT_EQ(ran, 1);
  void *pointer = nullptr;
  EXPECT_CUDA(cudaErrorIllegalAddress, cudaMalloc(&pointer, 8));
  EXPECT_CUDA(cudaErrorIllegalAddress, cudaGetLastError());
  EXPECT_CUDA(cudaErrorIllegalAddress, cudaGetLastError());
  EXPECT_CUDA(cudaErrorIllegalAddress, enqueue(s, [] {}));
  EXPECT_CUDA(cudaSuccess, cudaSetDevice(1));  // the other device still works
  EXPECT_CUDA(cudaSuccess, cudaMalloc(&pointer, 8));
}

TEST_F(SimulatedCuda, DevicesAreApart) {
  simulated::set_device_count(2);
  const cudaStream_t of_0 = stream();
  const cudaEvent_t event_of_0 = event();
  int *ints_of_0 = device_ints(1);
  std::thread([&] {
    int device = -1;
    EXPECT_CUDA(cudaSuccess, cudaGetDevice(&device));
    EXPECT_EQ(device, 0);
    EXPECT_CUDA(cudaSuccess, cudaSetDevice(1));
    EXPECT_EQ(simulated::device_of(device_ints(1)), 1);
    EXPECT_EQ(simulated::device_of(ints_of_0), 0);
    EXPECT_CUDA(cudaErrorInvalidResourceHandle, enqueue(of_0, [] {}));
    const cudaStream_t of_1 = stream();
    EXPECT_CUDA(cudaErrorInvalidResourceHandle, cudaEventRecord(event_of_0, of_1));
    EXPECT_CUDA(cudaSuccess, cudaStreamWaitEvent(of_1, event_of_0, 0));
    EXPECT_CUDA(cudaErrorInvalidDevice, cudaSetDevice(2));
  }).join();
  int device = -1;
  EXPECT_CUDA(cudaSuccess, cudaGetDevice(&device));
  EXPECT_EQ(device, 0);
}

TEST_F(SimulatedCuda, WithoutADeviceCallsSaySo) {
  simulated::set_device_count(0);
  int count = -1;
  void *pointer = nullptr;
  EXPECT_CUDA(cudaErrorNoDevice, cudaGetDeviceCount(&count));
  EXPECT_EQ(count, 0);
  EXPECT_CUDA(cudaErrorNoDevice, cudaMalloc(&pointer, 8));
}

TEST_F(SimulatedCuda, SettingsAreReadOrRefused) {
  const auto settings = simulated::parse_settings("devices=2,delay_us=50");
  ASSERT_TRUE(settings.has_value());
  EXPECT_EQ(settings->devices, 2u);
  EXPECT_EQ(settings->delay_us, 50u);
  EXPECT_EQ(settings->strict, 0u);
  EXPECT_TRUE(simulated::parse_settings("").has_value());
  for (const char *wrong : {"devices", "devices=9", "devices=2x", "device=2", "devices=", "seed=1,,"}) {
    EXPECT_FALSE(simulated::parse_settings(wrong).has_value()) << wrong;
  }
}

TEST_F(SimulatedCuda, AForkedChildHasNoCuda) {
  device_ints(1);
  const pid_t child = fork();
  if (child == 0) {
    void *pointer = nullptr;
    _exit(cudaMalloc(&pointer, 8) == cudaErrorInitializationError ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
