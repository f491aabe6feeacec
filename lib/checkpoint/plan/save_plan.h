// SPDX-License-Identifier: Apache-2.0
// The contents of a checkpoint of one or more models; all functions are pure. A rank has one file of each kind, with
// its rows of all models that it saves, or several if the rows of a tensor are several boxes. The rank that leads a
// model's mesh describes the model, and the first rank combines the descriptions.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/manifest.h"
#include "checkpoint/plan/model_shards.h"

namespace fsdp::checkpoint {

// Copies bytes [first, first + to.size()) of this rank's part of a tensor to `to`. A thread of the save calls it, in
// rising order; the bytes do not change during the save.
using ReadKept = std::function<void(const KeptTensor &tensor, uint64_t first, std::span<std::byte> to)>;

struct SavedModel {
  std::shared_ptr<const ModelShards> shards;
  ManifestModel described;
  uint32_t rank = 0;            // this rank in the model's mesh
  std::vector<uint32_t> ranks;  // ranks of the job, in the mesh's order
  ReadKept read;
};

// Bytes of the caller.
struct SavedBytes {
  std::string name;
  bool per_rank = false;  // each rank has its own bytes; if false, only the first rank's are saved
  std::vector<std::byte> data;
};
// The name of bytes in their file: for common bytes, and for a rank's own.
std::string bytes_name(const std::string &name);
std::string bytes_name(const std::string &name, uint32_t rank);
// The name of a file of rank `rank` of the job, whose number among the saving ranks is `place`.
std::string saved_file_name(ShardKind kind, uint32_t rank, uint32_t place, uint32_t file = 0);
// The part of the manifest that this rank knows: the models whose mesh it leads, and its bytes. Files have no sizes
// yet. The part's keys list the models that the rank saves, whether it leads them or not; all ranks of a model must
// save it (check_members). place_of(rank) is the number of a rank of the job among the saving ranks.
Manifest describe_part(std::span<const SavedModel> models, std::span<const SavedBytes> bytes, uint32_t rank,
                       const std::function<uint32_t(uint32_t)> &place_of);

// Checks the keys of all ranks' parts; `keys` is indexed by rank. Throws MISMATCH if not all ranks of a model's mesh
// save the model.
void check_members(const std::map<uint32_t, std::map<std::string, std::string>> &keys);
// Adds a part to a manifest. Files and models with the same name are joined, and so are parts of one tensor. Throws
// INVALID_ARGUMENT if the parts of a tensor have different shapes or types, or belong to different models.
void add_part(Manifest &manifest, const Manifest &part);

}  // namespace fsdp::checkpoint
