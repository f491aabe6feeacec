// SPDX-License-Identifier: Apache-2.0
// Ranks that save and load together, as threads that share a folder: on any mesh and from any other, with a fault in
// each call of each rank, and with damage in each file.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <thread>

#include "../library_threads.h"
#include "checkpoint/files/folder.h"
#include "checkpoint/format/block_sums.h"
#include "checkpoint/job/load.h"
#include "checkpoint/job/save.h"
#include "checkpoint/job/save_report.h"
#include "checkpoint_models.h"
#include "shm_ranks.h"
#include "system_faults.h"

namespace fsdp::checkpoint {
namespace {

namespace fs = std::filesystem;
using comm::test::Rank;
using comm::test::require;
using comm::test::run_threads;
using fsdp::test::FaultScope;
using fsdp::test::SystemFault;
using test::mesh, test::meshes, test::model, test::param;

// What the bytes of a tensor are, in the checkpoint numbered `seed`.
uint64_t first_value(const std::string &name, uint64_t seed) {
  return std::hash<std::string>()(name) + seed * 0x9E3779B97F4A7C15U;
}
std::byte value_of(uint64_t first, uint64_t byte) { return static_cast<std::byte>((first + byte * 2654435761U) >> 11); }

SaveRanks ranks_of(Rank &rank) { return {*rank.team, *rank.world, rank.waiter}; }

// Long campaigns try everything: FSDP_TEST_MANY.
int step_of(int usual) { return std::getenv("FSDP_TEST_MANY") ? 1 : usual; }

// A rank's part of a model: the bytes of what it keeps.
struct Part {
  // Few bytes are enough for ranks that have the same ones to share the writing.
  Part(const memory::ModelSpec &given, uint32_t place)
      : spec(given), plan(plan_model(spec)), shards(spec, plan, true, 64), rank(place) {
    for (const KeptTensor &tensor : shards.tensors()) {
      const RowRange rows = shards.kept_rows(tensor, rank);
      bytes[tensor.name].resize(rows.count ? *stored_bytes(*tensor.type, ModelShards::box_of(tensor, rows).count())
                                           : 0);
    }
  }
  template <class Visit>  // (name, first byte in the whole tensor, the bytes here)
  void for_each_tensor(Visit visit) {
    for (const KeptTensor &tensor : shards.tensors()) {
      const RowRange rows = shards.kept_rows(tensor, rank);
      if (rows.count == 0) continue;
      const Box kept = ModelShards::box_of(tensor, rows);
      const RunWalk runs(kept, whole(tensor.global_shape()), kept);
      const uint64_t element = tensor.type->bits / 8;
      for (uint64_t i = 0; i < runs.run_count(); ++i)
        visit(tensor.name, runs[i].from * element,
              std::span(bytes[tensor.name]).subspan(runs[i].to * element, runs[i].count * element));
    }
  }
  void fill(uint64_t seed) {
    for_each_tensor([&](const std::string &name, uint64_t begin, std::span<std::byte> here) {
      const uint64_t first = first_value(name, seed);
      for (uint64_t i = 0; i < here.size(); ++i) here[i] = value_of(first, begin + i);
    });
  }
  // Empty, or where it is something else.
  std::string difference(uint64_t seed) {
    std::string text;
    for_each_tensor([&](const std::string &name, uint64_t begin, std::span<std::byte> here) {
      const uint64_t first = first_value(name, seed);
      for (uint64_t i = 0; i < here.size() && text.empty(); ++i)
        if (here[i] != value_of(first, begin + i)) text = name + " at byte " + std::to_string(begin + i);
    });
    return text;
  }
  SaveOrder saved(const std::string &folder, uint64_t step, SaveChoice choice = {}) {
    SaveOrder order{folder, step};
    SavedModel model{std::shared_ptr<const ModelShards>(std::shared_ptr<void>(), &shards),
                     {"", "a test's model", plan.layout_hash},
                     rank,
                     {},
                     [this](const KeptTensor &tensor, uint64_t first, std::span<std::byte> to) {
                       std::memcpy(to.data(), bytes.at(tensor.name).data() + first, to.size());
                     }};
    for (uint32_t r = 0; r < spec.mesh.size(); ++r) model.ranks.push_back(r);
    order.models.push_back(std::move(model));
    order.keys = {{"note", "n"}};
    order.choice = std::move(choice);
    return order;
  }
  LoadedModel loaded() {
    return {
        shards, plan.layout_hash, [] {},
        [this](const KeptTensor &tensor, uint64_t first, const ElementType &type, std::span<const std::byte> elements) {
          require(type.name == tensor.type->name, "another type");
          std::memcpy(bytes.at(tensor.name).data() + first * type.bits / 8, elements.data(), elements.size());
        }};
  }

