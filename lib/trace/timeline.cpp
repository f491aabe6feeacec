// SPDX-License-Identifier: Apache-2.0
#include "trace/timeline.h"

#include <algorithm>
#include <tuple>

namespace fsdp::trace {

static_assert(std::chrono::steady_clock::period::num == 1 && std::chrono::steady_clock::period::den == 1'000'000'000);

namespace {

uint64_t pack(const TimelineEvent &event) {
  return uint64_t{event.version} << 32 | uint64_t{event.planes} << 24 | uint64_t{event.lane} << 8 |
         static_cast<uint64_t>(event.kind);
}

}  // namespace

// Value-initialized: every page is touched now, and not by an event.
Timeline::Timeline(uint64_t capacity) : capacity_(capacity), slots_(std::make_unique<Cell[]>(capacity)) {}

// Only who finds the slot at rest may write it: one that laps a writer that was interrupted gives its event up. The
// fields are released after the odd state, so that a reader that has seen one of them sees that the state has moved.
void Timeline::record(const TimelineEvent &event) noexcept {
  const uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  Cell &slot = slots_[number % capacity_];
  uint64_t state = slot.state.load(std::memory_order_relaxed);
  if (state & 1 || state > 2 * number) return;
  if (!slot.state.compare_exchange_strong(state, 2 * number + 1, std::memory_order_acquire, std::memory_order_relaxed))
    return;
  slot.name.store(event.name, std::memory_order_release);
  slot.object.store(event.object, std::memory_order_release);
  slot.begin_ns.store(event.begin_ns, std::memory_order_release);
  slot.end_ns.store(event.end_ns, std::memory_order_release);
  slot.bytes.store(event.bytes, std::memory_order_release);
  slot.packed.store(pack(event), std::memory_order_release);
  slot.state.store(2 * number + 2, std::memory_order_release);
}

bool Timeline::read(uint64_t number, TimelineEvent &event) const noexcept {
  const Cell &slot = slots_[number % capacity_];
  if (slot.state.load(std::memory_order_acquire) != 2 * number + 2) return false;
  event.name = slot.name.load(std::memory_order_acquire);
  event.object = slot.object.load(std::memory_order_acquire);
  event.begin_ns = slot.begin_ns.load(std::memory_order_acquire);
  event.end_ns = slot.end_ns.load(std::memory_order_acquire);
  event.bytes = slot.bytes.load(std::memory_order_acquire);
  const uint64_t packed = slot.packed.load(std::memory_order_acquire);
  event.version = static_cast<uint32_t>(packed >> 32);
  event.planes = static_cast<uint8_t>(packed >> 24);
  event.lane = static_cast<TimelineLane>(packed >> 8);
  event.kind = static_cast<EventKind>(packed & 0xFF);
  return slot.state.load(std::memory_order_relaxed) == 2 * number + 2;
}

TimelineSnapshot Timeline::read() const {
  TimelineSnapshot snapshot;
  const uint64_t end = next_.load(std::memory_order_acquire);
  const uint64_t first = end > capacity_ ? end - capacity_ : 0;
  snapshot.events.reserve(end - first);
  TimelineEvent event;
  for (uint64_t number = first; number < end; ++number)
    if (read(number, event)) snapshot.events.push_back(event);
  snapshot.lost = end - snapshot.events.size();
  std::sort(snapshot.events.begin(), snapshot.events.end(), [](const TimelineEvent &a, const TimelineEvent &b) {
    return std::tuple(a.lane, a.begin_ns, b.end_ns) < std::tuple(b.lane, b.begin_ns, a.end_ns);
  });
  return snapshot;
}

const char *Timeline::keep(std::string_view text) {
  const std::lock_guard lock(mutex_);
  return texts_.emplace(text).first->c_str();
}

uint32_t Timeline::open_model() {
  const std::lock_guard lock(mutex_);
  const auto free = std::find(models_.begin(), models_.end(), false);
  const auto model = static_cast<uint32_t>(free - models_.begin());
  if (free == models_.end())
    models_.push_back(true);
  else
    *free = true;
  return model;
}

void Timeline::close_model(uint32_t model) noexcept {
  const std::lock_guard lock(mutex_);
  models_[model] = false;
}

}  // namespace fsdp::trace
