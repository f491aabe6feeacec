// SPDX-License-Identifier: Apache-2.0
// The flight record: when it is written, by which rank, and what it contains. tests/tools/flight_test.sh tests what
// several records show together.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "harness.h"

using namespace harness;

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

class Flight : public testing::Test {
 protected:
  void SetUp() override { fs::create_directory(folder_); }
  void TearDown() override {
    ::unsetenv("FSDP_FLIGHT_DIRECTORY");
    fs::remove_all(folder_);
  }
  std::string path(const std::string &name) const { return (folder_ / name).string(); }
  Json read(const std::string &name) const {
    std::ifstream in(path(name));
    EXPECT_TRUE(in) << name;
    return Json::parse(in);
  }
  bool written(uint32_t rank) const { return fs::exists(folder_ / ("flight-" + std::to_string(rank) + ".json")); }
  Scenario scenario(uint32_t ranks, const char *directory) const {
    Scenario scenario = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks, FSDP_UNSHARD_MAPPED);
    scenario.context.flight_directory = directory;
    scenario.context.timeout_ms = 20'000;
    return scenario;
  }

  const fs::path folder_ = testing::TempDir() + "flight_test." + std::to_string(::getpid());
};

// Rank 1 stays away from the end of the step, until rank 0 has given up.
void fail_at_finish(Scenario setup, const std::function<void(uint32_t)> &after = {}) {
  setup.context.timeout_ms = 1500;
  std::atomic<bool> given_up{false};
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    forward(rank, nullptr);
    backward(rank, 0, 0, nullptr);
    for (int ms = 0; r == 1 && !given_up && ms < 20'000; ++ms) pause_ms(1);
    const fsdp_status status = fsdp_finish_grads(rank.model, 1, 0, nullptr);
    given_up = true;
    require_error(status, FSDP_TIMEOUT, {"rank 1"});
    if (after) after(r);
  });
}

uint64_t waited_ns(const Json &record) {
  if (!record.contains("wait")) return 0;
  return record["monotonic_ns"].get<uint64_t>() - record["wait"]["since_ns"].get<uint64_t>();
}

TEST_F(Flight, IsWrittenByTheFirstCallThatReturnsTheFailure) {
  const std::string folder = folder_.string();
  std::atomic<int> there{0};
  fail_at_finish(scenario(2, folder.c_str()), [&](uint32_t r) { there += written(r); });
  EXPECT_EQ(there, 2);
  const Json record = read("flight-0.json");
  EXPECT_EQ(record["rank"], 0);
  EXPECT_EQ(record["world_size"], 2);
  EXPECT_EQ(record["pid"], ::getpid());
  EXPECT_EQ(record["error"]["status"], FSDP_TIMEOUT);
  EXPECT_EQ(record["error"]["rank"], 1);
  EXPECT_NE(record["error"]["message"].get<std::string>().find("rank 1"), std::string::npos);
  EXPECT_EQ(record["wait"]["for"], "wait for peers");
  const Json call = record["calls"].back();
  EXPECT_EQ(call["call"], "fsdp_finish_grads");
  EXPECT_EQ(call["state"], "failed");
  EXPECT_EQ(call["status"], FSDP_TIMEOUT);
  const Json meeting = record["collectives"].back();
  EXPECT_EQ(meeting["sequence"], "meetings of model 0");
  EXPECT_EQ(meeting["what"], "fsdp_finish_grads");
  EXPECT_EQ(meeting["state"], "failed");
}

