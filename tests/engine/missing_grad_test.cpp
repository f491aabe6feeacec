// SPDX-License-Identifier: Apache-2.0
// FSDP_MISSING_GRAD_SKIP: a step leaves a parameter unchanged if no rank has given it a gradient.
#include <gtest/gtest.h>

#include <algorithm>

#include "device.h"
#include "every_setup.h"
#include "kept.h"
#include "misuse.h"

using namespace harness;

namespace missing_grad {
namespace {

// One parameter, a whole group, several of several groups, all.
bool keeps(uint32_t step, uint32_t ordinal) {
  switch (step % 4) {
    case 0: return ordinal == 3;
    case 1: return ordinal == 0 || ordinal == 1 || ordinal == 6 || ordinal >= 8;
    case 2: return true;
    default: return false;
  }
}

TEST(MissingGrad, StepSkipsParametersWithoutAGradientOnAnyRank) { expect_as_restored(Way::skipped, keeps); }

Scenario skipping(Scenario setup) {
  for (GroupDef &group : setup.groups)
    for (ParamDef &param : group.params) param.missing_grad = FSDP_MISSING_GRAD_SKIP;
  return setup;
}

void put(Rank &rank, size_t g, size_t p, float value) {
  const std::vector<float> values(rank.def(g).params[p].count(), value);
  const Placed placed(values);
  FSDP(fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, values.size(), 0, stream()));
}

void put_none(Rank &rank, size_t g, size_t p) { FSDP(fsdp_put_grad(rank.groups[g], p, nullptr, 0, 0, 0, stream())); }

void acquire_zeroed(Rank &rank, size_t g, size_t p) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  FSDP(fsdp_acquire_grad(rank.groups[g], p, FSDP_GRAD_ZEROED, stream(), &grad, nullptr));
}

using Given = std::function<void(Rank &rank, size_t g, size_t p)>;

// All parameters get a gradient of 1, except 'l0.w1', for which `give` decides.
void reduce(Rank &rank, const Given &give, uint32_t flags = FSDP_LAST) {
  for (size_t g = 4; g-- > 0;) {
    for (size_t p = 0; p < rank.def(g).params.size(); ++p) g == 1 && p == 2 ? give(rank, g, p) : put(rank, g, p, 1);
    FSDP(fsdp_reduce_grad(rank.groups[g], flags, stream()));
  }
}

void step(Rank &rank, const Given &give) {
  reduce(rank, give);
  FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
  update(rank);
}

std::vector<float> average(const Rank &rank) {
  std::vector<float> values(rank.def(1).params[2].count());
  FSDP(fsdp_read_state(rank.groups[1], 2, "exp_avg", values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
  return values;
}

// The case that frameworks need: torch.optim leaves a parameter without a gradient unchanged.
TEST(MissingGrad, ZerosChangeAWeightAndNoGradientDoesNot) {
  for (const fsdp_strategy strategy : strategies)
    for (const uint32_t ranks : {1u, 2u})
      for (const fsdp_missing_grad missing : {0, FSDP_MISSING_GRAD_ZEROS + 0, FSDP_MISSING_GRAD_SKIP + 0}) {
        Scenario setup = scenario_of(strategy, ranks);
        setup.weight_decay = 0.1;
        setup.groups[1].params[2].missing_grad = missing;
        run_threads(setup, [&](uint32_t, fsdp_context *context) {
          Rank rank(context, setup);
          fsdp_param info = FSDP_PARAM_INIT;
          FSDP(fsdp_get_param_info(rank.groups[1], 2, &info));
          REQUIRE(info.missing_grad == (missing ? missing : FSDP_MISSING_GRAD_ZEROS));
          rank.load();
          const auto one = [](Rank &own, size_t g, size_t p) { put(own, g, p, 1); };
          step(rank, one);
          const std::vector<float> weights = rank.read(1, 2), averages = average(rank), other = rank.read(1, 0);
          step(rank, put_none);
          const bool skips = missing == FSDP_MISSING_GRAD_SKIP;
          REQUIRE((rank.read(1, 2) == weights) == skips);
          REQUIRE((average(rank) == averages) == skips);
          REQUIRE(rank.read(1, 0) != other);
          REQUIRE(rank.stats().step == 2);
          step(rank, one);
          REQUIRE(rank.read(1, 2) != weights && average(rank) != averages);
          FSDP(fsdp_close_context(context));
        });
      }
}

// One rank of any place in the mesh, in any contribution, by any call.
TEST(MissingGrad, GradientOfOneRankCountsForAll) {
  const Given ways[] = {[](Rank &rank, size_t g, size_t p) { put(rank, g, p, 0); }, acquire_zeroed,
                        [](Rank &rank, size_t g, size_t p) {
                          put_none(rank, g, p);
                          put(rank, g, p, 1);
                          put_none(rank, g, p);
                        }};
  for (int mesh = 0; mesh < 4; ++mesh)
    for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
      for (uint32_t giver = 0; giver < (mesh ? 4u : 3u); ++giver) {
        Scenario setup = skipping(scenario_of(strategy, mesh ? 4 : 3));
        if (mesh == 1 || mesh == 2) setup.mesh.replicate_size = setup.mesh.shard_size = 2;
        if (mesh == 2) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
        if (mesh == 3) setup.context.ranks_per_host = 2;
        SCOPED_TRACE("mesh " + std::to_string(mesh) + ", giver " + std::to_string(giver));
        run_threads(setup, [&](uint32_t r, fsdp_context *context) {
          Rank rank(context, setup);
          rank.load();
          for (const Given &give : ways) {
            const std::vector<float> weights = rank.read(1, 2);
            step(rank, r == giver ? give : put_none);
            REQUIRE(rank.read(1, 2) != weights);
            const std::vector<float> then = rank.read(1, 2);
            step(rank, put_none);
            REQUIRE(rank.read(1, 2) == then);
          }
          // In one contribution of three.
          const std::vector<float> weights = rank.read(1, 2);
          reduce(rank, put_none, 0);
          reduce(rank, r == giver ? ways[0] : put_none, 0);
          step(rank, put_none);
          REQUIRE(rank.read(1, 2) != weights);
          FSDP(fsdp_close_context(context));
        });
      }
}

// A step of 'l0.w1' by a gradient that all ranks put, or that none of them puts and all load.
struct LoadedStep {
  std::vector<float> grad, weights, averages;
  double norm = 0;
};

void load(Rank &rank, const std::vector<float> &grad, int32_t root) {
  const bool gives = root == FSDP_EVERY_RANK || static_cast<uint32_t>(root) == rank.rank;
  FSDP(fsdp_load_grad(rank.groups[1], 2, gives ? grad.data() : nullptr, FSDP_FLOAT32, grad.size(), root, 0));
}

LoadedStep step_once(Rank &rank, const std::vector<float> *loaded, int32_t root) {
  LoadedStep step;
  reduce(rank, loaded ? put_none : Given([](Rank &own, size_t g, size_t p) { put(own, g, p, 0.75f); }));
  FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
  if (loaded) load(rank, *loaded, root);
  step.grad.resize(rank.def(1).params[2].count());
  FSDP(fsdp_read_grad(rank.groups[1], 2, step.grad.data(), FSDP_FLOAT32, step.grad.size(), FSDP_EVERY_RANK, 0));
  FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), &step.norm));
  update(rank);
  step.weights = rank.read(1, 2);
  step.averages = average(rank);
  return step;
}

