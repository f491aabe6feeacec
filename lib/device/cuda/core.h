// SPDX-License-Identifier: Apache-2.0
// What the parts of one CUDA device share, and the guards around calls into CUDA.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "device/cuda/driver.h"
#include "device/cuda/words.h"
#include "device/device.h"

namespace fsdp::device::cuda {

// What CUDA gave and must get back. The calls that give it back may wait for all work of the GPU, so they are made only
// when the library's is done. What ends earlier is kept until then, and in the worst case for ever.

struct Core;

struct Remnant {
  enum Kind { memory, mapped_memory, addresses, pinned_memory, registered_memory, stream, event };
  Kind kind;
  void *handle;
  uint64_t bytes = 0;

  bool on_gpu() const noexcept { return kind == memory || kind == mapped_memory; }
};

// Success: it is gone. Otherwise it is as before, and what is sticky has failed the context.
cudaError_t end(const Remnant &remnant, const Core &core) noexcept;

struct Core;

// CUDA's context of a GPU that all of a process shares, kept alive.
class PrimaryContext {
 public:
  PrimaryContext(int index, const Driver &driver, const Checker &check);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext &) = delete;
  PrimaryContext &operator=(const PrimaryContext &) = delete;
  CUcontext get() const noexcept { return context_; }
  // It is not released: the last release waits for all work of the GPU.
  void leave() noexcept { left_ = true; }

 private:
  const Driver &driver_;
  const Checker &check_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  bool left_ = false;
};

// While it lives, the calling thread's current device is this one. Then it is again what it was, which may be none:
// through cudaSetDevice the way back would make a context on a GPU that the thread has never used. Around every call
// into the runtime, also where CUDA takes an object of any device: a thread without a context would be given one.
class DeviceScope {
 public:
  explicit DeviceScope(const Core &core);
  // For destructors: whether it could be made current is asked for.
  DeviceScope(const Core &core, std::nothrow_t) noexcept;
  ~DeviceScope();
  DeviceScope(const DeviceScope &) = delete;
  DeviceScope &operator=(const DeviceScope &) = delete;
  explicit operator bool() const noexcept { return current_; }

 private:
  struct Failed {
    const char *call = nullptr;
    CUresult code = CUDA_SUCCESS;
  };
  Failed enter(CUcontext context) noexcept;

  const Driver &driver_;
  bool pushed_ = false;
  bool current_ = false;
};

// While it lives, questions and allocations neither fail for a graph capture that some thread has begun nor end it:
// they add nothing to a stream.
class RelaxedScope {
 public:
  RelaxedScope() noexcept;
  ~RelaxedScope();
  RelaxedScope(const RelaxedScope &) = delete;
  RelaxedScope &operator=(const RelaxedScope &) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  bool exchanged_ = false;
};

// Both, for what makes, asks for and gives back; the first alone is for what is enqueued.
class QuietScope {
 public:
  explicit QuietScope(const Core &core) : device_(core) {}
  QuietScope(const Core &core, std::nothrow_t) noexcept : device_(core, std::nothrow) {}
  explicit operator bool() const noexcept { return static_cast<bool>(device_); }

 private:
  DeviceScope device_;
  RelaxedScope relaxed_;  // after it: the exchange is a call into the runtime too
};

// An object that gives work to the GPU.
class WorkSource {
 public:
  // Puts an event behind all that it has given so far, if there is none; returns whether there is one now.
  virtual bool mark() noexcept = 0;

 protected:
  ~WorkSource() = default;
};

struct Core {
  Core(int index, const Options &options, const Waiter &waiter, Failure &failure);
  ~Core();
  Core(const Core &) = delete;
  Core &operator=(const Core &) = delete;

