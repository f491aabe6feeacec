// SPDX-License-Identifier: Apache-2.0
// One rank's membership in the job. Owns the device and the world; models hold it alive. One thread at a time is
// inside (CallScope); failure, abort and destroy come from any thread.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/failure.h"
#include "base/float_environment.h"
#include "device/device.h"
#include "engine/context/checkpoint_slot.h"
#include "engine/context/flight_log.h"
#include "engine/context/log_queue.h"
#include "engine/context/value_reducer.h"
#include "fsdp.h"
#include "layout/mesh.h"
#include "trace/flight.h"
#include "trace/timeline.h"
#include "transport/team.h"

namespace fsdp::engine {

class Runtime;

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

class Context {
 public:
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
  bool delays_work() const noexcept { return options_.debug_delay_us != 0; }
  // Where sealed models say what lies where; empty: nowhere.
  const std::string &views_directory() const noexcept { return flight_log_.views_directory(); }
  device::Device &device() { return *device_; }
  // Of the device that the options name: a context that only plans knows them without it.
  const device::Traits &device_traits() const noexcept { return device::traits_of(options_.device); }
  fsdp_device_kind device_kind() const noexcept { return options_.device; }
  // The model whose calls are recorded into a graph (capture.h); NULL: none. One at a time: what others enqueue
  // meanwhile could be drawn into that graph.
  const Runtime *captured() const noexcept { return captured_; }
  void set_captured(const Runtime *model) noexcept { captured_ = model; }
  void require_no_other_capture(const Runtime *model, const char *call) const;
  // Runs it while no thread is inside the context. False: a thread was, and it was not run.
  bool run_alone(const std::function<void()> &body);
  transport::DeviceTransport transport() const noexcept;
  fsdp_device_transport device_transport() const noexcept { return options_.device_transport; }
  uint32_t timeout_ms() const noexcept { return waiter_.timeout_ms(); }
  trace::Timeline *timeline() noexcept { return flight_log_.timeline(); }  // NULL: no trace is kept
  trace::CallerSpans *caller_spans() noexcept { return flight_log_.caller_spans(); }
  void write_trace(const std::string &path) const;
  trace::FlightRecorder &flight() noexcept { return flight_log_.recorder(); }
  FlightLog &flight_log() noexcept { return flight_log_; }
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
  transport::Team &world_team() { return values_.team(world_ranks()); }
  CheckpointSlot &checkpoint_slot() noexcept { return checkpoint_slot_; }
  // The end of the save that is under way, whatever that is.
  void await_saving();
  void require_world(const char *call) const;
  void require_open(const char *call) const;  // ... and that is not closed
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
  std::span<const ValueReducer::ValueMessage> exchange_values(const layout::Mesh *mesh, const double *values,
                                                              uint64_t count, fsdp_value_op op, const char *call);
  void close();
  void abort(const std::string &reason) noexcept;
  // What the communicators do not know, they must be told: peers would wait for this rank until their timeout.
  void fail_for_good(const Error &error) noexcept;
  void fail_for_good(const Error &error, bool peers_know) noexcept;
  // The handle is gone: whatever still waits inside ends with an error.
  void shut_down() noexcept;

  // Thread-safe: the line is handed to the log hook when the present or next call ends.
  void log(fsdp_log_level level, const std::string &message) noexcept;
  bool logs(fsdp_log_level level) const noexcept { return log_queue_.takes(level); }

  void remember(const Error &error) noexcept;
  std::optional<Error> last_error() const;

  // A close with a model in the middle of a step is an error.
  void add_model(const OpenModel *model);
  void remove_model(const OpenModel *model) noexcept;

 private:
  friend class CallScope;
  Context(const fsdp_context_options &options, uint32_t rank, uint32_t world_size, bool plans = false);
  const std::vector<uint32_t> &world_ranks();
  void log_device();
  void check_directories();
  void write_trace_at_end() noexcept;
  void flush_log_outside() noexcept;
  void give_up_saving() noexcept;

  fsdp_context_options options_;
  uint32_t rank_, world_size_;
  ForkGuard fork_guard_;
  Failure failure_;
  Waiter waiter_;
  FlightLog flight_log_;
  LogQueue log_queue_;
  CheckpointSlot checkpoint_slot_;
  mutable std::mutex mutex_;                // the models and the last error
  std::unique_ptr<device::Device> device_;  // may log until it ends
  std::unique_ptr<transport::World> world_;
  std::vector<uint32_t> world_ranks_;  // once they were asked for
  ValueReducer values_;
  std::atomic<const Runtime *> captured_{nullptr};
  std::atomic<bool> inside_{false};
  std::atomic<bool> has_several_models_{false};  // now or before
  std::atomic<bool> closed_{false};
  std::atomic<bool> ends_with_its_handle_{false};
  std::atomic<bool> handle_destroyed_{false};
  std::vector<const OpenModel *> models_;
  std::optional<Error> last_error_;
};

// The right to be inside a context: throws BUSY, the sticky failure, or INVALID_STATE in a forked child.
class CallScope {
 public:
  CallScope(Context &context, const char *call);
  // The call has done its work; without it the flight recorder takes the error that ends it.
  void done() noexcept { context_.flight().leave(); }
  ~CallScope();
  CallScope(const CallScope &) = delete;
  CallScope &operator=(const CallScope &) = delete;

 private:
  Context &context_;
  const FloatEnvironment standard_;  // scalars are computed on the caller's thread too
};

}  // namespace fsdp::engine
