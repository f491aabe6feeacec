// SPDX-License-Identifier: Apache-2.0
// fsdp_set_param_trainable: what a step does without a parameter, which ranks must do the same, and when it may be
// called.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>

#include "device.h"
#include "held_up.h"
#include "kept.h"
#include "misuse.h"

using namespace harness;

namespace trainable {
namespace {

// All of group 0 and parts of two, then also all of group 3: ordinals of odd_groups(). Twice each, since what was in
// buffers and main grads before is gone after one step in which nothing takes its place.
bool keeps(uint32_t step, uint32_t ordinal) {
  switch (step % 6) {
    case 1:
    case 2: return ordinal == 0 || ordinal == 1 || ordinal == 6;
    case 3:
    case 4: return ordinal == 0 || (ordinal >= 5 && ordinal != 6) || ordinal == 3;
    default: return false;
  }
}

TEST(Trainable, StepLeavesUntrainedParametersUnchanged) { expect_as_restored(Way::untrained, keeps); }

TEST(Trainable, GroupWithoutTrainedParametersIsNotReduced) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = scenario_of(strategy, 2);
    setup.steps = 6;
    const auto found = train_kept(setup, Way::untrained, keeps);
    for (const KeptTraining &rank : found) {
      std::vector<uint64_t> reduces, bytes;
      for (size_t s = 0; s < rank.stats.size(); ++s) {
        reduces.push_back(rank.stats[s].reduces - (s ? rank.stats[s - 1].reduces : 0));
        bytes.push_back(rank.stats[s].reduced_bytes - (s ? rank.stats[s - 1].reduced_bytes : 0));
      }
      EXPECT_EQ(reduces, (std::vector<uint64_t>{4, 3, 3, 2, 2, 4})) << strategy;
      EXPECT_LT(bytes[1], bytes[0]);
      EXPECT_EQ(bytes[2], bytes[1]);
      EXPECT_LT(bytes[3], bytes[2]);
      EXPECT_EQ(bytes[5], bytes[0]);
    }
  }
}

// With max_pending_bytes a part is reduced when its trained parameters are complete, and never if it has none.
TEST(Trainable, PartsWaitOnlyForTheirTrainedParameters) {
  Scenario setup;
  setup.ranks = 2;
  setup.groups = {{"one", {{"a", {64, 32}}, {"b", {32, 32}}, {"c", {32, 32}}, {"d", {64, 32}}}}};
  setup.model.max_pending_bytes = 16'384;
  setup.context.timeout_ms = 60'000;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const auto step_of = [&](const std::vector<size_t> &trained, const std::vector<uint64_t> &reduces) {
      for (size_t p = 0; p < 4; ++p)
        FSDP(fsdp_set_param_trainable(rank.groups[0], p, std::ranges::count(trained, p) ? 1 : 0));
      const uint64_t before = rank.stats().reduces;
      for (size_t i = 0; i < trained.size(); ++i) {
        const std::vector<float> ones(rank.def(0).params[trained[i]].count(), 1.0f);
        const Placed placed(ones);
        FSDP(fsdp_put_grad(rank.groups[0], trained[i], placed.data(), FSDP_FLOAT32, ones.size(), 0, stream()));
        FSDP(fsdp_complete_grad(rank.groups[0], trained[i], 0, stream()));
        REQUIRE(rank.stats().reduces - before == reduces[i]);
      }
      FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, stream()));
      REQUIRE(rank.stats().reduces - before == reduces.back());
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
      update(rank);
    };
    step_of({3, 2, 1, 0}, {1, 1, 2, 3});
    step_of({3, 1, 0}, {1, 2, 3});
    step_of({3, 0}, {1, 2});
    step_of({2}, {1});
    step_of({3, 2, 1, 0}, {1, 1, 2, 3});
    FSDP(fsdp_close_context(context));
  });
}

