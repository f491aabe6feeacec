// SPDX-License-Identifier: Apache-2.0
// Checkpoints that are saved while training goes on, of several models and of the caller's bytes, over disks that are
// slow or fail.
#include <nlohmann/json.hpp>
#include <optional>

#include "../unit/system_faults.h"
#include "checkpoint_folder.h"

using namespace harness;

namespace {

using fsdp::test::FaultScope;
using fsdp::test::SystemFault;

class Saving : public Checkpoint {};

// A handle that its scope gives back.
class Handle {
 public:
  Handle() = default;
  ~Handle() { fsdp_destroy_checkpoint(handle); }
  Handle(const Handle &) = delete;
  Handle &operator=(const Handle &) = delete;
  fsdp_checkpoint_status status() const {
    fsdp_checkpoint_status status = FSDP_CHECKPOINT_STATUS_INIT;
    FSDP(fsdp_get_checkpoint_status(handle, &status));
    return status;
  }
  fsdp_checkpoint *handle = nullptr;
};

void run(const Scenario &setup, const std::function<void(Rank &)> &body, bool close = true) {
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t, fsdp_context *context) {
        Rank rank(context, setup);
        body(rank);
        if (close) FSDP(fsdp_close_context(context));
      },
      &errors);
  for (const std::string &error : errors) EXPECT_EQ(error, "");
}

// One rank whose weights and states are more than a save can hold: 12 bytes for each of 4 million elements, of 32 MiB.
Scenario large() {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  setup.groups = equal_groups(2, 2048, 1024);
  return setup;
}

void begin(const Rank &rank, const std::string &folder, Handle &checkpoint, const char *name = nullptr) {
  FSDP(fsdp_begin_checkpoint(rank.context, folder.c_str(), nullptr, &checkpoint.handle));
  FSDP(fsdp_add_checkpoint_model(checkpoint.handle, name, rank.model));
}

// The weights may not change before they are copied, and the disk is slow: finish_grads waits, the save has the earlier
// bytes, and the wait is counted.
TEST_F(Saving, BesideTrainingHasTheBytesOfItsCommit) {
  const Scenario setup = large();
  run(setup, [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(fsdp_save(rank.model, (path + "/rest").c_str(), nullptr));
    forward(rank, nullptr);
    backward(rank, 1, 0, nullptr);
    Handle checkpoint;
    const FaultScope slow({SystemFault::Way::waits, 0, 1500, "pwrite"});  // the first block, and those behind it
    begin(rank, path, checkpoint);
    FSDP(fsdp_commit_checkpoint(checkpoint.handle));
    REQUIRE(rank.stats().checkpoint_stall_ns == 0);
    REQUIRE(checkpoint.status().state == FSDP_CHECKPOINT_COPYING);
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    REQUIRE(rank.stats().checkpoint_stall_ns > 0);
    update(rank);
    const fsdp_checkpoint_status status = checkpoint.status();
    REQUIRE(status.state >= FSDP_CHECKPOINT_WRITING && std::string(status.name) == "step-0000000001");
    REQUIRE(status.step == 1 && status.bytes_in_all > uint64_t{12} * 4 * 1024 * 1024);
    FSDP(fsdp_wait_checkpoint(checkpoint.handle));
    REQUIRE(checkpoint.status().state == FSDP_CHECKPOINT_COMMITTED);
    REQUIRE(checkpoint.status().bytes == checkpoint.status().bytes_in_all);
    FSDP(fsdp_wait_checkpoint(checkpoint.handle));
  });
  EXPECT_EQ(files("step-0000000001"), files("rest/step-0000000001"));
}

// With memory for all data nothing waits for the disk. The memory is planned, reported, and allocated at the seal.
TEST_F(Saving, WithRoomForAllWaitsForNoDisk) {
  Scenario setup = large();
  const auto staging = [&](uint64_t bytes) {
    setup.model.save_staging_bytes = bytes;
    uint64_t planned = 0;
    run(setup, [&](Rank &rank) {
      planned = memory_of(rank.model, 0).role_bytes[FSDP_ROLE_STAGING];
      REQUIRE(rank.stats().allocated_bytes[FSDP_ROLE_STAGING] == planned);
      rank.load();
    });
    return planned;
  };
  constexpr uint64_t room = uint64_t{56} << 20;
  const uint64_t without = staging(0);
  EXPECT_EQ(staging(room), without + room);
  run(setup, [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    forward(rank, nullptr);
    backward(rank, 1, 0, nullptr);
    Handle checkpoint;
    std::optional<FaultScope> disk(SystemFault{SystemFault::Way::stands, -1, 0, "pwrite"});
    begin(rank, path, checkpoint);
    const uint64_t allocations = rank.stats().allocations;
    FSDP(fsdp_commit_checkpoint(checkpoint.handle));
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    REQUIRE(checkpoint.status().state == FSDP_CHECKPOINT_WRITING);
    update(rank);
    REQUIRE(rank.stats().allocations == allocations);
    disk.reset();
    FSDP(fsdp_wait_checkpoint(checkpoint.handle));
  });
}

