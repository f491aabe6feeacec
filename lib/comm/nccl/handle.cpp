// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl/handle.h"

#include <pthread.h>

#include <thread>

#include "base/library_thread.h"
#include "comm/nccl/cuda.h"

namespace fsdp::comm::nccl {
namespace {

constexpr auto poll_interval = std::chrono::milliseconds(1);
constexpr auto handle_patience = std::chrono::seconds(10);

}  // namespace

Comm *Handle::written() noexcept { return __atomic_load_n(&slot_, __ATOMIC_ACQUIRE); }

void Handle::publish() noexcept {
  const std::lock_guard lock(mutex_);
  comm_ = written();
  watch(true);
}

Comm *Handle::leave() noexcept {
  Comm *comm = comm_;
  comm_ = nullptr;
  started_ = false;
  ending_.store(true, std::memory_order_release);
  ended_.store(true, std::memory_order_release);
  return comm;
}

std::optional<Result> Handle::look() noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || !comm() || !watched_.load(std::memory_order_acquire)) return std::nullopt;
  Result state = success;
  const Result result = library_->ncclCommGetAsyncError(comm_, &state);
  const Result found = result != success ? result : state;
  if (found != success && found != in_progress) return believes() ? std::optional(found) : std::nullopt;
  found_since_.reset();
  return std::nullopt;
}

bool Handle::believes() noexcept {
  const auto now = std::chrono::steady_clock::now();
  if (!found_since_) found_since_ = now;
  return now - *found_since_ >= std::chrono::milliseconds(doubt_ms_.load(std::memory_order_acquire));
}

void Handle::abort(const std::shared_ptr<Handle> &handle) noexcept {
  if (handle->ending_.exchange(true, std::memory_order_acq_rel)) return;
  try {
    auto argument = std::make_unique<std::shared_ptr<Handle>>(handle);
    // NCCL's code runs on it: the system's stack.
    pthread_detach(LibraryThread{"fsdp-nccl-abort", "an abort of NCCL's", 0}.start(work, argument.get()));
    (void)argument.release();
  } catch (const std::exception &) {  // no thread: one after the other is better than none
    (void)handle->end();
  }
}

void *Handle::work(void *argument) {
  const std::unique_ptr<std::shared_ptr<Handle>> owner(static_cast<std::shared_ptr<Handle> *>(argument));
  allow_calls_during_captures();
  std::shared_ptr<Handle> handle = *owner;
  if (!handle->end())
    (void)new std::shared_ptr<Handle>(std::move(handle));  // NCCL may still write it: left to the process
  return nullptr;
}

// Nobody enters NCCL with it any more: comm() is NULL. One that is being made can be aborted as soon as it is known.
Comm *Handle::take(bool &known) noexcept {
  {
    const std::lock_guard lock(mutex_);
    comm_ = nullptr;
    if (!started_) return nullptr;
  }
  const auto last = std::chrono::steady_clock::now() + handle_patience;
  while (!written() && std::chrono::steady_clock::now() < last) std::this_thread::sleep_for(poll_interval);
  Comm *comm = written();
  known = comm != nullptr;
  return comm;
}

bool Handle::end() noexcept {
  bool known = true;
  if (Comm *comm = take(known)) (void)library_->ncclCommAbort(comm);
  ended_.store(true, std::memory_order_release);
  return known;
}

bool Handle::await_end(std::chrono::milliseconds patience) const noexcept {
  const auto last = std::chrono::steady_clock::now() + patience;
  while (!ended() && std::chrono::steady_clock::now() < last) std::this_thread::sleep_for(poll_interval);
  return ended();
}

}  // namespace fsdp::comm::nccl
