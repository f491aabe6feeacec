// SPDX-License-Identifier: Apache-2.0
#include "run/exit_order.h"

#include <sys/epoll.h>

#include "run/failure.h"

namespace run {

ExitOrder::ExitOrder() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_.get() < 0) fail("cannot make an epoll instance");
}

void ExitOrder::watch(size_t index, int pidfd) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLET;  // once; again when a debugger lets go of what has ended
  event.data.u64 = index;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, pidfd, &event) != 0) fail("cannot watch for the end of a rank");
}

// When a process ends, the kernel appends it to the list that epoll_wait reads, even if fsdp-run is doing something
// else then.
std::vector<size_t> ExitOrder::take() {
  std::vector<size_t> ended;
  epoll_event events[64];
  for (int count; (count = epoll_wait(epoll_.get(), events, 64, 0)) > 0;)
    for (int i = 0; i < count; ++i) ended.push_back(static_cast<size_t>(events[i].data.u64));
  return ended;
}

}  // namespace run