// In some steps its neighbours get gradients: the bits are those of a parameter that got one too.
TEST(MissingGrad, LoadedGradientCountsAsGiven) {
  for (const fsdp_strategy strategy : strategies)
    for (const Axes axes : every_axes) {
      Scenario setup = setup_over(axes, strategy, 4);
      setup.weight_decay = 0.1;
      setup.groups[1].params[2].missing_grad = FSDP_MISSING_GRAD_SKIP;
      SCOPED_TRACE("strategy " + std::to_string(strategy) + ", axes " + std::to_string(static_cast<int>(axes)));
      const int32_t roots[] = {FSDP_EVERY_RANK, 3};
      std::vector<LoadedStep> expected;
      for (const bool loads : {false, true})
        run_threads(setup, [&](uint32_t r, fsdp_context *context) {
          Rank rank(context, setup);
          rank.load();
          for (size_t s = 0; s < 2; ++s) {
            const LoadedStep found = step_once(rank, loads ? &expected[s].grad : nullptr, roots[s]);
            REQUIRE(!loads || (same_bits({found.grad, found.weights, found.averages},
                                         {expected[s].grad, expected[s].weights, expected[s].averages}) &&
                               found.norm == expected[s].norm));
            step(rank, put_none);
            REQUIRE(rank.read(1, 2) == found.weights && average(rank) == found.averages);
            if (!loads && r == 0) expected.push_back(found);
          }
          FSDP(fsdp_close_context(context));
        });
    }
}

TEST(MissingGrad, DiscardForgetsGivenGradients) {
  const Scenario setup = skipping(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2));
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const std::vector<float> weights = rank.read(1, 2);
    for (const bool ended : {false, true}) {
      reduce(rank, [&](Rank &own, size_t g, size_t p) { r ? put_none(own, g, p) : put(own, g, p, 1); });
      if (ended) FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
      if (ended) load(rank, weights, 0);
      FSDP(fsdp_discard_step(rank.model, stream()));
      step(rank, put_none);
      REQUIRE(rank.read(1, 2) == weights);
    }
    FSDP(fsdp_close_context(context));
  });
}

TEST(MissingGrad, AppliedGradientsMayBeMissing) {
  const Scenario setup = skipping(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2));
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const std::vector<float> one(2000, 1.0f);
    const Placed placed(one);
    std::vector<fsdp_grad> grads;
    for (const GroupDef &group : setup.groups)
      for (const ParamDef &param : group.params) grads.push_back({placed.data(), param.count(), FSDP_FLOAT32, 0});
    grads[3].data = grads[9].data = nullptr;
    if (r) grads[5].data = nullptr;
    const auto before = rank.read_all();
    double norm = 0;
    FSDP(
        fsdp_apply_grads(rank.model, grads.data(), grads.size(), sizeof(fsdp_grad), 0.01, 1, nullptr, stream(), &norm));
    const auto after = rank.read_all();
    for (size_t p = 0; p < after.size(); ++p) REQUIRE((before[p] == after[p]) == (p == 3 || p == 9));
    FSDP(fsdp_close_context(context));
  });
}

