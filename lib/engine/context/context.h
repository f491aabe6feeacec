// SPDX-License-Identifier: Apache-2.0
// One rank's membership in the job. A context owns the device and the world, and its models keep it alive. One thread
// at a time is inside (CallScope); failure, abort and destroy may come from any thread.
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

// What a context must know about the models made from it.
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
  void check_process() const;  // throws INVALID_STATE in a forked child
  // Throws INVALID_HANDLE once the handle is destroyed: objects made from the context can then only be destroyed.
  void check_handle(const char *call) const;
  bool debug() const noexcept { return options_.flags & FSDP_CONTEXT_DEBUG; }
  bool delays_work() const noexcept { return options_.debug_delay_us != 0; }
  // The directory in which sealed models say what lies where in memory; empty: none.
  const std::string &views_directory() const noexcept { return flight_log_.views_directory(); }
  device::Device &device() { return *device_; }
  // The traits of the device that the options name. A context that only plans knows them without a device.
  const device::Traits &device_traits() const noexcept { return device::traits_of(options_.device); }
  fsdp_device_kind device_kind() const noexcept { return options_.device; }
  // The model whose calls are recorded into a graph (capture.h); NULL: none. There is one at a time, because work that
  // other models enqueue meanwhile could become part of the graph.
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
  // Has the context or the job failed? This rank may not have waited for peers since. If the job has failed, this also
  // fails the context. May be called by any thread.
  bool look_for_failure() const noexcept;
  Failure &failure() noexcept { return failure_; }
  const Failure &failure() const noexcept { return failure_; }
  const Waiter &waiter() const noexcept { return waiter_; }
  bool has_several_models() const noexcept { return has_several_models_.load(std::memory_order_relaxed); }
  transport::World &world() noexcept { return *world_; }
  // The team of all ranks. The first call is collective.
  transport::Team &world_team() { return values_.team(world_ranks()); }
  CheckpointSlot &checkpoint_slot() noexcept { return checkpoint_slot_; }
  // Waits for the end of the save that is under way, whatever its result.
  void await_saving();
  void require_world(const char *call) const;
  void require_open(const char *call) const;  // like require_world(), and the context must not be closed
  // Collective over the ranks.
  std::unique_ptr<transport::Team> create_team(std::span<const uint32_t> ranks, const std::string &what);
  // Creates a team of the same ranks over the device's memory.
  std::shared_ptr<transport::Team> create_device_team(std::shared_ptr<transport::Team> team,
                                                      transport::DeviceTransport transport);
  // The number of each rank's host.
  std::vector<uint32_t> hosts_of(std::span<const uint32_t> ranks) const;
  // The bytes that a rank allocates for messages between these ranks; and the bytes that it would allocate if the hosts
  // that the options name were real.
  uint64_t message_bytes(std::span<const uint32_t> ranks, bool sums) const;
  uint64_t planned_message_bytes(std::span<const uint32_t> ranks, bool sums) const;
  bool acts_hosts() const noexcept { return world_ && options_.ranks_per_host; }

  // Reduces over the ranks of the mesh, in its order; NULL: over the world.
  void all_reduce(const layout::Mesh *mesh, double *values, uint64_t count, fsdp_value_op op, const char *call);
  // Returns the values of the same ranks, one after the other; they are valid until the next such call. `op` is
  // compared between ranks; 0: the values are not reduced.
  std::span<const ValueReducer::ValueMessage> exchange_values(const layout::Mesh *mesh, const double *values,
                                                              uint64_t count, fsdp_value_op op, const char *call);
  void close();
  void abort(const std::string &reason) noexcept;
  // Fails the context. `peers_know`: communicators know of the failure. If they do not, peers are told, since they
  // would otherwise wait for this rank until their timeout.
  void fail_for_good(const Error &error) noexcept;
  void fail_for_good(const Error &error, bool peers_know) noexcept;
  // Called when the handle is destroyed: calls that still wait inside end with an error.
  void shut_down() noexcept;
  // Thread-safe. The line is passed to the log hook when the present or the next call ends.
  void log(fsdp_log_level level, const std::string &message) noexcept;
  bool logs(fsdp_log_level level) const noexcept { return log_queue_.takes(level); }

  void remember(const Error &error) noexcept;
  std::optional<Error> last_error() const;

  // Closing the context while a model is in the middle of a step is an error, so the context knows its models.
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
  // Says that the call has done its work. Without it the flight recorder records the error that ends the call.
  void done() noexcept { context_.flight().leave(); }
  ~CallScope();
  CallScope(const CallScope &) = delete;
  CallScope &operator=(const CallScope &) = delete;

 private:
  Context &context_;
  const FloatEnvironment standard_;  // scalars are also computed on the caller's thread
};

}  // namespace fsdp::engine
