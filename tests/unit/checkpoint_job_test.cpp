// SPDX-License-Identifier: Apache-2.0
// Tests ranks that save and load together, as threads that share a folder. They save and load on every mesh, with a
// fault in each call of each rank, and with damage in each file.
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "checkpoint/job/open.h"
#include "checkpoint/job/save_keeper.h"
#include "checkpoint_ranks.h"

namespace fsdp::checkpoint {
namespace {

TEST_F(CheckpointJob, IsLoadedOnEveryMesh) {
  uint64_t step = 0;
  const std::vector<layout::Mesh> all = meshes();
  for (const layout::Mesh &from : all) {
    save_on(from, ++step);
    for (size_t to = step % all.size(); to < step + all.size(); to += static_cast<size_t>(step_of(5)))
      expect_well(load_on(all[to % all.size()], step));
  }
  EXPECT_EQ(names().size(), all.size());
}

// If a rank dies when it has written its files, the first rank reads the rank's report from them.
TEST_F(CheckpointJob, HasFilesThatTellWhatTheirRankReports) {
  save_on(mesh(3, 1, layout::OuterAxis::none), 1);
  const Manifest manifest = Folder(path).list().at(0).manifest;
  ASSERT_FALSE(manifest.files.empty());
  const Fd folder(::open((path + "/" + step_name(1)).c_str(), O_RDONLY | O_DIRECTORY));
  for (const ManifestFile &file : manifest.files) {
    const ReportedFile found = read_reported(folder.get(), file.name, file.name);
    EXPECT_EQ(found.bytes, file.bytes) << file.name;
    EXPECT_EQ(found.header_sum_text(), file.header_sum) << file.name;
  }
}

// All tensors are divided between ranks. Tensors that all ranks have would lie among the parts of the ranks that wrote
// them.
TEST_F(CheckpointJob, ReadsLittleMoreThanItWants) {
  const auto sharded = [](uint32_t ranks) {
    memory::ModelSpec spec = model(mesh(ranks, 1, layout::OuterAxis::none), 60'000);
    spec.groups.erase(spec.groups.begin(), spec.groups.begin() + 3);
    return spec;
  };
  expect_well(run_threads(3, [&](Rank &rank) {
    Part part(sharded(3), rank.rank());
    save(ranks_of(rank), part.saved(path, 1));
  }));
  for (const uint32_t ranks : {3u, 2u})
    expect_well(run_threads(ranks, [&](Rank &rank) {
      Part part(sharded(ranks), rank.rank());
      const LoadResult result = load(*rank.team, rank.waiter, path, part.loaded());
      uint64_t kept = 0;
      for (const auto &[name, bytes] : part.bytes) kept += bytes.size();
      require(result.wanted_bytes == kept, "wanted");
      // With the same number of ranks, each rank reads its own files, and from the first rank's file the block with the
      // numbers of steps. Otherwise it also reads an extra block at the ends of the rows of the two large tensors.
      const uint64_t most = (ranks == 3 ? 1 : 8) * (uint64_t{1} << 20);
      require(result.read_bytes >= kept && result.read_bytes <= kept + most,
              std::to_string(result.read_bytes) + " of " + std::to_string(kept));
    }));
}

TEST_F(CheckpointJob, IsTheSameForTheSameState) {
  const layout::Mesh two = mesh(2, 1, layout::OuterAxis::none);
  std::map<std::string, std::string> files[2];
  for (auto &these : files) {
    save_on(two, 5);
    for (const auto &entry : fs::recursive_directory_iterator(path)) {
      if (!entry.is_regular_file()) continue;
      std::ifstream file(entry.path(), std::ios::binary);
      these[fs::relative(entry.path(), path)].assign(std::istreambuf_iterator<char>(file), {});
    }
    fs::remove_all(path + "/" + step_name(5));
  }
  EXPECT_EQ(files[0], files[1]);
  std::vector<std::string> found;
  for (const auto &[name, text] : files[0]) found.push_back(name);
  EXPECT_EQ(found,
            (std::vector<std::string>{"step-0000000005/checkpoint.json",
                                      "step-0000000005/optimizer/0000/shard-00001-model-00001-of-00001.safetensors",
                                      "step-0000000005/optimizer/0000/shard-00002-model-00001-of-00001.safetensors",
                                      "step-0000000005/shard-00001-model-00001-of-00001.safetensors",
                                      "step-0000000005/shard-00002-model-00001-of-00001.safetensors"}));
}

TEST_F(CheckpointJob, KeepsAsManyAsIsAsked) {
  const layout::Mesh two = mesh(2, 1, layout::OuterAxis::none);
  for (uint64_t step = 1; step <= 5; ++step) save_on(two, step, 37, {.keep = 2});
  EXPECT_EQ(names(), (std::vector<std::string>{step_name(4), step_name(5)}));
  save_on(two, 2, 37, {.keep = 2});  // the checkpoint that was saved last is the newest
  EXPECT_EQ(names(), (std::vector<std::string>{step_name(2), step_name(5)}));
  expect_well(load_on(two, 2));
}

TEST_F(CheckpointJob, OfAStepThatIsThereIsRefusedOrReplaced) {
  const layout::Mesh two = mesh(2, 1, layout::OuterAxis::none);
  save_on(two, 3);
  const auto problems = run_threads(2, [&](Rank &rank) {
    Part part(model(two), rank.rank());
    save(ranks_of(rank), part.saved(path, 3));
  });
  for (const std::string &problem : problems)
    EXPECT_EQ(problem, "rank 0: " + path +
                           "/step-0000000003: there is a checkpoint of that name already; "
                           "FSDP_SAVE_REPLACE replaces it");
  EXPECT_EQ(names(), std::vector<std::string>{step_name(3)});
  expect_well(load_on(two, 3));
  save_on(two, 3, 37, {.replace = true});
  EXPECT_EQ(names(), std::vector<std::string>{step_name(3)});
  EXPECT_EQ(Folder(path).list().at(0).manifest.sequence, 2u);
}

TEST_F(CheckpointJob, ThatWasLoadedCanBeSpared) {
  const layout::Mesh two = mesh(2, 1, layout::OuterAxis::none);
  for (uint64_t step = 1; step <= 3; ++step) save_on(two, step);
  save_on(two, 4, 37, {.keep = 1, .spared = {step_name(2)}});
  EXPECT_EQ(names(), (std::vector<std::string>{step_name(2), step_name(4)}));
}

// If a rank differs in anything, all ranks learn the difference, and nothing is written or read.
TEST_F(CheckpointJob, OfRanksThatDifferIsRefusedOnAll) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  save_on(three, 1);
  struct Case {
    uint64_t step = 2, rows = 37;
    SaveChoice choice;
    std::string text;
  };
  for (const Case &one : {Case{3, 37, {}, "says step 3, "}, Case{2, 36, {}, "says step 2, replace false, "},
                          Case{2, 37, {.replace = true}, ", replace true, "}, Case{2, 37, {.keep = 5}, ", keep 5"}})
    expect_well(run_threads(3, [&](Rank &rank) {
      const bool other = rank.rank() == 1;
      Part part(model(three, other ? one.rows : 37), rank.rank());
      const Error error = transport::test::error_of(
          [&] { save(ranks_of(rank), part.saved(path, other ? one.step : 2, other ? one.choice : SaveChoice{})); });
      require(error.status == FSDP_MISMATCH && error.rank == 1, error.message);
      require(error.message.find("what is saved differs: rank 0 says step 2, replace false, ") == 0, error.message);
      require(error.message.find("and rank 1 says ") != std::string::npos, error.message);
      require(error.message.find(one.text) != std::string::npos, error.message);
    }));
  for (const LoadOptions &options :
       {LoadOptions{.states = false}, LoadOptions{.allow_missing = true}, LoadOptions{.allow_unexpected = true},
        LoadOptions{.fall_back = true}, LoadOptions{.if_any = true}})
    expect_well(run_threads(3, [&](Rank &rank) {
      Part part(model(three), rank.rank());
      const Error error = transport::test::error_of(
          [&] { load(*rank.team, rank.waiter, path, part.loaded(), rank.rank() == 2 ? options : LoadOptions{}); });
      require(error.status == FSDP_MISMATCH && error.rank == 2, error.message);
    }));
  // On each host a folder of the same name has checkpoints of its own.
  fs::create_directory(path + "/elsewhere");
  fs::copy(path + "/" + step_name(1), path + "/elsewhere/" + step_name(1), fs::copy_options::recursive);
  save_on(three, 1, 37, {.replace = true});
  expect_well(run_threads(3, [&](Rank &rank) {
    Part part(model(three), rank.rank());
    const std::string here = rank.rank() == 2 ? path + "/elsewhere" : path;
    const Error error = transport::test::error_of([&] { load(*rank.team, rank.waiter, here, part.loaded()); });
    require(error.status == FSDP_MISMATCH && error.rank == 2, error.message);
    require(error.message.find("the manifest of ") == 0, error.message);
  }));
  fs::remove_all(path + "/elsewhere");
  EXPECT_EQ(names(), std::vector<std::string>{step_name(1)});
}

TEST_F(CheckpointJob, OfAModelForOtherRanksIsRefused) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none), two = mesh(2, 1, layout::OuterAxis::none);
  save_on(two, 1);
  expect_well(run_threads(2, [&](Rank &rank) {
    Part part(model(three), rank.rank());
    const std::string of = "rank 0: the model is of 3 ranks, and 2 ";
    Error error = transport::test::error_of([&] { save(ranks_of(rank), part.saved(path, 2)); });
    require(error.status == FSDP_INVALID_ARGUMENT && error.message == of + "save it", error.message);
    error = transport::test::error_of([&] { load(*rank.team, rank.waiter, path, part.loaded()); });
    require(error.status == FSDP_INVALID_ARGUMENT && error.message == of + "load it", error.message);
  }));
}

