// SPDX-License-Identifier: Apache-2.0
// The timeline of one context: its last events, in a ring that is allocated once. Any thread records without a lock, an
// allocation or a system call. Any thread may read at the same time; events that are being written are left out.
//
// A lane has the caller's calls, or the work of one stream. Its events do not overlap, except that one may contain
// others. The timeline keeps copies of texts (unless they are literals), because a trace may be written after models
// end.
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

// `seen` is a collective on a device as the host sees it. It begins when the collective was enqueued, or when the host
// saw that the previous one had ended. It ends when the host saw that the collective had ended.
enum class EventKind : uint8_t { call, wait, collective, user, instant, seen };

using TimelineLane = uint16_t;
inline constexpr TimelineLane caller_lane = 0;
// Each model has three lanes, according to its number in the timeline.
constexpr TimelineLane gather_lane(uint32_t model) { return static_cast<TimelineLane>(1 + 3 * model); }
constexpr TimelineLane reduce_lane(uint32_t model) { return static_cast<TimelineLane>(2 + 3 * model); }
constexpr TimelineLane outer_lane(uint32_t model) { return static_cast<TimelineLane>(3 + 3 * model); }

// The planes of quantized weights that a gather moves.
enum TimelinePlanes : uint8_t { row_planes = 1, column_planes = 2 };

struct TimelineEvent {
  const char *name;
  const char *object;         // a group's name, or NULL
  uint64_t begin_ns, end_ns;  // times of now_ns()
  uint64_t bytes;             // 0: not given
  uint32_t version;           // version of the published weights; 0: not given
  TimelineLane lane;
  EventKind kind;
  uint8_t planes = 0;  // TimelinePlanes
};

// The time of CLOCK_MONOTONIC, which is the same for all processes of a machine.
inline uint64_t now_ns() noexcept {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

struct TimelineSnapshot {
  std::vector<TimelineEvent> events;  // ordered by lane and begin; an event comes before those that it contains
  uint64_t lost = 0;                  // number of events that were overwritten or dropped since the start
};

class Timeline {
 public:
  static constexpr uint64_t default_capacity = 65'536;
  static constexpr uint64_t max_capacity = uint64_t{1} << 24;

  explicit Timeline(uint64_t capacity);
  Timeline(const Timeline &) = delete;
  Timeline &operator=(const Timeline &) = delete;

  void record(const TimelineEvent &event) noexcept;
  // Returns a copy of the text that exists as long as the timeline.
  const char *keep(std::string_view text);
  // Returns the lowest number that no other model has.
  uint32_t open_model();
  void close_model(uint32_t model) noexcept;

  TimelineSnapshot read() const;

 private:
  // `state` is 2 n + 1 while event n is being written to this cell, and 2 n + 2 once the event is complete. A writer
  // that finds an odd state, or a later event, drops its event.
  struct alignas(64) Cell {
    std::atomic<uint64_t> state{0};
    std::atomic<const char *> name{}, object{};
    std::atomic<uint64_t> begin_ns{0}, end_ns{0}, bytes{0};
    std::atomic<uint64_t> packed{0};  // version << 32 | planes << 24 | lane << 8 | kind
  };
  static_assert(sizeof(Cell) == 64);
  bool read(uint64_t number, TimelineEvent &event) const noexcept;

  const uint64_t capacity_;
  std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<uint64_t> next_{0};
  std::mutex mutex_;  // guards the members below
  std::unordered_set<std::string> texts_;
  std::vector<bool> models_;
};

// Records an event from the construction to the destruction of this object. Without a timeline it costs two predicted
// branches.

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

// The caller's own spans, which are nested. One thread at a time begins and ends them, as for all calls of a context.

class CallerSpans {
 public:
  static constexpr size_t max_names = 256;
  static constexpr size_t max_open = 64;

  explicit CallerSpans(Timeline &timeline) : timeline_(timeline) { names_.reserve(max_names); }

  // Returns the kept copy of the name, or NULL if the name is new.
  const char *find(std::string_view name) const;
  const char *add(std::string_view name);
  void begin(const char *name);  // `name` must come from find() or add()
  void end();

 private:
  struct Open {
    const char *name;
    uint64_t begin_ns;
  };

  Timeline &timeline_;
  std::unordered_map<std::string_view, const char *> names_;
  std::array<Open, max_open> open_;
  size_t depth_ = 0;
};

// Formats a timeline in the Trace Event Format, which Perfetto and chrome://tracing read. Each event is on its own
// line. The first and the last line are the same in every file, so files are merged by joining the lines between them.

// The process number is the rank, and the thread number is the lane + 1. Times are microseconds of CLOCK_MONOTONIC.
std::string format_chrome_trace(const TimelineSnapshot &snapshot, uint32_t rank, uint32_t world_size);

}  // namespace fsdp::trace
