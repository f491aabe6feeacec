// SPDX-License-Identifier: Apache-2.0
// Full gradients by parts (max_pending_bytes, fsdp_complete_grad) give the bits of a run without parts, in the planned
// and requested memory. Also tested is what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <string>

#include "device.h"
#include "harness.h"

using namespace harness;

namespace {

// A usual layer, `width` wide.
GroupDef layer(const std::string &name, uint64_t width) {
  const auto named = [&](const char *what) { return name + "." + what; };
  return {name,
          {{named("norm1"), {width}},
           {named("qkv"), {3 * width, width}},
           {named("qkv.bias"), {3 * width}},
           {named("proj"), {width, width}},
           {named("proj.bias"), {width}},
           {named("norm2"), {width}},
           {named("up"), {4 * width, width}},
           {named("up.bias"), {4 * width}},
           {named("down"), {width, 4 * width}},
           {named("down.bias"), {width}}}};
}

Scenario layers(fsdp_strategy strategy, uint32_t ranks, uint64_t width = 24) {
  Scenario setup = scenario_of(strategy, ranks, 0);
  if (strategy != FSDP_STRATEGY_OPTIM) setup.model.reduce_policy = FSDP_REDUCE_POLICY_EACH;
  setup.microbatches = 2;
  setup.groups = {{"embedding", {{"embedding.w", {37, width}}}}, layer("layer.0", width), layer("layer.1", width)};
  return setup;
}

bool has_parts(const Scenario &setup) { return setup.model.strategy != FSDP_STRATEGY_OPTIM; }

Scenario by_parts(Scenario setup, uint64_t bytes) {
  setup.model.max_pending_bytes = bytes;
  setup.complete = true;
  return setup;
}

// Uses the model in a planning context.
template <class Use>
void plan(const Scenario &setup, const Use &use) {
  fsdp_context_options options = place(setup.context);
  fsdp_context *context = nullptr;
  FSDP(fsdp_create_plan_context(setup.ranks, 0, &options, &context));
  try {
    const Rank rank(context, setup);
    use(rank);
  } catch (...) {
    fsdp_destroy_context(context);
    throw;
  }
  fsdp_destroy_context(context);
}

uint64_t planned_pool(const Scenario &setup) {
  uint64_t bytes = 0;
  plan(setup, [&](const Rank &rank) { bytes = memory_of(rank.model, 0).reduce_pool_bytes; });
  return bytes;
}

// The least number of bytes that is enough, according to the seal's error for `bytes`.
uint64_t least_bytes(const Scenario &setup, uint64_t bytes = 1) {
  try {
    planned_pool(by_parts(setup, bytes));
  } catch (const Failure &failure) {
    EXPECT_EQ(failure.status, FSDP_INVALID_ARGUMENT) << failure.what();
    const std::string text = failure.what();
    return std::stoull(text.substr(text.find_last_not_of("0123456789", text.find_last_of("0123456789")) + 1));
  }
  ADD_FAILURE() << "a pool of " << bytes << " bytes was planned";
  return 0;
}

void put(Rank &rank, size_t g, size_t p, float value) {
  const std::vector<float> values(rank.def(g).params[p].count(), value);
  const Placed placed(values);
  FSDP(fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, values.size(), 0, stream()));
}

void complete(Rank &rank, size_t g, const std::vector<size_t> &params) {
  for (const size_t p : params) {
    put(rank, g, p, static_cast<float>(rank.rank + 1));
    FSDP(fsdp_complete_grad(rank.groups[g], p, 0, stream()));
  }
}

// NCCL does not sum in blocks of hosts, so its sums over hosts can only be compared with other sums of NCCL.
bool has_reference(const Scenario &setup) {
  const char *const transport = std::getenv("FSDP_TEST_TRANSPORT");
  return !setup.context.ranks_per_host || !on_gpu() || !transport || std::string(transport) != "nccl";
}

