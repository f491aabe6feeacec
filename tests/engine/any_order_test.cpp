// SPDX-License-Identifier: Apache-2.0
// FSDP_SCHEDULE_ANY: groups are held in any order and several at once, in buffers that they take as they are gathered.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "harness.h"
#include "quantized.h"

using namespace harness;

namespace {

Scenario any_order(uint32_t ranks, uint32_t held_groups, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, mode);
  setup.schedule = FSDP_SCHEDULE_ANY;
  setup.held_groups = held_groups;
  return setup;
}

// The groups have one size, so that a test can tell by a buffer's address which group was in it before.
Scenario equal_layers(uint32_t count, uint32_t held_groups) {
  Scenario setup = any_order(2, held_groups);
  setup.groups = equal_groups(count, 64, 32);
  return setup;
}

void hold(const Rank &rank, size_t group, fsdp_phase phase = FSDP_FORWARD) {
  FSDP(fsdp_unshard(rank.groups[group], phase, 0, nullptr));
}
void give_back(const Rank &rank, size_t group, fsdp_phase phase = FSDP_FORWARD) {
  FSDP(fsdp_reshard(rank.groups[group], phase, 0, nullptr));
}
uint64_t address_of(const Rank &rank, size_t group) {
  uint64_t address = 0;
  rank.view(group, 0, FSDP_FORWARD, &address);
  return address;
}

void run_on_each_rank(const Scenario &setup, const std::function<void(Rank &)> &body) {
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    body(rank);
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

TEST(AnyOrder, TrainsWithTheReferencesBits) {
  for (const fsdp_strategy strategy : strategies)
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
      for (const uint32_t ranks : {1u, 2u, 3u})
        for (const uint32_t flags : {0u, FSDP_CONTEXT_NO_OVERLAP + 0u, FSDP_CONTEXT_DEBUG + 0u}) {
          if (flags == FSDP_CONTEXT_DEBUG && mode == FSDP_UNSHARD_MAPPED && ranks == 1) continue;
          Scenario setup = any_order(ranks, 1, mode);
          setup.model.strategy = strategy;
          setup.context.flags = flags;
          setup.microbatches = 2;
          setup.eval = true;
          EXPECT_EQ(difference(setup, train_threads(setup)), "")
              << "strategy " << strategy << ", mode " << mode << ", ranks " << ranks << ", flags " << flags;
        }
}

// Each hold sees the weights of its group from its unshard to its reshard, at one address, whatever is gathered
// meanwhile.
TEST(AnyOrder, GroupsAreHeldAtOnceSeveralTimesAndInAnyOrder) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
    for (const uint32_t seed : {1u, 2u, 3u, 4u}) {
      Scenario setup = any_order(2, 3, mode);
      run_on_each_rank(setup, [&](Rank &rank) {
        std::mt19937 random(seed + 10 * rank.rank);  // each rank has an order of its own
        const auto weights = rank.read_all();
        std::map<size_t, std::vector<fsdp_phase>> holds;
        std::map<size_t, uint64_t> addresses;
        for (int turn = 0; turn < 300; ++turn) {
          const size_t g = random() % rank.groups.size();
          const fsdp_phase phase = static_cast<fsdp_phase>(FSDP_FORWARD + random() % 4);
          auto &own = holds[g];
          const auto held = std::ranges::count_if(holds, [](const auto &entry) { return !entry.second.empty(); });
          if (own.size() < 3 && (!own.empty() || held < 3)) {
            hold(rank, g, phase);
            own.push_back(phase);
            if (own.size() == 1) addresses[g] = address_of(rank, g);
          } else if (!own.empty()) {
            give_back(rank, g, own.back());
            own.pop_back();
          }
          for (const auto &[group, phases] : holds) {
            if (phases.empty()) continue;
            REQUIRE(address_of(rank, group) == addresses[group]);
            for (size_t p = 0; p < rank.def(group).params.size(); ++p)
              REQUIRE(rank.view(group, p, phases.back()) == weights[rank.setup.ordinal(group, p)]);
          }
        }
      });
    }
}

