// SPDX-License-Identifier: Apache-2.0
// Everything that exists from the seal on: memory, streams, communicators, groups, and the state that all calls check.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "device/device.h"
#include "engine/context/context.h"
#include "engine/context/model_calls.h"
#include "engine/runtime/call_order.h"
#include "engine/runtime/grad_home.h"
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
  uint64_t gather_wait_ns = 0, reduce_wait_ns = 0, peer_wait_ns = 0, checkpoint_stall_ns = 0, home_wait_ns = 0;

  void add_all_gather(uint64_t bytes, const PlaneBytes &planes) {
    ++all_gathers;
    gathered_bytes += bytes;
    gathered_row_bytes += planes.row;
    gathered_column_bytes += planes.column;
  }
};

// The kinds of waits that are counted. `publish` and `peers` share one counter; each other kind has its own.
enum class WaitKind { gather, reduce, publish, peers, checkpoint, home };
// A stream of the library on which collectives run, in the order in which they were called.
struct CollectiveStream {
  std::unique_ptr<device::Stream> stream;
  std::unique_ptr<StreamTrace> trace;
};

// How this rank communicates with the ranks of one mesh. Each Collectives below is a sequence with an order of its own,
// and does not wait for the others.
struct MeshComms {
  const layout::Mesh &mesh;
  const Teams &teams;
  CollectiveStream &reducing;                                    // the stream of its reduces
  bool communicates;                                             // does the mesh's inner axis communicate?
  std::unique_ptr<transport::Versions> versions{};               // NULL: gathers wait for publishing ranks
  std::unique_ptr<transport::Collectives> control{};             // for calls that wait for peers on the calling thread
  std::unique_ptr<transport::Collectives> gathers{}, reduces{};  // over the inner axis
  std::unique_ptr<Outer> outer{};                                // NULL: the mesh has one axis
  std::unique_ptr<GradHome> grad_home{};                         // NULL: no main grads of the mesh are in a file
  // For rows of matrices that its inner and its outer stream move; NULL: none of these are in a file.
  std::array<std::unique_ptr<FileLane>, 2> row_files{};

  transport::Team &inner() const { return *teams.inner; }
  uint32_t rank() const { return teams.all->rank(); }  // this rank's number in the mesh
  std::vector<uint32_t> members{};                     // numbers in the model of the mesh's ranks, ascending
};

// Events that mark points in the order of streams.
struct Marks {
  std::unique_ptr<device::Event> published;    // the compute weights of this version are written
  std::unique_ptr<device::Event> window_work;  // work that calls of the update window have enqueued
  std::unique_ptr<device::Event> norm;         // the last norm that was asked for is computed
  std::unique_ptr<device::Event> amaxes;       // the scales of the weights that are being published are computed
  std::unique_ptr<device::Event> finished,
      order;  // for short use within one call
};
// Sequences in the flight record, besides those of the streams.
struct Flights {
  std::unique_ptr<trace::FlightSequence> meetings, params;
};

class Runtime {
 public:
  Runtime(Context &context, const memory::ModelSpec &spec, const memory::ModelPlan &plan,
          const std::map<fsdp_role, CallerArena> &arenas, std::vector<Teams> teams);
  ~Runtime();
  Runtime(const Runtime &) = delete;
  Runtime &operator=(const Runtime &) = delete;