void expect_same_training(const Scenario &setup, const std::vector<Outcome> &whole, uint64_t bytes) {
  const Scenario cut = by_parts(setup, bytes);
  const auto outcomes = train_threads(cut);
  if (has_reference(setup)) {
    EXPECT_EQ(difference(cut, outcomes), "");
  }
  for (size_t r = 0; r < outcomes.size(); ++r) {
    ASSERT_EQ(outcomes[r].error, "");
    EXPECT_TRUE(same_bits(outcomes[r].weights, whole[r].weights)) << "rank " << r;
    if (setup.ranks == 1) {
      EXPECT_EQ(outcomes[r].norms, whole[r].norms);
    }
    for (size_t s = 0; s < whole[r].norms.size(); ++s)
      EXPECT_NEAR(outcomes[r].norms[s], whole[r].norms[s], 1e-14 * whole[r].norms[s]);
    for (int role = 0; role <= last_role; ++role)
      EXPECT_EQ(outcomes[r].memory.role_bytes[role], outcomes[r].stats.allocated_bytes[role]) << "role " << role;
    EXPECT_LE(outcomes[r].memory.reduce_pool_bytes, bytes);
  }
}

void expect_same_training(const Scenario &setup, std::initializer_list<uint64_t> limits) {
  const auto whole = train_threads(setup);
  for (const uint64_t bytes : limits) expect_same_training(setup, whole, bytes);
}

// The limits go from the least that is enough to the size of whole groups, for every strategy that reduces each
// contribution.
TEST(GradParts, HaveTheBitsOfWholeGroups) {
  Sample sample(3);
  for (const fsdp_strategy strategy : strategies)
    for (const uint32_t ranks : {1u, 2u, 3u, 4u}) {
      if ((on_gpu() && ranks % 2 == 0) || !sample.takes_next()) continue;  // a simulated GPU takes five times as long
      const Scenario setup = layers(strategy, ranks);
      SCOPED_TRACE(testing::Message() << "strategy " << strategy << ", ranks " << ranks);
      if (!has_parts(setup)) {
        expect_same_training(setup, {1});
        continue;
      }
      const uint64_t whole = planned_pool(setup), least = least_bytes(setup);
      EXPECT_LT(3 * least, whole);
      if (on_gpu())
        expect_same_training(setup, {least, whole / 2});
      else
        expect_same_training(setup, {least, whole / 2, whole / 3, whole + 4096});
    }
}