// An untrained parameter is kept, whatever its missing_grad is. When it is trained again, it is skipped or stepped as
// before.
TEST(MissingGrad, WorksBesideUntrainedParameters) {
  const Scenario setup = skipping(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2));
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const std::vector<float> weights = rank.read(1, 2);
    FSDP(fsdp_set_param_trainable(rank.groups[1], 2, 0));
    step(rank, [](Rank &, size_t, size_t) {});
    REQUIRE(rank.read(1, 2) == weights);
    FSDP(fsdp_set_param_trainable(rank.groups[1], 2, 1));
    step(rank, put_none);
    REQUIRE(rank.read(1, 2) == weights);
    FSDP(fsdp_set_param_lr_scale(rank.groups[1], 2, 2));
    step(rank, put_none);
    REQUIRE(rank.read(1, 2) == weights);
    step(rank, [](Rank &own, size_t g, size_t p) { put(own, g, p, 1); });
    REQUIRE(rank.read(1, 2) != weights);
    FSDP(fsdp_close_context(context));
  });
}

// An lr_scale may change where the step is already known to skip: batches are made anew.
TEST(MissingGrad, LrScaleSetInTheWindowChangesNothing) {
  const Scenario setup = skipping(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2));
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const auto before = rank.read_all();
    reduce(rank, put_none);
    FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
    FSDP(fsdp_set_param_lr_scale(rank.groups[1], 2, 2));
    FSDP(fsdp_set_param_lr_scale(rank.groups[1], 0, 2));
    update(rank);
    const auto after = rank.read_all();
    for (size_t p = 0; p < after.size(); ++p) REQUIRE((before[p] == after[p]) == (p == 3));
    FSDP(fsdp_close_context(context));
  });
}

// The flags of shards tell the caller's own optimizer, on every rank that has a part.
TEST(MissingGrad, ShardFlagsTellTheCallersOptimizer) {
  Scenario setup = skipping(scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2));
  setup.model.optimizer = FSDP_OPTIMIZER_CALLER;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const auto shown = [&](uint64_t param) {
      for (const fsdp_shard &shard : rank.shards())
        if (shard.group == rank.groups[1] && shard.param_index == param) return !!(shard.flags & FSDP_PARAM_FROZEN);
      return false;
    };
    for (const uint32_t giver : {2u, 0u, 1u}) {
      REQUIRE(!shown(2));
      reduce(rank, r == giver ? [](Rank &own, size_t g, size_t p) { put(own, g, p, 1); } : Given(put_none));
      REQUIRE(!shown(2));
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
      REQUIRE(shown(2) == (giver == 2) && !shown(0));
      FSDP(fsdp_publish_weights(rank.model, stream()));
    }
    FSDP(fsdp_begin_update(rank.model, stream()));
    REQUIRE(!shown(2));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

TEST(MissingGrad, MustBeDeclaredAlike) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Scenario mine = setup;
    if (r) mine.groups[1].params[2].missing_grad = FSDP_MISSING_GRAD_SKIP;
    Rank rank(context, mine, false);
    require_error(fsdp_seal_model(rank.model), FSDP_MISMATCH, {"'l0.w1' of group 'layer.0'", "FSDP_MISSING_GRAD_SKIP"});
  });
}

// The option has no effect on a frozen parameter, which never has a gradient.
TEST(MissingGrad, OfAFrozenParameterHasNoEffect) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups[1].params[2].flags = FSDP_PARAM_FROZEN;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Scenario mine = setup;
    if (r) mine.groups[1].params[2].missing_grad = FSDP_MISSING_GRAD_SKIP;
    Rank rank(context, mine);
    fsdp_param info = FSDP_PARAM_INIT;
    FSDP(fsdp_get_param_info(rank.groups[1], 2, &info));
    REQUIRE(info.missing_grad == (r ? FSDP_MISSING_GRAD_SKIP : FSDP_MISSING_GRAD_ZEROS));
    rank.load();
    step(rank, [](Rank &, size_t, size_t) {});
    FSDP(fsdp_close_context(context));
  });
}

TEST(MisusedMissingGrad, InvalidFieldsAndCapturesAreRefused) {
  misuse::Solo solo(misuse::State::published, skipping(misuse::small_setup()));
  EXPECT_FAILS(FSDP_UNSUPPORTED, fsdp_begin_capture(solo.model, nullptr), "fsdp_begin_capture", "'alpha.w'", "'alpha'",
               "FSDP_MISSING_GRAD_SKIP", "FSDP_MISSING_GRAD_ZEROS");
  solo.clean_step();
}

}  // namespace
}  // namespace missing_grad
