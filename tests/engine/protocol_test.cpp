// SPDX-License-Identifier: Apache-2.0
// The legal ways to use a model that are not the plain loop: tied parameters, several holds, gradients in any order, none,
// discarded steps, explicit schedules, the caller's own optimizer and memory.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "harness.h"

using namespace harness;

namespace {

Scenario scenario_of(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario scenario;
  scenario.ranks = ranks;
  scenario.model.strategy = strategy;
  scenario.model.unshard_mode = mode;
  scenario.groups = odd_groups();
  return scenario;
}

void put_all(Rank &rank, size_t g, float value) {
  for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
    const std::vector<float> grad(rank.def(g).params[p].count(), value);
    FSDP(fsdp_put_grad(rank.groups[g], p, grad.data(), FSDP_FLOAT32, grad.size(), nullptr));
  }
}

double first_grad(Rank &rank) {
  fsdp_shard shard = FSDP_SHARD_INIT;
  FSDP(fsdp_get_shard(rank.model, 0, &shard));
  return shard.main_grad[0];
}

void step(Rank &rank) {
  FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
  FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
}

#define REQUIRE(condition) \
  if (!(condition)) throw std::runtime_error("not true: " #condition)

template <class Body>
void expect_error(fsdp_status status, const std::string &part, Body body) {
  const fsdp_status got = body();
  const std::string message = got ? last_message() : "";
  if (got != status || message.find(part) == std::string::npos)
    throw std::runtime_error("expected " + std::string(fsdp_get_status_name(status)) + " with '" + part + "', got " +
                             fsdp_get_status_name(got) + ": " + message);
}

TEST(Protocol, ATiedEmbeddingIsVisitedFirstAndLast) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 3, mode);
    scenario.schedule = FSDP_SCHEDULE_VISITS;
    for (const uint32_t g : {0u, 1u, 2u, 3u, 0u}) scenario.visits.push_back({g, FSDP_FORWARD});
    for (const uint32_t g : {0u, 3u, 2u, 1u, 0u}) scenario.visits.push_back({g, FSDP_BACKWARD});
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      for (int s = 0; s < 3; ++s) {
        for (const fsdp_visit &visit : scenario.visits) {
          fsdp_group *group = rank.groups[visit.group_index];
          FSDP(fsdp_unshard(group, visit.phase, nullptr));
          REQUIRE(rank.view(visit.group_index, 0, visit.phase) == rank.view(visit.group_index, 0, visit.phase));
          if (visit.phase == FSDP_BACKWARD) put_all(rank, visit.group_index, 1.0f);
          FSDP(fsdp_reshard(group, visit.phase, nullptr));
          // The embedding is reduced once, when its second backward visit has added its part.
          const bool first_visit_back = &visit == &scenario.visits[5];
          if (visit.phase == FSDP_BACKWARD && !first_visit_back) FSDP(fsdp_reduce_grad(group, FSDP_LAST, nullptr));
        }
        FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
        fsdp_shard shard = FSDP_SHARD_INIT;
        uint64_t count = 0;
        FSDP(fsdp_get_shard_count(rank.model, &count));
        for (uint64_t i = 0; i < count; ++i) {
          FSDP(fsdp_get_shard(rank.model, i, &shard));
          REQUIRE(shard.main_grad[0] == (shard.group == rank.groups[0] ? 2.0f : 1.0f));
        }
        FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
      }
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Protocol, TwoMicrobatchesHoldOneGroup) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 2, mode);
    scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, nullptr));
      const uint64_t before = rank.stats().gathers;
      FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, nullptr));
      FSDP(fsdp_unshard(rank.groups[1], FSDP_BACKWARD, nullptr));
      REQUIRE(rank.stats().gathers == before);
      const auto weights = rank.view(1, 0, FSDP_FORWARD);
      FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, nullptr));
      FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, nullptr));
      REQUIRE(rank.view(1, 0, FSDP_BACKWARD) == weights);
      FSDP(fsdp_reshard(rank.groups[1], FSDP_BACKWARD, nullptr));
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Protocol, GradientsComeInAnyOrder) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4}) {
    const Scenario scenario = scenario_of(strategy, 3);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      for (const size_t g : {2u, 0u, 3u, 1u}) {
        put_all(rank, g, static_cast<float>(r));
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
      REQUIRE(first_grad(rank) == 1.0);
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Protocol, NoneIsAnErrorUnlessSaidAndThenCountsAsZeros) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4}) {
    const Scenario scenario = scenario_of(strategy, 3);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      for (int s = 0; s < 2; ++s) {
        for (size_t g = 1; g < rank.groups.size(); ++g) {
          put_all(rank, g, 1.0f);
          FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
        }
        expect_error(FSDP_INVALID_STATE, "'embed.w'", [&] { return fsdp_reduce_grad(rank.groups[0], FSDP_LAST, nullptr); });
        // Rank 1 has none, the others do: (3 + 0 + 3) / 3.
        if (r == 1) FSDP(fsdp_put_grad(rank.groups[0], 0, nullptr, 0, 0, nullptr));
        else put_all(rank, 0, 3.0f);
        FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, nullptr));
        FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
        uint64_t count = 0;
        FSDP(fsdp_get_shard_count(rank.model, &count));
        if (count) {
          fsdp_shard shard = FSDP_SHARD_INIT;
          FSDP(fsdp_get_shard(rank.model, 0, &shard));
          if (shard.group == rank.groups[0]) REQUIRE(std::abs(shard.main_grad[0] - 2.0f) < 1e-6f);
        }
        FSDP(fsdp_publish_weights(rank.model, nullptr));
      }
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Protocol, AnExceptionInForwardThenDiscardThenACleanStep) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario scenario = scenario_of(strategy, 3, mode);
      scenario.steps = 1;
      const auto expected = train_threads(scenario)[0];
      run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, scenario);
        rank.load();
        // Each rank is somewhere else when it gives up.
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, nullptr));
        if (r > 0) {
          put_all(rank, 3, 100.0f);
          FSDP(fsdp_reduce_grad(rank.groups[3], 0, nullptr));
        }
        if (r > 1) {
          put_all(rank, 2, 100.0f);
          fsdp_tensor grad = FSDP_TENSOR_INIT;
          int32_t accumulate = -1;
          FSDP(fsdp_acquire_grad(rank.groups[2], 0, nullptr, &grad, &accumulate));
          REQUIRE(accumulate == 1);
        }
        FSDP(fsdp_discard_step(rank.model, nullptr));
        forward(rank, nullptr);
        backward(rank, 0, 0, nullptr);
        FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
        double norm = 0;
        FSDP(fsdp_get_grad_norm(rank.model, nullptr, &norm));
        REQUIRE(norm == expected.norms[0]);
        fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
        adamw.weight_decay = scenario.weight_decay;
        FSDP(fsdp_step_adamw(rank.model, 0.01, &adamw, nullptr));
        size_t i = 0;
        for (size_t g = 0; g < rank.groups.size(); ++g)
          for (size_t p = 0; p < rank.def(g).params.size(); ++p) REQUIRE(rank.read(g, p) == expected.weights[i++]);
        FSDP(fsdp_close_context(context));
      });
    }
}

