// SPDX-License-Identifier: Apache-2.0
// Gradients in any order, without any of them, or all at once; their norms; and gradients that are not finite.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "../library_threads.h"
#include "harness.h"

using namespace harness;

namespace {

// Runs the body on three ranks with loaded weights, for every strategy.
void on_every_strategy(const std::function<void(Rank &)> &body) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4}) {
    const Scenario scenario = scenario_of(strategy, 3);
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      body(rank);
      FSDP(fsdp_close_context(context));
    });
  }
}

// Compares all gradients that this rank owns. Each element has a rank that owns it.
void expect_grads(Rank &rank, const std::function<float(const fsdp_shard &)> &expected) {
  double owned = 0;
  for (const fsdp_shard &shard : rank.shards()) {
    for (uint64_t i = 0; i < shard.element_count; ++i) REQUIRE(main_grad(shard)[i] == expected(shard));
    owned += static_cast<double>(shard.element_count);
  }
  FSDP(fsdp_all_reduce_values(rank.context, nullptr, &owned, 1, FSDP_VALUE_SUM));
  double all = 0;
  for (const GroupDef &group : rank.setup.groups)
    for (const ParamDef &param : group.params) all += static_cast<double>(param.count());
  REQUIRE(owned == (rank.setup.model.strategy == FSDP_STRATEGY_NO_SHARD ? rank.setup.ranks : 1) * all);
}

TEST(Grads, ComeInAnyOrder) {
  on_every_strategy([](Rank &rank) {
    for (const size_t g : {2u, 0u, 3u, 1u}) {
      put_all(rank, g, static_cast<float>(rank.rank));
      FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
    }
    FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
    expect_grads(rank, [](const fsdp_shard &) { return 1.0f; });
    FSDP(fsdp_publish_weights(rank.model, nullptr));
  });
}

// Tied embeddings: both are open while the layers between them come and go, with the default number of buffers.
TEST(Grads, OfRootGroupsAreOpenBesidesThoseOfLayers) {
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}) {
    Scenario setup = scenario_of(strategy, 2);
    setup.groups = equal_groups(6, 8, 8);
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      fsdp_model *model = nullptr;
      FSDP(fsdp_create_model(context, &setup.model, &model));
      std::vector<fsdp_group *> groups(6);
      const uint64_t shape[] = {8, 8};
      for (size_t g = 0; g < groups.size(); ++g) {
        fsdp_param param = FSDP_PARAM_INIT;
        param.name = setup.groups[g].params[0].name.c_str();
        param.shape = shape;
        param.dimension_count = 2;
        fsdp_group_options options = FSDP_GROUP_OPTIONS_INIT;
        if (g == 0 || g == 5) options.flags = FSDP_GROUP_ROOT;
        FSDP(fsdp_create_group(model, setup.groups[g].name.c_str(), &param, 1, sizeof param, &options, &groups[g]));
      }
      FSDP(fsdp_seal_model(model));
      const std::vector<float> zeros(64);
      for (fsdp_group *group : groups)
        FSDP(fsdp_load_param(group, 0, zeros.data(), FSDP_FLOAT32, 64, FSDP_EVERY_RANK, 0));
      FSDP(fsdp_publish_weights(model, nullptr));
      const auto give = [&](size_t g) {
        fsdp_tensor grad = FSDP_TENSOR_INIT;
        int32_t accumulate = 0;
        FSDP(fsdp_acquire_grad(groups[g], 0, 0, nullptr, &grad, &accumulate));
        std::fill_n(static_cast<float *>(grad.data), 64, static_cast<float>(g + 1));
      };
      give(5);
      give(0);
      for (size_t g = 4; g >= 1; --g) {
        give(g);
        FSDP(fsdp_reduce_grad(groups[g], FSDP_LAST, nullptr));
      }
      for (const size_t g : {0u, 5u}) FSDP(fsdp_reduce_grad(groups[g], FSDP_LAST, nullptr));
      FSDP(fsdp_finish_grads(model, 1, 0, nullptr));
      double norms[6];
      FSDP(fsdp_get_param_grad_norms(model, nullptr, norms, 6));
      for (size_t g = 0; g < 6; ++g) EXPECT_DOUBLE_EQ(norms[g], 8.0 * static_cast<double>(g + 1));
      FSDP(fsdp_discard_step(model, nullptr));
      FSDP(fsdp_close_context(context));
      fsdp_destroy_model(model);
    });
  }
}

