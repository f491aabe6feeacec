// SPDX-License-Identifier: Apache-2.0
// States of the caller in addition to those of AdamW: a moving average of the weights is planned, kept, saved and
// loaded like them.
#include <gtest/gtest.h>

#include "checkpoint_folder.h"

using namespace harness;

namespace {

constexpr float rate = 0.25f;

Scenario setup_of(fsdp_strategy strategy, uint32_t ranks) {
  Scenario setup = scenario_of(strategy, ranks, 0);
  setup.groups[1].params[2].flags = FSDP_PARAM_FROZEN;
  return setup;
}

class AveragedRank : public Rank {
 public:
  AveragedRank(fsdp_context *context, const Scenario &setup, bool averages = true) : Rank(context, setup, false) {
    if (averages) FSDP(fsdp_add_optimizer_state(model, "average", FSDP_FLOAT32));
    FSDP(fsdp_seal_model(model));
  }
  std::vector<std::vector<float>> read_states(const char *name) const {
    std::vector<std::vector<float>> all;
    for (size_t g = 0; g < groups.size(); ++g)
      for (size_t p = 0; p < def(g).params.size(); ++p) {
        if (def(g).params[p].flags & FSDP_PARAM_FROZEN) continue;
        std::vector<float> &data = all.emplace_back(def(g).params[p].count());
        FSDP(fsdp_read_state(groups[g], p, name, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0));
      }
    return all;
  }
  // Updates the average shard by shard, as a caller would.
  void average() const {
    uint64_t count = 0;
    FSDP(fsdp_get_shard_count(model, &count));
    for (uint64_t s = 0; s < count; ++s) {
      fsdp_shard shard = FSDP_SHARD_INIT;
      fsdp_tensor state = FSDP_TENSOR_INIT;
      FSDP(fsdp_get_shard(model, s, &shard));
      FSDP(fsdp_get_shard_state(model, s, "average", &state));
      REQUIRE(shard.state_count == 3 && state.element_count == shard.element_count && state.dtype == FSDP_FLOAT32);
      auto *const average = static_cast<float *>(state.data);
      for (uint64_t i = 0; i < shard.element_count; ++i) average[i] += rate * (main_weight(shard)[i] - average[i]);
    }
  }
  // The weights of before each step count.
  void step(uint32_t number) const {
    finish_step(const_cast<AveragedRank &>(*this), number);
    average();
    update(const_cast<AveragedRank &>(*this));
  }
};

// Computes the averages from whole weights, without the library.
std::vector<std::vector<float>> expected_averages(const Scenario &setup, uint32_t steps) {
  std::vector<std::vector<float>> averages;
  for (uint32_t step = 0; step < steps; ++step) {
    Scenario before = setup;
    before.steps = step;
    const auto weights = reference(before).weights;
    size_t ordinal = 0, trained = 0;
    for (const GroupDef &group : setup.groups)
      for (const ParamDef &param : group.params) {
        const std::vector<float> &now = weights[ordinal++];
        if (param.flags & FSDP_PARAM_FROZEN) continue;
        if (step == 0) averages.emplace_back(now.size(), 0.0f);
        std::vector<float> &average = averages[trained++];
        for (size_t i = 0; i < now.size(); ++i) average[i] += rate * (now[i] - average[i]);
      }
  }
  return averages;
}

using FurtherState = Checkpoint;

// Three ranks save, and other numbers of ranks continue: weights, AdamW's states and the average equal those of one
// run.
TEST_F(FurtherState, GoesOnOnOtherRanks) {
  for (const fsdp_strategy strategy : strategies)
    for (const uint32_t ranks : {1u, 2u, 4u}) {
      SCOPED_TRACE(testing::Message() << "strategy " << strategy << ", ranks " << ranks);
      const std::string folder = path + "/" + std::to_string(strategy) + std::to_string(ranks);
      Scenario saving = setup_of(strategy, 3), loading = setup_of(strategy, ranks);
      saving.steps = 2;
      run_threads(saving, [&](uint32_t, fsdp_context *context) {
        const AveragedRank rank(context, saving);
        const_cast<AveragedRank &>(rank).load();
        for (const auto &zeros : rank.read_states("average")) REQUIRE(zeros == std::vector<float>(zeros.size(), 0));
        for (uint32_t step = 0; step < 2; ++step) rank.step(step);
        REQUIRE(same_bits(rank.read_states("average"), expected_averages(saving, 2)));
        REQUIRE(same_bits(rank.read_all(), reference(saving).weights));
        FSDP(save(rank, folder, 2));
        FSDP(fsdp_close_context(context));
      });
      run_threads(loading, [&](uint32_t, fsdp_context *context) {
        const AveragedRank rank(context, loading);
        FSDP(harness::load(rank, folder));
        REQUIRE(same_bits(rank.read_states("average"), expected_averages(saving, 2)));
        FSDP(fsdp_publish_weights(rank.model, stream()));
        auto expected = rank.read_states("average");
        for (uint32_t step = 2; step < 4; ++step) {
          const auto weights = rank.read_all();
          rank.step(step);
          size_t ordinal = 0, trained = 0;
          for (const GroupDef &group : loading.groups)
            for (const ParamDef &param : group.params) {
              const auto &now = weights[ordinal++];
              if (param.flags & FSDP_PARAM_FROZEN) continue;
              std::vector<float> &average = expected[trained++];
              for (size_t i = 0; i < now.size(); ++i) average[i] += rate * (now[i] - average[i]);
            }
        }
        REQUIRE(same_bits(rank.read_states("average"), expected));
        REQUIRE(rank.stats().step == 4);
        FSDP(fsdp_check_replicas(rank.model, 0, stream()));
        FSDP(fsdp_close_context(context));
      });
    }
}

// A state that the checkpoint lacks is an error that names it, or stays as it is. A state that the model lacks is
// unexpected.
TEST_F(FurtherState, AStateThatIsMissingIsNamedOrStays) {
  const Scenario setup = setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  for (const bool saves : {false, true})
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      AveragedRank rank(context, setup, saves);
      rank.load();
      finish_step(rank, 0);
      if (saves) rank.average();
      update(rank);
      FSDP(save(rank, path + (saves ? "/with" : "/without"), 1));
      FSDP(fsdp_close_context(context));
    });
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    AveragedRank rank(context, setup);
    rank.load();
    finish_step(rank, 0);
    rank.average();
    const auto before = rank.read_states("average");
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_begin_update(rank.model, stream()));
    require_error(harness::load(rank, path + "/without"), FSDP_INVALID_ARGUMENT,
                  {"state.embed.w.average", "FSDP_LOAD_ALLOW_MISSING"});
    FSDP(harness::load(rank, path + "/without", FSDP_LOAD_ALLOW_MISSING));
    REQUIRE(same_bits(rank.read_states("average"), before));
    REQUIRE(rank.read_states("exp_avg")[0] != std::vector<float>(37 * 24, 0));
    FSDP(harness::load(rank, path + "/with"));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    AveragedRank rank(context, setup, false);
    require_error(harness::load(rank, path + "/with"), FSDP_INVALID_ARGUMENT,
                  {"state.embed.w.average", "FSDP_LOAD_ALLOW_UNEXPECTED"});
    FSDP(harness::load(rank, path + "/with", FSDP_LOAD_ALLOW_UNEXPECTED));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

