// SPDX-License-Identifier: Apache-2.0
// fsdp_save and fsdp_load through the public header. A job that ends and goes on computes the bits of one that did not
// end. On other ranks and meshes it has what was saved. A rank that fails leaves the others as they were.
#include "checkpoint_folder.h"

using namespace harness;

namespace {

struct Way {
  const char *name;
  fsdp_strategy strategy;
  uint32_t ranks, replicas;
  fsdp_unshard_mode mode;
  fsdp_dtype dtype;
  bool hybrid;  // states over all ranks, replicas or not
};

void PrintTo(const Way &way, std::ostream *out) { *out << way.name; }

constexpr Way ways[] = {
    {"no_shard", FSDP_STRATEGY_NO_SHARD, 3, 1, FSDP_UNSHARD_COPIED, FSDP_FLOAT32, false},
    {"optim", FSDP_STRATEGY_OPTIM, 2, 1, FSDP_UNSHARD_COPIED, FSDP_BFLOAT16, false},
    {"optim_grads", FSDP_STRATEGY_OPTIM_GRADS, 3, 1, FSDP_UNSHARD_MAPPED, FSDP_FLOAT32, false},
    {"full_mapped", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 1, FSDP_UNSHARD_MAPPED, FSDP_BFLOAT16, false},
    {"full_copied", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, 1, FSDP_UNSHARD_COPIED, FSDP_FLOAT32, false},
    {"one_rank", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1, 1, FSDP_UNSHARD_MAPPED, FSDP_FLOAT32, false},
    {"eight", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 8, 1, FSDP_UNSHARD_COPIED, FSDP_FLOAT32, false},
    {"hsdp", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 2, FSDP_UNSHARD_COPIED, FSDP_FLOAT32, false},
    {"hfsdp", FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4, 2, FSDP_UNSHARD_MAPPED, FSDP_BFLOAT16, true},
};

Scenario scenario_by(const Way &way) {
  Scenario setup = scenario_of(way.strategy, way.ranks, way.mode);
  setup.set_dtype(way.dtype);
  setup.groups[1].params[2].flags = FSDP_PARAM_FROZEN;
  setup.groups[3].params[1].flags |= FSDP_PARAM_FROZEN;
  if (way.replicas > 1) {
    setup.mesh.replicate_size = way.replicas;
    setup.mesh.shard_size = way.ranks / way.replicas;
    if (way.hybrid) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
  }
  return setup;
}

class Resumed : public Checkpoint, public testing::WithParamInterface<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, Resumed, testing::ValuesIn(ways),
                         [](const auto &info) { return std::string(info.param.name); });

// Six steps have the same bits as three steps and three more of another job with as many ranks.
TEST_P(Resumed, GoesOnAsIfItHadNotEnded) {
  const Scenario setup = scenario_by(GetParam());
  std::vector<std::vector<float>> straight;
  run(setup, "straight", [&](Rank &rank) {
    rank.load();
    for (uint32_t step = 0; step < 3; ++step) clean_step(rank, step);
    FSDP(save(rank, path));
    for (uint32_t step = 3; step < 6; ++step) clean_step(rank, step);
    const auto all = everything(rank);
    if (rank.rank == 0) straight = all;
  });
  EXPECT_EQ(names(), std::vector<std::string>{"step-0000000003"});
  run(setup, "resumed", [&](Rank &rank) {
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(load(rank, path, 0, &loaded));
    REQUIRE(std::string(loaded.name) == "step-0000000003" && loaded.step == 3 && loaded.sequence == 1);
    REQUIRE(loaded.ranks == setup.ranks && loaded.passed_over == 0);
    REQUIRE(loaded.wanted_bytes > 0 && loaded.read_bytes >= loaded.wanted_bytes);
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(fsdp_check_replicas(rank.model, 0, stream()));
    REQUIRE(rank.stats().step == 3);
    for (uint32_t step = 3; step < 6; ++step) clean_step(rank, step);
    REQUIRE(same_bits(everything(rank), straight));
  });
}

