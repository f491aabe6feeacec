// SPDX-License-Identifier: Apache-2.0
// fsdp_check_replicas: what it finds, what its error says, and that ranks with other elements are not compared. Every
// test that trains checks that it finds nothing after training (harness.h).
#include <gtest/gtest.h>

#include "device.h"
#include "harness.h"

using namespace harness;

namespace {

Scenario setup_of(fsdp_strategy strategy, uint32_t replicas, uint32_t shards) {
  Scenario setup = scenario_of(strategy, replicas * shards);
  setup.mesh.replicate_size = replicas;
  setup.mesh.shard_size = shards;
  return setup;
}

fsdp_status check(const Rank &rank) { return fsdp_check_replicas(rank.model, 0, stream()); }

void expect_difference(const Rank &rank, int32_t odd, const std::vector<std::string> &words) {
  require_error(check(rank), FSDP_MISMATCH, words);
  fsdp_error error = FSDP_ERROR_INIT;
  FSDP(fsdp_get_last_error(rank.context, &error));
  REQUIRE(error.rank == odd);
  REQUIRE(!error.context_failed);
}

// Loads a state or, with NULL, weights; on rank `odd` all are others.
void load(const Rank &rank, size_t group, size_t param, const char *state, uint32_t odd) {
  std::vector<float> data(rank.def(group).params[param].count(), rank.rank == odd ? 0.5f : 0.25f);
  if (state)
    FSDP(fsdp_load_state(rank.groups[group], param, state, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0));
  else
    FSDP(fsdp_load_param(rank.groups[group], param, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0));
}

template <class Edit>
void edit(const Rank &rank, Edit change) {
  FSDP(fsdp_begin_update(rank.model, stream()));
  change();
  FSDP(fsdp_publish_weights(rank.model, stream()));
}

constexpr uint32_t nobody = 99;

TEST(Replicas, MainWeightsOfRanksThatHaveAllDiffer) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_NO_SHARD, 3);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(check(rank));
    edit(rank, [&] { load(rank, 1, 2, nullptr, 1); });
    expect_difference(rank, 1,
                      {"fsdp_check_replicas: model 0: parameter 'l0.w1' of group 'layer.0'",
                       "weights of rank 1 have the hash", "those of rank 0", "2 rank(s) agree"});
    edit(rank, [&] { load(rank, 1, 2, nullptr, nobody); });
    FSDP(check(rank));
    FSDP(fsdp_close_context(context));
  });
}

// Two of three agree, and rank 0 is not one of them.
TEST(Replicas, TheRankThatFewerAgreeWithIsNamed) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_NO_SHARD, 3);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    edit(rank, [&] { load(rank, 0, 0, nullptr, 0); });
    expect_difference(rank, 0,
                      {"parameter 'embed.w'", "of rank 0 have the hash", "those of rank 1", "2 rank(s) agree"});
    FSDP(fsdp_close_context(context));
  });
}

// Ranks 0 and 2 hold the same shard, ranks 1 and 3 the other; what differs between the two shards is as it should be.
TEST(Replicas, StatesOfOneShardDiffer) {
  for (const fsdp_strategy strategy :
       {FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}) {
    const Scenario setup = setup_of(strategy, 2, 2);
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      FSDP(check(rank));
      edit(rank, [&] { load(rank, 0, 0, "exp_avg_sq", 3); });
      expect_difference(rank, 3,
                        {"parameter 'embed.w' of group 'embed'", "optimizer state 'exp_avg_sq' of rank 3",
                         "those of rank 1", "1 rank(s) agree"});
      FSDP(fsdp_close_context(context));
    });
  }
}

// Of frozen parameters there are compute weights alone, of others in fp32 nothing but those.
TEST(Replicas, ComputeWeightsOfReplicasDiffer) {
  for (const uint32_t flags : {0u, FSDP_PARAM_FROZEN + 0u}) {
    Scenario setup = setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, 2);
    setup.groups[3].params[1].flags = flags;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      edit(rank, [&] { load(rank, 3, 1, nullptr, 3); });
      expect_difference(rank, 3, {"parameter 'head.norm'", "weights of rank 3", "those of rank 1"});
      FSDP(fsdp_close_context(context));
    });
  }
}

// Memory of a device is hashed in pieces of 1 MiB: the last one is looked at too.
TEST(Replicas, OfLargeParametersDifferInTheLastElement) {
  Scenario setup = scenario_of(FSDP_STRATEGY_NO_SHARD, 2);
  setup.groups = equal_groups(1, 700, 1024);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    std::vector<float> data(rank.def(0).params[0].count(), 0.25f);
    const auto put = [&] {
      edit(rank, [&] {
        FSDP(fsdp_load_param(rank.groups[0], 0, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0));
      });
    };
    put();
    FSDP(check(rank));
    if (r == 1) data.back() = 0.5f;
    put();
    expect_difference(rank, 1, {"parameter", "of rank 1 have the hash"});
    FSDP(fsdp_close_context(context));
  });
}

TEST(Replicas, WhatOneRankAloneHasIsNotCompared) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    edit(rank, [&] { load(rank, 0, 0, nullptr, 1); });
    FSDP(check(rank));
    FSDP(fsdp_close_context(context));
  });
}

TEST(Replicas, AreComparedOutsideOfTheWindow) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_NO_SHARD, 2);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    require_error(check(rank), FSDP_INVALID_STATE, {"fsdp_check_replicas"});
    rank.load();
    require_error(fsdp_check_replicas(rank.model, 1, stream()), FSDP_INVALID_ARGUMENT, {"flags"});
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
    FSDP(check(rank));
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
    FSDP(fsdp_discard_step(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
