// SPDX-License-Identifier: Apache-2.0
// How a context fails for good, and what it leaves behind of that.
#include "engine/context.h"

#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "trace/file.h"
#include "trace/flight_record.h"

namespace fsdp::engine {

// What cannot be written is known now, and not after the failure or the run.
void Context::check_directories() {
  check_directory(flight_directory_, "flight record");
  check_directory(trace_directory_, "trace");
  check_directory(views_directory_, "debug view");
}

void Context::check_directory(const std::string &directory, const char *what) {
  if (directory.empty() || ::access(directory.c_str(), W_OK | X_OK) == 0) return;
  log(FSDP_LOG_WARNING, format_text("rank {}: no {} can be written into '{}': {}", rank_, what, directory,
                                    std::generic_category().message(errno)));
}

void Context::write_trace_at_end() noexcept {
  if (trace_directory_.empty() || !timeline_) return;
  try {
    const std::string path = format_text("{}/trace-{}.json", trace_directory_, rank_);
    try {
      trace::keep_earlier_file(path);
      write_trace(path);
    } catch (const Error &error) {
      log(FSDP_LOG_WARNING, format_text("rank {}: its trace could not be written: {}", rank_, error.message));
    }
  } catch (...) {  // out of memory: the trace is lost
  }
  flush_log_outside();
}

// Unless a call is inside, which then does it at its end.
void Context::flush_log_outside() noexcept {
  if (inside_.exchange(true, std::memory_order_acquire)) return;
  flush_log();
  inside_.store(false, std::memory_order_release);
}

void Context::write_flight_record(const std::string &path) const {
  require_world("fsdp_write_flight_record");
  settle();
  trace::replace_file(path, trace::format_flight_record(flight_.read(), {rank_, world_size_, failure_.get()}),
                      "fsdp_write_flight_record");
}

// The verdict of the job lies in memory that this rank shares with its host, or with the threads that are its peers.
bool Context::look_for_failure() const noexcept {
  if (!failure_.failed() && world_ && !closed_.load(std::memory_order_relaxed) && !in_child()) {
    try {
      world_->check();
    } catch (...) {  // it has set the failure
    }
  }
  return failure_.failed();
}

void Context::record_failure() noexcept {
  if (flight_written_.exchange(true) || planning()) return;
  try {
    std::string line =
        format_text("rank {} of {}: the context has failed: {}", rank_, world_size_, failure_.get()->message);
    if (!flight_directory_.empty()) {
      const std::string path = format_text("{}/flight-{}.json", flight_directory_, rank_);
      try {
        trace::keep_earlier_file(path);
        write_flight_record(path);
        line += format_text("; its flight record: {}", path);
      } catch (const Error &error) {
        line += format_text("; its flight record could not be written: {}", error.message);
      }
    }
    log(FSDP_LOG_ERROR, line);
  } catch (...) {  // out of memory: the failure itself is told by the call
  }
  flush_log_outside();  // no later call comes so far as to hand the line over
}

void Context::abort(const std::string &reason) noexcept {
  try {
    failure_.set(Error(FSDP_ABORTED, format_text("rank {} aborted: {}", rank_, reason), static_cast<int32_t>(rank_)));
    if (world_) world_->abort(reason);
  } catch (...) {  // out of memory for the text: the flag is what matters
    failure_.set(Error(FSDP_ABORTED, {}));
  }
}

void Context::fail_for_good(const Error &error) noexcept {
  const bool found_here =
      error.status == FSDP_INTERRUPTED || error.status == FSDP_INTERNAL || error.status == FSDP_INVALID_STATE;
  fail_for_good(error, !found_here);
}

void Context::fail_for_good(const Error &error, bool peers_know) noexcept {
  if (failure_.set(error) && !peers_know && world_ && !closed_) world_->abort(error.message);
}

void Context::shut_down() noexcept {
  handle_destroyed_.store(true, std::memory_order_release);
  give_up_saving();
  if (failure_.failed()) record_failure();
  flight_written_ = true;  // that the handle is gone is no failure
  write_trace_at_end();
  {
    const std::lock_guard lock(mutex_);
    ends_with_its_handle_ = models_.empty();
  }
  try {
    failure_.set(Error(FSDP_INVALID_HANDLE, format_text("the context of rank {} has been destroyed", rank_)));
    const auto last = last_error();
    if (world_ && !closed_)
      world_->tell_destroyed(format_text("destroyed its context without fsdp_close_context{}{}",
                                         last ? "; its last error: " : "", last ? last->message : std::string()));
  } catch (...) {
    failure_.set(Error(FSDP_INVALID_HANDLE, {}));
  }
}

void Context::remember(const Error &error) noexcept {
  try {
    std::lock_guard lock(mutex_);
    last_error_.emplace(error);
  } catch (...) {  // then the status alone must do
  }
}

std::optional<Error> Context::last_error() const {
  std::lock_guard lock(mutex_);
  return last_error_;
}

}  // namespace fsdp::engine
