// SPDX-License-Identifier: Apache-2.0
// Calls that bindings are made of: groups and parameters by name, the views of a whole group, states and chunks in and
// out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "harness.h"

using namespace harness;

namespace {

// An array of views with `extra` bytes after each, as a caller of another version may have it.
struct Views {
  Views(uint64_t count, uint64_t extra) : stride(sizeof(fsdp_tensor) + extra), bytes(count * stride + 1, 0x5A) {}
  fsdp_tensor *data() { return reinterpret_cast<fsdp_tensor *>(bytes.data()); }
  const fsdp_tensor &operator[](uint64_t i) const {
    return *reinterpret_cast<const fsdp_tensor *>(bytes.data() + i * stride);
  }
  uint64_t stride;
  std::vector<unsigned char> bytes;
};

void on_ranks(const Scenario &scenario, const std::function<void(Rank &)> &body) {
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    body(rank);
    FSDP(fsdp_close_context(context));
  });
}

Scenario frozen_scenario(fsdp_strategy strategy) {
  Scenario scenario = scenario_of(strategy, 2);
  scenario.groups[1].params[0].flags = FSDP_PARAM_FROZEN;
  return scenario;
}

TEST(Lookup, GroupsAndParametersByNumberAndName) {
  const Scenario scenario = frozen_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  on_ranks(scenario, [&](Rank &rank) {
    uint64_t count = 0;
    FSDP(fsdp_get_group_count(rank.model, &count));
    REQUIRE(count == scenario.groups.size());
    for (uint64_t g = 0; g < count; ++g) {
      fsdp_group *by_number = nullptr, *by_name = nullptr;
      FSDP(fsdp_get_group(rank.model, g, &by_number));
      FSDP(fsdp_find_group(rank.model, scenario.groups[g].name.c_str(), &by_name));
      REQUIRE(by_number == rank.groups[g] && by_name == rank.groups[g]);
      fsdp_group_info info = FSDP_GROUP_INFO_INIT;
      FSDP(fsdp_get_group_info(rank.groups[g], &info));
      REQUIRE(scenario.groups[g].name == info.name && info.group_index == g);
      REQUIRE(info.param_count == scenario.groups[g].params.size());
      REQUIRE(info.strategy == FSDP_STRATEGY_OPTIM_GRADS_PARAMS && info.reduce_policy == FSDP_REDUCE_POLICY_EACH);
      for (uint64_t p = 0; p < info.param_count; ++p) {
        fsdp_group *owner = nullptr;
        uint64_t index = 99;
        FSDP(fsdp_find_param(rank.model, scenario.groups[g].params[p].name.c_str(), &owner, &index));
        REQUIRE(owner == rank.groups[g] && index == p);
      }
    }
    fsdp_group *none = rank.groups[0];
    uint64_t index = 7;
    require_error(fsdp_get_group(rank.model, count, &none), FSDP_INVALID_ARGUMENT, {"group_index", "outside"});
    REQUIRE(none == nullptr);
    none = rank.groups[0];
    require_error(fsdp_find_group(rank.model, "no such", &none), FSDP_INVALID_ARGUMENT, {"'no such'"});
    REQUIRE(none == nullptr);
    none = rank.groups[0];
    require_error(fsdp_find_param(rank.model, "no such", &none, &index), FSDP_INVALID_ARGUMENT, {"'no such'"});
    REQUIRE(none == nullptr && index == 7);
    REQUIRE(std::string(fsdp_get_last_message()).find("'no such'") != std::string::npos);
  });
}

