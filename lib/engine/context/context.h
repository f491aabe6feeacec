// SPDX-License-Identifier: Apache-2.0
// One rank's membership in the job. A context owns the device and the world, and its models keep it alive. One thread
// at a time may be inside, which means in a call (CallScope). Any thread may fail, abort or destroy the context.
#pragma once

#include <atomic>
#include <chrono>
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
#include "engine/context/model_calls.h"
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

// The questions that a context asks the models made from it.
class OpenModel {
 public:
  virtual ~OpenModel() = default;
  virtual std::string unfinished() const = 0;
  // Describes the capture or replay that has begun, and the call that ends it; empty if none has begun.
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
  void check_process() const;  // throws INVALID_STATE in a forked child
  // Throws INVALID_HANDLE once the handle is destroyed: objects made from the context can then only be destroyed.
  void check_handle(const char *call) const;
  bool debug() const noexcept { return options_.flags & FSDP_CONTEXT_DEBUG; }
  bool delays_work() const noexcept { return options_.debug_delay_us != 0; }
  // The directory for the files in which sealed models list their views of memory (debug_views.h); empty: no such
  // files.
  const std::string &views_directory() const noexcept { return flight_log_.views_directory(); }
  device::Device &device() { return *device_; }
  // The traits of the device that the options name. A context that only plans knows them without a device.
  const device::Traits &device_traits() const noexcept { return device::traits_of(options_.device); }
  fsdp_device_kind device_kind() const noexcept { return options_.device; }
  // The model whose calls are recorded into a graph (capture.h); NULL: none. Only one model at a time is captured,
  // because work that another model enqueues during a capture could become part of the graph.
  const Runtime *captured() const noexcept { return captured_; }
  void set_captured(const Runtime *model) noexcept { captured_ = model; }
  void require_no_other_capture(const Runtime *model, const char *call) const;
  // Runs the body if no thread is inside the context. Returns false, without running it, if a thread is inside.
  bool run_alone(const std::function<void()> &body);
  transport::DeviceTransport transport() const noexcept;
  fsdp_device_transport device_transport() const noexcept { return options_.device_transport; }
  uint32_t timeout_ms() const noexcept { return waiter_.timeout_ms(); }
  trace::Timeline *timeline() noexcept { return flight_log_.timeline(); }  // NULL: no trace is kept
  trace::CallerSpans *caller_spans() noexcept { return flight_log_.caller_spans(); }
  void write_trace(const std::string &path) const;
  trace::FlightRecorder &flight() noexcept { return flight_log_.recorder(); }
  FlightLog &flight_log() noexcept { return flight_log_; }
  CallLog &call_log() noexcept { return call_log_; }
  void write_flight_record(const std::string &path) const;
  // Called on a thread of the caller when a call reports that the context has failed. Writes the flight record once,
  // where the options say.
  void record_failure() noexcept;
  // Returns whether the context or the job has failed, even if this rank has not waited for peers since the failure. A
  // failure of the job also fails the context. Any thread may call it.
  bool look_for_failure() const noexcept;
  Failure &failure() noexcept { return failure_; }
  const Failure &failure() const noexcept { return failure_; }
  const Waiter &waiter() const noexcept { return waiter_; }
  bool has_several_models() const noexcept { return has_several_models_.load(std::memory_order_relaxed); }
  transport::World &world() noexcept { return *world_; }
  // The team of all ranks. The first call is collective.
  transport::Team &world_team() { return values_.team(world_ranks()); }
  CheckpointSlot &checkpoint_slot() noexcept { return checkpoint_slot_; }
  // Waits until the save that is under way has ended, whatever its result.
  void await_saving();
  void require_world(const char *call) const;
  void require_open(const char *call) const;  // like require_world(); also requires that the context is not closed
  // Collective over the ranks.
  std::unique_ptr<transport::Team> create_team(std::span<const uint32_t> ranks, const std::string &what);
  // Creates a team of the same ranks over the device's memory.
  std::shared_ptr<transport::Team> create_device_team(std::shared_ptr<transport::Team> team,
                                                      transport::DeviceTransport transport);
  // The number of each rank's host.
  std::vector<uint32_t> hosts_of(std::span<const uint32_t> ranks) const;
  // message_bytes() returns the bytes that a rank allocates for messages between these ranks. planned_message_bytes()
  // counts simulated hosts (`ranks_per_host`) as real hosts.
  uint64_t message_bytes(std::span<const uint32_t> ranks, bool sums) const;
  uint64_t planned_message_bytes(std::span<const uint32_t> ranks, bool sums) const;
  bool acts_hosts() const noexcept { return world_ && options_.ranks_per_host; }