TEST(GradParts, WithClippingHaveTheReferencesBits) {
  Scenario setup = layers(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.clip = 0.5;
  setup = by_parts(setup, planned_pool(setup) / 3);
  EXPECT_EQ(difference(setup, train_threads(setup)), "");
}

// Replicas hold everything or divide the optimizer's state, and a shard axis goes over hosts.
TEST(GradParts, HaveTheBitsOfWholeGroupsOverTwoAxes) {
  Sample sample(2);
  unsigned number = 0;
  for (const fsdp_strategy strategy : strategies)
    for (const int kind : {0, 1, 2}) {
      Scenario setup = layers(strategy, 4);
      if (!has_parts(setup) || (on_gpu() && number++ % 2) || !sample.takes_next()) continue;
      SCOPED_TRACE(testing::Message() << "strategy " << strategy << ", kind " << kind);
      if (kind == 2)
        setup.context.ranks_per_host = 2;
      else
        setup.mesh.replicate_size = setup.mesh.shard_size = 2;
      if (kind == 1) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
      expect_same_training(setup, {least_bytes(setup), planned_pool(setup) / 2});
    }
}

// Numbers of several dtypes in a part, gradients that are handed in, frozen parameters, a mesh of blocks, debug mode.
TEST(GradParts, OfMixedGroupsHaveTheBitsOfWholeOnes) {
  for (const int way : {0, 1, 2, 3}) {
    SCOPED_TRACE(way);
    Scenario setup = layers(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
    for (size_t g : {1u, 2u}) {
      setup.groups[g].params[1].dtype = setup.groups[g].params[6].dtype = FSDP_BFLOAT16;
      setup.groups[g].params[3].flags = setup.groups[g].params[9].flags = FSDP_PARAM_FROZEN;
    }
    setup.put = way == 1;
    if (way == 2) setup.model.max_pending_groups = 5;
    if (way == 3) setup.groups[1].options.strategy = FSDP_STRATEGY_OPTIM;
    const Scenario cut = by_parts(setup, least_bytes(setup) * 3 / 2);
    const auto whole = train_threads(setup), outcomes = train_threads(cut);
    EXPECT_EQ(difference(cut, outcomes), "");
    for (size_t r = 0; r < outcomes.size(); ++r) EXPECT_TRUE(same_bits(outcomes[r].weights, whole[r].weights));
  }
}

TEST(GradParts, InDebugModeHaveBuffersOfTheirOwn) {
  for (const uint32_t ranks : {1u, 2u}) {
    Scenario setup = debug_scenario(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    setup.groups = layers(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks).groups;
    setup.microbatches = 2;
    Scenario usual = setup;
    usual.context.flags = 0;
    const Scenario cut = by_parts(setup, least_bytes(usual));
    const auto outcomes = train_threads(cut);
    EXPECT_EQ(difference(cut, outcomes), "");
    for (const Outcome &outcome : outcomes) {
      EXPECT_GT(outcome.memory.reduce_pool_bytes, cut.model.max_pending_bytes);
      for (int role = 0; role <= last_role; ++role)
        EXPECT_EQ(outcome.memory.role_bytes[role], outcome.stats.allocated_bytes[role]) << "role " << role;
    }
  }
}

// The gradients of a layer take one third of the memory of two layers.
TEST(GradParts, OfAUsualLayerTakeAThird) {
  for (const uint32_t ranks : {2u, 4u, 8u})
    for (const uint64_t width : {64u, 256u, 768u}) {
      Scenario setup = layers(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, width);
      setup.groups[0].params[0].shape[0] = 256;
      const uint64_t whole = planned_pool(setup);
      const uint64_t third = planned_pool(by_parts(setup, whole / 3));
      EXPECT_LE(3 * third, whole) << "width " << width;
      EXPECT_LE(6 * least_bytes(setup), whole * 21 / 20) << "width " << width;
    }
}

// Also where groups are open in two visits, for which some parts take more than fewer would.
TEST(GradParts, LimitThatTheSealNamesIsEnoughAndNoLess) {
  struct Case {
    fsdp_strategy strategy;
    uint32_t ranks;
    uint64_t width = 24;
    std::vector<uint32_t> backward = {};  // visits; empty: each group once
  };
  for (const auto &[strategy, ranks, width, backward] :
       {Case{FSDP_STRATEGY_OPTIM_GRADS, 1}, Case{FSDP_STRATEGY_OPTIM_GRADS, 2}, Case{FSDP_STRATEGY_OPTIM_GRADS, 3},
        Case{FSDP_STRATEGY_OPTIM_GRADS, 8}, Case{FSDP_STRATEGY_NO_SHARD, 1},
        Case{FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, 16, {2, 2, 1, 1, 0, 0}},
        Case{FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, 64, {2, 1, 0, 2, 1, 0}}}) {
    SCOPED_TRACE(testing::Message() << "strategy " << strategy << ", ranks " << ranks << ", width " << width);
    Scenario setup = layers(strategy, ranks, width);
    if (!backward.empty()) {
      setup.schedule = FSDP_SCHEDULE_VISITS;
      for (const uint32_t g : {0u, 1u, 2u}) setup.visits.push_back({g, FSDP_FORWARD, 0});
      for (const uint32_t g : backward) setup.visits.push_back({g, FSDP_BACKWARD, 0});
    }
    const uint64_t least = least_bytes(setup);
    EXPECT_LE(least, (planned_pool(setup) + 4095) / 4096 * 4096) << "in whole pages";
    EXPECT_LE(planned_pool(by_parts(setup, least)), least);
    for (uint64_t less = 512; less <= least / 8; less += 512)
      EXPECT_THROW(planned_pool(by_parts(setup, least - less)), Failure) << least - less << " does, too";
    try {
      planned_pool(by_parts(setup, least - 1));
      ADD_FAILURE() << "a byte less does too";
    } catch (const Failure &failure) {
      const std::string text = failure.what();
      for (const std::string &word : {std::string("max_pending_bytes is ") + std::to_string(least - 1),
                                      std::string("'layer.0'"), std::string("'layer.0.up'"), std::to_string(least)})
        EXPECT_NE(text.find(word), std::string::npos) << word << " is not in " << text;
    }
  }
}

// Two parameters that need padding when they are cut apart, and a group of two parameters. Some limits are enough
// although larger ones are not, and some are enough only by a cut that is tried under these limits alone.
TEST(GradParts, LimitThatTheSealNamesIsAboveTheRefusedOne) {
  constexpr uint64_t tenth = 2048;  // of a unit
  for (const uint64_t size : {50u, 60u, 69u})
    for (const uint64_t limit : {0u, 40u, 190u, 199u}) {
      if (size == 69 && limit == 190) continue;  // enough
      Scenario setup = layers(FSDP_STRATEGY_OPTIM_GRADS, 2);
      setup.model.max_pending_groups = 1;
      setup.groups = {{"root", {{"root.a", {50 * tenth}}, {"root.b", {50 * tenth}}}},
                      {"layer", {{"layer.a", {80 * tenth}}, {"layer.b", {size * tenth}}}}};
      setup.groups[0].options.flags = FSDP_GROUP_ROOT;
      for (ParamDef &param : setup.groups[0].params) param.granule = FSDP_GRANULE_TENSOR;
      const uint64_t too_little = limit * tenth * sizeof(float) + 1;
      SCOPED_TRACE(testing::Message() << "a group of 8 and " << size << "/10 units, too little: " << too_little);
      const uint64_t least = least_bytes(setup, too_little);
      EXPECT_GT(least, too_little);
      EXPECT_LE(planned_pool(by_parts(setup, least)), least);
      EXPECT_EQ(least_bytes(setup, least - 1), least) << "a byte less is too little";
    }
}

// Both ends of a tied model stay open while its layers come and go.
TEST(GradParts, OfRootGroupsStayOpenBesidesThoseOfLayers) {
  for (const uint32_t ranks : {1u, 2u}) {
    Scenario setup = layers(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    setup.groups[0].options.flags = FSDP_GROUP_ROOT;
    const uint64_t least = least_bytes(setup);
    try {
      planned_pool(by_parts(setup, least - 1));
      ADD_FAILURE() << "a byte less does too";
    } catch (const Failure &failure) {
      EXPECT_NE(std::string(failure.what()).find("root groups are all alive at once: 'embedding'"), std::string::npos)
          << failure.what();
    }
    const Scenario cut = by_parts(setup, least);
    run_threads(cut, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, cut);
      rank.load();
      put(rank, 0, 0, 1);
      for (const size_t g : {2u, 1u}) backward_group(rank, g, 0, 1, nullptr);
      put(rank, 0, 0, 2);
      FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, stream()));
      FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
      double norms[21];
      FSDP(fsdp_get_param_grad_norms(rank.model, stream(), norms, 21));
      REQUIRE(std::abs(norms[0] - 3 * std::sqrt(37 * 24)) < 1e-9);
      FSDP(fsdp_discard_step(rank.model, stream()));
      FSDP(fsdp_close_context(context));
    });
  }
}

