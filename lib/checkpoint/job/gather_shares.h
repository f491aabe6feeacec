// SPDX-License-Identifier: Apache-2.0
// Ranks that keep the same rows and have read a part of them each get the rest from each other: block by block, as they
// have it now, in the model's types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "checkpoint/files/shard_reader.h"
#include "checkpoint/plan/load_plan.h"
#include "checkpoint/plan/save_plan.h"
#include "transport/team.h"

namespace fsdp::checkpoint {

// Takes rows that a rank keeps out of files, and hands them on as they come; those of transposed matrices when they are
// all there.
//
//   file --blocks, verified--> runs of a box --straight--> WriteKept
//                                            --transposed, element by element--> memory for these rows --> WriteKept

// Elements of a tensor, as the file has them, from element `first` of what this rank keeps of it. On the caller's
// thread.
using WriteKept = std::function<void(const KeptTensor &tensor, uint64_t first, const ElementType &type,
                                     std::span<const std::byte> elements)>;

class RowTaker {
 public:
  // poll: called between pieces of at most a chunk; throws what ends the taking.
  RowTaker(const ModelShards &shards, const WriteKept &write, const std::function<void()> &poll)
      : shards_(shards), write_(write), poll_(poll) {}

  // INVALID_ARGUMENT, naming the file, where it does not have the rows, or has them of another type.
  void take(const ShardReader &reader, std::span<const LoadedRows> rows);
  uint64_t wanted_bytes() const { return wanted_bytes_; }
  uint64_t read_bytes() const { return read_bytes_; }

 private:
  struct Wanted {
    WantedBox box;
    const LoadedRows *rows;
  };
  // A part of a transposed matrix, as the model has it.
  struct Turned {
    std::vector<std::byte> elements;
    uint64_t taken = 0;
  };
  std::vector<Wanted> find(const ShardReader &reader, std::span<const LoadedRows> rows) const;
  void read(const ShardReader &reader, std::span<const Wanted> wanted);
  void hand_on(const LoadedRows &rows, uint64_t to, std::span<const std::byte> elements);
  void turn(const LoadedRows &rows, uint64_t to, std::span<const std::byte> elements);

  const ModelShards &shards_;
  const WriteKept &write_;
  const std::function<void()> &poll_;
  AlignedBytes buffer_{ShardReader::buffer_bytes};
  std::map<std::pair<uint32_t, uint64_t>, Turned> turned_;  // by tensor and first element
  uint64_t wanted_bytes_ = 0, read_bytes_ = 0;
};

struct KeptAccess {
  const ModelShards &shards;
  uint32_t rank;  // of the mesh
  const ReadKept &read;
  const WriteKept &write;
  std::span<std::byte> staging;  // gather_bytes or more
};

// Memory for so many holders or fewer: two blocks, unless they are very many.
uint64_t gather_bytes(uint32_t holders);

// Collective over those that keep the same rows of all these tensors, numbered as ModelShards::holder does. What
// reading or writing throws comes back, when all have got what they wait for from this rank.
std::optional<Error> gather_shares(transport::Team &holders, const KeptAccess &shared,
                                   std::span<const KeptTensor *const> tensors);

}  // namespace fsdp::checkpoint