  memory::ModelSpec spec;
  memory::ModelPlan plan;
  ModelShards shards;
  uint32_t rank;
  std::map<std::string, std::vector<std::byte>> bytes;
};

class CheckpointJob : public testing::Test {
 protected:
  CheckpointJob() {
    std::string name = "/var/tmp/checkpoint-job-XXXXXX";
    path = ::mkdtemp(name.data());
  }
  ~CheckpointJob() override { fs::remove_all(path); }

  static void expect_well(const std::vector<std::string> &problems) {
    for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
  }
  void save_on(const layout::Mesh &on, uint64_t step, uint64_t rows = 37, SaveChoice choice = {}) const {
    expect_well(run_threads(on.size(), [&](Rank &rank) {
      Part part(model(on, rows), rank.rank());
      part.fill(step);
      const SaveResult result = save(ranks_of(rank), part.saved(path, step, choice));
      require(result.name == step_name(step), result.name);
    }));
  }
  // The errors of a load on so many ranks; empty texts: it was loaded, and is that of the step.
  std::vector<std::string> load_on(const layout::Mesh &on, uint64_t step, LoadOptions options = {},
                                   uint64_t rows = 37) const {
    return run_threads(on.size(), [&](Rank &rank) {
      Part part(model(on, rows), rank.rank());
      const LoadResult result = load(*rank.team, rank.waiter, path, part.loaded(), options);
      require(result.manifest.step == step, "step " + std::to_string(result.manifest.step));
      require(part.difference(step).empty(), part.difference(step));
    });
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto &entry : fs::directory_iterator(path)) all.push_back(entry.path().filename());
    std::ranges::sort(all);
    return all;
  }