TEST(Trainable, MemoryStaysAsItWasPlanned) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const Stats before = rank.stats();
    const std::vector<fsdp_shard> shards = rank.shards();
    for (size_t p = 0; p < 4; ++p) FSDP(fsdp_set_param_trainable(rank.groups[1], p, 0));
    const Stats after = rank.stats();
    REQUIRE(after.allocations == before.allocations && after.allocated_bytes == before.allocated_bytes);
    const std::vector<fsdp_shard> now = rank.shards();
    REQUIRE(now.size() == shards.size());
    for (size_t s = 0; s < shards.size(); ++s)
      REQUIRE(now[s].main_weight == shards[s].main_weight && now[s].main_grad == shards[s].main_grad);
    FSDP(fsdp_close_context(context));
  });
}

// Earlier contents of the main grads do not count, not even an Inf of a discarded step.
TEST(Trainable, OldGradientsCountAsZeros) {
  for (const fsdp_strategy strategy : strategies)
    for (const bool whole : {true, false}) {
      Scenario setup = scenario_of(strategy, 2);
      run_threads(setup, [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        reduce_all(rank, INFINITY);
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
        FSDP(fsdp_discard_step(rank.model, stream()));
        const size_t count = whole ? 4 : 3;
        for (size_t p = 0; p < count; ++p) FSDP(fsdp_set_param_trainable(rank.groups[1], p, 0));
        for (const size_t g : {3, 2, 1, 0}) {
          if (g != 1) put_all(rank, g, 1);
          const std::vector<float> one(1, 1.0f);
          const Placed placed(one);
          if (g == 1 && !whole) FSDP(fsdp_put_grad(rank.groups[1], 3, placed.data(), FSDP_FLOAT32, 1, 0, stream()));
          FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
        }
        FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
        int32_t bad = 1;
        FSDP(fsdp_check_grads(rank.model, stream(), &bad, nullptr));
        REQUIRE(bad == 0);
        uint64_t ones = whole ? 0 : 1;
        for (const size_t g : {0, 2, 3})
          for (const ParamDef &param : rank.def(g).params) ones += param.count();
        double norm = 0;
        FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm));
        REQUIRE(norm == std::sqrt(static_cast<double>(ones)));
        std::vector<double> norms(10);
        FSDP(fsdp_get_param_grad_norms(rank.model, stream(), norms.data(), norms.size()));
        REQUIRE(norms[1] == 0 && norms[2] == 0 && norms[3] == 0 && norms[4] == (whole ? 0 : 1));
        for (const fsdp_shard &shard : rank.shards()) {
          if (shard.group != rank.groups[1] || shard.param_index >= count) continue;
          std::vector<float> grads(shard.element_count, 1.0f);
          copy_out(grads.data(), shard.main_grad, grads.size() * sizeof(float));
          REQUIRE(std::ranges::all_of(grads, [](float grad) { return grad == 0; }));
        }
        update(rank);
        FSDP(fsdp_close_context(context));
      });
    }
}

struct Collectives : std::array<uint64_t, 7> {
  explicit Collectives(const Stats &stats)
      : array{stats.reduces,           stats.all_gathers,           stats.reduce_scatters,  stats.all_reduces,
              stats.outer_all_reduces, stats.outer_reduce_scatters, stats.outer_all_gathers} {}
};

// A step may come to nothing at all.
TEST(Trainable, ModelWithoutTrainedParametersStillSteps) {
  for (const KeptSetup &kept : kept_setups()) {
    const Scenario &setup = kept.scenario;
    SCOPED_TRACE(kept.name);
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      const auto before = rank.read_all();
      for (size_t g = 0; g < rank.groups.size(); ++g)
        for (size_t p = 0; p < rank.def(g).params.size(); ++p)
          if (!(rank.def(g).params[p].flags & FSDP_PARAM_FROZEN)) FSDP(fsdp_set_param_trainable(rank.groups[g], p, 0));
      const Collectives counted(rank.stats());
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
      REQUIRE(Collectives(rank.stats()) == counted);
      double norm = 1;
      FSDP(fsdp_clip_grads(rank.model, nullptr, 1.0, stream(), &norm));
      REQUIRE(norm == 0);
      update(rank);
      REQUIRE(same_bits(rank.read_all(), before) && rank.stats().step == 1);
      FSDP(fsdp_close_context(context));
    });
  }
}