TEST(Views, OfAGroupAreThoseOfItsParameters) {
  for (const fsdp_strategy strategy : {1, 4}) {
    const Scenario scenario = frozen_scenario(strategy);
    on_ranks(scenario, [&](Rank &rank) {
      for (size_t g = 0; g < rank.groups.size(); ++g) {
        const uint64_t count = scenario.groups[g].params.size();
        Views views(count, 16);
        FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
        FSDP(fsdp_get_params(rank.groups[g], FSDP_FORWARD, views.data(), count, views.stride));
        for (uint64_t p = 0; p < count; ++p) {
          fsdp_tensor one = FSDP_TENSOR_INIT;
          FSDP(fsdp_get_param(rank.groups[g], p, FSDP_FORWARD, &one));
          REQUIRE(std::memcmp(&one, &views[p], sizeof one) == 0);
          const ParamDef &def = scenario.groups[g].params[p];
          REQUIRE(one.element_count == def.count() && one.dimension_count == def.shape.size());
          REQUIRE(std::equal(def.shape.begin(), def.shape.end(), one.shape));
          for (uint64_t i = 0; i < one.element_count; ++i)
            REQUIRE(static_cast<const float *>(one.data)[i] == initial_weight(scenario.ordinal(g, p), i));
          REQUIRE(one.flags == FSDP_TENSOR_READ_ONLY && one.device == FSDP_DEVICE_HOST && one.device_index == 0);
          REQUIRE(one.element_size == fsdp_get_dtype_size(one.dtype));
          // The call does not write bytes that it does not know.
          REQUIRE(views.bytes[p * views.stride + sizeof one] == 0x5A);
        }
        require_error(fsdp_get_params(rank.groups[g], FSDP_FORWARD, views.data(), count + 1, views.stride),
                      FSDP_INVALID_ARGUMENT, {"tensor_count", "parameters"});
        require_error(fsdp_get_params(rank.groups[g], FSDP_FORWARD, views.data(), count, 0), FSDP_INVALID_ARGUMENT,
                      {"tensor_stride is 0"});
        FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, 0, nullptr));
      }
    });
  }
}

TEST(Grads, OfAGroupAreLentAtOnceAndClearedWhereAsked) {
  for (const bool zeroed : {false, true}) {
    const Scenario scenario = frozen_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
    on_ranks(scenario, [&](Rank &rank) {
      for (size_t g = rank.groups.size(); g-- > 0;) {
        const uint64_t count = scenario.groups[g].params.size();
        Views views(count, 0);
        std::vector<int32_t> accumulate(count, 7);
        for (const int turn : {0, 1}) {
          FSDP(fsdp_acquire_grads(rank.groups[g], zeroed ? FSDP_GRAD_ZEROED : 0, nullptr, views.data(), count,
                                  views.stride, accumulate.data()));
          for (uint64_t p = 0; p < count; ++p) {
            const bool frozen = scenario.groups[g].params[p].flags & FSDP_PARAM_FROZEN;
            REQUIRE((views[p].data == nullptr) == frozen);
            REQUIRE(accumulate[p] == (!frozen && (zeroed || turn == 1)));
            if (frozen) continue;
            REQUIRE(views[p].flags == 0 && views[p].element_count == scenario.groups[g].params[p].count());
            auto *grad = static_cast<float *>(views[p].data);
            for (uint64_t i = 0; i < views[p].element_count; ++i) {
              if (zeroed && turn == 0) REQUIRE(grad[i] == 0);
              grad[i] = accumulate[p] ? grad[i] + 1 : 1;
            }
          }
        }
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
      for (const fsdp_shard &shard : rank.shards())
        for (uint64_t i = 0; i < shard.element_count; ++i) REQUIRE(main_grad(shard)[i] == 2.0f);
      FSDP(fsdp_publish_weights(rank.model, nullptr));
    });
  }
}

// The frozen parameter comes first and could be written before the next one is refused.
TEST(Grads, OfAGroupAreUntouchedWhereOneIsRefused) {
  const Scenario scenario = frozen_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  on_ranks(scenario, [&](Rank &rank) {
    const uint64_t count = scenario.groups[1].params.size();
    for (uint64_t p = 1; p < count; ++p) FSDP(fsdp_put_grad(rank.groups[1], p, nullptr, FSDP_FLOAT32, 0, 0, nullptr));
    FSDP(fsdp_reduce_grad(rank.groups[1], FSDP_LAST, nullptr));
    Views views(count, 0);
    const std::vector<unsigned char> before = views.bytes;
    std::vector<int32_t> accumulate(count, 7);
    require_error(fsdp_acquire_grads(rank.groups[1], 0, nullptr, views.data(), count, views.stride, accumulate.data()),
                  FSDP_INVALID_STATE, {"FSDP_LAST"});
    REQUIRE(views.bytes == before && accumulate == std::vector<int32_t>(count, 7));
    FSDP(fsdp_discard_step(rank.model, nullptr));
  });
}

TEST(Grads, WithoutTheFlagAccumulateMustBeTold) {
  const Scenario scenario = frozen_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  on_ranks(scenario, [&](Rank &rank) {
    fsdp_tensor grad = FSDP_TENSOR_INIT;
    require_error(fsdp_acquire_grad(rank.groups[0], 0, 0, nullptr, &grad, nullptr), FSDP_INVALID_ARGUMENT,
                  {"accumulate is NULL"});
    FSDP(fsdp_acquire_grad(rank.groups[0], 0, FSDP_GRAD_ZEROED, nullptr, &grad, nullptr));
    REQUIRE(static_cast<float *>(grad.data)[0] == 0);
    FSDP(fsdp_discard_step(rank.model, nullptr));
  });
}

// The states of a step whose gradients are all 1: exp_avg 0.1, exp_avg_sq 0.001, from the documented formula.
TEST(States, AreReadAndLoadedWhole) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4}) {
    const Scenario scenario = scenario_of(strategy, 3);
    on_ranks(scenario, [&](Rank &rank) {
      for (size_t g = rank.groups.size(); g-- > 0;) {
        put_all(rank, g, 1.0f);
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
      FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr));
      const uint64_t count = scenario.groups[0].params[0].count();
      std::vector<float> first(count, -1), second(count, -1);
      FSDP(fsdp_read_state(rank.groups[0], 0, "exp_avg", first.data(), FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0));
      const bool reads = rank.rank == 1;
      FSDP(
          fsdp_read_state(rank.groups[0], 0, "exp_avg_sq", reads ? second.data() : nullptr, FSDP_FLOAT32, count, 1, 0));
      for (uint64_t i = 0; i < count; ++i) REQUIRE(std::abs(first[i] - 0.1f) < 1e-7f);
      for (uint64_t i = 0; i < count; ++i) REQUIRE(std::abs(second[i] - (reads ? 0.001f : -1.0f)) < 1e-9f);
      FSDP(fsdp_begin_update(rank.model, nullptr));
      std::vector<float> given(count);
      for (uint64_t i = 0; i < count; ++i) given[i] = static_cast<float>(i) + 0.5f;
      FSDP(fsdp_load_state(rank.groups[0], 0, "exp_avg", rank.rank == 2 ? given.data() : nullptr, FSDP_FLOAT32, count,
                           2, 0));
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      FSDP(fsdp_read_state(rank.groups[0], 0, "exp_avg", first.data(), FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0));
      REQUIRE(first == given);
      REQUIRE(rank.stats().step == 1);  // no load changes it
      require_error(
          fsdp_read_state(rank.groups[0], 0, "momentum", first.data(), FSDP_FLOAT32, count, FSDP_EVERY_RANK, 0),
          FSDP_INVALID_ARGUMENT, {"'momentum'"});
    });
  }
}