// The next save waits for the previous one; both checkpoints are whole.
TEST_F(Saving, TheNextSaveWaitsForTheOneBefore) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  run(setup, [&](Rank &rank) {
    rank.load();
    Handle first, second;
    std::optional<FaultScope> slow;
    if (rank.rank == 0) slow.emplace(SystemFault{SystemFault::Way::waits, -1, 100, "pwrite"});
    clean_step(rank, 0);
    begin(rank, path, first);
    FSDP(fsdp_commit_checkpoint(first.handle));
    clean_step(rank, 1);
    begin(rank, path, second);
    FSDP(fsdp_commit_checkpoint(second.handle));
    REQUIRE(first.status().state == FSDP_CHECKPOINT_COMMITTED);
    FSDP(fsdp_save(rank.model, (path + "/other").c_str(), nullptr));
    REQUIRE(second.status().state == FSDP_CHECKPOINT_COMMITTED);
    clean_step(rank, 2);
    FSDP(fsdp_begin_update(rank.model, stream()));
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(fsdp_load(rank.model, path.c_str(), nullptr, &loaded));
    REQUIRE(loaded.step == 2 && loaded.sequence == 2);
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
  EXPECT_EQ(names(), (std::vector<std::string>{"other", "step-0000000001", "step-0000000002"}));
}

// Two meshes of two ranks each have a model of their own, besides one that all have; and bytes of all ranks, and of
// each. Another job of two ranks loads all of it.
TEST_F(Saving, OfSeveralModelsAndBytes) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4);
  const auto experts_of = [&](uint32_t part) {
    Scenario one = setup;
    one.groups = equal_groups(2, 5, 7);
    for (GroupDef &group : one.groups) {
      group.name += "-of-" + std::to_string(part);
      for (ParamDef &param : group.params) param.name = "expert" + std::to_string(part) + "." + param.name;
    }
    return one;
  };
  std::mutex mutex;
  std::map<std::string, std::vector<std::vector<float>>> saved;
  const auto keep = [&](const std::string &name, const Rank &rank) {
    const auto all = rank.read_all();
    const std::lock_guard lock(mutex);
    saved[name] = all;
  };
  run(setup, [&](Rank &dense) {
    dense.load();
    clean_step(dense, 0);
    const uint32_t part = dense.rank % 2;
    Scenario own = experts_of(part);
    const uint32_t ranks[] = {part, part + 2};
    own.mesh.ranks = ranks, own.mesh.rank_count = 2, own.mesh.shard_size = 2;
    Rank experts(dense.context, own);
    experts.load();
    Handle checkpoint;
    begin(dense, path, checkpoint, "dense");
    FSDP(fsdp_add_checkpoint_model(checkpoint.handle, part ? "odd" : "even", experts.model));
    const std::string text = "of rank " + std::to_string(dense.rank);
    FSDP(fsdp_add_checkpoint_bytes(checkpoint.handle, "rng", text.data(), text.size(), FSDP_BYTES_PER_RANK));
    FSDP(fsdp_add_checkpoint_bytes(checkpoint.handle, "place", text.data(), text.size(), FSDP_BYTES_ONCE));
    FSDP(fsdp_add_checkpoint_bytes(checkpoint.handle, "nothing", nullptr, 0, FSDP_BYTES_ONCE));
    FSDP(fsdp_commit_checkpoint(checkpoint.handle));
    FSDP(fsdp_wait_checkpoint(checkpoint.handle));
    keep("dense", dense);
    keep(part ? "odd" : "even", experts);
  });
  Scenario two = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 2);
  run(two, [&](Rank &dense) {
    Handle opened;
    FSDP(fsdp_open_checkpoint(dense.context, path.c_str(), &opened.handle));
    const fsdp_checkpoint_status status = opened.status();
    REQUIRE(status.state == FSDP_CHECKPOINT_OPENED && status.step == 1 && status.ranks == 4);
    FSDP(fsdp_load_checkpoint_model(opened.handle, "dense", dense.model, nullptr, nullptr));
    uint64_t told_bytes = 0;
    FSDP(fsdp_describe_load(dense.model, nullptr, &told_bytes));
    std::string told(told_bytes, 0);
    FSDP(fsdp_describe_load(dense.model, told.data(), &told_bytes));
    REQUIRE(told.find(R"("call":"fsdp_load_checkpoint_model")") != told.npos);
    FSDP(fsdp_publish_weights(dense.model, stream()));
    REQUIRE(same_bits(dense.read_all(), saved["dense"]));
    for (uint32_t part = 0; part < 2; ++part) {
      const Scenario own = experts_of(part);
      Scenario all = own;
      all.ranks = 2;
      Rank experts(dense.context, all);
      const char *const name = part ? "odd" : "even", *const other = part ? "even" : "odd";
      require_error(fsdp_load_checkpoint_model(opened.handle, other, experts.model, nullptr, nullptr),
                    FSDP_INVALID_ARGUMENT, {"does not fit the model", "missing"});
      FSDP(fsdp_load_checkpoint_model(opened.handle, name, experts.model, nullptr, nullptr));
      FSDP(fsdp_publish_weights(experts.model, stream()));
      REQUIRE(same_bits(experts.read_all(), saved[name]));
    }
    const auto bytes = [&](const char *name) {
      uint64_t size = 0;
      FSDP(fsdp_read_checkpoint_bytes(opened.handle, name, nullptr, &size));
      std::string text(size, '?');
      FSDP(fsdp_read_checkpoint_bytes(opened.handle, name, text.data(), &size));
      return text;
    };
    REQUIRE(bytes("rng") == "of rank " + std::to_string(dense.rank));
    REQUIRE(bytes("place") == "of rank 0");
    REQUIRE(bytes("nothing").empty());
    uint64_t size = 3;
    char few[3];
    require_error(fsdp_read_checkpoint_bytes(opened.handle, "place", few, &size), FSDP_INVALID_ARGUMENT,
                  {"room for 3 bytes", "there are 9"});
    REQUIRE(size == 9);
    require_error(fsdp_read_checkpoint_bytes(opened.handle, "no", nullptr, &size), FSDP_INVALID_ARGUMENT,
                  {"no bytes \"no\" of rank"});
    require_error(fsdp_load_checkpoint_model(opened.handle, "x", dense.model, nullptr, nullptr), FSDP_INVALID_STATE,
                  {"update window"});
    FSDP(fsdp_begin_update(dense.model, stream()));
    require_error(fsdp_load_checkpoint_model(opened.handle, "x", dense.model, nullptr, nullptr), FSDP_INVALID_ARGUMENT,
                  {"has 3 models", "\"dense\"", "\"even\"", "\"odd\"", "none is named \"x\""});
    require_error(fsdp_load(dense.model, path.c_str(), nullptr, nullptr), FSDP_INVALID_ARGUMENT,
                  {"has 3 models", "fsdp_load_checkpoint_model"});
    FSDP(fsdp_load_checkpoint_model(opened.handle, "dense", dense.model, nullptr, nullptr));
    FSDP(fsdp_publish_weights(dense.model, stream()));
  });
  uint64_t size = 0;
  ASSERT_EQ(fsdp_list_checkpoints(path.c_str(), nullptr, &size), FSDP_OK);
  std::string text(size, ' ');
  ASSERT_EQ(fsdp_list_checkpoints(path.c_str(), text.data(), &size), FSDP_OK);
  const auto list = nlohmann::json::parse(text.c_str());
  ASSERT_EQ(list["checkpoints"].size(), 1u);
  EXPECT_EQ(list["checkpoints"][0]["name"], "step-0000000001");
  EXPECT_EQ(list["checkpoints"][0]["models"].size(), 3u);
  uint64_t there = 0, bytes = 0;
  for (const auto &entry : fs::recursive_directory_iterator(path + "/step-0000000001"))
    if (entry.is_regular_file() && entry.path().filename() != "checkpoint.json") ++there, bytes += entry.file_size();
  EXPECT_EQ(list["checkpoints"][0]["files"], there);
  EXPECT_EQ(list["checkpoints"][0]["bytes"], bytes);
}

