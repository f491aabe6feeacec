// SPDX-License-Identifier: Apache-2.0
// What a trace shows of a step that is known: names, order, nesting, lanes, bytes, waits.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <numeric>

#include "harness.h"
#include "trace_file.h"

using namespace harness;

namespace {

using Names = std::vector<std::string>;

std::string path_of(uint32_t rank) {
  return testing::TempDir() + "trace_test." + std::to_string(::getpid()) + ".rank" + std::to_string(rank);
}

// Two groups, gathered one at a time by copies.
Scenario traced_scenario(fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, mode);
  scenario.context.flags = FSDP_CONTEXT_TRACE;
  scenario.model.flags = FSDP_MODEL_NO_PREFETCH;
  scenario.groups = equal_groups(2, 64, 32);
  return scenario;
}

// Runs `body` on every rank with a loaded model; then each rank's trace is written and read.
template <class Body>
std::vector<TraceFile> trace(const Scenario &scenario, Body body) {
  run_threads(scenario, [&](uint32_t r, fsdp_context *context) {
    {
      Rank rank(context, scenario);
      rank.load();
      body(rank);
    }
    FSDP(fsdp_write_trace(context, path_of(r).c_str()));
    FSDP(fsdp_close_context(context));
  });
  std::vector<TraceFile> files;
  for (uint32_t r = 0; r < scenario.ranks; ++r) {
    files.emplace_back(path_of(r));
    std::filesystem::remove(path_of(r));
  }
  return files;
}

TEST(Trace, ShowsEveryCallOfAStepInOrder) {
  const auto files = trace(traced_scenario(), [](Rank &rank) { clean_step(rank, 0); });
  const Names expected = {"seal_model",           "load_param layer.0",   "load_param layer.1",
                          "publish_weights",      "unshard layer.0",      "reshard layer.0",
                          "unshard layer.1",      "reshard layer.1",      "unshard layer.1",
                          "acquire_grad layer.1", "reshard layer.1",      "reduce_grad layer.1",
                          "unshard layer.0",      "acquire_grad layer.0", "reshard layer.0",
                          "reduce_grad layer.0",  "finish_grads",         "step_adamw"};
  for (uint32_t r = 0; r < 2; ++r) {
    const auto calls = files[r].of_category(r, "caller", "call");
    EXPECT_EQ(TraceFile::names(calls), expected);
    EXPECT_EQ(calls[1].bytes, group_bytes);
    EXPECT_EQ(calls[1].version, 0u);
    EXPECT_EQ(calls[4].version, 1u);
    EXPECT_EQ(calls[4].group, "layer.0");
  }
}

// Each event of a lane begins within or after the first call for its group that has no event on the lane yet.
void expect_behind(const std::vector<Slice> &done, const std::vector<Slice> &calls, const std::string &call) {
  auto asked = calls.begin();
  for (size_t i = 0; i < done.size(); ++i) {
    EXPECT_GE(done[i].begin_ns, i > 0 ? done[i - 1].end_ns : 0);
    asked = std::find_if(asked, calls.end(), [&](const Slice &one) { return one.name == call + done[i].group; });
    ASSERT_NE(asked, calls.end()) << done[i].name;
    EXPECT_GE(done[i].begin_ns, asked->begin_ns) << done[i].name;
    ++asked;
  }
}

TEST(Trace, GathersAndReducesHaveLanesOfTheirOwn) {
  const auto files = trace(traced_scenario(), [](Rank &rank) { clean_step(rank, 0); });
  for (uint32_t r = 0; r < 2; ++r) {
    const auto gathers = files[r].of_category(r, "gather", "collective");
    EXPECT_EQ(TraceFile::names(gathers),
              (Names{"all_gather layer.0", "all_gather layer.1", "all_gather layer.1", "all_gather layer.0"}));
    for (const Slice &gather : gathers) EXPECT_EQ(gather.bytes, group_bytes);
    const auto reduces = files[r].of_category(r, "reduce", "collective");
    EXPECT_EQ(TraceFile::names(reduces), (Names{"reduce_scatter layer.1", "reduce_scatter layer.0"}));
    // An event begins when it is requested, and not before the previous one has ended.
    const auto calls = files[r].of_category(r, "caller", "call");
    expect_behind(gathers, calls, "unshard ");
    const auto waits = files[r].of_category(r, "gather", "wait");
    ASSERT_EQ(waits.size(), gathers.size());
    for (size_t i = 0; i < waits.size(); ++i) EXPECT_GE(gathers[i].begin_ns, waits[i].end_ns);
    expect_behind(reduces, calls, "reduce_grad ");
    for (const Slice &reduce : reduces) EXPECT_EQ(reduce.bytes, group_bytes);
    EXPECT_EQ(TraceFile::names(files[r].of_category(r, "caller", "instant")), (Names{"published", "published"}));
    EXPECT_EQ(files[r].timelines.at(r).at("lost"), 0);
    EXPECT_EQ(files[r].timelines.at(r).at("world_size"), 2);
    EXPECT_TRUE(files[r].labels.empty());
  }
}