// apply_grads works with any cut, and a step that is discarded half-way leaves nothing behind.
TEST(GradParts, AreAppliedInOneCallAndDiscarded) {
  Scenario setup = layers(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  std::vector<std::vector<float>> weights[2];
  for (const bool cut : {false, true}) {
    const Scenario of = cut ? by_parts(setup, least_bytes(setup)) : setup;
    run_threads(of, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, of);
      rank.load();
      if (cut) {
        complete(rank, 2, {9, 8, 7});
        FSDP(fsdp_discard_step(rank.model, stream()));
      }
      std::vector<std::vector<float>> values;
      std::vector<fsdp_grad> grads;
      for (const GroupDef &def : of.groups)
        for (const ParamDef &param : def.params)
          values.emplace_back(param.count(), static_cast<float>(values.size() + r + 1) / 64);
      std::deque<Placed> placed;
      for (const auto &value : values) placed.emplace_back(value);
      for (size_t i = 0; i < values.size(); ++i) {
        fsdp_grad grad{};
        grad.data = placed[i].data();
        grad.dtype = FSDP_FLOAT32;
        grad.element_count = values[i].size();
        grads.push_back(grad);
      }
      FSDP(fsdp_apply_grads(rank.model, grads.data(), grads.size(), sizeof(fsdp_grad), 0.01, 0, nullptr, stream(),
                            nullptr));
      const auto read = rank.read_all();
      if (r == 0) weights[cut] = read;
      FSDP(fsdp_close_context(context));
    });
  }
  EXPECT_TRUE(same_bits(weights[0], weights[1]));
}

