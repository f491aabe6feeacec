// SPDX-License-Identifier: Apache-2.0
// Gradients in any order, none of them, all at once; their norms, and what is not finite.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "harness.h"

using namespace harness;

namespace {

// On three ranks, their weights loaded, for every strategy.
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

TEST(Grads, ComeInAnyOrder) {
  on_every_strategy([](Rank &rank) {
    for (const size_t g : {2u, 0u, 3u, 1u}) {
      put_all(rank, g, static_cast<float>(rank.rank));
      FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
    }
    FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
    for (const fsdp_shard &shard : rank.shards()) REQUIRE(shard.main_grad[0] == 1.0f);
    FSDP(fsdp_publish_weights(rank.model, nullptr));
  });
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
        FSDP(fsdp_put_grad(rank.groups[0], 0, nullptr, 0, 0, nullptr));
      else
        put_all(rank, 0, 3.0f);
      FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, nullptr));
      FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
      for (const fsdp_shard &shard : rank.shards())
        if (shard.group == rank.groups[0]) REQUIRE(std::abs(shard.main_grad[0] - 2.0f) < 1e-6f);
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
          FSDP(fsdp_apply_grads(rank.model, grads.data(), grads.size(), 0.01, 0.5, nullptr, nullptr, &norm));
        } else {
          size_t end = grads.size();
          for (size_t g = rank.groups.size(); g-- > 0;) {
            end -= rank.def(g).params.size();
            for (size_t p = 0; p < rank.def(g).params.size(); ++p)
              FSDP(fsdp_put_grad(rank.groups[g], p, grads[end + p].data, FSDP_FLOAT32, grads[end + p].element_count,
                                 nullptr));
            FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
          }
          FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
          FSDP(fsdp_clip_grads(rank.model, 0.5, nullptr, &norm));
          FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
        }
        const auto weights = rank.read_all();
        if (r == 0 && !at_once) expected = weights, expected_norm = norm;
        if (at_once) REQUIRE(same_bits(weights, expected) && norm == expected_norm && norm > 0.5);
        FSDP(fsdp_close_context(context));
      });
  }
}

TEST(Grads, NormsNamesAndFoundInfAreTheSameOnEveryRank) {
  on_every_strategy([](Rank &rank) {
    for (int s = 0; s < 2; ++s) {
      for (size_t g = rank.groups.size(); g-- > 0;) {
        put_all(rank, g, 2.0f);
        if (s == 1 && rank.rank == 1 && g == 2) {
          std::vector<float> bad(129 * 3, 1.0f);
          bad[200] = std::numeric_limits<float>::infinity();
          FSDP(fsdp_put_grad(rank.groups[2], 1, bad.data(), FSDP_FLOAT32, bad.size(), nullptr));
        }
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
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
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, &norm));
      REQUIRE(std::abs(norm - std::sqrt(squares)) < 1e-9 * norm);
      FSDP(fsdp_scale_grads(rank.model, 0.5, nullptr));
      double half = 0;
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, &half));
      REQUIRE(half == norm / 2);
      FSDP(fsdp_publish_weights(rank.model, nullptr));
    }
  });
}

}  // namespace
