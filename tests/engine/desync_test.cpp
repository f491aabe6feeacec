// SPDX-License-Identifier: Apache-2.0
// Ranks that call different things: every rank learns it, with both calls by name, within two seconds of the later
// one's arrival; nobody hangs, and nobody goes on with wrong data. Which calls cross on their callers alone:
// crossing_test.cpp.
#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "death.h"
#include "harness.h"

using namespace harness;

namespace {

using Body = std::function<void(Rank &)>;

struct Case {
  const char *name;
  Body usual, odd;                  // what most ranks do, and what one does; both end in a call that fails
  std::vector<const char *> words;  // in the message of every rank
  // MISMATCH, or INVALID_STATE where the step can be discarded by all: its message lists what each rank misses.
  std::vector<fsdp_status> statuses = {FSDP_MISMATCH};
};

void PrintTo(const Case &of, std::ostream *out) { *out << of.name; }

constexpr size_t embed = 0, layer0 = 1, layer1 = 2, head = 3;

Body reduce(std::vector<size_t> groups, uint32_t flags = FSDP_LAST) {
  return [=](Rank &rank) {
    for (const size_t g : groups) {
      put_all(rank, g, 1.0f);
      FSDP(fsdp_reduce_grad(rank.groups[g], flags, nullptr));
    }
  };
}
template <class... Bodies>
Body then(Bodies... bodies) {
  return [=](Rank &rank) { (bodies(rank), ...); };
}

void finish(Rank &rank) { FSDP(fsdp_finish_grads(rank.model, 1, nullptr)); }
void finish_twice_as_large(Rank &rank) { FSDP(fsdp_finish_grads(rank.model, 2, nullptr)); }
void publish(Rank &rank) { FSDP(fsdp_publish_weights(rank.model, nullptr)); }
void begin_update(Rank &rank) { FSDP(fsdp_begin_update(rank.model, nullptr)); }
void step(Rank &rank) { FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr)); }
void step_faster(Rank &rank) { FSDP(fsdp_step_adamw(rank.model, 0.2, nullptr, nullptr)); }
void close(Rank &rank) { FSDP(fsdp_close_context(rank.context)); }
void open_window(Rank &rank) { finish_step(rank, 0); }
void norm(Rank &rank) {
  double norm = 0;
  FSDP(fsdp_get_grad_norm(rank.model, nullptr, &norm));
}
void param_norms(Rank &rank) {
  std::vector<double> norms(10);
  FSDP(fsdp_get_param_grad_norms(rank.model, nullptr, norms.data(), norms.size()));
}
Body values(uint64_t count, fsdp_value_op op = FSDP_VALUE_SUM) {
  return [=](Rank &rank) {
    double values[4] = {};
    FSDP(fsdp_all_reduce_values(rank.context, values, count, op));
  };
}
void read_first(Rank &rank) { rank.read(embed, 0); }
void read_last(Rank &rank) { rank.read(head, 1); }
Body load(int32_t root, fsdp_dtype dtype = FSDP_FLOAT32) {
  return [=](Rank &rank) {
    const std::vector<float> data(rank.def(embed).params[0].count());
    FSDP(fsdp_load_param(rank.groups[embed], 0, data.data(), dtype, data.size(), root));
  };
}
// Another model; kept until the thread ends, since destroying it would replace the message of the seal.
Body seal(const char *group, fsdp_dtype dtype, fsdp_schedule_kind schedule, const char *second = nullptr) {
  return [=](Rank &rank) {
    static thread_local std::unique_ptr<fsdp_model, decltype(&fsdp_destroy_model)> model(nullptr, fsdp_destroy_model);
    fsdp_model *made = nullptr;
    FSDP(fsdp_create_model(rank.context, nullptr, &made));
    model.reset(made);
    for (const char *name : {group, second}) {
      if (!name) continue;
      const uint64_t shape[] = {8, 4};
      fsdp_param param = FSDP_PARAM_INIT;
      param.name = name;
      param.shape = shape;
      param.dimension_count = 2;
      param.dtype = dtype;
      fsdp_group *handle = nullptr;
      FSDP(fsdp_create_group(made, name, &param, 1, sizeof param, nullptr, &handle));
    }
    FSDP(fsdp_set_schedule(made, schedule, nullptr));
    FSDP(fsdp_seal_model(made));
  };
}
const Body seal_alpha = seal("alpha", FSDP_FLOAT32, FSDP_SCHEDULE_SEQUENTIAL);
void apply(Rank &rank) {
  std::vector<fsdp_grad> grads;
  for (const GroupDef &def : rank.setup.groups)
    for (const ParamDef &param : def.params) grads.push_back({nullptr, param.count(), FSDP_FLOAT32, 0});
  FSDP(fsdp_apply_grads(rank.model, grads.data(), grads.size(), 0.1, 0, nullptr, nullptr, nullptr));
}

