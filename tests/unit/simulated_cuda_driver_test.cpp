// SPDX-License-Identifier: Apache-2.0
// Tests driver functions of the CUDA runtime over host threads: values that streams wait for, and virtual memory.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "simulated_cuda/environment.h"
#include "simulated_cuda/simulated.h"

namespace {

#define EXPECT_CUDA(error, call) EXPECT_STREQ(cudaGetErrorName(error), cudaGetErrorName(call))

template <class Function>
Function entry(const char *name, unsigned version) {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  EXPECT_CUDA(cudaSuccess, cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result));
  EXPECT_EQ(result, cudaDriverEntryPointSuccess) << name;
  return reinterpret_cast<Function>(function);
}

class SimulatedDriver : public testing::Test {
 protected:
  void SetUp() override {
    simulated::reset();
    EXPECT_CUDA(cudaSuccess, cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    EXPECT_CUDA(cudaSuccess, cudaHostAlloc(reinterpret_cast<void **>(&word_), 64, 0));
    new (word_) std::atomic<uint32_t>(0);
    address_ = reinterpret_cast<CUdeviceptr>(word_);
  }
  void TearDown() override { simulated::reset(); }

  bool busy() const {
    while (!simulated::waits(stream_) && cudaStreamQuery(stream_) == cudaErrorNotReady)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return cudaStreamQuery(stream_) == cudaErrorNotReady;
  }

  cudaStream_t stream_ = nullptr;
  std::atomic<uint32_t> *word_ = nullptr;
  CUdeviceptr address_ = 0;
};

TEST_F(SimulatedDriver, EntryPointsHaveBaseNamesAndVersions) {
  void *function = &function;
  cudaDriverEntryPointQueryResult result{};
  EXPECT_CUDA(cudaSuccess,
              cudaGetDriverEntryPointByVersion("cuMemCreate_v2", &function, 12000, cudaEnableDefault, &result));
  EXPECT_EQ(result, cudaDriverEntryPointSymbolNotFound);
  EXPECT_EQ(function, nullptr);
  EXPECT_CUDA(cudaSuccess,
              cudaGetDriverEntryPointByVersion("cuMemCreate", &function, 10000, cudaEnableDefault, &result));
  EXPECT_EQ(result, cudaDriverEntryPointVersionNotSufficent);
  EXPECT_CUDA(cudaErrorInvalidValue,
              cudaGetDriverEntryPointByVersion("cuMemCreate", &function, 99000, cudaEnableDefault, &result));
}

TEST_F(SimulatedDriver, StreamsWaitForValuesAndWriteThem) {
  const auto wait = entry<PFN_cuStreamWaitValue32_v11070>("cuStreamWaitValue32", 12000);
  const auto write = entry<PFN_cuStreamWriteValue32_v11070>("cuStreamWriteValue32", 12000);
  ASSERT_EQ(wait(stream_, address_, 5, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);
  ASSERT_EQ(write(stream_, address_ + 4, 9, CU_STREAM_WRITE_VALUE_DEFAULT), CUDA_SUCCESS);
  word_->store(4);
  EXPECT_TRUE(busy());
  word_->store(6);
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(stream_));
  EXPECT_EQ(word_[1].load(), 9u);
  ASSERT_EQ(wait(stream_, address_, 6, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
  ASSERT_EQ(wait(stream_, address_, 0xfffffff0, CU_STREAM_WAIT_VALUE_GEQ), CUDA_SUCCESS);  // the comparison is cyclic
  ASSERT_EQ(wait(stream_, address_, 2, CU_STREAM_WAIT_VALUE_AND), CUDA_SUCCESS);
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(stream_));
}

TEST_F(SimulatedDriver, AWordCostsItsStreamTime) {
  EXPECT_EQ(simulated::parse_settings("")->word_ns, 1600U);
  const auto write = entry<PFN_cuStreamWriteValue32_v11070>("cuStreamWriteValue32", 12000);
  simulated::set_word_cost(20'000'000);
  const auto start = std::chrono::steady_clock::now();
  ASSERT_EQ(write(stream_, address_, 1, CU_STREAM_WRITE_VALUE_DEFAULT), CUDA_SUCCESS);
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(stream_));
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(20));
}

