// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/plan/mesh_covers.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/error.h"

namespace fsdp::checkpoint {
namespace {

using Params = std::shared_ptr<const std::vector<memory::ParamSpec>>;

// Maps a rank of the job to its number in the model's mesh.
using RankNumbers = std::unordered_map<uint32_t, uint32_t>;

RankNumbers number_ranks(const layout::Mesh &model_mesh) {
  RankNumbers numbers;
  for (uint32_t rank = 0; rank < model_mesh.ranks.size(); ++rank) numbers[model_mesh.ranks[rank]] = rank;
  return numbers;
}

MeshCover cover_of_one(const layout::Mesh &mesh) {
  MeshCover cover{{mesh}, {}, {{}}};
  for (uint32_t rank = 0; rank < mesh.size(); ++rank) {
    cover.of_model[0].push_back(rank);
    cover.places.push_back({0, rank});
  }
  return cover;
}

// Adds the mesh to the cover. A rank without a mesh still has a mesh number that is too large.
void add_mesh(MeshCover &cover, layout::Mesh mesh, const RankNumbers &numbers, const std::string &group) {
  const auto number = static_cast<uint32_t>(cover.meshes.size());
  std::vector<uint32_t> &model_ranks = cover.of_model.emplace_back();
  for (uint32_t rank = 0; rank < mesh.ranks.size(); ++rank) {
    const auto found = numbers.find(mesh.ranks[rank]);
    if (found == numbers.end() || cover.places[found->second].mesh != UINT32_MAX)
      fail(FSDP_MISMATCH, "group '{}': rank {} is {}", group, mesh.ranks[rank],
           found == numbers.end() ? "in one of its meshes, but not in the model's" : "in two of its meshes");
    cover.places[found->second] = {number, rank};
    model_ranks.push_back(found->second);
  }
  cover.meshes.push_back(std::move(mesh));
}

MeshCover cover_of_group(const memory::ModelSpec &spec, const memory::GroupSpec &group, const RankNumbers &numbers) {
  MeshCover cover;
  cover.places.assign(spec.mesh().size(), {UINT32_MAX, 0});
  for (const memory::GroupInstance &instance : group.instances) {
    layout::Mesh mesh = spec.mesh_of(group);
    mesh.ranks = instance.ranks;
    add_mesh(cover, std::move(mesh), numbers, group.name);
  }
  const auto lacking = std::ranges::find(cover.places, UINT32_MAX, &MeshPlace::mesh);
  if (lacking != cover.places.end())
    fail(FSDP_MISMATCH, "group '{}': rank {} is in none of its meshes", group.name,
         spec.mesh().ranks[static_cast<size_t>(lacking - cover.places.begin())]);
  return cover;
}

Params own_params(const memory::GroupSpec &group) {
  return {std::shared_ptr<void>(), &group.params};  // the spec owns them
}

// The parameters as declared on another mesh.
Params params_of(const memory::GroupSpec &group, const memory::GroupInstance &instance) {
  auto params = std::make_shared<std::vector<memory::ParamSpec>>(group.params);
  for (size_t p = 0; p < params->size(); ++p) {
    const memory::ParamIdentity &identity = instance.params.at(p);
    memory::ParamSpec &param = (*params)[p];
    param.name = identity.name;
    param.global_shape = identity.global_shape, param.global_offset = identity.global_offset;
  }
  return params;
}

}  // namespace

MeshCovers::MeshCovers(const memory::ModelSpec &spec) : covers_{cover_of_one(spec.mesh())} {
  RankNumbers numbers;
  for (const memory::GroupSpec &group : spec.groups) {
    CoveredGroup &added = groups_.emplace_back();
    const std::vector<bool> all(group.params.size(), true);
    if (group.instances.empty()) {
      added.meshes.push_back({own_params(group), all, all});
      continue;
    }
    if (numbers.empty()) numbers = number_ranks(spec.mesh());
    added.cover = number_of(cover_of_group(spec, group, numbers));
    for (const memory::GroupInstance &instance : group.instances)
      added.meshes.push_back(
          {instance.ranks == spec.mesh_of(group).ranks ? own_params(group) : params_of(group, instance), all, all});
  }
  if (!one_mesh()) count_boxes();
}

uint32_t MeshCovers::number_of(MeshCover cover) {
  const auto known = std::ranges::find(covers_, cover);
  const auto number = static_cast<uint32_t>(known - covers_.begin());
  if (known == covers_.end()) covers_.push_back(std::move(cover));
  return number;
}

void MeshCovers::count_boxes() {
  // The offsets and shapes of the boxes of each tensor.
  std::map<std::string, std::set<std::pair<std::vector<uint64_t>, std::vector<uint64_t>>>> tensors;
  for (CoveredGroup &group : groups_)
    for (MeshGroup &mesh : group.meshes)
      for (size_t p = 0; p < mesh.params->size(); ++p) {
        const memory::ParamSpec &param = (*mesh.params)[p];
        auto &boxes = tensors[param.name];
        mesh.names[p] = boxes.empty();
        mesh.counts[p] = boxes.insert({param.global_offset, param.shape}).second;
      }
}

}  // namespace fsdp::checkpoint
