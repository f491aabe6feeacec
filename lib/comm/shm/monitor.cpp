// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/monitor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

namespace fsdp::comm {

Monitor::Monitor(std::shared_ptr<Seat> seat, std::unique_ptr<Chore> chore)
    : seat_(std::move(seat)), chore_(std::move(chore)), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) fail_errno(errno, "the eventfd of the monitor");
  seat_->control.introduce(seat_->rank);
  seat_->pulse.look();  // from now on it is missed if it stops
  start();
}

Monitor::~Monitor() {
  stop_.store(true, std::memory_order_release);
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
  pthread_join(thread_, nullptr);
}

// Signals belong to the host program's threads: they are blocked around the creation, which the thread inherits.
void Monitor::start() {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  const long least = std::max(sysconf(_SC_THREAD_STACK_MIN), 0L);
  pthread_attr_setstacksize(&attributes, static_cast<size_t>(least) + size_t{256} * 1024);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const auto body = [](void *self) -> void * {
    static_cast<Monitor *>(self)->work();
    return nullptr;
  };
  const int code = pthread_create(&thread_, &attributes, body, this);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  pthread_attr_destroy(&attributes);
  if (code != 0) fail_errno(code, "start the monitor's thread");
  pthread_setname_np(thread_, "fsdp-monitor");
}

void Monitor::work() noexcept {
  const uint32_t ms = seat_->pulse.interval_ms();
  while (!stop_.load(std::memory_order_acquire)) {
    seat_->pulse.look();
    if (chore_) {
      chore_->run(wake_.get(), ms);
      continue;
    }
    pollfd entry{wake_.get(), POLLIN, 0};
    ::poll(&entry, 1, static_cast<int>(ms));
  }
  if (chore_) chore_->finish();
}

}  // namespace fsdp::comm