// A call that did not wait was inside the context, and is recorded with its end. A call that is refused because another
// thread is inside is not.
TEST_F(Flight, TellsThatACallWasBusy) {
  const Scenario setup = scenario(2, nullptr);
  std::atomic<bool> asked{false};
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (int ms = 0; r == 1 && !asked && ms < 20'000; ++ms) pause_ms(1);
    for (size_t g = rank.groups.size(); g-- > 0;) {
      if (r == 0 && g == 1) {
        REQUIRE(fsdp_put_grad(rank.groups[1], 0, nullptr, 0, 0, FSDP_GRAD_NO_WAIT, nullptr) == FSDP_BUSY);
        FSDP(fsdp_write_flight_record(context, path("busy").c_str()));
        asked = true;
      }
      put_all(rank, g, 1);
      FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
    }
    FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
  const Json record = read("busy"), call = record["calls"].back();
  EXPECT_EQ(call["call"], "fsdp_put_grad");
  EXPECT_EQ(call["state"], "failed");
  EXPECT_EQ(call["status"], FSDP_BUSY);
  EXPECT_FALSE(record.contains("error"));
  EXPECT_FALSE(record.contains("wait"));
}

// fsdp_finish_grads reduces the same groups, in the same order, as a backward pass would.
TEST_F(Flight, TellsWhatTheEndOfAStepReduces) {
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}) {
    Scenario setup = scenario(2, nullptr);
    setup.model.strategy = strategy;
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      for (const size_t g : {0u, 2u}) {
        put_all(rank, g, 1);
        FSDP(fsdp_reduce_grad(rank.groups[g], 0, nullptr));
      }
      FSDP(fsdp_finish_grads(rank.model, 1, FSDP_LAST, nullptr));
      FSDP(fsdp_write_flight_record(context, path("end-" + std::to_string(r)).c_str()));
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      FSDP(fsdp_close_context(context));
    });
    std::vector<std::string> reduced;
    const Json record = read("end-1");
    for (const Json &one : record["collectives"])
      if (one["sequence"] == "reduces of model 0") reduced.push_back(one["group"]);
    EXPECT_EQ(reduced, strategy == FSDP_STRATEGY_OPTIM
                           ? (std::vector<std::string>{"head", "layer.1", "layer.0", "embed"})
                           : (std::vector<std::string>{"embed", "layer.1", "head", "layer.0"}));
  }
}

TEST_F(Flight, NamesCallsGroupsPhasesAndCollectives) {
  const Scenario setup = scenario(2, nullptr);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    finish_step(rank, 0);
    update(rank);
    FSDP(fsdp_write_flight_record(context, path("now-" + std::to_string(r)).c_str()));
    FSDP(fsdp_close_context(context));
  });
  const Json record = read("now-1");
  EXPECT_FALSE(record.contains("error"));
  EXPECT_FALSE(record.contains("wait"));
  EXPECT_EQ(record["calls_lost"], 0);
  std::vector<std::string> visits, reduces;
  for (const Json &call : record["calls"])
    if (call["call"] == "fsdp_unshard") {
      EXPECT_EQ(call["state"], "completed");
      visits.push_back(call["group"].get<std::string>() + " " + call["phase"].get<std::string>());
    }
  std::map<uint64_t, std::string> calls;
  for (const Json &call : record["calls"]) calls[call["entry"]] = call["call"];
  for (const Json &of : record["collectives"])
    if (of["sequence"] == "reduces of model 0") {
      EXPECT_EQ(calls[of["call_entry"]], "fsdp_reduce_grad");
      EXPECT_EQ(of["state"], "completed");
      EXPECT_EQ(of["number"], reduces.size());
      EXPECT_GE(of["started_ns"], of["enqueued_ns"]);
      EXPECT_GE(of["ended_ns"], of["started_ns"]);
      reduces.push_back(of["group"]);
    }
  EXPECT_EQ(visits,
            (std::vector<std::string>{"embed FORWARD", "layer.0 FORWARD", "layer.1 FORWARD", "head FORWARD",
                                      "head BACKWARD", "layer.1 BACKWARD", "layer.0 BACKWARD", "embed BACKWARD"}));
  EXPECT_EQ(reduces, (std::vector<std::string>{"head", "layer.1", "layer.0", "embed"}));
}

