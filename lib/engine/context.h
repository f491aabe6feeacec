// SPDX-License-Identifier: Apache-2.0
// One rank's membership in the job. Owns the device and the world; models hold it alive. One thread at a time is
// inside (CallScope); failure, abort and destroy come from any thread.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/failure.h"
#include "base/float_environment.h"
#include "device/device.h"
#include "fsdp.h"
#include "layout/mesh.h"
#include "trace/caller_spans.h"
#include "trace/flight.h"
#include "trace/flight_sequence.h"
#include "trace/timeline.h"
#include "transport/team.h"

namespace fsdp::engine {

class Runtime;
class Saving;

// A word that fork() zeroes in the child: one load tells a forked child from its parent.
class ForkGuard {
 public:
  ForkGuard();
  ~ForkGuard();
  ForkGuard(const ForkGuard &) = delete;
  ForkGuard &operator=(const ForkGuard &) = delete;
  bool in_child() const noexcept { return *word_ == 0; }

 private:
  volatile uint32_t *word_;
};

// What a context must know of the models made from it.
class OpenModel {
 public:
  virtual ~OpenModel() = default;
  virtual std::string unfinished() const = 0;
  // A capture or a replay that has begun, as text that says what ends it; empty if there is none.
  virtual std::string open_graph() const = 0;
};

// Work whose end somebody must look for, and perhaps has words about.
class Unsettled {
 public:
  virtual ~Unsettled() = default;
  virtual void settle() noexcept = 0;
};

class Context {
 public:
  static constexpr uint64_t most_values = 512;  // of one all_reduce
  // What a rank gives to one.
  struct ValueMessage {
    uint64_t count = 0;
    int64_t op = 0;
    double values[most_values] = {};
  };

  static std::shared_ptr<Context> create(const fsdp_context_options &options);
  static std::vector<std::shared_ptr<Context>> create_local(uint32_t world_size, const fsdp_context_options &options);
  // A context that only plans has no world.
  static std::shared_ptr<Context> create_planning(uint32_t world_size, uint32_t rank,
                                                  const fsdp_context_options &options);
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
  ~Context();

  uint32_t rank() const noexcept { return rank_; }
  uint32_t world_size() const noexcept { return world_size_; }
  bool planning() const noexcept { return !world_; }
  bool in_child() const noexcept { return fork_guard_.in_child(); }
  void check_process() const;  // INVALID_STATE in a forked child
  // INVALID_HANDLE once the handle is destroyed: what was made from the context can then only be destroyed.
  void check_handle(const char *call) const;
  bool debug() const noexcept { return options_.flags & FSDP_CONTEXT_DEBUG; }
  // Where sealed models say what lies where; empty: nowhere.
  const std::string &views_directory() const noexcept { return views_directory_; }
  device::Device &device() { return *device_; }
  // Of the device that the options name: a context that only plans knows them without it.
  const device::Traits &device_traits() const noexcept { return device::traits_of(options_.device); }
  fsdp_device_kind device_kind() const noexcept { return options_.device; }
  // The model whose calls are recorded into a graph (capture.h); NULL: none. One at a time: what others enqueue
  // meanwhile could be drawn into that graph.
  const Runtime *captured() const noexcept { return captured_; }
  void set_captured(const Runtime *model) noexcept { captured_ = model; }
  void require_no_other_capture(const Runtime *model, const char *call) const;
  // Nobody is inside the context while it runs; false: somebody was, and it was not run.
  bool run_alone(const std::function<void()> &body);
  transport::DeviceTransport transport() const noexcept;
  fsdp_device_transport device_transport() const noexcept { return options_.device_transport; }
  uint32_t timeout_ms() const noexcept { return waiter_.timeout_ms(); }
  trace::Timeline *timeline() noexcept { return timeline_.get(); }  // NULL: no trace is kept
  trace::CallerSpans *caller_spans() noexcept { return caller_spans_.get(); }
  void write_trace(const std::string &path) const;
  trace::FlightRecorder &flight() noexcept { return flight_; }
  void write_flight_record(const std::string &path) const;
  // The context has failed and a call says so: its flight record is written where the options say, once. On a thread of
  // the caller's.
  void record_failure() noexcept;
  // Has the context failed, or the job, which this rank may not have waited for since? Then the context has failed with
  // it. Any thread.
  bool look_for_failure() const noexcept;
  Failure &failure() noexcept { return failure_; }
  const Failure &failure() const noexcept { return failure_; }
  const Waiter &waiter() const noexcept { return waiter_; }
  bool has_several_models() const noexcept { return has_several_models_.load(std::memory_order_relaxed); }
  transport::World &world() noexcept { return *world_; }
  // All ranks; collective when it is first asked for.
  transport::Team &world_team() { return *value_team(world_ranks()).team; }
  // The save that is under way in the background, one at most: it lives as long as the context keeps it. await: its
  // end, whatever that is.
  void set_saving(std::shared_ptr<Saving> saving);
  void forget_saving(const Saving *saving) noexcept;
  void await_saving();
  // What it has copied it needs no more. Any thread.
  void release_saved_models();
  void require_world(const char *call) const;
  // Collective over the ranks.
  std::unique_ptr<transport::Team> create_team(std::span<const uint32_t> ranks, const std::string &what);
  // The same ranks over the device's memory.
  std::shared_ptr<transport::Team> create_device_team(std::shared_ptr<transport::Team> team,
                                                      transport::DeviceTransport transport);
  // A number for the host of each rank.
  std::vector<uint32_t> hosts_of(std::span<const uint32_t> ranks) const;
  // What a rank allocates for messages between these; and what it would if the hosts that the options name were real
  // ones.
  uint64_t message_bytes(std::span<const uint32_t> ranks, bool sums) const;
  uint64_t planned_message_bytes(std::span<const uint32_t> ranks, bool sums) const;
  bool acts_hosts() const noexcept { return world_ && options_.ranks_per_host; }

