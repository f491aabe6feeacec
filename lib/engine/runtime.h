// SPDX-License-Identifier: Apache-2.0
// Everything that exists from the seal on: memory, streams, communicators, groups, and the state that all calls check.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "device/device.h"
#include "engine/context.h"
#include "engine/group.h"
#include "engine/storage.h"
#include "memory/model_plan.h"

namespace fsdp::engine {

struct Stats {
  uint64_t gathers = 0, reduces = 0, all_gathers = 0, reduce_scatters = 0, all_reduces = 0;
  uint64_t gathered_bytes = 0, reduced_bytes = 0, prefetches = 0, dropped_prefetches = 0;
  uint64_t gathered_groups = 0, peak_gathered_groups = 0, pending_grads = 0, peak_pending_grads = 0;
  uint64_t reduce_scatter_bytes = 0, all_reduce_bytes = 0;
  uint64_t gather_wait_ns = 0, reduce_wait_ns = 0, peer_wait_ns = 0;
};

// What the caller waits for: each has its counter.
enum class Awaited { gather, reduce, peers };

// Adds the time until its end to a counter.
class WaitTimer {
 public:
  WaitTimer(Stats &stats, Awaited what) : ns_(counter(stats, what)), start_(std::chrono::steady_clock::now()) {}
  ~WaitTimer() {
    ns_ += static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count());
  }
  WaitTimer(const WaitTimer &) = delete;
  WaitTimer &operator=(const WaitTimer &) = delete;

 private:
  static uint64_t &counter(Stats &stats, Awaited what) {
    return what == Awaited::gather   ? stats.gather_wait_ns
           : what == Awaited::reduce ? stats.reduce_wait_ns
                                     : stats.peer_wait_ns;
  }

  uint64_t &ns_;
  std::chrono::steady_clock::time_point start_;
};

class Runtime {
 public:
  Runtime(Context &context, const memory::ModelSpec &spec, const memory::ModelPlan &plan,
          const std::map<fsdp_role, CallerArena> &arenas, std::shared_ptr<comm::Team> team);
  ~Runtime();
  Runtime(const Runtime &) = delete;
  Runtime &operator=(const Runtime &) = delete;

  Context &context;
  const memory::ModelSpec &spec;
  const memory::ModelPlan &plan;
  std::shared_ptr<comm::Team> team;
  std::unique_ptr<Storage> storage;
  std::unique_ptr<comm::Gate> version_gate;  // this rank has published so many versions
  std::unique_ptr<comm::Gate> round_gate;    // this rank has realigned its collectives so often
  std::unique_ptr<comm::Communicator> gather_comm, reduce_comm, control_comm;
  std::unique_ptr<device::Stream> gather_stream, reduce_stream;
  std::unique_ptr<device::Event> published, finished, order;
  std::vector<Group> groups;
  Stats stats;

  uint64_t version = 0;
  bool version_ready = false;  // every rank is known to have published it
  bool window_open = true;     // the update window
  bool window_has_grads = false;  // it was opened by finish_grads
  uint64_t round = 0;
  bool round_entered = true;   // the reduce stream has passed the round's gate
  std::string step_failure;    // why this step can only be discarded; empty: it can go on
  uint64_t adamw_step = 0;

  bool communicates() const { return spec.communicates(); }
  const Bucket &bucket(const ParamPlace &place) const { return storage->buckets()[place.bucket]; }
  const layout::Placement &placement(const ParamPlace &place) const {
    return plan.buckets[place.bucket].layout.tensors[place.tensor];
  }
  const memory::ParamSpec &param(const Group &group, uint64_t index) const { return group.spec->params[index]; }
  ParamPlace &place(Group &group, uint64_t param_index, const char *call);
  // The caller waits until every rank has published this version.
  void await_version();
  // The caller waits for all that the stream of the library has been given.
  void wait_idle(Awaited what, device::Stream &caller);
  void wait(const device::Event &event, Awaited what, device::Stream &caller);
  // Errors that name the call expected.
  void require_weights(const char *call) const;  // the window is closed
  void require_window(const char *call) const;
  void require_step(const char *call) const;     // ... and the step has not failed

 private:
  void make_groups();
  void make_slots(Group &group);
  void make_grads(Group &group);
  void make_refresh(Group &group);
};

}  // namespace fsdp::engine