const Body all = reduce({head, layer1, layer0, embed});
const std::vector<fsdp_status> discardable = {FSDP_MISMATCH, FSDP_INVALID_STATE};

const Case cases[] = {
    // Reduces: the n-th of each rank is compared with the n-th of the others.
    {"AnotherGroup",
     then(reduce({head, layer1}), finish),
     then(reduce({head, layer0}), finish),
     {"'layer.1'", "'layer.0'"}},
    {"AnotherOrder",
     then(reduce({head, layer1}), finish),
     then(reduce({layer1, head}), finish),
     {"'layer.1'", "'head'"}},
    {"AReduceLeftOut", then(all, finish), then(reduce({head, layer0, embed}), finish), {"'layer.1'", "'layer.0'"}},
    {"AReduceTooMany", then(all, finish), then(reduce({head}, 0), all, finish), {"'layer.1'", "'head'"}},
    {"AnotherMicrobatch",
     then(reduce({head, layer1, layer0, embed}, 0), all, finish),
     then(all, finish),
     {"fsdp_finish_grads", "reduce_scatter of 'head'"},
     discardable},
    {"TheLastReduceLeftOut",
     then(all, finish),
     then(reduce({head, layer1, layer0}), finish),
     {"fsdp_finish_grads", "'embed'"},
     discardable},
    {"NoReduceAtAll", then(all, finish), finish, {"fsdp_finish_grads", "'head'"}, discardable},
    // A stream waits for a reduce that a rank never starts, since its caller waits elsewhere for this rank's.
    {"AReduceAndValues",
     then(all, finish),
     then(reduce({head}), values(1)),
     {"reduce_scatter of 'layer.1'", "fsdp_all_reduce_values"}},
    {"TheFirstReduceAndValues", then(all, finish), values(1), {"reduce_scatter of 'head'", "fsdp_all_reduce_values"}},
    {"TheLastReduceAndValues",
     then(all, finish),
     then(reduce({head, layer1, layer0}), values(1)),
     {"fsdp_finish_grads", "reduce_scatter of 'embed'", "fsdp_all_reduce_values"}},
    {"AReduceAndRead",
     then(all, finish),
     then(reduce({head}), read_first),
     {"reduce_scatter of 'layer.1'", "fsdp_read_param"}},
    {"AReduceAndSeal",
     then(all, finish),
     then(reduce({head}), seal_alpha),
     {"reduce_scatter of 'layer.1'", "fsdp_seal_model"}},
    {"AReduceAndBeginUpdate",
     then(all, finish),
     then(reduce({head}), begin_update),
     {"'layer.1'", "fsdp_begin_update"},
     discardable},
    {"AReduceOfTheSecondStep",
     then(all, finish, step, all, finish),
     then(all, finish, step, reduce({head}), values(1)),
     {"reduce_scatter of 'layer.1'", "fsdp_all_reduce_values"}},
    {"ApplyAndValues", apply, values(1), {"fsdp_apply_grads", "reduce_scatter of 'head'", "fsdp_all_reduce_values"}},
    {"ApplyAndBeginUpdate", apply, begin_update, {"'head'", "fsdp_begin_update"}, discardable},
    {"ApplyAndAnotherOrder", apply, reduce({head, layer0, layer1, embed}), {"'layer.1'", "'layer.0'"}},
    // The end of a step: its meeting tells who came for what.
    {"FinishAndBeginUpdate", then(all, finish), begin_update, {"fsdp_finish_grads", "fsdp_begin_update"}, discardable},
    {"AnotherScale", then(all, finish), then(all, finish_twice_as_large), {"gave scale", "2"}},
    {"AnotherRate", then(open_window, step), then(open_window, step_faster), {"gave lr", "0.1", "0.2"}},
    {"StepAndPublish",
     then(open_window, step),
     then(open_window, publish),
     {"fsdp_step_adamw", "fsdp_publish_weights"}},
    {"StepAndNorm", then(open_window, step), then(open_window, norm), {"the end of a step", "the gradient norm"}},
    {"NormAndParamNorms",
     then(open_window, norm),
     then(open_window, param_norms),
     {"the gradient norm", "values of parameters"}},
    {"StepAndClose", then(open_window, step), then(open_window, close), {"fsdp_step_adamw", "fsdp_close_context"}},
    {"FinishAndSeal", then(all, finish), then(all, seal_alpha), {"fsdp_finish_grads", "fsdp_seal_model"}},
    {"FinishAndClose", begin_update, close, {"fsdp_begin_update", "fsdp_close_context"}},
    // Values and parameters.
    {"AnotherCountOfValues", values(1), values(2), {"reduces 1 ", "2 "}},
    {"AnotherOpOnValues", values(1), values(1, FSDP_VALUE_MAX), {"op 1", "op 3"}},
    {"ValuesAndClose", values(1), close, {"fsdp_all_reduce_values", "fsdp_close_context"}},
    {"LoadOfAnotherRoot",
     then(begin_update, load(0)),
     then(begin_update, load(1)),
     {"fsdp_load_param from rank 0", "from rank 1"}},
    {"LoadOfAnotherDtype",
     then(begin_update, load(0)),
     then(begin_update, load(0, FSDP_BFLOAT16)),
     {"float32", "bfloat16"}},
    {"LoadAndRead",
     then(begin_update, load(0)),
     then(begin_update, read_first),
     {"fsdp_load_param", "fsdp_read_param"}},
    {"ReadOfAnotherParameter", read_first, read_last, {"of embed.w", "of head.norm"}},
    // Declarations, compared by the seal.
    {"AnotherGroupName", seal_alpha, seal("beta", FSDP_FLOAT32, FSDP_SCHEDULE_SEQUENTIAL), {"alpha", "beta"}},
    {"AnotherDtype", seal_alpha, seal("alpha", FSDP_BFLOAT16, FSDP_SCHEDULE_SEQUENTIAL), {"float32", "bfloat16"}},
    {"AnotherSchedule", seal_alpha, seal("alpha", FSDP_FLOAT32, FSDP_SCHEDULE_INTERLEAVED), {"schedule"}},
    {"AGroupTooMany", seal_alpha, seal("alpha", FSDP_FLOAT32, FSDP_SCHEDULE_SEQUENTIAL, "beta"), {"group"}},
    {"SealAndRead", seal_alpha, read_first, {"fsdp_seal_model", "fsdp_read_param"}},
};