// The number of a model differs from rank to rank, so models with equal numbers on different ranks must not be
// compared.
TEST_F(Flight, NamesTheRanksOfModelsOnAPartOfTheJob) {
  Scenario setup = scenario(3, nullptr);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    const uint32_t near[] = {0, 1}, far[] = {2};
    Scenario own = setup;
    own.mesh.ranks = r < 2 ? near : far;
    own.mesh.rank_count = own.mesh.shard_size = r < 2 ? 2 : 1;
    Rank all(context, setup), part(context, own);
    all.load();
    part.load();
    FSDP(fsdp_write_flight_record(context, path("part-" + std::to_string(r)).c_str()));
    FSDP(fsdp_close_context(context));
  });
  const auto sequences = [&](const std::string &name) {
    std::set<std::string> set;
    const Json record = read(name);
    for (const Json &of : record["collectives"]) set.insert(of["sequence"]);
    return set;
  };
  EXPECT_EQ(sequences("part-1"), (std::set<std::string>{"meetings of model 0", "meetings of model 0 on ranks 0-1"}));
  EXPECT_EQ(sequences("part-2"), (std::set<std::string>{"meetings of model 0", "meetings of model 0 on ranks 2"}));
}

TEST_F(Flight, KeepsTheLastEntries) {
  Scenario setup = scenario(1, nullptr);
  setup.context.flight_events = 16;
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    double value = 1;
    for (int i = 0; i < 100; ++i) FSDP(fsdp_all_reduce_values(context, nullptr, &value, 1, FSDP_VALUE_SUM));
    FSDP(fsdp_write_flight_record(context, path("ring").c_str()));
  });
  const Json record = read("ring");
  EXPECT_EQ(record["calls"].size(), 8u);
  EXPECT_EQ(record["calls_lost"], 92);
  EXPECT_EQ(record["calls"].front()["entry"], 92);
  EXPECT_EQ(record["collectives"].size(), 8u);
  EXPECT_EQ(record["collectives"].back()["number"], 99);
}

TEST_F(Flight, OfAnotherThreadSaysWhatTheCallerWaitsFor) {
  Scenario setup = scenario(2, nullptr);
  std::atomic<bool> seen{false};
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    finish_step(rank, 0);
    for (int ms = 0; r == 1 && !seen && ms < 15'000; ++ms) pause_ms(1);
    std::thread observer;
    if (r == 0)
      observer = std::thread([&, context] {
        const double end = now() + 10;
        // The failure of this write must not be recorded as the end of the other thread's call.
        EXPECT_EQ(fsdp_write_flight_record(context, path("no/such").c_str()), FSDP_SYSTEM);
        do {
          pause_ms(20);
          EXPECT_EQ(fsdp_write_flight_record(context, path("waiting").c_str()), FSDP_OK);
        } while (waited_ns(read("waiting")) < 100'000'000 && now() < end);
        seen = true;
      });
    const fsdp_status status = fsdp_step_adamw(rank.model, 0.1, nullptr, nullptr);
    if (observer.joinable()) observer.join();
    REQUIRE(status == FSDP_OK);
    FSDP(fsdp_close_context(context));
  });
  const Json record = read("waiting");
  EXPECT_FALSE(record.contains("error"));
  EXPECT_EQ(record["wait"]["for"], "wait for peers");
  EXPECT_GE(waited_ns(record), 100'000'000u);
  EXPECT_EQ(record["calls"].back()["call"], "fsdp_step_adamw");
  EXPECT_EQ(record["calls"].back()["state"], "started");
  EXPECT_EQ(record["collectives"].back()["state"], "started");
}

TEST_F(Flight, TheDirectoryMayComeFromTheEnvironmentAndTheOptionsWin) {
  ::setenv("FSDP_FLIGHT_DIRECTORY", folder_.c_str(), 1);
  fail_at_finish(scenario(2, nullptr));
  EXPECT_TRUE(written(0) && written(1));
  fs::remove(path("flight-0.json"));
  fs::create_directory(path("other"));
  const std::string other = path("other");
  fail_at_finish(scenario(2, other.c_str()));
  EXPECT_FALSE(written(0));
  EXPECT_TRUE(fs::exists(path("other/flight-0.json")));
}

