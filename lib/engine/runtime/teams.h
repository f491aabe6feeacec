// SPDX-License-Identifier: Apache-2.0
// The teams of a model's ranks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "layout/mesh.h"
#include "memory/model_spec.h"
#include "transport/team.h"

namespace fsdp::engine {

class Context;

struct Teams {
  uint32_t number = 0;                     // number among the models of the same ranks, for messages
  std::shared_ptr<transport::Team> all;    // all ranks, in the mesh's order: they agree on steps
  std::shared_ptr<transport::Team> inner;  // ranks that share memory: they gather weights and reduce gradients
  std::shared_ptr<transport::Team> outer;  // ranks that exchange over the outer axis; NULL: there is none
  // The inner and the outer team over the device's memory. On the host they are `inner` and `outer`.
  std::shared_ptr<transport::Team> inner_data, outer_data;
  bool has_outer() const { return outer != nullptr; }
  // Visits the teams over the device's memory that differ from `inner` and `outer`.
  template <class Visit>
  void for_each_data(Visit &&visit) const {
    if (inner_data && inner_data != inner) visit(*inner_data);
    if (outer_data && outer_data != outer) visit(*outer_data);
  }
};

// list_ranks() returns a text like "0, 2-5". name_ranks() does the same, but returns an empty text if the team is the
// whole job.
std::string list_ranks(const transport::Team &team);
std::string name_ranks(const transport::Team &team, uint32_t world_size);

// Logs news of teams after their creation, at the latest when all users of the teams have ended.
class TeamNews {
 public:
  TeamNews(Context &context, const std::vector<Teams> &teams) : context_(context), teams_(teams) {}
  ~TeamNews() { tell(); }
  TeamNews(const TeamNews &) = delete;
  TeamNews &operator=(const TeamNews &) = delete;
  void tell() noexcept;

 private:
  Context &context_;
  const std::vector<Teams> &teams_;
};

// Collective over the mesh. create_teams() makes the team of all ranks. Once the ranks are known to have the same mesh,
// create_axes() makes the teams of its axes. `communicates`: ranks communicate over the inner axis. `what` names the
// mesh in messages.
Teams create_teams(Context &context, const layout::Mesh &mesh, const std::string &what);
void create_axes(Teams &teams, Context &context, const layout::Mesh &mesh, bool communicates, const std::string &what);

// The memory that a rank allocates for the model's communicators.
struct TeamMemory {
  uint64_t device_bytes = 0;   // memory of a device, in both axes
  uint64_t message_bytes = 0;  // messages of the host, over the outer axis
  uint64_t acted_bytes = 0;    // the part of message_bytes that simulated hosts do not use

  TeamMemory &operator+=(const TeamMemory &other) {
    device_bytes += other.device_bytes;
    message_bytes += other.message_bytes;
    acted_bytes += other.acted_bytes;
    return *this;
  }
};
// The memory as planned before teams exist. If the seal chooses the transport, this is the maximum over the transports.
TeamMemory plan_team_memory(const Context &context, const memory::ModelSpec &spec);
// The memory of existing teams.
TeamMemory team_memory(const std::vector<Teams> &teams, const Context &context, const memory::ModelSpec &spec);

// CUDA maps the streams of a process on a GPU to few hardware queues, and streams on one queue wait for each other. If
// ranks are threads of one process, their streams also wait for each other, so the waits may form a circle. Lanes of
// staging avoid such waits (device/cuda/lane.h), but kernels of NCCL wait for kernels of peers.

class Context;
struct Teams;

// Collective over the model's ranks; called when all streams exist. If ranks that use NCCL share the queues of a GPU,
// the first of them logs a warning.
void warn_of_queues(Context &context, const std::vector<Teams> &teams);

}  // namespace fsdp::engine
