// SPDX-License-Identifier: Apache-2.0
// How the ranks of a model are arranged: a pure function of the sizes asked for and of the host of each rank.
//
//   declared   replicate_size x shard_size: rank r is replica r / shard_size, shard r % shard_size
//   inside     outer_size x inner_size: rank r is outer r / inner_size, inner r % inner_size. The inner ranks of one
//   outer
//              index share a host and its memory; the outer ranks of one inner index may be on different hosts.
//
// With replicas the inner axis is the shard axis and the outer one the replicas. A shard axis over several hosts is
// the same arrangement: the inner axis is its part on a host, the outer one the hosts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fsdp::layout {

// What the outer axis divides.
enum class OuterAxis {
  none,       // there is one outer index
  replicate,  // nothing: all replicas hold the same (HSDP)
  optim,      // main weights and optimizer state (HFSDP)
  shard       // those and main grads: a shard axis over several hosts
};

struct Mesh {
  std::vector<uint32_t> ranks;  // of the world, in the mesh's order
  uint32_t replicate_size = 1;
  uint32_t shard_size = 1;
  uint32_t inner_size = 1;
  uint32_t outer_size = 1;
  OuterAxis outer = OuterAxis::none;
  uint32_t reduction_block = 0;  // inner ranks whose gradients are added first; 0: all

  uint32_t size() const { return inner_size * outer_size; }
  // Slots: the parts into which main weights and optimizer state are divided. An inner rank's `slices()` slots are
  // neighbours, one for each outer index.
  uint32_t slices() const { return outer == OuterAxis::optim || outer == OuterAxis::shard ? outer_size : 1; }
  uint32_t slots() const { return inner_size * slices(); }
  uint32_t inner(uint32_t rank) const { return rank % inner_size; }
  uint32_t outer_index(uint32_t rank) const { return rank / inner_size; }
  uint32_t slot(uint32_t rank) const { return inner(rank) * slices() + outer_index(rank) % slices(); }
  // The place in the mesh of a rank of the world; INVALID_ARGUMENT, naming the call, if it has none.
  uint32_t index_of(uint32_t world_rank, const char *call) const;
  // A rank that holds the slot: the only one, or replica 0's.
  uint32_t holder(uint32_t slot) const { return slot % slices() * inner_size + slot / slices(); }
  std::vector<uint32_t> inner_ranks(uint32_t rank) const;  // of the world: those of the same outer index
  std::vector<uint32_t> outer_ranks(uint32_t rank) const;  // of the world: those of the same inner index
};

struct MeshRequest {
  std::vector<uint32_t> ranks;  // of the world
  std::vector<uint32_t> hosts;  // hosts[i]: a number for the host of ranks[i]
  uint32_t replicate_size = 0;  // 0: what shard_size leaves, else 1
  uint32_t shard_size = 0;      // 0: what replicate_size leaves
  uint32_t reduction_block = 0;
};

// Throws INVALID_ARGUMENT on sizes that do not multiply to the ranks, and UNSUPPORTED on hosts that cut an axis
// unevenly.
Mesh arrange_mesh(MeshRequest request);

// 1 x ranks on one host.
Mesh one_axis(uint32_t ranks);

}  // namespace fsdp::layout
