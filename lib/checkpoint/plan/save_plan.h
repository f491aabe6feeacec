// SPDX-License-Identifier: Apache-2.0
// What a checkpoint of one or more models consists of: pure. A rank has one file of each kind, with its rows of all
// models that it saves; the rank that leads a model's mesh describes that model, and the first rank puts the
// descriptions together.
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

// Bytes [first, first + to.size()) of what this rank keeps of a tensor. Called on a thread of the save, in rising
// order; the bytes do not change meanwhile.
using ReadKept = std::function<void(const KeptTensor &tensor, uint64_t first, std::span<std::byte> to)>;

struct SavedModel {
  std::shared_ptr<const ModelShards> shards;
  ManifestModel described;
  uint32_t rank = 0;            // of the model's mesh
  std::vector<uint32_t> ranks;  // of the job, in the mesh's order
  ReadKept read;
};

// Bytes of the caller's own.
struct SavedBytes {
  std::string name;
  bool per_rank = false;  // else they are the first rank's
  std::vector<std::byte> data;
};

// What a rank's bytes are called in their file.
std::string bytes_name(const std::string &name);
std::string bytes_name(const std::string &name, uint32_t rank);

// Of a rank of the job, numbered `place` among those that save.
std::string saved_file_name(ShardKind kind, uint32_t rank, uint32_t place);

// The part of the manifest that this rank can tell: models whose mesh it leads, and its bytes. Files have no sizes yet.
// Its keys say which models the rank saves, led by it or not: all ranks of each must say so (check_members).
// place_of: a rank of the job among those that save.
Manifest describe_part(std::span<const SavedModel> models, std::span<const SavedBytes> bytes, uint32_t rank,
                       const std::function<uint32_t(uint32_t)> &place_of);

// The keys of all ranks' parts, by rank. MISMATCH: a model that not all ranks of its mesh save.
void check_members(const std::map<uint32_t, std::map<std::string, std::string>> &keys);

// Adds a part to a manifest: files and models of the same name are one, and so are tensors that are parts of one.
// INVALID_ARGUMENT: of another shape or type, or of another model.
void add_part(Manifest &manifest, const Manifest &part);

}  // namespace fsdp::checkpoint