  std::string path;
};

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

// Of what ranks have parts of; what all of them have lies among the parts of those that wrote it.
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
      // On as many ranks each reads its own files, and of the first one's the block with the numbers of steps; else a
      // block too much at the ends of the two large tensors' rows.
      const uint64_t most = (ranks == 3 ? 1 : 8) * block_bytes;
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
  save_on(two, 2, 37, {.keep = 2});  // the newest is the last that was saved
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
    EXPECT_EQ(problem, "rank 0: " + path + "/step-0000000003: there is a checkpoint of that name already");
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

// Whatever a rank has otherwise, all are told what, and nothing is written or read.
TEST_F(CheckpointJob, OfRanksThatDifferIsRefusedOnAll) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  save_on(three, 1);
  struct Case {
    uint64_t step = 2, rows = 37;
    SaveChoice choice;
    std::string text;
  };
  for (const Case &one : {Case{3, 37, {}, "says step 3, "}, Case{2, 36, {}, "says step 2, layout "},
                          Case{2, 37, {.replace = true}, ", replace true, "}, Case{2, 37, {.keep = 5}, ", keep 5"}})
    expect_well(run_threads(3, [&](Rank &rank) {
      const bool other = rank.rank() == 1;
      Part part(model(three, other ? one.rows : 37), rank.rank());
      const Error error = comm::test::error_of(
          [&] { save(ranks_of(rank), part.saved(path, other ? one.step : 2, other ? one.choice : SaveChoice{})); });
      require(error.status == FSDP_MISMATCH && error.rank == 1, error.message);
      require(error.message.find("what is saved differs: rank 0 says step 2, layout ") == 0, error.message);
      require(error.message.find("and rank 1 says ") != std::string::npos, error.message);
      require(error.message.find(one.text) != std::string::npos, error.message);
    }));
  for (const LoadOptions &options :
       {LoadOptions{.states = false}, LoadOptions{.allow_missing = true}, LoadOptions{.allow_unexpected = true},
        LoadOptions{.fall_back = true}, LoadOptions{.if_any = true}})
    expect_well(run_threads(3, [&](Rank &rank) {
      Part part(model(three), rank.rank());
      const Error error = comm::test::error_of(
          [&] { load(*rank.team, rank.waiter, path, part.loaded(), rank.rank() == 2 ? options : LoadOptions{}); });
      require(error.status == FSDP_MISMATCH && error.rank == 2, error.message);
    }));
  // A folder of the same name on each host, with checkpoints of their own.
  fs::create_directory(path + "/elsewhere");
  fs::copy(path + "/" + step_name(1), path + "/elsewhere/" + step_name(1), fs::copy_options::recursive);
  save_on(three, 1, 37, {.replace = true});
  expect_well(run_threads(3, [&](Rank &rank) {
    Part part(model(three), rank.rank());
    const std::string here = rank.rank() == 2 ? path + "/elsewhere" : path;
    const Error error = comm::test::error_of([&] { load(*rank.team, rank.waiter, here, part.loaded()); });
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
    Error error = comm::test::error_of([&] { save(ranks_of(rank), part.saved(path, 2)); });
    require(error.status == FSDP_INVALID_ARGUMENT && error.message == of + "save it", error.message);
    error = comm::test::error_of([&] { load(*rank.team, rank.waiter, path, part.loaded()); });
    require(error.status == FSDP_INVALID_ARGUMENT && error.message == of + "load it", error.message);
  }));
}

// A call of any rank fails, each in turn: all ranks report the same, the one before is still there, nothing else is,
// and the next save is well.
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
      const Error error = comm::test::error_of([&] { save(ranks_of(rank), part.saved(path, 2)); });
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
    left += names().size() > 1;  // where what failed was the removing
    Folder(path).remove_leftovers();
    EXPECT_EQ(names(), std::vector<std::string>{step_name(1)}) << call << " " << at;
  }
  EXPECT_LE(left, 1);
  EXPECT_GT(failed, 12);
}

// Which of its files is damaged all ranks learn, whoever has read it; and the one before is loaded if that was allowed.
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
    std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(4000).put('\t');  // behind the header
    expect_refused(file + ": is not the file that the manifest speaks of");
    put_back();
    fs::resize_file(file, fs::file_size(file) - 1);
    expect_refused(file + ": its header speaks of ");
    fs::remove(file);
    expect_refused(file + ": cannot be opened: No such file or directory");
    fs::create_symlink(path + "/whole", file);
    expect_refused(file + ": cannot be opened: ");
    fs::remove(file);
    fs::copy_file(newest + "/shard-00002-model-00001-of-00001.safetensors", file);
    expect_refused(file + ": is not the file that the manifest speaks of");
    put_back();
    fs::remove(path + "/whole");
  }
  expect_well(load_on(two, 2));
  fs::resize_file(newest + "/checkpoint.json", 100);
  expect_well(load_on(two, 1));  // no checkpoint any more
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
  fs::resize_file(path + "/" + step_name(3) + "/checkpoint.json", 10);  // there was one: it is not a new job
  for (const std::string &problem : load_on(two, 3, {.if_any = true}))
    EXPECT_EQ(problem.find("rank 0: " + path + ": there is no checkpoint in this folder; of what is there " + path), 0u)
        << problem;
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

// A reader's hook ends a save while it copies; the files go, and the job lives on.
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
    const Error error = comm::test::error_of([&] { save(ranks_of(rank), saved); });
    require(error.message == "rank 1: enough", error.message);
    part.fill(2);
    save(ranks_of(rank), part.saved(path, 2));
  });
  expect_well(problems);
  EXPECT_EQ(names(), (std::vector<std::string>{step_name(1), step_name(2)}));
  expect_well(load_on(two, 2));
}

