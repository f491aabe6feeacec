// SPDX-License-Identifier: Apache-2.0
// State that the parts of one CUDA device share, and the guards around calls of CUDA.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "device/cuda/driver.h"
#include "device/cuda/words.h"
#include "device/device.h"

namespace fsdp::device::cuda {

// A resource that CUDA has given and must get back. The calls that give it back may wait for all work of the GPU, so
// they are made only when the library's work is done. If the owner of a resource ends earlier, the resource is kept
// until then, in the worst case forever.

struct Core;

struct Remnant {
  enum Kind { memory, mapped_memory, addresses, pinned_memory, registered_memory, stream, event };
  Kind kind;
  void *handle;
  uint64_t bytes = 0;

  bool on_gpu() const noexcept { return kind == memory || kind == mapped_memory; }
};

// Gives the resource back. On failure the resource is unchanged; a sticky error fails the context.
cudaError_t try_give_back(const Remnant &remnant, const Core &core) noexcept;

struct Core;

// Keeps CUDA's primary context of a GPU alive. The whole process shares this context.
class PrimaryContext {
 public:
  PrimaryContext(int index, const Driver &driver, const Checker &check);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext &) = delete;
  PrimaryContext &operator=(const PrimaryContext &) = delete;
  CUcontext get() const noexcept { return context_; }
  // After this call the destructor does not release the context, because the last release waits for all work of the
  // GPU.
  void leave() noexcept { left_ = true; }

 private:
  const Driver &driver_;
  const Checker &check_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  bool left_ = false;
};

// During this scope the GPU is the calling thread's current device. Afterwards the current device is the previous one,
// which may be none. cudaSetDevice is not used, because setting the previous device would make a context on a GPU that
// the thread has never used. The scope must surround every call of the runtime, even calls that take objects of any
// device, because CUDA would give a context to a thread that has none.
class DeviceScope {
 public:
  explicit DeviceScope(const Core &core);
  // For destructors: does not throw. The conversion to bool tells whether the GPU could be made current.
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

// During this scope, queries and allocations do not fail if another thread has begun a graph capture, and do not end
// the capture. They must add nothing to a stream.
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

// A DeviceScope and a RelaxedScope together, for calls that make, query or free objects. Calls that enqueue work need
// only a DeviceScope.
class ObjectScope {
 public:
  explicit ObjectScope(const Core &core) : device_(core) {}
  ObjectScope(const Core &core, std::nothrow_t) noexcept : device_(core, std::nothrow) {}
  explicit operator bool() const noexcept { return static_cast<bool>(device_); }

 private:
  DeviceScope device_;
  RelaxedScope relaxed_;  // after device_, because its destructor also calls the runtime
};

// An object that enqueues work on the GPU.
class WorkSource {
 public:
  // Records an event behind all work enqueued so far, unless there is such an event. Returns whether there is one now.
  virtual bool mark() noexcept = 0;

 protected:
  ~WorkSource() = default;
};

struct Core {
  Core(int index, const Options &options, const Waiter &waiter, Failure &failure);
  ~Core();
  Core(const Core &) = delete;
  Core &operator=(const Core &) = delete;

