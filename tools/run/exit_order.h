// SPDX-License-Identifier: Apache-2.0
// The ranks that have ended, in the order of their ends. The first one is usually the cause of the others' ends.
// Neither process ids nor the order of waiting for processes tell that order.
#pragma once

#include <cstddef>
#include <vector>

#include "run/unique_fd.h"

namespace run {

class ExitOrder {
 public:
  ExitOrder();
  // pidfd: of rank `index`, watched until it is closed.
  void watch(size_t index, int pidfd);
  // Those that have ended since the last call, the earliest first.
  std::vector<size_t> take();
  // Readable when a process has ended.
  int fd() const { return epoll_.get(); }

 private:
  UniqueFd epoll_;
};

}  // namespace run
