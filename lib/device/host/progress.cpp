// SPDX-License-Identifier: Apache-2.0

#include "device/host/progress.h"

#include <algorithm>

namespace fsdp::device {

using namespace std::chrono_literals;

// complete() stores completed_ and then reads wanted_; sleep() stores wanted_ and then reads completed_. All of these
// are sequentially consistent, so at least one of the two sees the other's store. complete() may also erase a newer
// value of wanted_. The thread that stored this value still wakes, because wakes_ has changed after the thread read it.
void Progress::complete(uint64_t count) noexcept {
  completed_.store(count, std::memory_order_seq_cst);
  if (remote_) remote_->store(mirror_from_ + static_cast<uint32_t>(count), std::memory_order_release);
  if (wanted_.load(std::memory_order_seq_cst) > count) return;
  wanted_.store(nobody, std::memory_order_seq_cst);
  wakes_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(wakes_);
}

void Progress::sleep(uint64_t count, std::chrono::nanoseconds longest) noexcept {
  const uint32_t seen = wakes_.load(std::memory_order_seq_cst);
  uint64_t wanted = wanted_.load(std::memory_order_seq_cst);
  while (count < wanted && !wanted_.compare_exchange_weak(wanted, count, std::memory_order_seq_cst)) {
  }
  if (completed_.load(std::memory_order_seq_cst) < count) futex_wait(wakes_, seen, longest);
}

namespace {

// The work itself also times out, with a better message that names the late rank. So this wait lasts longer, by this
// time.
constexpr auto courtesy = 500ms;
constexpr auto longest_pause = 100ms;   // a longer pause between two checks means that the process was stopped
constexpr auto longest_common = 100ms;  // only longer waits are reported to the observer, because a report takes memory

// During this scope the waiter's observer knows for what the waiter waits.
class ObserverScope {
 public:
  explicit ObserverScope(WaitObserver *observer) : observer_(observer) {}
  ~ObserverScope() {
    if (observer_) observer_->look_away();
  }
  ObserverScope(const ObserverScope &) = delete;
  ObserverScope &operator=(const ObserverScope &) = delete;
  void look(uint64_t thread) {
    if (observer_) observer_->look(thread);
  }

 private:
  WaitObserver *observer_;
};

// The thread for whose work this stream waits, directly or through other streams. Streams may continue while the waits
// are followed, so the caller must ask again later.
uint64_t last_worker(const Progress &progress) noexcept {
  constexpr int max_streams = 16;
  const Progress *last = &progress;
  for (int i = 0; i < max_streams; ++i) {
    const Progress *next = last->awaited();
    if (!next) break;
    last = next;
  }
  return last->worker();
}

// The pieces of work that the stream has done, and the streams for which it waits.
uint64_t done_along(const Progress &progress) {
  uint64_t done = 0;
  int hops = 0;
  for (const Progress *one = &progress; one && hops < 16; one = one->awaited(), ++hops) done += one->completed();
  return done;
}

void sleep_until(Progress &progress, uint64_t count, const Waiter &waiter) {
  const auto timeout = std::chrono::milliseconds(waiter.timeout_ms()) + courtesy;
  auto last = done_along(progress);
  auto since = std::chrono::steady_clock::now();
  auto look = since;
  const auto start = since;
  ObserverScope observer(waiter.observer());
  while (progress.completed() < count) {
    waiter.poll();
    if (look - start >= longest_common) observer.look(last_worker(progress));
    // If the process was stopped, its work was stopped, too, and the work can report more about it.
    const auto now = std::chrono::steady_clock::now();
    if (now - look > longest_pause) since += now - look;
    look = now;
    const auto idle = now - since;
    if (idle >= timeout)
      fail(FSDP_TIMEOUT, "stream '{}' did nothing for {} ms: {} of {} pieces of work are done", progress.name(),
           waiter.timeout_ms(), progress.completed(), count);
    progress.sleep(count, std::min<std::chrono::nanoseconds>(20ms, timeout - idle));
    if (const auto done = done_along(progress); done != last) {
      last = done;
      since = std::chrono::steady_clock::now();
    }
  }
}

}  // namespace

void await_progress(Progress &progress, uint64_t count, const Waiter &waiter) {
  const auto reached = [&] { return progress.completed() >= count; };
  if (!spin_until(reached, 20us)) sleep_until(progress, count, waiter);
  waiter.failure().check();
}

}  // namespace fsdp::device