// Main weights that are written in a window are published at its end, also by a step, and also for untrained
// parameters.
TEST(Trainable, LoadedWeightsArePublished) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = scenario_of(strategy, 2);
    setup.set_dtype(FSDP_BFLOAT16);
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
      for (const size_t g : {3, 2, 1}) {
        put_all(rank, g, 1);
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
      }
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
      const std::vector<float> data(rank.def(0).params[0].count(), 3.0f);
      FSDP(fsdp_load_param(rank.groups[0], 0, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0));
      update(rank);
      const auto require_shown = [&](const std::vector<float> &expected) {
        FSDP(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
        REQUIRE(rank.view(0, 0, FSDP_FORWARD) == expected);
        FSDP(fsdp_reshard(rank.groups[0], FSDP_FORWARD, 0, stream()));
      };
      require_shown(data);
      const std::vector<float> again(data.size(), 5.0f);
      FSDP(fsdp_begin_update(rank.model, stream()));
      FSDP(fsdp_load_param(rank.groups[0], 0, again.data(), FSDP_FLOAT32, again.size(), FSDP_EVERY_RANK, 0));
      FSDP(fsdp_publish_weights(rank.model, stream()));
      require_shown(again);
      FSDP(fsdp_close_context(context));
    });
  }
}

TEST(Trainable, AcquireGradsLendsOnlyTrainedParameters) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_set_param_trainable(rank.groups[1], 2, 0));
    for (size_t g = 4; g-- > 0;) {
      const size_t count = rank.def(g).params.size();
      std::vector<fsdp_tensor> grads(count, fsdp_tensor(FSDP_TENSOR_INIT));
      std::vector<int32_t> accumulate(count, 7);
      FSDP(fsdp_acquire_grads(rank.groups[g], FSDP_GRAD_ZEROED, stream(), grads.data(), count, sizeof(fsdp_tensor),
                              accumulate.data()));
      for (size_t p = 0; p < count; ++p) REQUIRE((grads[p].data == nullptr) == (g == 1 && p == 2));
      FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
    }
    FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
    update(rank);
    FSDP(fsdp_close_context(context));
  });
}

// Each group has two parts, of which one is trained. A part of the other group that is lent or not read yet takes the
// other buffer.
TEST(Trainable, PartsWithoutTrainedParametersTakeNoBuffer) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups = equal_groups(2, 64, 32);
  for (GroupDef &group : setup.groups) group.params.push_back({group.name + ".v", {64, 32}});
  setup.model.max_pending_bytes = 2 * 64 * 32 * sizeof(float);
  std::atomic<bool> go{false};
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_set_param_trainable(rank.groups[1], 1, 0));
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
    const auto acquire_all = [&](size_t group, uint32_t flags) {
      std::array<fsdp_tensor, 2> grads{fsdp_tensor(FSDP_TENSOR_INIT), fsdp_tensor(FSDP_TENSOR_INIT)};
      std::array<int32_t, 2> accumulate{};
      FSDP(fsdp_acquire_grads(rank.groups[group], flags | FSDP_GRAD_ZEROED, stream(), grads.data(), 2,
                              sizeof(fsdp_tensor), accumulate.data()));
      REQUIRE(grads[group].data == nullptr && grads[1 - group].data != nullptr);
    };
    const auto reduce = [&](size_t group) { FSDP(fsdp_reduce_grad(rank.groups[group], FSDP_LAST, stream())); };
    const auto end = [&] {
      FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
      update(rank);
    };
    acquire_all(1, 0);
    acquire_all(0, 0);
    reduce(1);
    reduce(0);
    end();
    if (r == 1) await(go);
    acquire_all(1, 0);
    reduce(1);  // the other rank has not come
    acquire_all(0, r == 0 ? FSDP_GRAD_NO_WAIT : 0);
    go = true;
    reduce(0);
    end();
    FSDP(fsdp_close_context(context));
  });
}