TEST(States, AFrozenParameterHasNone) {
  const Scenario scenario = frozen_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
  on_ranks(scenario, [&](Rank &rank) {
    std::vector<float> data(scenario.groups[1].params[0].count());
    require_error(
        fsdp_read_state(rank.groups[1], 0, "exp_avg", data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0),
        FSDP_INVALID_STATE, {"FROZEN", scenario.groups[1].params[0].name});
  });
}

// Frozen weights do not travel over the outer axis: each replica loads all rows of its shard axis.
TEST(Chunks, OfFrozenParametersAreWhatARankMustLoad) {
  for (const fsdp_outer_strategy outer : {FSDP_OUTER_NO_SHARD, FSDP_OUTER_OPTIM}) {
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4);
    scenario.mesh.replicate_size = scenario.mesh.shard_size = 2;
    scenario.model.outer_strategy = outer;
    scenario.groups[0].params[0].flags = FSDP_PARAM_FROZEN;
    on_ranks(scenario, [&](Rank &rank) {
      FSDP(fsdp_begin_update(rank.model, nullptr));
      const uint64_t count = scenario.groups[0].params[0].count(), row = count / scenario.groups[0].params[0].shape[0];
      std::vector<float> full(count);
      for (uint64_t i = 0; i < count; ++i) full[i] = static_cast<float>(i);
      fsdp_chunk chunk = FSDP_CHUNK_INIT;
      FSDP(fsdp_get_chunk(rank.groups[0], 0, rank.rank, &chunk));
      FSDP(fsdp_load_chunk(rank.groups[0], 0, full.data() + chunk.row_offset * row, FSDP_FLOAT32, chunk.row_offset,
                           chunk.row_count, 0));
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      REQUIRE(rank.read(0, 0) == full);
      FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
      REQUIRE(rank.view(0, 0, FSDP_EVAL) == full);
      FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
    });
  }
}