// Each call of each rank fails in turn. All ranks report the same error, only the previous checkpoint is left, and the
// next save succeeds.
TEST_F(CheckpointJob, ThatFailsAnywhereFailsEverywhere) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  save_on(three, 1);
  int failed = 0, left = 0;
  bool happened = true;
  for (int at = 0; happened; at += step_of(4)) {
    std::string call;
    std::optional<FaultScope> fault;
    std::vector<std::string> problems(3);
    expect_well(run_threads(3, [&](Rank &rank) {
      Part part(model(three), rank.rank());
      part.fill(2);
      rank.meet();
      if (rank.rank() == 0) fault.emplace(SystemFault{SystemFault::Way::fails, at, ENOSPC, ""});
      rank.meet();
      const Error error = transport::test::error_of([&] { save(ranks_of(rank), part.saved(path, 2)); });
      rank.meet();
      if (error.status != FSDP_OK) problems[rank.rank()] = error.message;
    }));
    happened = fault->happened();
    call = fault->what();
    fault.reset();
    if (!problems[0].empty()) {
      ++failed;
      EXPECT_NE(problems[0].find(path), std::string::npos) << problems[0];
      EXPECT_NE(problems[0].find("No space left on device"), std::string::npos) << problems[0];
      EXPECT_EQ(problems[0].find("rank "), 0u) << problems[0];
    }
    for (const std::string &problem : problems) EXPECT_EQ(problem, problems[0]) << call << " " << at;
    expect_well(load_on(three, fs::exists(path + "/" + step_name(2)) ? 2 : 1));
    fs::remove_all(path + "/" + step_name(2));
    // More than one name is left if the removal failed.
    left += names().size() > 1;
    Folder(path).remove_leftovers();
    EXPECT_EQ(names(), std::vector<std::string>{step_name(1)}) << call << " " << at;
  }
  EXPECT_LE(left, 1);
  EXPECT_GT(failed, 48 / step_of(4));
}

