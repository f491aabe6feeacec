// SPDX-License-Identifier: Apache-2.0
// Gives every transport one form for the shared tests: a team, its collectives, and memory to work on.
#pragma once

#include <atomic>
#include <cstdlib>
#include <ostream>

#include "kernel_reference.h"
#include "net_ranks.h"
#include "transport/hierarchy/team.h"
#ifdef FSDP_TEST_SIMULATED_CUDA
#include "simulated_cuda/simulated.h"
#include "transport/staging/collectives.h"
#endif

namespace fsdp::transport::test {

struct Rig;

// The properties of a transport, and its limits. A new transport is a new row of the table below.
struct Transport {
  const char *name;
  Shape shape;
  bool over_net, on_gpu, nccl;
  // Sums fp32 in its own order, so that only repeated sums have equal bits.
  bool own_order = false;
  // Enqueued work cannot be taken back, so ranks compare their calls when they meet.
  bool compares_later = false;
};
inline void PrintTo(const Transport &transport, std::ostream *to) { *to << transport.name; }

inline const Transport transports[] = {
    {"Shm", {}, false, false, false},
    {"ShmBlocks", {.block = 2}, false, false, false},
    {"ShmMessages", Shape::messages(), false, false, false},
    {"Net", Shape::messages(), true, false, false},
#ifdef FSDP_TEST_SIMULATED_CUDA
    {"Staging", {}, false, true, false},
    {"StagingMessages", Shape::messages(), false, true, false},
    {"StagingNet", Shape::messages(), true, true, false},
#endif
#ifdef SIMULATED_NCCL
    {"Nccl", {}, false, true, true, true, true},
    {"NcclMessages", Shape::messages(), false, true, true, true, true},
#endif
};

// The team treats the rank as if it had its own host.
inline std::shared_ptr<Team> team_over(std::shared_ptr<Net> net, uint32_t rank, uint32_t size) {
  TeamPlaces places;
  places.rank = places.host = rank;
  for (uint32_t r = 0; r < size; ++r) {
    places.ranks.push_back(r);
    places.hosts.push_back({r});
  }
  return std::make_shared<HybridTeam>(std::move(net), std::move(places), nullptr, messages_key);
}

// Allocates memory of every rank. If there are arenas, the memory is in one of them, behind other data.
struct Block {
  static constexpr uint64_t begin = 192;

  Block(Team &team, device::Device &device, const Shape &shape, uint64_t bytes)
      : stride(bytes + begin), rank(team.rank()) {
    if (shape.arenas) {
      arena = team.create_parts(stride, "a block of a test");
      own = arena->writable() + begin + rank * stride;
    } else {
      memory = device.allocate(bytes, "a block of a test");
      own = memory->data();
    }
  }
  Part at(uint64_t offset = 0) const {
    return arena ? Part::in(*arena, begin + offset, stride, rank) : Part::alone(own + offset);
  }
  float *floats() const { return reinterpret_cast<float *>(own); }  // the GPU's simulated memory is the host's

  uint64_t stride;
  uint32_t rank;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<device::Memory> memory;
  std::byte *own;
};

// One rank of the rig.
struct Rig {
  Rig(Rank &of, const Transport &transport) : rank(of), transport(transport) {
    std::shared_ptr<Team> host(std::shared_ptr<void>(), rank.team.get());
    if (transport.over_net) {
      seat = create_lone_seat(rank.rank(), rank.size(), rank.waiter, rank.failure);
      std::shared_ptr<Net> net = create_test_net(rank.rank());
      net->join(test_job(rank.team->all_gather(net->address(), "addresses")), seat, *rank.device);
      host = team_over(std::move(net), rank.rank(), rank.size());
    }
    team = transport.on_gpu ? over_gpus(host) : host;
    collectives = team->create_collectives("conforming", transport.shape);
    stream = rank.device->create_stream("conforming");
  }
  std::shared_ptr<Team> over_gpus(const std::shared_ptr<Team> &host) {
#ifdef FSDP_TEST_SIMULATED_CUDA
    if (!transport.nccl)  // slots are small, so that a small call consists of many chunks
      return std::make_shared<staging::StagedTeam>(host, *rank.device,
                                                   staging::ConveyorSizes{uint64_t{16} << 10, uint64_t{16} << 10});
#endif
    return create_device_team(host, *rank.device, DeviceTransport::nccl, rank.waiter, rank.failure);
  }
  uint32_t me() const { return rank.rank(); }
  uint32_t size() const { return rank.size(); }
  bool plain() const { return !transport.shape.arenas; }
  Block block(uint64_t bytes) { return Block(*team, *rank.device, transport.shape, std::max<uint64_t>(bytes, 64)); }
  // ranks whose sums are made before the others are added
  uint32_t block_ranks() const { return transport.shape.block ? std::min(transport.shape.block, size()) : size(); }
  void finish() { rank.synchronize(*stream); }
  void finish(Ticket ticket) {
    collectives->await_release(ticket, *stream);
    finish();
  }
  void sum(const Sum &one, bool accumulate = false, const char *name = "summed") {
    finish(collectives->sum({&one, 1}, accumulate, {1, name}, *stream));
  }

  Rank &rank;
  const Transport transport;
  std::shared_ptr<Seat> seat;
  std::shared_ptr<Team> team;
  std::unique_ptr<Collectives> collectives;
  std::unique_ptr<device::Stream> stream;  // declared last, because its work refers to the collectives
};

// Gives each rank its own GPU, if it has one.
inline RankOptions options_of(const Transport &transport, const device::Options &device = {}) {
  RankOptions options;
  options.device = device;
#ifdef FSDP_TEST_SIMULATED_CUDA
  static std::atomic<int> made{0};
  if (transport.on_gpu) {
    simulated::reset();
    simulated::set_device_count(4);
    made = 0;
    options.make_device = [](const device::Options &of, const Waiter &waiter, Failure &failure) {
      return device::create_cuda_device(made++ % 4, of, waiter, failure);
    };
  }
#endif
#ifdef SIMULATED_NCCL
  ::setenv("FSDP_NCCL_LIBRARY", SIMULATED_NCCL, 1);
#endif
  (void)transport;
  return options;
}

}  // namespace fsdp::transport::test
