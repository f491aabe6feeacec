// SPDX-License-Identifier: Apache-2.0
#include "device/host/host_device.h"

#include "device/host/memory.h"
#include "device/host/worker_stream.h"

namespace fsdp::device {

HostDevice::HostDevice(const Options &options, const Waiter &waiter, Failure &failure)
    : options_(options),
      waiter_(waiter),
      failure_(failure),
      worker_waiter_(failure, nullptr, nullptr, waiter.timeout_ms()),
      caller_(waiter) {}

std::unique_ptr<Stream> HostDevice::create_stream(const std::string &name) {
  if (!options_.overlap) return std::make_unique<InlineStream>(options_, name, waiter_, failure_);
  std::lock_guard lock(mutex_);
  progress_.push_back(std::make_unique<Progress>(name));
  return std::make_unique<WorkerStream>(options_, name, *progress_.back(), waiter_, worker_waiter_, failure_);
}

std::unique_ptr<Event> HostDevice::create_event() { return std::make_unique<HostEvent>(); }

std::unique_ptr<Memory> HostDevice::allocate(uint64_t bytes, const char *what) {
  count_allocation(bytes, what);
  return std::make_unique<HostMemory>(bytes, what);
}

Stream &HostDevice::caller_stream(fsdp_stream stream) {
  if (stream) fail(FSDP_INVALID_ARGUMENT, "{}: the host device has no streams: pass NULL", waiter_.call());
  return caller_;
}

std::unique_ptr<HostLane> HostDevice::create_host_lane(const std::string &name) {
  fail(FSDP_INTERNAL, "lane '{}': streams of the host device run host work themselves", name);
}

void HostDevice::begin_capture(uint64_t) { fail(FSDP_INTERNAL, "the host device captures no graphs"); }

std::string HostDevice::description() const { return format_text("the host ({})", host_instruction_set()); }

void HostDevice::synchronize(const Event &event) { await_event(event, waiter_); }

void HostDevice::count_allocation(uint64_t bytes, const char *what) {
  const uint64_t count = allocations_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (count == options_.failed_allocation)
    fail(FSDP_OUT_OF_MEMORY, "{}: allocation {} of {} bytes fails because debug_failed_allocation says so", what, count,
         bytes);
}

}  // namespace fsdp::device
