// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/host/progress.h"
#include "device/host/stream.h"
#include "device/host/traits.h"

namespace fsdp::device {

// Anonymous pages. All pages are present from the start, so no access faults or fails later. Forked children do not
// inherit them.
class HostMemory final : public Memory {
 public:
  HostMemory(uint64_t bytes, const char *what);
  ~HostMemory() override;
  HostMemory(const HostMemory &) = delete;
  HostMemory &operator=(const HostMemory &) = delete;

  std::byte *data() const noexcept override { return data_; }
  uint64_t size_bytes() const noexcept override { return bytes_; }

 private:
  std::byte *data_ = nullptr;  // NULL if there are no bytes
  uint64_t bytes_;
};

// The host's memory and cores. Its streams must be destroyed before it, and its events must not be used after it.
class HostDevice final : public Device {
 public:
  HostDevice(const Options &options, const Waiter &waiter, Failure &failure);

  std::unique_ptr<Stream> create_stream(const std::string &name) override;
  void give_way() noexcept override { options_.gives_way = true; }
  std::unique_ptr<Event> create_event() override;
  std::unique_ptr<Memory> allocate(uint64_t bytes, const char *what) override;
  std::unique_ptr<Memory> allocate_host(uint64_t bytes, const char *what) override { return allocate(bytes, what); }
  Stream &caller_stream(fsdp_stream stream) override;
  Stream &calling_thread() override { return caller_; }
  const Traits &traits() const noexcept override { return host_traits; }
  void transfer(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) override {
    caller_.cast(to, to_dtype, from, from_dtype, count);
  }
  std::unique_ptr<HostLane> create_host_lane(const std::string &name) override;
  void register_host(void *, uint64_t) override {}
  bool unregister_host(void *, uint64_t) noexcept override { return true; }
  void begin_capture(uint64_t id) override;
  void end_capture() noexcept override {}
  void synchronize(const Event &event) override;
  void count_allocation(uint64_t bytes, const char *what) override;
  uint64_t allocations() const noexcept override { return allocations_.load(std::memory_order_relaxed); }
  std::string description() const override;

 private:
  Options options_;
  const Waiter &waiter_;
  Failure &failure_;
  Waiter worker_waiter_;  // like the waiter, without the hook, which runs only on the caller's thread
  HostCallerStream caller_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Progress>> progress_;
  std::atomic<uint64_t> allocations_{0};
};

}  // namespace fsdp::device
