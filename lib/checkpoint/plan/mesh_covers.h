// SPDX-License-Identifier: Apache-2.0
// The meshes that share the groups of a model: which ranks of the model share a group, and which parameters of the
// group each of these meshes has. A pure function of the sealed declaration, the same on every rank.
//
//   model on ranks 0 to 3    dense     the model's mesh
//                            experts   mesh {0, 2} with rows 0 to 6 of "experts.w", mesh {1, 3} with rows 6 to 12
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "memory/model_spec.h"

namespace fsdp::checkpoint {

// The mesh of a group to which a rank belongs, and the rank's number in this mesh.
struct MeshPlace {
  uint32_t mesh = 0, rank = 0;

  bool operator==(const MeshPlace &) const = default;
};

// Disjoint meshes of one shape that together have all ranks of the model.
struct MeshCover {
  std::vector<layout::Mesh> meshes;
  std::vector<MeshPlace> places;                // index: rank of the model
  std::vector<std::vector<uint32_t>> of_model;  // for each mesh, the ranks of the model that are its ranks

  bool operator==(const MeshCover &) const = default;
};

// A group as declared on one of its meshes. Several meshes may have boxes of one tensor, and some of these boxes may be
// equal. The first of equal boxes counts, so that a checkpoint has each element once.
struct MeshGroup {
  std::shared_ptr<const std::vector<memory::ParamSpec>> params;
  std::vector<bool> counts;  // by parameter: no earlier group and mesh has an equal box of this tensor
  std::vector<bool> names;   // by parameter: no earlier group and mesh has this name
};

class MeshCovers {
 public:
  // The spec must outlive this. Throws MISMATCH if the meshes of a group are not disjoint or lack a rank of the model.
  explicit MeshCovers(const memory::ModelSpec &spec);

  // Do all groups have the model's mesh?
  bool one_mesh() const { return covers_.size() == 1; }
  // The first cover is the model's mesh alone.
  const std::vector<MeshCover> &covers() const { return covers_; }
  uint32_t cover_of(size_t group) const { return groups_[group].cover; }
  // The group on each mesh of its cover.
  const std::vector<MeshGroup> &meshes_of(size_t group) const { return groups_[group].meshes; }

 private:
  struct CoveredGroup {
    uint32_t cover = 0;
    std::vector<MeshGroup> meshes;
  };
  uint32_t number_of(MeshCover cover);
  void count_boxes();

  std::vector<MeshCover> covers_;
  std::vector<CoveredGroup> groups_;
};

}  // namespace fsdp::checkpoint