TEST_F(SimulatedDriver, ValuesOfPageableMemoryAreRefused) {
  const auto wait = entry<PFN_cuStreamWaitValue32_v11070>("cuStreamWaitValue32", 12000);
  uint32_t plain = 0;
  EXPECT_EQ(wait(stream_, reinterpret_cast<CUdeviceptr>(&plain), 0, CU_STREAM_WAIT_VALUE_EQ), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(wait(stream_, address_ + 2, 0, CU_STREAM_WAIT_VALUE_EQ), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(SimulatedDriver, AFailureOfTheDeviceEndsAWait) {
  const auto wait = entry<PFN_cuStreamWaitValue32_v11070>("cuStreamWaitValue32", 12000);
  cudaStream_t other = nullptr;
  EXPECT_CUDA(cudaSuccess, cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  ASSERT_EQ(wait(stream_, address_, 1, CU_STREAM_WAIT_VALUE_EQ), CUDA_SUCCESS);
  EXPECT_CUDA(cudaSuccess, simulated::enqueue(other, [] { simulated::fail_device(cudaErrorAssert); }));
  EXPECT_CUDA(cudaErrorAssert, cudaStreamSynchronize(stream_));
  EXPECT_EQ(wait(stream_, address_, 1, CU_STREAM_WAIT_VALUE_EQ), CUDA_ERROR_ASSERT);
}

// The runtime's current device follows the driver's contexts. The driver itself makes no context current.
TEST_F(SimulatedDriver, ContextsAreTheCurrentDevice) {
  simulated::set_device_count(2);
  const auto retain = entry<PFN_cuDevicePrimaryCtxRetain_v7000>("cuDevicePrimaryCtxRetain", 12000);
  const auto release = entry<PFN_cuDevicePrimaryCtxRelease_v11000>("cuDevicePrimaryCtxRelease", 12000);
  const auto current = entry<PFN_cuCtxGetCurrent_v4000>("cuCtxGetCurrent", 12000);
  const auto push = entry<PFN_cuCtxPushCurrent_v4000>("cuCtxPushCurrent", 12000);
  const auto pop = entry<PFN_cuCtxPopCurrent_v4000>("cuCtxPopCurrent", 12000);
  CUcontext second = nullptr, found = nullptr;
  int device = -1;
  ASSERT_EQ(retain(&second, 1), CUDA_SUCCESS);
  ASSERT_EQ(current(&found), CUDA_SUCCESS);
  EXPECT_EQ(found, nullptr);
  ASSERT_EQ(push(second), CUDA_SUCCESS);
  EXPECT_CUDA(cudaSuccess, cudaGetDevice(&device));
  EXPECT_EQ(device, 1);
  ASSERT_EQ(pop(&found), CUDA_SUCCESS);
  EXPECT_EQ(found, second);
  EXPECT_EQ(pop(&found), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_CUDA(cudaSuccess, cudaGetDevice(&device));
  EXPECT_EQ(device, 0);
  ASSERT_EQ(release(1), CUDA_SUCCESS);
  EXPECT_EQ(push(second), CUDA_ERROR_CONTEXT_IS_DESTROYED);
}

class SimulatedVirtualMemory : public SimulatedDriver {
 protected:
  void SetUp() override {
    SimulatedDriver::SetUp();
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location = {CU_MEM_LOCATION_TYPE_DEVICE, {0}};
    properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    access_.location = properties_.location;
    access_.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  }

  PFN_cuMemCreate_v10020 create_ = entry<PFN_cuMemCreate_v10020>("cuMemCreate", 12000);
  PFN_cuMemRelease_v10020 release_ = entry<PFN_cuMemRelease_v10020>("cuMemRelease", 12000);
  PFN_cuMemAddressReserve_v10020 reserve_ = entry<PFN_cuMemAddressReserve_v10020>("cuMemAddressReserve", 12000);
  PFN_cuMemAddressFree_v10020 free_ = entry<PFN_cuMemAddressFree_v10020>("cuMemAddressFree", 12000);
  PFN_cuMemMap_v10020 map_ = entry<PFN_cuMemMap_v10020>("cuMemMap", 12000);
  PFN_cuMemUnmap_v10020 unmap_ = entry<PFN_cuMemUnmap_v10020>("cuMemUnmap", 12000);
  PFN_cuMemSetAccess_v10020 set_access_ = entry<PFN_cuMemSetAccess_v10020>("cuMemSetAccess", 12000);
  PFN_cuMemExportToShareableHandle_v10020 export_ =
      entry<PFN_cuMemExportToShareableHandle_v10020>("cuMemExportToShareableHandle", 12000);
  CUmemAllocationProp properties_{};
  CUmemAccessDesc access_{};
  static constexpr size_t size = size_t{2} << 20;
};

TEST_F(SimulatedVirtualMemory, IsMappedUsedSharedAndGivenBack) {
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr pointer = 0;
  EXPECT_EQ(create_(&handle, size + 4096, &properties_, 0), CUDA_ERROR_INVALID_VALUE);  // not in whole granules
  ASSERT_EQ(create_(&handle, size, &properties_, 0), CUDA_SUCCESS);
  ASSERT_EQ(reserve_(&pointer, 2 * size, 0, 0, 0), CUDA_SUCCESS);
  EXPECT_EQ(pointer % size, 0u);
  auto *bytes = reinterpret_cast<char *>(pointer) + size;
  ASSERT_EQ(map_(pointer + size, size, 0, handle, 0), CUDA_SUCCESS);
  EXPECT_CUDA(cudaErrorInvalidValue, cudaMemsetAsync(bytes, 1, size, stream_));  // no access is allowed yet
  ASSERT_EQ(set_access_(pointer + size, size, &access_, 1), CUDA_SUCCESS);
  EXPECT_CUDA(cudaSuccess, cudaMemsetAsync(bytes, 1, size, stream_));
  EXPECT_CUDA(cudaSuccess, cudaStreamSynchronize(stream_));
  EXPECT_TRUE(simulated::is_device(bytes, size));

  int file = -1;
  ASSERT_EQ(export_(&file, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), CUDA_SUCCESS);
  char first = 0;
  EXPECT_EQ(pread(file, &first, 1, 0), 1);
  EXPECT_EQ(first, 1);
  close(file);

  ASSERT_EQ(release_(handle), CUDA_SUCCESS);  // it is mapped, so it stays
  EXPECT_EQ(bytes[size - 1], 1);
  EXPECT_EQ(free_(pointer, 2 * size), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(unmap_(pointer + size, size), CUDA_SUCCESS);
  EXPECT_FALSE(simulated::is_device(bytes));
  EXPECT_EQ(simulated::allocated_bytes(), 0u);
  ASSERT_EQ(free_(pointer, 2 * size), CUDA_SUCCESS);
}

// It can be exported only as the type that it was made for, through a handle that any holder of the address may retain.
TEST_F(SimulatedVirtualMemory, IsExportedAsWhatItWasMadeFor) {
  const auto retain = entry<PFN_cuMemRetainAllocationHandle_v11000>("cuMemRetainAllocationHandle", 12000);
  for (const bool exportable : {true, false}) {
    CUmemGenericAllocationHandle handle = 0, other = 0;
    CUdeviceptr pointer = 0;
    if (!exportable) properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    ASSERT_EQ(create_(&handle, size, &properties_, 0), CUDA_SUCCESS);
    ASSERT_EQ(reserve_(&pointer, size, 0, 0, 0), CUDA_SUCCESS);
    ASSERT_EQ(map_(pointer, size, 0, handle, 0), CUDA_SUCCESS);
    ASSERT_EQ(release_(handle), CUDA_SUCCESS);
    ASSERT_EQ(retain(&other, reinterpret_cast<void *>(pointer + 5)), CUDA_SUCCESS);
    int file = -1;
    EXPECT_EQ(export_(&file, other, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
              exportable ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    if (exportable) close(file);
    ASSERT_EQ(release_(other), CUDA_SUCCESS);
    ASSERT_EQ(unmap_(pointer, size), CUDA_SUCCESS);
    EXPECT_EQ(simulated::allocated_bytes(), 0u);
    EXPECT_EQ(retain(&other, reinterpret_cast<void *>(pointer)), CUDA_ERROR_INVALID_VALUE);
  }
}

TEST_F(SimulatedVirtualMemory, HandlesThatTheProgramMayNotHaveAreRefused) {
  simulated::set_files(false);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(create_(&handle, size, &properties_, 0), CUDA_ERROR_NOT_PERMITTED);
  properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
  EXPECT_EQ(create_(&handle, size, &properties_, 0), CUDA_SUCCESS);
}

TEST_F(SimulatedVirtualMemory, EndsAndFailsAsPlanned) {
  simulated::set_device_memory(size);
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(create_(&handle, 2 * size, &properties_, 0), CUDA_ERROR_OUT_OF_MEMORY);
  simulated::fail_call("cuMemCreate", 1, CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(create_(&handle, size, &properties_, 0), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_EQ(create_(&handle, size, &properties_, 0), CUDA_SUCCESS);
}

}  // namespace
