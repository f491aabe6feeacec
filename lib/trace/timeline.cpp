// SPDX-License-Identifier: Apache-2.0

#include "trace/timeline.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/text.h"
#include "trace/nvtx.h"

namespace fsdp::trace {

static_assert(std::chrono::steady_clock::period::num == 1 && std::chrono::steady_clock::period::den == 1'000'000'000);

namespace {

uint64_t pack(const TimelineEvent &event) {
  return uint64_t{event.version} << 32 | uint64_t{event.planes} << 24 | uint64_t{event.lane} << 8 |
         static_cast<uint64_t>(event.kind);
}

}  // namespace

// The cells are value-initialized, so that every page is touched now and not by an event.
Timeline::Timeline(uint64_t capacity) : capacity_(capacity), cells_(std::make_unique<Cell[]>(capacity)) {}

// Only a thread that finds the slot complete may write to it. If a thread finds that an earlier writer was interrupted,
// it drops its event. The fields are released after the odd state, so a reader that sees a new field also sees that the
// state has changed.
void Timeline::record(const TimelineEvent &event) noexcept {
  const uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  Cell &cell = cells_[number % capacity_];
  uint64_t state = cell.state.load(std::memory_order_relaxed);
  if (state & 1 || state > 2 * number) return;
  if (!cell.state.compare_exchange_strong(state, 2 * number + 1, std::memory_order_acquire, std::memory_order_relaxed))
    return;
  cell.name.store(event.name, std::memory_order_release);
  cell.object.store(event.object, std::memory_order_release);
  cell.begin_ns.store(event.begin_ns, std::memory_order_release);
  cell.end_ns.store(event.end_ns, std::memory_order_release);
  cell.bytes.store(event.bytes, std::memory_order_release);
  cell.packed.store(pack(event), std::memory_order_release);
  cell.state.store(2 * number + 2, std::memory_order_release);
}

bool Timeline::read(uint64_t number, TimelineEvent &event) const noexcept {
  const Cell &cell = cells_[number % capacity_];
  if (cell.state.load(std::memory_order_acquire) != 2 * number + 2) return false;
  event.name = cell.name.load(std::memory_order_acquire);
  event.object = cell.object.load(std::memory_order_acquire);
  event.begin_ns = cell.begin_ns.load(std::memory_order_acquire);
  event.end_ns = cell.end_ns.load(std::memory_order_acquire);
  event.bytes = cell.bytes.load(std::memory_order_acquire);
  const uint64_t packed = cell.packed.load(std::memory_order_acquire);
  event.version = static_cast<uint32_t>(packed >> 32);
  event.planes = static_cast<uint8_t>(packed >> 24);
  event.lane = static_cast<TimelineLane>(packed >> 8);
  event.kind = static_cast<EventKind>(packed & 0xFF);
  return cell.state.load(std::memory_order_relaxed) == 2 * number + 2;
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

void Span::begin(EventKind kind, const char *name, const char *object, uint64_t version, uint64_t bytes) noexcept {
  push_range(name, object);
  event_ = {name, object, now_ns(), 0, bytes, static_cast<uint32_t>(version), caller_lane, kind};
}

void Span::end() noexcept {
  event_.end_ns = now_ns();
  timeline_->record(event_);
  pop_range();
}

const char *CallerSpans::find(std::string_view name) const {
  const auto found = names_.find(name);
  return found == names_.end() ? nullptr : found->second;
}

const char *CallerSpans::add(std::string_view name) {
  if (names_.size() == max_names)
    fail(FSDP_INVALID_ARGUMENT,
         "fsdp_begin_span: '{}' would be name {}, a context keeps at most {}; put numbers elsewhere than "
         "into names",
         name, max_names + 1, max_names);
  const char *kept = timeline_.keep(name);
  names_.emplace(kept, kept);
  return kept;
}

void CallerSpans::begin(const char *name) {
  if (depth_ == max_open)
    fail(FSDP_INVALID_STATE, "fsdp_begin_span: {} spans are open, '{}' would be one more; call fsdp_end_span for each",
         depth_, name);
  push_range(name, nullptr);
  open_[depth_++] = {name, now_ns()};
}

void CallerSpans::end() {
  if (depth_ == 0) fail(FSDP_INVALID_STATE, "fsdp_end_span: no span is open; fsdp_begin_span opens one");
  const Open &open = open_[--depth_];
  timeline_.record({open.name, nullptr, open.begin_ns, now_ns(), 0, 0, caller_lane, EventKind::user});
  pop_range();
}

namespace {

constexpr auto first_line = "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [\n";
constexpr auto last_line = "\n]}\n";

using Out = std::back_insert_iterator<std::string>;

const char *category(EventKind kind) {
  switch (kind) {
    case EventKind::call: return "call";
    case EventKind::wait: return "wait";
    case EventKind::collective:
    case EventKind::seen: return "collective";
    case EventKind::user: return "user";
    default: return "instant";
  }
}

std::string lane_name(TimelineLane lane) {
  if (lane == caller_lane) return "caller";
  const int model = (lane - 1) / 3;
  const char *names[] = {"gather", "reduce", "outer"};
  const char *name = names[(lane - 1) % 3];
  return model ? format_text("{} of model {}", name, model) : name;
}

// Viewers use thread 0 for themselves.
int thread_of(TimelineLane lane) { return lane + 1; }

void format_metadata(Out out, uint32_t rank, int thread, const char *name, const std::string &arguments) {
  fmt::format_to(out, "{{\"ph\": \"M\", \"pid\": {}, \"tid\": {}, \"name\": \"{}\", \"args\": {{{}}}}},\n", rank,
                 thread, name, arguments);
}

const char *plane_names(uint8_t planes) {
  if (planes == row_planes) return "row";
  return planes == column_planes ? "column" : "row, column";
}

void format_microseconds(Out out, const char *key, uint64_t ns) {
  fmt::format_to(out, ", \"{}\": {}.{:03}", key, ns / 1000, ns % 1000);
}

void format_event(Out out, const TimelineEvent &event, uint32_t rank) {
  const std::string name = event.object ? format_text("{} {}", event.name, event.object) : event.name;
  fmt::format_to(out, ",\n{{\"ph\": \"{}\", \"pid\": {}, \"tid\": {}, \"name\": {}, \"cat\": \"{}\"",
                 event.kind == EventKind::instant ? 'i' : 'X', rank, thread_of(event.lane), quote_json(name),
                 category(event.kind));
  format_microseconds(out, "ts", event.begin_ns);
  if (event.kind == EventKind::instant)
    fmt::format_to(out, ", \"s\": \"p\"");
  else
    format_microseconds(out, "dur", event.end_ns - event.begin_ns);
  const char *comma = "";
  fmt::format_to(out, ", \"args\": {{");
  if (event.object) fmt::format_to(out, "\"group\": {}", quote_json(event.object)), comma = ", ";
  if (event.bytes) fmt::format_to(out, "{}\"bytes\": {}", std::exchange(comma, ", "), event.bytes);
  if (event.planes) fmt::format_to(out, "{}\"planes\": \"{}\"", std::exchange(comma, ", "), plane_names(event.planes));
  if (event.version) fmt::format_to(out, "{}\"version\": {}", std::exchange(comma, ", "), event.version);
  if (event.kind == EventKind::seen) fmt::format_to(out, "{}\"times\": \"enqueued, seen done\"", comma);
  fmt::format_to(out, "}}}}");
}

}  // namespace

std::string format_chrome_trace(const TimelineSnapshot &snapshot, uint32_t rank, uint32_t world_size) {
  std::string text = first_line;
  const Out out(text);
  format_metadata(out, rank, 0, "process_name", format_text("\"name\": \"rank {}\"", rank));
  format_metadata(out, rank, 0, "process_sort_index", format_text("\"sort_index\": {}", rank));
  if (snapshot.lost)
    format_metadata(out, rank, 0, "process_labels", format_text("\"labels\": \"{} events lost\"", snapshot.lost));
  TimelineLane last = reduce_lane(0);
  for (const TimelineEvent &event : snapshot.events) last = std::max(last, event.lane);
  for (TimelineLane lane = 0; lane <= last; ++lane) {
    format_metadata(out, rank, thread_of(lane), "thread_name", format_text("\"name\": \"{}\"", lane_name(lane)));
    format_metadata(out, rank, thread_of(lane), "thread_sort_index", format_text("\"sort_index\": {}", lane));
  }
  format_metadata(out, rank, 0, "fsdp_timeline",
                  format_text("\"version\": \"{}\", \"rank\": {}, \"world_size\": {}, \"clock\": \"CLOCK_MONOTONIC\", "
                              "\"events\": {}, \"lost\": {}",
                              FSDP_VERSION_TEXT, rank, world_size, snapshot.events.size(), snapshot.lost));
  text.resize(text.size() - 2);  // without the last comma
  for (const TimelineEvent &event : snapshot.events) format_event(out, event, rank);
  return text + last_line;
}

}  // namespace fsdp::trace
