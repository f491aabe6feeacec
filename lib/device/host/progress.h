// SPDX-License-Identifier: Apache-2.0
// The finished work of a stream, as a count. The device owns this, so that events and waits may outlive their stream.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "base/failure.h"
#include "device/device.h"
#include "device/host/futex.h"

namespace fsdp::device {

class Progress {
 public:
  explicit Progress(std::string name) : name_(std::move(name)) {}

  const std::string &name() const noexcept { return name_; }
  uint64_t completed() const noexcept { return completed_.load(std::memory_order_acquire); }

  // The number of the thread that does the work; 0: no thread has begun.
  void set_worker(uint64_t thread) noexcept { worker_.store(thread, std::memory_order_relaxed); }
  uint64_t worker() const noexcept { return worker_.load(std::memory_order_relaxed); }
  // The progress of the stream for which the worker is waiting; NULL: none. Both exist as long as their device.
  void set_awaited(const Progress *other) noexcept { awaited_.store(other, std::memory_order_release); }
  const Progress *awaited() const noexcept { return awaited_.load(std::memory_order_acquire); }

  // Makes complete() also store the low 32 bits of `from` + count to `word`, for readers that cannot sleep on a futex.
  // Must be called before the worker begins.
  void mirror(Word *word, uint32_t from) noexcept {
    remote_ = word;
    mirror_from_ = from;
  }

  // Called only by the stream, when `count` pieces of work are done. Makes a system call only if a thread sleeps until
  // this count.
  void complete(uint64_t count) noexcept;
  // Sleeps until `count` pieces are done, for at most `longest`; may return early.
  void sleep(uint64_t count, std::chrono::nanoseconds longest) noexcept;

 private:
  static constexpr uint64_t nobody = UINT64_MAX;

  alignas(64) std::atomic<uint64_t> completed_{0};
  std::atomic<uint64_t> wanted_{nobody};  // the smallest count for which a thread sleeps
  Word wakes_{0};                         // the word on which these threads sleep
  std::atomic<uint64_t> worker_{0};
  std::atomic<const Progress *> awaited_{nullptr};
  Word *remote_ = nullptr;
  uint32_t mirror_from_ = 0;
  std::string name_;
};

// Blocks the calling thread until `count` pieces are done: spins briefly, then sleeps, polling the waiter every 20 ms.
// Throws the waiter's errors, and TIMEOUT if the stream does nothing for the waiter's timeout. If the context has
// failed by then, throws the context's error, because the work may have been skipped.
void await_progress(Progress &progress, uint64_t count, const Waiter &waiter);

// An event that is done when a stream's progress has reached a count. An event without a stream is done. One thread at
// a time records it and waits for it.
class HostEvent final : public Event {
 public:
  bool done() const noexcept override { return !progress_ || progress_->completed() >= count_; }
  void set(Progress *progress, uint64_t count) noexcept {
    progress_ = progress;
    count_ = count;
  }
  Progress *progress() const noexcept { return progress_; }
  uint64_t count() const noexcept { return count_; }

 private:
  Progress *progress_ = nullptr;
  uint64_t count_ = 0;
};

inline HostEvent &host_event(Event &event) { return static_cast<HostEvent &>(event); }
inline const HostEvent &host_event(const Event &event) { return static_cast<const HostEvent &>(event); }

// Blocks the calling thread until the event is done; throws if the context has failed by then.
inline void await_event(const Event &event, const Waiter &waiter) {
  const auto &host = host_event(event);
  if (host.progress()) await_progress(*host.progress(), host.count(), waiter);
}

}  // namespace fsdp::device