Report live_apart(const Case &of, const Scenario &scenario, uint32_t r, fsdp_context *context, bool odd, bool late) {
  Rank rank(context, scenario);
  rank.load();
  FSDP(fsdp_all_reduce_values(context, std::vector<double>(1).data(), 1, FSDP_VALUE_SUM));
  if (late) pause_ms(300);
  Report report;
  const double start = now();
  try {
    (odd ? of.odd : of.usual)(rank);
    std::strncpy(report.message, "no call failed", sizeof report.message - 1);
  } catch (const Failure &failure) {
    report = describe(failure, Stage::done);
    std::strncpy(report.message, failure.what(), sizeof report.message - 1);
  }
  report.failed_at = now() - start;
  if (std::find(of.statuses.begin(), of.statuses.end(), report.status) == of.statuses.end()) report.recovered = -1;
  // One whose step failed goes on to end it: a peer that still waits must not hang for it.
  if (report.status == FSDP_INVALID_STATE) fsdp_abort_context(context, "the test ends");
  report.rank = static_cast<int32_t>(r);
  return report;
}

void expect_apart(const Case &of, const Report &report) {
  const std::string what = std::string(of.name) + ", rank " + std::to_string(report.rank) + ": " +
                           fsdp_get_status_name(report.status) + ": " + report.message;
  EXPECT_EQ(report.recovered, 0) << what;
  for (const char *word : of.words)
    EXPECT_NE(std::string(report.message).find(word), std::string::npos) << word << " is not in: " << what;
  // The other one may come 300 ms later.
  EXPECT_LT(report.failed_at, 2.3 + 10 * World::worst_delay) << what;
}

