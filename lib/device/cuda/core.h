// SPDX-License-Identifier: Apache-2.0
// What the parts of one CUDA device share, and the guards around calls into CUDA.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/driver.h"
#include "device/cuda/words.h"
#include "device/device.h"

namespace fsdp::device::cuda {

struct Core;

// CUDA's context of a GPU that all of a process shares, kept alive.
class PrimaryContext {
 public:
  PrimaryContext(int index, const Driver &driver, const Checker &check);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext &) = delete;
  PrimaryContext &operator=(const PrimaryContext &) = delete;
  CUcontext get() const noexcept { return context_; }

 private:
  const Driver &driver_;
  const Checker &check_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
};

// While it lives, the calling thread's current device is this one; then it is again what it was, which may be none:
// through cudaSetDevice the way back would make a context on a GPU that the thread has never used.
class DeviceScope {
 public:
  explicit DeviceScope(const Core &core);
  DeviceScope(CUcontext context, const Driver &driver, const Checker &check);
  ~DeviceScope();
  DeviceScope(const DeviceScope &) = delete;
  DeviceScope &operator=(const DeviceScope &) = delete;

 private:
  const Driver &driver_;
  bool pushed_ = false;
};

// Somebody who has given work to the GPU.
class Worker {
 public:
  // Waits until that work is done, for at most the timeout and 10 s; returns whether it is.
  virtual bool drain() noexcept = 0;

 protected:
  ~Worker() = default;
};

struct Core {
  Core(int index, const Options &options, const Waiter &waiter, Failure &failure);
  ~Core();
  Core(const Core &) = delete;
  Core &operator=(const Core &) = delete;

  // Is everything done that the library gave to the GPU in this context? Then what it uses may be given back. Once it
  // was not done in time, nothing is given back any more.
  bool drain() noexcept;
  void add(Worker &worker);
  void remove(Worker &worker) noexcept;  // whose work must be done, or is never known to be
  // Throws, and fails the context, if the GPU is lost. Any thread.
  void check_gpu() const;

  const int index;
  const Options options;
  const Waiter &waiter;  // of the caller's thread
  Failure &failure;
  const Waiter worker_waiter;  // the same without the hook, which runs on the caller's thread only
  const Checker check;
  const Driver driver;
  const PrimaryContext context;
  // The graph capture that the engine has begun; 0: none.
  std::atomic<uint64_t> live_capture{0};
  Words words;

 private:
  std::mutex mutex_;
  std::vector<Worker *> workers_;
  std::atomic<bool> stuck_{false};
  cudaEvent_t probe_ = nullptr;  // never recorded: asking for it shows a lost GPU, and nothing else
};

inline DeviceScope::DeviceScope(const Core &core) : DeviceScope(core.context.get(), core.driver, core.check) {}

// While it lives, questions and allocations neither fail for a graph capture that some thread has begun nor end it:
// they add nothing to a stream.
class RelaxedScope {
 public:
  RelaxedScope() noexcept { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedScope() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedScope(const RelaxedScope &) = delete;
  RelaxedScope &operator=(const RelaxedScope &) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Blocks the calling thread until the GPU has written `count` or more: spins briefly, then sleeps. Throws what the
// waiter throws, what the GPU was lost with, and TIMEOUT naming `what`.
void await_word(const PinnedWord &word, uint32_t count, const char *what, const Core &core, const Waiter &waiter);

}  // namespace fsdp::device::cuda