  // Is everything done that the library gave to the GPU in this context? Waits for what it gave until now, for at most
  // the timeout and 10 s. When that was in vain, further ones only ask, until one finds that all is done: a GPU that is
  // stuck holds up its end once. False too while another thread has more under way, and while a capture is: marks
  // could become part of the graph.
  bool drain() noexcept;
  // What ends with its owner: given back at once if all is done, else by a later drain that finds it so. What is left
  // when the device ends stays the process's.
  void give_back(const Remnant &remnant) noexcept;
  // The same for what nothing on the GPU uses any more, and for what something still does. Whether it has ended.
  bool end(const Remnant &remnant) noexcept;
  void keep(const Remnant &remnant) noexcept;
  // How long a destructor may wait for the GPU now.
  uint32_t patience_ms() const noexcept;
  void lose_patience() noexcept { impatient_.store(true, std::memory_order_relaxed); }
  // INVALID_STATE if there is one already.
  void begin_capture(uint64_t id);
  void add(WorkSource &worker);
  void remove(WorkSource &worker) noexcept;
  // The owner of the stream ended, and there is no way to find out whether its work is done, as in a capture that an
  // error has ended. Nothing is given back until that can be asked, say after cudaStreamEndCapture.
  void lose_track(cudaStream_t stream) noexcept;
  // Can the stream not be asked, for it is being captured?
  bool is_captured(cudaStream_t stream) const noexcept;
  // Throws, and fails the context, if the GPU is lost. Enqueues, where CUDA may wait for the GPU: not for lanes.
  void check_gpu() const;
  // The same for any thread: only asks for the event, while its word has not come to count. Does nothing while another
  // thread looks, which CUDA may keep.
  void look_at(cudaEvent_t event, const PinnedWord &word, uint32_t count) const;
  // Events end here, so that none ends while a thread asks for it.
  cudaError_t destroy_event(cudaEvent_t event) const noexcept;

  const int index;
  const Options options;
  const Waiter &waiter;  // of the caller's thread
  Failure &failure;
  const Waiter worker_waiter;  // the same without the hook, which runs on the caller's thread only
  const Checker check;
  const Driver driver;
  PrimaryContext context;
  // The graph capture that the engine has begun; 0: none.
  std::atomic<uint64_t> live_capture{0};
  std::atomic<uint32_t> lanes{0};    // alive
  std::atomic<uint32_t> streams{1};  // of the library, alive: the first is what looks for a lost GPU
  WordPool words;

 private:
  // What is to be given back, and what must be written before.
  struct Due {
    std::vector<Remnant> remnants;
    std::vector<AwaitedWord> words;
  };
  bool mark_all(Due &due) noexcept;
  bool find_lost_streams();
  bool await_all(const std::vector<AwaitedWord> &awaited) noexcept;
  void leave_the_rest() noexcept;
  void warn(uint64_t on_gpu, uint64_t pinned) const noexcept;

  std::mutex draining_;  // one thread at a time; before mutex_, which is not held while it waits
  std::mutex mutex_;
  std::vector<WorkSource *> sources_;
  std::vector<Remnant> remnants_;
  std::vector<cudaStream_t> lost_streams_;
  bool lost_for_good_ = false;  // no memory to remember a stream by
  std::atomic<bool> impatient_{false};
  AwaitedWord late_;  // was waited for in vain
  // Behind nothing but itself: see check_gpu.
  mutable std::mutex probe_mutex_;  // no thread waits for it inside a wait
  cudaStream_t probe_stream_ = nullptr;
  cudaEvent_t probe_ = nullptr;
};

// Blocks the calling thread until the GPU has written `count` or more: spins briefly, then sleeps. Throws what the
// waiter throws, what the GPU was lost with, and TIMEOUT naming `what`. event: the one whose record writes the word,
// for threads that must enqueue nothing.
void await_word(const PinnedWord &word, uint32_t count, const char *what, const Core &core, const Waiter &waiter,
                cudaEvent_t event = nullptr);

// The same for destructors, for at most so long, whether the context has failed or not; returns whether it is written.
bool await_word(const PinnedWord &word, uint32_t count, const Core &core, uint32_t timeout_ms) noexcept;

}  // namespace fsdp::device::cuda
