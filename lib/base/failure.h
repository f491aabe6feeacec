// SPDX-License-Identifier: Apache-2.0
// The sticky failure of one context, shared by its caller, its streams and its communicators. The first error wins
// and stays until the context ends. Every wait polls failed(), so setting it wakes all waits within a poll period.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>

#include "base/error.h"

namespace fsdp {

// The clock by which time limits are measured.

inline uint64_t steady_ms() noexcept {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count());
}

// How long a wait sleeps before it checks again whether it should continue.

inline constexpr int slice_ms = 20;

// Like slice_ms, for a wait for all ranks of a job with `ranks` ranks. The awaited event wakes such a wait. Its checks
// find only events that do not wake it: a verdict, or the caller's wish to stop. If thousands of processes share a
// machine, frequent checks would use up all of its CPU time.
constexpr int slice_ms_of(uint32_t ranks) {
  return ranks <= 512 ? slice_ms : ranks <= 2048 ? 5 * slice_ms : 10 * slice_ms;
}

class Failure {
 public:
  // Returns true if this error was the first.
  bool set(const Error &error) noexcept {
    std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return false;
    try {
      error_.emplace(error);
    } catch (...) {  // no memory for the text: get() has a short one
    }
    failed_.store(true, std::memory_order_release);
    return true;
  }
  bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
  void check() const {
    if (failed()) throw *get();
  }
  std::optional<Error> get() const {
    std::lock_guard lock(mutex_);
    if (!error_ && failed_.load(std::memory_order_relaxed)) return Error(FSDP_OUT_OF_MEMORY, "failed");
    return error_;
  }

 private:
  mutable std::mutex mutex_;
  std::optional<Error> error_;
  std::atomic<bool> failed_{false};
};

// A number for the calling thread. Unlike thread ids, these numbers are not reused, so a library thread never has the
// number of a caller's thread that has ended.
uint64_t thread_number() noexcept;

// Observes waits of the caller for one of its own streams, whose work may wait for peers: see
// membership/liveness/watch.h.
class WaitObserver {
 public:
  // Called while the caller waits for the work of `thread`, about every 20 ms; throws to end the wait.
  virtual void look(uint64_t thread) = 0;
  // Called when the caller no longer waits.
  virtual void look_away() noexcept = 0;

 protected:
  ~WaitObserver() = default;
};

// Work that the caller's thread does in all its waits while the job forms: see membership/join/forming_watch.h.
class WaitTask {
 public:
  // Called at every poll; throws to end the wait.
  virtual void look() = 0;
  // `error` is the reason why the job cannot form, as this rank sees it. Returns the reason that all ranks report.
  virtual Error settle(const Error &error) = 0;

 protected:
  ~WaitTask() = default;
};

// A wait on the caller's own thread calls poll() between two checks of its condition. poll() throws if the context has
// failed, or if the caller's interrupted hook or flag asks to stop. Waits on library threads use a Waiter without a
// hook.
class Waiter {
 public:
  // `flag`: the caller's flag, to which any thread or signal handler may write; NULL: no flag.
  Waiter(const Failure &failure, fsdp_interrupted_hook hook, void *data, uint32_t timeout_ms,
         const int32_t *flag = nullptr)
      : failure_(failure), hook_(hook), data_(data), timeout_ms_(timeout_ms), flag_(flag) {}
  void poll() const {
    failure_.check();
    if (task_) task_->look();
    if (flag_ && __atomic_load_n(flag_, __ATOMIC_ACQUIRE))
      fail(FSDP_INTERRUPTED, "the interrupted flag asked to stop waiting");
    if (hook_ && hook_(data_)) fail(FSDP_INTERRUPTED, "the interrupted hook asked to stop waiting");
  }
  uint32_t timeout_ms() const { return timeout_ms_; }
  // Sets the name of the caller's current call, for messages; it must be a string literal. set_model() adds the model's
  // number if the context has several models.
  void set_call(const char *call) const {
    call_.store(call, std::memory_order_relaxed);
    model_.store(no_model, std::memory_order_relaxed);
  }
  void set_model(uint32_t number) const { model_.store(number, std::memory_order_relaxed); }
  const char *call() const { return call_.load(std::memory_order_relaxed); }
  std::string call_text() const {
    const uint32_t model = model_.load(std::memory_order_relaxed);
    return model == no_model ? call() : format_text("{} of model {}", call(), model);
  }
  const Failure &failure() const { return failure_; }
  // NULL: no task. The task must be set and is called only on the caller's thread.
  void set_wait_task(WaitTask *task) const { task_ = task; }
  Error settle(const Error &error) const { return task_ ? task_->settle(error) : error; }
  // NULL: no observer. The observer must outlive the waits.
  void set_observer(WaitObserver *observer) const { observer_.store(observer, std::memory_order_release); }
  WaitObserver *observer() const { return observer_.load(std::memory_order_acquire); }

 private:
  const Failure &failure_;
  fsdp_interrupted_hook hook_;
  void *data_;
  uint32_t timeout_ms_;
  const int32_t *flag_;
  static constexpr uint32_t no_model = UINT32_MAX;
  mutable std::atomic<const char *> call_{"a call"};
  mutable std::atomic<uint32_t> model_{no_model};
  mutable std::atomic<WaitObserver *> observer_{nullptr};
  mutable WaitTask *task_ = nullptr;
};

}  // namespace fsdp
