// SPDX-License-Identifier: Apache-2.0
// Work of a device's stream, which tells nobody when it is done: an event is recorded behind it, and whoever looks next
// completes its entries. A fixed number of both, so that a step allocates nothing.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/context.h"

namespace fsdp::engine {

class InFlight final : public Unsettled {
 public:
  using Broken = bool (*)(const void *comm);
  struct Tracked {
    uint64_t handle = 0;  // in the flight recorder
    trace::TimelineEvent event{};
    const void *comm = nullptr;  // NULL: it is never skipped
    Broken broken = nullptr;
  };

  explicit InFlight(Context &context);
  ~InFlight() override;
  InFlight(const InFlight &) = delete;
  InFlight &operator=(const InFlight &) = delete;

  // All that the stream has been given until now includes the entry's work.
  void add(device::Stream &stream, const Tracked &entry);
  // Completes what is done. Nothing once the context has failed: then streams go on without having done their work. Any
  // thread.
  void settle() noexcept override;

 private:
  static constexpr uint64_t most_marks = 32, most_entries = 512;
  struct Mark {
    std::unique_ptr<device::Event> event;
    uint64_t end = 0;  // entries before it are done when the event is
  };
  void complete(const Tracked &entry) noexcept;

  Context &context_;
  std::mutex mutex_;
  std::array<Mark, most_marks> marks_;
  std::vector<Tracked> entries_;
  uint64_t first_mark_ = 0, next_mark_ = 0;  // those between are pending, oldest first
  uint64_t first_entry_ = 0, next_entry_ = 0;
  uint64_t last_end_ns_ = 0;
};

}  // namespace fsdp::engine
