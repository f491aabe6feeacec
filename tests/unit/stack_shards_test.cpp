// SPDX-License-Identifier: Apache-2.0
// Tests stacks of matrices in checkpoints, where ranks have cut inside matrices. Each element is written once and read
// once, in few boxes, whatever rows the writer and the reader have.
#include <gtest/gtest.h>

#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/model_shards.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/plan/weight_plan.h"
#include "checkpoint_models.h"

namespace fsdp::checkpoint {

using test::for_each_element, test::mesh, test::meshes, test::param;

namespace {

const std::vector<std::vector<uint64_t>> shapes{{3, 5, 4}, {2, 100}, {7, 1, 6}, {1, 9, 2}, {2, 3, 4, 5}, {40, 2, 3}};

// Makes a stack of each shape, with rows of the first `row_dimensions` dimensions if it has that many.
memory::ModelSpec stacks(const layout::Mesh &mesh, uint32_t row_dimensions) {
  memory::ModelSpec spec;
  spec.mesh() = mesh;
  spec.states = {{"exp_avg", FSDP_FLOAT32}};
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}) {
    memory::GroupSpec group;
    group.name = "g" + std::to_string(strategy);
    group.strategy = strategy;
    for (size_t i = 0; i < shapes.size(); ++i) {
      group.params.push_back(param(group.name + "." + std::to_string(i), shapes[i]));
      group.params.back().row_dimensions = std::min(row_dimensions, static_cast<uint32_t>(shapes[i].size()));
    }
    spec.groups.push_back(std::move(group));
  }
  return spec;
}

struct Stacks {
  Stacks(const layout::Mesh &mesh, uint32_t row_dimensions)
      : spec(stacks(mesh, row_dimensions)), plan(plan_model(spec)), shards(spec, plan, true, 64) {}
  memory::ModelSpec spec;
  memory::ModelPlan plan;
  ModelShards shards;
};

// Holds the contents of each of the manifest's files.
struct Files {
  explicit Files(const ModelShards &shards) {
    for (const ShardKind kind : {ShardKind::weights, ShardKind::optimizer}) {
      for (ManifestTensor &tensor : shards.manifest_tensors(kind, static_cast<uint32_t>(boxes.size())))
        manifest.tensors.push_back(std::move(tensor));
      for (uint32_t file = 0; file < shards.files(kind); ++file)
        for (const uint32_t rank : shards.writers(kind, file)) {
          std::map<std::string, Box> &has = boxes.emplace_back();
          for (const WrittenBox &written : shards.written_by(rank, kind, file)) has[written.tensor->name] = written.box;
          manifest.files.push_back({saved_file_name(kind, rank, rank, file), 1, "0123456789abcdef0123456789abcdef"});
        }
    }
    manifest.models.resize(1);
  }
  Manifest manifest;
  std::vector<std::map<std::string, Box>> boxes;
};

TEST(StackShards, EveryElementIsWrittenOnceInFewBoxes) {
  for (const layout::Mesh &mesh : meshes())
    for (const uint32_t row_dimensions : {1u, 2u, 3u, 4u}) {
      const Stacks some(mesh, row_dimensions);
      for (const KeptTensor &tensor : some.shards.tensors()) {
        std::vector<int> written(tensor.element_count());
        for (uint32_t rank = 0; rank < mesh.size(); ++rank) {
          uint32_t boxes = 0;
          uint64_t next = 0;
          for (uint32_t file = 0; file < some.shards.files(tensor.kind); ++file)
            for (const WrittenBox &one : some.shards.written_by(rank, tensor.kind, file)) {
              if (one.tensor != &tensor) continue;
              EXPECT_TRUE(boxes == 0 || one.first == next);
              next = one.first + one.box.count();
              ++boxes;
              const uint64_t kept = some.shards.kept_rows(tensor, rank).first * tensor.row_size();
              for_each_element(one.box, tensor.shape(), [&](uint64_t element, uint64_t i) {
                ++written.at(element);
                EXPECT_EQ(element, kept + one.first + i);
              });
            }
          EXPECT_LE(boxes, std::max(2 * tensor.row_dimensions(), 2u) - 1);
        }
        EXPECT_EQ(written, std::vector<int>(written.size(), 1)) << tensor.name << " on " << mesh.size();
      }
      EXPECT_LE(some.shards.files(ShardKind::weights), 2 * row_dimensions - 1);
    }
}

