// SPDX-License-Identifier: Apache-2.0
// What a rank reads from a checkpoint: the rows that it keeps, from the files that have them. The plan also lists
// everything that does not fit. Every rank gets the same list, because whole tensors are compared, including tensors
// that only other ranks keep.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/plan/model_shards.h"

namespace fsdp::checkpoint {

// A box of a tensor that is in one file. Its elements go, in their order, to this rank's part, from `first` on.
// `transposed`: the box is of a matrix whose columns are the model's rows.
struct LoadedRows {
  uint32_t tensor;          // index in ModelShards::tensors()
  std::string name;         // name in the file
  const ElementType *type;  // type that it must have in the file
  Box box;                  // box in the stored tensor
  Box kept;                 // the box that this rank takes of the stored tensor, from all files
  uint64_t first = 0;       // position of the first element in this rank's part
  bool transposed = false;
};
using FileRows = std::map<uint32_t, std::vector<LoadedRows>>;  // by the file's number
struct LoadedFile {
  uint32_t file;  // number in the manifest, or in the list of files
  std::vector<LoadedRows> rows;
};

// Names of whole tensors, in the order of the model or of the manifest; the same on every rank.
struct LoadedTensors {
  std::vector<std::string> loaded;      // tensors of the model that are loaded
  std::vector<std::string> missing;     // tensors of the model that the checkpoint lacks
  std::vector<std::string> unexpected;  // tensors of the checkpoint that the model lacks
  std::vector<std::string> encoded;     // loaded tensors that are codes in the model and numbers in the checkpoint
};
struct LoadPlan : LoadedTensors {
  std::vector<LoadedFile> files;   // ordered by number
  std::vector<uint32_t> shared;    // tensors of which ranks each read a part and exchange the parts
  std::vector<std::string> other;  // tensors that both have, with shapes or types that do not fit; texts for users
  // Codes are useless without their scales, and scales without their codes. Adds to `other` the frozen parameters and
  // the states of which only some planes are missing; they may be missing only as a whole. Called when all missing
  // tensors are known.
  void refuse_parts(const ModelShards &shards);
  // Removes repeated texts from `other`, because meshes with equal boxes find the same problem.
  void drop_repeated();
  // Adds the rows of a tensor of the model that `rank` reads from `stored`.
  void add(const ModelShards &shards, uint32_t index, const ManifestTensor &stored, uint32_t rank, bool one_replica,
           FileRows &rows);
};
struct LoadChoice {
  bool states = true;        // load optimizer states, too; if false, states in the checkpoint are not unexpected
  bool one_replica = false;  // ranks that keep the same rows each read a part of them
};
// `rank` is a rank of the mesh.
LoadPlan plan_load(const ModelShards &shards, const Manifest &manifest, uint32_t rank, const LoadChoice &choice = {});

}  // namespace fsdp::checkpoint
