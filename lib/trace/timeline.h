// SPDX-License-Identifier: Apache-2.0
// The timeline of one context: the last events, in a ring that is allocated once. Any thread records without a lock, an
// allocation or a system call, and any thread may read meanwhile: an event that is being written is left out.
//
// A lane is what events lie in without overlapping: the caller's calls, or the work of one stream. Texts are kept by
// the timeline (or are literals), since a trace is written when models are long gone.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "trace/nvtx.h"

namespace fsdp::trace {

// seen: a collective on a device, from when it was enqueued (or the one before it was seen done) to when it was seen
// done.
enum class EventKind : uint8_t { call, wait, collective, user, instant, seen };

using TimelineLane = uint16_t;
inline constexpr TimelineLane caller_lane = 0;
// Models have three lanes each, by their number in the timeline.
constexpr TimelineLane gather_lane(uint32_t model) { return static_cast<TimelineLane>(1 + 3 * model); }
constexpr TimelineLane reduce_lane(uint32_t model) { return static_cast<TimelineLane>(2 + 3 * model); }
constexpr TimelineLane outer_lane(uint32_t model) { return static_cast<TimelineLane>(3 + 3 * model); }

// Planes of quantized weights that a gather moves.
enum TimelinePlanes : uint8_t { row_planes = 1, column_planes = 2 };

struct TimelineEvent {
  const char *name;
  const char *object;         // a group's name, or NULL
  uint64_t begin_ns, end_ns;  // of the clock below
  uint64_t bytes;             // 0: none
  uint32_t version;           // of the published weights; 0: none
  TimelineLane lane;
  EventKind kind;
  uint8_t planes = 0;  // TimelinePlanes
};

// CLOCK_MONOTONIC: one for all processes of a machine.
inline uint64_t now_ns() noexcept {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

struct TimelineSnapshot {
  std::vector<TimelineEvent> events;  // by lane and begin; what contains others comes before them
  uint64_t lost = 0;                  // overwritten since the start, or given up
};

class Timeline {
 public:
  static constexpr uint64_t default_capacity = 65'536;
  static constexpr uint64_t most_capacity = uint64_t{1} << 24;

  explicit Timeline(uint64_t capacity);
  Timeline(const Timeline &) = delete;
  Timeline &operator=(const Timeline &) = delete;

  void record(const TimelineEvent &event) noexcept;
  // A copy of the text that lives as long as the timeline.
  const char *keep(std::string_view text);
  // The lowest number that no other model has.
  uint32_t open_model();
  void close_model(uint32_t model) noexcept;

  TimelineSnapshot read() const;

 private:
  // `state` is 2 n + 1 while event n is written here and 2 n + 2 when it is there. A thread that finds it odd gives up.
  struct alignas(64) Cell {
    std::atomic<uint64_t> state{0};
    std::atomic<const char *> name{}, object{};
    std::atomic<uint64_t> begin_ns{0}, end_ns{0}, bytes{0};
    std::atomic<uint64_t> packed{0};  // version, planes, lane, kind
  };
  static_assert(sizeof(Cell) == 64);
  bool read(uint64_t number, TimelineEvent &event) const noexcept;

  const uint64_t capacity_;
  std::unique_ptr<Cell[]> slots_;
  alignas(64) std::atomic<uint64_t> next_{0};
  std::mutex mutex_;  // what follows
  std::unordered_set<std::string> texts_;
  std::vector<bool> models_;
};

// An event from its construction to its destruction. Without a timeline it costs two predicted branches.

class Span {
 public:
  Span(Timeline *timeline, EventKind kind, const char *name, const char *object = nullptr, uint64_t version = 0,
       uint64_t bytes = 0)
      : timeline_(timeline) {
    if (timeline) [[unlikely]]
      begin(kind, name, object, version, bytes);
  }
  ~Span() {
    if (timeline_) [[unlikely]]
      end();
  }
  Span(const Span &) = delete;
  Span &operator=(const Span &) = delete;

 private:
  void begin(EventKind kind, const char *name, const char *object, uint64_t version, uint64_t bytes) noexcept;
  void end() noexcept;

  Timeline *timeline_;
  TimelineEvent event_;
};

// The caller's own spans, nested as it begins and ends them. One thread at a time, as every call of a context.

class CallerSpans {
 public:
  static constexpr size_t most_names = 256;
  static constexpr size_t most_open = 64;

  explicit CallerSpans(Timeline &timeline) : timeline_(timeline) { names_.reserve(most_names); }

  // The name's copy; NULL if it is new.
  const char *find(std::string_view name) const;
  const char *add(std::string_view name);
  void begin(const char *name);  // one of these
  void end();

 private:
  struct Open {
    const char *name;
    uint64_t begin_ns;
  };

  Timeline &timeline_;
  std::unordered_map<std::string_view, const char *> names_;
  std::array<Open, most_open> open_;
  size_t depth_ = 0;
};

// A timeline in the Trace Event Format that Perfetto and chrome://tracing read. One event a line between a first and a
// last line that are the same in every file, so that files are merged by joining their lines.

// The process is the rank, the thread the lane, times are microseconds of CLOCK_MONOTONIC.
std::string format_chrome_trace(const TimelineSnapshot &snapshot, uint32_t rank, uint32_t world_size);

}  // namespace fsdp::trace
