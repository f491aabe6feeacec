// SPDX-License-Identifier: Apache-2.0
#include "trace_file.h"

#include <cmath>
#include <fstream>
#include <stdexcept>

namespace harness {
namespace {

uint64_t nanoseconds(const nlohmann::json &microseconds) {
  return static_cast<uint64_t>(std::llround(microseconds.get<double>() * 1000));
}

void check_nesting(const std::string &lane, const std::vector<Slice> &slices) {
  std::vector<const Slice *> open;
  for (const Slice &slice : slices) {
    while (!open.empty() && open.back()->end_ns <= slice.begin_ns) open.pop_back();
    if (!open.empty() && slice.end_ns > open.back()->end_ns)
      throw std::runtime_error("lane " + lane + ": '" + slice.name + "' ends after '" + open.back()->name +
                               "', in which it begins");
    open.push_back(&slice);
  }
}

}  // namespace

TraceFile::TraceFile(const std::string &path) {
  std::ifstream file(path);
  const nlohmann::json trace = nlohmann::json::parse(file);
  for (const auto &event : trace.at("traceEvents"))
    if (event.at("ph") == "M") add_metadata(event);
  for (const auto &event : trace.at("traceEvents"))
    if (event.at("ph") != "M") add(event);
  for (const auto &[lane, slices] : lanes) check_nesting(lane.second, slices);
}

void TraceFile::add_metadata(const nlohmann::json &event) {
  const uint32_t rank = event.at("pid"), thread = event.at("tid");
  const auto &arguments = event.at("args");
  if (event.at("name") == "thread_name") lanes[{rank, threads_[{rank, thread}] = arguments.at("name")}];
  if (event.at("name") == "fsdp_timeline") timelines[rank] = arguments;
  if (event.at("name") == "process_labels") labels[rank] = arguments.at("labels");
}

void TraceFile::add(const nlohmann::json &event) {
  const uint32_t rank = event.at("pid"), thread = event.at("tid");
  const auto &arguments = event.at("args");
  const uint64_t begin = nanoseconds(event.at("ts"));
  const bool instant = event.at("ph") == "i";
  if (!instant && event.at("ph") != "X") throw std::runtime_error("an event that is neither complete nor instant");
  lanes[{rank, threads_.at({rank, thread})}].push_back(
      {event.at("name"), event.at("cat"), arguments.value("group", ""), begin,
       begin + (instant ? 0 : nanoseconds(event.at("dur"))), arguments.value("bytes", uint64_t{0}),
       arguments.value("version", uint64_t{0}), arguments.value("planes", "")});
}

const std::vector<Slice> &TraceFile::lane(uint32_t rank, const std::string &name) const {
  return lanes.at({rank, name});
}

std::vector<Slice> TraceFile::of_category(uint32_t rank, const std::string &lane_name,
                                          const std::string &category) const {
  std::vector<Slice> found;
  for (const Slice &slice : lane(rank, lane_name))
    if (slice.category == category) found.push_back(slice);
  return found;
}

std::vector<std::string> TraceFile::names(const std::vector<Slice> &slices) {
  std::vector<std::string> names;
  for (const Slice &slice : slices) names.push_back(slice.name);
  return names;
}

}  // namespace harness
