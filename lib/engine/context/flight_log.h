// SPDX-License-Identifier: Apache-2.0
// The records of a context's calls, and the files made from them: the flight record and, if a trace is kept, the trace.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "trace/flight.h"
#include "trace/timeline.h"

namespace fsdp::engine {

// Work that does not report its end, so calls must check whether it has ended. It may have messages for the log.
class Unsettled {
 public:
  virtual ~Unsettled() = default;
  virtual void settle() noexcept = 0;
};

class FlightLog {
 public:
  // `plans`: the context only plans, and keeps no trace.
  FlightLog(const fsdp_context_options &options, uint32_t rank, uint32_t world_size, bool plans);
  FlightLog(const FlightLog &) = delete;
  FlightLog &operator=(const FlightLog &) = delete;

  trace::FlightRecorder &recorder() noexcept { return recorder_; }
  trace::Timeline *timeline() noexcept { return timeline_.get(); }  // NULL: no trace is kept
  trace::CallerSpans *caller_spans() noexcept { return caller_spans_.get(); }
  // The directory for the files in which sealed models list their views of memory (debug_views.h); empty: no such
  // files.
  const std::string &views_directory() const noexcept { return views_directory_; }
  // Says which directories cannot be written. Checked when the context is created, because at a failure or at the end
  // of a run it is too late.
  std::vector<std::string> directory_problems() const;

  void write_trace(const std::string &path) const;
  void write_record(const std::string &path, const std::optional<Error> &failure) const;
  // Writes the flight record to the directory that the options name, and returns the line for the log. The line is
  // empty if the record was written before or the context only plans.
  std::string write_failure(const Error &failure);
  // Writes the trace. Returns why that failed; empty if the trace was written or none is wanted.
  std::string write_last_trace() const;
  // Failures from now on are not written.
  void end() noexcept { written_ = true; }
  // Adds work that is settled before a record is written, and at the end of each call while the work may have a
  // message. May be called by any thread.
  void add_unsettled(Unsettled *work);
  void remove_unsettled(Unsettled *work) noexcept;
  void settle() const noexcept;
  void expect_word(bool more) noexcept { expected_words_.fetch_add(more ? 1 : -1, std::memory_order_relaxed); }
  bool expects_words() const noexcept { return expected_words_.load(std::memory_order_relaxed) != 0; }

 private:
  const uint32_t rank_, world_size_;
  const bool plans_;
  trace::FlightRecorder recorder_;
  const std::string record_directory_, trace_directory_, views_directory_;  // empty: no file is written
  std::atomic<bool> written_{false};
  std::unique_ptr<trace::Timeline> timeline_;
  std::unique_ptr<trace::CallerSpans> caller_spans_;
  mutable std::mutex unsettled_mutex_;
  std::vector<Unsettled *> unsettled_;
  std::atomic<int32_t> expected_words_{0};
};

}  // namespace fsdp::engine
