// SPDX-License-Identifier: Apache-2.0
#include "trace/chrome_trace.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/json.h"

namespace fsdp::trace {
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

// Viewers keep thread 0 for themselves.
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
  text.resize(text.size() - 2);  // the last comma
  for (const TimelineEvent &event : snapshot.events) format_event(out, event, rank);
  return text + last_line;
}

}  // namespace fsdp::trace
