// SPDX-License-Identifier: Apache-2.0
// The floating-point modes of the calling thread change no bit of what calls compute, and are the same after each call.
// The modes are set only around calls of the library; the test itself computes with the standard modes.
#include <gtest/gtest.h>

#include "../float_modes.h"

#if defined(FSDP_HAS_FLOAT_MODES)
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device.h"
#include "harness.h"

using namespace harness;

namespace {

using namespace float_modes;

constexpr Modes roundings[] = {0, round_down, round_up, round_to_zero};  // 0: nearest

// Makes calls of the library with the modes.
class Caller {
 public:
  explicit Caller(Modes modes) : modes_(modes) {}
  template <class Call>
  void operator()(const Call &call) const {
    set(modes_);
    const fsdp_status status = call();
    const Modes after = get();
    set(standard);
    check(status, "a call with other modes");
    EXPECT_EQ(after, modes_);
  }

 private:
  Modes modes_;
};

Scenario setup_of(fsdp_strategy strategy, uint32_t context_flags) {
  Scenario setup = scenario_of(strategy, 2);
  setup.context.flags = context_flags;
  setup.groups[1].params[0].lr_scale = 1.0 / 7;
  setup.model.grad_op = FSDP_GRAD_OP_FACTOR;
  setup.model.grad_factor = 1.0 / 3;
  return setup;
}

// Around 1, and one in four a subnormal number.
std::vector<float> draw(uint64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float &value : values) value = normal(random) * (random() % 4 ? 1.0f : 1e-39f);
  return values;
}

// What the calls of some steps give back, as bits.
class Results {
 public:
  void add(const void *data, size_t bytes) { bytes_.append(static_cast<const char *>(data), bytes); }
  void add(double value) { add(&value, sizeof value); }
  // Says where the two begin to differ, and of how many bytes; empty if they are equal.
  std::string compare(const Results &other) const {
    const auto found = std::ranges::mismatch(bytes_, other.bytes_).in1;
    if (found == bytes_.end() && bytes_.size() == other.bytes_.size()) return {};
    return "byte " + std::to_string(found - bytes_.begin()) + " of " + std::to_string(bytes_.size());
  }

 private:
  std::string bytes_;
};

void put_grads(Rank &rank, const Caller &call, uint32_t step) {
  for (size_t g = rank.groups.size(); g-- > 0;) {
    for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
      const std::vector<float> values =
          draw(rank.def(g).params[p].count(), rank.rank + 2 * step + 100 * rank.setup.ordinal(g, p));
      const Placed placed(values);
      call([&] { return fsdp_put_grad(rank.groups[g], p, placed.data(), FSDP_FLOAT32, values.size(), 0, stream()); });
    }
    call([&] { return fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()); });
  }
}

fsdp_adamw_options odd_options() {
  fsdp_adamw_options options = FSDP_ADAMW_OPTIONS_INIT;
  options.beta1 = 0.87;
  options.beta2 = 0.9973;
  options.epsilon = 1.3e-9;
  options.weight_decay = 0.0123;
  return options;
}

void step_by_calls(Rank &rank, const Caller &call, uint32_t step, Results &results) {
  put_grads(rank, call, step);
  call([&] { return fsdp_finish_grads(rank.model, 1.0 / 3, 0, stream()); });
  double norm = 0, clipped = 0;
  std::vector<double> norms(rank.read_all().size());
  call([&] { return fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm); });
  call([&] { return fsdp_get_param_grad_norms(rank.model, stream(), norms.data(), norms.size()); });
  std::vector<double> weight_norms(norms.size());
  call([&] { return fsdp_get_param_weight_norms(rank.model, stream(), weight_norms.data(), weight_norms.size()); });
  call([&] { return fsdp_scale_grads(rank.model, 0.7, stream()); });
  call([&] { return fsdp_clip_grads(rank.model, nullptr, 0.3, stream(), &clipped); });
  const fsdp_adamw_options options = odd_options();
  call([&] { return fsdp_step_adamw(rank.model, 0.0321, &options, stream()); });
  results.add(norm);
  results.add(clipped);
  results.add(norms.data(), norms.size() * sizeof(double));
  results.add(weight_norms.data(), weight_norms.size() * sizeof(double));
}