TEST(Trainable, AppliedGradientsHaveEntriesForUntrainedParameters) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const std::vector<float> one(2000, 1.0f);
    const Placed placed(one);
    std::vector<fsdp_grad> grads;
    for (const GroupDef &group : setup.groups)
      for (const ParamDef &param : group.params) grads.push_back({placed.data(), param.count(), FSDP_FLOAT32, 0});
    const auto apply = [&] {
      return fsdp_apply_grads(rank.model, grads.data(), grads.size(), sizeof(fsdp_grad), 0.01, 0, nullptr, stream(),
                              nullptr);
    };
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
    FSDP(fsdp_set_param_trainable(rank.groups[2], 1, 0));
    const std::vector<float> kept = rank.read(0, 0), other = rank.read(2, 1), moved = rank.read(2, 0);
    require_error(apply(), FSDP_INVALID_STATE,
                  {"fsdp_apply_grads", "grads[0]", "'embed.w'", "not trained", "fsdp_set_param_trainable"});
    grads[0].data = grads[6].data = nullptr;
    FSDP(apply());
    REQUIRE(rank.read(0, 0) == kept && rank.read(2, 1) == other && rank.read(2, 0) != moved);
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 1));
    grads[0].data = placed.data();
    FSDP(apply());
    REQUIRE(rank.read(0, 0) != kept && rank.read(2, 1) == other);
    FSDP(fsdp_close_context(context));
  });
}

// ---- ranks that differ ----

// One rank leaves a parameter out of what all reduce.
void reduce_without(Rank &rank, bool leaves_out, size_t group, size_t param) {
  for (size_t g = 4; g-- > 0;) {
    for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
      if (leaves_out && g == group && p == param) continue;
      const std::vector<float> ones(rank.def(g).params[p].count(), 1.0f);
      const Placed placed(ones);
      FSDP(fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, ones.size(), 0, stream()));
    }
    FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
  }
}

Scenario differing(fsdp_strategy strategy, bool replicas) {
  Scenario setup = scenario_of(strategy, replicas ? 4 : 2);
  if (replicas) setup.mesh.replicate_size = setup.mesh.shard_size = 2;
  return setup;
}

void expect_step_told(fsdp_strategy strategy, bool replicas, size_t g, size_t p, const std::string &what) {
  const Scenario setup = differing(strategy, replicas);
  SCOPED_TRACE(what + ", strategy " + std::to_string(strategy) + (replicas ? " with replicas" : ""));
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const uint32_t last = setup.ranks - 1;
    if (r == last) FSDP(fsdp_set_param_trainable(rank.groups[g], p, 0));
    reduce_without(rank, r == last, g, p);
    require_error(fsdp_finish_grads(rank.model, 1.0, 0, stream()), FSDP_MISMATCH,
                  {"rank " + std::to_string(last) + " does not train parameter " + what + ", rank 0 does",
                   "fsdp_set_param_trainable", "fsdp_discard_step"});
    FSDP(fsdp_discard_step(rank.model, stream()));
    if (r == last) FSDP(fsdp_set_param_trainable(rank.groups[g], p, 1));
    clean_step(rank, 0);
    FSDP(fsdp_close_context(context));
  });
}

// All ranks reduce the same groups, or one rank does not reduce the last.
TEST(Trainable, MustBeAlikeOnEveryRank) {
  for (const fsdp_strategy strategy : strategies)
    for (const bool replicas : {false, true}) {
      expect_step_told(strategy, replicas, 3, 1, "'head.norm' of group 'head'");
      // Over replicas whole main grads are gathered before ranks meet.
      if (!replicas || strategy != FSDP_STRATEGY_NO_SHARD)
        expect_step_told(strategy, replicas, 0, 0, "'embed.w' of group 'embed'");
    }
}