// Every division into ranks loads what any other one has saved: weights, states, and AdamW's number of steps.
TEST_P(Resumed, HasWhatWasSavedWhateverItsRanksAndStrategy) {
  Way from = GetParam();
  const Scenario setup = scenario_by(from);
  std::vector<std::vector<float>> saved;
  run(setup, "saved", [&](Rank &rank) {
    rank.load();
    for (uint32_t step = 0; step < 2; ++step) clean_step(rank, step);
    FSDP(save(rank, path));
    const auto all = everything(rank);
    if (rank.rank == 0) saved = all;
  });
  for (Way to : ways) {
    // A checkpoint keeps the compute weights of frozen parameters.
    to.dtype = from.dtype;
    run(scenario_by(to), to.name, [&](Rank &rank) {
      FSDP(load(rank, path));
      FSDP(fsdp_publish_weights(rank.model, stream()));
      REQUIRE(same_bits(everything(rank), saved));
      REQUIRE(rank.stats().step == 2);
      FSDP(fsdp_check_replicas(rank.model, 0, stream()));
      clean_step(rank, 2);
    });
  }
}

// Ranks that keep the same rows each read a part of them, and in the end all have the same.
TEST_P(Resumed, HasTheSameWhereReplicasReadForEachOther) {
  const Scenario setup = scenario_by(GetParam());
  std::vector<std::vector<float>> saved;
  run(setup, "saved", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(save(rank, path));
    const auto all = everything(rank);
    if (rank.rank == 0) saved = all;
  });
  std::atomic<uint64_t> alone = 0, shared = 0;
  run(setup, "loaded", [&](Rank &rank) {
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(load(rank, path, 0, &loaded));
    alone += loaded.wanted_bytes;
    FSDP(load(rank, path, FSDP_LOAD_ONE_REPLICA, &loaded));
    shared += loaded.wanted_bytes;
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(same_bits(everything(rank), saved));
    REQUIRE(rank.stats().step == 1);
    FSDP(fsdp_check_replicas(rank.model, 0, stream()));
    clean_step(rank, 1);
  });
  const Way &way = GetParam();
  // Otherwise each row of the main weights and states is kept once.
  const bool replicated = (way.strategy == FSDP_STRATEGY_NO_SHARD && way.ranks > 1) || way.replicas > 1;
  EXPECT_EQ(shared < alone, replicated) << shared << " of " << alone;
}

// Each of four replicas wants and reads a fourth of the bytes, but for the rest of a block at either end.
TEST_F(Checkpoint, IsReadOnceByAllReplicasTogether) {
  Scenario setup = scenario_of(FSDP_STRATEGY_NO_SHARD, 4);
  constexpr uint64_t rows = 4096, columns = 512, bytes = rows * columns * 4;
  setup.groups = {{"g", {{"w", {rows, columns}}}}};
  run(setup, "", [&](Rank &rank) {
    rank.load();
    FSDP(save(rank, path, 1));
    const auto weights = rank.read_all();
    FSDP(fsdp_begin_update(rank.model, stream()));
    const std::vector<float> zeros(rows * columns);
    FSDP(fsdp_load_param(rank.groups[0], 0, zeros.data(), FSDP_FLOAT32, zeros.size(), FSDP_EVERY_RANK, 0));
    fsdp_loaded loaded = FSDP_LOADED_INIT;
    FSDP(load(rank, path, FSDP_LOAD_WEIGHTS_ONLY | FSDP_LOAD_ONE_REPLICA, &loaded));
    REQUIRE(loaded.wanted_bytes == bytes / 4);
    REQUIRE(loaded.read_bytes <= bytes / 4 + 2 * (uint64_t{1} << 20));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(same_bits(rank.read_all(), weights));
    FSDP(fsdp_begin_update(rank.model, stream()));
    require_error(load(rank, path, rank.rank == 3 ? FSDP_LOAD_ONE_REPLICA + 0u : 0u), FSDP_MISMATCH,
                  {"one_replica false", "one_replica true"});
    FSDP(load(rank, path, FSDP_LOAD_ONE_REPLICA));
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

// A save in the middle of a step, or while groups are held, contains the version that was published last.
TEST_F(Checkpoint, InTheMiddleOfAStepIsThatOfItsBeginning) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3, FSDP_UNSHARD_MAPPED);
  setup.set_dtype(FSDP_BFLOAT16);
  run(setup, "save", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    FSDP(save(rank, path, 7));
    forward(rank, nullptr);
    FSDP(fsdp_unshard(rank.groups[3], FSDP_BACKWARD, 0, stream()));
    FSDP(save(rank, path + "/other", 7));
    FSDP(fsdp_reshard(rank.groups[3], FSDP_BACKWARD, 0, stream()));
    backward(rank, 1, 0, nullptr);
    FSDP(save(rank, path + "/third", 7));
    FSDP(fsdp_finish_grads(rank.model, 1, 0, stream()));
    update(rank);
  });
  const auto first = files("step-0000000007");
  EXPECT_EQ(first.size(), 7u);  // two for each rank, and the manifest
  EXPECT_EQ(files("other/step-0000000007"), first);
  EXPECT_EQ(files("third/step-0000000007"), first);
}