// Two models have a tensor of one name, or one model is asked for twice.
TEST_F(Saving, NamesAreUnique) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run(setup, [&](Rank &rank) {
    rank.load();
    Rank other(rank.context, setup);
    other.load();
    {
      Handle checkpoint;
      begin(rank, path, checkpoint, "a");
      require_error(fsdp_add_checkpoint_model(checkpoint.handle, "b", rank.model), FSDP_INVALID_ARGUMENT,
                    {"the model is in this checkpoint already"});
      require_error(fsdp_add_checkpoint_model(checkpoint.handle, "a", other.model), FSDP_INVALID_ARGUMENT,
                    {"a model named \"a\" already"});
      FSDP(fsdp_add_checkpoint_model(checkpoint.handle, "b", other.model));
      require_error(fsdp_commit_checkpoint(checkpoint.handle), FSDP_INVALID_ARGUMENT, {"tensor", "name"});
    }
    clean_step(rank, 0);
  });
  EXPECT_TRUE(names().empty());
}

// A parameter has the name under which the steps of another one are saved: one of them would be lost.
TEST_F(Saving, ParameterNamedLikeAStateIsRefused) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.groups = equal_groups(1, 4, 4);
  setup.groups[0].params.resize(1);
  setup.groups[0].params.push_back(setup.groups[0].params[0]);
  setup.groups[0].params[1].name = "state." + setup.groups[0].params[0].name + ".step";
  run(setup, [&](Rank &rank) {
    rank.load();
    require_error(fsdp_save(rank.model, path.c_str(), nullptr), FSDP_INVALID_ARGUMENT, {"is not unique"});
    clean_step(rank, 0);
  });
  EXPECT_TRUE(names().empty());
}