  // Reduces over the mesh's ranks, in the order of the mesh; over the world if `mesh` is NULL.
  void all_reduce(const layout::Mesh *mesh, double *values, uint64_t count, fsdp_value_op op, const char *call);
  // Returns the values of all these ranks, rank by rank; they are valid until the next such call. Ranks compare `op`;
  // 0: the values are not reduced.
  std::span<const ValueReducer::ValueMessage> exchange_values(const layout::Mesh *mesh, const double *values,
                                                              uint64_t count, fsdp_value_op op, const char *call);
  void close();
  void abort(const std::string &reason) noexcept;
  // Fails the context. `peers_know`: communicators tell peers of the failure. If false, this call tells them, because
  // they would otherwise wait for this rank until their timeout.
  void fail_for_good(const Error &error) noexcept;
  void fail_for_good(const Error &error, bool peers_know) noexcept;
  // Called when the handle is destroyed: calls that still wait inside end with an error.
  void shut_down() noexcept;
  // Thread-safe. The line is passed to the log hook when the present or the next call ends.
  void log(fsdp_log_level level, const std::string &message) noexcept;
  // The same for the thread that is inside of a call: the line is passed on at once.
  void log_now(fsdp_log_level level, const std::string &message) noexcept;
  bool logs(fsdp_log_level level) const noexcept { return log_queue_.takes(level); }

  void remember(const Error &error) noexcept;
  std::optional<Error> last_error() const;

  // The context keeps a list of its models, because it must not close while one of them is in the middle of a step.
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
  CallLog call_log_;
  CheckpointSlot checkpoint_slot_;
  mutable std::mutex mutex_;                // guards the models and the last error
  std::unique_ptr<device::Device> device_;  // may log until it ends
  std::unique_ptr<transport::World> world_;
  std::vector<uint32_t> world_ranks_;  // filled when first needed
  ValueReducer values_;
  std::atomic<const Runtime *> captured_{nullptr};
  std::atomic<bool> inside_{false};
  std::atomic<bool> has_several_models_{false};  // has there ever been more than one at a time?
  std::atomic<bool> closed_{false};
  std::atomic<bool> ends_with_its_handle_{false};
  std::atomic<bool> handle_destroyed_{false};
  std::vector<const OpenModel *> models_;
  std::optional<Error> last_error_;
};

// Work of a call that may take long: once a second it logs how far it is, on the calling thread.
class LongWork {
 public:
  explicit LongWork(Context &context) : context_(context) {}
  // `text()` makes the line.
  void tell(auto &&text) {
    using Clock = std::chrono::steady_clock;
    if (!context_.logs(FSDP_LOG_INFO) || Clock::now() - told_ < std::chrono::seconds(1)) return;
    context_.log_now(FSDP_LOG_INFO, text());
    told_ = Clock::now();
  }

 private:
  Context &context_;
  std::chrono::steady_clock::time_point told_ = std::chrono::steady_clock::now();
};

// Claims the context for one call. Throws BUSY, the sticky failure, or INVALID_STATE in a forked child.
class CallScope {
 public:
  CallScope(Context &context, const char *call);
  // Marks the call as successful. Without this, the flight recorder records the error that ends the call.
  void done() noexcept { context_.flight().leave(); }
  ~CallScope();
  CallScope(const CallScope &) = delete;
  CallScope &operator=(const CallScope &) = delete;

 private:
  Context &context_;
  const FloatEnvironment standard_;  // scalars are also computed on the caller's thread
};

}  // namespace fsdp::engine
