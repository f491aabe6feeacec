// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "device/device.h"
#include "device/host/progress.h"

namespace fsdp::device {

// A count of a stream's progress; without a stream it is done. One thread at a time records and waits.
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
