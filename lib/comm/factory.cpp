// SPDX-License-Identifier: Apache-2.0
// Which backend moves the bytes: the only file that names one.
#include "comm/bootstrap/local_job.h"
#include "comm/bootstrap/process_world.h"
#include "comm/communicator.h"
#include "comm/shm/world.h"

namespace fsdp::comm {
namespace {

// Each rank has two descriptors and a place in every control memory for each peer.
constexpr uint32_t most_ranks = 1024;

void check_size(uint32_t size) {
  if (size == 0) fail(FSDP_INVALID_ARGUMENT, "a job of 0 ranks");
  if (size > most_ranks) fail(FSDP_UNSUPPORTED, "{} ranks on one host; this release has at most {}", size, most_ranks);
}

}  // namespace

std::shared_ptr<LocalJob> create_local_job(uint32_t size) {
  check_size(size);
  return std::make_shared<LocalJob>(size);
}

std::unique_ptr<World> create_local_world(std::shared_ptr<LocalJob> job, uint32_t rank, const Waiter &waiter,
                                          Failure &failure, device::Device &device) {
  job->claim(rank);
  auto seat = std::make_shared<Seat>(rank, job->size(), job->control(), std::make_unique<LocalLinks>(job, rank), waiter,
                                     failure, device);
  return std::make_unique<ShmWorld>(std::move(seat), format_text("{} ranks as threads of one process", job->size()));
}

std::unique_ptr<World> create_process_world(const WorldOptions &options, const Waiter &waiter, Failure &failure,
                                            device::Device &device) {
  check_size(options.size);
  if (options.rank >= options.size)
    fail(FSDP_INVALID_ARGUMENT, "rank {} is outside [0, {})", options.rank, options.size);
  if (options.size == 1) return create_local_world(create_local_job(1), 0, waiter, failure, device);
  Meeting meeting = meet_processes(options, waiter);
  auto seat = std::make_shared<Seat>(options.rank, options.size, meeting.control, std::move(meeting.links), waiter,
                                     failure, device, options.heartbeat_timeout_ms);
  return std::make_unique<ShmWorld>(seat, std::move(meeting.description), std::make_unique<Monitor>(seat));
}

}  // namespace fsdp::comm
