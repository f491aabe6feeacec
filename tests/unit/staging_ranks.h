// SPDX-License-Identifier: Apache-2.0
// Ranks over simulated GPUs that exchange memory of their devices through the host's, for the tests of staging.
#pragma once

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/checked.h"
#include "base/dtype.h"
#include "shm_ranks.h"
#include "simulated_cuda/simulated.h"
#include "transport/staging/collectives.h"

namespace fsdp::transport::test {

// Each rank has its own GPU, or shares GPUs with others.
inline RankOptions on_gpu(const device::Options &device = {}, int gpus = simulated::max_devices) {
  static std::atomic<int> made{0}, used{0};
  made = 0;
  used = gpus;
  RankOptions options;
  options.device = device;
  options.make_device = [](const device::Options &of, const Waiter &waiter, Failure &failure) {
    return device::create_cuda_device(made++ % used, of, waiter, failure);
  };
  return options;
}

// The size is small, so that a small call consists of many chunks.
constexpr staging::ConveyorSizes small_sizes{uint64_t{16} << 10, uint64_t{16} << 10};

// Gives one rank two ways: a communicator of the host, which gives the right bits, and one of the device. The data of
// each lies in an arena of its own.
struct TwoWays {
  explicit TwoWays(Rank &rank, uint32_t reduction_block = 0, const staging::ConveyorSizes &sizes = small_sizes,
                   uint64_t part_bytes = uint64_t{4} << 20)
      : rank(rank),
        part_bytes(part_bytes),
        host_team(std::shared_ptr<void>(), rank.team.get()),
        team(std::make_shared<staging::StagedTeam>(host_team, *rank.device, sizes)),
        host_arena(host_team->create_parts(part_bytes, "host memory")),
        arena(team->create_parts(part_bytes, "device memory", View::read_only)),
        stream(rank.device->create_stream("test")),
        uploads(rank.device->create_stream("uploads")),
        host(host_team->create_collectives("host collectives", {.block = reduction_block})),
        communicator(team->create_collectives("device collectives", {.block = reduction_block})) {}

  uint32_t me() const { return rank.rank(); }
  uint32_t size() const { return rank.size(); }
  std::byte *host_part() const { return host_arena->writable() + me() * part_bytes; }
  std::byte *part() const { return arena->writable() + me() * part_bytes; }
  // Takes bytes of the rank's part that are not used otherwise.
  uint64_t take(uint64_t bytes) {
    const uint64_t offset = used;
    used += round_up(std::max<uint64_t>(bytes, 1), 128);
    require(used <= part_bytes, "the test's arena is too small");
    return offset;
  }
  Part at(uint64_t offset) const { return Part::in(*arena, offset, part_bytes, me()); }
  Part host_at(uint64_t offset) const { return Part::in(*host_arena, offset, part_bytes, me()); }
  device::Stream &host_stream() { return rank.device->calling_thread(); }

  // Fills both arenas with the same random numbers, which are this rank's own.
  void fill(uint64_t offset, fsdp_dtype dtype, uint64_t count, uint64_t salt) {
    std::mt19937_64 random(salt * 64 + me());
    std::vector<float> values(count);
    for (float &value : values) value = std::uniform_real_distribution<float>(-3, 3)(random);
    host_stream().cast(host_part() + offset, dtype, values.data(), FSDP_FLOAT32, count);
    uploads->copy(part() + offset, host_part() + offset, count * dtype_size(dtype));
    rank.synchronize(*uploads);
  }
  // These bytes must be equal when all calls are done.
  void expect_equal(uint64_t offset, uint64_t bytes, std::string what) {
    expected.push_back({offset, bytes, std::move(what)});
  }
  void finish() {
    std::vector<std::byte> got(part_bytes);
    stream->copy(got.data(), part(), used);
    rank.synchronize(*stream);
    for (const Expected &one : expected)
      require_same_bytes(got.data() + one.offset, host_part() + one.offset, one.bytes,
                         fmt::format("rank {}: {}", me(), one.what));
    expected.clear();
    rank.meet();  // peers read the arena of the host
    used = 0;
  }

  struct Expected {
    uint64_t offset, bytes;
    std::string what;
  };
  Rank &rank;
  uint64_t part_bytes;
  uint64_t used = 0;
  std::vector<Expected> expected;
  std::shared_ptr<Team> host_team;
  std::shared_ptr<staging::StagedTeam> team;
  std::unique_ptr<Arena> host_arena, arena;
  std::unique_ptr<device::Stream> stream, uploads;
  std::unique_ptr<Collectives> host, communicator;  // these end first, which ends the work that waits for peers
};

// The value is the same on every rank.
struct Dice {
  explicit Dice(uint64_t seed) : random(seed) {}
  uint64_t below(uint64_t end) { return random() % end; }
  bool flip() { return random() % 2; }
  uint64_t length(uint64_t most) { return below(4) == 0 ? below(3) : below(most + 1); }
  fsdp_dtype dtype() { return std::array{FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16}[below(3)]; }
  std::mt19937_64 random;
};

}  // namespace fsdp::transport::test