TEST(Grads, NoneIsAnErrorUnlessSaidAndThenCountsAsZeros) {
  on_every_strategy([](Rank &rank) {
    for (int s = 0; s < 2; ++s) {
      for (size_t g = 1; g < rank.groups.size(); ++g) {
        put_all(rank, g, 1.0f);
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      require_error(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, nullptr), FSDP_INVALID_STATE, {"'embed.w'"});
      // Rank 1 has none, the others do: (3 + 0 + 3) / 3.
      if (rank.rank == 1)
        FSDP(fsdp_put_grad(rank.groups[0], 0, nullptr, 0, 0, 0, nullptr));
      else
        put_all(rank, 0, 3.0f);
      FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, nullptr));
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
      const float third = 1.0f / 3;
      expect_grads(
          rank, [&](const fsdp_shard &shard) { return shard.group == rank.groups[0] ? 6.0f * third : 3.0f * third; });
      FSDP(fsdp_publish_weights(rank.model, nullptr));
    }
  });
}

TEST(Grads, ApplyGradsEqualsTheCallsItStandsFor) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4}) {
    const Scenario scenario = scenario_of(strategy, 3, FSDP_UNSHARD_MAPPED);
    std::vector<std::vector<float>> expected;
    double expected_norm = 0;
    for (const bool at_once : {false, true})
      run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, scenario);
        rank.load();
        std::vector<std::vector<float>> values;
        std::vector<fsdp_grad> grads;
        for (size_t g = 0; g < rank.groups.size(); ++g)
          for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
            values.emplace_back();
            for (uint64_t i = 0; i < rank.def(g).params[p].count(); ++i)
              values.back().push_back(gradient(r, 0, 0, static_cast<uint32_t>(values.size()), i, 1.0f));
          }
        for (const auto &value : values) grads.push_back({value.data(), value.size(), FSDP_FLOAT32, 0});
        double norm = 0;
        if (at_once) {
          FSDP(fsdp_apply_grads(rank.model, grads.data(), grads.size(), sizeof(fsdp_grad), 0.01, 0.5, nullptr, nullptr,
                                &norm));
        } else {
          size_t end = grads.size();
          for (size_t g = rank.groups.size(); g-- > 0;) {
            end -= rank.def(g).params.size();
            for (size_t p = 0; p < rank.def(g).params.size(); ++p)
              FSDP(fsdp_put_grad(rank.groups[g], p, grads[end + p].data, FSDP_FLOAT32, grads[end + p].element_count, 0,
                                 nullptr));
            FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
          }
          FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
          FSDP(fsdp_clip_grads(rank.model, nullptr, 0.5, nullptr, &norm));
          FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
        }
        const auto weights = rank.read_all();
        if (r == 0 && !at_once) expected = weights, expected_norm = norm;
        if (at_once) REQUIRE(same_bits(weights, expected) && norm == expected_norm && norm > 0.5);
        FSDP(fsdp_close_context(context));
      });
  }
}

// No factor makes such gradients small. Finite gradients keep their bits, and the norm shows the problem.
TEST(Grads, ANormThatIsNotFiniteClipsNothing) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    on_every_strategy([bad](Rank &rank) {
      for (size_t g = rank.groups.size(); g-- > 0;) {
        put_all(rank, g, 3.0f);
        if (g == 0 && rank.rank == 1) {
          std::vector<float> values(37 * 24, 3.0f);
          values[5] = bad;
          FSDP(fsdp_put_grad(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), 0, nullptr));
        }
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
      const auto grads = [&] {
        std::vector<std::vector<float>> values;
        for (const fsdp_shard &shard : rank.shards())
          values.emplace_back(main_grad(shard), main_grad(shard) + shard.element_count);
        return values;
      };
      const auto before = grads();
      double norm = 0;
      FSDP(fsdp_clip_grads(rank.model, nullptr, 0.5, nullptr, &norm));
      REQUIRE(std::isinf(bad) ? std::isinf(norm) : std::isnan(norm));
      REQUIRE(same_bits(grads(), before));
      fsdp_mesh *further = make_mesh(rank.context, {rank.rank});  // as the mesh of other models
      FSDP(fsdp_clip_grads(rank.model, further, 0.5, nullptr, &norm));
      fsdp_destroy_mesh(further);
      REQUIRE(std::isinf(bad) ? std::isinf(norm) : std::isnan(norm));
      REQUIRE(same_bits(grads(), before));
      FSDP(fsdp_discard_step(rank.model, nullptr));
    });
}