// The states do not fit into the turns, so an update waits for the disk at least once.
TEST(Trace, WaitsForTheFileShowTheBytesThatTheDiskMoved) {
  Scenario scenario = traced_scenario();
  scenario.groups = equal_groups(2, 512, 256);
  scenario.model.state_home = FSDP_HOME_FILE;
  scenario.model.home_directory = "/var/tmp";
  scenario.model.turn_bytes = 65536;
  uint64_t moved = 0;
  const auto files = trace(scenario, [&](Rank &rank) {
    clean_step(rank, 0);
    if (rank.rank == 0) moved = rank.stats().home_read_bytes + rank.stats().home_written_bytes;
  });
  uint64_t shown = 0;
  for (const Slice &wait : files[0].of_category(0, "caller", "wait"))
    if (wait.name == "wait for the home file") shown += wait.bytes;
  EXPECT_GT(shown, 0u);
  EXPECT_LE(shown, moved);
}

// The clock is one for all ranks: what peers did together lies side by side in a merged trace.
TEST(Trace, AReduceBeginsOnNoRankAfterItEndedOnAnother) {
  const auto files = trace(traced_scenario(), [](Rank &rank) { clean_step(rank, 0); });
  const auto first = files[0].of_category(0, "reduce", "collective"),
             second = files[1].of_category(1, "reduce", "collective");
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_LT(first[i].begin_ns, second[i].end_ns);
    EXPECT_LT(second[i].begin_ns, first[i].end_ns);
  }
}

TEST(Trace, MappedWeightsNeedNoGatherLane) {
  const auto files = trace(traced_scenario(FSDP_UNSHARD_MAPPED), [](Rank &rank) { clean_step(rank, 0); });
  EXPECT_TRUE(files[0].lane(0, "gather").empty());
}

TEST(Trace, PrefetchesShowInsideTheUnshardThatStartsThem) {
  Scenario scenario = traced_scenario();
  scenario.model.flags = 0;
  scenario.prefetch_small_groups();
  const auto files = trace(scenario, [](Rank &rank) { clean_step(rank, 0); });
  const auto calls = files[0].of_category(0, "caller", "call");
  ASSERT_GT(calls.size(), 6u);
  EXPECT_EQ(calls[4].name, "unshard layer.0");
  EXPECT_EQ(calls[5].name, "prefetch layer.1");
  EXPECT_GE(calls[5].begin_ns, calls[4].begin_ns);
  EXPECT_LE(calls[5].end_ns, calls[4].end_ns);
}

TEST(Trace, OtherStrategiesNameTheirCollectives) {
  Scenario scenario = traced_scenario();
  scenario.model.flags = 0;
  scenario.model.strategy = FSDP_STRATEGY_NO_SHARD;
  auto files = trace(scenario, [](Rank &rank) { clean_step(rank, 0); });
  auto reduces = files[0].of_category(0, "reduce", "collective");
  EXPECT_EQ(TraceFile::names(reduces), (Names{"all_reduce layer.1", "all_reduce layer.0"}));
  EXPECT_EQ(reduces[0].bytes, group_bytes + group_bytes / 2);
  scenario.model.strategy = FSDP_STRATEGY_OPTIM_GRADS;
  files = trace(scenario, [](Rank &rank) { clean_step(rank, 0); });
  const auto refreshes = files[0].of_category(0, "gather", "collective");
  EXPECT_EQ(refreshes.size(), 4u);  // both groups, for each of two versions
  EXPECT_EQ(refreshes[0].bytes, group_bytes / 2);
  EXPECT_EQ(refreshes[2].version, 2u);
  scenario.ranks = 1;
  files = trace(scenario, [](Rank &rank) { clean_step(rank, 0); });
  EXPECT_EQ(TraceFile::names(files[0].of_category(0, "reduce", "collective")),
            (Names{"local_sum layer.1", "local_sum layer.0"}));
}

