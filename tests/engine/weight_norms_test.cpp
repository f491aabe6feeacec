// SPDX-License-Identifier: Apache-2.0
// Norms of weights, and zeros of gradients, in every layout and form of main weights.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <map>

#include "device.h"
#include "optimizer_memory.h"

using namespace harness;

namespace weight_norms {
namespace {

constexpr Form plain{"Float32", FSDP_MAIN_FLOAT32, FSDP_OPTIMIZER_ADAMW};

ParamDef frozen(ParamDef param, fsdp_quantization quantization = 0) {
  param.flags |= FSDP_PARAM_FROZEN;
  param.quantization = quantization;
  return param;
}

// With a group of frozen parameters of each dtype, the last of which has codes.
Scenario measured_scenario(const Form &form, const Layout &layout) {
  Scenario setup = scenario_by(form, layout);
  setup.groups.push_back(
      {"frozen",
       {frozen({"single", {31, 7}}), frozen({"brain", {29, 16}, FSDP_BFLOAT16}),
        frozen({"half", {9, 33}, FSDP_FLOAT16}), frozen({"codes", {64, 64}, FSDP_BFLOAT16}, FSDP_QUANTIZE_MXFP8)}});
  for (GroupDef &group : setup.groups)
    for (ParamDef &param : group.params) param.missing_grad = FSDP_MISSING_GRAD_SKIP;
  setup.model.grad_op = FSDP_GRAD_OP_SUM;
  setup.model.grad_dtype = setup.model.reduce_dtype = FSDP_FLOAT32;
  return setup;
}

size_t count_params(const Scenario &setup) {
  size_t count = 0;
  for (const GroupDef &group : setup.groups) count += group.params.size();
  return count;
}

std::vector<double> weight_norms(const Rank &rank) {
  std::vector<double> norms(count_params(rank.setup), -1);
  FSDP(fsdp_get_param_weight_norms(rank.model, stream(), norms.data(), norms.size()));
  return norms;
}

std::vector<double> grad_norms(const Rank &rank) {
  std::vector<double> norms(count_params(rank.setup), -1);
  FSDP(fsdp_get_param_grad_norms(rank.model, stream(), norms.data(), norms.size()));
  return norms;
}

double grad_norm(const Rank &rank) {
  double norm = 0;
  FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm));
  return norm;
}

std::vector<uint64_t> bits_of(const std::vector<double> &norms) {
  std::vector<uint64_t> bits;
  for (const double norm : norms) bits.push_back(std::isnan(norm) ? 0 : std::bit_cast<uint64_t>(norm));
  return bits;
}

// Compares with sums of another order, of the numbers that fsdp_read_param gives.
void check_weight_norms(const Rank &rank, const std::vector<double> &norms) {
  for (size_t g = 0, i = 0; g < rank.groups.size(); ++g)
    for (size_t p = 0; p < rank.def(g).params.size(); ++p, ++i) {
      long double squares = 0;
      for (const float weight : rank.read(g, p)) squares += static_cast<long double>(weight) * weight;
      const auto expected = static_cast<double>(std::sqrt(squares));
      REQUIRE(expected > 0);
      REQUIRE(rank.def(g).params[p].quantization ? std::isnan(norms[i])
                                                 : std::abs(norms[i] - expected) <= 1e-12 * expected);
    }
}

using ValuesOf = std::function<std::vector<float>(size_t group, size_t param)>;

// Gives the values as gradients; without values it gives none. Frozen parameters and `untrained` are left out.
void give_grads(Rank &rank, const ValuesOf &values_of, std::pair<size_t, size_t> untrained = {SIZE_MAX, 0}) {
  for (size_t g = rank.groups.size(); g-- > 0;) {
    for (size_t p = rank.def(g).params.size(); p-- > 0;) {
      if ((rank.def(g).params[p].flags & FSDP_PARAM_FROZEN) || std::pair(g, p) == untrained) continue;
      const std::vector<float> values = values_of(g, p);
      const Placed placed(values);
      FSDP(fsdp_put_grad(rank.groups[g], p, values.empty() ? nullptr : placed.data(), values.empty() ? 0 : FSDP_FLOAT32,
                         values.size(), 0, stream()));
    }
    FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
  }
  FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
}

std::vector<float> zeros_like(const Rank &rank, size_t g, size_t p) {
  return std::vector<float>(rank.def(g).params[p].count());
}

