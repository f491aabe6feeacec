// SPDX-License-Identifier: Apache-2.0
// Everything that exists from the seal on: memory, streams, communicators, groups, and the state that all calls check.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "device/device.h"
#include "engine/context/context.h"
#include "engine/runtime/call_sequence.h"
#include "engine/runtime/group.h"
#include "engine/runtime/outer.h"
#include "engine/runtime/replay.h"
#include "engine/runtime/step.h"
#include "engine/runtime/storage.h"
#include "engine/runtime/stream_trace.h"
#include "memory/model_plan.h"
#include "trace/timeline.h"
#include "transport/team.h"

namespace fsdp::engine {

struct Stats {
  uint64_t gathers = 0, reduces = 0, all_gathers = 0, reduce_scatters = 0, all_reduces = 0;
  uint64_t gathered_row_bytes = 0, gathered_column_bytes = 0;
  uint64_t gathered_bytes = 0, reduced_bytes = 0, prefetches = 0, dropped_prefetches = 0;
  uint64_t gathered_groups = 0, peak_gathered_groups = 0, pending_grads = 0, peak_pending_grads = 0;
  uint64_t reduce_scatter_bytes = 0, all_reduce_bytes = 0;
  uint64_t gather_wait_ns = 0, reduce_wait_ns = 0, peer_wait_ns = 0, checkpoint_stall_ns = 0;

  void add_all_gather(uint64_t bytes, const PlaneBytes &planes) {
    ++all_gathers;
    gathered_bytes += bytes;
    gathered_row_bytes += planes.row;
    gathered_column_bytes += planes.column;
  }
};

// What the caller waits for. `publish` and `peers` share one counter; the others have one each.
enum class WaitKind { gather, reduce, publish, peers, checkpoint };
// An ordered sequence of collectives over the inner axis. Collectives of one sequence do not wait for those of another.
struct CollectiveStream {
  std::unique_ptr<transport::Collectives> comm;
  std::unique_ptr<device::Stream> stream;
  std::unique_ptr<StreamTrace> trace;
};

// Points in the order of streams.
struct Marks {
  std::unique_ptr<device::Event> published;    // the compute weights of this version are written
  std::unique_ptr<device::Event> window_work;  // the work that calls of the update window have given to their streams
  std::unique_ptr<device::Event> norm;         // the last norm that was asked for is computed
  std::unique_ptr<device::Event> amaxes;       // the scales of the weights that are being published are computed
  std::unique_ptr<device::Event> finished,
      order;  // for momentary use
};
// Sequences in the flight record, besides those of the streams.
struct Flights {
  std::unique_ptr<trace::FlightSequence> meetings, params;
};

class Runtime {
 public:
  Runtime(Context &context, const memory::ModelSpec &spec, const memory::ModelPlan &plan,
          const std::map<fsdp_role, CallerArena> &arenas, Teams teams);
  ~Runtime();
  Runtime(const Runtime &) = delete;
  Runtime &operator=(const Runtime &) = delete;

