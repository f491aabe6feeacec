// SPDX-License-Identifier: Apache-2.0
// The arrangement of a model's ranks: a pure function of the requested sizes and of the host of each rank.
//
//   declared   replicate_size x shard_size: rank r is replica r / shard_size, shard r % shard_size
//   inside     outer_size x inner_size: rank r is outer r / inner_size, inner r % inner_size.
//              The inner ranks of one outer index share a host and its memory;
//              the outer ranks of one inner index may be on different hosts.
//
// With several replicas the inner axis is the shard axis, and the outer axis is the replicas. A shard axis over several
// hosts is arranged alike: the inner axis is the part of the shard axis on one host, and the outer axis is the hosts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::layout {

// What the outer axis shards.
enum class OuterAxis {
  none,       // there is only one outer index
  replicate,  // nothing is sharded: all replicas hold the same data (HSDP)
  optim,      // main weights and optimizer state (HFSDP)
  shard       // main weights, optimizer state and main grads: a shard axis over several hosts
};

struct Mesh {
  std::vector<uint32_t> ranks;  // ranks of the world, in the mesh's order
  uint32_t replicate_size = 1;
  uint32_t shard_size = 1;
  uint32_t inner_size = 1;
  uint32_t outer_size = 1;
  OuterAxis outer = OuterAxis::none;
  // Number of neighbouring inner ranks whose gradients are summed into one block before the blocks are added; 0: all
  // inner ranks are one block.
  uint32_t reduction_block = 0;

  uint32_t size() const { return inner_size * outer_size; }
  // Slots are the parts into which main weights and optimizer state are divided. slices() is the number of slots of one
  // inner rank, which are neighbours: if the outer axis divides them, one for each outer index; else 1.
  uint32_t slices() const { return outer == OuterAxis::optim || outer == OuterAxis::shard ? outer_size : 1; }
  uint32_t slots() const { return inner_size * slices(); }
  // The inner and the outer index of a rank of the mesh.
  uint32_t inner(uint32_t rank) const { return rank % inner_size; }
  uint32_t outer_index(uint32_t rank) const { return rank / inner_size; }
  uint32_t slot(uint32_t rank) const { return inner(rank) * slices() + outer_index(rank) % slices(); }
  // The rank in the mesh of `world_rank`. Throws INVALID_ARGUMENT, naming the call, if the mesh does not contain it.
  uint32_t index_of(uint32_t world_rank, const char *call) const;
  // The rank that holds the slot. If every replica holds it, the rank in replica 0.
  uint32_t holder(uint32_t slot) const { return slot % slices() * inner_size + slot / slices(); }
  std::vector<uint32_t> inner_ranks(uint32_t rank) const;  // world ranks that have the same outer index as `rank`
  std::vector<uint32_t> outer_ranks(uint32_t rank) const;  // world ranks that have the same inner index as `rank`
  bool operator==(const Mesh &) const = default;
};

struct MeshRequest {
  std::vector<uint32_t> ranks;  // ranks of the world
  std::vector<uint32_t> hosts;  // hosts[i] is the number of the host of ranks[i]
  uint32_t replicate_size = 0;  // 0: number of ranks / shard_size if shard_size is given, else 1
  uint32_t shard_size = 0;      // 0: number of ranks / replicate_size
  uint32_t reduction_block = 0;
};

// Throws INVALID_ARGUMENT if replicate_size * shard_size is not the number of ranks, if a rank is listed twice or if
// reduction_block does not divide the shard axis. Throws UNSUPPORTED if the hosts divide the shard axis unevenly, if
// several replicas each span several hosts, or if a shard axis over hosts has blocks other than its hosts.
Mesh arrange_mesh(MeshRequest request);

// A mesh of one replica with `ranks` shards, all on one host.
Mesh one_axis(uint32_t ranks);

}  // namespace fsdp::layout
