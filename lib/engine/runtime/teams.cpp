// SPDX-License-Identifier: Apache-2.0

#include "engine/runtime/teams.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

#include "engine/context/context.h"

namespace fsdp::engine {

std::string list_ranks(const transport::Team &team) {
  std::string text;
  for (uint32_t r = 0; r < team.size();) {
    const uint32_t first = team.world_rank(r);
    uint32_t last = first;
    while (++r < team.size() && team.world_rank(r) == last + 1) ++last;
    text += format_text("{}{}", text.empty() ? "" : ", ", first);
    if (last > first) text += format_text("-{}", last);
  }
  return text;
}

std::string name_ranks(const transport::Team &team, uint32_t world_size) {
  return team.size() < world_size ? list_ranks(team) : "";
}

Teams create_teams(Context &context, const layout::Mesh &mesh, const std::string &what) {
  Teams teams;
  teams.all = context.create_team(mesh.ranks, what);
  return teams;
}

void create_axes(Teams &teams, Context &context, const layout::Mesh &mesh, bool communicates, const std::string &what) {
  const uint32_t rank = teams.all->rank();
  teams.inner = teams.all;
  if (mesh.outer_size > 1) {
    teams.inner = context.create_team(mesh.inner_ranks(rank), what + "'s inner axis");
    teams.outer = context.create_team(mesh.outer_ranks(rank), what + "'s outer axis");
  }
  // A team that only shares memory needs no transport to be opened.
  const auto make_inner = [&] {
    const transport::DeviceTransport needed = communicates ? context.transport() : transport::DeviceTransport::staging;
    teams.inner_data = context.create_device_team(teams.inner, needed);
  };
  if (!teams.outer) return make_inner();
  // A failure on one axis, for example on a host without NCCL, must fail the ranks of the other axes, too.
  transport::attempt_together(*teams.all, "fsdp_seal_model", make_inner);
  transport::attempt_together(*teams.all, "fsdp_seal_model",
                              [&] { teams.outer_data = context.create_device_team(teams.outer, context.transport()); });
}

void TeamNews::tell() noexcept {
  for (const Teams &mesh_teams : teams_)
    mesh_teams.for_each_data([this](transport::Team &team) {
      for (const transport::Note &note : team.take_news()) context_.log(note.level, note.text);
    });
}

namespace {

using transport::DeviceTransport;

std::vector<uint32_t> outer_ranks(const Context &context, const layout::Mesh &mesh) {
  const auto rank = std::find(mesh.ranks.begin(), mesh.ranks.end(), context.rank()) - mesh.ranks.begin();
  return mesh.outer_ranks(static_cast<uint32_t>(rank));
}

uint64_t count_device_bytes(const memory::ModelSpec &spec, const layout::Mesh &mesh, DeviceTransport inner,
                            DeviceTransport outer) {
  const uint64_t longest = spec.longest_call();
  return (spec.communicates(mesh) ? transport::device_team_bytes(mesh.inner_size, inner, longest) : 0) +
         // The factor 2 is for sums and for weights.
         (mesh.outer_size > 1 ? 2 * transport::device_message_bytes(mesh.outer_size, outer, longest) : 0);
}

// Counts messages of parameters (engine/weights/params), and those messages of sums and weights that NCCL does not
// send.
uint64_t count_messages(DeviceTransport outer, uint64_t sums, uint64_t weights) {
  return outer == DeviceTransport::nccl ? weights : sums + 2 * weights;
}

// Plans the same memory for simulated hosts as for real ones, so that a plan is right for both.
TeamMemory count_team_memory(const Context &context, const layout::Mesh &mesh, DeviceTransport outer,
                             uint64_t device_bytes) {
  if (mesh.outer_size == 1) return {device_bytes, 0, 0};
  const std::vector<uint32_t> ranks = outer_ranks(context, mesh);
  const uint64_t own = count_messages(outer, context.message_bytes(ranks, true), context.message_bytes(ranks, false));
  if (!context.acts_hosts()) return {device_bytes, own, 0};
  const uint64_t planned =
      count_messages(outer, context.planned_message_bytes(ranks, true), context.planned_message_bytes(ranks, false));
  return {device_bytes, std::max(own, planned), std::max(own, planned) - own};
}

// Chooses the transport of the outer axis. NCCL never sends messages between hosts.
DeviceTransport plan_outer(const Context &context, const layout::Mesh &mesh) {
  if (mesh.outer_size == 1) return context.transport();
  const std::vector<uint32_t> ranks = outer_ranks(context, mesh);
  const std::vector<uint32_t> hosts = context.hosts_of(ranks);
  const bool spans_hosts = std::any_of(hosts.begin(), hosts.end(), [&](uint32_t host) { return host != hosts[0]; });
  const DeviceTransport transport = context.transport();
  // Only a plan refuses this; a run refuses it once its ranks have met. Simulated hosts are all on one host, so NCCL
  // may connect them.
  if (context.planning() && spans_hosts && transport == DeviceTransport::nccl)
    transport::refuse_nccl_between_hosts(ranks.size(), ranks.front(), ranks.back());
  return spans_hosts && transport != DeviceTransport::none ? DeviceTransport::staging : transport;
}

}  // namespace

TeamMemory plan_team_memory(const Context &context, const memory::ModelSpec &spec) {
  TeamMemory memory;
  for (const layout::Mesh &mesh : spec.meshes) {
    const DeviceTransport outer = plan_outer(context, mesh);
    memory += count_team_memory(context, mesh, outer, count_device_bytes(spec, mesh, context.transport(), outer));
  }
  return memory;
}

TeamMemory team_memory(const std::vector<Teams> &teams, const Context &context, const memory::ModelSpec &spec) {
  TeamMemory memory;
  for (size_t m = 0; m < teams.size(); ++m) {
    const layout::Mesh &mesh = spec.meshes[m];
    const DeviceTransport outer = teams[m].outer ? teams[m].outer_data->transport() : DeviceTransport::none;
    memory += count_team_memory(context, mesh, outer,
                                count_device_bytes(spec, mesh, teams[m].inner_data->transport(), outer));
  }
  return memory;
}

namespace {

constexpr long usual_queues = 8, max_queues = 32;  // limits of CUDA

struct Share {
  uint64_t process;
  int32_t gpu;
  uint32_t streams;  // streams that wait for kernels of peers, or 0
};

bool waits_for_kernels(const std::vector<Teams> &teams) {
  bool waits = false;
  for (const Teams &mesh_teams : teams)
    mesh_teams.for_each_data([&](const transport::Team &team) {
      waits |= team.size() > 1 && team.transport() == transport::DeviceTransport::nccl;
    });
  return waits;
}

// A name that two ranks share if and only if they are in the same process. A pid is not enough, because it is unique
// only within a host or container.
uint64_t name_process() {
  static const uint64_t name = (uint64_t{std::random_device{}()} << 32) | std::random_device{}();
  return name ^ static_cast<uint64_t>(::getpid());  // a forked process has the parent's name
}

long count_queues() {
  const char *text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");  // NOLINT(concurrency-mt-unsafe): the program owns it
  const long asked = text ? std::strtol(text, nullptr, 10) : 0;
  return asked < 1 ? usual_queues : std::min(asked, max_queues);
}

}  // namespace

void warn_of_queues(Context &context, const std::vector<Teams> &teams) {
  const device::Device &device = context.device();
  if (device.traits().host_memory) return;
  transport::Team &team = *teams.front().all;
  const Share mine{name_process(), device.index(), waits_for_kernels(teams) ? device.streams() : 0};
  std::vector<Share> all(team.size());
  team.all_gather(&mine, sizeof mine, all.data(), "the streams of a GPU");
  uint32_t ranks = 0, streams = 0, first = team.size();
  for (uint32_t r = 0; r < team.size(); ++r) {
    if (all[r].process != mine.process || all[r].gpu != mine.gpu || all[r].streams == 0) continue;
    first = std::min(first, r);
    ++ranks;
    streams += all[r].streams;
  }
  if (ranks < 2 || first != team.rank()) return;
  context.log(
      FSDP_LOG_WARNING,
      format_text("{} ranks are threads of one process and share GPU {} over NCCL: CUDA puts the {} streams that "
                  "libfsdp has there, and the program's, into {} queues (CUDA_DEVICE_MAX_CONNECTIONS, at most {}), and "
                  "streams of one queue may wait for each other for ever; take processes, FSDP_TRANSPORT_STAGING or a "
                  "GPU for each rank",
                  ranks, mine.gpu, streams, count_queues(), max_queues));
}

}  // namespace fsdp::engine
