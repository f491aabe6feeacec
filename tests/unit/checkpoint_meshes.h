// SPDX-License-Identifier: Apache-2.0
// Models with groups that have meshes of their own. One model has many layouts, and each of its ranks declares its
// part.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint_models.h"

namespace fsdp::checkpoint::test {

// Tells how meshes divide a group's tensors. rows, columns: mesh m has part m. equal: each mesh has the whole tensor as
// the same box. named: mesh m's rows are a parameter with its own name.
enum class Division { none, rows, columns, equal, named };

// Describes a group of a layout: the ranks of each mesh, and each mesh's part of the group's tensors.
struct LaidGroup {
  std::vector<memory::ParamSpec> tensors;  // whole tensors
  std::vector<std::vector<uint32_t>> meshes;
  Division division = Division::none;
  uint32_t replicas = 1;
  layout::OuterAxis outer = layout::OuterAxis::none;
  fsdp_main_storage main_storage = FSDP_MAIN_FLOAT32;
  fsdp_strategy strategy = FSDP_STRATEGY_OPTIM_GRADS_PARAMS;
};

struct Layout {
  std::string name;
  uint32_t ranks = 1;
  std::vector<LaidGroup> groups;
};

inline void resize(memory::ParamSpec &param, std::vector<uint64_t> shape) {
  param.shape = std::move(shape);
  param.element_count = 1;
  for (const uint64_t size : param.shape) param.element_count *= size;
}

// Returns the ranks' declaration of a tensor on one mesh of the group.
inline memory::ParamSpec part_of(const memory::ParamSpec &tensor, const LaidGroup &group, size_t mesh) {
  memory::ParamSpec part = tensor;
  if (group.division == Division::none) return part;
  std::vector<uint64_t> shape = tensor.shape, offset(shape.size());
  const size_t axis = group.division == Division::columns ? shape.size() - 1 : 0;
  if (group.division != Division::equal) {
    shape[axis] /= group.meshes.size();
    offset[axis] = mesh * shape[axis];
  }
  resize(part, shape);
  if (group.division == Division::named)
    part.name += "." + std::to_string(mesh);
  else
    part.global_shape = tensor.shape, part.global_offset = offset;
  return part;
}

inline memory::GroupInstance instance_of(const LaidGroup &group, size_t mesh) {
  memory::GroupInstance instance{group.meshes[mesh], {}};
  for (const memory::ParamSpec &tensor : group.tensors) {
    const memory::ParamSpec part = part_of(tensor, group, mesh);
    instance.params.push_back({part.name, part.global_shape, part.global_offset});
  }
  return instance;
}

// Holds a rank's declaration, and its knowledge of other ranks after the seal.
inline memory::ModelSpec declared_by(const Layout &layout, uint32_t rank) {
  memory::ModelSpec spec;
  spec.mesh() = mesh(layout.ranks, 1, layout::OuterAxis::none);
  spec.states = {{"exp_avg", FSDP_FLOAT32}, {"exp_avg_sq", FSDP_BFLOAT16}};
  for (const LaidGroup &laid : layout.groups) {
    const auto has = [&](const auto &ranks) { return std::ranges::find(ranks, rank) != ranks.end(); };
    const auto own = static_cast<size_t>(std::ranges::find_if(laid.meshes, has) - laid.meshes.begin());
    memory::GroupSpec group;
    group.name = "g" + std::to_string(spec.groups.size());
    group.strategy = laid.strategy;
    group.main_storage = laid.main_storage;
    for (const memory::ParamSpec &tensor : laid.tensors) group.params.push_back(part_of(tensor, laid, own));
    const auto size = static_cast<uint32_t>(laid.meshes[own].size());
    layout::Mesh shared = mesh(size / laid.replicas, laid.replicas, laid.outer);
    shared.ranks = laid.meshes[own];
    const auto known = std::ranges::find(spec.meshes, shared);
    group.mesh = static_cast<uint32_t>(known - spec.meshes.begin());
    if (known == spec.meshes.end()) spec.meshes.push_back(shared);
    for (size_t m = 0; group.mesh && m < laid.meshes.size(); ++m) group.instances.push_back(instance_of(laid, m));
    spec.groups.push_back(std::move(group));
  }
  return spec;
}

// Returns ranks from `first` on at a distance of `step`.
inline std::vector<uint32_t> every(uint32_t first, uint32_t step, uint32_t count) {
  std::vector<uint32_t> ranks;
  for (uint32_t i = 0; i < count; ++i) ranks.push_back(first + i * step);
  return ranks;
}
// Returns the meshes {0, n, 2 n, ...}, {1, n + 1, ...} and so on.
inline std::vector<std::vector<uint32_t>> interleaved(uint32_t ranks, uint32_t meshes) {
  std::vector<std::vector<uint32_t>> all;
  for (uint32_t m = 0; m < meshes; ++m) all.push_back(every(m, meshes, ranks / meshes));
  return all;
}

// Lists the tensors of the model: dense ones, tensors that tensor-parallel ranks divide or repeat, and experts.
inline std::vector<memory::ParamSpec> dense_tensors() {
  return {param("dense.w", {10, 4}), param("dense.scalar", {}), param("dense.half", {51, 3}, FSDP_BFLOAT16)};
}
inline std::vector<memory::ParamSpec> repeated_tensors() { return {param("norm", {12}), param("router", {12, 7})}; }
inline std::vector<memory::ParamSpec> expert_tensors() {
  std::vector<memory::ParamSpec> tensors = {param("experts.w", {12, 4}), param("experts.stack", {12, 7, 4}),
                                            param("experts.half", {24, 6}, FSDP_BFLOAT16),
                                            param("experts.frozen", {12, 8}, FSDP_FLOAT16, FSDP_PARAM_FROZEN)};
  tensors[1].row_dimensions = 2;  // ranks cut inside its matrices
  return tensors;
}

inline LaidGroup dense(uint32_t ranks) { return {dense_tensors(), {every(0, 1, ranks)}}; }
inline LaidGroup repeated(uint32_t ranks, uint32_t meshes) {
  return {repeated_tensors(), interleaved(ranks, meshes), meshes > 1 ? Division::equal : Division::none};
}
inline LaidGroup experts(std::vector<std::vector<uint32_t>> meshes, Division division = Division::rows) {
  if (meshes.size() == 1) division = Division::none;
  return {expert_tensors(), std::move(meshes), division};
}

inline std::vector<Layout> layouts() {
  using enum layout::OuterAxis;
  LaidGroup hsdp = experts({every(0, 1, 4), every(4, 1, 4)}), hfsdp = hsdp, backwards = experts({{2, 0}, {3, 1}});
  LaidGroup unsharded = experts(interleaved(4, 2));
  unsharded.strategy = FSDP_STRATEGY_NO_SHARD;
  hsdp.replicas = hfsdp.replicas = 2;
  hsdp.outer = replicate, hfsdp.outer = optim;
  hfsdp.strategy = FSDP_STRATEGY_OPTIM;
  return {
      {"one rank", 1, {dense(1), repeated(1, 1), experts({{0}})}},
      {"one mesh", 3, {dense(3), repeated(3, 1), experts({{0, 1, 2}})}},
      {"experts on every second rank", 4, {dense(4), repeated(4, 1), experts(interleaved(4, 2))}},
      {"ranks in another order", 4, {dense(4), repeated(4, 1), backwards}},
      {"experts that are not sharded", 4, {dense(4), repeated(4, 1), unsharded}},
      {"three meshes", 6, {dense(6), repeated(6, 1), experts(interleaved(6, 3))}},
      {"meshes of one rank", 4, {dense(4), repeated(4, 4), experts(interleaved(4, 4))}},
      {"tensor-parallel 2", 4, {dense(4), repeated(4, 2), experts(interleaved(4, 2), Division::columns)}},
      {"tensor-parallel 4 and two meshes", 8, {dense(8), repeated(8, 4), experts(interleaved(8, 2))}},
      {"tensor-parallel copies of experts", 4, {dense(4), repeated(4, 2), experts({{0, 2}, {1, 3}}, Division::equal)}},
      {"replicas", 8, {dense(8), repeated(8, 1), hsdp}},
      {"replicas that divide states", 8, {dense(8), repeated(8, 2), hfsdp}},
  };
}

}  // namespace fsdp::checkpoint::test
