// SPDX-License-Identifier: Apache-2.0
#include "device/host/worker_stream.h"

#include <sched.h>

#include <algorithm>

#include "base/float_environment.h"
#include "base/library_thread.h"

namespace fsdp::device {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

SpinBudget::SpinBudget() {
  cpu_set_t cpus;
  const bool alone = sched_getaffinity(0, sizeof cpus, &cpus) == 0 && CPU_COUNT(&cpus) == 1;
  longest_ = alone ? 0us : 20us;
  budget_ = longest_;
}

void SpinBudget::observe(std::chrono::nanoseconds idle) {
  budget_ = idle <= 20us ? std::max<std::chrono::nanoseconds>(budget_ * 2, 1us) : budget_ / 2;
  budget_ = std::min(budget_, longest_);
}

WorkerStream::WorkerStream(const Options &options, const std::string &name, Progress &progress,
                           const Waiter &caller_waiter, const Waiter &worker_waiter, Failure &failure)
    : progress_(progress),
      caller_waiter_(caller_waiter),
      worker_waiter_(worker_waiter),
      failure_(failure),
      delay_(options, name),
      ring_(std::make_unique<Task[]>(capacity)) {
  start(name);
}

WorkerStream::~WorkerStream() {
  stop_.store(true, std::memory_order_seq_cst);
  wake();
  pthread_join(thread_, nullptr);
}

void WorkerStream::start(const std::string &name) {
  const auto body = [](void *self) -> void * {
    static_cast<WorkerStream *>(self)->work();
    return nullptr;
  };
  thread_ = LibraryThread{"fsdp-" + name, format_text("stream '{}'", name)}.start(body, this);
}

// With delays streams are to be late, and not their callers.
bool WorkerStream::borrow() noexcept {
  borrowed_ = !delay_.delays() && progress_.completed() == enqueued_.load(std::memory_order_relaxed);
  return borrowed_;
}

void WorkerStream::record(Event &event) {
  host_event(event).set(&progress_, enqueued_.load(std::memory_order_relaxed));
}

// The count is taken now, so that a later record of the same event does not move this wait.
void WorkerStream::wait(const Event &event) {
  if (event.done()) return;
  const auto &host = host_event(event);
  if (host.progress() == &progress_) return;  // its own past
  run([this, other = host.progress(), count = host.count()] { await_other(*other, count); });
}

// In the worker; its waiting callers are to know what it waits for.
void WorkerStream::await_other(Progress &other, uint64_t count) {
  progress_.set_awaited(&other);
  try {
    await_progress(other, count, worker_waiter_);
  } catch (...) {
    progress_.set_awaited(nullptr);
    throw;
  }
  progress_.set_awaited(nullptr);
}

void WorkerStream::run(const Task &task) {
  if (borrowed_) {
    failure_.check();
    return run_for_stream(task, failure_);
  }
  const uint64_t ticket = enqueued_.load(std::memory_order_relaxed);
  if (ticket - progress_.completed() >= capacity) await_progress(progress_, ticket - capacity + 1, caller_waiter_);
  ring_[ticket % capacity] = task;
  enqueued_.store(ticket + 1, std::memory_order_seq_cst);
  wake();
}

void WorkerStream::wake() noexcept {
  if (asleep_.load(std::memory_order_seq_cst) == 0) return;
  asleep_.store(0, std::memory_order_seq_cst);
  futex_wake_all(asleep_);
}

void WorkerStream::work() noexcept {
  const FloatEnvironment standard;  // tasks compute too
  progress_.set_worker(thread_number());
  for (uint64_t done = 0; next(done);) {
    step(ring_[done % capacity]);
    progress_.complete(++done);
  }
}

bool WorkerStream::next(uint64_t done) noexcept {
  const auto filled = [&] { return enqueued_.load(std::memory_order_acquire) != done; };
  if (filled()) return true;
  const auto since = Clock::now();
  const auto due = [&] { return filled() || stop_.load(std::memory_order_acquire); };
  if (!spin_until(due, spin_.get())) sleep(done);
  spin_.observe(Clock::now() - since);
  return filled();
}

// asleep_ is set before the last look at the ring, the producer fills the ring before it looks at asleep_: one of the
// two sees the other.
void WorkerStream::sleep(uint64_t done) noexcept {
  for (;;) {
    asleep_.store(1, std::memory_order_seq_cst);
    if (enqueued_.load(std::memory_order_seq_cst) != done || stop_.load(std::memory_order_seq_cst)) break;
    futex_wait(asleep_, 1, -1ns);
  }
  asleep_.store(0, std::memory_order_relaxed);
}

void WorkerStream::step(Task &task) noexcept {
  if (broken_ || failure_.failed()) return;
  delay_();
  if (failure_.failed()) return;
  try {
    task();
  } catch (...) {
    broken_ = true;  // even if the error could not be kept for lack of memory
    failure_.set(current_error());
  }
}

}  // namespace fsdp::device