TEST(Grads, NormsNamesAndFoundInfAreTheSameOnEveryRank) {
  on_every_strategy([](Rank &rank) {
    for (int s = 0; s < 2; ++s) {
      for (size_t g = rank.groups.size(); g-- > 0;) {
        put_all(rank, g, 2.0f);
        if (s == 1 && rank.rank == 1 && g == 2) {
          std::vector<float> bad(129 * 3, 1.0f);
          bad[200] = std::numeric_limits<float>::infinity();
          FSDP(fsdp_put_grad(rank.groups[2], 1, bad.data(), FSDP_FLOAT32, bad.size(), 0, nullptr));
        }
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, nullptr));
      int32_t found = -1;
      const char *name = nullptr;
      FSDP(fsdp_check_grads(rank.model, nullptr, &found, &name));
      if (s == 1) {
        REQUIRE(found == 1 && std::string(name) == "l1.tall");
        FSDP(fsdp_discard_step(rank.model, nullptr));
        continue;
      }
      REQUIRE(found == 0 && name == nullptr);
      std::vector<double> norms(10);
      FSDP(fsdp_get_param_grad_norms(rank.model, nullptr, norms.data(), norms.size()));
      size_t i = 0;
      double squares = 0;
      for (const GroupDef &group : rank.setup.groups)
        for (const ParamDef &param : group.params) {
          REQUIRE(std::abs(norms[i] - 2.0 * std::sqrt(double(param.count()))) < 1e-9 * norms[i]);
          squares += norms[i] * norms[i];
          ++i;
        }
      double norm = 0;
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm));
      REQUIRE(std::abs(norm - std::sqrt(squares)) < 1e-9 * norm);
      FSDP(fsdp_scale_grads(rank.model, 0.5, nullptr));
      double half = 0;
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &half));
      REQUIRE(half == norm / 2);
      FSDP(fsdp_publish_weights(rank.model, nullptr));
    }
  });
}

// One rank has no late peers, so it does a short reduce itself. That time counts as exposed communication.
TEST(Grads, AShortReduceWakesNoThread) {
  for (const bool is_short : {true, false}) {
    SCOPED_TRACE(is_short ? "short" : "long");
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
    scenario.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
    scenario.model.reduce_policy = FSDP_REDUCE_POLICY_EACH;
    scenario.groups = equal_groups(2, is_short ? 32 : 1100, 1000);
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      const auto await_sleep = [] {  // threads of the library spin first
        while (!fsdp::test::all_sleep("fsdp-reduce")) pause_ms(1);
      };
      const auto contribute = [&](size_t g) {
        put_all(rank, g, 1);
        await_sleep();
        FSDP(fsdp_reduce_grad(rank.groups[g], 0, nullptr));
        await_sleep();
      };
      for (const size_t g : {1, 0}) contribute(g);
      const uint64_t before = fsdp::test::sleeps_of("fsdp-reduce"), waited = rank.stats().reduce_wait_ns;
      for (size_t i = 10; i-- > 0;) contribute(i % 2);
      const uint64_t sleeps = fsdp::test::sleeps_of("fsdp-reduce") - before;
      REQUIRE(is_short ? sleeps == 0 : sleeps >= 10);
      if (is_short) REQUIRE(rank.stats().reduce_wait_ns > waited);
      FSDP(fsdp_discard_step(rank.model, nullptr));
      FSDP(fsdp_close_context(context));
    });
  }
}

}  // namespace