  // Over the ranks of the mesh, in its order; NULL: over the world.
  void all_reduce(const layout::Mesh *mesh, double *values, uint64_t count, fsdp_value_op op, const char *call);
  // The same ranks' values, one beside the other, until the next such call. op: compared; 0: none that adds them up.
  std::span<const ValueMessage> exchange_values(const layout::Mesh *mesh, const double *values, uint64_t count,
                                                fsdp_value_op op, const char *call);
  void close();
  void abort(const std::string &reason) noexcept;
  // What the communicators do not know, they must be told: peers would wait for this rank until their timeout.
  void fail_for_good(const Error &error) noexcept;
  void fail_for_good(const Error &error, bool peers_know) noexcept;
  // The handle is gone: whatever still waits inside ends with an error.
  void shut_down() noexcept;

  // Thread-safe: the line is handed to the log hook when the present or next call ends.
  void log(fsdp_log_level level, const std::string &message) noexcept;
  bool logs(fsdp_log_level level) const noexcept { return options_.log && level <= log_level_; }

  void remember(const Error &error) noexcept;
  std::optional<Error> last_error() const;

  // A close with a model in the middle of a step is an error.
  void add_model(const OpenModel *model);
  void remove_model(const OpenModel *model) noexcept;
  // Looked at before a record of what was done is written, and at the end of each call while a word is expected of one.
  void add_unsettled(Unsettled *work);
  void remove_unsettled(Unsettled *work) noexcept;
  // Once more, or once less. Any thread.
  void expect_word(bool more) noexcept { expected_words_.fetch_add(more ? 1 : -1, std::memory_order_relaxed); }

 private:
  friend class CallScope;
  Context(const fsdp_context_options &options, uint32_t rank, uint32_t world_size, bool plans = false);
  // Ranks that reduce values, made when they first do.
  struct ValueTeam {
    std::unique_ptr<transport::Team> team;
    std::vector<ValueMessage> messages;  // one a rank, and this rank's own at the end
  };
  ValueTeam &value_team(const std::vector<uint32_t> &ranks);
  const std::vector<uint32_t> &world_ranks();
  // What it tells others and hears of them is waited for and recorded.
  void wait_for_ranks(const char *what, const std::function<void()> &tell);
  void log_device();
  void start_trace();
  void check_directories();
  void check_directory(const std::string &directory, const char *what);
  void write_trace_at_end() noexcept;
  void flush_log() noexcept;
  void flush_log_outside() noexcept;
  void settle() const noexcept;
  std::shared_ptr<Saving> saving() const;
  void give_up_saving() noexcept;

  fsdp_context_options options_;
  fsdp_log_level log_level_;
  uint32_t rank_, world_size_;
  ForkGuard fork_guard_;
  Failure failure_;
  Waiter waiter_;
  trace::FlightRecorder flight_;
  trace::FlightSequence value_flights_{flight_, trace::Sequence::values};
  std::string flight_directory_;  // empty: no record is written
  std::string trace_directory_;   // empty: no trace is written when the context ends
  std::string views_directory_;
  std::atomic<bool> flight_written_{false};
  std::unique_ptr<trace::Timeline> timeline_;
  std::unique_ptr<trace::CallerSpans> caller_spans_;
  mutable std::mutex mutex_;  // the models, the log queue and the last error
  std::vector<std::pair<fsdp_log_level, std::string>> log_lines_;
  std::atomic<bool> has_log_lines_{false};
  std::unique_ptr<device::Device> device_;  // may log until it ends
  std::unique_ptr<transport::World> world_;
  std::vector<uint32_t> world_ranks_;                       // once they were asked for
  std::map<std::vector<uint32_t>, ValueTeam> value_teams_;  // by ranks, in their order
  std::atomic<const Runtime *> captured_{nullptr};
  std::atomic<bool> inside_{false};
  std::atomic<bool> has_several_models_{false};  // now or before
  std::atomic<bool> closed_{false};
  std::atomic<bool> ends_with_its_handle_{false};
  std::atomic<bool> handle_destroyed_{false};
  std::vector<const OpenModel *> models_;
  std::shared_ptr<Saving> saving_;
  std::optional<Error> last_error_;
  mutable std::mutex unsettled_mutex_;
  std::vector<Unsettled *> unsettled_;
  std::atomic<int32_t> expected_words_{0};
};

// The right to be inside a context: throws BUSY, the sticky failure, or INVALID_STATE in a forked child.
class CallScope {
 public:
  CallScope(Context &context, const char *call);
  // The call has done its work; without it the flight recorder takes the error that ends it.
  void done() noexcept { context_.flight_.leave(); }
  ~CallScope();
  CallScope(const CallScope &) = delete;
  CallScope &operator=(const CallScope &) = delete;

 private:
  Context &context_;
  const FloatEnvironment standard_;  // scalars are computed on the caller's thread too
};

}  // namespace fsdp::engine
