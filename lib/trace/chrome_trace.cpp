// SPDX-License-Identifier: Apache-2.0
#include "trace/chrome_trace.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/json.h"

namespace fsdp::trace {
namespace {

constexpr auto first_line = "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [\n";
constexpr auto last_line = "\n]}\n";

using Out = std::back_insert_iterator<std::string>;

const char *category(Kind kind) {
  switch (kind) {
    case Kind::call: return "call";
    case Kind::wait: return "wait";
    case Kind::collective:
    case Kind::seen: return "collective";
    case Kind::user: return "user";
    default: return "instant";
  }
}

std::string lane_name(Lane lane) {
  if (lane == caller_lane) return "caller";
  const int model = (lane - 1) / 3;
  const char *names[] = {"gather", "reduce", "outer"};
  const char *name = names[(lane - 1) % 3];
  return model ? format_text("{} of model {}", name, model) : name;
}

// Viewers keep thread 0 for themselves.
int thread_of(Lane lane) { return lane + 1; }

void format_metadata(Out out, uint32_t rank, int thread, const char *name, const std::string &arguments) {
  fmt::format_to(out, "{{\"ph\": \"M\", \"pid\": {}, \"tid\": {}, \"name\": \"{}\", \"args\": {{{}}}}},\n", rank, thread, name,
                 arguments);
}

void format_microseconds(Out out, const char *key, uint64_t ns) {
  fmt::format_to(out, ", \"{}\": {}.{:03}", key, ns / 1000, ns % 1000);
}

void format_event(Out out, const Event &event, uint32_t rank) {
  const std::string name = event.object ? format_text("{} {}", event.name, event.object) : event.name;
  fmt::format_to(out, ",\n{{\"ph\": \"{}\", \"pid\": {}, \"tid\": {}, \"name\": {}, \"cat\": \"{}\"",
                 event.kind == Kind::instant ? 'i' : 'X', rank, thread_of(event.lane), quote_json(name), category(event.kind));
  format_microseconds(out, "ts", event.begin_ns);
  if (event.kind == Kind::instant) fmt::format_to(out, ", \"s\": \"p\"");
  else format_microseconds(out, "dur", event.end_ns - event.begin_ns);
  const char *comma = "";
  fmt::format_to(out, ", \"args\": {{");
  if (event.object) fmt::format_to(out, "\"group\": {}", quote_json(event.object)), comma = ", ";
  if (event.bytes) fmt::format_to(out, "{}\"bytes\": {}", std::exchange(comma, ", "), event.bytes);
  if (event.version) fmt::format_to(out, "{}\"version\": {}", std::exchange(comma, ", "), event.version);
  if (event.kind == Kind::seen) fmt::format_to(out, "{}\"times\": \"enqueued, seen done\"", comma);
  fmt::format_to(out, "}}}}");
}

// A path that nobody else uses: what a crash left behind is passed over.
int create_beside(const std::string &path, std::string &beside) {
  for (int i = 0; i < 100; ++i) {
    beside = format_text("{}.tmp.{}.{}", path, ::getpid(), i);
    const int fd = ::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0 || errno != EEXIST) return fd;
  }
  return -1;
}

int write_all(int fd, const std::string &text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = ::write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno != EINTR) return errno;
    if (count > 0) done += static_cast<size_t>(count);
  }
  return 0;
}

}  // namespace

std::string format_chrome_trace(const Timeline::Snapshot &snapshot, uint32_t rank, uint32_t world_size) {
  std::string text = first_line;
  const Out out(text);
  format_metadata(out, rank, 0, "process_name", format_text("\"name\": \"rank {}\"", rank));
  format_metadata(out, rank, 0, "process_sort_index", format_text("\"sort_index\": {}", rank));
  if (snapshot.lost) format_metadata(out, rank, 0, "process_labels", format_text("\"labels\": \"{} events lost\"", snapshot.lost));
  Lane last = reduce_lane(0);
  for (const Event &event : snapshot.events) last = std::max(last, event.lane);
  for (Lane lane = 0; lane <= last; ++lane) {
    format_metadata(out, rank, thread_of(lane), "thread_name", format_text("\"name\": \"{}\"", lane_name(lane)));
    format_metadata(out, rank, thread_of(lane), "thread_sort_index", format_text("\"sort_index\": {}", lane));
  }
  format_metadata(out, rank, 0, "fsdp_timeline",
                  format_text("\"version\": \"{}\", \"rank\": {}, \"world_size\": {}, \"clock\": \"CLOCK_MONOTONIC\", "
                              "\"events\": {}, \"lost\": {}",
                              FSDP_VERSION_TEXT, rank, world_size, snapshot.events.size(), snapshot.lost));
  text.resize(text.size() - 2);  // the last comma
  for (const Event &event : snapshot.events) format_event(out, event, rank);
  return text + last_line;
}

void replace_file(const std::string &path, const std::string &text, const char *call) {
  std::string beside;
  const int fd = create_beside(path, beside);
  if (fd < 0) fail_errno(errno, format_text("{}: creating '{}'", call, beside));
  int code = write_all(fd, text);
  const char *what = "writing";
  if (::close(fd) != 0 && !code) code = errno;
  if (!code && ::rename(beside.c_str(), path.c_str()) != 0) code = errno, what = "renaming it from";
  if (!code) return;
  ::unlink(beside.c_str());
  fail_errno(code, format_text("{}: '{}': {} '{}'", call, path, what, beside));
}

}  // namespace fsdp::trace