// Ranks that reduce different groups get the usual error with the reason; none waits for ever.
TEST(Trainable, ReducesOfOtherGroupsAreReported) {
  for (const fsdp_strategy strategy : strategies)
    for (const bool replicas : {false, true}) {
      Scenario setup = differing(strategy, replicas);
      setup.groups.erase(setup.groups.begin() + 1);
      setup.groups.insert(setup.groups.begin(), {"first", {{"first.w", {12, 8}}}});
      SCOPED_TRACE(std::to_string(strategy) + (replicas ? " with replicas" : ""));
      std::vector<std::string> errors;
      run_threads(
          setup,
          [&](uint32_t r, fsdp_context *context) {
            Rank rank(context, setup);
            rank.load();
            const bool last = r + 1 == setup.ranks;
            if (last) FSDP(fsdp_set_param_trainable(rank.groups[1], 0, 0));
            reduce_without(rank, last, 1, 0);
            FSDP(fsdp_finish_grads(rank.model, 1.0, 0, stream()));
          },
          &errors);
      for (const std::string &error : errors) {
        EXPECT_NE(error.find("FSDP_MISMATCH"), std::string::npos) << error;
        EXPECT_NE(error.find("'first (not all are trained)'"), std::string::npos) << error;
      }
    }
}

// Any meeting compares which parameters are trained, also before the first publish.
TEST(Trainable, IsComparedWhereRanksMeet) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    if (r == 0) FSDP(fsdp_set_param_trainable(rank.groups[1], 2, 0));
    require_error(
        fsdp_publish_weights(rank.model, stream()), FSDP_MISMATCH,
        {"rank 1 trains parameter 'l0.w1' of group 'layer.0', rank 0 does not", "call fsdp_publish_weights again"});
    if (r) FSDP(fsdp_set_param_trainable(rank.groups[1], 2, 0));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    if (r == 2) {  // there and back
      FSDP(fsdp_set_param_trainable(rank.groups[1], 2, 1));
      FSDP(fsdp_set_param_trainable(rank.groups[1], 2, 0));
    }
    FSDP(fsdp_begin_update(rank.model, stream()));
    FSDP(fsdp_set_param_trainable(rank.groups[1], 2, 1));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    clean_step(rank, 0);
    FSDP(fsdp_close_context(context));
  });
}

// ---- misuse ----

using misuse::Solo;
using misuse::State;

TEST(MisusedTrainable, ChangeWithinAStepIsRefused) {
  Solo solo(State::published);
  fsdp_group *const group = solo.group(1);
  const auto set = [&] { return fsdp_set_param_trainable(group, 0, 0); };
  EXPECT_WORKS(misuse::acquire(solo.group(2), 0));
  EXPECT_FAILS(FSDP_INVALID_STATE, set(), "fsdp_set_param_trainable", "'gamma'", "has not ended");
  EXPECT_WORKS(fsdp_reduce_grad(solo.group(2), FSDP_LAST, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, set(), "fsdp_set_param_trainable", "'gamma'", "has not ended");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, 0, nullptr), "'alpha'");
  EXPECT_FAILS(FSDP_INVALID_STATE, set(), "fsdp_set_param_trainable", "fsdp_discard_step");
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  solo.finish_step();
  EXPECT_FAILS(FSDP_INVALID_STATE, set(), "fsdp_set_param_trainable", "the update window has the gradients of a step");
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  solo.clean_step();
  EXPECT_WORKS(fsdp_unshard(group, FSDP_FORWARD, 0, nullptr));
  EXPECT_WORKS(set());
  EXPECT_WORKS(fsdp_reshard(group, FSDP_FORWARD, 0, nullptr));
  EXPECT_WORKS(fsdp_begin_update(solo.model, nullptr));
  EXPECT_WORKS(fsdp_set_param_trainable(group, 0, 1));
  EXPECT_WORKS(fsdp_publish_weights(solo.model, nullptr));
  solo.clean_step();
}