void step_by_one_call(Rank &rank, const Caller &call, Results &results) {
  std::vector<std::vector<float>> values;
  for (const GroupDef &def : rank.setup.groups)
    for (const ParamDef &param : def.params)
      values.push_back(draw(param.count(), static_cast<uint32_t>(7 + rank.rank + values.size())));
  std::vector<std::unique_ptr<Placed>> kept;
  std::vector<fsdp_grad> grads;
  for (const std::vector<float> &of_one : values) {
    kept.push_back(std::make_unique<Placed>(of_one));
    grads.push_back({kept.back()->data(), of_one.size(), FSDP_FLOAT32, 0});
  }
  double norm = 0;
  const fsdp_adamw_options options = odd_options();
  call([&] {
    return fsdp_apply_grads(rank.model, grads.data(), grads.size(), sizeof(fsdp_grad), 0.0123, 0.7, &options, stream(),
                            &norm);
  });
  results.add(norm);
}

void reduce_values(Rank &rank, const Caller &call, Results &results) {
  for (const fsdp_value_op op : {FSDP_VALUE_SUM, FSDP_VALUE_MIN, FSDP_VALUE_MAX}) {
    double values[] = {1.0 / (3 + rank.rank), 0x1p-1074 * (5 + rank.rank), 1e300 * (1 + rank.rank),
                       rank.rank ? 1 : 0x1p-60};
    call([&] { return fsdp_all_reduce_values(rank.context, nullptr, values, std::size(values), op); });
    results.add(values, sizeof values);
  }
}

Results run_with(Modes modes, const Scenario &setup) {
  Results of_first;
  const Caller call(modes);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    std::unique_ptr<Rank> rank = std::make_unique<Rank>(context, setup, false);
    call([&] { return fsdp_seal_model(rank->model); });
    rank->load();
    Results results;
    reduce_values(*rank, call, results);
    for (uint32_t step = 0; step < 3; ++step) step_by_calls(*rank, call, step, results);
    step_by_one_call(*rank, call, results);
    for (const auto &weights : rank->read_all()) results.add(weights.data(), weights.size() * sizeof(float));
    FSDP(fsdp_close_context(context));
    if (r == 0) of_first = results;
  });
  return of_first;
}

class CallersModes : public testing::TestWithParam<fsdp_strategy> {};

TEST_P(CallersModes, ChangeNoBitAndAreKept) {
  for (const uint32_t flags : {0u, 0u + FSDP_CONTEXT_NO_OVERLAP}) {
    const Scenario setup = setup_of(GetParam(), flags);
    const Results expected = run_with(standard, setup);
    for (const Modes rounding : roundings)
      for (const Modes flushes : {Modes{0}, flush_results, flush_inputs, flush})
        EXPECT_EQ(run_with(standard | rounding | flushes, setup).compare(expected), "")
            << "modes " << std::hex << (rounding | flushes) << ", context flags " << flags;
  }
}

// A caller that wants a trap for each exception, also inexact ones, gets none for the library's arithmetic.
TEST_P(CallersModes, TrapsStayTheCallers) {
  if (with_all_traps() == standard) GTEST_SKIP() << "this processor has no traps";
  const Scenario setup = setup_of(GetParam(), 0);
  EXPECT_EQ(run_with(with_all_traps(), setup).compare(run_with(standard, setup)), "");
}

INSTANTIATE_TEST_SUITE_P(Strategies, CallersModes,
                         testing::Values(FSDP_STRATEGY_NO_SHARD + 0, FSDP_STRATEGY_OPTIM_GRADS_PARAMS + 0));

}  // namespace
#endif
