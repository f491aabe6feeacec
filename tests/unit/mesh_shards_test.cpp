// SPDX-License-Identifier: Apache-2.0
// Tests checkpoints of models with groups that have meshes of their own. Each element of each tensor is written once,
// and each layout loads checkpoints of the others. The test carries out the ranks' writes and reads, number by number.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>

#include "base/error.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/mesh_covers.h"
#include "checkpoint/plan/save_plan.h"
#include "checkpoint/plan/weight_plan.h"
#include "checkpoint_meshes.h"

namespace fsdp::checkpoint {

using namespace test;

namespace {

uint64_t value_of(const std::string &name, uint64_t element) { return std::hash<std::string>()(name) + element; }

// A rank of a layout, with the values of the tensors that it keeps.
struct LaidPart {
  LaidPart(const Layout &layout, uint32_t number, bool filled)
      : spec(declared_by(layout, number)), plan(plan_model(spec)), shards(spec, plan, true, 64), rank(number) {
    for (uint32_t t = 0; t < shards.tensors().size(); ++t) {
      std::vector<uint64_t> &kept = values.emplace_back();
      const KeptTensor &tensor = shards.tensors()[t];
      for (const Box &box : kept_boxes(tensor))
        for_each_element(box, tensor.global_shape(), [&](uint64_t element, uint64_t) {
          kept.push_back(filled ? value_of(tensor.name, element) : 0);
        });
    }
  }
  std::vector<Box> kept_boxes(const KeptTensor &tensor) const {
    return ModelShards::boxes_of(tensor, shards.kept_rows(tensor, rank));
  }
  memory::ModelSpec spec;
  memory::ModelPlan plan;
  ModelShards shards;
  uint32_t rank;
  std::vector<std::vector<uint64_t>> values;  // by tensor
};

struct Stored {
  Box box;
  std::vector<uint64_t> values;
};
struct Saved {
  Manifest manifest;
  std::map<std::string, std::map<std::string, Stored>> files;  // by name of the file and of the tensor
};

Manifest describe_files(const ModelShards &shards) {
  Manifest manifest;
  manifest.models.resize(1);
  for (const ShardKind kind : {ShardKind::weights, ShardKind::optimizer}) {
    for (ManifestTensor &tensor : shards.manifest_tensors(kind, static_cast<uint32_t>(manifest.files.size())))
      manifest.tensors.push_back(std::move(tensor));
    for (uint32_t file = 0; file < shards.files(kind); ++file)
      for (const uint32_t rank : shards.writers(kind, file))
        manifest.files.push_back({saved_file_name(kind, rank, rank, file), 1, "0123456789abcdef0123456789abcdef"});
  }
  return manifest;
}

void write_files(const LaidPart &part, Saved &saved) {
  for (const ShardKind kind : {ShardKind::weights, ShardKind::optimizer})
    for (uint32_t file = 0; file < part.shards.files(kind); ++file)
      for (const WrittenBox &written : part.shards.written_by(part.rank, kind, file)) {
        const std::vector<uint64_t> &kept =
            part.values.at(static_cast<size_t>(written.tensor - part.shards.tensors().data()));
        ASSERT_LE(written.first + written.box.count(), kept.size());
        const auto begin = kept.begin() + static_cast<std::ptrdiff_t>(written.first);
        Stored stored{written.box, {begin, begin + static_cast<std::ptrdiff_t>(written.box.count())}};
        const std::string name = saved_file_name(kind, part.rank, part.rank, file);
        EXPECT_TRUE(saved.files[name].emplace(written.tensor->name, std::move(stored)).second) << name;
      }
}

// Holds the bytes that ranks write, and the first rank's manifest.
Saved save_layout(const Layout &layout) {
  Saved saved;
  for (uint32_t rank = 0; rank < layout.ranks; ++rank) {
    const LaidPart part(layout, rank, true);
    write_files(part, saved);
    const Manifest manifest = describe_files(part.shards);
    if (rank == 0) saved.manifest = manifest;
    EXPECT_EQ(manifest, saved.manifest) << "ranks describe one checkpoint";
  }
  return saved;
}

void take_rows(LaidPart &part, const LoadedRows &rows, const Stored &stored) {
  const KeptTensor &tensor = part.shards.tensors().at(rows.tensor);
  std::map<uint64_t, uint64_t> values, positions;  // by element of the whole tensor
  for_each_element(stored.box, tensor.global_shape(),
                   [&](uint64_t element, uint64_t i) { values[element] = stored.values.at(i); });
  for_each_element(rows.kept, tensor.global_shape(),
                   [&](uint64_t element, uint64_t i) { positions[element] = rows.first + i; });
  for_each_element(rows.box, tensor.global_shape(), [&](uint64_t element, uint64_t) {
    uint64_t &place = part.values.at(rows.tensor).at(positions.at(element));
    EXPECT_EQ(place, 0u) << "taken twice";
    place = values.at(element);
  });
}

// Loads the checkpoint on a rank, and expects that nothing is missing and that the rank has the values of the whole
// model.
void expect_loaded(const Layout &layout, uint32_t rank, const Saved &saved) {
  LaidPart part(layout, rank, false);
  const LoadPlan plan = plan_load(part.shards, saved.manifest, rank, {.one_replica = false});
  EXPECT_TRUE(plan.missing.empty() && plan.unexpected.empty() && plan.other.empty())
      << (plan.other.empty() ? "" : plan.other[0]);
  for (const LoadedFile &file : plan.files)
    for (const LoadedRows &rows : file.rows)
      take_rows(part, rows, saved.files.at(saved.manifest.files.at(file.file).name).at(rows.name));
  EXPECT_EQ(part.values, LaidPart(layout, rank, true).values) << "rank " << rank;
}

TEST(MeshShards, EveryElementIsWrittenOnce) {
  for (const Layout &layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const Saved saved = save_layout(layout);
    std::map<std::string, std::vector<int>> painted;
    for (const ManifestTensor &tensor : saved.manifest.tensors) {
      EXPECT_TRUE(tensor.filled()) << tensor.name;
      painted[tensor.name].resize(whole(tensor.shape).count());
    }
    for (const auto &[file, tensors] : saved.files)
      for (const auto &[name, stored] : tensors) {
        const auto of = std::ranges::find(saved.manifest.tensors, name, &ManifestTensor::name);
        for_each_element(stored.box, of->shape, [&](uint64_t element, uint64_t i) {
          ++painted.at(name).at(element);
          EXPECT_EQ(stored.values.at(i), value_of(name, element));
        });
      }
    for (const auto &[name, counts] : painted) EXPECT_EQ(counts, std::vector<int>(counts.size(), 1)) << name;
  }
}

// Parsing refuses parts that overlap. The parsed manifest must name the same boxes in the same files.
TEST(MeshShards, ManifestNamesTheFileOfEachBox) {
  for (const Layout &layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const Saved saved = save_layout(layout);
    EXPECT_EQ(parse_manifest(write_manifest(saved.manifest), "m"), saved.manifest);
    size_t boxes = 0, told = 0;
    for (const auto &[file, tensors] : saved.files) boxes += tensors.size();
    for (const ManifestTensor &tensor : saved.manifest.tensors)
      for (const ManifestPart &part : tensor.parts) {
        Box box = part.box;
        for (const RowCut &cut : part.cuts)
          for (uint32_t i = 0; i < cut.files; ++i, ++told) {
            const uint32_t file = cut.file(i);
            if (!box.shape.empty()) box.shape[part.axis] = cut.rows;
            EXPECT_EQ(saved.files.at(saved.manifest.files.at(file).name).at(tensor.name).box, box) << tensor.name;
            if (!box.shape.empty()) box.offset[part.axis] += cut.rows;
          }
      }
    EXPECT_EQ(told, boxes);
  }
}

TEST(MeshShards, AreLoadedInEveryLayout) {
  for (const Layout &from : layouts()) {
    const Saved saved = save_layout(from);
    for (const Layout &to : layouts()) {
      SCOPED_TRACE(from.name + " to " + to.name);
      for (uint32_t rank = 0; rank < to.ranks; ++rank) expect_loaded(to, rank, saved);
    }
  }
}

// The text grows with tensors plus ranks, even if a mesh has every second rank.
TEST(MeshShards, ManifestStaysSmallOnManyRanks) {
  const auto laid = [](uint32_t ranks, uint32_t meshes) {
    Layout layout{"", ranks, {dense(ranks), experts(interleaved(ranks, meshes))}};
    layout.groups[1].tensors = {param("experts.w", {120, 4})};
    return layout;
  };
  const Saved saved = save_layout(laid(24, 2));
  const auto experts = std::ranges::find(saved.manifest.tensors, "experts.w", &ManifestTensor::name);
  ASSERT_EQ(experts->parts.size(), 2u);
  EXPECT_EQ(experts->parts[0].cuts, (std::vector<RowCut>{{0, 12, 5, 2}}));
  EXPECT_EQ(experts->parts[1].cuts, (std::vector<RowCut>{{1, 12, 5, 2}}));
  Manifest joined;
  add_part(joined, saved.manifest);
  EXPECT_EQ(joined.tensors, saved.manifest.tensors) << "files have the same numbers";
  for (const Layout &to : {laid(24, 2), laid(3, 1), laid(6, 3)})
    for (uint32_t rank = 0; rank < to.ranks; ++rank) expect_loaded(to, rank, saved);
}

// The rows of experts on ranks 0 and 2 are 0 to 6, and those on ranks 1 and 3 are 6 to 12.
TEST(MeshShards, RanksKeepWhatTheirMeshHas) {
  Layout layout{"", 4, {dense(4), experts(interleaved(4, 2))}};
  for (LaidGroup &group : layout.groups) group.tensors.resize(1);
  const LaidPart part(layout, 3, true);
  std::map<std::string, std::vector<std::vector<Box>>> boxes;  // by name and rank
  for (const KeptTensor &tensor : part.shards.tensors())
    for (uint32_t rank = 0; rank < 4; ++rank) {
      auto &of = boxes[tensor.name];
      of.resize(4);
      std::ranges::move(ModelShards::boxes_of(tensor, part.shards.rows(tensor, rank)), std::back_inserter(of[rank]));
    }
  using Boxes = std::vector<Box>;
  EXPECT_EQ(boxes.at("experts.w"),
            (std::vector<Boxes>{{{{0, 0}, {3, 4}}}, {{{6, 0}, {3, 4}}}, {{{3, 0}, {3, 4}}}, {{{9, 0}, {3, 4}}}}));
  EXPECT_EQ(boxes.at("dense.w"),
            (std::vector<Boxes>{{{{0, 0}, {3, 4}}}, {{{3, 0}, {3, 4}}}, {{{6, 0}, {3, 4}}}, {{{9, 0}, {1, 4}}}}));
}

// Of equal boxes the first mesh in the order of ranks writes. The scalar of steps is written once for each name.
TEST(MeshShards, TheFirstMeshWritesEqualBoxes) {
  const Layout layout{"", 4, {repeated(4, 2), experts(interleaved(4, 2))}};
  const LaidPart part(layout, 1, true);
  std::map<std::string, std::vector<uint32_t>> writers;
  for (const KeptTensor &tensor : part.shards.tensors())
    for (uint32_t rank = 0; rank < 4; ++rank)
      if (part.shards.rows(tensor, rank).count > 0) writers[tensor.name].push_back(rank);
  EXPECT_EQ(writers.at("router"), (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(writers.at("state.router.exp_avg"), (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(writers.at("state.router.step").size(), 1u);
  EXPECT_EQ(writers.at("state.experts.w.step").size(), 1u);
  EXPECT_EQ(writers.at("experts.stack"), (std::vector<uint32_t>{0, 2, 1, 3}));
}

// Hugging Face has a tensor for each expert.
TEST(MeshShards, NamesMayDifferByMesh) {
  const Layout from{"", 4, {dense(4), experts(interleaved(4, 2), Division::named)}},
      to{"", 6, {dense(6), experts(interleaved(6, 2), Division::named)}};
  const Saved saved = save_layout(from);
  const auto has = [&](const char *name) {
    return std::ranges::count(saved.manifest.tensors, name, &ManifestTensor::name);
  };
  EXPECT_TRUE(has("experts.w.0") && has("experts.w.1") && has("state.experts.w.1.step"));
  for (uint32_t rank = 0; rank < to.ranks; ++rank) expect_loaded(to, rank, saved);
}

// Every rank finds the same missing, unexpected and different tensors, including tensors of meshes that it is not in.
TEST(MeshShards, EveryRankFindsTheSameMisfits) {
  const Layout layout{"", 4, {dense(4), repeated(4, 2), experts(interleaved(4, 2), Division::named)}};
  Saved saved = save_layout(layout);
  const auto at = [&](const char *name) {
    return std::ranges::find(saved.manifest.tensors, name, &ManifestTensor::name);
  };
  at("experts.w.1")->name = "another";
  at("router")->shape = {12, 8};
  for (uint32_t rank = 0; rank < 4; ++rank) {
    const LaidPart part(layout, rank, false);
    const LoadPlan plan = plan_load(part.shards, saved.manifest, rank);
    EXPECT_EQ(plan.missing, (std::vector<std::string>{"experts.w.1"}));
    EXPECT_EQ(plan.unexpected, (std::vector<std::string>{"another"}));
    EXPECT_EQ(plan.other,
              (std::vector<std::string>{"\"router\" has shape [12, 7] here and [12, 8] in the checkpoint"}));
    EXPECT_EQ(std::ranges::count(plan.loaded, "norm"), 1);
  }
}

// The seal compares boxes of one name, but two groups may have other dtypes.
TEST(MeshShards, BoxesOfOneTensorHaveOneTypeAndShape) {
  const auto refusal = [](const memory::ParamSpec &other) {
    LaidGroup upper = experts(interleaved(2, 2)), lower = upper;
    upper.tensors = {param("w", {4, 4}, FSDP_FLOAT32, FSDP_PARAM_FROZEN)};
    lower.tensors = {other};
    const LaidPart part({"", 2, {upper, lower}}, 0, false);
    const auto error = capture_error([&] { part.shards.manifest_tensors(ShardKind::weights, 0); });
    return error ? error->message : "";
  };
  EXPECT_EQ(refusal(param("w", {4, 4}, FSDP_FLOAT16, FSDP_PARAM_FROZEN)),
            "two meshes declare \"w\" as boxes of different tensors: F32 [4,4] and F16 [4,4]");
  EXPECT_EQ(refusal(param("w", {8, 4}, FSDP_FLOAT32, FSDP_PARAM_FROZEN)),
            "two meshes declare \"w\" as boxes of different tensors: F32 [4,4] and F32 [8,4]");
}

// Each mesh has two slices. Replicas share the writing of a slice if each of them then writes at least `least` bytes.
TEST(MeshShards, ReplicasOfAMeshShareTheWritingWhereItPays) {
  LaidGroup group = experts({every(0, 1, 4), every(4, 1, 4)});
  group.replicas = 2, group.outer = layout::OuterAxis::replicate;
  group.tensors = {param("w", {64, 16}, FSDP_FLOAT32, FSDP_PARAM_FROZEN)};
  const memory::ModelSpec spec = declared_by({"", 8, {dense(8), group}}, 5);
  const memory::ModelPlan plan = plan_model(spec);
  const auto writers = [&](uint64_t least) {
    const ModelShards shards(spec, plan, false, least);
    std::vector<uint32_t> ranks;
    for (const KeptTensor &tensor : shards.tensors())
      for (uint32_t rank = 0; tensor.name == "w" && rank < 8; ++rank)
        if (shards.rows(tensor, rank).count > 0) ranks.push_back(rank);
    return ranks;
  };
  EXPECT_EQ(writers(512), (std::vector<uint32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(writers(513), (std::vector<uint32_t>{0, 1, 4, 5}));
}

// Ranks exchange rows that they have read over the model's mesh alone.
TEST(MeshShards, OtherMeshesReadAllThatTheyKeep) {
  for (const Layout &layout : layouts()) {
    const Saved saved = save_layout(layout);
    for (uint32_t rank = 0; rank < layout.ranks; ++rank) {
      const LaidPart part(layout, rank, false);
      const LoadPlan plan = plan_load(part.shards, saved.manifest, rank, {.one_replica = true});
      for (const uint32_t number : plan.shared) EXPECT_EQ(part.shards.tensors()[number].cover, 0u) << layout.name;
      std::map<uint32_t, uint64_t> taken;
      for (const LoadedFile &file : plan.files)
        for (const LoadedRows &rows : file.rows) taken[rows.tensor] += rows.box.count();
      for (uint32_t t = 0; t < part.values.size(); ++t) {
        const bool apart = part.shards.tensors()[t].cover > 0;
        EXPECT_TRUE(!apart || taken[t] == part.values[t].size()) << layout.name;
      }
    }
  }
}

// ---- other forms of numbers ----

// Makes experts with states in codes and main weights in two halves, and frozen experts that are quantized in blocks.
LaidGroup compact_experts(std::vector<std::vector<uint32_t>> meshes, fsdp_quantization quantization) {
  LaidGroup group = experts(std::move(meshes));
  group.tensors = {param("experts.w", {128, 96}, FSDP_BFLOAT16),
                   param("experts.frozen", {768, 128}, FSDP_BFLOAT16, FSDP_PARAM_FROZEN)};
  group.tensors[0].coded_states = true;
  group.tensors[1].quantization = quantization;
  group.main_storage = FSDP_MAIN_SPLIT16;
  return group;
}

TEST(MeshShards, HaveCodesAndScalesOfTheirBoxes) {
  for (const fsdp_quantization quantization : {FSDP_QUANTIZE_MXFP8 + 0, FSDP_QUANTIZE_FP8_BLOCK + 0}) {
    const Layout from{"", 4, {dense(4), compact_experts(interleaved(4, 2), quantization)}},
        to{"", 3, {dense(3), compact_experts({{0, 1, 2}}, quantization)}};
    for (const auto &[saving, loading] : {std::pair(from, to), {to, from}, {from, from}}) {
      const Saved saved = save_layout(saving);
      EXPECT_EQ(parse_manifest(write_manifest(saved.manifest), "m"), saved.manifest);
      EXPECT_TRUE(std::ranges::all_of(saved.manifest.tensors, &ManifestTensor::filled));
      for (uint32_t rank = 0; rank < loading.ranks; ++rank) expect_loaded(loading, rank, saved);
    }
    const auto names = save_layout(from).manifest.tensors;
    EXPECT_TRUE(std::ranges::count(names, "state.experts.w.exp_avg.absmax", &ManifestTensor::name));
    EXPECT_EQ(std::ranges::find(names, "experts.w", &ManifestTensor::name)->type->name, "F32");
  }
}

// A state that is stored as numbers becomes codes on each mesh, and is reported once.
TEST(MeshShards, EncodeNumbersOfTheirBoxes) {
  const Layout layout{"", 4, {compact_experts(interleaved(4, 2), FSDP_QUANTIZE_MXFP8)}};
  Saved saved = save_layout(layout);
  std::erase_if(saved.manifest.tensors, [](const ManifestTensor &tensor) { return tensor.name.ends_with(".absmax"); });
  for (ManifestTensor &tensor : saved.manifest.tensors)
    if (tensor.name.ends_with(".code"))
      tensor.name.resize(tensor.name.size() - 5), tensor.type = find_element_type("F32");
  const LaidPart part(layout, 3, false);
  const LoadPlan plan = plan_load(part.shards, saved.manifest, 3);
  EXPECT_TRUE(plan.missing.empty() && plan.unexpected.empty() && plan.other.empty());
  EXPECT_EQ(plan.encoded,
            (std::vector<std::string>{"state.experts.w.exp_avg.code", "state.experts.w.exp_avg.absmax",
                                      "state.experts.w.exp_avg_sq.code", "state.experts.w.exp_avg_sq.absmax"}));
}

// ---- files of other programs ----

TEST(MeshShards, TakeWeightsFromFilesOfOthers) {
  const auto file_of = [](std::vector<std::pair<const char *, Box>> boxes) {
    StoredFile file;
    for (auto &[name, box] : boxes) file.boxes.push_back({name, find_element_type("F32"), std::move(box)});
    return file;
  };
  const std::vector<StoredFile> files{file_of({{"a", {{0, 0}, {7, 4}}}, {"b", {{0, 0}, {5, 4}}}}),
                                      file_of({{"expert.0", {{0, 0}, {6, 4}}}, {"expert.1", {{0, 0}, {6, 4}}}})};
  LaidGroup boxes = experts(interleaved(4, 2)), named = experts(interleaved(4, 2), Division::named);
  boxes.tensors = {param("stacked", {12, 4})};
  named.tensors = {param("expert", {12, 4})};
  const Layout layout{"", 4, {boxes, named}};
  const std::vector<Rename> renames{{.theirs = "a", .ours = "stacked"},
                                    {.theirs = "b", .ours = "stacked", .to_row = 7}};
  for (uint32_t rank = 0; rank < 4; ++rank) {
    const LaidPart part(layout, rank, false);
    const LoadPlan plan = plan_weights(part.shards, files, renames, rank);
    EXPECT_TRUE(plan.missing.empty() && plan.unexpected.empty() && plan.other.empty());
    EXPECT_EQ(plan.loaded, (std::vector<std::string>{"stacked", "expert.0", "expert.1"}));
    std::map<std::string, std::vector<Box>> taken;
    for (const LoadedFile &file : plan.files)
      for (const LoadedRows &rows : file.rows) taken[rows.name].push_back(rows.box);
    const uint64_t row = rank / 2 * 3;  // in the mesh's box of 6 rows
    EXPECT_EQ(taken[rank % 2 ? "expert.1" : "expert.0"], (std::vector<Box>{{{row, 0}, {3, 4}}}));
    EXPECT_TRUE(taken[rank % 2 ? "expert.0" : "expert.1"].empty());
    std::vector<Box> from_a, from_b;
    if (rank == 0) from_a = {{{0, 0}, {3, 4}}};
    if (rank == 2) from_a = {{{3, 0}, {3, 4}}};
    if (rank == 1) from_a = {{{6, 0}, {1, 4}}}, from_b = {{{0, 0}, {2, 4}}};
    if (rank == 3) from_b = {{{2, 0}, {3, 4}}};
    EXPECT_EQ(taken["a"], from_a);
    EXPECT_EQ(taken["b"], from_b);
  }
}

// Each misfit is reported once, by name, however many meshes have the tensor.
TEST(MeshShards, EachMisfitIsListedOnce) {
  const std::vector<StoredFile> files{{{{"router", find_element_type("F32"), {{0, 0}, {12, 8}}}}}};
  const LaidPart part({"", 4, {repeated(4, 4)}}, 3, false);
  const LoadPlan plan = plan_weights(part.shards, files, {}, 3);
  EXPECT_EQ(plan.missing, (std::vector<std::string>{"norm", "router"}));
  EXPECT_EQ(
      plan.other,
      (std::vector<std::string>{"\"router\" has shape [12, 7] here; \"router\" has [12, 8], whose rows are others"}));
}

// ---- meshes that do not fit together ----

std::string refusal_of(const std::vector<std::vector<uint32_t>> &meshes) {
  memory::ModelSpec spec = declared_by({"", 4, {experts(interleaved(4, 2))}}, 0);
  for (size_t m = 0; m < meshes.size(); ++m) spec.groups[0].instances[m].ranks = meshes[m];
  const auto error = capture_error([&] { const MeshCovers made(spec); });
  return error ? error->message : "";
}

TEST(MeshCovers, AreOneForGroupsWithTheSameMeshes) {
  const LaidGroup two = experts(interleaved(4, 2)), other = experts({{0, 1}, {2, 3}});
  const memory::ModelSpec spec = declared_by({"", 4, {dense(4), two, other, two}}, 2);
  const MeshCovers covers(spec);
  EXPECT_EQ(covers.covers().size(), 3u);
  EXPECT_EQ(covers.cover_of(0), 0u);
  EXPECT_EQ(covers.cover_of(1), covers.cover_of(3));
  EXPECT_NE(covers.cover_of(1), covers.cover_of(2));
}

TEST(MeshCovers, RefuseMissingAndRepeatedRanks) {
  EXPECT_EQ(refusal_of({{0, 2}, {1, 3}}), "");
  EXPECT_EQ(refusal_of({{0, 2}, {1, 2}}), "group 'g0': rank 2 is in two of its meshes");
  EXPECT_EQ(refusal_of({{0, 2}, {1, 7}}), "group 'g0': rank 7 is in one of its meshes, but not in the model's");
  EXPECT_EQ(refusal_of({{0, 2}, {1}}), "group 'g0': rank 3 is in none of its meshes");
}

}  // namespace
}  // namespace fsdp::checkpoint
