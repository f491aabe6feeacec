// SPDX-License-Identifier: Apache-2.0
// The ranks' work in the tests of staging. Each collective runs on the host and on the device, and must give the same
// bits. Calls of the device are enqueued one after the other, and compared when all are done.
#pragma once

#include <array>

#include "staging_ranks.h"

namespace fsdp::transport::test {

inline void reduce_both(TwoWays &ways, uint64_t seed) {
  Dice dice(seed);
  const uint32_t size = ways.size();
  std::vector<Sum> host, spans;
  const bool accumulate = dice.flip();
  for (uint64_t s = 0, count = dice.below(6); s < count; ++s) {
    const fsdp_dtype dtype = dice.dtype(), wire = dice.dtype();
    const uint64_t length = dice.length(s == 0 ? 9000 : 1200);
    const float factor = dice.flip() ? 1.0F : 1.0F / 3;
    const bool in_place = dtype == FSDP_FLOAT32 && !accumulate && dice.flip();
    const uint64_t from = ways.take(length * size * dtype_size(dtype));
    const uint64_t to = in_place ? from + ways.me() * length * sizeof(float) : ways.take(length * sizeof(float));
    ways.fill(from, dtype, length * size, seed * 16 + s);
    if (!in_place) ways.fill(to, FSDP_FLOAT32, length, seed * 16 + s + 1000);
    host.push_back(slice_sum(ways.host_at(from), dtype, wire, length, size, ways.host_part() + to, factor));
    spans.push_back(slice_sum(ways.at(from), dtype, wire, length, size, ways.part() + to, factor));
    if (dice.flip()) spans.back().rounded = ways.part() + ways.take(length * size * dtype_size(wire));
    ways.expect_equal(to, length * sizeof(float), fmt::format("span {} of reduce_scatter {}", s, seed));
  }
  const Tag tag{static_cast<uint32_t>(seed), "reduced"};
  ways.communicator->sum(spans, accumulate, tag, *ways.stream);
  ways.host->await_release(ways.host->sum(host, accumulate, tag, ways.host_stream()), ways.host_stream());
}

inline void gather_both(TwoWays &ways, uint64_t seed, bool stable) {
  Dice dice(seed);
  const uint32_t size = ways.size();
  std::vector<Gather> host, spans;
  for (uint64_t s = 0, count = dice.below(12); s < count; ++s) {
    const uint64_t bytes = 2 * dice.length(s == 0 ? 30000 : 900);
    const uint64_t from = ways.take(bytes), to = ways.take(bytes * size);
    ways.fill(from, FSDP_BFLOAT16, bytes / 2, seed * 16 + s);
    host.push_back({ways.host_at(from), ways.host_part() + to, bytes});
    Part source = ways.at(from);
    if (dice.flip()) {  // in place
      source = ways.at(to + ways.me() * bytes);
      ways.stream->copy(ways.part() + to + ways.me() * bytes, ways.part() + from, bytes);
    }
    spans.push_back({source, ways.part() + to, bytes});
    ways.expect_equal(to, bytes * size, fmt::format("span {} of all_gather {}", s, seed));
  }
  const Tag tag{static_cast<uint32_t>(seed), "gathered"};
  if (stable)
    ways.communicator->gather_stable(spans, tag, *ways.stream);
  else
    ways.communicator->gather(spans, tag, *ways.stream);
  ways.host->await_release(ways.host->gather(host, tag, ways.host_stream()), ways.host_stream());
}

inline void all_reduce_both(TwoWays &ways, uint64_t seed) {
  Dice dice(seed);
  const uint32_t size = ways.size();
  std::vector<Sum> host, spans;
  const bool accumulate = dice.flip();
  for (uint64_t s = 0, count = dice.below(4); s < count; ++s) {
    const fsdp_dtype dtype = dice.dtype(), wire = dice.dtype();
    const uint64_t length = dice.length(s == 0 ? 9000 : 1200);
    const uint64_t from = ways.take(length * size * dtype_size(dtype)),
                   whole = ways.take(length * size * sizeof(float));
    ways.fill(from, dtype, length * size, seed * 16 + s);
    ways.fill(whole, FSDP_FLOAT32, length * size, seed * 16 + s + 1000);
    host.push_back({ways.host_at(from), ways.host_at(whole), dtype, wire, length * size, 0.3F, true});
    spans.push_back({ways.at(from), ways.at(whole), dtype, wire, length * size, 0.3F, true});
    ways.expect_equal(whole, length * size * sizeof(float), fmt::format("span {} of all_reduce {}", s, seed));
  }
  const Tag tag{static_cast<uint32_t>(seed), "all-reduced"};
  ways.communicator->sum(spans, accumulate, tag, *ways.stream);
  ways.host->await_release(ways.host->sum(host, accumulate, tag, ways.host_stream()), ways.host_stream());
}

inline void broadcast_both(TwoWays &ways, uint64_t seed) {
  Dice dice(seed);
  const auto root = static_cast<uint32_t>(dice.below(ways.size()));
  const uint64_t count = dice.length(30000), at = ways.take(4 * count);
  ways.fill(at, FSDP_FLOAT32, count, seed);
  const Tag tag{static_cast<uint32_t>(seed), "broadcast"};
  ways.communicator->broadcast(ways.at(at), 4 * count, root, tag, *ways.stream);
  ways.host->await_release(ways.host->broadcast(ways.host_at(at), 4 * count, root, tag, ways.host_stream()),
                           ways.host_stream());
  ways.expect_equal(at, 4 * count, fmt::format("broadcast {}", seed));
}

inline void every_collective(TwoWays &ways, uint64_t seed) {
  reduce_both(ways, seed);
  gather_both(ways, seed, seed % 2);
  all_reduce_both(ways, seed);
  const Ticket ticket = ways.communicator->barrier({static_cast<uint32_t>(seed), "barrier"}, *ways.stream);
  broadcast_both(ways, seed);
  reduce_both(ways, seed + 500);
  ways.communicator->await_release(ticket, *ways.stream);
  ways.finish();
  require(ways.communicator->released(ticket), "a call before one that is done is released");
}

inline void same_bits(Rank &rank, uint32_t reduction_block, uint64_t first_seed, uint64_t seeds,
                      const staging::ConveyorSizes &sizes = small_sizes) {
  {
    TwoWays ways(rank, reduction_block, sizes);
    for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) every_collective(ways, seed);
    require(!ways.communicator->broken(), "broken without a reason");
    rank.meet();
  }
  rank.leave();
}

}  // namespace fsdp::transport::test