TEST(MisusedTrainable, InvalidArgumentsAreRefused) {
  Solo solo(State::published);
  for (const int32_t trainable : {-1, 2})
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_param_trainable(solo.group(0), 0, trainable),
                 "fsdp_set_param_trainable", "trainable is " + std::to_string(trainable), "0 or 1");
  EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_set_param_trainable(solo.group(0), 2, 0), "param_index 2");
  for (const int32_t trainable : {0, 1})
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_set_param_trainable(solo.group(0), 1, trainable), "'alpha.frozen'", "'alpha'",
                 "FROZEN");
  solo.clean_step();
  Solo declared(State::declared);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_set_param_trainable(declared.group(0), 0, 0), "fsdp_seal_model");
}

TEST(MisusedTrainable, GradientsAreRefused) {
  Solo solo(State::published);
  fsdp_group *const group = solo.group(1);
  EXPECT_WORKS(fsdp_set_param_trainable(group, 1, 0));
  const std::vector<float> data(6);
  const auto put = [&](const void *from) { return fsdp_put_grad(group, 1, from, FSDP_FLOAT32, 6, 0, nullptr); };
  EXPECT_FAILS(FSDP_INVALID_STATE, misuse::acquire(group, 1), "fsdp_acquire_grad", "'beta.b'", "'beta'", "not trained",
               "fsdp_set_param_trainable");
  EXPECT_FAILS(FSDP_INVALID_STATE, put(data.data()), "fsdp_put_grad", "'beta.b'", "fsdp_set_param_trainable");
  EXPECT_FAILS(FSDP_INVALID_STATE, put(nullptr), "fsdp_put_grad", "'beta.b'", "fsdp_set_param_trainable");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_complete_grad(group, 1, 0, nullptr), "fsdp_complete_grad", "'beta.b'",
               "fsdp_set_param_trainable");
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_reduce_grad(group, FSDP_LAST, nullptr), "no gradient for 'beta.w';");
  EXPECT_WORKS(fsdp_set_param_trainable(group, 0, 0));
  EXPECT_WORKS(fsdp_reduce_grad(group, FSDP_LAST, nullptr));
  EXPECT_WORKS(fsdp_reduce_grad(group, FSDP_LAST, nullptr));
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_finish_grads(solo.model, 1, 0, nullptr), "'alpha'", "'gamma'");
  EXPECT_EQ(last_message().find("'beta'"), std::string::npos);
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  for (const uint64_t p : {0, 1}) EXPECT_WORKS(fsdp_set_param_trainable(group, p, 1));
  solo.clean_step();
}

TEST(MisusedTrainable, ItsMainGradientIsZerosAndTakesNoOther) {
  Solo solo(State::published);
  fsdp_group *const group = solo.group(1);
  EXPECT_WORKS(fsdp_set_param_trainable(group, 1, 0));
  EXPECT_WORKS(fsdp_finish_grads(solo.model, 1, FSDP_LAST, nullptr));
  std::vector<float> grad(6, 3.0f);
  EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_load_grad(group, 1, grad.data(), FSDP_FLOAT32, 6, FSDP_EVERY_RANK, 0),
               "fsdp_load_grad", "'beta.b'", "not trained", "fsdp_set_param_trainable");
  EXPECT_WORKS(fsdp_read_grad(group, 1, grad.data(), FSDP_FLOAT32, 6, FSDP_EVERY_RANK, 0));
  EXPECT_EQ(grad, std::vector<float>(6, 0.0f));
  EXPECT_WORKS(fsdp_discard_step(solo.model, nullptr));
  EXPECT_WORKS(fsdp_set_param_trainable(group, 1, 1));
  solo.clean_step();
}

}  // namespace
}  // namespace trainable