// Read and loaded whole by its name, in its dtype.
TEST(AdamWStates, OfTheCallerAreReadAndLoadedWhole) {
  const Scenario setup = setup_of(FSDP_STRATEGY_OPTIM_GRADS, 3);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup, false);
    FSDP(fsdp_add_optimizer_state(rank.model, "average", FSDP_FLOAT32));
    FSDP(fsdp_add_optimizer_state(rank.model, "narrow", FSDP_BFLOAT16));
    FSDP(fsdp_seal_model(rank.model));
    std::vector<float> values(37 * 24);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 128);
    for (const char *name : {"average", "narrow", "exp_avg"}) {
      FSDP(fsdp_load_state(rank.groups[0], 0, name, r == 1 ? values.data() : nullptr, FSDP_FLOAT32, values.size(), 1,
                           0));
      std::vector<float> read(values.size());
      FSDP(fsdp_read_state(rank.groups[0], 0, name, read.data(), FSDP_FLOAT32, read.size(), FSDP_EVERY_RANK, 0));
      REQUIRE(read == values);
      values[0] += 1;
    }
    for (const fsdp_shard &shard : rank.shards()) REQUIRE(shard.state_count == 4);
    require_error(fsdp_read_state(rank.groups[0], 0, "other", values.data(), FSDP_FLOAT32, values.size(), -1, 0),
                  FSDP_INVALID_ARGUMENT, {"no optimizer state 'other'"});
    rank.load();
    clean_step(rank, 0);
    FSDP(fsdp_close_context(context));
  });
}

// The states count in role OPTIMIZER, and the plan and the run have the same bytes.
TEST(AdamWStates, OfTheCallerAreCounted) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = setup_of(strategy, 2);
    setup.groups = equal_groups(3, 64, 32);
    uint64_t bytes[3] = {};
    for (const int added : {0, 1, 2}) {
      fsdp_context *context = nullptr;
      FSDP(fsdp_create_plan_context(setup.ranks, 1, &setup.context, &context));
      {
        Rank rank(context, setup, false);
        if (added > 0) FSDP(fsdp_add_optimizer_state(rank.model, "average", FSDP_FLOAT32));
        if (added > 1) FSDP(fsdp_add_optimizer_state(rank.model, "narrow", FSDP_BFLOAT16));
        FSDP(fsdp_seal_model(rank.model));
        bytes[added] = memory_of(rank.model, 1).role_bytes[FSDP_ROLE_OPTIMIZER];
      }
      fsdp_destroy_context(context);
    }
    EXPECT_EQ(bytes[1], bytes[0] / 2 * 3);
    EXPECT_EQ(bytes[2], bytes[0] / 4 * 7);
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      const AveragedRank rank(context, setup);
      REQUIRE(rank.stats().allocated_bytes[FSDP_ROLE_OPTIMIZER] == bytes[1]);
      REQUIRE(memory_of(rank.model, r).role_bytes[FSDP_ROLE_OPTIMIZER] == bytes[1]);
      FSDP(fsdp_publish_weights(rank.model, stream()));
      FSDP(fsdp_close_context(context));
    });
  }
}

// Ranks that declared different ones learn it at the seal.
TEST(AdamWStates, OfTheCallerMustBeTheSameOnEveryRank) {
  const Scenario setup = setup_of(FSDP_STRATEGY_OPTIM_GRADS, 2);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup, false);
    if (r) FSDP(fsdp_add_optimizer_state(rank.model, "average", FSDP_FLOAT32));
    require_error(fsdp_seal_model(rank.model), FSDP_MISMATCH, {"optimizer state 'average': float32"});
  });
}

}  // namespace