const comm::test::RankOptions impatient{.timeout_ms = 1500, .device = {}};

// One rank's disk is slow: the others wait longer than they would for a rank that is silent.
TEST_F(CheckpointJob, OfASlowDiskTakesItsTime) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  const auto start = std::chrono::steady_clock::now();
  const FaultScope slow({SystemFault::Way::waits, -1, 700, "pwrite"});
  expect_well(run_threads(
      3,
      [&](Rank &rank) {
        Part part(model(three), rank.rank());
        part.fill(1);
        save(ranks_of(rank), part.saved(path, 1));
      },
      impatient));
  EXPECT_GT(comm::test::seconds_since(start), 2.5);
  expect_well(load_on(three, 1));
}

// A disk that takes nothing any more ends the save and not the job, and the thread that it holds is not waited for.
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
        const Error error = comm::test::error_of([&] { save(ranks_of(rank), part.saved(path, 2)); });
        require(comm::test::seconds_since(start) < 7, "it was waited for");
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

// ---- ranks as processes ----

// A rank ends at one of its calls: the others learn who died, the checkpoint of before is whole, or the new one is, and
// another job saves and loads there.
TEST_F(CheckpointJob, OfARankThatDiesIsWholeOrNotThere) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  save_on(three, 1);
  int deaths = 0;
  for (const uint32_t victim : {0u, 2u})
    for (int at = 0, dies = 1; dies; at += step_of(7)) {
      const std::vector<int> codes = comm::test::await_processes(comm::test::start_processes(3, [&](Rank &rank) {
        Part part(model(three), rank.rank());
        part.fill(2);
        rank.meet();
        std::optional<FaultScope> fault;
        if (rank.rank() == victim) fault.emplace(SystemFault{SystemFault::Way::kills_before, at, 0, ""});
        const Error error = comm::test::error_of([&] { save(ranks_of(rank), part.saved(path, 2)); });
        if (error.status == FSDP_OK) return rank.leave();
        require(error.status == FSDP_PEER_FAILED && error.rank == static_cast<int32_t>(victim), error.message);
      }));
      dies = codes[victim] == 99;
      deaths += dies;
      for (uint32_t r = 0; r < 3; ++r) EXPECT_EQ(codes[r], r == victim && dies ? 99 : 0) << victim << " " << at;
      expect_well(load_on(three, fs::exists(path + "/" + step_name(2)) ? 2 : 1));
      save_on(three, 3);
      expect_well(load_on(three, 3));
      for (const uint64_t step : {2, 3}) fs::remove_all(path + "/" + step_name(step));
      for (const std::string &name : names()) EXPECT_TRUE(name == step_name(1) || name.starts_with(".new-")) << name;
    }
  EXPECT_GT(deaths, 5);
}

// Of three ranks as processes, of which nobody may be silent for longer than a second.
std::vector<int> run_processes(const std::function<void(Rank &)> &body) {
  const std::string rendezvous = comm::test::unique_rendezvous();
  std::vector<pid_t> processes;
  for (uint32_t r = 0; r < 3; ++r) {
    const pid_t process = ::fork();
    if (process == 0) {
      comm::WorldOptions world{r, 3, rendezvous, "secret"};
      world.heartbeat_timeout_ms = 1000;
      comm::test::act_as_process(world, body, {});
    }
    processes.push_back(process);
  }
  return comm::test::await_processes(processes);
}