// If very many ranks fail at once, there is no room for all their texts.
TEST(SaveReport, SaysWhatItCanWithoutItsText) {
  SaveReport report;
  report.set(Error(FSDP_SYSTEM, "the disk is full", 7, FSDP_ORIGIN_OS, ENOSPC));
  EXPECT_EQ(report.to_error().message, "the disk is full");
  SaveReport other;
  static_cast<SaveWord &>(other) = report;
  const Error error = other.to_error();
  EXPECT_EQ(error.message, "its part of the save has failed, as those of many ranks");
  EXPECT_EQ(error.status, FSDP_SYSTEM);
  EXPECT_EQ(error.rank, 7);
  EXPECT_EQ(error.origin, FSDP_ORIGIN_OS);
  EXPECT_EQ(error.origin_code, ENOSPC);
  std::ranges::fill(report.text.bytes, 'x');
  EXPECT_EQ(report.to_error().message.size(), sizeof report.text.bytes) << "its end is not trusted";
}

TEST(SaveReport, HasNoTextOfItsOwnForAnothersFailure) {
  SaveReport report;
  report.set(Error(FSDP_ABORTED, std::string(failed_elsewhere), 3));
  EXPECT_EQ(report.posted(), "");
  SaveReport other;
  static_cast<SaveWord &>(other) = report;
  EXPECT_EQ(other.to_error().message, failed_elsewhere);
  EXPECT_EQ(other.to_error().status, FSDP_ABORTED);
  report.set(Error(FSDP_ABORTED, "the caller wants to end", 3));
  EXPECT_EQ(report.posted(), "the caller wants to end");
}

