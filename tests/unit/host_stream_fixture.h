// SPDX-License-Identifier: Apache-2.0
// Provides a host device with a context's failure and waiter, for tests of its streams.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "../library_threads.h"
#include "device/device.h"

namespace fsdp::test {

using namespace std::chrono_literals;

struct Host {
  Failure failure;
  Waiter waiter;
  std::unique_ptr<device::Device> device;

  explicit Host(const device::Options &options = {}, uint32_t timeout_ms = 10000, fsdp_interrupted_hook hook = nullptr)
      : waiter(failure, hook, nullptr, timeout_ms), device(device::create_host_device(options, waiter, failure)) {}

  std::unique_ptr<device::Stream> stream(const char *name) { return device->create_stream(name); }
  // Waits for all work that was enqueued on the stream.
  void finish(device::Stream &stream) {
    const auto event = device->create_event();
    stream.record(*event);
    device->synchronize(*event);
  }
};

// This work goes on until the gate opens or the context fails.
struct Gate {
  std::atomic<bool> open{false};
  std::atomic<bool> entered{false};
  void hold(const Failure &failure) {
    entered = true;
    while (!open && !failure.failed()) std::this_thread::sleep_for(100us);
  }
};

// Returns the status of the Error that the work throws, or FSDP_OK if it throws none.
template <class Work>
fsdp_status status_of(const Work &work) {
  try {
    work();
    return FSDP_OK;
  } catch (const Error &error) {
    EXPECT_FALSE(error.message.empty());
    return error.status;
  }
}

}  // namespace fsdp::test