// Without AdamW, versions alone count the steps, also across jobs.
TEST_F(Checkpoint, OfTheCallersOptimizerCountsVersions) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 2);
  setup.model.optimizer = FSDP_OPTIMIZER_CALLER;
  const auto declare = [&](fsdp_context *context, const std::function<void(Rank &)> &body) {
    Rank rank(context, setup, false);
    FSDP(fsdp_add_optimizer_state(rank.model, "momentum", FSDP_BFLOAT16));
    FSDP(fsdp_seal_model(rank.model));
    body(rank);
    FSDP(fsdp_close_context(context));
  };
  const auto update_once = [](Rank &rank, float value) {
    finish_step(rank, 0);
    const std::vector<float> momentum(rank.def(0).params[0].count(), value);
    FSDP(fsdp_load_state(rank.groups[0], 0, "momentum", momentum.data(), FSDP_FLOAT32, momentum.size(), FSDP_EVERY_RANK,
                         0));
    FSDP(fsdp_publish_weights(rank.model, stream()));
  };
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t, fsdp_context *context) {
        declare(context, [&](Rank &rank) {
          rank.load();
          FSDP(save(rank, path));
          update_once(rank, 0.5f);
          update_once(rank, 0.75f);
          FSDP(save(rank, path));
        });
      },
      &errors);
  run_threads(
      setup,
      [&](uint32_t, fsdp_context *context) {
        declare(context, [&](Rank &rank) {
          FSDP(load(rank, path));
          FSDP(fsdp_publish_weights(rank.model, stream()));
          std::vector<float> momentum(rank.def(0).params[0].count());
          FSDP(fsdp_read_state(rank.groups[0], 0, "momentum", momentum.data(), FSDP_FLOAT32, momentum.size(),
                               FSDP_EVERY_RANK, 0));
          REQUIRE(momentum == std::vector<float>(momentum.size(), 0.75f));
          require_error(save(rank, path), FSDP_INVALID_STATE, {"/step-0000000002: there is a checkpoint of that name"});
          update_once(rank, 0.25f);
          FSDP(save(rank, path));
        });
      },
      &errors);
  expect_no_errors(errors, "");
  EXPECT_EQ(names(), (std::vector<std::string>{"step-0000000000", "step-0000000002", "step-0000000003"}));
}

TEST_F(Checkpoint, ThatWasLoadedStays) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 2);
  run(setup, "", [&](Rank &rank) {
    rank.load();
    for (uint64_t step = 1; step <= 3; ++step) FSDP(save(rank, path, step));
    FSDP(fsdp_begin_update(rank.model, stream()));
    FSDP(load(rank, path + "/step-0000000002"));  // a checkpoint itself
    FSDP(fsdp_publish_weights(rank.model, stream()));
    FSDP(save(rank, path, 4, 1));
    FSDP(save(rank, path, 5, 2));
  });
  EXPECT_EQ(names(), (std::vector<std::string>{"step-0000000002", "step-0000000004", "step-0000000005"}));
}

