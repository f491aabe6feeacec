// SPDX-License-Identifier: Apache-2.0
// Models and meshes to save and load: a group of each strategy, and every arrangement of a few ranks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/format/box.h"
#include "memory/model_plan.h"

namespace fsdp::checkpoint::test {

inline memory::ParamSpec param(const std::string &name, std::vector<uint64_t> shape, fsdp_dtype dtype = FSDP_FLOAT32,
                               uint32_t flags = 0) {
  memory::ParamSpec spec;
  spec.name = name;
  spec.shape = std::move(shape);
  for (const uint64_t size : spec.shape) spec.element_count *= size;
  spec.dtype = dtype;
  spec.flags = flags;
  return spec;
}

inline layout::Mesh mesh(uint32_t inner, uint32_t outer, layout::OuterAxis axis) {
  layout::Mesh mesh = layout::one_axis(inner * outer);
  mesh.inner_size = inner;
  mesh.outer_size = outer;
  mesh.outer = outer > 1 ? axis : layout::OuterAxis::none;
  mesh.replicate_size = mesh.outer == layout::OuterAxis::shard ? 1 : outer;
  mesh.shard_size = inner * outer / mesh.replicate_size;
  return mesh;
}

// Makes a group of each strategy, with dtypes, frozen parameters, scalars and tensors that ranks cut unevenly.
inline memory::ModelSpec model(const layout::Mesh &mesh, uint64_t rows = 37) {
  memory::ModelSpec spec;
  spec.mesh() = mesh;
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

// Makes the same with a stack that ranks divide inside its matrices, so that a rank has several files of a kind.
inline memory::ModelSpec stacked(const layout::Mesh &mesh) {
  memory::ModelSpec spec = model(mesh);
  for (memory::GroupSpec &group : spec.groups) group.params[1].row_dimensions = 2;
  return spec;
}

inline std::vector<layout::Mesh> meshes() {
  using enum layout::OuterAxis;
  std::vector<layout::Mesh> all;
  for (const uint32_t ranks : {1, 2, 3, 8}) all.push_back(mesh(ranks, 1, none));
  for (const auto axis : {replicate, optim, shard})
    for (const auto &[inner, outer] : {std::pair{1, 2}, {3, 2}, {2, 4}}) all.push_back(mesh(inner, outer, axis));
  return all;
}

// Calls visit(index in the whole tensor, index in the box) for each element of a box, both counted in C order.
template <class Visit>
void for_each_element(const Box &box, std::span<const uint64_t> shape, Visit visit) {
  std::vector<uint64_t> at(shape.size());
  for (uint64_t i = 0; i < box.count(); ++i) {
    uint64_t left = i, index = 0;
    for (size_t d = shape.size(); d-- > 0; left /= box.shape[d]) at[d] = box.offset[d] + left % box.shape[d];
    for (size_t d = 0; d < shape.size(); ++d) index = index * shape[d] + at[d];
    visit(index, i);
  }
}

}  // namespace fsdp::checkpoint::test
