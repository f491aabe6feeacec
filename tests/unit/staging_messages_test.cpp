// SPDX-License-Identifier: Apache-2.0
// Tests messages between ranks over simulated GPUs. They give the same bits as between ranks of the host, and the same
// errors.
#include <gtest/gtest.h>

#include "simulated_cuda/simulated.h"
#include "staging_ranks.h"

namespace fsdp::transport::test {
namespace {

// Adds the collectives of messages to those of TwoWays.
struct Messages : TwoWays {
  explicit Messages(Rank &rank, const staging::ConveyorSizes &sizes = small_sizes)
      : TwoWays(rank, 0, sizes),
        host_messages(host_team->create_collectives("host messages", Shape::messages())),
        messages(team->create_collectives("device messages", Shape::messages())) {}
  float *host_floats(uint64_t offset) const { return reinterpret_cast<float *>(host_part() + offset); }
  float *floats(uint64_t offset) const { return reinterpret_cast<float *>(part() + offset); }
  std::unique_ptr<Collectives> host_messages, messages;
};

void sum_both(Messages &both, Dice &dice, uint64_t seed) {
  std::vector<Sum> host, spans;
  for (uint64_t s = 0, count = dice.below(12); s < count; ++s) {
    const uint64_t length = dice.length(s == 0 ? 20'000 : 900), at = both.take(4 * length);
    both.fill(at, FSDP_FLOAT32, length, seed * 32 + s);
    host.push_back(everywhere_in_place(both.host_floats(at), length));
    spans.push_back(everywhere_in_place(both.floats(at), length));
    both.expect_equal(at, 4 * length, fmt::format("span {} of all_reduce {}", s, seed));
  }
  both.messages->sum(spans, false, {1, "summed"}, *both.stream);
  both.host_messages->sum(host, false, {1, "summed"}, both.host_stream());
}

void sum_slices_both(Messages &both, Dice &dice, uint64_t seed) {
  std::vector<Sum> host, spans;
  const bool accumulate = dice.flip();
  for (uint64_t s = 0, count = dice.below(12); s < count; ++s) {
    const uint64_t length = dice.length(s == 0 ? 20'000 : 900), at = both.take(4 * length * both.size());
    const uint64_t to = accumulate || dice.flip() ? both.take(4 * length) : at + 4 * length * both.me();
    both.fill(at, FSDP_FLOAT32, length * both.size(), seed * 32 + s + 4000);
    if (accumulate) both.fill(to, FSDP_FLOAT32, length, seed * 32 + s + 8000);
    host.push_back(slice_sum(Part::alone(both.host_floats(at)), length, both.size(), both.host_floats(to)));
    spans.push_back(slice_sum(Part::alone(both.floats(at)), length, both.size(), both.floats(to)));
    both.expect_equal(to, 4 * length, fmt::format("span {} of reduce_scatter {}", s, seed));
  }
  both.messages->sum(spans, accumulate, {2, "sliced"}, *both.stream);
  both.host_messages->sum(host, accumulate, {2, "sliced"}, both.host_stream());
}

void gather_both(Messages &both, Dice &dice, uint64_t seed) {
  std::vector<Gather> host, spans;
  for (uint64_t s = 0, count = dice.below(12); s < count; ++s) {
    const uint64_t bytes = dice.length(s == 0 ? 50'000 : 900), at = both.take(bytes * both.size() + 4);
    both.fill(at, FSDP_BFLOAT16, bytes * both.size() / 2 + 1, seed * 32 + s + 12'000);
    host.push_back(in_place(both.host_part() + at, bytes, both.me()));
    spans.push_back(in_place(both.part() + at, bytes, both.me()));
    both.expect_equal(at, bytes * both.size(), fmt::format("span {} of all_gather {}", s, seed));
  }
  both.messages->gather(spans, {3, "gathered"}, *both.stream);
  both.host_messages->gather(host, {3, "gathered"}, both.host_stream());
}

void broadcast_both(Messages &both, Dice &dice, uint64_t seed) {
  const uint64_t count = dice.length(20'000), at = both.take(4 * count);
  const auto root = static_cast<uint32_t>(dice.below(both.size()));
  both.fill(at, FSDP_FLOAT32, count, seed * 32 + 16'000);
  both.messages->broadcast(Part::alone(both.part() + at), 4 * count, root, {4, "broadcast"}, *both.stream);
  both.host_messages->broadcast(Part::alone(both.host_part() + at), 4 * count, root, {4, "broadcast"},
                                both.host_stream());
  both.expect_equal(at, 4 * count, fmt::format("broadcast {}", seed));
}

void same_messages(Rank &rank, uint64_t first_seed, uint64_t seeds, const staging::ConveyorSizes &sizes = small_sizes) {
  {
    Messages both(rank, sizes);
    for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
      Dice dice(seed);
      sum_both(both, dice, seed);
      sum_slices_both(both, dice, seed);
      both.messages->barrier({5, "barrier"}, *both.stream);
      gather_both(both, dice, seed);
      broadcast_both(both, dice, seed);
      both.finish();
    }
    require(!both.messages->broken(), "broken without a reason");
    rank.meet();
  }
  rank.leave();
}

struct StagingMessagesTest : testing::TestWithParam<uint32_t> {
  void SetUp() override { simulated::set_device_count(simulated::max_devices); }
  static void run(uint32_t size, const Body &body, const device::Options &device = {}) {
    for (const std::string &problem : run_threads(size, body, on_gpu(device))) EXPECT_EQ(problem, "");
  }
};

TEST_P(StagingMessagesTest, EveryCollectiveHasTheBitsOfTheHost) {
  run(GetParam(), [](Rank &rank) { same_messages(rank, 1, 5); });
}

TEST_P(StagingMessagesTest, DelaysChangeNoBit) {
  simulated::set_delay(200, 5);
  run(GetParam(), [](Rank &rank) { same_messages(rank, 100, 2); }, {.delay_us = 200, .delay_seed = 9});
}

TEST_P(StagingMessagesTest, RoundsBeginAgainBeforeTheyAreFull) {
  run(GetParam(), [](Rank &rank) {
    staging::ConveyorSizes sizes = small_sizes;
    sizes.chunks_of_round = 5;
    same_messages(rank, 200, 2, sizes);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, StagingMessagesTest, testing::Values(1, 2, 3, 4, 8));

TEST_F(StagingMessagesTest, DifferentLengthsAreAMismatchThatNamesBothCalls) {
  run(2, [](Rank &rank) {
    Messages both(rank);
    const Sum span = everywhere_in_place(both.floats(0), 9000 + rank.rank());
    both.messages->barrier({5, "before"}, *both.stream);
    both.messages->sum({&span, 1}, false, {1, "uneven"}, *both.stream);
    const Error error = error_of([&] { rank.synchronize(*both.stream); });
    require(error.status == FSDP_MISMATCH, error.message);
    for (const char *text : {"rank 0 called all_reduce of 'uneven' (#1, float32, 9000 elements)",
                             "rank 1 called all_reduce of 'uneven' (#1, float32, 9001 elements)"})
      require(error.message.find(text) != std::string::npos, error.message);
  });
}

TEST_F(StagingMessagesTest, AnAbandonedRoundEndsAndTheNextOneWorks) {
  run(2, [](Rank &rank) {
    {
      Messages both(rank);
      const Sum span = everywhere_in_place(both.floats(0), 20'000);
      if (rank.rank() == 0)
        both.messages->sum({&span, 1}, false, {1, "unfinished"}, *both.stream);
      else
        both.messages->abandon();
      rank.synchronize(*both.stream);
      if (rank.rank() == 0) {
        require(both.messages->broken()->status == FSDP_INVALID_STATE, "the round is broken");
        both.messages->abandon();
      }
      rank.meet();
      both.messages->next_round();
      rank.meet();
      Dice dice(1);
      sum_both(both, dice, 1);
      both.finish();
    }
    rank.leave();
  });
}

}  // namespace
}  // namespace fsdp::transport::test