  Context &context;
  const memory::ModelSpec &spec;
  const memory::ModelPlan &plan;
  const std::vector<Teams> teams;  // by mesh
  TeamNews team_news;              // declared before the members that use the teams
  std::unique_ptr<Storage> storage;
  // Gathers of all meshes share one stream. On the host a stream is a thread that waits for peers, so each mesh has
  // streams of its own for reduces and for its outer axis. On GPUs all meshes share one stream of each kind, because
  // the messages of a GPU need one order. An outer stream is NULL if no mesh that it serves has an outer axis.
  CollectiveStream gathers;
  std::vector<CollectiveStream> reduces, outers;
  std::vector<MeshComms> comms;  // by mesh
  Marks marks;
  CallSequence calls;  // calls that peers must make too, if the collectives' traits ask the caller to record them
  std::vector<Group> groups;
  std::vector<GradPart> parts;              // parts of full gradients, group by group
  std::unique_ptr<ModelCalls> model_calls;  // NULL: calls are not recorded
  Stats stats;
  trace::Timeline *timeline;  // NULL: no trace is kept
  Flights flights;
  Step step;
  uint64_t capture_id = 0;  // the device's number of the graph into which calls are recorded (capture.h); 0: none
  const bool has_graphs;    // can the device's streams be captured?
  Replays replays;
  const char *reduce_note = "";  // a note that messages add to the names of reduces (transport::Tag)
  transport::Team &team() const { return *teams.front().all; }  // all ranks of the model
  uint32_t number() const { return teams.front().number; }      // number among the models of the same ranks
  MeshComms &model_comms() { return comms.front(); }
  MeshComms &comms_of(const Group &group) { return comms[group.spec->mesh]; }
  const MeshComms &comms_of(const Group &group) const { return comms[group.spec->mesh]; }
  // The ranks that exchange measured values. If groups have several meshes, these are all ranks of the model. Otherwise
  // they are the ranks that hold different slots, because replicas compute the same results.
  transport::Team &holders() const { return spec.value_slices() > 1 ? team() : *teams.front().inner; }
  // How the collectives of all meshes and axes behave.
  const transport::CollectiveTraits &collectives() const { return teams.front().inner_data->traits(); }
  // Are calls recorded so that ranks can compare them when they meet? On the host each mesh compares its own
  // collectives. With several meshes the ranks also record reduces, to compare their order across meshes.
  bool records_calls() const { return collectives().records_calls || compares_reduces(); }
  // Must ranks compare their reduces before they wait for streams?
  bool compares_reduces() const { return collectives().step_ends_round && spec.meshes.size() > 1; }
  // The lowest rank of the model with which the calls of rank `r` are compared. If groups have several meshes, all
  // ranks are compared. Otherwise the ranks of an inner axis are compared, because they exchange messages.
  uint32_t first_compared(uint32_t r) const { return spec.meshes.size() > 1 ? 0 : r - spec.mesh().inner(r); }
  // Does this rank count its slot of the parameter in sums over the model? Among ranks with the same elements, one rank
  // does.
  bool answers_for(const Group &group, uint64_t param_index) const;
  // The part of a tensor that the extent covers on this rank.
  layout::Slice slice_of(const Plane &plane, uint64_t tensor, Extent extent) const {
    return slice_of(*plane.layout, tensor, extent, plane.plan->mesh);
  }
  layout::Slice slice_of(const layout::FlatLayout &layout, uint64_t tensor, Extent extent, uint32_t mesh) const {
    return memory::slice_of(layout, tensor, extent, comms[mesh].mesh, comms[mesh].rank());
  }
  const Bucket &bucket(const ParamPlace &place) const { return storage->buckets()[place.bucket]; }
  const layout::Placement &placement(const ParamPlace &place) const {
    return plan.buckets[place.bucket].layout.tensors[place.tensor];
  }
  const memory::ParamSpec &param(const Group &group, uint64_t index) const { return group.spec->params[index]; }
  // record_call() notes a call that peers must make, too. place_call() notes a call that is compared only with calls of
  // other models. Neither notes calls of a capture, because only replays enqueue their work.
  void record_call(SequencedCall call) {
    calls.add(call);
    place_call(call);
  }
  void place_call(SequencedCall call) {
    if (model_calls && capture_id == 0) model_calls->add(call);
  }
  // Notes which parameters are trained. If ranks differ in them, collectives may fail before the ranks meet; the errors
  // then have a note about the difference.
  void set_trained(uint64_t hash, bool all);
  ParamPlace &place(Group &group, uint64_t param_index, const char *call);
  // The caller's stream. Throws INVALID_STATE, before anything is recorded, if the stream belongs to another capture
  // than the model: CUDA would add the work to that graph or lose the order. Later work on the stream comes after all
  // earlier replays.
  device::Stream &caller_stream(fsdp_stream stream, const char *call) const;
  // True if every rank has published the current version. This costs one atomic load per rank.
  bool version_ready() const noexcept {
    return std::ranges::all_of(comms, [&](const MeshComms &mesh_comms) {
      return !mesh_comms.versions || mesh_comms.versions->ready(step.version());
    });
  }
  // Blocks the caller until every rank of the model's meshes has published this version.
  void await_version();
  // Orders later work on the gather stream after the publishing of this version by every rank of the mesh. `what` is
  // for messages.
  void await_parts(MeshComms &mesh_comms, const char *what, const char *object);
  // Blocks the caller until all work on the library's streams is done.
  void wait_idle(device::Stream &caller);
  void wait_idle(device::Stream &stream, WaitKind what, device::Stream &caller);
  void wait(const device::Event &event, WaitKind what, device::Stream &caller, const Group *group = nullptr);
  // Blocks the calling thread until the file has all main grads and rows that streams have sent to it.
  void await_file();
  // join_window() orders later work on the stream after the work that earlier calls of the update window have enqueued.
  // leave_window() orders the work of later calls after the work of this call. If the calling thread does the work, its
  // order is already right.
  void join_window(device::Stream &caller) const;
  void leave_window(device::Stream &caller) const;
  // Blocks the calling thread until the work on the stream is done.
  void synchronize(device::Stream &stream);
  // Gathers the group's weights into full buffers, on the gather stream. The gathers pull weights from their places or
  // send messages. Throws if an earlier message was given up.
  void gather(std::span<const transport::Gather> gathers, const Group &group);
  std::vector<device::Stream *> library_streams() const;
  // The events by which streams of the caller and of the library wait for each other.
  std::vector<device::Event *> events() const;
  // Gives up collectives that cannot complete.
  void abandon();
  void require_eager(const char *call) const;  // throws INVALID_STATE in a capture: the call cannot be part of a graph

 private:
  void await_pulls();
  void end_streams() noexcept;
  bool in_a_step() const;
  bool streams_end(std::chrono::milliseconds within);
  void make_streams();
  void make_inner(MeshComms &mesh_comms);
  void make_parts();
  void make_traces();
  void log_calls_of_models();

  std::vector<uint32_t> lanes_;  // numbers of models in the timeline: one for each stream of reduces
};
// A call of the caller in the timeline.
class CallSpan : public trace::Span {
 public:
  CallSpan(const Runtime &runtime, const char *name, const Group *group = nullptr, uint64_t bytes = 0)
      : Span(runtime.timeline, trace::EventKind::call, name, group ? group->trace_name : nullptr,
             runtime.step.version(), bytes) {}
};

// From here to the end of the scope, the caller waits. The wait is counted, and in the timeline it is an event inside
// the event of its call.
class WaitSpan {
 public:
  WaitSpan(Runtime &runtime, WaitKind what, const Group *group = nullptr);
  ~WaitSpan();
  WaitSpan(const WaitSpan &) = delete;
  WaitSpan &operator=(const WaitSpan &) = delete;
  // The bytes that the disk has moved during the wait, for the timeline.
  void set_bytes(uint64_t bytes) noexcept { event_.bytes = bytes; }

 private:
  Runtime &runtime_;
  uint64_t &counter_;
  trace::TimelineEvent event_;
  int exceptions_;
};

}  // namespace fsdp::engine