class WeightNorms : public testing::TestWithParam<std::tuple<Form, Layout>> {};
INSTANTIATE_TEST_SUITE_P(All, WeightNorms,
                         testing::Combine(testing::Values(plain, forms[1], forms[3], forms[4]),
                                          testing::ValuesIn(layouts)),
                         [](const auto &info) {
                           return std::string(std::get<0>(info.param).name) + std::get<1>(info.param).name;
                         });

// A step on gradients that are the weights themselves: both norms are then the same sums in the same order.
TEST_P(WeightNorms, AreThoseOfTheWeightsInBothWindows) {
  const auto &[form, layout] = GetParam();
  const Scenario setup = measured_scenario(form, layout);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    clean_step(rank, 0);
    const std::vector<double> between = weight_norms(rank);
    check_weight_norms(rank, between);
    give_grads(rank, [&](size_t g, size_t p) {
      const std::vector<float> weights = rank.read(g, p);  // all ranks read together
      return r == 0 ? weights : zeros_like(rank, g, p);
    });
    const double norm = grad_norm(rank);
    REQUIRE(bits_of(weight_norms(rank)) == bits_of(between));
    REQUIRE(grad_norm(rank) == norm);
    std::vector<double> expected = between;
    for (size_t i = expected.size() - 4; i < expected.size(); ++i) expected[i] = 0;
    REQUIRE(grad_norms(rank) == expected);
    update(rank);
    FSDP(fsdp_begin_update(rank.model, stream()));
    const std::vector<double> inside = weight_norms(rank);
    check_weight_norms(rank, inside);
    REQUIRE(bits_of(inside) != bits_of(between));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(bits_of(weight_norms(rank)) == bits_of(inside));
    FSDP(fsdp_close_context(context));
  });
}

// Every rank of each job that has the same slots.
TEST(WeightNormsBits, DependOnNoStrategyTransportNorOverlap) {
  for (const Form &form : {plain, forms[1]}) {
    std::map<uint32_t, std::vector<uint64_t>> expected;  // by the number of slots
    for (const Layout &layout : layouts)
      for (const bool overlap : {false, true}) {
        Scenario setup = measured_scenario(form, layout);
        if (!overlap) setup.context.flags |= FSDP_CONTEXT_NO_OVERLAP;
        std::vector<std::vector<uint64_t>> bits(setup.ranks);
        run_threads(setup, [&](uint32_t r, fsdp_context *context) {
          Rank rank(context, setup);
          rank.load();
          bits[r] = bits_of(weight_norms(rank));
          FSDP(fsdp_close_context(context));
        });
        const uint32_t slots = layout.ranks / (layout.hybrid ? 1 : layout.replicas);
        const auto first = expected.emplace(slots, bits[0]).first;
        for (const auto &of_rank : bits) EXPECT_EQ(of_rank, first->second) << layout.name << " " << form.name;
      }
  }
}

// Loads and edits of a window that is not yet published.
TEST(WeightNormsWindow, CountsWhatTheWindowHasWritten) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, FSDP_UNSHARD_MAPPED);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    for (const double norm : weight_norms(rank)) REQUIRE(norm == 0);  // sealed, nothing was loaded
    rank.load();
    FSDP(fsdp_begin_update(rank.model, stream()));
    for (const fsdp_shard &shard : rank.shards()) std::fill_n(main_weight(shard), shard.element_count, 2.0f);
    const std::vector<double> norms = weight_norms(rank);
    for (size_t g = 0, i = 0; g < rank.groups.size(); ++g)
      for (const ParamDef &param : rank.def(g).params)
        REQUIRE(std::abs(norms[i++] - 2 * std::sqrt(static_cast<double>(param.count()))) < 1e-9);
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

// A failed step must be discarded first; an untrained parameter keeps its norm.
TEST(WeightNormsWindow, IsRefusedAfterAStepThatFailed) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM, 2);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    const std::vector<double> norms = weight_norms(rank);
    require_error(fsdp_finish_grads(rank.model, 1, 0, stream()), FSDP_INVALID_STATE, {});
    double norm = 0;
    require_error(fsdp_get_param_weight_norms(rank.model, stream(), &norm, 1), FSDP_INVALID_STATE,
                  {"fsdp_get_param_weight_norms", "fsdp_discard_step"});
    FSDP(fsdp_discard_step(rank.model, stream()));
    FSDP(fsdp_set_param_trainable(rank.groups[0], 0, 0));
    REQUIRE(weight_norms(rank) == norms);
    FSDP(fsdp_close_context(context));
  });
}