TEST(Protocol, DiscardInTheWindowSkipsTheStep) {
  const Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 2);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    const auto before = rank.read(1, 0);
    forward(rank, nullptr);
    backward(rank, 0, 0, nullptr);
    FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
    FSDP(fsdp_discard_step(rank.model, nullptr));
    REQUIRE(rank.stats().version == 1);
    REQUIRE(rank.read(1, 0) == before);
    forward(rank, nullptr);
    backward(rank, 0, 0, nullptr);
    step(rank);
    REQUIRE(rank.stats().version == 2);
    FSDP(fsdp_close_context(context));
  });
}

TEST(Protocol, ADeviationFromTheScheduleNamesBothGroups) {
  Scenario scenario;
  scenario.ranks = 2;
  scenario.model.unshard_mode = FSDP_UNSHARD_COPIED;
  scenario.groups = equal_groups(6, 32, 16);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, nullptr));
    FSDP(fsdp_unshard(rank.groups[1], FSDP_FORWARD, nullptr));
    expect_error(FSDP_INVALID_STATE, "'layer.2'", [&] { return fsdp_unshard(rank.groups[2], FSDP_FORWARD, nullptr); });
    REQUIRE(last_message().find("'layer.0'") != std::string::npos);
    FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, nullptr));
    FSDP(fsdp_unshard(rank.groups[2], FSDP_FORWARD, nullptr));
    FSDP(fsdp_reshard(rank.groups[1], FSDP_FORWARD, nullptr));
    FSDP(fsdp_reshard(rank.groups[2], FSDP_FORWARD, nullptr));
    // Visits in an order of their own still show the right weights; prefetches that nobody used are dropped.
    for (const size_t g : {0u, 3u, 5u, 4u, 1u, 2u}) {
      FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, nullptr));
      const auto view = rank.view(g, 0, FSDP_FORWARD);
      for (uint64_t i = 0; i < view.size(); ++i) REQUIRE(view[i] == initial_weight(static_cast<uint32_t>(g), i));
      FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, nullptr));
    }
    REQUIRE(rank.stats().dropped_prefetches > 0);
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