// There is room for fewer texts than ranks that give up because of it.
TEST_F(CheckpointJob, TheRankThatFailsIsHeardAmongThoseThatGiveUp) {
  constexpr uint32_t ranks = 48;
  const layout::Mesh many = mesh(ranks, 1, layout::OuterAxis::none);
  std::vector<Error> errors(ranks, Error(FSDP_OK, ""));
  expect_well(run_threads(ranks, [&](Rank &rank) {
    Part part(model(many), rank.rank());
    part.fill(1);
    SaveOrder order = part.saved(path, 1);
    const auto read = order.models[0].read;
    order.models[0].read = [&, read](const KeptTensor &tensor, uint64_t first, std::span<std::byte> to) {
      if (rank.rank() == ranks - 1) fail(FSDP_SYSTEM, "this tensor cannot be read");
      // These ranks hear of the failure meanwhile.
      if (rank.rank() > 0) std::this_thread::sleep_for(std::chrono::milliseconds(40));
      read(tensor, first, to);
    };
    errors[rank.rank()] = transport::test::error_of([&] { save(ranks_of(rank), std::move(order)); });
  }));
  for (const Error &error : errors) {
    EXPECT_EQ(error.status, FSDP_SYSTEM) << error.message;
    EXPECT_EQ(error.rank, static_cast<int32_t>(ranks - 1)) << error.message;
    EXPECT_NE(error.message.find("this tensor cannot be read"), std::string::npos) << error.message;
  }
}

// All ranks learn which file of the checkpoint is damaged. The previous checkpoint is loaded if the caller allowed it.
TEST_F(CheckpointJob, ThatIsDamagedIsRefused) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none), two = mesh(2, 1, layout::OuterAxis::none);
  save_on(three, 1);
  save_on(three, 2);
  const std::string newest = path + "/" + step_name(2);
  const auto expect_refused = [&](const std::string &text) {
    const auto problems = load_on(two, 2);
    for (const std::string &problem : problems) {
      EXPECT_EQ(problem, problems[0]);
      EXPECT_NE(problem.find(text), std::string::npos) << problem;
    }
    expect_well(load_on(two, 1, {.fall_back = true}));
  };
  for (const std::string name : {"shard-00003-model-00001-of-00001.safetensors",
                                 "optimizer/0000/shard-00001-model-00001-of-00001.safetensors"}) {
    const std::string file = newest + "/" + name, other = path + "/" + step_name(1) + "/" + name;
    fs::copy_file(file, path + "/whole");
    const auto put_back = [&] { fs::copy_file(path + "/whole", file, fs::copy_options::overwrite_existing); };
    std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(5000).put('\x5a').put('\x33').put('\x44');
    expect_refused(file + ": bytes 4096 to ");
    put_back();
    // This byte lies behind the header.
    std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(4000).put('\t');
    expect_refused(file + ": is not the file that the manifest speaks of");
    put_back();
    fs::resize_file(file, fs::file_size(file) - 1);
    expect_refused(file + ": its header speaks of ");
    fs::remove(file);
    expect_refused(file + ": is missing; the checkpoint is damaged");
    fs::create_symlink(path + "/whole", file);
    expect_refused(file + ": is a symbolic link, which is not followed here");
    fs::remove(file);
    fs::copy_file(newest + "/shard-00002-model-00001-of-00001.safetensors", file);
    expect_refused(file + ": is not the file that the manifest speaks of");
    put_back();
    fs::remove(path + "/whole");
  }
  expect_well(load_on(two, 2));
  fs::resize_file(newest + "/checkpoint.json", 100);
  expect_refused("it may be the newest that is damaged: " + newest + "/checkpoint.json: ");
}