// A file or folder that is not a checkpoint is never replaced, whatever its name is.
TEST_F(Saving, NothingElseIsReplaced) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  fs::create_directory(path + "/step-0000000000");
  std::ofstream(path + "/step-0000000000/thesis.tex") << "x";
  run(setup, [&](Rank &rank) {
    rank.load();
    fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
    options.flags = FSDP_SAVE_REPLACE;
    require_error(fsdp_save(rank.model, path.c_str(), &options), FSDP_INVALID_STATE, {"it is no checkpoint"});
  });
  EXPECT_TRUE(fs::exists(path + "/step-0000000000/thesis.tex"));
}

// Ranks that give a model, or bytes, other names would each save what the other does not.
TEST_F(Saving, OfRanksThatDifferIsRefusedOnAll) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run(setup, [&](Rank &rank) {
    rank.load();
    {
      Handle checkpoint;
      begin(rank, path, checkpoint, rank.rank ? "a" : "b");
      require_error(fsdp_commit_checkpoint(checkpoint.handle), FSDP_MISMATCH, {"model \"a\"", "model \"b\""});
    }
    Handle checkpoint;
    begin(rank, path, checkpoint);
    FSDP(
        fsdp_add_checkpoint_bytes(checkpoint.handle, "rng", "x", 1, rank.rank ? FSDP_BYTES_PER_RANK : FSDP_BYTES_ONCE));
    require_error(fsdp_commit_checkpoint(checkpoint.handle), FSDP_MISMATCH, {"\"rng\" of each rank"});
  });
  EXPECT_TRUE(names().empty());
}

// A model of some of the ranks, which one of them does not add: its rows would be missing.
TEST_F(Saving, OfAModelThatARankOfItsMeshLacksIsRefused) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  for (const uint32_t lacks : {0u, 1u}) {
    run(setup, [&](Rank &rank) {
      rank.load();
      Handle checkpoint;
      begin(rank, path, checkpoint, "all");
      std::optional<Rank> experts;
      const uint32_t ranks[] = {0, 1};
      Scenario own = setup;
      own.groups = equal_groups(1, 6, 4);
      for (ParamDef &param : own.groups[0].params) param.name = "expert." + param.name;
      own.mesh.ranks = ranks, own.mesh.rank_count = 2, own.mesh.shard_size = 2;
      if (rank.rank < 2) {
        experts.emplace(rank.context, own);
        experts->load();
        if (rank.rank != lacks) FSDP(fsdp_add_checkpoint_model(checkpoint.handle, "experts", experts->model));
      }
      require_error(fsdp_commit_checkpoint(checkpoint.handle), FSDP_MISMATCH,
                    {"\"experts\" of ranks 0, 1", lacks ? "of ranks 0 alone" : "of ranks 1 alone",
                     "added on all ranks of its mesh"});
      experts.reset();
    });
    EXPECT_TRUE(names().empty());
  }
}

