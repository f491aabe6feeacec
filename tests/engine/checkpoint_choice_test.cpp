// SPDX-License-Identifier: Apache-2.0
// Which checkpoint of a folder a load takes, which checkpoints it passes over, and what it reports about them.
#include <nlohmann/json.hpp>

#include "checkpoint_folder.h"

using namespace harness;

namespace {

TEST_F(Checkpoint, IsLoadedIfThereIsAny) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 2);
  run(setup, "", [&](Rank &rank) {
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    loaded.step = 99;
    FSDP(load(rank, path + "/nothing", FSDP_LOAD_IF_ANY, &loaded));
    REQUIRE(loaded.name[0] == 0 && loaded.step == 0 && loaded.read_bytes == 0);
    require_error(load(rank, path + "/nothing"), FSDP_SYSTEM, {"rank 0: ", "/nothing: ", "No such file"});
    require_error(load(rank, path), FSDP_INVALID_ARGUMENT, {"rank 0: ", "there is no checkpoint in this folder"});
    rank.load();
    FSDP(save(rank, path + "/nothing", 4));
    FSDP(fsdp_begin_update(rank.model, stream()));
    FSDP(load(rank, path + "/nothing", FSDP_LOAD_IF_ANY, &loaded));
    REQUIRE(std::string(loaded.name) == "step-0000000004");
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

// A host that lacks the mount would begin anew, or from an older one, and take all others with it.
TEST_F(Checkpoint, IsRefusedWhereRankZeroAloneSeesNoneOrAnOlderOne) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 3);
  run(setup, "", [&](Rank &rank) {
    rank.load();
    for (const uint64_t step : {1, 2}) FSDP(save(rank, path + "/saved", step));
    if (rank.rank == 0) {
      fs::create_directories(path + "/empty");
      fs::copy(path + "/saved", path + "/older", fs::copy_options::recursive);
      fs::remove_all(path + "/older/step-0000000002");
    }
    FSDP(fsdp_begin_update(rank.model, stream()));
    for (const std::string folder : {"/none", "/empty", "/older"})
      require_error(
          load(rank, path + (rank.rank == 0 ? folder : "/saved"), FSDP_LOAD_IF_ANY), FSDP_MISMATCH,
          {"rank 0: ", path + folder + ": rank 1 finds step-0000000002 at its path, and it is not here", "mounted"});
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(load(rank, path + "/saved", 0, &loaded));
    REQUIRE(loaded.step == 2);
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

// A damaged one is refused on all ranks and the window stays open; with FALLBACK the one before is loaded.
TEST_F(Checkpoint, ThatIsDamagedIsPassedOverOnlyOnRequest) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  run(setup, "saved", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(save(rank, path));
    clean_step(rank, 1);
    FSDP(save(rank, path));
  });
  const std::string file = path + "/step-0000000002/shard-00002-model-00001-of-00001.safetensors";
  const auto size = fs::file_size(file);
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary)
      .seekp(static_cast<std::streamoff>(size - 1))
      .put(0x55);
  std::mutex mutex;
  std::vector<std::string> lines;
  struct Log {
    std::mutex &mutex;
    std::vector<std::string> &lines;
  } log{mutex, lines};
  Scenario told = setup;
  told.context.log_data = &log;
  told.context.log_level = FSDP_LOG_WARNING;
  told.context.log = [](void *user, fsdp_log_level, const char *message) {
    auto &to = *static_cast<Log *>(user);
    const std::lock_guard lock(to.mutex);
    to.lines.push_back(message);
  };
  run(told, "loaded", [&](Rank &rank) {
    require_error(load(rank, path), FSDP_INVALID_ARGUMENT, {"rank 1: ", file, "are not what was written there"});
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(load(rank, path, FSDP_LOAD_FALLBACK, &loaded));
    REQUIRE(loaded.step == 1 && loaded.passed_over == 1);
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(rank.stats().step == 1);
    clean_step(rank, 1);
  });
  EXPECT_EQ(
      std::ranges::count_if(
          lines, [](const std::string &line) { return line.find("fsdp_load: passed over: ") != std::string::npos; }),
      3);
}