TEST(AnyOrder, AHoldBeyondHeldGroupsNamesTheHoldersAndTheOption) {
  for (const uint32_t flags : {0u, FSDP_CONTEXT_DEBUG + 0u}) {
    Scenario setup = equal_layers(4, 2);
    setup.context.flags = flags;
    run_on_each_rank(setup, [&](Rank &rank) {
      hold(rank, 3);
      hold(rank, 1, FSDP_BACKWARD);
      hold(rank, 1, FSDP_BACKWARD);
      require_error(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, nullptr), FSDP_INVALID_STATE,
                    {"group 'layer.0' (EVAL)", "all 2 buffers of FSDP_SCHEDULE_ANY", "'layer.3' (FORWARD x 1)",
                     "'layer.1' (BACKWARD x 2)", "held_groups in fsdp_schedule_options"});
      give_back(rank, 3);
      hold(rank, 0, FSDP_EVAL);  // as if nothing had been
      REQUIRE(rank.view(0, 0, FSDP_EVAL) == rank.read(0, 0));
      give_back(rank, 0, FSDP_EVAL);
      give_back(rank, 1, FSDP_BACKWARD);
      give_back(rank, 1, FSDP_BACKWARD);
    });
  }
}

// A returned buffer keeps its weights until it is needed. The buffer that was returned first is taken first.
TEST(AnyOrder, TheBufferThatWasReturnedFirstIsTaken) {
  const Scenario setup = equal_layers(5, 3);
  run_on_each_rank(setup, [&](Rank &rank) {
    for (const size_t g : {0, 1, 2}) hold(rank, g);
    const uint64_t second = address_of(rank, 1);
    for (const size_t g : {1, 2, 0}) give_back(rank, g);
    REQUIRE(rank.stats().gathers == 3);
    hold(rank, 2);
    hold(rank, 0);
    REQUIRE(rank.stats().gathers == 3);  // all three are still in their buffers
    hold(rank, 3);
    REQUIRE(rank.stats().gathers == 4);
    REQUIRE(address_of(rank, 3) == second);
    for (const size_t g : {0, 2, 3}) give_back(rank, g);
    hold(rank, 1);  // gathered anew, where 0 was
    REQUIRE(rank.stats().gathers == 5);
    REQUIRE(rank.view(1, 0, FSDP_FORWARD) == rank.read(1, 0));
    hold(rank, 2);
    hold(rank, 3);
    REQUIRE(rank.stats().gathers == 5);
    REQUIRE(rank.stats().gathered_groups == 3 && rank.stats().peak_gathered_groups == 3);
    for (const size_t g : {1, 2, 3}) give_back(rank, g);
  });
}

TEST(AnyOrder, APrefetchTakesWhatIsFreeAndNothingThatIsWanted) {
  const Scenario setup = equal_layers(5, 3);
  run_on_each_rank(setup, [&](Rank &rank) {
    const auto prefetch = [&](size_t g) { FSDP(fsdp_prefetch(rank.groups[g], FSDP_FORWARD, 0, nullptr)); };
    hold(rank, 0);
    REQUIRE(rank.stats().prefetches == 0);  // nothing is gathered ahead by itself
    for (const size_t g : {1, 2, 3}) prefetch(g);
    REQUIRE(rank.stats().prefetches == 2);  // no buffer was free for the last one
    hold(rank, 1);
    hold(rank, 2);
    REQUIRE(rank.stats().gathers == 3 && rank.stats().dropped_prefetches == 0);
    give_back(rank, 1);
    prefetch(3);  // the buffer of a group that was used
    REQUIRE(rank.stats().prefetches == 3);
    hold(rank, 4);  // a hold comes before what was gathered ahead
    REQUIRE(rank.stats().dropped_prefetches == 1);
    REQUIRE(rank.view(4, 0, FSDP_FORWARD) == rank.read(4, 0));
    for (const size_t g : {0, 2, 4}) give_back(rank, g);
  });
}

// A prefetch takes a buffer that was used and returned, however long a group that was gathered ahead has waited.
TEST(AnyOrder, APrefetchLeavesWhatWasGatheredAheadBefore) {
  const Scenario setup = equal_layers(3, 2);
  run_on_each_rank(setup, [&](Rank &rank) {
    const auto prefetch = [&](size_t g) { FSDP(fsdp_prefetch(rank.groups[g], FSDP_FORWARD, 0, nullptr)); };
    hold(rank, 0);
    prefetch(1);
    give_back(rank, 0);
    prefetch(2);
    REQUIRE(rank.stats().prefetches == 2 && rank.stats().dropped_prefetches == 0);
    for (const size_t g : {1, 2}) hold(rank, g);
    REQUIRE(rank.stats().gathers == 3);
    for (const size_t g : {1, 2}) give_back(rank, g);
  });
}