// The first rank begins a save of some of the ranks as soon as this one has ended: the other ranks still learn that
// this one has ended.
TEST_F(Saving, OfSomeRanksMayFollowASaveOfAll) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4);
  run(setup, [&](Rank &rank) {
    rank.load();
    std::optional<Rank> experts;
    const uint32_t ranks[] = {0, 1};
    Scenario own = setup;
    own.mesh.ranks = ranks, own.mesh.rank_count = 2, own.mesh.shard_size = 2;
    if (rank.rank < 2) {
      experts.emplace(rank.context, own);
      experts->load();
    }
    for (uint64_t step = 1; step <= 20; ++step) {
      fsdp_save_options options = FSDP_SAVE_OPTIONS_INIT;
      options.step = step;
      FSDP(fsdp_save(rank.model, (path + "/all").c_str(), &options));
      if (experts) FSDP(fsdp_save(experts->model, (path + "/experts").c_str(), &options));
    }
    experts.reset();
  });
}

// A wait that was interrupted may be repeated, and the job lives on.
TEST_F(Saving, AWaitMayBeInterruptedAndRepeated) {
  Scenario setup = large();
  int32_t flag = 0;
  setup.context.interrupted_flag = &flag;
  run(setup, [&](Rank &rank) {
    rank.load();
    Handle checkpoint;
    const FaultScope slow({SystemFault::Way::waits, -1, 50, "pwrite"});
    begin(rank, path, checkpoint);
    FSDP(fsdp_commit_checkpoint(checkpoint.handle));
    flag = 1;
    require_error(fsdp_wait_checkpoint(checkpoint.handle), FSDP_INTERRUPTED, {"interrupted"});
    flag = 0;
    FSDP(fsdp_wait_checkpoint(checkpoint.handle));
    clean_step(rank, 0);
  });
  EXPECT_EQ(names(), std::vector<std::string>{"step-0000000000"});
}

// The disk of one rank is full: all ranks get an error that names the rank, training goes on, and the next save
// succeeds.
TEST_F(Saving, FailureIsReturnedByTheWait) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  std::optional<FaultScope> full;
  run(setup, [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    Handle checkpoint;
    if (rank.rank == 0) full.emplace(SystemFault{SystemFault::Way::fails, 2, ENOSPC, "pwrite"});
    begin(rank, path, checkpoint);
    FSDP(fsdp_commit_checkpoint(checkpoint.handle));
    clean_step(rank, 1);
    require_error(fsdp_wait_checkpoint(checkpoint.handle), FSDP_SYSTEM, {"rank ", path, "No space left on device"});
    fsdp_error error = FSDP_ERROR_INIT;
    FSDP(fsdp_get_last_error(rank.context, &error));
    REQUIRE(!error.context_failed && error.rank >= 0 && error.origin_code == ENOSPC);
    REQUIRE(checkpoint.status().state == FSDP_CHECKPOINT_FAILED && checkpoint.status().status == FSDP_SYSTEM);
    clean_step(rank, 2);
    if (rank.rank == 0) full.reset();
    clean_step(rank, 3);
    FSDP(fsdp_save(rank.model, path.c_str(), nullptr));
  });
  EXPECT_EQ(names(), std::vector<std::string>{"step-0000000004"});
}

// The program does not wait for the save, but the close does. The model may be destroyed before.
TEST_F(Saving, IsWaitedForByTheClose) {
  const Scenario setup = large();
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t, fsdp_context *context) {
        const FaultScope slow({SystemFault::Way::waits, -1, 50, "pwrite"});
        {
          Rank rank(context, setup);
          rank.load();
          Handle checkpoint;
          begin(rank, path, checkpoint);
          FSDP(fsdp_commit_checkpoint(checkpoint.handle));
        }
        FSDP(fsdp_close_context(context));
        REQUIRE(names() == std::vector<std::string>{"step-0000000000"});
      },
      &errors);
  for (const std::string &error : errors) EXPECT_EQ(error, "");
}

// The close returns the save's failure, and the context is closed all the same.
TEST_F(Saving, UnreadFailureIsReturnedByTheClose) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  const FaultScope broken({SystemFault::Way::fails, -1, EIO, "fsync"});
  run(
      setup,
      [&](Rank &rank) {
        rank.load();
        Handle checkpoint;
        begin(rank, path, checkpoint);
        FSDP(fsdp_commit_checkpoint(checkpoint.handle));
        require_error(fsdp_close_context(rank.context), FSDP_SYSTEM, {"Input/output error"});
        require_error(fsdp_close_context(rank.context), FSDP_INVALID_STATE, {"has closed this context before"});
      },
      false);
  EXPECT_TRUE(names().empty());
}