// Without a rename, the files are the same, as many old checkpoints are removed, and the result loads as any other.
TEST_F(Checkpoint, WithItsNameFromTheStartIsTheSame) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 2);
  run(setup, "", [&](Rank &rank) {
    rank.load();
    const std::string other = path + "/other";
    FSDP(save(rank, other, 3));
    for (uint64_t step = 1; step <= 3; ++step) FSDP(save(rank, path, step, 2, FSDP_SAVE_COMMIT_MANIFEST));
    require_error(save(rank, path, 3, 0, FSDP_SAVE_COMMIT_MANIFEST), FSDP_INVALID_STATE,
                  {"rank 0: ", "/step-0000000003: there is a checkpoint of that name already"});
    require_error(save(rank, path, 4, 0, rank.rank == 0 ? FSDP_SAVE_COMMIT_MANIFEST + 0u : 0u), FSDP_MISMATCH,
                  {"commit_manifest true", "commit_manifest false"});
    FSDP(fsdp_begin_update(rank.model, stream()));
    FSDP(load(rank, path));
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
  EXPECT_EQ(names(), (std::vector<std::string>{"other", "step-0000000002", "step-0000000003"}));
  auto here = files("step-0000000003"), renamed = files("other/step-0000000003");
  here.erase("checkpoint.json"), renamed.erase("checkpoint.json");  // it has another sequence
  EXPECT_EQ(here, renamed);
}

// Three ranks have 32 rows each, and each writes a file with a page of data. Two ranks, with blocks of 32 rows or with
// any rows, read only what they keep and the rest of a block.
TEST_F(Checkpoint, IsReadByThoseBytesThatAreKept) {
  const auto setup_of = [](uint32_t ranks, fsdp_granule granule) {
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    setup.groups = {{"g", {{"w", {96, 32}, FSDP_FLOAT32, 0, granule, granule == FSDP_GRANULE_BLOCK ? 32u : 0u}}}};
    return setup;
  };
  run(setup_of(3, FSDP_GRANULE_BLOCK), "saved", [&](Rank &rank) {
    rank.load();
    FSDP(save(rank, path, 1));
  });
  for (int file = 1; file <= 3; ++file) {
    const std::string name = "shard-0000" + std::to_string(file) + "-model-00001-of-00001.safetensors";
    const std::string text = files("step-0000000001").at(name);
    uint64_t length = 0;
    std::memcpy(&length, text.data(), sizeof length);
    EXPECT_EQ(length + sizeof length, 4096u);
    EXPECT_EQ(text.size(), 4096u + 4096u);
    const std::string offsets = R"(\"saved_offsets\":[)" + std::to_string(32 * (file - 1)) + ",0]";
    EXPECT_NE(text.find(offsets), std::string::npos) << text.substr(0, 400);
  }
  struct Case {
    fsdp_granule granule;
    uint64_t wanted[2], read[2];  // by rank
  };
  // Here a block of 256 KiB is a whole file. If rows are divided freely, both ranks read the second file.
  for (const Case &one :
       {Case{FSDP_GRANULE_BLOCK, {8192, 4096}, {8192, 4096}}, {FSDP_GRANULE_ROW, {6144, 6144}, {8192, 8192}}})
    run(setup_of(2, one.granule), "loaded", [&](Rank &rank) {
      fsdp_loaded loaded = FSDP_LOADED_INIT;
      FSDP(load(rank, path, FSDP_LOAD_WEIGHTS_ONLY, &loaded));
      REQUIRE(loaded.wanted_bytes == one.wanted[rank.rank]);
      REQUIRE(loaded.read_bytes == one.read[rank.rank]);
      FSDP(fsdp_publish_weights(rank.model, stream()));
    });
}

// States stay as they are, and so does AdamW's number of steps.
TEST_F(Checkpoint, GivesWeightsAlone) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM, 2);
  run(setup, "", [&](Rank &rank) {
    rank.load();
    clean_step(rank, 0);
    const auto weights = rank.read_all();
    FSDP(save(rank, path));
    clean_step(rank, 1);
    const auto after = everything(rank);
    FSDP(fsdp_begin_update(rank.model, stream()));
    FSDP(load(rank, path, FSDP_LOAD_WEIGHTS_ONLY));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(same_bits(rank.read_all(), weights));
    auto now = everything(rank);
    REQUIRE(std::equal(now.begin() + static_cast<ptrdiff_t>(weights.size()), now.end(),
                       after.begin() + static_cast<ptrdiff_t>(weights.size())));
    REQUIRE(rank.stats().step == 2);
  });
}

// Tensors that do not fit are listed, and nothing is written. Missing tensors that are allowed stay as they are.
TEST_F(Checkpoint, OfAnotherModelIsRefusedOrTakenInPart) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS, 2);
  run(setup, "saved", [&](Rank &rank) {
    rank.load();
    FSDP(save(rank, path, 1));
  });
  Scenario other = setup;
  other.groups[1].params[0].name = "new";
  run(other, "loaded", [&](Rank &rank) {
    rank.load();
    const auto before = everything(rank);
    FSDP(fsdp_begin_update(rank.model, stream()));
    require_error(load(rank, path), FSDP_INVALID_ARGUMENT,
                  {path + "/step-0000000001 does not fit the model", "missing: \"new\", \"state.new.exp_avg\"",
                   "unexpected: \"l0.wq\"", "FSDP_LOAD_ALLOW_MISSING", "FSDP_LOAD_ALLOW_UNEXPECTED"});
    require_error(load(rank, path, FSDP_LOAD_ALLOW_MISSING), FSDP_INVALID_ARGUMENT,
                  {"unexpected: \"l0.wq\"", "FSDP_LOAD_ALLOW_UNEXPECTED"});
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(same_bits(everything(rank), before));
    FSDP(fsdp_begin_update(rank.model, stream()));
    FSDP(load(rank, path, FSDP_LOAD_ALLOW_MISSING | FSDP_LOAD_ALLOW_UNEXPECTED));
    FSDP(fsdp_publish_weights(rank.model, stream()));
    REQUIRE(same_bits(everything(rank), before));
  });
}

