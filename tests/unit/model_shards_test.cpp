// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/plan/model_shards.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "base/error.h"

namespace fsdp::checkpoint {
namespace {

memory::ParamSpec param(const std::string &name, std::vector<uint64_t> shape, fsdp_dtype dtype = FSDP_FLOAT32,
                        uint32_t flags = 0) {
  memory::ParamSpec spec;
  spec.name = name;
  spec.shape = std::move(shape);
  for (const uint64_t size : spec.shape) spec.element_count *= size;
  spec.dtype = dtype;
  spec.flags = flags;
  return spec;
}

layout::Mesh mesh(uint32_t inner, uint32_t outer, layout::OuterAxis axis) {
  layout::Mesh mesh = layout::one_axis(inner * outer);
  mesh.inner_size = inner;
  mesh.outer_size = outer;
  mesh.outer = outer > 1 ? axis : layout::OuterAxis::none;
  mesh.replicate_size = mesh.outer == layout::OuterAxis::shard ? 1 : outer;
  mesh.shard_size = inner * outer / mesh.replicate_size;
  return mesh;
}

// A group of each strategy, with dtypes, frozen parameters, scalars and tensors that ranks do not cut evenly.
memory::ModelSpec model(const layout::Mesh &mesh, uint64_t rows = 37) {
  memory::ModelSpec spec;
  spec.mesh = mesh;
  spec.states = {{"exp_avg", FSDP_FLOAT32}, {"exp_avg_sq", FSDP_BFLOAT16}};
  for (const fsdp_strategy strategy :
       {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}) {
    memory::GroupSpec group;
    group.name = "g" + std::to_string(strategy);
    group.strategy = strategy;
    group.params = {param(group.name + ".w", {rows, 24}), param(group.name + ".half", {51, 3, 2}, FSDP_BFLOAT16),
                    param(group.name + ".scalar", {}),
                    param(group.name + ".frozen", {rows, 8}, FSDP_FLOAT16, FSDP_PARAM_FROZEN),
                    param(group.name + ".b", {24})};
    spec.groups.push_back(group);
  }
  return spec;
}

std::vector<layout::Mesh> meshes() {
  using enum layout::OuterAxis;
  std::vector<layout::Mesh> all;
  for (const uint32_t ranks : {1, 2, 3, 8}) all.push_back(mesh(ranks, 1, none));
  for (const auto axis : {replicate, optim, shard})
    for (const auto &[inner, outer] : {std::pair{1, 2}, {3, 2}, {2, 4}}) all.push_back(mesh(inner, outer, axis));
  return all;
}

class ModelShardsOn : public testing::TestWithParam<size_t> {};
INSTANTIATE_TEST_SUITE_P(Meshes, ModelShardsOn, testing::Range(size_t{0}, size_t{13}));

// Each row by one rank, which has it.
TEST_P(ModelShardsOn, EveryRowIsWrittenOnce) {
  const memory::ModelSpec spec = model(meshes().at(GetParam()));
  const memory::ModelPlan plan = plan_model(spec);
  const ModelShards shards(spec, plan);
  EXPECT_EQ(shards.tensors().size(), 4u * (5 + 2 * 4));
  for (const KeptTensor &tensor : shards.tensors()) {
    const uint64_t all = tensor.param->shape.empty() ? 1 : tensor.param->shape[0];
    const uint64_t row = tensor.param->element_count / all;
    std::vector<int> written(all);
    for (uint32_t rank = 0; rank < spec.mesh.size(); ++rank) {
      const RowRange rows = shards.rows(tensor, rank);
      if (rows.count == 0) continue;
      const layout::Slice own = slice_of(tensor.bucket->layout, tensor.tensor, tensor.plane->owned, spec.mesh, rank);
      EXPECT_GE(rows.first * row, own.tensor_offset);
      EXPECT_LE((rows.first + rows.count) * row, own.tensor_offset + own.count);
      for (uint64_t i = 0; i < rows.count; ++i) ++written.at(rows.first + i);
    }
    EXPECT_EQ(written, std::vector<int>(all, 1)) << tensor.name;
  }
}

// What the manifest says of each row is what its rank writes.
TEST_P(ModelShardsOn, TheManifestSaysWhoHasWhichRows) {
  const memory::ModelSpec spec = model(meshes().at(GetParam()));
  const memory::ModelPlan plan = plan_model(spec);
  const ModelShards shards(spec, plan);
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
    for (uint32_t rank = 0; rank < spec.mesh.size(); ++rank)
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
  EXPECT_EQ(ModelShards::box_of(shards.tensors()[0], {3, 5}), (Box{{3, 0}, {5, 24}}));
}

uint64_t bytes_of(const ModelShards &shards, uint32_t rank) {
  uint64_t bytes = 0;
  for (const KeptTensor &tensor : shards.tensors()) {
    const RowRange rows = shards.rows(tensor, rank);
    if (rows.count) bytes += *stored_bytes(*tensor.type, ModelShards::box_of(tensor, rows).count());
  }
  return bytes;
}

// Two replicas of two ranks: small slices are written by the first replica, large ones by both.
TEST(ModelShards, AreSharedByReplicasWhereItPays) {
  const layout::Mesh two = mesh(2, 2, layout::OuterAxis::replicate);
  memory::ModelSpec spec = model(two, 100'000);
  spec.groups.erase(spec.groups.begin(), spec.groups.begin() + 3);  // ZeRO-3 alone
  const memory::ModelPlan small = plan_model(spec);
  const ModelShards by_one(spec, small);
  EXPECT_EQ(by_one.writers(ShardKind::weights), (std::vector<uint32_t>{0, 1}));
  spec.groups[0].params[0] = param("large", {1'000'000, 24});  // 240 MB with its states
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

}  // namespace
}  // namespace fsdp::checkpoint