// Only the first rank reads all manifests, and every rank reports what it found.
TEST_F(Checkpoint, ADamagedManifestIsCountedAlikeOnAllRanks) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  run(setup, "saved", [&](Rank &rank) {
    rank.load();
    for (uint64_t step = 1; step <= 3; ++step) FSDP(save(rank, path, step));
  });
  const std::string manifest = path + "/step-0000000003/checkpoint.json";
  // Changes a byte of the manifest's version.
  std::fstream(manifest, std::ios::in | std::ios::out | std::ios::binary).seekp(41).put('9');
  run(setup, "loaded", [&](Rank &rank) {
    require_error(load(rank, path), FSDP_INVALID_ARGUMENT,
                  {"rank 0: ", "it may be the newest that is damaged: " + manifest, "FSDP_LOAD_FALLBACK"});
    fsdp_checkpoint *opened = nullptr;
    require_error(fsdp_open_checkpoint(rank.context, path.c_str(), &opened), FSDP_INVALID_ARGUMENT, {manifest});
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(load(rank, path, FSDP_LOAD_FALLBACK, &loaded));
    REQUIRE(loaded.step == 2 && loaded.passed_over == 1);
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(save(rank, path, 4));
    FSDP(fsdp_begin_update(rank.model, stream()));
    FSDP(load(rank, path, 0, &loaded));
    REQUIRE(loaded.step == 4 && loaded.passed_over == 0);
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
  std::string text(10'000, '\0');
  uint64_t size = text.size();
  ASSERT_EQ(fsdp_list_checkpoints(path.c_str(), text.data(), &size), FSDP_OK);
  const auto json = nlohmann::json::parse(text.c_str());
  EXPECT_EQ(json["checkpoints"].size(), 3u);
  ASSERT_EQ(json["unreadable"].size(), 1u);
  EXPECT_EQ(json["unreadable"][0].get<std::string>().find(manifest + ": /sum is "), 0u) << json["unreadable"][0];
}

nlohmann::json load_of(const Rank &rank) {
  uint64_t size = 0;
  FSDP(fsdp_describe_load(rank.model, nullptr, &size));
  std::string text(size, '\0');
  FSDP(fsdp_describe_load(rank.model, text.data(), &size));
  return nlohmann::json::parse(text.c_str());
}

// With a mistyped name a model would start from scratch. So the tensors that were loaded are counted, listed and
// logged, and it is an error if there are none.
TEST_F(Checkpoint, TellsWhatWasLoaded) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 2);
  run(setup, "saved", [&](Rank &rank) {
    rank.load();
    FSDP(save(rank, path, 1));
  });
  uint64_t params = 0;
  for (const GroupDef &group : setup.groups) params += group.params.size();
  Scenario other = setup, strange = setup;
  other.groups[1].params[0].name = "new";
  for (GroupDef &group : strange.groups)
    for (ParamDef &param : group.params) param.name += ".x";
  std::mutex mutex;
  std::vector<std::string> lines;
  struct Log {
    std::mutex &mutex;
    std::vector<std::string> &lines;
  } log{mutex, lines};
  other.context.log_data = &log;
  other.context.log_level = FSDP_LOG_INFO;
  other.context.log = [](void *user, fsdp_log_level, const char *message) {
    auto &to = *static_cast<Log *>(user);
    const std::lock_guard lock(to.mutex);
    to.lines.push_back(message);
  };
  constexpr uint32_t loose = FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED;
  run(other, "in part", [&](Rank &rank) {
    uint64_t size = 0;
    require_error(fsdp_describe_load(rank.model, nullptr, &size), FSDP_INVALID_STATE, {"nothing has been loaded"});
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(load(rank, path, loose, &loaded));
    // Each parameter has two moments and a count of steps.
    REQUIRE(loaded.loaded_tensors == 4 * (params - 1) && loaded.missing_tensors == 4 && loaded.unexpected_tensors == 4);
    const auto json = load_of(rank);
    REQUIRE(json["loaded"].size() == 4 * (params - 1) && json["call"] == "fsdp_load" && json["step"] == 1);
    REQUIRE(json["missing"].size() == 4 && json["missing"][0] == "new" && json["unexpected"].size() == 4);
    FSDP(load(rank, path, loose | FSDP_LOAD_WEIGHTS_ONLY, &loaded));
    REQUIRE(loaded.loaded_tensors == params - 1 && loaded.missing_tensors == 1 && loaded.unexpected_tensors == 1);
    fsdp_load_options options = {sizeof options, loose, 0};
    FSDP(fsdp_load_weights(rank.model, path.c_str(), nullptr, 0, sizeof(fsdp_rename), &options, &loaded));
    REQUIRE(loaded.loaded_tensors == params - 1 && loaded.missing_tensors == 1 && loaded.unexpected_tensors == 1);
    REQUIRE(load_of(rank)["call"] == "fsdp_load_weights" && load_of(rank)["missing"] == nlohmann::json({"new"}));
    rank.load();
  });
  EXPECT_EQ(std::ranges::count_if(lines,
                                  [](const std::string &line) {
                                    return line.find("tensors loaded; 1 missing: \"new\"; 1 unexpected: ") != line.npos;
                                  }),
            4);
  run(strange, "nothing", [&](Rank &rank) {
    require_error(load(rank, path, loose), FSDP_INVALID_ARGUMENT,
                  {"none of the model's tensors", "FSDP_LOAD_IF_ANY", "missing: ", "unexpected: "});
    fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
    options.flags = loose;
    const auto load_weights = [&](fsdp_loaded *loaded) {
      return fsdp_load_weights(rank.model, path.c_str(), nullptr, 0, sizeof(fsdp_rename), &options, loaded);
    };
    require_error(load_weights(nullptr), FSDP_INVALID_ARGUMENT, {"none of the model's tensors"});
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(load(rank, path, loose | FSDP_LOAD_IF_ANY, &loaded));
    REQUIRE(loaded.loaded_tensors == 0 && loaded.missing_tensors == 4 * params && loaded.name[0] == 0);
    options.flags |= FSDP_LOAD_IF_ANY;
    FSDP(load_weights(&loaded));
    REQUIRE(loaded.loaded_tensors == 0 && loaded.unexpected_tensors == params);
    rank.load();
  });
}

}  // namespace