// A context that is destroyed gives it up, and says so.
TEST_F(Saving, IsGivenUpWithItsContext) {
  Scenario setup = large();
  std::string said;
  setup.context.log = [](void *text, fsdp_log_level, const char *message) {
    static_cast<std::string *>(text)->append(message);
  };
  setup.context.log_data = &said;
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t, fsdp_context *context) {
        const FaultScope slow({SystemFault::Way::waits, -1, 200, "pwrite"});
        Rank rank(context, setup);
        rank.load();
        Handle checkpoint;
        begin(rank, path, checkpoint);
        FSDP(fsdp_commit_checkpoint(checkpoint.handle));
        fsdp_destroy_context(context);
      },
      &errors);
  EXPECT_NE(said.find("a checkpoint under way was given up"), std::string::npos) << said;
  for (int tries = 0; tries < 1000 && !names().empty(); ++tries) pause_ms(10);  // the disk was let go of
  EXPECT_TRUE(names().empty());
}

TEST_F(Saving, IsRefusedAtTheWrongTimeOrWithWrongArguments) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  run(setup, [&](Rank &rank) {
    Handle checkpoint;
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_begin_checkpoint(rank.context, nullptr, nullptr, &checkpoint.handle),
                 "folder is NULL");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_begin_checkpoint(rank.context, path.c_str(), nullptr, nullptr),
                 "checkpoint is NULL");
    FSDP(fsdp_begin_checkpoint(rank.context, path.c_str(), nullptr, &checkpoint.handle));
    REQUIRE(checkpoint.status().state == FSDP_CHECKPOINT_OPEN && !checkpoint.status().name[0]);
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_wait_checkpoint(checkpoint.handle), "was not committed");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_commit_checkpoint(checkpoint.handle), "there is nothing in this checkpoint");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_checkpoint_bytes(checkpoint.handle, "x", nullptr, 1, FSDP_BYTES_ONCE),
                 "data is NULL");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_checkpoint_bytes(checkpoint.handle, "", "x", 1, FSDP_BYTES_ONCE),
                 "name");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_checkpoint_bytes(checkpoint.handle, "x", "x", 1, 3),
                 "3 is not an fsdp_bytes_owner");
    FSDP(fsdp_add_checkpoint_bytes(checkpoint.handle, "x", "x", 1, FSDP_BYTES_ONCE));
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_add_checkpoint_bytes(checkpoint.handle, "x", "y", 1, FSDP_BYTES_ONCE),
                 "has bytes named \"x\" already");
    FSDP(fsdp_add_checkpoint_model(checkpoint.handle, nullptr, rank.model));
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_commit_checkpoint(checkpoint.handle), "the update window is open");
    rank.load();
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_load_checkpoint_model(checkpoint.handle, "", rank.model, nullptr, nullptr),
                 "is one to be saved");
    uint64_t size = 0;
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_read_checkpoint_bytes(checkpoint.handle, "x", nullptr, &size),
                 "is one to be saved");
    FSDP(fsdp_commit_checkpoint(checkpoint.handle));
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_commit_checkpoint(checkpoint.handle), "was committed already");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_add_checkpoint_bytes(checkpoint.handle, "y", "y", 1, FSDP_BYTES_ONCE),
                 "was committed already");
    FSDP(fsdp_wait_checkpoint(checkpoint.handle));
    Handle opened;
    EXPECT_FAILS(FSDP_SYSTEM, fsdp_open_checkpoint(rank.context, (path + "/no").c_str(), &opened.handle), "/no");
    fs::create_directory(path + "/none");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_open_checkpoint(rank.context, (path + "/none").c_str(), &opened.handle),
                 "there is no checkpoint in this folder");
    FSDP(fsdp_open_checkpoint(rank.context, path.c_str(), &opened.handle));
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_commit_checkpoint(opened.handle), "was opened to be read");
    EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_wait_checkpoint(reinterpret_cast<fsdp_checkpoint *>(rank.model)),
                 "given as checkpoint is an fsdp_model");
    EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_seal_model(reinterpret_cast<fsdp_model *>(opened.handle)),
                 "given as model is an fsdp_checkpoint");
    fsdp_checkpoint *const gone = opened.handle;
    fsdp_destroy_checkpoint(gone);
    fsdp_destroy_checkpoint(gone);
    fsdp_checkpoint_status status = FSDP_CHECKPOINT_STATUS_INIT;
    EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_get_checkpoint_status(gone, &status), "fsdp_get_checkpoint_status");
  });
}

}  // namespace
