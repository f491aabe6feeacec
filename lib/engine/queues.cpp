// SPDX-License-Identifier: Apache-2.0
#include "engine/queues.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <vector>

#include "engine/context.h"
#include "engine/teams.h"

namespace fsdp::engine {
namespace {

constexpr long usual_queues = 8, most_queues = 32;  // CUDA's

struct Share {
  uint64_t process;
  int32_t gpu;
  uint32_t streams;  // that wait for kernels of peers; else 0
};

bool waits_for_kernels(const Teams &teams) {
  bool waits = false;
  teams.for_each_data([&](const transport::Team &team) {
    waits |= team.size() > 1 && team.transport() == transport::DeviceTransport::nccl;
  });
  return waits;
}

// The same for two ranks exactly if they are of one process: process numbers are those of a host, or of a container.
uint64_t name_process() {
  static const uint64_t name = (uint64_t{std::random_device{}()} << 32) | std::random_device{}();
  return name ^ static_cast<uint64_t>(::getpid());  // a forked process has the parent's
}

long count_queues() {
  const char *text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");  // NOLINT(concurrency-mt-unsafe): the program owns it
  const long asked = text ? std::strtol(text, nullptr, 10) : 0;
  return asked < 1 ? usual_queues : std::min(asked, most_queues);
}

}  // namespace

void warn_of_queues(Context &context, const Teams &teams) {
  const device::Device &device = context.device();
  if (device.traits().host_memory) return;
  transport::Team &team = *teams.all;
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
                  ranks, mine.gpu, streams, count_queues(), most_queues));
}

}  // namespace fsdp::engine
