// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/lane.h"
#include "device/cuda/memory.h"
#include "device/cuda/stream.h"
#include "device/cuda/traits.h"
#include "device/cuda/transfer.h"
#include "device/device.h"
#include "device/host/progress.h"

namespace fsdp::device::cuda {

// One GPU, as one context uses it. Objects that it makes must be destroyed before it. Several contexts may use one GPU,
// from several threads. Each call restores the thread's current device before it returns.
class CudaDevice final : public Device {
 public:
  // `index` is CUDA's number of the GPU in this process; the GPU must exist.
  CudaDevice(int index, const Options &options, const Waiter &waiter, Failure &failure);
  ~CudaDevice() override { launch_order.reset(); }  // the launch order has events of this device

  std::unique_ptr<Stream> create_stream(const std::string &name) override;
  std::unique_ptr<Event> create_event() override;
  std::unique_ptr<Memory> allocate(uint64_t bytes, const char *what) override;
  std::unique_ptr<Memory> allocate_host(uint64_t bytes, const char *what) override;
  // The reference is valid until later calls have passed more different streams than the device keeps (32).
  Stream &caller_stream(fsdp_stream stream) override;
  Stream &calling_thread() override { return calling_thread_; }
  const Traits &traits() const noexcept override { return cuda_traits; }
  void transfer(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) override {
    transfer_(to, to_dtype, from, from_dtype, count);
  }
  std::unique_ptr<HostLane> create_host_lane(const std::string &name) override;
  void register_host(void *data, uint64_t bytes) override;
  bool unregister_host(void *data, uint64_t bytes) noexcept override;
  void begin_capture(uint64_t id) override { core_.begin_capture(id); }
  void end_capture() noexcept override { core_.live_capture.store(0, std::memory_order_relaxed); }
  void synchronize(const Event &event) override { await_event(cuda_event(event), core_, core_.waiter); }
  void count_allocation(uint64_t bytes, const char *what) override;
  uint64_t allocations() const noexcept override { return allocations_.load(std::memory_order_relaxed); }
  std::string description() const override;
  int32_t index() const noexcept override { return core_.index; }
  uint32_t streams() const noexcept override { return core_.streams.load(std::memory_order_relaxed); }
  void with_current(const std::function<void()> &body) const override {
    const DeviceScope scope(core_);
    body();
  }

 private:
  Core core_;
  const MemoryPlan plan_;
  CallerStreams callers_;
  HostSideStream calling_thread_;
  Transfer transfer_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Progress>> progress_;  // progress of lanes, kept because events may outlive lanes
  std::atomic<uint64_t> allocations_{0};
};

}  // namespace fsdp::device::cuda