// All have written, and a rank dies before the first has committed: that changes nothing.
TEST_F(CheckpointJob, OfARankThatDiesAfterAllHaveWrittenIsThere) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  const auto commits = [](const Rank &rank) {
    SaveReport report;
    std::array<std::byte, sizeof report> bytes;
    if (!rank.world->read_post(0, bytes)) return false;
    std::memcpy(static_cast<void *>(&report), bytes.data(), sizeof report);
    return report.state == SaveState::committing;
  };
  const std::vector<int> codes = run_processes([&](Rank &rank) {
    Part part(model(three), rank.rank());
    part.fill(2);
    std::optional<FaultScope> slow;
    if (rank.rank() == 0) slow.emplace(SystemFault{SystemFault::Way::waits, -1, 2000, "renameat2"});
    Save one(ranks_of(rank), part.saved(path, 2));
    if (rank.rank() == 2) {
      while (!commits(rank)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ::_exit(99);
    }
    // Neither waits for anybody before the death is known.
    while (comm::test::error_of([&] { rank.world->check(); }).status != FSDP_PEER_FAILED)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    require(!one.progress().ended, "the commit was not slow enough");
    while (!one.progress().ended) one.await_end(std::chrono::milliseconds(20));
    require(one.result().name == step_name(2), "another name");
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 0, 99}));
  expect_well(load_on(three, 2));
}

// A disk holds a rank for three times as long as a rank may be silent: its heart beats on, and the save ends well.
TEST_F(CheckpointJob, OfADiskThatHangsIsNoDeath) {
  const layout::Mesh three = mesh(3, 1, layout::OuterAxis::none);
  const std::vector<int> codes = run_processes([&](Rank &rank) {
    Part part(model(three), rank.rank());
    part.fill(2);
    std::optional<FaultScope> slow;
    if (rank.rank() == 1) slow.emplace(SystemFault{SystemFault::Way::waits, 0, 3000, "pwrite"});
    save(ranks_of(rank), part.saved(path, 2));
    rank.leave();
  });
  EXPECT_EQ(codes, (std::vector<int>{0, 0, 0}));
  expect_well(load_on(three, 2));
}

// ---- boxes ----

// Of a tensor of [40, 6], beside one that each model has whole.
memory::ModelSpec boxed(uint32_t ranks, const Box &box) {
  memory::ModelSpec spec;
  spec.mesh = layout::one_axis(ranks);
  spec.states = {{"exp_avg", FSDP_FLOAT32}};
  spec.groups.resize(1);
  spec.groups[0].params = {param("w", box.shape), param("b", {5})};
  spec.groups[0].params[0].global_shape = {40, 6};
  spec.groups[0].params[0].global_offset = box.offset;
  return spec;
}

// Two models of two ranks each save their boxes together; models of other boxes, and of all of it, load them.
TEST_F(CheckpointJob, OfSeveralBoxesIsLoadedByAnyOther) {
  const std::vector<Box> ways[] = {{{{0, 0}, {40, 2}}, {{0, 2}, {40, 4}}}, {{{0, 0}, {17, 6}}, {{17, 0}, {23, 6}}}};
  uint64_t step = 0;
  for (const std::vector<Box> &saved : ways) {
    ++step;
    expect_well(run_threads(4, [&](Rank &rank) {
      const uint32_t model = rank.rank() / 2;
      Part part(boxed(2, saved[model]), rank.rank() % 2);
      part.fill(step);
      SaveOrder order = part.saved(path, step);
      order.models[0].ranks = {2 * model, 2 * model + 1};
      save(ranks_of(rank), std::move(order));
    }));
    const Manifest manifest = Folder(path).read_manifest(step_name(step));
    EXPECT_EQ(std::ranges::find(manifest.tensors, "w", &ManifestTensor::name)->parts.size(), 2u);
    EXPECT_EQ(std::ranges::find(manifest.tensors, "b", &ManifestTensor::name)->parts.size(), 1u);
    for (const Box &wanted : {Box{{0, 0}, {40, 6}}, {{0, 0}, {40, 2}}, {{17, 0}, {23, 6}}, {{9, 1}, {20, 3}}})
      expect_well(run_threads(3, [&](Rank &rank) {
        Part part(boxed(3, wanted), rank.rank());
        load(*rank.team, rank.waiter, path, part.loaded());
        require(part.difference(step).empty(), part.difference(step));
      }));
  }
}

}  // namespace
}  // namespace fsdp::checkpoint