class ZeroGrads : public testing::TestWithParam<Layout> {};
INSTANTIATE_TEST_SUITE_P(All, ZeroGrads, testing::ValuesIn(layouts),
                         [](const auto &info) { return std::string(info.param.name); });

uint64_t count_zeros(const Rank &rank) {
  uint64_t zeros = ~uint64_t{0};
  FSDP(fsdp_count_zero_grads(rank.model, stream(), &zeros));
  return zeros;
}

// Every third element is +0 or -0 on all ranks. Of the others, the ranks' sum of every seventh is 0.
std::vector<float> some_zeros(uint64_t count, uint32_t r, uint32_t ranks) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i)
    values[i] = i % 3 == 0 ? (i % 2 ? -0.0f : 0.0f) : i % 7 == 0 ? (r ? 1 : -static_cast<float>(ranks - 1)) : 0x1p-149f;
  return values;
}

uint64_t zeros_among(uint64_t count) {
  uint64_t zeros = 0;
  for (uint64_t i = 0; i < count; ++i) zeros += i % 3 == 0 || i % 7 == 0;
  return zeros;
}

TEST_P(ZeroGrads, AreCountedOnceInTheWholeModel) {
  const Scenario setup = measured_scenario(plain, GetParam());
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    uint64_t expected = 0;
    for (const GroupDef &group : setup.groups)
      for (const ParamDef &param : group.params)
        if (!(param.flags & FSDP_PARAM_FROZEN)) expected += zeros_among(param.count());
    const uint64_t first = zeros_among(setup.groups[0].params[0].count());
    const auto values_of = [&](size_t g, size_t p) {
      return some_zeros(rank.def(g).params[p].count(), r, setup.ranks);
    };
    give_grads(rank, values_of);
    const std::vector<double> norms = grad_norms(rank);  // what they leave in scratch does not count
    REQUIRE(count_zeros(rank) == expected);
    REQUIRE(grad_norms(rank) == norms);
    FSDP(fsdp_discard_step(rank.model, stream()));
    // One parameter is skipped, because no rank has a gradient of it.
    give_grads(rank, [&](size_t g, size_t p) { return g + p ? values_of(g, p) : std::vector<float>(); });
    REQUIRE(count_zeros(rank) == expected - first);
    FSDP(fsdp_discard_step(rank.model, stream()));
    // A gradient of one rank counts for all ranks; here it is zeros.
    give_grads(rank, [&](size_t g, size_t p) {
      return g + p ? values_of(g, p) : r ? std::vector<float>() : zeros_like(rank, g, p);
    });
    REQUIRE(count_zeros(rank) == expected - first + setup.groups[0].params[0].count());
    FSDP(fsdp_scale_grads(rank.model, 0, stream()));
    uint64_t all = 0;
    for (const GroupDef &group : setup.groups)
      for (const ParamDef &param : group.params) all += param.flags & FSDP_PARAM_FROZEN ? 0 : param.count();
    REQUIRE(count_zeros(rank) == all);
    FSDP(fsdp_discard_step(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

TEST(ZeroGradsMissing, CountAsZerosUnlessTheStepLeavesTheWeights) {
  for (const fsdp_strategy strategy : strategies) {
    Scenario setup = scenario_of(strategy, 3);
    setup.groups[1].params[2].missing_grad = FSDP_MISSING_GRAD_SKIP;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      const auto count = [&](size_t p) { return rank.def(1).params[p].count(); };
      const auto ones = [&](size_t g, size_t p) {
        const bool missing = g == 1 && p >= 1;
        return missing ? std::vector<float>() : std::vector<float>(rank.def(g).params[p].count(), 1.0f);
      };
      give_grads(rank, ones);
      REQUIRE(rank.def(1).params.size() == 4 && count_zeros(rank) == count(1) + count(3));
      update(rank);
      FSDP(fsdp_set_param_trainable(rank.groups[1], 1, 0));
      give_grads(rank, ones, {1, 1});
      REQUIRE(count_zeros(rank) == count(3));
      update(rank);
      FSDP(fsdp_close_context(context));
    });
  }
}

}  // namespace
}  // namespace weight_norms