// If the unreadable checkpoint may be the newest, a load is refused and names it, unless the load may fall back. An
// older one is no obstacle. All ranks have the same counts, although only the first rank has looked. Saves still work.
TEST_F(CheckpointJob, WithAManifestThatCannotBeReadStopsOnlyWhatItMust) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  const std::vector<std::pair<std::string, std::function<void(const std::string &)>>> damages = {
      {"not the sum of what stands before it",
       [](const std::string &file) {
         std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
         // Changes the version of the manifest.
         stream.seekp(41).put('0');
       }},
      {"is no regular file",
       [](const std::string &file) {
         fs::remove(file);
         require(::mkfifo(file.c_str(), 0600) == 0, "no pipe");
       }},
      {"is no regular file", [](const std::string &file) { fs::remove(file), fs::create_directory(file); }}};
  const auto load_counting = [&](uint64_t step, size_t passed_over, const LoadOptions &options) {
    expect_well(run_threads(3, [&](Rank &rank) {
      Part part(model(three), rank.rank());
      const LoadResult result = load(*rank.team, rank.waiter, path, part.loaded(), options);
      require(result.manifest.step == step, "step " + std::to_string(result.manifest.step));
      require(result.passed_over.size() == passed_over, std::to_string(result.passed_over.size()) + " passed over");
      require(result.older_unreadable.size() == (rank.rank() == 0 && passed_over == 0), "older ones");
      require(part.difference(step).empty(), part.difference(step));
    }));
  };
  for (const auto &[word, damage] : damages) {
    for (const uint64_t step : {1, 2, 3}) save_on(three, step);
    damage(path + "/" + step_name(1) + "/" + manifest_name);
    load_counting(3, 0, {});
    load_counting(3, 0, {.fall_back = true});
    fs::remove_all(path + "/" + step_name(1));
    damage(path + "/" + step_name(3) + "/" + manifest_name);
    const auto problems = load_on(three, 3);
    for (const std::string &problem : problems) {
      EXPECT_EQ(problem, problems[0]);
      EXPECT_NE(problem.find("it may be the newest that is damaged: " + path + "/" + step_name(3)), problem.npos)
          << problem;
      EXPECT_NE(problem.find(word), problem.npos) << problem;
    }
    load_counting(2, 1, {.fall_back = true});
    save_on(three, 4);
    load_counting(4, 0, {});
    for (const std::string &name : names()) fs::remove_all(path + "/" + name);
  }
}

// If one rank alone cannot read a manifest, all ranks go to the next older checkpoint, too.
TEST_F(CheckpointJob, AManifestThatOneRankCannotReadIsPassedOverByAll) {
  const layout::Mesh two = mesh(2, 1, layout::OuterAxis::none);
  for (const uint64_t step : {1, 2}) save_on(two, step);
  // The fault comes after the calls of the first rank's list.
  const FaultScope fault({SystemFault::Way::fails, 2, EIO, "pread"});
  expect_well(run_threads(2, [&](Rank &rank) {
    Part part(model(two), rank.rank());
    const LoadResult result = load(*rank.team, rank.waiter, path, part.loaded(), {.fall_back = true});
    require(result.manifest.step == 1 && result.passed_over.size() == 1,
            "step " + std::to_string(result.manifest.step));
    require(result.passed_over[0].find("Input/output error") != std::string::npos, result.passed_over[0]);
    require(part.difference(1).empty(), part.difference(1));
  }));
  EXPECT_TRUE(fault.happened());
}

TEST_F(CheckpointJob, ThatIsNotThereIsToldSo) {
  const layout::Mesh two = mesh(2, 1, layout::OuterAxis::none);
  for (const std::string &problem : load_on(two, 1))
    EXPECT_EQ(problem, "rank 0: " + path + ": there is no checkpoint in this folder");
  fs::remove_all(path);
  for (const std::string &problem : load_on(two, 1))
    EXPECT_EQ(problem, "rank 0: " + path + ": cannot be opened as a folder: No such file or directory");
}

