// SPDX-License-Identifier: Apache-2.0
#include "membership/liveness/monitor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/library_thread.h"

namespace fsdp::membership {

Monitor::Monitor(std::shared_ptr<Seat> seat, std::unique_ptr<MonitorTask> task)
    : seat_(std::move(seat)), task_(std::move(task)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) fail_errno(errno, "the eventfd of the monitor");
  seat_->control.introduce(seat_->rank);
  seat_->pulse.look();  // the first heartbeat; from now on others notice if this rank stops
  start();
}

Monitor::~Monitor() {
  stop_.store(true, std::memory_order_release);
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
  pthread_join(thread_, nullptr);
}

void Monitor::start() {
  const auto body = [](void *self) -> void * {
    static_cast<Monitor *>(self)->work();
    return nullptr;
  };
  thread_ = LibraryThread{"fsdp-monitor", "the monitor"}.start(body, this);
}

void Monitor::work() noexcept {
  const uint32_t ms = seat_->pulse.interval_ms();
  while (!stop_.load(std::memory_order_acquire)) {
    seat_->pulse.look();
    if (task_) {
      task_->run(wake_.get(), ms);
      continue;
    }
    pollfd entry{wake_.get(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(ms));
  }
  if (task_) task_->finish();
}

}  // namespace fsdp::membership
