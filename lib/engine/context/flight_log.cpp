// SPDX-License-Identifier: Apache-2.0
#include "engine/context/flight_log.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <system_error>

#include "base/settings.h"
#include "device/device.h"
#include "engine/context/environment.h"
#include "trace/file.h"

namespace fsdp::engine {
namespace {

std::string find_record_directory(const fsdp_context_options &options) {
  const char *directory = options.flight_directory ? options.flight_directory : setting("FSDP_FLIGHT_DIRECTORY");
  return directory ? directory : "";
}

std::string find_trace_directory(const fsdp_context_options &options, bool plans) {
  return options.trace_directory && !plans ? options.trace_directory : "";
}

// The directory for the list of views; empty if there is none. Only debug mode lists views, and only those of host
// memory, because no others can fault.
std::string find_views_directory(const fsdp_context_options &options, bool plans) {
  const bool faults = options.flags & FSDP_CONTEXT_DEBUG && device::traits_of(options.device).host_memory && !plans;
  return faults ? debug_views_directory() : "";
}

}  // namespace

FlightLog::FlightLog(const fsdp_context_options &options, uint32_t rank, uint32_t world_size, bool plans)
    : rank_(rank),
      world_size_(world_size),
      plans_(plans),
      recorder_(options.flight_events ? options.flight_events : trace::FlightRecorder::default_capacity),
      record_directory_(find_record_directory(options)),
      trace_directory_(find_trace_directory(options, plans)),
      views_directory_(find_views_directory(options, plans)) {
  if (plans || (!(options.flags & FSDP_CONTEXT_TRACE) && trace_directory_.empty())) return;
  timeline_ = std::make_unique<trace::Timeline>(options.trace_events ? options.trace_events
                                                                     : trace::Timeline::default_capacity);
  caller_spans_ = std::make_unique<trace::CallerSpans>(*timeline_);
}

std::vector<std::string> FlightLog::directory_problems() const {
  std::vector<std::string> problems;
  const auto check = [&](const std::string &directory, const char *what) {
    if (directory.empty() || ::access(directory.c_str(), W_OK | X_OK) == 0) return;
    problems.push_back(format_text("rank {}: no {} can be written into '{}': {}", rank_, what, directory,
                                   std::generic_category().message(errno)));
  };
  check(record_directory_, "flight record");
  check(trace_directory_, "trace");
  check(views_directory_, "debug view");
  return problems;
}

void FlightLog::write_trace(const std::string &path) const {
  if (!timeline_)
    fail(FSDP_INVALID_STATE,
         "fsdp_write_trace: the context of rank {} keeps no trace; create it with FSDP_CONTEXT_TRACE or a "
         "trace_directory",
         rank_);
  settle();
  trace::replace_file(path, trace::format_chrome_trace(timeline_->read(), rank_, world_size_), "fsdp_write_trace");
}

std::string FlightLog::write_last_trace() const {
  if (trace_directory_.empty() || !timeline_) return {};
  const std::string path = format_text("{}/trace-{}.json", trace_directory_, rank_);
  try {
    trace::keep_earlier_file(path);
    write_trace(path);
    return {};
  } catch (const Error &error) {
    return format_text("rank {}: its trace could not be written: {}", rank_, error.message);
  }
}

void FlightLog::write_record(const std::string &path, const std::optional<Error> &failure) const {
  settle();
  trace::replace_file(path, trace::format_flight_record(recorder_.read(), {rank_, world_size_, failure}),
                      "fsdp_write_flight_record");
}

std::string FlightLog::write_failure(const Error &failure) {
  if (written_.exchange(true) || plans_) return {};
  std::string line = format_text("rank {} of {}: the context has failed: {}", rank_, world_size_, failure.message);
  if (record_directory_.empty()) return line;
  const std::string path = format_text("{}/flight-{}.json", record_directory_, rank_);
  try {
    trace::keep_earlier_file(path);
    write_record(path, failure);
    return line + format_text("; its flight record: {}", path);
  } catch (const Error &error) {
    return line + format_text("; its flight record could not be written: {}", error.message);
  }
}

void FlightLog::add_unsettled(Unsettled *work) {
  const std::lock_guard lock(unsettled_mutex_);
  unsettled_.push_back(work);
}

void FlightLog::remove_unsettled(Unsettled *work) noexcept {
  const std::lock_guard lock(unsettled_mutex_);
  std::erase(unsettled_, work);
}

void FlightLog::settle() const noexcept {
  const std::lock_guard lock(unsettled_mutex_);
  for (Unsettled *work : unsettled_) work->settle();
}

}  // namespace fsdp::engine