  // Is all work done that the library has enqueued on the GPU in this context? Waits for the work enqueued so far, for
  // at most the timeout and 10 s. After a wait in vain, later calls only query, until one finds that all work is done.
  // So a GPU that is stuck delays the end only once. Also returns false while another thread enqueues more work, or
  // during a capture, because the marks could become part of its graph.
  bool drain() noexcept;
  // Gives back a resource whose owner ends: immediately if all work is done, else in a later drain() that finds all
  // work done. Resources that remain when the device ends are left to the process.
  void give_back(const Remnant &remnant) noexcept;
  // give_back_now() gives back a resource that nothing on the GPU uses any more, and returns whether it succeeded.
  // keep() keeps a resource that is still in use for a later drain().
  bool give_back_now(const Remnant &remnant) noexcept;
  void keep(const Remnant &remnant) noexcept;
  // How long a destructor may wait for the GPU now.
  uint32_t patience_ms() const noexcept;
  void lose_patience() noexcept { impatient_.store(true, std::memory_order_relaxed); }
  // Throws INVALID_STATE if another capture is under way.
  void begin_capture(uint64_t id);
  void add(WorkSource &worker);
  void remove(WorkSource &worker) noexcept;
  // Called when the owner of the stream ended and the state of the stream's work cannot be queried, as in a capture
  // that an error has ended. Nothing is given back until the stream can be queried, for example after
  // cudaStreamEndCapture.
  void lose_track(cudaStream_t stream) noexcept;
  // Is the stream being captured? If it is, it cannot be queried.
  bool is_captured(cudaStream_t stream) const noexcept;
  // Throws, and fails the context, if the GPU is lost. This enqueues work, and CUDA may then wait for the GPU, so lanes
  // must not call it.
  void check_gpu() const;
  // Does the same, on any thread: it only queries the event, and only while the word has not reached `count`. Does
  // nothing while another thread checks the GPU, because CUDA may keep that thread waiting.
  void look_at(cudaEvent_t event, const PinnedWord &word, uint32_t count) const;
  // All events are destroyed here, so that no event is destroyed while a thread queries it.
  cudaError_t destroy_event(cudaEvent_t event) const noexcept;

  const int index;
  const Options options;
  const Waiter &waiter;  // for waits on the caller's thread
  Failure &failure;
  const Waiter worker_waiter;  // like `waiter`, without the hook, which runs only on the caller's thread
  const Checker check;
  const Driver driver;
  PrimaryContext context;
  // The graph capture that the engine has begun; 0: none.
  std::atomic<uint64_t> live_capture{0};
  std::atomic<uint32_t> lanes{0};    // number of live lanes
  std::atomic<uint32_t> streams{1};  // number of the library's live streams; the first one is probe_stream_
  WordPool words;

 private:
  using Clock = std::chrono::steady_clock;

  // Resources to give back, and the words that must be written before that.
  struct Due {
    std::vector<Remnant> remnants;
    std::vector<AwaitedWord> words;
  };
  bool mark_all(Due &due) noexcept;
  bool find_lost_streams();
  void await_lost_streams(Clock::time_point end) noexcept;
  bool lost_streams_busy() noexcept;
  bool await_all(const std::vector<AwaitedWord> &awaited, Clock::time_point end) noexcept;
  void leave_the_rest() noexcept;
  void warn(uint64_t on_gpu, uint64_t pinned) const noexcept;

  std::mutex draining_;  // held by the thread that drains; locked before mutex_, which is not held during the wait
  std::mutex mutex_;
  std::vector<WorkSource *> sources_;
  std::vector<Remnant> remnants_;
  std::vector<cudaStream_t> lost_streams_;
  bool lost_timed_out_ = false;  // guarded by draining_: the last wait for the lost streams was in vain
  bool lost_for_good_ = false;   // a lost stream could not be remembered, for lack of memory
  std::atomic<bool> impatient_{false};
  AwaitedWord late_;  // the word for which the last wait in vain waited
  // The probe's stream has no other work; see check_gpu.
  mutable std::mutex probe_mutex_;  // inside a wait, no thread blocks on it
  cudaStream_t probe_stream_ = nullptr;
  cudaEvent_t probe_ = nullptr;
};

// Blocks the calling thread until the GPU has written `count` or more: spins briefly, then sleeps. Throws the waiter's
// errors, the error with which the GPU was lost, or TIMEOUT, which names `what`. Threads that must not enqueue work
// pass the event whose record writes the word.
void await_word(const PinnedWord &word, uint32_t count, const char *what, const Core &core, const Waiter &waiter,
                cudaEvent_t event = nullptr);

// For destructors: waits for at most `timeout_ms`, even if the context has failed. Returns whether the word has been
// written.
bool await_word(const PinnedWord &word, uint32_t count, const Core &core, uint32_t timeout_ms) noexcept;

}  // namespace fsdp::device::cuda
