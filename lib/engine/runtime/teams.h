// SPDX-License-Identifier: Apache-2.0
// The ranks of a model by what they do together.
#pragma once

#include <memory>
#include <string>

#include "layout/mesh.h"
#include "memory/model_spec.h"
#include "transport/team.h"

namespace fsdp::engine {

class Context;

struct Teams {
  uint32_t number = 0;                     // of the model, among those of the same ranks: what messages call it
  std::shared_ptr<transport::Team> all;    // agree on steps; in the mesh's order
  std::shared_ptr<transport::Team> inner;  // share memory: gather weights, reduce gradients
  std::shared_ptr<transport::Team> outer;  // exchange what the outer axis divides or replicates; NULL: there is none
  // The same two over the device's memory: on the host they are the same.
  std::shared_ptr<transport::Team> inner_data, outer_data;

  // Those over the device's memory, where they are others.
  template <class Visit>
  void for_each_data(Visit &&visit) const {
    if (inner_data && inner_data != inner) visit(*inner_data);
    if (outer_data && outer_data != outer) visit(*outer_data);
  }
};

// "0, 2-5"; and the same, but empty if that is the whole job.
std::string list_ranks(const transport::Team &team);
std::string name_ranks(const transport::Team &team, uint32_t world_size);

// Logs what teams find out after their creation, at the latest when all that uses them has ended.
class TeamNews {
 public:
  TeamNews(Context &context, const Teams &teams) : context_(context), teams_(teams) {}
  ~TeamNews() { tell(); }
  TeamNews(const TeamNews &) = delete;
  TeamNews &operator=(const TeamNews &) = delete;
  void tell() noexcept;

 private:
  Context &context_;
  const Teams &teams_;
};

// Collective over the mesh: all of them; then, once they are known to have the same mesh, its axes. communicates: over
// the inner one.
Teams create_teams(Context &context, const layout::Mesh &mesh);
void create_axes(Teams &teams, Context &context, const layout::Mesh &mesh, bool communicates);

// What a rank allocates for what the model's communicators exchange.
struct TeamMemory {
  uint64_t device_bytes = 0;   // memory of a device, in both axes
  uint64_t message_bytes = 0;  // messages of the host, over the outer axis
  uint64_t acted_bytes = 0;    // of these, what only real hosts would use
};
// Before there are teams: where the transport is chosen at the seal, the most that it can be.
TeamMemory plan_team_memory(const Context &context, const memory::ModelSpec &spec);
// Of the teams that were made.
TeamMemory team_memory(const Teams &teams, const Context &context, const memory::ModelSpec &spec);

// CUDA puts the streams of a process and GPU into few hardware queues. Streams of one queue wait for each other, and
// where they are of ranks that wait for each other too, as threads of one process, that may be a circle that never
// ends. Lanes of staging see to it that none waits so (device/cuda/lane.h); kernels of NCCL wait for those of peers.

class Context;
struct Teams;

// Collective over the model's ranks, when all streams have been made. Logs a warning on the first of the ranks that
// share the queues of a GPU over NCCL.
void warn_of_queues(Context &context, const Teams &teams);

}  // namespace fsdp::engine