// Exposed communication: the wait slices of the caller's lane are the counter, to the nanosecond.
TEST(Trace, WaitsAddUpToTheCounter) {
  std::vector<uint64_t> waited(2);
  const auto files = trace(traced_scenario(), [&](Rank &rank) {
    for (uint32_t step = 0; step < 3; ++step) {
      if (rank.rank == 1) pause_ms(100);  // so that rank 0 waits
      finish_step(rank, step);
      double norm = 0;
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, nullptr, &norm));
      update(rank);
      rank.read(0, 0);
    }
    waited[rank.rank] = rank.stats().wait_ns;
  });
  for (uint32_t r = 0; r < 2; ++r) {
    const auto waits = files[r].of_category(r, "caller", "wait");
    const uint64_t sum =
        std::accumulate(waits.begin(), waits.end(), uint64_t{0},
                        [](uint64_t total, const Slice &wait) { return total + wait.end_ns - wait.begin_ns; });
    EXPECT_EQ(sum, waited[r]) << "rank " << r;
  }
  EXPECT_GT(waited[0], 0u);
}

TEST(Trace, WaitsNameWhatTheyWaitFor) {
  const auto files = trace(traced_scenario(), [&](Rank &rank) {
    double together = 1;
    FSDP(fsdp_all_reduce_values(rank.context, nullptr, &together, 1, FSDP_VALUE_SUM));
    if (rank.rank == 1) pause_ms(1500);
    clean_step(rank, 0);
  });
  bool reduce = false;
  for (const Slice &wait : files[0].of_category(0, "caller", "wait")) {
    EXPECT_EQ(wait.name.find("wait for "), 0u);
    reduce = reduce || (wait.name.find("wait for reduce") == 0 && wait.end_ns - wait.begin_ns > 20'000'000);
  }
  EXPECT_TRUE(reduce);
}

TEST(Trace, TwoModelsOfAContextHaveLanesOfTheirOwn) {
  const Scenario scenario = traced_scenario();
  const auto files = trace(scenario, [&](Rank &rank) {
    Rank second(rank.context, scenario);
    second.load();
    clean_step(rank, 0);
    clean_step(second, 0);
  });
  EXPECT_EQ(files[0].of_category(0, "gather", "collective").size(), 4u);
  EXPECT_EQ(files[0].of_category(0, "gather of model 1", "collective").size(), 4u);
  EXPECT_EQ(files[0].of_category(0, "reduce of model 1", "collective").size(), 2u);
}

TEST(Trace, WithoutOverlapTheLanesAreTheSame) {
  Scenario scenario = traced_scenario();
  scenario.context.flags |= FSDP_CONTEXT_NO_OVERLAP;
  const auto files = trace(scenario, [](Rank &rank) { clean_step(rank, 0); });
  EXPECT_EQ(files[1].of_category(1, "gather", "collective").size(), 4u);
  EXPECT_EQ(files[1].of_category(1, "reduce", "collective").size(), 2u);
}

TEST(Trace, NamesAreQuoted) {
  Scenario scenario = traced_scenario();
  scenario.groups[0].name = "a \"quoted\"\\\n\tname \u00fc";
  const auto files = trace(scenario, [](Rank &rank) { clean_step(rank, 0); });
  EXPECT_EQ(files[0].of_category(0, "gather", "collective")[0].group, scenario.groups[0].name);
}

TEST(Trace, ValuesReducedByTheContextShow) {
  const auto files = trace(traced_scenario(), [](Rank &rank) {
    double value = 1;
    FSDP(fsdp_all_reduce_values(rank.context, nullptr, &value, 1, FSDP_VALUE_SUM));
  });
  const auto calls = files[0].of_category(0, "caller", "call");
  EXPECT_EQ(calls.back().name, "all_reduce_values");
  EXPECT_EQ(calls.back().bytes, sizeof(double));
}

// The second group has no planes.
TEST(Trace, GathersSayWhichPlanesTheyMove) {
  const auto planes = [](fsdp_strategy strategy, fsdp_plane_policy policy) {
    Scenario scenario = traced_scenario();
    scenario.model.plane_policy = policy;
    for (GroupDef &group : scenario.groups) group.options.strategy = strategy;
    scenario.groups[0].params[0].quantization = FSDP_QUANTIZE_MXFP8;
    const auto files = trace(scenario, [](Rank &rank) { clean_step(rank, 0); });
    Names found;
    for (const Slice &slice : files[0].lane(0, "gather"))
      if (slice.category == "collective") found.push_back(slice.name + ": " + slice.planes);
    return found;
  };
  EXPECT_EQ(
      planes(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 0),
      (Names{"all_gather layer.0: row", "all_gather layer.1: ", "all_gather layer.1: ", "all_gather layer.0: column"}));
  EXPECT_EQ(planes(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_PLANES_BOTH),
            (Names{"all_gather layer.0: row, column",
                   "all_gather layer.1: ", "all_gather layer.1: ", "all_gather layer.0: row, column"}));
}

}  // namespace