// A new job, and one that goes on, make the same call.
TEST_F(CheckpointJob, IsLoadedIfThereIsAny) {
  const layout::Mesh two = mesh(2, 1, layout::OuterAxis::none);
  const auto expect_none = [&] {
    expect_well(run_threads(2, [&](Rank &rank) {
      Part part(model(two), rank.rank());
      part.fill(7);
      const LoadResult result = load(*rank.team, rank.waiter, path, part.loaded(), {.if_any = true});
      require(result.name.empty() && result.passed_over.empty(), result.name);
      require(part.difference(7).empty(), "something was written");
    }));
  };
  expect_none();
  fs::remove_all(path);
  expect_none();
  save_on(two, 3);
  expect_well(load_on(two, 3, {.if_any = true}));
  // A checkpoint existed, so this is not a new job.
  fs::resize_file(path + "/" + step_name(3) + "/checkpoint.json", 10);
  for (const std::string &problem : load_on(two, 3, {.if_any = true}))
    EXPECT_EQ(problem.find("rank 0: " + path + ": there is no checkpoint in this folder; of what is there " + path), 0u)
        << problem;
}

// A program may retry after SYSTEM, but not after INVALID_ARGUMENT.
TEST(EmptyFolder, HasTheStatusOfTheFirstThatCannotBeRead) {
  const auto status_of = [](const std::vector<UnreadableCheckpoint> &unreadable) {
    try {
      refuse_empty("runs", unreadable);
    } catch (const Error &error) {
      return format_text("{} {}", fsdp_get_status_name(error.status), error.origin_code);
    }
  };
  const UnreadableCheckpoint newer{"step-2", Error(FSDP_UNSUPPORTED, "newer")};
  const UnreadableCheckpoint broken{"step-1", Error(FSDP_SYSTEM, "EIO", -1, FSDP_ORIGIN_OS, EIO)};
  EXPECT_EQ(status_of({}), "FSDP_INVALID_ARGUMENT 0");
  EXPECT_EQ(status_of({newer, broken}), "FSDP_UNSUPPORTED 0");
  EXPECT_EQ(status_of({broken, newer}), "FSDP_SYSTEM " + std::to_string(EIO));
}

TEST_F(CheckpointJob, OfAnotherModelListsAllThatDiffers) {
  const layout::Mesh two = mesh(2, 1, layout::OuterAxis::none);
  save_on(two, 1);
  const auto load_other = [&](LoadOptions options) {
    return run_threads(2, [&](Rank &rank) {
      memory::ModelSpec other = model(two);
      other.groups[0].params[0].name = "new";
      other.groups[1].params[0].shape = {36, 24};
      other.groups[1].params[0].element_count = 36 * 24;
      Part part(other, rank.rank());
      load(*rank.team, rank.waiter, path, part.loaded(), options);
    });
  };
  const std::string different =
      "; different: \"g2.w\" has shape [36, 24] here and [37, 24] in the checkpoint, \"state.g2.w.exp_avg\"";
  for (const std::string &problem : load_other({})) {
    EXPECT_EQ(
        problem.find(path +
                     "/step-0000000001 does not fit the model; missing: \"new\", \"state.new.exp_avg\", "
                     "\"state.new.exp_avg_sq\", \"state.new.step\"; unexpected: \"g1.w\", \"state.g1.w.exp_avg\", "
                     "\"state.g1.w.exp_avg_sq\", \"state.g1.w.step\"" +
                     different),
        0u)
        << problem;
  }
  for (const std::string &problem : load_other({.allow_missing = true, .allow_unexpected = true}))
    EXPECT_EQ(problem.find(path + "/step-0000000001 does not fit the model" + different), 0u) << problem;
}

// The first rank's list may be older than another rank's, and folders may differ.
TEST_F(CheckpointJob, SavedSinceTheFirstRankLookedIsNoMismatch) {
  save_on(mesh(2, 1, layout::OuterAxis::none), 3);
  fs::create_directories(path + "/empty");
  const auto compare = [&](const std::string &of_first) {
    return run_threads(
        2, [&](Rank &rank) { compare_folders(*rank.team, rank.rank() == 0 ? of_first : path, Candidates{}); });
  };
  expect_well(compare(path));
  for (const std::string &problem : compare(path + "/empty"))
    EXPECT_NE(problem.find("/empty: rank 1 finds " + step_name(3) + " at its path, and it is not here"), problem.npos);
}