TEST(StackShards, ChunksInsideAMatrixAreThreeBoxes) {
  const Stacks some(mesh(8, 1, layout::OuterAxis::none), 2);
  const KeptTensor tensor = some.shards.tensors()[0];
  // In the stack [3, 5, 4] the chunk has rows 2 to 4 of one matrix, a whole matrix, and rows 0 to 2 of another.
  EXPECT_EQ(ModelShards::boxes_of(tensor, {2, 11}),
            (std::vector<Box>{{{0, 2, 0}, {1, 3, 4}}, {{1, 0, 0}, {1, 5, 4}}, {{2, 0, 0}, {1, 3, 4}}}));
  EXPECT_EQ(ModelShards::boxes_of(tensor, {5, 10}), (std::vector<Box>{{{1, 0, 0}, {2, 5, 4}}}));
  EXPECT_EQ(ModelShards::boxes_of(tensor, {6, 2}), (std::vector<Box>{{{1, 1, 0}, {1, 2, 4}}}));
  EXPECT_TRUE(ModelShards::boxes_of(tensor, {6, 0}).empty());
}

// The manifest describes the contents of each file in a text that can be read again.
TEST(StackShards, AreToldByTheManifest) {
  for (const layout::Mesh &mesh : meshes())
    for (const uint32_t row_dimensions : {1u, 2u, 3u, 4u}) {
      const Stacks some(mesh, row_dimensions);
      const Files files(some.shards);
      EXPECT_EQ(parse_manifest(write_manifest(files.manifest), "m"), files.manifest);
      for (const ManifestTensor &tensor : files.manifest.tensors) {
        if (tensor.shape.empty()) continue;
        size_t boxes = 0;
        for (const ManifestPart &part : tensor.parts) {
          Box box = part.box;
          for (const RowCut &cut : part.cuts)
            for (uint32_t file = cut.first_file; file < cut.first_file + cut.files; ++file, ++boxes) {
              box.shape[part.axis] = cut.rows;
              EXPECT_EQ(files.boxes.at(file).at(tensor.name), box) << tensor.name;
              box.offset[part.axis] += cut.rows;
            }
        }
        EXPECT_EQ(boxes, static_cast<size_t>(std::ranges::count_if(
                             files.boxes, [&](const auto &has) { return has.contains(tensor.name); })));
      }
    }
}

// Expects the plan to bring each element that the rank keeps once, to its place, from a file that has it.
void expect_all_kept(const ModelShards &shards, const LoadPlan &plan, uint32_t rank,
                     const std::vector<std::map<std::string, Box>> &files) {
  EXPECT_TRUE(plan.missing.empty() && plan.unexpected.empty() && plan.other.empty());
  std::map<uint32_t, std::vector<int>> taken;
  for (const LoadedFile &file : plan.files)
    for (const LoadedRows &rows : file.rows) {
      const KeptTensor &tensor = shards.tensors()[rows.tensor];
      if (!tensor.plane) continue;
      EXPECT_EQ(intersect(rows.box, files.at(file.file).at(rows.name)), rows.box);
      const RowRange kept = shards.kept_rows(tensor, rank);
      std::vector<int> &counts = taken[rows.tensor];
      counts.resize(kept.count * tensor.row_size());
      const uint64_t start = kept.first * tensor.row_size();
      std::map<uint64_t, uint64_t> in_kept;  // by element of the tensor
      for_each_element(rows.kept, tensor.shape(), [&](uint64_t element, uint64_t i) { in_kept[element] = i; });
      for_each_element(rows.box, tensor.shape(), [&](uint64_t element, uint64_t) {
        EXPECT_EQ(rows.first + in_kept.at(element), element - start) << tensor.name;
        ++counts.at(element - start);
      });
    }
  for (uint32_t t = 0; t < shards.tensors().size(); ++t) {
    const KeptTensor &tensor = shards.tensors()[t];
    const uint64_t count = tensor.plane ? shards.kept_rows(tensor, rank).count * tensor.row_size() : 0;
    EXPECT_EQ(taken[t], std::vector<int>(count, 1)) << tensor.name;
  }
}