// All ranks report the disk's error. Training goes on, and the next save succeeds.
TEST_F(Checkpoint, ThatFailsLeavesTheJobAsItWas) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  run(setup, "", [&](Rank &rank) {
    rank.load();
    if (rank.rank == 0) std::ofstream(path + "/file") << "x";
    clean_step(rank, 0);
    require_error(save(rank, path + "/file"), FSDP_SYSTEM, {"rank 0: ", path + "/file: ", "Not a directory"});
    fsdp_error error = FSDP_ERROR_INIT;
    FSDP(fsdp_get_last_error(rank.context, &error));
    REQUIRE(error.rank == 0 && error.origin == FSDP_ORIGIN_OS && error.origin_code == ENOTDIR);
    REQUIRE(!error.context_failed);
    clean_step(rank, 1);
    FSDP(save(rank, path));
    require_error(save(rank, path), FSDP_INVALID_STATE, {"/step-0000000002: there is a checkpoint of that name"});
    FSDP(save(rank, path, 0, 0, FSDP_SAVE_REPLACE));
    clean_step(rank, 2);
  });
  EXPECT_EQ(names(), (std::vector<std::string>{"file", "step-0000000002"}));
}

TEST_F(Checkpoint, OfRanksThatDifferIsRefusedOnAll) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  run(setup, "", [&](Rank &rank) {
    rank.load();
    require_error(save(rank, path, 5 + rank.rank), FSDP_MISMATCH, {"rank 0 says step 5, ", "rank 1 says step 6, "});
    FSDP(save(rank, path, 5));
    FSDP(fsdp_begin_update(rank.model, stream()));
    require_error(load(rank, path, rank.rank == 2 ? FSDP_LOAD_FALLBACK : 0), FSDP_MISMATCH,
                  {"rank 0 says ", "rank 2 says "});
    FSDP(load(rank, path));
    FSDP(fsdp_publish_weights(rank.model, stream()));
  });
}

TEST_F(Checkpoint, IsRefusedAtTheWrongTimeOrWithWrongArguments) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
  run(setup, "", [&](Rank &rank) {
    EXPECT_FAILS(FSDP_INVALID_STATE, save(rank, path, 1), "fsdp_save", "the update window is open");
    rank.load();
    EXPECT_FAILS(FSDP_INVALID_STATE, load(rank, path), "fsdp_load", "the update window is closed");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_save(rank.model, nullptr, nullptr), "fsdp_save: folder is NULL");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_save(rank.model, "", nullptr), "fsdp_save: folder");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_save(rank.model, "\xff", nullptr), "fsdp_save: folder");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, save(rank, path, 1, 0, FSDP_LOAD_FALLBACK), "fsdp_save_options.flags",
                 "unknown bits");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, save(rank, path, (uint64_t{1} << 53) + 1), "fsdp_save_options.step",
                 "9007199254740993");
    EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_save(nullptr, path.c_str(), nullptr), "fsdp_save");
    FSDP(fsdp_begin_update(rank.model, stream()));
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load(rank.model, nullptr, nullptr, nullptr), "fsdp_load: folder is NULL");
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, load(rank, path, FSDP_SAVE_REPLACE), "fsdp_load_options.flags");
    fsdp_load_options options = FSDP_LOAD_OPTIONS_INIT;
    options.reserved = 3;
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load(rank.model, path.c_str(), &options, nullptr), "reserved is 3");
    fsdp_loaded loaded = {};
    EXPECT_FAILS(FSDP_INVALID_ARGUMENT, fsdp_load(rank.model, path.c_str(), nullptr, &loaded),
                 "fsdp_loaded.struct_size");
    EXPECT_FAILS(FSDP_INVALID_HANDLE, fsdp_load(nullptr, path.c_str(), nullptr, nullptr), "fsdp_load");
    FSDP(fsdp_publish_weights(rank.model, stream()));
    EXPECT_TRUE(names().empty());
  });
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup, false);
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_save(rank.model, path.c_str(), nullptr), "fsdp_save", "fsdp_seal_model");
    EXPECT_FAILS(FSDP_INVALID_STATE, fsdp_load(rank.model, path.c_str(), nullptr, nullptr), "fsdp_load",
                 "fsdp_seal_model");
    FSDP(fsdp_seal_model(rank.model));
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