TEST_F(Flight, RecordsOfEarlierFailuresAreKept) {
  const std::string folder = folder_.string();
  for (int failures = 1; failures <= 3; ++failures) fail_at_finish(scenario(2, folder.c_str()));
  const auto text = [&](const char *name) {
    std::ifstream file(path(name));
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  for (const char *name : {"flight-0.json", "flight-0.json.1", "flight-0.json.2", "flight-1.json.2"})
    EXPECT_FALSE(text(name).empty()) << name;
  EXPECT_NE(text("flight-0.json"), text("flight-0.json.1"));
  EXPECT_NE(text("flight-0.json.1"), text("flight-0.json.2"));
  EXPECT_FALSE(fs::exists(path("flight-0.json.3")));
}

TEST_F(Flight, NothingIsWrittenWithoutADirectoryOrAFailure) {
  ::unsetenv("FSDP_FLIGHT_DIRECTORY");
  fail_at_finish(scenario(2, nullptr));
  const std::string folder = folder_.string();
  const Scenario setup = scenario(2, folder.c_str());
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    require_error(fsdp_unshard(rank.groups[0], FSDP_FORWARD, 0, nullptr), FSDP_INVALID_STATE, {"fsdp_publish_weights"});
    rank.load();
    clean_step(rank, r);
    FSDP(fsdp_close_context(context));
  });
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(Flight, IsWrittenAtDestroyIfNoCallHasReturnedTheFailure) {
  const std::string folder = folder_.string();
  const Scenario setup = scenario(1, folder.c_str());
  run_threads(setup, [&](uint32_t, fsdp_context *context) { FSDP(fsdp_abort_context(context, "enough")); });
  EXPECT_EQ(read("flight-0.json")["error"]["status"], FSDP_ABORTED);
}

TEST_F(Flight, ADirectoryThatCannotBeWrittenIsLogged) {
  std::vector<std::string> lines;
  const std::string missing = path("no/such/directory");
  Scenario setup = scenario(1, missing.c_str());
  setup.context.log_data = &lines;
  setup.context.log = [](void *data, fsdp_log_level, const char *line) {
    static_cast<std::vector<std::string> *>(data)->push_back(line);
  };
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    double value = 1;
    FSDP(fsdp_all_reduce_values(context, nullptr, &value, 1, FSDP_VALUE_SUM));
    FSDP(fsdp_abort_context(context, "enough"));
    REQUIRE(fsdp_all_reduce_values(context, nullptr, &value, 1, FSDP_VALUE_SUM) == FSDP_ABORTED);
  });
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_NE(lines[0].find("'" + missing + "'"), std::string::npos) << lines[0];
  EXPECT_NE(lines[1].find("enough"), std::string::npos) << lines[1];
  EXPECT_NE(lines[1].find("could not be written"), std::string::npos) << lines[1];
}

TEST_F(Flight, WrongArgumentsAreRefused) {
  fsdp_context_options options = FSDP_CONTEXT_OPTIONS_INIT;
  fsdp_context *context = nullptr;
  options.flight_events = 1u << 30;
  require_error(fsdp_create_local_contexts(1, &options, &context), FSDP_INVALID_ARGUMENT, {"flight_events"});
  options.flight_events = 1;
  FSDP(fsdp_create_local_contexts(1, &options, &context));
  require_error(fsdp_write_flight_record(context, nullptr), FSDP_INVALID_ARGUMENT, {"path"});
  require_error(fsdp_write_flight_record(context, ""), FSDP_INVALID_ARGUMENT, {"path"});
  require_error(fsdp_write_flight_record(context, path("no/such").c_str()), FSDP_SYSTEM, {"fsdp_write_flight_record"});
  fsdp_destroy_context(context);
  FSDP(fsdp_create_plan_context(4, 1, nullptr, &context));
  require_error(fsdp_write_flight_record(context, path("plan").c_str()), FSDP_INVALID_STATE, {"only plans"});
  fsdp_destroy_context(context);
}

}  // namespace