// Two parts of equal size are reduced in different orders on two ranks: the error does not depend on their bytes.
TEST(GradParts, InDifferentOrdersAreNamed) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, 0);
  setup.groups = {{"layer", {}}};
  for (const char *name : {"a", "b", "c", "d"}) setup.groups[0].params.push_back({name, {64, 32}});
  setup = by_parts(setup, 4 * group_bytes / 2);
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        for (const size_t p : r ? std::vector<size_t>{2, 3, 1, 0} : std::vector<size_t>{3, 2, 1, 0})
          complete(rank, 0, {p});
        FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, stream()));
        FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
      },
      &errors);
  for (const std::string &error : errors)
    for (const char *word : {"MISMATCH", "'layer: d'", "'layer: c'"})
      EXPECT_NE(error.find(word), std::string::npos) << word << " is not in: " << error;
}

// One rank completes part by part, another leaves the end of a part to fsdp_reduce_grad: their collectives are the
// same.
TEST(GradParts, AreTakenByTheReduceWhereTheyWereNotCompleted) {
  Scenario setup = layers(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup = by_parts(setup, planned_pool(setup) / 2);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (size_t g = 3; g-- > 0;) {
      std::vector<size_t> all;
      for (size_t p = rank.def(g).params.size(); p-- > 1;) all.push_back(p);
      complete(rank, g, all);
      put(rank, g, 0, static_cast<float>(r + 1));
      if (r) FSDP(fsdp_complete_grad(rank.groups[g], 0, 0, stream()));
      FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
    }
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    std::vector<double> norms(21);
    FSDP(fsdp_get_param_grad_norms(rank.model, stream(), norms.data(), norms.size()));
    for (size_t g = 0, i = 0; g < 3; ++g)
      for (const ParamDef &param : rank.def(g).params)
        REQUIRE(std::abs(norms[i++] - 1.5 * std::sqrt(static_cast<double>(param.count()))) < 1e-6);
    FSDP(fsdp_discard_step(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

// Each part counts as a reduce and as a buffer.
TEST(GradParts, EachPartCountsAReduceAndABuffer) {
  Scenario setup = layers(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.steps = 1;
  setup.microbatches = 3;
  const Outcome whole = train_threads(setup)[0];
  EXPECT_EQ(whole.stats.reduces, 3u * 3);
  setup = by_parts(setup, least_bytes(setup));
  const Outcome outcome = train_threads(setup)[0];
  EXPECT_EQ(outcome.stats.reduces % 3, 0u);
  EXPECT_GE(outcome.stats.reduces, 3u * 7);
  EXPECT_EQ(outcome.stats.peak_pending_grad_groups, 1u);
}

}  // namespace
