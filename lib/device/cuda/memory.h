// SPDX-License-Identifier: Apache-2.0
// Memory of the GPU, and memory of the host that the GPU reads and writes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/cuda/core.h"

namespace fsdp::device::cuda {

// How device memory is allocated on this machine. Memory from the driver's virtual memory management can be registered
// as windows by NCCL and reached by network cards. If such memory is not possible, cudaMalloc is used.
class MemoryPlan {
 public:
  explicit MemoryPlan(Core &core);

  bool is_virtual() const noexcept { return virtual_; }
  uint64_t granularity() const noexcept { return granularity_; }
  const CUmemAllocationProp &properties() const noexcept { return properties_; }
  const std::vector<CUmemAccessDesc> &accesses() const noexcept { return accesses_; }
  const std::string &description() const noexcept { return description_; }  // with the reason if it is not the best

 private:
  bool attribute(const Core &core, CUdevice_attribute which) const;
  void choose(const Core &core);
  CUresult attempt(const Core &core, int handle_types, bool rdma);
  void choose_readers(Core &core);

  bool virtual_ = false;
  uint64_t granularity_ = 0;
  CUdevice device_ = 0;
  CUmemAllocationProp properties_{};
  std::vector<CUmemAccessDesc> accesses_;  // access for this GPU, and for the process's GPUs that can reach it
  std::string description_;
};

// Memory of the GPU. It is given back only when all work that the library has enqueued on the GPU is done, because late
// work would write into other memory at the same address.
class DeviceMemory final : public Memory {
 public:
  DeviceMemory(Core &core, const MemoryPlan &plan, uint64_t bytes, const char *what);
  ~DeviceMemory() override;
  DeviceMemory(const DeviceMemory &) = delete;
  DeviceMemory &operator=(const DeviceMemory &) = delete;
  std::byte *data() const noexcept override { return data_; }
  uint64_t size_bytes() const noexcept override { return bytes_; }

 private:
  void reserve(const MemoryPlan &plan, const std::string &what);
  void map(const MemoryPlan &plan, const std::string &what);
  Remnant remnant() const noexcept;

  Core &core_;
  const bool virtual_;
  const uint64_t bytes_;
  uint64_t reserved_bytes_ = 0;
  bool mapped_ = false;
  std::byte *data_ = nullptr;
};

// Page-locked and zeroed memory of the host, which the GPU sees at the same address. It is given back like
// DeviceMemory.
class PinnedMemory final : public Memory {
 public:
  PinnedMemory(Core &core, uint64_t bytes, const char *what);
  ~PinnedMemory() override;
  PinnedMemory(const PinnedMemory &) = delete;
  PinnedMemory &operator=(const PinnedMemory &) = delete;
  std::byte *data() const noexcept override { return static_cast<std::byte *>(data_); }
  uint64_t size_bytes() const noexcept override { return bytes_; }

 private:
  Core &core_;
  const uint64_t bytes_;
  void *data_ = nullptr;
};

}  // namespace fsdp::device::cuda