Scenario scenario_for(uint32_t ranks) {
  Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, ranks, FSDP_UNSHARD_MAPPED);
  scenario.context.timeout_ms = 60'000;
  return scenario;
}

void part_threads(const Case &of, uint32_t ranks, uint32_t odd, uint32_t late) {
  const Scenario scenario = scenario_for(ranks);
  std::vector<Report> reports(ranks);
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    reports[r] = live_apart(of, scenario, r, context, r == odd, r == late);
  });
  for (const Report &report : reports) expect_apart(of, report);
}

class Desync : public testing::TestWithParam<Case> {};

TEST_P(Desync, TwoThreads) {
  part_threads(GetParam(), 2, 1, 1);
  part_threads(GetParam(), 2, 0, 1);
}

TEST_P(Desync, FourThreads) { part_threads(GetParam(), 4, 2, 0); }

TEST_P(Desync, TwoProcesses) {
  const Case &of = GetParam();
  const Scenario scenario = scenario_for(2);
  World world(2);
  world.start([&](uint32_t r) {
    fsdp_context *context = join(scenario, r, world.name());
    const Report report = live_apart(of, scenario, r, context, r == 1, r == 0);
    return report;
  });
  ASSERT_TRUE(world.collect(30)) << "a rank hangs";
  for (uint32_t r = 0; r < 2; ++r) {
    ASSERT_TRUE(world.heard(r));
    expect_apart(of, world.report(r));
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, Desync, testing::ValuesIn(cases), [](const auto &info) { return info.param.name; });

// Three different calls: whoever waits for whom, each rank is in a circle or waits for one that is.
TEST(DesyncOfThree, IsFound) {
  const Body calls[] = {then(all, finish), values(1), read_first};
  for (uint32_t turn = 0; turn < 3; ++turn) {
    const Scenario scenario = scenario_for(3);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      if (r == turn) pause_ms(200);
      const double start = now();
      try {
        calls[(r + turn) % 3](rank);
        throw std::runtime_error("no call failed");
      } catch (const Failure &failure) {
        require_error(failure.status, FSDP_MISMATCH, {"they wait for each other"});
      }
      REQUIRE(now() - start < 2.3 + 10 * World::worst_delay);
    });
  }
}

// The same calls everywhere, with pauses around the time between two looks: slow is not different.
TEST(NotDesync, RanksAtTheirOwnPace) {
  for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
    const Scenario scenario = scenario_of(FSDP_OPTIM_GRADS_PARAMS, 3, mode);
    run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, scenario);
      rank.load();
      std::mt19937 random(r);
      const auto dawdle = [&] { pause_ms(static_cast<int>(random() % 4 == 0 ? random() % 130 : 0)); };
      for (uint32_t i = 0; i < 12; ++i) {
        for (const size_t g : {embed, layer0, layer1, head}) {
          dawdle();
          FSDP(fsdp_unshard(rank.groups[g], FSDP_FORWARD, nullptr));
          FSDP(fsdp_reshard(rank.groups[g], FSDP_FORWARD, nullptr));
        }
        for (const size_t g : {head, layer1, layer0, embed}) {
          dawdle();
          backward_group(rank, g, i, 0, nullptr);
        }
        dawdle();
        values(1)(rank);
        finish(rank);
        dawdle();
        step(rank);
      }
      FSDP(fsdp_close_context(context));
    });
  }
}

}  // namespace
