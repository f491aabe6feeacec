// SPDX-License-Identifier: Apache-2.0

#include "transport/nccl/handle.h"

#include <pthread.h>

#include <thread>
#include <utility>

#include "base/library_thread.h"
#include "transport/nccl/library.h"

namespace fsdp::transport::nccl {

std::shared_ptr<LaunchOrder> LaunchOrder::of(device::Device &device) {
  if (!device.launch_order) device.launch_order = std::make_shared<LaunchOrder>(device);
  return std::static_pointer_cast<LaunchOrder>(device.launch_order);
}

namespace {

fsdp_status status_of(Result result) {
  switch (result) {
    case remote_error: return FSDP_PEER_FAILED;
    case timed_out: return FSDP_TIMEOUT;
    case invalid_argument:
    case invalid_usage: return FSDP_INTERNAL;
    default: return FSDP_SYSTEM;
  }
}

std::string text_or(const char *text, const char *otherwise) { return text && *text ? text : otherwise; }

}  // namespace

Error error_of(const Library &library, Comm *comm, Result result, const NcclCall &call) {
  const std::string last = text_or(library.ncclGetLastError(comm), "no further text");
  return Error(status_of(result),
               format_text("{}: rank {}: {} returned {}, \"{}\"; NCCL {} says: {}", call.what, call.world_rank,
                           call.function, static_cast<int>(result),
                           text_or(library.ncclGetErrorString(result), "unknown"), version_text(library.version), last),
               -1, FSDP_ORIGIN_NCCL, result);
}

namespace {

constexpr auto poll_interval = std::chrono::milliseconds(1);
constexpr auto handle_patience = std::chrono::seconds(10);

}  // namespace

void Handle::keep_parent() noexcept {
  const std::lock_guard lock(parent_.mutex);
  parent_.comm = parent_.written();
}

void Handle::publish() noexcept {
  {
    const std::lock_guard lock(child_.mutex);
    child_.comm = child_.written();
  }
  watch(true);
}

Comm *Handle::leave_child() noexcept {
  if (ending()) return nullptr;
  child_.slot = nullptr;
  return std::exchange(child_.comm, nullptr);
}

Comm *Handle::leave_parent() noexcept {
  if (ending_.exchange(true, std::memory_order_acq_rel)) return nullptr;
  ended_.store(true, std::memory_order_release);
  return std::exchange(parent_.comm, nullptr);
}

std::optional<Result> Handle::look() noexcept {
  const std::unique_lock lock(launching().mutex, std::try_to_lock);
  if (!lock.owns_lock() || !comm() || !watched_.load(std::memory_order_acquire)) return std::nullopt;
  Result state = success;
  const Result result = library_->ncclCommGetAsyncError(comm(), &state);
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
    // The thread runs NCCL's code, so it has the system's default stack.
    pthread_detach(LibraryThread{"fsdp-nccl-abort", "an abort of NCCL's", 0}.start(work, argument.get()));
    (void)argument.release();
  } catch (const std::exception &) {  // no thread can start: successive aborts are better than none
    (void)handle->end();
  }
}

void *Handle::work(void *argument) {
  const std::unique_ptr<std::shared_ptr<Handle>> owner(static_cast<std::shared_ptr<Handle> *>(argument));
  allow_calls_during_captures();
  std::shared_ptr<Handle> handle = *owner;
  if (!handle->end())
    (void)new std::shared_ptr<Handle>(std::move(handle));  // NCCL may still write to it, so it is never freed
  return nullptr;
}

// No thread enters NCCL with the parent any more, because parent() returns NULL. A parent that is being made can be
// aborted as soon as its pointer is known.
Comm *Handle::take_parent(bool &known) noexcept {
  {
    const std::lock_guard lock(parent_.mutex);
    parent_.comm = nullptr;
    if (!started_) return nullptr;
  }
  const auto last = std::chrono::steady_clock::now() + handle_patience;
  while (!written() && std::chrono::steady_clock::now() < last) std::this_thread::sleep_for(poll_interval);
  Comm *comm = written();
  known = comm != nullptr;
  return comm;
}

// A thread inside a call of the child returns, because the parent has been aborted. NCCL writes the pointer of a child
// even if the split has failed.
Comm *Handle::take_child() noexcept {
  const std::lock_guard lock(child_.mutex);
  child_.comm = nullptr;
  return child_.written();
}

bool Handle::end() noexcept {
  bool known = true;
  if (Comm *parent = take_parent(known)) (void)library_->ncclCommAbort(parent);
  if (Comm *child = take_child()) (void)library_->ncclCommAbort(child);
  ended_.store(true, std::memory_order_release);
  return known;
}

bool Handle::await_end(std::chrono::milliseconds patience) const noexcept {
  const auto last = std::chrono::steady_clock::now() + patience;
  while (!ended() && std::chrono::steady_clock::now() < last) std::this_thread::sleep_for(poll_interval);
  return ended();
}

}  // namespace fsdp::transport::nccl
