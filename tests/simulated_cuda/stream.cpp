// SPDX-License-Identifier: Apache-2.0
// Implements the thread of a stream.
#include "simulated_cuda/stream.h"

#include <cstdio>
#include <exception>
#include <utility>

#include "simulated_cuda/device.h"
#include "simulated_cuda/runtime.h"

namespace simulated {
Stream::Stream(Device &device, bool blocking, uint64_t number, HardwareQueue *queue)
    : device(device),
      blocking(blocking),
      number(number),
      queue_(queue),
      last_(&works_.emplace_back()),
      random_(number) {
  last_->finish();  // the stream starts here
  thread_ = std::thread([this, first = last_] {
    random_ ^= runtime().timing.seed.load(std::memory_order_relaxed);
    for (Work *work = next_of(first); work; work = next_of(work)) do_piece(*work);
  });
}

Stream::~Stream() { join(); }

void Stream::join() {
  close();
  if (thread_.joinable()) thread_.join();
}

void Stream::await_room() const {
  const uint64_t most = runtime().stream_room.load(std::memory_order_relaxed);
  if (most == 0) return;
  const auto full = [&] {
    return enqueued_.load(std::memory_order_relaxed) - done_.load(std::memory_order_relaxed) >= most;
  };
  while (full() && device.healthy() && !runtime().timing.stopping.load(std::memory_order_relaxed))
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

Work *Stream::push(std::function<void()> run, std::vector<Work *> after, bool waits) {
  Work &work = works_.emplace_back();
  work.run = std::move(run);
  work.after = std::move(after);
  work.waits = waits;
  if (queue_) queue_->append(work);
  std::exchange(last_, &work)->next.store(&work, std::memory_order_release);
  enqueued_.fetch_add(1, std::memory_order_relaxed);
  pushed_.fetch_add(1, std::memory_order_release);
  futex_wake_all(pushed_);
  return &work;
}

void Stream::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  if (queue_) --queue_->streams;
  pushed_.fetch_or(1u << 31, std::memory_order_release);
  futex_wake_all(pushed_);
}

Work *Stream::next_of(Work *work) {
  while (true) {
    const uint32_t seen = pushed_.load(std::memory_order_acquire);
    if (Work *next = work->next.load(std::memory_order_acquire)) return next;
    if (seen >> 31) return nullptr;
    futex_wait(pushed_, seen, std::chrono::seconds(1));
  }
}

// The piece first reaches the head of its hardware queue, and then waits for the work that must come before it.
void Stream::do_piece(Work &work) {
  if (work.ahead && !work.ahead->has_started()) {
    const StreamWait mark(waits);
    work.ahead->await_start();
  }
  for (const Work *other : work.after) {
    if (other->done()) continue;
    const StreamWait mark(waits);
    other->wait();
  }
  if (!work.waits) work.start();
  pause();
  this_thread().stream = this;
  try {
    if (work.run && device.healthy()) work.run();
  } catch (const std::exception &error) {
    std::fprintf(stderr, "simulated CUDA: a kernel threw: %s\n", error.what());
    device.fail(cudaErrorLaunchFailure);
  }
  work.run = nullptr;
  work.start();
  work.finish();
  done_.fetch_add(1, std::memory_order_relaxed);
}

void Stream::pause() {
  Timing &timing = runtime().timing;
  while (const uint32_t holds = timing.holds.load(std::memory_order_relaxed)) {
    if (timing.stopping.load(std::memory_order_relaxed)) return;
    const StreamWait mark(waits);
    futex_wait(timing.holds, holds, std::chrono::milliseconds(100));
  }
  if (timing.stopping.load(std::memory_order_relaxed)) return;
  const uint32_t own = delay_us.load(std::memory_order_relaxed);
  if (own != 0) std::this_thread::sleep_for(std::chrono::microseconds(own));
  const uint32_t longest = timing.longest_us.load(std::memory_order_relaxed);
  if (longest == 0) return;
  std::this_thread::sleep_for(std::chrono::microseconds(next_random(random_) % (uint64_t{longest} + 1)));
}

}  // namespace simulated
