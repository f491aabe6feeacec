// SPDX-License-Identifier: Apache-2.0
// Points of the caller's streams: an event for each stream in use. Recording one event on two streams makes the second
// wait for the first, so streams that share one are slow together.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "device/device.h"

namespace fsdp::engine {

class StreamEvents {
 public:
  static constexpr size_t most_streams = 4;

  void create(device::Device &device) {
    const size_t count = device.traits().host_memory ? 1 : most_streams;  // on the host there is one stream
    for (size_t i = 0; i < count; ++i) entries_.push_back({nullptr, false, device.create_event()});
  }
  // Of this stream. Streams beyond the most share the last one, unless the work of another is done.
  device::Event &of(fsdp_stream stream) noexcept {
    const auto mine = [=](const Point &point) { return point.used && point.stream == stream; };
    const auto free = [](const Point &point) { return !point.used || point.event->done(); };
    auto found = std::find_if(entries_.begin(), entries_.end(), mine);
    if (found == entries_.end()) found = std::find_if(entries_.begin(), entries_.end(), free);
    if (found == entries_.end()) --found;
    found->stream = stream;
    found->used = true;
    return *found->event;
  }
  template <class Visit>
  void for_each(Visit &&visit) const {
    for (const Point &point : entries_) visit(*point.event);
  }

 private:
  struct Point {
    fsdp_stream stream;
    bool used;
    std::unique_ptr<device::Event> event;
  };
  std::vector<Point> entries_;
};

}  // namespace fsdp::engine