TEST(StackShards, AreLoadedWithOtherRowsOnOtherMeshes) {
  const std::vector<layout::Mesh> some{meshes()[0], meshes()[2], meshes()[3], meshes()[5], meshes()[9]};
  for (const layout::Mesh &from : some)
    for (const uint32_t saved_rows : {1u, 2u, 3u}) {
      const Files files(Stacks(from, saved_rows).shards);
      for (const layout::Mesh &to : some)
        for (const uint32_t loaded_rows : {1u, 2u, 4u}) {
          const Stacks loaded(to, loaded_rows);
          for (uint32_t rank = 0; rank < to.size(); ++rank)
            expect_all_kept(loaded.shards, plan_load(loaded.shards, files.manifest, rank), rank, files.boxes);
        }
    }
}

// With FSDP_LOAD_ONE_REPLICA the ranks that keep the same rows each read a part of these.
TEST(StackShards, AreReadOnceByAllReplicas) {
  const Files files(Stacks(mesh(3, 1, layout::OuterAxis::none), 2).shards);
  const layout::Mesh two = mesh(3, 2, layout::OuterAxis::replicate);
  const Stacks loaded(two, 2);
  std::map<std::string, std::vector<int>> taken;
  for (uint32_t rank = 0; rank < two.size(); ++rank)
    for (const LoadedFile &file : plan_load(loaded.shards, files.manifest, rank, {.one_replica = true}).files)
      for (const LoadedRows &rows : file.rows) {
        const KeptTensor &tensor = loaded.shards.tensors()[rows.tensor];
        if (!tensor.plane) continue;
        taken[tensor.name].resize(tensor.element_count());
        for_each_element(rows.box, tensor.shape(), [&](uint64_t element, uint64_t) { ++taken[tensor.name][element]; });
      }
  for (const auto &[name, counts] : taken) EXPECT_EQ(counts, std::vector<int>(counts.size(), 1)) << name;
}

// Another library's weights have the first matrices in one file, and the others in a file of another name.
TEST(StackShards, AreLoadedFromFilesOfOtherLibraries) {
  std::vector<StoredFile> files(2);
  std::vector<Rename> renames;
  std::vector<std::map<std::string, Box>> boxes(2);
  const Stacks loaded(mesh(8, 1, layout::OuterAxis::none), 3);
  for (const KeptTensor &tensor : loaded.shards.tensors()) {
    if (tensor.kind != ShardKind::weights) continue;
    std::vector<uint64_t> shape(tensor.shape().begin(), tensor.shape().end());
    const uint64_t all = shape[0], head = all / 2;
    if (head) {
      shape[0] = head;
      files[0].boxes.push_back({"head." + tensor.name, find_element_type("F32"), whole(shape)});
      renames.push_back({"head." + tensor.name, tensor.name});
    }
    shape[0] = all - head;
    files[1].boxes.push_back({"tail." + tensor.name, find_element_type("F32"), whole(shape)});
    renames.push_back({"tail." + tensor.name, tensor.name, 0, head});
  }
  for (uint32_t rank = 0; rank < 8; ++rank) {
    const LoadPlan plan = plan_weights(loaded.shards, files, renames, rank);
    EXPECT_TRUE(plan.missing.empty() && plan.unexpected.empty() && plan.other.empty());
    std::map<uint32_t, std::vector<int>> taken;
    for (const LoadedFile &file : plan.files)
      for (const LoadedRows &rows : file.rows) {
        const KeptTensor &tensor = loaded.shards.tensors()[rows.tensor];
        const RowRange kept = loaded.shards.kept_rows(tensor, rank);
        taken[rows.tensor].resize(kept.count * tensor.row_size());
        const uint64_t before =
            file.file == 0 ? 0 : tensor.shape()[0] / 2 * (tensor.element_count() / tensor.shape()[0]);
        EXPECT_EQ(rows.box, rows.kept);
        for_each_element(rows.box, tensor.shape(), [&](uint64_t element, uint64_t i) {
          EXPECT_EQ(rows.first + i, before + element - kept.first * tensor.row_size());
          ++taken[rows.tensor].at(rows.first + i);
        });
      }
    for (const auto &[number, counts] : taken) EXPECT_EQ(counts, std::vector<int>(counts.size(), 1));
  }
}