TEST(Chunks, AreLoadedByTheirOwners) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4}) {
    const Scenario scenario = scenario_of(strategy, 3);
    on_ranks(scenario, [&](Rank &rank) {
      FSDP(fsdp_begin_update(rank.model, nullptr));
      const std::vector<uint64_t> &shape = scenario.groups[0].params[0].shape;
      const uint64_t count = scenario.groups[0].params[0].count(), row = count / shape[0];
      std::vector<float> full(count);
      for (uint64_t i = 0; i < count; ++i) full[i] = static_cast<float>(i);
      fsdp_chunk chunk = FSDP_CHUNK_INIT;
      FSDP(fsdp_get_chunk(rank.groups[0], 0, rank.rank, &chunk));
      const bool whole = strategy == FSDP_STRATEGY_NO_SHARD;
      const uint64_t first = chunk.row_offset, rows = chunk.row_count;
      if (whole) REQUIRE(first == 0 && rows == shape[0]);
      FSDP(fsdp_load_chunk(rank.groups[0], 0, full.data() + first * row, FSDP_FLOAT32, first, rows, 0));
      require_error(fsdp_load_chunk(rank.groups[0], 0, full.data(), FSDP_FLOAT32, first, rows + 1, 0),
                    FSDP_INVALID_ARGUMENT, {"not all this rank's", "has rows ["});
      require_error(fsdp_load_chunk(rank.groups[0], 0, full.data(), FSDP_FLOAT32, first + rows, 1, 0),
                    FSDP_INVALID_ARGUMENT, {"not all this rank's"});
      if (!whole) {
        require_error(fsdp_load_chunk(rank.groups[0], 0, full.data(), FSDP_FLOAT32, 0, shape[0], 0),
                      FSDP_INVALID_ARGUMENT, {"not all this rank's", "has rows ["});
        require_error(fsdp_load_chunk(rank.groups[0], 0, full.data(), FSDP_FLOAT32, first, UINT64_MAX, 0),
                      FSDP_INVALID_ARGUMENT, {"not all this rank's"});
      }
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      REQUIRE(rank.read(0, 0) == full);
      require_error(fsdp_load_chunk(rank.groups[0], 0, full.data(), FSDP_FLOAT32, first, rows, 0), FSDP_INVALID_STATE,
                    {"window is closed"});
    });
  }
}

TEST(Params, ARootAloneReads) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  on_ranks(scenario, [&](Rank &rank) {
    const uint64_t count = scenario.groups[0].params[0].count();
    std::vector<float> data(count, -1);
    FSDP(fsdp_read_param(rank.groups[0], 0, rank.rank == 2 ? data.data() : nullptr, FSDP_FLOAT32, count, 2, 0));
    std::vector<float> expected(count);
    for (uint64_t i = 0; i < count; ++i) expected[i] = initial_weight(0, i);
    REQUIRE(rank.read(0, 0) == expected);
    REQUIRE(data == (rank.rank == 2 ? expected : std::vector<float>(count, -1)));
    require_error(fsdp_read_param(rank.groups[0], 0, data.data(), FSDP_FLOAT32, count, 3, 0), FSDP_INVALID_ARGUMENT,
                  {"root 3", "3 ranks of the model's mesh"});
  });
}

// The types of main weights and main grads do not depend on the dtype of the compute weights.
TEST(Shards, SayOfWhichTypeTheyAre) {
  for (const fsdp_dtype compute : {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16}) {
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    scenario.set_dtype(compute);
    on_ranks(scenario, [&](Rank &rank) {
      REQUIRE(!rank.shards().empty());
      for (const fsdp_shard &shard : rank.shards())
        REQUIRE(shard.main_weight_dtype == FSDP_FLOAT32 && shard.main_grad_dtype == FSDP_FLOAT32);
    });
  }
}

}  // namespace