TEST(AnyOrder, MemoryIsBuffersOfTheLargestGroup) {
  const auto pool_bytes = [](uint32_t held_groups, uint32_t flags) {
    Scenario setup = any_order(2, held_groups);
    setup.context.flags = flags;
    setup.groups = equal_groups(5, 64, 32);
    setup.groups[2].params.push_back({"more", {7}});
    uint64_t bytes = 0;
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      const Memory memory = memory_of(rank.model, r);
      REQUIRE(rank.stats().allocated_bytes[FSDP_ROLE_GATHER] == memory.role_bytes[FSDP_ROLE_GATHER]);
      REQUIRE(memory.gather_pool_bytes == memory.role_bytes[FSDP_ROLE_GATHER]);
      if (r == 0) bytes = memory.gather_pool_bytes;
      FSDP(fsdp_close_context(context));
    });
    return bytes;
  };
  const uint64_t one = pool_bytes(1, 0);
  EXPECT_GT(one, group_bytes);
  EXPECT_LE(one, group_bytes + 2048);  // its padding
  EXPECT_EQ(pool_bytes(3, 0), 3 * one);
  EXPECT_EQ(pool_bytes(0, 0), 4 * one);
  EXPECT_EQ(pool_bytes(5, 0), 5 * one);
  EXPECT_EQ(pool_bytes(UINT32_MAX, 0), 5 * one);  // more are not needed
}

// Planes by phase are two sets of weights: the two directions of one group are held at once, as is a recompute.
TEST(AnyOrder, PlanesOfBothDirectionsAreHeldAtOnce) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario setup = any_order(2, 3, mode);
    setup.groups.clear();
    for (const char *name : {"a", "b"})
      setup.groups.push_back({name, {quantized({std::string(name) + ".w", {64, 96}}, FSDP_QUANTIZE_MXFP8)}});
    run_on_each_rank(setup, [&](Rank &rank) {
      for (const fsdp_phase phase : {FSDP_FORWARD, FSDP_BACKWARD}) hold(rank, 0, phase);
      const auto rows = rank.view(0, 0, FSDP_FORWARD), columns = rank.view(0, 0, FSDP_BACKWARD);
      hold(rank, 1, FSDP_BACKWARD);
      hold(rank, 0, FSDP_RECOMPUTE);
      REQUIRE(rank.view(0, 0, FSDP_RECOMPUTE) == rows);
      if (mode == FSDP_UNSHARD_COPIED)
        require_error(fsdp_unshard(rank.groups[1], FSDP_FORWARD, 0, nullptr), FSDP_INVALID_STATE,
                      {"group 'b' (FORWARD)", "all 3 buffers"});
      give_back(rank, 0, FSDP_FORWARD);
      give_back(rank, 0, FSDP_RECOMPUTE);
      hold(rank, 1, FSDP_FORWARD);
      REQUIRE(rank.view(0, 0, FSDP_BACKWARD) == columns);
      for (const size_t g : {0, 1}) give_back(rank, g, FSDP_BACKWARD);
      give_back(rank, 1, FSDP_FORWARD);
    });
  }
}

// Use after reshard is found, as with other schedules.
TEST(AnyOrder, DebugModePoisonsWhatWasReturned) {
  Scenario setup = equal_layers(3, 2);
  setup.context.flags = FSDP_CONTEXT_DEBUG;
  run_on_each_rank(setup, [&](Rank &rank) {
    hold(rank, 0);
    const auto *weights = reinterpret_cast<const float *>(address_of(rank, 0));
    REQUIRE(weights[5] == rank.read(0, 0)[5]);
    give_back(rank, 0);
    REQUIRE(weights[5] != weights[5]);
    for (const size_t g : {1, 2}) hold(rank, g);
    REQUIRE(weights[5] != weights[5]);  // no other group comes there
    for (const size_t g : {1, 2}) give_back(rank, g);
  });
}

TEST(AnyOrder, ResidentAndRootGroupsAreRefusedByName) {
  for (const auto &[flag, word] :
       {std::pair(FSDP_GROUP_RESIDENT, "'layer.1' is RESIDENT"), std::pair(FSDP_GROUP_ROOT, "'layer.1' is ROOT")}) {
    Scenario setup = equal_layers(2, 0);
    setup.groups[1].options.flags = flag;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup, false);
      require_error(fsdp_seal_model(rank.model), FSDP_INVALID_ARGUMENT,
                    {word, "FSDP_SCHEDULE_ANY knows no order of visits", "keep a hold"});
      FSDP(fsdp_close_context(context));
    });
  }
}

}  // namespace
