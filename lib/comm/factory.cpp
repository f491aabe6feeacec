// SPDX-License-Identifier: Apache-2.0
// Which backend moves the bytes: the only file that names one.
#include <chrono>
#include <thread>

#include "comm/bootstrap/local_job.h"
#include "comm/bootstrap/process_world.h"
#include "comm/communicator.h"
#include "comm/net.h"
#include "comm/shm/seat.h"
#include "comm/shm/world.h"

namespace fsdp::comm {
namespace {

void check_size(uint32_t size, uint32_t most, const char *where) {
  if (size == 0) fail(FSDP_INVALID_ARGUMENT, "a job of 0 ranks");
  if (size > most) fail(FSDP_UNSUPPORTED, "{} ranks {}; this release has at most {}", size, where, most);
}

// Ranks that share memory need not know each other's addresses.
std::vector<std::byte> make_card(const std::string &) { return {}; }

class NoLinks final : public Links {
 public:
  bool send(uint32_t, Parcel, const Fd &) override { return false; }
  std::optional<Fd> take(Parcel) override { return std::nullopt; }
  void sleep(uint32_t ms) override { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
  void find_dead(const std::function<void(uint32_t)> &) override {}
  std::optional<Fd> meet(Parcel, std::span<const uint32_t>, const std::function<Fd()> &) override {
    return std::nullopt;
  }
};

}  // namespace

std::shared_ptr<Seat> create_lone_seat(uint32_t rank, uint32_t size, const Waiter &waiter, Failure &failure,
                                       device::Device &device) {
  const Fd control = create_memory_file(Control::size_bytes(size), "the job memory of a lone rank");
  Control::initialize(control, size);
  return std::make_shared<Seat>(rank, size, control, std::make_unique<NoLinks>(), waiter, failure, device);
}

std::shared_ptr<LocalJob> create_local_job(uint32_t size) {
  check_size(size, most_ranks_of_a_host, "on one host");
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
  check_size(options.size, most_ranks, "in one job");
  if (options.rank >= options.size)
    fail(FSDP_INVALID_ARGUMENT, "rank {} is outside [0, {})", options.rank, options.size);
  if (options.size == 1) return create_local_world(create_local_job(1), 0, waiter, failure, device);
  Meeting meeting = meet_processes(options, waiter, make_card);
  if (meeting.roster.node_count() > 1)
    fail(FSDP_UNSUPPORTED, "{}: this release has no communicator between hosts", meeting.description);
  auto seat = std::make_shared<Seat>(options.rank, options.size, meeting.control, std::move(meeting.links), waiter,
                                     failure, device, options.heartbeat_timeout_ms);
  return std::make_unique<ShmWorld>(seat, std::move(meeting.description), std::make_unique<Monitor>(seat));
}

}  // namespace fsdp::comm