// A box of a larger stack counts its rows in the box, and its boxes lie in the larger tensor.
TEST(StackShards, OfABoxLieInTheLargerTensor) {
  memory::ModelSpec spec = stacks(mesh(4, 1, layout::OuterAxis::none), 2);
  for (memory::GroupSpec &group : spec.groups) group.params.resize(1);  // [3, 5, 4]
  for (memory::GroupSpec &group : spec.groups)
    group.params[0].global_shape = {8, 5, 9}, group.params[0].global_offset = {4, 0, 5};
  const memory::ModelPlan plan = plan_model(spec);
  const ModelShards shards(spec, plan, false, 64);
  EXPECT_EQ(ModelShards::boxes_of(shards.tensors()[0], {2, 11}),
            (std::vector<Box>{{{4, 2, 5}, {1, 3, 4}}, {{5, 0, 5}, {1, 5, 4}}, {{6, 0, 5}, {1, 3, 4}}}));
  const Files files(shards);
  EXPECT_EQ(parse_manifest(write_manifest(files.manifest), "m"), files.manifest);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    const LoadPlan load = plan_load(shards, files.manifest, rank);
    EXPECT_TRUE(load.missing.empty() && load.unexpected.empty() && load.other.empty());
  }
}

// Two meshes have the same box and have cut it differently. One of them writes it.
TEST(StackShards, OfTwoMeshesAreWrittenByOne) {
  Manifest whole_manifest;
  uint32_t first = 0;
  for (const uint32_t ranks : {2u, 3u}) {
    const Stacks some(mesh(ranks, 1, layout::OuterAxis::none), 2);
    Manifest part = Files(some.shards).manifest;
    for (ManifestFile &file : part.files)
      file.name = std::to_string(first++) + file.name.substr(file.name.rfind('/') + 1);
    add_part(whole_manifest, part);
  }
  whole_manifest.models.resize(1);
  EXPECT_EQ(parse_manifest(write_manifest(whole_manifest), "m"), whole_manifest);
  EXPECT_EQ(whole_manifest.tensors[0].parts,
            Files(Stacks(mesh(2, 1, layout::OuterAxis::none), 2).shards).manifest.tensors[0].parts);
}

// The text grows with matrices plus ranks, not with their product.
TEST(StackShards, TakeLittleOfAManifest) {
  memory::ModelSpec spec;
  spec.mesh() = layout::one_axis(16384);
  spec.groups.resize(1);
  spec.groups[0].params = {param("experts", {256, 2048, 7168}), param("pair", {2, uint64_t{64} << 20}),
                           param("long", {uint64_t{64} << 20, 2})};
  for (memory::ParamSpec &stack : spec.groups[0].params) stack.row_dimensions = 2;
  const memory::ModelPlan plan = plan_model(spec);
  const ModelShards shards(spec, plan, false);
  EXPECT_LE(shards.files(ShardKind::weights), 3u);
  Files files(shards);
  files.manifest.files.clear();
  EXPECT_LT(write_manifest(files.manifest).size(), 100'000u);
}

// The stack has one whole row a rank. Ranks cut inside rows of matrices, and a manifest has two parts for each
// boundary.
TEST(StackShards, OfManyRanksHaveAManifestThatIsRead) {
  memory::ModelSpec spec;
  spec.mesh() = layout::one_axis(16384);
  spec.groups.resize(1);
  spec.groups[0].params = {param("experts", {8, 2048, 7170})};
  spec.groups[0].params[0].row_dimensions = 3;
  const memory::ModelPlan plan = plan_model(spec);
  const ModelShards shards(spec, plan, false);
  Files files(shards);
  const Manifest read = parse_manifest(write_manifest(files.manifest), "manifest");
  EXPECT_EQ(read.tensors, files.manifest.tensors);
}

}  // namespace
}  // namespace fsdp::checkpoint