// A reader's hook ends a save while the save copies. The files are removed, and the job goes on.
TEST_F(CheckpointJob, ThatIsInterruptedLeavesNothing) {
  const layout::Mesh two = mesh(2, 1, layout::OuterAxis::none);
  save_on(two, 1);
  const auto problems = run_threads(2, [&](Rank &rank) {
    Part part(model(two), rank.rank());
    SaveOrder saved = part.saved(path, 2);
    if (rank.rank() == 1)
      saved.models[0].read = [](const KeptTensor &, uint64_t, std::span<std::byte>) {
        fail(FSDP_INTERRUPTED, "enough");
      };
    const Error error = transport::test::error_of([&] { save(ranks_of(rank), saved); });
    require(error.message == "rank 1: enough", error.message);
    part.fill(2);
    save(ranks_of(rank), part.saved(path, 2));
  });
  expect_well(problems);
  EXPECT_EQ(names(), (std::vector<std::string>{step_name(1), step_name(2)}));
  expect_well(load_on(two, 2));
}

const transport::test::RankOptions impatient{.timeout_ms = 1500, .device = {}};

// Training needs the processor, so the wait must sleep.
TEST_F(CheckpointJob, IsAwaitedAsleepWhereAnotherRankIsSlow) {
  const layout::Mesh two = mesh(2, 1, layout::OuterAxis::none);
  const std::clock_t processor = std::clock();
  const auto start = std::chrono::steady_clock::now();
  expect_well(run_threads(2, [&](Rank &rank) {
    Part part(model(two), rank.rank());
    part.fill(1);
    SaveOrder order = part.saved(path, 1);
    const auto read = order.models[0].read;
    bool slow = rank.rank() == 1;
    order.models[0].read = [&, read](const KeptTensor &tensor, uint64_t first, std::span<std::byte> to) {
      if (std::exchange(slow, false)) std::this_thread::sleep_for(std::chrono::seconds(2));
      read(tensor, first, to);
    };
    save(ranks_of(rank), std::move(order));
  }));
  const double took = transport::test::seconds_since(start);
  EXPECT_GE(took, 2);
  EXPECT_LT(static_cast<double>(std::clock() - processor) / CLOCKS_PER_SEC, took / 4);
}

// One rank's disk is slow. The others wait longer than they would for a silent rank: each write takes half of the
// limit, and a real disk that other work shares may add as much.
TEST_F(CheckpointJob, OfASlowDiskTakesItsTime) {
  constexpr int limit_ms = 3000;
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  const auto start = std::chrono::steady_clock::now();
  const FaultScope slow({SystemFault::Way::waits, -1, limit_ms / 2, "pwrite"});
  expect_well(run_threads(3,
                          [&](Rank &rank) {
                            Part part(model(three), rank.rank());
                            part.fill(1);
                            save(ranks_of(rank), part.saved(path, 1));
                          },
                          {.timeout_ms = limit_ms, .device = {}}));
  EXPECT_GT(transport::test::seconds_since(start), 5.0);
  expect_well(load_on(three, 1));
}

// If the disk accepts nothing any more, the save ends but the job does not. Nothing waits for the thread that the disk
// blocks.
TEST_F(CheckpointJob, OfADeadDiskFailsAndTheJobGoesOn) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  save_on(three, 1);
  std::optional<FaultScope> dead;
  expect_well(run_threads(
      3,
      [&](Rank &rank) {
        Part part(model(three), rank.rank());
        part.fill(2);
        if (rank.rank() == 0) dead.emplace(SystemFault{SystemFault::Way::waits, 2, 8000, "pwrite"});
        rank.meet();
        const auto start = std::chrono::steady_clock::now();
        const Error error = transport::test::error_of([&] { save(ranks_of(rank), part.saved(path, 2)); });
        require(transport::test::seconds_since(start) < 7, "it was waited for");
        require(error.status == FSDP_SYSTEM && error.origin_code == ETIMEDOUT, error.message);
        require(error.message.find("the disk has taken nothing for 1500 ms") != std::string::npos, error.message);
        rank.meet();
        if (rank.rank() == 0) dead.reset();
        rank.meet();
        save(ranks_of(rank), part.saved(path, 2));
      },
      impatient));
  expect_well(load_on(three, 2));
  EXPECT_EQ(fsdp::test::await_library_threads(0), 0u);  // it ends when the disk lets it go
}

}  // namespace
}  // namespace fsdp::checkpoint