  Context &context;
  const memory::ModelSpec &spec;
  const memory::ModelPlan &plan;
  Teams teams;
  TeamNews team_news;  // declared before the members that use the teams
  std::unique_ptr<Storage> storage;
  std::unique_ptr<transport::Versions> versions;         // NULL: gathers wait for publishing ranks
  std::unique_ptr<transport::Collectives> control_comm;  // for calls that wait for peers on the calling thread
  CollectiveStream gathers, reduces;
  std::unique_ptr<Outer> outer;  // NULL: the mesh has one axis
  Marks marks;
  CallSequence calls;  // calls that peers must make too, if the collectives' traits ask the caller to record them
  std::vector<Group> groups;
  std::vector<GradPart> parts;  // parts of full gradients, group by group
  Stats stats;
  trace::Timeline *timeline;  // NULL: no trace is kept
  Flights flights;
  Step step;
  uint64_t capture_id = 0;  // the device's number of the graph into which calls are recorded (capture.h); 0: none
  const bool has_graphs;    // can the device's streams be captured?
  Replays replays;
  const char *reduce_note = "";  // a note that messages add to the names of reduces (transport::Tag)
  transport::Team &inner() const { return *teams.inner; }
  // The ranks that hold different slots. Replicas hold the same slots and compute the same results.
  transport::Team &holders() const { return spec.mesh.slices() > 1 ? *teams.all : inner(); }
  // How the collectives of both axes behave.
  const transport::CollectiveTraits &collectives() const { return teams.inner_data->traits(); }
  bool communicates() const { return spec.communicates(); }
  const Bucket &bucket(const ParamPlace &place) const { return storage->buckets()[place.bucket]; }
  const layout::Placement &placement(const ParamPlace &place) const {
    return plan.buckets[place.bucket].layout.tensors[place.tensor];
  }
  const memory::ParamSpec &param(const Group &group, uint64_t index) const { return group.spec->params[index]; }
  // Notes the trained parameters. If ranks differ, their collectives may fail before they meet; the errors then have a
  // note about it.
  void set_trained(uint64_t hash, bool all);
  ParamPlace &place(Group &group, uint64_t param_index, const char *call);
  // The caller's stream. Throws INVALID_STATE, before anything is recorded, if the stream belongs to another capture
  // than the model: CUDA would take the work into that graph, or lose the order. Later work on the stream comes after
  // all replays so far.
  device::Stream &caller_stream(fsdp_stream stream, const char *call) const;
  // True if every rank has published the current version. This costs one atomic load per rank.
  bool version_ready() const noexcept { return !versions || versions->ready(step.version()); }
  // The caller waits until every rank has published this version.
  void await_version();
  // Later work on the gather stream comes after every rank has published this version. `what` is for messages.
  void await_parts(const char *what, const char *object);
  // The caller waits for all work that the library's streams have been given.
  void wait_idle(device::Stream &caller);
  void wait_idle(device::Stream &stream, WaitKind what, device::Stream &caller);
  void wait(const device::Event &event, WaitKind what, device::Stream &caller, const Group *group = nullptr);
  // join_window(): later work on the stream comes after the work that earlier calls of the update window gave to their
  // streams. leave_window(): work of later calls comes after this call's work. The calling thread keeps this order
  // anyway.
  void join_window(device::Stream &caller) const;
  void leave_window(device::Stream &caller) const;
  // The calling thread waits for the work that the stream has been given.
  void synchronize(device::Stream &stream);
  // Gathers the group's weights into full buffers, on the gather stream. They are pulled from their places or sent as
  // messages. A message that was given up since is an error.
  void gather(std::span<const transport::Gather> gathers, const Group &group);
  std::vector<device::Stream *> library_streams() const;
  // The events by which streams of the caller and of the library wait for each other.
  std::vector<device::Event *> events() const;
  // Ends collectives that cannot complete.
  void abandon();
  void require_eager(const char *call) const;  // throws INVALID_STATE in a capture: the call cannot be part of a graph

 private:
  void await_pulls();
  void end_streams() noexcept;
  bool in_a_step() const;
  bool streams_end(std::chrono::milliseconds within);
  void make_inner();
  void make_parts();
  void make_traces();

  uint32_t model_number_ = 0;  // number in the timeline
};
// A call of the caller in the timeline.
class CallSpan : public trace::Span {
 public:
  CallSpan(const Runtime &runtime, const char *name, const Group *group = nullptr, uint64_t bytes = 0)
      : Span(runtime.timeline, trace::EventKind::call, name, group ? group->trace_name : nullptr,
             runtime.step.version(), bytes) {}
};

// The caller waits from here to the end of the scope. The wait is counted, and is an event inside the event of its
// call.
class WaitSpan {
 public:
  WaitSpan(Runtime &runtime, WaitKind what, const Group *group = nullptr);
  ~WaitSpan();
  WaitSpan(const WaitSpan &) = delete;
  WaitSpan &operator=(const WaitSpan &) = delete;

 private:
  Runtime &runtime_;
  uint64_t &counter_;
  trace::TimelineEvent event_;
  int exceptions_;
};

}  // namespace fsdp::engine
