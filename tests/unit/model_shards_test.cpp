// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/plan/model_shards.h"

#include "checkpoint/plan/load_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "base/error.h"
#include "checkpoint_models.h"

namespace fsdp::checkpoint {

using test::mesh, test::meshes, test::model, test::param;

namespace {

class ModelShardsOn : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Meshes, ModelShardsOn, testing::Range(size_t{0}, size_t{13}));

// Expects each row to be written by one rank, which has it.
void expect_each_row_once(const memory::ModelSpec &spec, const ModelShards &shards, uint32_t states) {
  EXPECT_EQ(shards.tensors().size(), 4u * (5 + states * 4));
  for (const KeptTensor &tensor : shards.tensors()) {
    const uint64_t all = tensor.shape().empty() ? 1 : tensor.shape()[0];
    const uint64_t row = tensor.plane ? tensor.param->element_count / all : 1;
    std::vector<int> written(all);
    for (uint32_t rank = 0; rank < spec.mesh().size(); ++rank) {
      const RowRange rows = shards.rows(tensor, rank);
      if (rows.count == 0) continue;
      if (tensor.plane) {
        const layout::Slice own =
            slice_of(tensor.bucket->layout, tensor.tensor, tensor.plane->owned, spec.mesh(), rank);
        EXPECT_GE(rows.first * row, own.tensor_offset);
        EXPECT_LE((rows.first + rows.count) * row, own.tensor_offset + own.count);
      }
      for (uint64_t i = 0; i < rows.count; ++i) ++written.at(rows.first + i);
    }
    EXPECT_EQ(written, std::vector<int>(all, 1)) << tensor.name;
  }
}

// Ranks that have the same rows share the writing even of few bytes.
TEST_P(ModelShardsOn, EveryRowIsWrittenOnce) {
  const memory::ModelSpec spec = model(meshes().at(GetParam()));
  const memory::ModelPlan plan = plan_model(spec);
  expect_each_row_once(spec, ModelShards(spec, plan), 2);
  const ModelShards shared(spec, plan, true, 64);
  expect_each_row_once(spec, shared, 3);  // includes the steps
  EXPECT_EQ(shared.writers(ShardKind::weights).size(), spec.mesh().size());
}

// The manifest's entry for each row matches the bytes that the rank writes.
TEST_P(ModelShardsOn, TheManifestSaysWhichRankHasWhichRows) {
  const memory::ModelSpec spec = model(meshes().at(GetParam()));
  const memory::ModelPlan plan = plan_model(spec);
  const ModelShards shards(spec, plan, true, 64);
  for (const ShardKind kind : {ShardKind::weights, ShardKind::optimizer}) {
    const std::vector<uint32_t> &writers = shards.writers(kind);
    std::map<std::string, const KeptTensor *> kept;
    for (const KeptTensor &tensor : shards.tensors())
      if (tensor.kind == kind) kept[tensor.name] = &tensor;
    const std::vector<ManifestTensor> described = shards.manifest_tensors(kind, 100);
    EXPECT_EQ(described.size(), kept.size());
    for (const ManifestTensor &tensor : described) {
      ASSERT_EQ(tensor.parts.size(), 1u);
      uint64_t row = 0;
      for (const RowCut &cut : tensor.parts[0].cuts)
        for (uint32_t file = cut.first_file; file < cut.first_file + cut.files; ++file, row += cut.rows)
          EXPECT_EQ(shards.rows(*kept.at(tensor.name), writers.at(file - 100)), (RowRange{row, cut.rows}))
              << tensor.name;
      EXPECT_EQ(row, tensor.parts[0].rows());
    }
    for (uint32_t rank = 0; rank < spec.mesh().size(); ++rank)
      EXPECT_EQ(shards.written_by(rank, kind).empty(), std::ranges::find(writers, rank) == writers.end());
  }
}

TEST(ModelShards, AreNamedAsPyTorchNamesThem) {
  const memory::ModelSpec spec = model(layout::one_axis(2));
  const memory::ModelPlan plan = plan_model(spec);
  const ModelShards shards(spec, plan);
  std::map<std::string, std::string> types;
  for (const KeptTensor &tensor : shards.tensors()) types[tensor.name] = tensor.type->name;
  EXPECT_EQ(types.at("g4.half"), "F32");  // main weights
  EXPECT_EQ(types.at("g4.frozen"), "F16");
  EXPECT_EQ(types.at("state.g4.half.exp_avg"), "F32");
  EXPECT_EQ(types.at("state.g4.half.exp_avg_sq"), "BF16");
  EXPECT_FALSE(types.contains("state.g4.frozen.exp_avg"));
  EXPECT_FALSE(types.contains("state.g4.half.step"));
  const ModelShards counted(spec, plan, true);
  const auto step = std::ranges::find(counted.tensors(), "state.g4.half.step", &KeptTensor::name);
  ASSERT_NE(step, counted.tensors().end());
  EXPECT_EQ(step->type->name, "F64");
  EXPECT_TRUE(step->shape().empty());
  EXPECT_EQ(std::ranges::find(counted.tensors(), "state.g4.frozen.step", &KeptTensor::name), counted.tensors().end());
  EXPECT_EQ(ModelShards::boxes_of(shards.tensors()[0], {3, 5}), (std::vector<Box>{{{3, 0}, {5, 24}}}));
}

uint64_t bytes_of(const ModelShards &shards, uint32_t rank) {
  uint64_t bytes = 0;
  for (const KeptTensor &tensor : shards.tensors()) {
    const RowRange rows = shards.rows(tensor, rank);
    bytes += *stored_bytes(*tensor.type, rows.count * tensor.row_size());
  }
  return bytes;
}

// There are two replicas of two ranks. The first replica writes small slices, and both write large ones.
TEST(ModelShards, AreSharedByReplicasWhereItPays) {
  const layout::Mesh two = mesh(2, 2, layout::OuterAxis::replicate);
  memory::ModelSpec spec = model(two, 100'000);
  spec.groups.erase(spec.groups.begin(), spec.groups.begin() + 3);  // leaves only the ZeRO-3 group
  const memory::ModelPlan small = plan_model(spec);
  const ModelShards by_one(spec, small);
  EXPECT_EQ(by_one.writers(ShardKind::weights), (std::vector<uint32_t>{0, 1}));
  spec.groups[0].params[0] = param("large", {1'000'000, 24});  // 240 MB including its states
  const memory::ModelPlan large = plan_model(spec);
  const ModelShards by_both(spec, large);
  EXPECT_EQ(by_both.writers(ShardKind::weights), (std::vector<uint32_t>{0, 2, 1, 3}));
  uint64_t least = UINT64_MAX, most = 0;
  for (uint32_t rank = 0; rank < 4; ++rank) {
    least = std::min(least, bytes_of(by_both, rank));
    most = std::max(most, bytes_of(by_both, rank));
  }
  EXPECT_LT(most - least, most / 20);  // slices end with padding
  EXPECT_GE(least, least_share);
}

// ---- loading ----

Manifest manifest_of(const ModelShards &shards) {
  Manifest manifest;
  manifest.tensors = shards.manifest_tensors(ShardKind::weights, 0);
  const auto files = static_cast<uint32_t>(shards.writers(ShardKind::weights).size());
  for (ManifestTensor &tensor : shards.manifest_tensors(ShardKind::optimizer, files))
    manifest.tensors.push_back(tensor);
  return manifest;
}

// A model that was saved on one mesh is loaded on every other. Each row that a rank keeps comes from one file, and that
// file's rank wrote it.
TEST_P(ModelShardsOn, AreLoadedOnEveryMesh) {
  const memory::ModelSpec from = model(meshes().at(GetParam()));
  const memory::ModelPlan from_plan = plan_model(from);
  const ModelShards saved(from, from_plan, true, 64);
  const Manifest manifest = manifest_of(saved);
  const auto weights = static_cast<uint32_t>(saved.writers(ShardKind::weights).size());
  const auto written = [&](uint32_t file, const KeptTensor &tensor) {
    const uint32_t rank = file < weights ? saved.writers(ShardKind::weights)[file]
                                         : saved.writers(ShardKind::optimizer).at(file - weights);
    return saved.rows(tensor, rank);
  };
  for (const layout::Mesh &mesh : meshes()) {
    const memory::ModelSpec to = model(mesh);
    const memory::ModelPlan to_plan = plan_model(to);
    const ModelShards loaded(to, to_plan, true);
    for (uint32_t rank = 0; rank < mesh.size(); ++rank) {
      const LoadPlan plan = plan_load(loaded, manifest, rank);
      EXPECT_TRUE(plan.missing.empty() && plan.unexpected.empty() && plan.other.empty());
      std::map<uint32_t, std::vector<RowRange>> rows;  // by tensor
      for (const LoadedFile &file : plan.files)
        for (const LoadedRows &some : file.rows) {
          const RowRange got =
              some.box.shape.empty() ? RowRange{0, 1} : RowRange{some.box.offset[0], some.box.shape[0]};
          const RowRange has = written(file.file, saved.tensors()[some.tensor]);
          EXPECT_TRUE(got.first >= has.first && got.first + got.count <= has.first + has.count);
          rows[some.tensor].push_back(got);
        }
      for (uint32_t t = 0; t < loaded.tensors().size(); ++t) {
        const RowRange kept = loaded.kept_rows(loaded.tensors()[t], rank);
        std::ranges::sort(rows[t], {}, &RowRange::first);
        uint64_t next = kept.first;
        for (const RowRange &some : rows[t]) {
          EXPECT_EQ(some.first, next);
          next += some.count;
        }
        EXPECT_EQ(next, kept.count ? kept.first + kept.count : kept.first) << loaded.tensors()[t].name;
      }
    }
  }
}

TEST(LoadPlan, TellsAllThatDoesNotFit) {
  const memory::ModelSpec spec = model(layout::one_axis(2));
  const memory::ModelPlan plan = plan_model(spec);
  const ModelShards shards(spec, plan);
  Manifest manifest = manifest_of(shards);
  const auto at = [&](const std::string &name) {
    return std::ranges::find(manifest.tensors, name, &ManifestTensor::name);
  };
  at("g1.w")->name = "another";
  at("state.g2.b.exp_avg")->name = "state.another";
  at("g3.w")->shape = {37, 25};
  at("g4.b")->type = find_element_type("I32");
  at("g4.w")->type = find_element_type("F64");  // it is converted
  const LoadPlan all = plan_load(shards, manifest, 0);
  EXPECT_EQ(all.missing, (std::vector<std::string>{"g1.w", "state.g2.b.exp_avg"}));
  EXPECT_EQ(all.unexpected, (std::vector<std::string>{"another", "state.another"}));
  EXPECT_EQ(all.other,
            (std::vector<std::string>{"\"g3.w\" has shape [37, 24] here and [37, 25] in the checkpoint",
                                      "\"g4.b\" is of F32 here and of I32 in the checkpoint, which is not converted"}));
  const LoadPlan weights = plan_load(shards, manifest, 1, {.states = false});
  EXPECT_EQ(weights.missing, (std::vector<std::string>{"g1.w"}));
  EXPECT_EQ(weights.unexpected, (std::vector<std::string>{"another"}));
  for (const LoadedFile &file : weights.files)
    for (const LoadedRows &rows : file.rows) EXPECT_EQ(shards.tensors()[rows.tensor].kind, ShardKind::weights);
}

// A plane of codes without its scales is no weights. A file that has neither leaves the parameter as it was.
TEST(LoadPlan, TakesAllPlanesOfAFrozenParameterOrNone) {
  memory::ModelSpec spec;
  spec.mesh() = layout::one_axis(1);
  spec.groups.resize(1);
  for (const char *name : {"a", "b"}) {
    spec.groups[0].params.push_back(param(name, {32, 32}, FSDP_FLOAT32, FSDP_PARAM_FROZEN));
    spec.groups[0].params.back().quantization = FSDP_QUANTIZE_MXFP8;
  }
  const memory::ModelPlan plan = plan_model(spec);
  const ModelShards shards(spec, plan);
  const auto differs = [&](const std::vector<std::string_view> &there) {
    Manifest manifest = manifest_of(shards);
    std::erase_if(manifest.tensors, [&](const auto &tensor) { return !std::ranges::count(there, tensor.name); });
    return plan_load(shards, manifest, 0).other;
  };
  EXPECT_TRUE(differs({}).empty());
  EXPECT_TRUE(differs({"b.row", "b.row_scale", "b.column", "b.column_scale"}).empty());
  EXPECT_EQ(differs({"a.row", "a.row_scale", "a.column", "a.column_scale", "b.row", "b.row_scale"}),
            (std::vector<std::string>{"the planes of \"b\" are loaded together or not at all: \"b.row\", "
                                      "\"b.row_scale\" there, \"b.column\", \"b.column_scale\" missing"}));
}

// The codes of a state mean nothing without their scales. A state that is stored as numbers is encoded.
TEST(LoadPlan, TakesCodesWithTheirScalesOrNumbers) {
  memory::ModelSpec spec;
  spec.mesh() = layout::one_axis(2);
  spec.states = {{"exp_avg", FSDP_FLOAT32}, {"exp_avg_sq", FSDP_FLOAT32}};
  spec.groups.resize(1);
  spec.groups[0].params = {param("w", {64, 96}, FSDP_BFLOAT16)};
  spec.groups[0].params[0].coded_states = true;
  const memory::ModelPlan plan = plan_model(spec);
  const ModelShards shards(spec, plan);
  const Manifest whole = manifest_of(shards);
  const auto at = [](Manifest &manifest, const std::string &name) {
    return std::ranges::find(manifest.tensors, name, &ManifestTensor::name);
  };
  Manifest lacking = whole;
  lacking.tensors.erase(at(lacking, "state.w.exp_avg.absmax"));
  EXPECT_EQ(plan_load(shards, lacking, 0).other,
            (std::vector<std::string>{"the planes of \"state.w.exp_avg\" are loaded together or not at all: "
                                      "\"state.w.exp_avg.code\" there, \"state.w.exp_avg.absmax\" missing"}));
  Manifest numbers = lacking;
  at(numbers, "state.w.exp_avg.code")->type = find_element_type("F32");
  at(numbers, "state.w.exp_avg.code")->name = "state.w.exp_avg";
  const LoadPlan encodes = plan_load(shards, numbers, 0);
  EXPECT_TRUE(encodes.other.empty() && encodes.missing.empty() && encodes.unexpected.empty());
  EXPECT_EQ(encodes.encoded, (std::vector<std::string>{"state.w.exp_avg.code", "state.w.exp_avg.absmax"}));
  at(numbers, "state.w.exp_avg")->type = find_element_type("I32");
  EXPECT_EQ(plan_load(shards, numbers, 0).other.size(), 1);
}

// Some boxes of a tensor may have saved codes and others numbers, if the blocks of the others are no blocks of the
// whole tensor.
TEST(LoadPlan, TakesTheFormOfAStateThatHasAllOfABox) {
  constexpr uint64_t rows = 64, columns = 96, half = rows / 2;
  const auto model_of = [](std::optional<uint64_t> first, bool coded) {
    memory::ModelSpec spec;
    spec.mesh() = layout::one_axis(2);
    spec.states = {{"exp_avg", FSDP_FLOAT32}, {"exp_avg_sq", FSDP_FLOAT32}};
    spec.groups.resize(1);
    memory::ParamSpec w = param("w", {first ? half : rows, columns}, FSDP_BFLOAT16);
    w.coded_states = coded;
    if (first) w.global_shape = {rows, columns}, w.global_offset = {*first, 0};
    spec.groups[0].params = {std::move(w)};
    return spec;
  };
  const auto plan_of = [](const memory::ModelSpec &spec, const Manifest &manifest) {
    const memory::ModelPlan plan = plan_model(spec);
    return plan_load(ModelShards(spec, plan), manifest, 0);
  };
  const memory::ModelSpec upper = model_of(0, true), lower = model_of(half, false);
  const memory::ModelPlan upper_plan = plan_model(upper), lower_plan = plan_model(lower);
  Manifest both = manifest_of(ModelShards(upper, upper_plan));
  for (const ManifestTensor &tensor : manifest_of(ModelShards(lower, lower_plan)).tensors) {
    const auto known = std::ranges::find(both.tensors, tensor.name, &ManifestTensor::name);
    if (known == both.tensors.end())
      both.tensors.push_back(tensor);
    else if (tensor.shape.size() > 1)
      known->parts.push_back(tensor.parts.front());
  }
  for (const memory::ModelSpec &spec : {upper, lower, model_of(half, true)}) {
    const LoadPlan load = plan_of(spec, both);
    EXPECT_TRUE(load.other.empty() && load.missing.empty() && load.unexpected.empty()) << load.other.size();
  }
  EXPECT_EQ(plan_of(model_of(half, true), both).encoded.size(), 4u);
  EXPECT_EQ(plan_of(upper, both).encoded.size(), 0u);
  EXPECT_FALSE(plan_of(model_of({}, true), both).other.empty()) << "neither form has all of the tensor";
  const LoadPlan as_numbers = plan_of(model_of(0, false), both);
  ASSERT_EQ(as_numbers.other.size(), 2u);
  EXPECT_NE(as_numbers.other[0].find("FSDP_LOAD_WEIGHTS_ONLY"), std::string::npos) << as_numbers.other[0];
}

// Ranks have cut each part of tensor parallelism by rows, and one rank reads rows of both parts.
TEST(LoadPlan, TakesRowsFromAllPartsOfATensor) {
  memory::ModelSpec spec;
  spec.mesh() = layout::one_axis(1);
  spec.groups.resize(1);
  spec.groups[0].params = {param("w", {8, 6}, FSDP_FLOAT32, FSDP_PARAM_FROZEN)};
  const memory::ModelPlan plan = plan_model(spec);
  Manifest manifest;
  manifest.tensors = {{"w",
                       find_element_type("F32"),
                       {8, 6},
                       {{{{0, 0}, {8, 2}}, {{0, 2, 4}}}, {{{0, 2}, {8, 4}}, {{2, 1, 5}, {3, 1, 3}}}}}};
  const LoadPlan load = plan_load(ModelShards(spec, plan), manifest, 0);
  std::vector<Box> boxes;
  for (const LoadedFile &file : load.files)
    for (const LoadedRows &rows : file.rows) boxes.push_back(rows.box);
  EXPECT_EQ(boxes, (std::vector<Box>{{{0, 0}, {4, 2}}, {{4, 0}, {4, 2}}, {{0, 2}, {5, 4}}, {{5, 2}, {3, 4}}}));
}

// Makes a model of one tensor of [8, 6], or of a box of it, on this many ranks.
memory::ModelSpec boxed(uint32_t ranks, const Box &box) {
  memory::ModelSpec spec;
  spec.mesh() = layout::one_axis(ranks);
  spec.states = {{"exp_avg", FSDP_FLOAT32}};
  spec.groups.resize(1);
  spec.groups[0].params = {param("w", box.shape)};
  spec.groups[0].params[0].global_shape = {8, 6};
  spec.groups[0].params[0].global_offset = box.offset;
  return spec;
}

const std::vector<Box> cuts_of_8_by_6[] = {{{{0, 0}, {8, 6}}},
                                           {{{0, 0}, {8, 2}}, {{0, 2}, {8, 4}}},
                                           {{{0, 0}, {3, 6}}, {{3, 0}, {5, 6}}},
                                           {{{0, 0}, {5, 3}}, {{0, 3}, {5, 3}}, {{5, 0}, {3, 4}}, {{5, 4}, {3, 2}}}};

// Whatever boxes models have saved, each element of a box comes from the file that has it.
TEST(LoadPlan, TakesABoxFromBoxes) {
  for (const auto &saved : cuts_of_8_by_6)
    for (const auto &loaded : cuts_of_8_by_6)
      for (const Box &wanted : loaded) {
        Manifest manifest;
        std::vector<Box> files;  // each model's part of w
        for (const Box &box : saved) {
          const memory::ModelSpec spec = boxed(2, box);
          const memory::ModelPlan plan = plan_model(spec);
          const ModelShards shards(spec, plan);
          auto tensors = shards.manifest_tensors(ShardKind::weights, static_cast<uint32_t>(files.size()));
          EXPECT_EQ(tensors[0].shape, (std::vector<uint64_t>{8, 6}));
          EXPECT_EQ(tensors[0].parts[0].box, box);
          if (manifest.tensors.empty())
            manifest.tensors = tensors;
          else
            manifest.tensors[0].parts.push_back(tensors[0].parts[0]);
          for (const uint32_t writer : shards.writers(ShardKind::weights))
            files.push_back(shards.written_by(writer, ShardKind::weights)[0].box);
        }
        const memory::ModelSpec spec = boxed(3, wanted);
        const memory::ModelPlan plan = plan_model(spec);
        const ModelShards shards(spec, plan);
        uint64_t taken = 0;
        for (uint32_t rank = 0; rank < 3; ++rank) {
          const LoadPlan load = plan_load(shards, manifest, rank, {.states = false});
          EXPECT_TRUE(load.missing.empty() && load.unexpected.empty() && load.other.empty());
          const KeptTensor &own = shards.tensors()[0];
          for (const LoadedFile &file : load.files)
            for (const LoadedRows &rows : file.rows) {
              EXPECT_EQ(ModelShards::boxes_of(own, shards.kept_rows(own, rank)), (std::vector<Box>{rows.kept}));
              EXPECT_EQ(intersect(rows.box, rows.kept), rows.box);
              EXPECT_EQ(intersect(rows.box, files.at(file.file)), rows.box);
              taken += rows.box.count();
            }
        }
        EXPECT_EQ(taken, wanted.count());
      }
}

// A tensor that other ranks have but did not save is reported missing on the ranks that want it, and only there.
TEST(LoadPlan, TellsWhatABoxLacks) {
  const auto plan_of = [](const Box &saved, const Box &wanted) {
    const memory::ModelSpec from = boxed(2, saved), to = boxed(2, wanted);
    const memory::ModelPlan from_plan = plan_model(from), to_plan = plan_model(to);
    return plan_load(ModelShards(to, to_plan), manifest_of(ModelShards(from, from_plan)), 0);
  };
  EXPECT_TRUE(plan_of({{0, 0}, {8, 4}}, {{1, 1}, {7, 3}}).other.empty());
  const LoadPlan lacking = plan_of({{0, 0}, {8, 4}}, {{0, 2}, {8, 4}});
  EXPECT_EQ(lacking.other,
            (std::vector<std::string>{
                "\"w\" has [8, 4] from [0, 2] on here, and of these 32 elements the checkpoint has 16",
                "\"state.w.exp_avg\" has [8, 4] from [0, 2] on here, and of these 32 elements the checkpoint has 16"}));
}

}  // namespace
}  // namespace fsdp::checkpoint
