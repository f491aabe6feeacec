// SPDX-License-Identifier: Apache-2.0
// Ranks that keep the same rows each read a part of them from files, and exchange the parts. They exchange blocks in
// the form that they have in memory, in the model's types.
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

// Reads the rows that a rank keeps from files, and passes them on as they arrive. Rows of transposed matrices are
// passed on when they are complete.
//
//   file --blocks, verified--> runs of a box --straight--> WriteKept
//                                            --transposed, element by element--> memory for these rows --> WriteKept

// Takes elements of a tensor in the file's format, starting at element `first` of this rank's part. Called on the
// caller's thread.
using WriteKept = std::function<void(const KeptTensor &tensor, uint64_t first, const ElementType &type,
                                     std::span<const std::byte> elements)>;

class RowTaker {
 public:
  // `poll` is called between pieces of at most a chunk, and throws to end the work.
  RowTaker(const ModelShards &shards, const WriteKept &write, const std::function<void()> &poll)
      : shards_(shards), write_(write), poll_(poll) {}

  // Throws INVALID_ARGUMENT, with the file's name, if the file lacks the rows or has them in another type.
  void take(const ShardReader &reader, std::span<const LoadedRows> rows);
  uint64_t wanted_bytes() const { return wanted_bytes_; }
  uint64_t read_bytes() const { return read_bytes_; }

 private:
  struct Wanted {
    WantedBox box;
    const LoadedRows *rows;
  };
  // A part of a transposed matrix, in the order of the model.
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
  std::map<std::pair<uint32_t, uint64_t>, Turned> turned_;  // key: tensor and first element
  uint64_t wanted_bytes_ = 0, read_bytes_ = 0;
};

struct KeptAccess {
  const ModelShards &shards;
  uint32_t rank;  // this rank in the mesh
  const ReadKept &read;
  const WriteKept &write;
  std::span<std::byte> staging;  // at least gather_bytes
};

// The memory needed for up to this many holders: two blocks, unless there are very many holders.
uint64_t gather_bytes(uint32_t holders);
// Collective over the ranks that keep the same rows of all these tensors, numbered as in ModelShards::holder. Returns
// an error of reading or writing only after the others have received everything that they expect from this rank.
std::optional<Error> gather_shares(transport::Team &holders, const KeptAccess &shared,
                                   std::span<const KeptTensor *const> tensors);

}  // namespace fsdp::checkpoint
