// SPDX-License-Identifier: Apache-2.0
// What a rank reads of a checkpoint: the rows it keeps, from the files that have them. And what
// does not fit: every rank finds the same, since it compares whole tensors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/plan/model_shards.h"

namespace fsdp::checkpoint {

// A box of a tensor that is in one file, and where its elements go: in their order behind each other from `first` on,
// or transposed, of a matrix whose columns are the model's rows.
struct LoadedRows {
  uint32_t tensor;          // in ModelShards::tensors()
  std::string name;         // in the file
  const ElementType *type;  // ... of which it must be there
  Box box;                  // in the stored tensor
  Box kept;                 // what this rank takes of the stored tensor, of this file and of others
  uint64_t first = 0;       // element of what the rank keeps
  bool transposed = false;
};

struct LoadedFile {
  uint32_t file;  // in the manifest, or of those that were given
  std::vector<LoadedRows> rows;
};

// Names of whole tensors, in the order of the model or of the manifest; the same on every rank.
struct LoadedTensors {
  std::vector<std::string> loaded;      // of the model
  std::vector<std::string> missing;     // the model has it, the checkpoint does not
  std::vector<std::string> unexpected;  // the other way round
};

struct LoadPlan : LoadedTensors {
  std::vector<LoadedFile> files;   // by number
  std::vector<uint32_t> shared;    // tensors that ranks read parts of and then give to each other
  std::vector<std::string> other;  // both have it, in another shape or of numbers that are not converted; for people

  // Codes and scales mean nothing without each other: of a frozen parameter whose planes are missing in part, which may
  // be left out as a whole alone, `other` tells. After all that is missing is known.
  void refuse_parts(const ModelShards &shards);
};

struct LoadChoice {
  bool states = true;        // of the optimizer; else weights alone, and states in the checkpoint are not unexpected
  bool one_replica = false;  // ranks that keep the same rows read a part of them each
};

// `rank` of the mesh.
LoadPlan plan_load(const ModelShards &shards, const Manifest &manifest, uint32_t rank, const LoadChoice &choice = {});

}  // namespace fsdp::checkpoint
