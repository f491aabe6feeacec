// SPDX-License-Identifier: Apache-2.0
// Models with known bytes, on ranks that share a folder, for tests of saves and loads by all ranks.
#pragma once

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
#include "checkpoint/format/shard_file.h"
#include "checkpoint/job/load.h"
#include "checkpoint/job/save.h"
#include "checkpoint/job/save_report.h"
#include "checkpoint_models.h"
#include "shm_ranks.h"
#include "system_faults.h"

namespace fsdp::checkpoint {

namespace fs = std::filesystem;
using fsdp::test::FaultScope;
using fsdp::test::SystemFault;
using test::mesh, test::meshes, test::model, test::param, test::stacked;
using transport::test::Rank;
using transport::test::require;
using transport::test::run_threads;

// Returns the bytes of a tensor in the checkpoint numbered `seed`.
inline uint64_t first_value(const std::string &name, uint64_t seed) {
  return std::hash<std::string>()(name) + seed * 0x9E3779B97F4A7C15U;
}
FSDP_TEST_ALONE inline void fill_values(std::byte *to, uint64_t count, uint64_t first, uint64_t begin) {
  for (uint64_t i = 0; i < count; ++i) to[i] = static_cast<std::byte>((first + (begin + i) * 2654435761U) >> 11);
}

inline SaveRanks ranks_of(Rank &rank) { return {*rank.team, *rank.world, rank.waiter}; }

// FSDP_TEST_MANY makes long campaigns try everything. With ThreadSanitizer half of the cases are enough, because they
// run the threads in all ways.
#ifdef __SANITIZE_THREAD__
inline int step_of(int usual) { return 2 * usual; }
#else
inline int step_of(int usual) { return std::getenv("FSDP_TEST_MANY") ? 1 : usual; }
#endif

// Holds a rank's part of a model: the bytes that it keeps.
struct Part {
  // The limit is small, so that ranks with the same bytes share the writing even of few bytes.
  Part(const memory::ModelSpec &given, uint32_t place)
      : spec(given), plan(plan_model(spec)), shards(spec, plan, true, 64), rank(place) {
    for (const KeptTensor &tensor : shards.tensors()) {
      const RowRange rows = shards.kept_rows(tensor, rank);
      if (bytes[tensor.name].empty())
        bytes[tensor.name].resize(*stored_bytes(*tensor.type, rows.count * tensor.row_size()));
    }
  }
  template <class Visit>  // (name, first byte in the whole tensor, the bytes here)
  void for_each_tensor(Visit visit) {
    for (const KeptTensor &tensor : shards.tensors()) {
      const RowRange rows = shards.kept_rows(tensor, rank);
      if (rows.count == 0) continue;
      const uint64_t element = tensor.type->bits / 8;
      std::span<std::byte> left = bytes[tensor.name];
      for (const Box &kept : ModelShards::boxes_of(tensor, rows)) {
        const RunWalk runs(kept, whole(tensor.global_shape()), kept);
        for (uint64_t i = 0; i < runs.run_count(); ++i)
          visit(tensor.name, runs[i].from * element, left.subspan(runs[i].to * element, runs[i].count * element));
        left = left.subspan(kept.count() * element);
      }
    }
  }
  void fill(uint64_t seed) {
    for_each_tensor([&](const std::string &name, uint64_t begin, std::span<std::byte> here) {
      fill_values(here.data(), here.size(), first_value(name, seed), begin);
    });
  }
  // Returns "" if all bytes are equal, or the place of a difference.
  std::string difference(uint64_t seed) {
    std::string text;
    for_each_tensor([&](const std::string &name, uint64_t begin, std::span<std::byte> here) {
      std::vector<std::byte> wanted(here.size());
      fill_values(wanted.data(), wanted.size(), first_value(name, seed), begin);
      if (here.empty() || !text.empty() || !std::memcmp(here.data(), wanted.data(), here.size())) return;
      const auto found = std::ranges::mismatch(here, wanted).in1 - here.begin();
      text = name + " at byte " + std::to_string(begin + static_cast<uint64_t>(found));
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
    for (uint32_t r = 0; r < spec.mesh().size(); ++r) model.ranks.push_back(r);
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
  // Returns the errors of a load on this many ranks. Empty texts mean that the checkpoint of this step was loaded.
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

}  // namespace fsdp::checkpoint