TEST(Protocol, AResidentGroupIsGatheredOnceAStep) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario;
    scenario.ranks = 2;
    scenario.steps = 2;
    scenario.model.unshard_mode = mode;
    scenario.groups = equal_groups(6, 32, 16);
    scenario.groups[0].options.flags = FSDP_GROUP_RESIDENT;
    const auto outcomes = train_threads(scenario);
    EXPECT_EQ(outcomes[0].stats.gathers, 2u * (2 * 6 - 2));
    EXPECT_LE(relative_l2(outcomes[1].weights[0], reference(scenario).weights[0]), 1e-5);
  }
}

TEST(Protocol, InterleavedForwardAndBackwardHoldTheSameGroups) {
  for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 2, mode);
    scenario.microbatches = 4;
    scenario.steps = 2;
    const auto expected = train_threads(scenario);
    scenario.schedule = FSDP_SCHEDULE_INTERLEAVED;
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      fsdp_adamw_options adamw = FSDP_ADAMW_OPTIONS_INIT;
      adamw.weight_decay = scenario.weight_decay;
      const size_t n = rank.groups.size();
      for (uint32_t s = 0; s < scenario.steps; ++s) {
        forward(rank, nullptr);
        for (uint32_t m = 0; m < scenario.microbatches; ++m)
          for (size_t i = 0; i < n; ++i) {
            // Forward of the next micro-batch at group i while backward of this one is at group n - 1 - i.
            const bool more = m + 1 < scenario.microbatches;
            if (more) FSDP(fsdp_unshard(rank.groups[i], FSDP_FORWARD, nullptr));
            backward_group(rank, n - 1 - i, s, m, nullptr);
            if (more) {
              rank.view(i, 0, FSDP_FORWARD);
              FSDP(fsdp_reshard(rank.groups[i], FSDP_FORWARD, nullptr));
            }
          }
        FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
        FSDP(fsdp_step_adamw(rank.model, 0.01, &adamw, nullptr));
      }
      size_t i = 0;
      for (size_t g = 0; g < n; ++g)
        for (size_t p = 0; p < rank.def(g).params.size(); ++p) REQUIRE(rank.read(g, p) == expected[0].weights[i++]);
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Protocol, LoadingFromOneRootEqualsLoadingEverywhere) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4})
    for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
      Scenario scenario = scenario_of(strategy, 3, mode);
      scenario.groups.push_back({"large", {{"large.w", {700, 513}}}});
      run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, scenario);
        for (size_t g = 0; g < rank.groups.size(); ++g)
          for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
            std::vector<float> data(rank.def(g).params[p].count());
            for (uint64_t i = 0; i < data.size(); ++i) data[i] = initial_weight(static_cast<uint32_t>(10 * g + p), i);
            FSDP(fsdp_load_param(rank.groups[g], p, r == 2 ? data.data() : nullptr, FSDP_FLOAT32, data.size(), 2));
            REQUIRE(rank.read(g, p) == data);
          }
        FSDP(fsdp_publish_weights(rank.model, nullptr));
        FSDP(fsdp_unshard(rank.groups[4], FSDP_EVAL, nullptr));
        REQUIRE(rank.view(4, 0, FSDP_EVAL) == rank.read(4, 0));
        FSDP(fsdp_reshard(rank.groups[4], FSDP_EVAL, nullptr));
        FSDP(fsdp_close_context(context));
      });
    }
}

