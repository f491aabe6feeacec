// SPDX-License-Identifier: Apache-2.0
// Whose memory it is: the caller's arenas, chunks and shards, views and what debug mode does to one that is used too late.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "harness.h"

using namespace harness;

namespace {

TEST(Ownership, TheCallersMemoryServesForTheRoles) {
  Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 2);
  for (GroupDef &group : scenario.groups)
    for (ParamDef &param : group.params) param.dtype = FSDP_BFLOAT16;
  const auto expected = train_threads(scenario);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    std::vector<void *> arenas;
    {
      Rank rank(context, scenario, false);
      for (const fsdp_role role : {FSDP_ROLE_MAIN, FSDP_ROLE_OPTIMIZER, FSDP_ROLE_GATHER}) {
        const uint64_t bytes = (expected[r].memory.role_bytes[role] + 4095) / 4096 * 4096;
        arenas.push_back(std::aligned_alloc(4096, bytes));
        std::fill_n(static_cast<unsigned char *>(arenas.back()), bytes, 0xAB);
        FSDP(fsdp_set_arena(rank.model, role, arenas.back(), bytes));
      }
      FSDP(fsdp_seal_model(rank.model));
      Outcome outcome;
      train(rank, outcome);
      REQUIRE(same_bits(outcome.weights, expected[0].weights));
      uint64_t address = 0;
      FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, nullptr));
      rank.view(0, 0, FSDP_EVAL, &address);
      FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, nullptr));
      const auto pool = reinterpret_cast<uint64_t>(arenas[2]);
      REQUIRE(address >= pool && address < pool + expected[r].memory.role_bytes[FSDP_ROLE_GATHER]);
      FSDP(fsdp_close_context(context));
    }
    for (void *arena : arenas) std::free(arena);
  });
}

TEST(Ownership, ChunksTileEveryParameterAndMatchTheShards) {
  const Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 3);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    for (size_t g = 0; g < rank.groups.size(); ++g)
      for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
        uint64_t covered = 0;
        for (uint32_t other = 0; other < 3; ++other) {
          fsdp_chunk chunk = FSDP_CHUNK_INIT;
          FSDP(fsdp_get_chunk(rank.groups[g], p, other, &chunk));
          if (chunk.element_count == 0) continue;
          REQUIRE(chunk.element_offset == covered);
          covered += chunk.element_count;
        }
        REQUIRE(covered == rank.def(g).params[p].count());
      }
    uint64_t count = 0;
    FSDP(fsdp_get_shard_count(rank.model, &count));
    for (uint64_t s = 0; s < count; ++s) {
      fsdp_shard shard = FSDP_SHARD_INIT;
      fsdp_chunk chunk = FSDP_CHUNK_INIT;
      FSDP(fsdp_get_shard(rank.model, s, &shard));
      FSDP(fsdp_get_chunk(shard.group, shard.param_index, r, &chunk));
      REQUIRE(chunk.element_offset == shard.element_offset && chunk.element_count == shard.element_count);
      REQUIRE(chunk.row_offset == shard.row_offset && chunk.row_count == shard.row_count);
    }
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

TEST(Ownership, MetadataSurvives) {
  const uint64_t shape[] = {4, 4};
  int tag = 0;
  Scenario scenario;
  scenario.ranks = 1;
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    fsdp_model *model = nullptr;
    FSDP(fsdp_create_model(context, nullptr, &model));
    fsdp_param param = FSDP_PARAM_INIT;
    param.name = "w";
    param.shape = shape;
    param.dimension_count = 2;
    param.user_data = &tag;
    fsdp_group *group = nullptr;
    FSDP(fsdp_create_group(model, "g", &param, 1, sizeof param, nullptr, &group));
    FSDP(fsdp_seal_model(model));
    fsdp_param info = FSDP_PARAM_INIT;
    FSDP(fsdp_get_param_info(group, 0, &info));
    REQUIRE(info.user_data == &tag && std::string(info.name) == "w" && info.shape[1] == 4 && info.lr_scale == 1.0);
    REQUIRE(info.dtype == FSDP_FLOAT32 && info.granule == FSDP_GRANULE_ROW);
    fsdp_destroy_model(model);
    FSDP(fsdp_close_context(context));
  });
}

// debug mode: a view used after reshard reads NaN from a copy.
TEST(Ownership, DebugModePoisonsCopiedViews) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.context.flags = FSDP_CONTEXT_DEBUG;
  scenario.model.unshard_mode = FSDP_UNSHARD_COPIED;
  scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
  scenario.groups = equal_groups(3, 32, 16);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, nullptr));
    fsdp_tensor view = FSDP_TENSOR_INIT;
    FSDP(fsdp_get_param(rank.groups[0], 0, FSDP_FORWARD, &view));
    const auto *data = static_cast<const float *>(view.data);
    REQUIRE(data[0] == initial_weight(0, 0));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, nullptr));
    FSDP(fsdp_discard_step(rank.model, nullptr));  // waits for the library's streams
    REQUIRE(std::isnan(data[0]) && std::isnan(data[511]));
    FSDP(fsdp_close_context(context));
  });
}

using OwnershipDeathTest = testing::Test;

// ... and a mapped view cannot be read at all.
TEST(OwnershipDeathTest, DebugModeTakesMappedViewsAway) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        Scenario scenario;
        scenario.ranks = 2;
        scenario.context.flags = FSDP_CONTEXT_DEBUG;
        scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
        scenario.groups = equal_groups(3, 64, 64);
        run_threads(scenario, [&](uint32_t, fsdp_context *context) {
          Rank rank(context, scenario);
          rank.load();
          FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, nullptr));
          fsdp_tensor view = FSDP_TENSOR_INIT;
          FSDP(fsdp_get_param(rank.groups[0], 0, FSDP_FORWARD, &view));
          volatile const float *data = static_cast<const float *>(view.data);
          if (data[0] != initial_weight(0, 0)) ::_Exit(7);
          FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, nullptr));
          const float after = data[0];
          ::fprintf(stderr, "still readable: %g\n", static_cast<double>(after));
          ::_Exit(0);
        });
      },
      "");
}

}  // namespace
