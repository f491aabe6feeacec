// SPDX-License-Identifier: Apache-2.0
// Ownership of memory: the caller's arenas, chunks and shards, views, and what debug mode does to a view that is used
// too late.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "harness.h"

using namespace harness;

namespace {

TEST(Ownership, TheCallersMemoryServesForTheRoles) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  scenario.set_dtype(FSDP_BFLOAT16);
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
      REQUIRE(same_bits(outcome.weights, reference(scenario).weights));
      uint64_t address = 0;
      FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
      rank.view(0, 0, FSDP_EVAL, &address);
      FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
      const auto pool = reinterpret_cast<uint64_t>(arenas[2]);
      REQUIRE(address >= pool && address < pool + expected[r].memory.role_bytes[FSDP_ROLE_GATHER]);
      FSDP(fsdp_close_context(context));
    }
    for (void *arena : arenas) std::free(arena);
  });
}

TEST(Ownership, ChunksTileEveryParameterAndMatchTheShards) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
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
    for (const fsdp_shard &shard : rank.shards()) {
      fsdp_chunk chunk = FSDP_CHUNK_INIT;
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

// ---- debug mode: what a view is after reshard ----

Scenario debug_scenario(fsdp_unshard_mode mode) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, mode);
  scenario.context.flags = FSDP_CONTEXT_DEBUG;
  scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
  scenario.groups = equal_groups(3, 64, 64);
  return scenario;
}

// Views the first group's weights, sees that they are right, and returns them.
fsdp_tensor use_and_return(Rank &rank) {
  fsdp_tensor view = FSDP_TENSOR_INIT;
  FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
  FSDP(fsdp_get_param(rank.groups[0], 0, FSDP_FORWARD, &view));
  REQUIRE(*static_cast<const volatile float *>(view.data) == initial_weight(0, 0));
  FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, nullptr));
  return view;
}

TEST(Ownership, DebugModePoisonsCopiedViews) {
  const Scenario scenario = debug_scenario(FSDP_UNSHARD_COPIED);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    const fsdp_tensor view = use_and_return(rank);
    FSDP(fsdp_discard_step(rank.model, nullptr));  // waits for the library's streams
    const auto *data = static_cast<const float *>(view.data);
    REQUIRE(std::isnan(data[0]) && std::isnan(data[view.element_count - 1]));
    FSDP(fsdp_close_context(context));
  });
}

// Ends the process by SIGSEGV and reports that this read caused it. With a fault anywhere else, or with none, the
// process ends in another way. The handler stands before those of sanitizers.
const volatile void *forbidden = nullptr;

void read_forbidden(const volatile float *data) {
  forbidden = data;
  struct sigaction action {};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = [](int, siginfo_t *info, void *) {
    if (info->si_addr != forbidden) ::_Exit(8);
    constexpr char text[] = "the view cannot be read";
    if (::write(STDERR_FILENO, text, sizeof text - 1) < 0) ::_Exit(9);
    ::signal(SIGSEGV, SIG_DFL);  // the read is tried again
  };
  ::sigaction(SIGSEGV, &action, nullptr);
  const float seen = *data;
  ::fprintf(stderr, "still readable: %g\n", static_cast<double>(seen));
  ::_Exit(0);
}

using OwnershipDeathTest = testing::Test;

TEST(OwnershipDeathTest, DebugModeTakesMappedViewsAway) {
  if (is_thread_sanitized()) GTEST_SKIP() << "ranks share one view of the memory then, which is not protected";
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const Scenario scenario = debug_scenario(FSDP_UNSHARD_MAPPED);
        run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
          Rank rank(context, scenario);
          rank.load();
          const fsdp_tensor view = use_and_return(rank);
          if (r == 0) read_forbidden(static_cast<const float *>(view.data));
          FSDP(fsdp_close_context(context));  // waits for rank 0, which does not come
        });
      },
      testing::KilledBySignal(SIGSEGV), "the view cannot be read$");
}

}  // namespace