TEST(Protocol, TheCallersOptimizerOwnsNamedStates) {
  for (const fsdp_strategy strategy : {1, 4}) {
    Scenario scenario = scenario_of(strategy, 3);
    scenario.model.optimizer = FSDP_OPTIMIZER_CALLER;
    run_threads(scenario, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, scenario, false);
      FSDP(fsdp_add_optimizer_state(rank.model, "momentum", FSDP_FLOAT32));
      FSDP(fsdp_seal_model(rank.model));
      rank.load();
      uint64_t count = 0;
      FSDP(fsdp_get_shard_count(rank.model, &count));
      for (int s = 0; s < 2; ++s) {
        forward(rank, nullptr);
        for (size_t g = rank.groups.size(); g-- > 0;) {
          put_all(rank, g, 1.0f);
          FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
        }
        FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
        for (uint64_t i = 0; i < count; ++i) {
          fsdp_shard shard = FSDP_SHARD_INIT;
          fsdp_tensor momentum = FSDP_TENSOR_INIT;
          FSDP(fsdp_get_shard(rank.model, i, &shard));
          FSDP(fsdp_get_shard_state(rank.model, i, "momentum", &momentum));
          REQUIRE(momentum.element_count == shard.element_count && shard.element_count > 0);
          auto *m = static_cast<float *>(momentum.data);
          for (uint64_t e = 0; e < shard.element_count; ++e) {
            m[e] = 0.5f * m[e] + shard.main_grad[e];
            shard.main_weight[e] -= m[e];
          }
        }
        FSDP(fsdp_publish_weights(rank.model, nullptr));
      }
      // 1, then 0.5 * 1 + 1.
      const auto weights = rank.read(0, 0);
      for (uint64_t i = 0; i < weights.size(); ++i) REQUIRE(weights[i] == initial_weight(0, i) - 1.0f - 1.5f);
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Protocol, ApplyGradsEqualsTheCallsItStandsFor) {
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
              FSDP(fsdp_put_grad(rank.groups[g], p, grads[end + p].data, FSDP_FLOAT32, grads[end + p].element_count, nullptr));
            FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
          }
          FSDP(fsdp_finish_grads(rank.model, 1.0, nullptr));
          FSDP(fsdp_clip_grads(rank.model, 0.5, nullptr, &norm));
          FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, nullptr));
        }
        std::vector<std::vector<float>> weights;
        for (size_t g = 0; g < rank.groups.size(); ++g)
          for (size_t p = 0; p < rank.def(g).params.size(); ++p) weights.push_back(rank.read(g, p));
        if (r == 0 && !at_once) expected = weights, expected_norm = norm;
        if (at_once) REQUIRE(same_bits(weights, expected) && norm == expected_norm && norm > 0.5);
        FSDP(fsdp_close_context(context));
      });
  }
}

TEST(Protocol, NormsNamesAndFoundInfAreTheSameOnEveryRank) {
  for (const fsdp_strategy strategy : {1, 2, 3, 4}) {
    const Scenario scenario = scenario_of(strategy, 3);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      for (int s = 0; s < 2; ++s) {
        for (size_t g = rank.groups.size(); g-- > 0;) {
          put_all(rank, g, 2.0f);
          if (s == 1 && r == 1 && g == 2) {
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
        for (const GroupDef &group : scenario.groups)
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
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Protocol, BeginUpdateOpensTheWindowOutsideAStep) {
  const Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 2);
  run_threads(scenario, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    FSDP(fsdp_begin_update(rank.model, nullptr));
    expect_error(FSDP_INVALID_STATE, "no gradients", [&] { return fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr); });
    const std::vector<float> sevens(37 * 24, 7.0f);
    FSDP(fsdp_load_param(rank.groups[0], 0, sevens.data(), FSDP_FLOAT32, sevens.size(), FSDP_EVERY_RANK));
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, nullptr));
    REQUIRE(rank.view(0, 0, FSDP_EVAL) == sevens);
    FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
