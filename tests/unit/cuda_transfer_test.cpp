// SPDX-License-Identifier: Apache-2.0
// Tests transfers between all kinds of memory and dtypes. They give the host's bits, in the order of the caller's
// stream NULL.
#include "base/dtype.h"
#include "cuda_fixture.h"
#include "device/host/kernels.h"

namespace fsdp::device {
namespace {

// Memory of one kind, as a program may have it.
class Place {
 public:
  enum Kind { pageable, pinned, device, managed, library };

  Place(Kind kind, Device &gpu, uint64_t bytes) : kind_(kind) {
    if (kind == pageable) own_.resize(bytes);
    if (kind == library) memory_ = gpu.allocate(bytes, "test");
    if (kind == pageable) data_ = own_.data();
    if (kind == library) data_ = memory_->data();
    if (kind == pinned) {
      EXPECT_EQ(cudaSuccess, cudaMallocHost(&data_, bytes));
    }
    if (kind == device) {
      EXPECT_EQ(cudaSuccess, cudaMalloc(&data_, bytes));
    }
#ifndef FSDP_TEST_SIMULATED_CUDA  // the simulation has no managed memory
    if (kind == managed) {
      EXPECT_EQ(cudaSuccess, cudaMallocManaged(&data_, bytes));
    }
#endif
  }
  ~Place() {
    if (kind_ == pinned) cudaFreeHost(data_);
    if (kind_ == device || kind_ == managed) cudaFree(data_);
  }
  Place(const Place &) = delete;
  Place &operator=(const Place &) = delete;
  void *data() const { return data_; }

 private:
  Kind kind_;
  void *data_ = nullptr;
  std::vector<std::byte> own_;
  std::unique_ptr<Memory> memory_;
};

constexpr Place::Kind kinds[] = {Place::pageable, Place::pinned, Place::device, Place::library,
#ifndef FSDP_TEST_SIMULATED_CUDA
                                 Place::managed
#endif
};
constexpr fsdp_dtype dtypes[] = {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16};

std::vector<std::byte> cast_on_host(fsdp_dtype to, const void *from, fsdp_dtype from_dtype, uint64_t count) {
  std::vector<std::byte> bytes(count * dtype_size(to));
  kernels::cast(bytes.data(), to, from, from_dtype, count);
  return bytes;
}

void check(Device &gpu, Place::Kind to_kind, Place::Kind from_kind, fsdp_dtype to, fsdp_dtype from, uint64_t count) {
  const auto values = numbers(count, -100);
  const auto source = cast_on_host(from, values.data(), FSDP_FLOAT32, count);
  const Place from_place(from_kind, gpu, source.size()), to_place(to_kind, gpu, count * dtype_size(to));
  CUDA_OK(cudaMemcpy(from_place.data(), source.data(), source.size(), cudaMemcpyDefault));
  gpu.transfer(to_place.data(), to, from_place.data(), from, count);
  std::vector<std::byte> got(count * dtype_size(to));
  CUDA_OK(cudaMemcpy(got.data(), to_place.data(), got.size(), cudaMemcpyDefault));
  EXPECT_EQ(cast_on_host(to, source.data(), from, count), got)
      << "kind " << from_kind << " to " << to_kind << ", " << dtype_name(from) << " to " << dtype_name(to);
}

class CudaTransferTest : public CudaTest {};

TEST_F(CudaTransferTest, EveryKindOfMemoryAndDtype) {
  CudaContext context;
  for (const auto to_kind : kinds)
    for (const auto from_kind : kinds)
      for (const auto to : dtypes)
        for (const auto from : dtypes) check(*context.device, to_kind, from_kind, to, from, 1001);
}

// The size exceeds both halves of the transfer buffer, and is not a multiple of one.
TEST_F(CudaTransferTest, MoreThanTheBufferTakesHasTheRightBytes) {
  CudaContext context({.delay_us = 300, .delay_seed = 5});
  const uint64_t count = (uint64_t{5} << 19) + 3;
  check(*context.device, Place::library, Place::pageable, FSDP_BFLOAT16, FSDP_FLOAT32, count);
  check(*context.device, Place::pageable, Place::library, FSDP_FLOAT32, FSDP_FLOAT16, count);
  check(*context.device, Place::library, Place::device, FSDP_FLOAT16, FSDP_FLOAT32, count);
}

TEST_F(CudaTransferTest, ComesAfterTheLegacyStream) {
  CudaContext context;
  const uint64_t count = 100000;
  const auto memory = context.device->allocate(count * 4, "test");
  std::vector<float> got(count), ones(count, 1), zeros(count, 0);
  context.device->transfer(memory->data(), FSDP_FLOAT32, ones.data(), FSDP_FLOAT32, count);
  ASSERT_EQ(0, cuda::kernels::delay(nullptr, 30000));
  CUDA_OK(cudaMemsetAsync(memory->data(), 0, count * 4, nullptr));
  context.device->transfer(got.data(), FSDP_FLOAT32, memory->data(), FSDP_FLOAT32, count);
  EXPECT_EQ(zeros, got);
}

TEST_F(CudaTransferTest, NothingToMove) {
  CudaContext context;
  EXPECT_EQ(FSDP_OK,
            failure_of([&] { context.device->transfer(nullptr, FSDP_FLOAT32, nullptr, FSDP_FLOAT16, 0); }).status);
}

}  // namespace
}  // namespace fsdp::device
