// SPDX-License-Identifier: Apache-2.0
// Ranks whose callers wait for each other in different calls get an error that names the calls, long before their
// timeout. Slow ranks get no error.
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "harness.h"

using namespace harness;

namespace {

using Call = std::function<fsdp_status(Rank &)>;

struct Case {
  const char *name;
  bool window;  // the calls come while the update window is open
  Call first, second;
  const char *first_call, *second_call;
};

void PrintTo(const Case &crossing, std::ostream *out) { *out << crossing.name; }

fsdp_status sum_values(Rank &rank) {
  double value = 1;
  return fsdp_all_reduce_values(rank.context, nullptr, &value, 1, FSDP_VALUE_SUM);
}
fsdp_status get_norm(Rank &rank) {
  double norm = 0;
  return fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm);
}
fsdp_status read_param(Rank &rank) {
  std::vector<float> values(rank.def(0).params[0].count());
  return fsdp_read_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0);
}
fsdp_status seal_another(Rank &rank) {
  static thread_local std::unique_ptr<fsdp_model, decltype(&fsdp_destroy_model)> model(nullptr, fsdp_destroy_model);
  fsdp_model *made = nullptr;
  // A rank that comes late learns of the crossing here.
  if (const fsdp_status status = fsdp_create_model(rank.context, nullptr, &made)) return status;
  model.reset(made);  // until the thread ends: destroying it now would replace the message of the seal
  return fsdp_seal_model(made);
}
fsdp_status begin_update(Rank &rank) { return fsdp_begin_update(rank.model, nullptr); }
fsdp_status publish(Rank &rank) { return fsdp_publish_weights(rank.model, nullptr); }
fsdp_status step(Rank &rank) { return fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr); }
fsdp_status discard(Rank &rank) { return fsdp_discard_step(rank.model, nullptr); }
fsdp_status close(Rank &rank) { return fsdp_close_context(rank.context); }

const Case cases[] = {
    {"ValuesAndBeginUpdate", false, sum_values, begin_update, "fsdp_all_reduce_values", "fsdp_begin_update"},
    {"ValuesAndDiscard", false, sum_values, discard, "fsdp_all_reduce_values", "fsdp_discard_step"},
    {"ValuesAndRead", false, sum_values, read_param, "fsdp_all_reduce_values", "fsdp_read_param"},
    {"ValuesAndSeal", false, sum_values, seal_another, "fsdp_all_reduce_values", "fsdp_seal_model"},
    {"ValuesAndPublish", true, sum_values, publish, "fsdp_all_reduce_values", "fsdp_publish_weights"},
    {"ValuesAndStep", true, sum_values, step, "fsdp_all_reduce_values", "fsdp_step_adamw"},
    {"ValuesAndNorm", true, sum_values, get_norm, "fsdp_all_reduce_values", "fsdp_get_grad_norm"},
    {"CloseAndBeginUpdate", false, close, begin_update, "fsdp_close_context", "fsdp_begin_update"},
    {"SealAndBeginUpdate", false, seal_another, begin_update, "fsdp_seal_model", "fsdp_begin_update"},
    {"ReadAndBeginUpdate", false, read_param, begin_update, "fsdp_read_param", "fsdp_begin_update"},
    {"NormAndRead", true, get_norm, read_param, "fsdp_get_grad_norm", "fsdp_read_param"},
    {"SealAndClose", false, seal_another, close, "fsdp_seal_model", "fsdp_close_context"},
};

class Crossing : public testing::TestWithParam<Case> {};

// Which ranks make the second call: given as bits.
void cross(const Case &crossing, uint32_t ranks, uint32_t others, uint32_t late) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, FSDP_UNSHARD_MAPPED);
  scenario.context.timeout_ms = 60'000;
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    if (crossing.window) finish_step(rank, 0);
    if (r == late) pause_ms(300);
    const double start = now();
    const fsdp_status status = (others >> r & 1 ? crossing.second : crossing.first)(rank);
    require_error(status, FSDP_MISMATCH, {crossing.first_call, crossing.second_call});
    REQUIRE(now() - start < 5);
  });
}

TEST_P(Crossing, CallsOfTwoRanksAreNamed) {
  cross(GetParam(), 2, 0b01, 2);
  cross(GetParam(), 2, 0b10, 0);
}

TEST_P(Crossing, OfFourRanksOneOfThemLate) {
  cross(GetParam(), 4, 0b1010, 0);
  cross(GetParam(), 4, 0b0001, 3);
}

INSTANTIATE_TEST_SUITE_P(Calls, Crossing, testing::ValuesIn(cases), [](const auto &info) { return info.param.name; });

// Two models have one name and one phase: their numbers tell them apart.
TEST(CrossingModels, ModelsOfOneNameAreToldApartByNumber) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_MAPPED);
  scenario.context.timeout_ms = 60'000;
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank first(context, scenario), second(context, scenario);
    first.load();
    second.load();
    require_error(discard(r == 0 ? first : second), FSDP_MISMATCH,
                  {"rank 0 is in fsdp_discard_step of model 0 (", "rank 1 is in fsdp_discard_step of model 1 (",
                   "they wait for each other"});
  });
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank first(context, scenario), second(context, scenario);
    first.load();
    second.load();
    require_error((r == 0 ? sum_values : discard)(second), FSDP_MISMATCH,
                  {"rank 0 is in fsdp_all_reduce_values (", "rank 1 is in fsdp_discard_step of model 1 ("});
  });
}

void expect_sum(Rank &rank) {
  double value = rank.rank + 1;
  FSDP(fsdp_all_reduce_values(rank.context, nullptr, &value, 1, FSDP_VALUE_SUM));
  REQUIRE(value == rank.setup.ranks * (rank.setup.ranks + 1) / 2);
}

TEST(NotCrossing, SlowRanksAreWaitedFor) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, FSDP_UNSHARD_MAPPED);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    if (r == 1) pause_ms(1000);
    expect_sum(rank);
    if (r == 0) pause_ms(500);
    clean_step(rank, 0);
    Scenario one = scenario;
    one.steps = 1;
    REQUIRE(same_bits(rank.read_all(), reference(one).weights));
    FSDP(fsdp_close_context(context));
  });
}

// All ranks make the same calls, with pauses that are close to the time between two checks. A wait that has ended, but
// is still shown, must not count as a crossing.
TEST(NotCrossing, RanksAtTheirOwnPaceGetNoError) {
  const Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, FSDP_UNSHARD_MAPPED);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, scenario);
    rank.load();
    std::mt19937 random(r);
    for (int i = 0; i < 40; ++i) {
      pause_ms(static_cast<int>(random() % 70));
      expect_sum(rank);
      pause_ms(static_cast<int>(random() % 70));
      FSDP(begin_update(rank));
      FSDP(publish(rank));
    }
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
