// SPDX-License-Identifier: Apache-2.0
// Tests ranks that share a folder and save and load models with groups that have meshes of their own.
#include "checkpoint_meshes.h"
#include "checkpoint_ranks.h"

namespace fsdp::checkpoint {

using namespace test;

namespace {

class CheckpointOfMeshes : public CheckpointJob {
 protected:
  void save_layout_on_ranks(const Layout &layout, uint64_t step) const {
    expect_well(run_threads(layout.ranks, [&](Rank &rank) {
      Part part(declared_by(layout, rank.rank()), rank.rank());
      part.fill(step);
      save(ranks_of(rank), part.saved(path, step));
    }));
  }
  std::vector<std::string> load_layout(const Layout &layout, uint64_t step, LoadOptions options = {}) const {
    return run_threads(layout.ranks, [&](Rank &rank) {
      Part part(declared_by(layout, rank.rank()), rank.rank());
      LoadedModel model = part.loaded();
      model.read = [&](const KeptTensor &tensor, uint64_t first, std::span<std::byte> to) {
        std::memcpy(to.data(), part.bytes.at(tensor.name).data() + first, to.size());
      };
      const LoadResult result = load(*rank.team, rank.waiter, path, model, options);
      require(result.manifest.step == step, "step " + std::to_string(result.manifest.step));
      require(part.difference(step).empty(), part.difference(step));
    });
  }
};

TEST_F(CheckpointOfMeshes, IsLoadedInEveryLayout) {
  const std::vector<Layout> all = layouts();
  for (size_t from = 0; from < all.size(); ++from) {
    save_layout_on_ranks(all[from], from);
    for (size_t to = 0; to < all.size(); ++to) {
      SCOPED_TRACE(all[from].name + " to " + all[to].name);
      expect_well(load_layout(all[to], from, {.one_replica = (from + to) % 2 == 0}));
    }
  }
}

// PyTorch finds tensors by name and box in the headers of the files, and so does a load of weights alone.
TEST_F(CheckpointOfMeshes, FilesLoadAsPlainWeights) {
  const std::vector<Layout> all = layouts();
  for (size_t l = 0; l < all.size(); ++l) {
    save_layout_on_ranks(all[l], l + 1);
    const Layout &to = all[(l + 4) % all.size()];
    SCOPED_TRACE(all[l].name + " to " + to.name);
    expect_well(run_threads(to.ranks, [&](Rank &rank) {
      Part part(declared_by(to, rank.rank()), rank.rank());
      part.fill(l + 1);
      for (auto &[name, bytes] : part.bytes)
        if (!name.starts_with("state.")) std::ranges::fill(bytes, std::byte{0});
      load_weights(*rank.team, rank.waiter, path + "/" + step_name(l + 1), part.loaded(), {});
      require(part.difference(l + 1).empty(), part.difference(l + 1));
    }));
  }
}

// The checkpoint lacks a tensor that only some ranks declare. All ranks report the same, and no rank waits for another.
TEST_F(CheckpointOfMeshes, MissingTensorOfOneMeshIsReportedOnAllRanks) {
  const Layout some{"", 4, {dense(4), experts(interleaved(4, 2), Division::named)}},
      more{"", 6, {dense(6), experts(interleaved(6, 3), Division::named)}};
  save_layout_on_ranks(some, 1);
  const auto problems = load_layout(more, 1);
  for (const std::string &problem : problems) {
    EXPECT_EQ(problem, problems[0]);
    EXPECT_NE(problem.find("missing: \"experts.w.2\""), std::string::npos) << problem;
  }
}

// If boxes of two meshes overlap in a tensor, the save is refused before anything gets a name.
TEST_F(CheckpointOfMeshes, ThatHasAnElementTwiceIsNotCommitted) {
  const Layout layout{"", 4, {dense(4), experts(interleaved(4, 2))}};
  const auto problems = run_threads(4, [&](Rank &rank) {
    memory::ModelSpec spec = declared_by(layout, rank.rank());
    memory::GroupSpec &group = spec.groups[1];
    group.instances[1].params[0].global_offset = {5, 0};  // rows 5 to 11, and the other mesh has 0 to 6
    if (rank.rank() % 2) group.params[0].global_offset = {5, 0};
    Part part(spec, rank.rank());
    save(ranks_of(rank), part.saved(path, 1));
  });
  for (const std::string &problem : problems)
    EXPECT_NE(problem.find("parts that do not overlap"), std::string::npos) << problem;
  EXPECT_EQ(names(), std::vector<std::string>());
}

// Only rank 3 has rows of its mesh's experts, and it ends at one of its calls.
TEST_F(CheckpointOfMeshes, RankDeathLeavesAWholeCheckpointOrNone) {
  const Layout layout{"", 4, {dense(4), repeated(4, 2), experts(interleaved(4, 2))}};
  save_layout_on_ranks(layout, 1);
  int deaths = 0;
  for (int at = 0, dies = 1; dies; at += step_of(4)) {
    const std::vector<int> codes =
        transport::test::await_processes(transport::test::start_processes(4, [&](Rank &rank) {
          Part part(declared_by(layout, rank.rank()), rank.rank());
          part.fill(2);
          rank.meet();
          std::optional<FaultScope> fault;
          if (rank.rank() == 3) fault.emplace(SystemFault{SystemFault::Way::kills_before, at, 0, ""});
          const Error error = transport::test::error_of([&] { save(ranks_of(rank), part.saved(path, 2)); });
          if (error.status == FSDP_OK) return rank.leave();
          require(error.status == FSDP_PEER_FAILED && error.rank == 3, error.message);
        }));
    dies = codes[3] == 99;
    deaths += dies;
    for (uint32_t r = 0; r < 3; ++r) EXPECT_EQ(codes[r], 0) << at;
    expect_well(load_layout(layout, fs::exists(path + "/" + step_name(2)) ? 2 : 1));
    for (const std::string &name : names())
      if (name != step_name(1)) fs::remove_all(path + "/" + name);
  }
  EXPECT_GT(deaths, 8 / step_of(4));  // it makes more than 8 calls
}

}  // namespace
}  // namespace fsdp::checkpoint
