// SPDX-License-Identifier: Apache-2.0
#include "layout/mesh.h"

#include <algorithm>
#include <numeric>
#include <unordered_set>

#include "base/error.h"

namespace fsdp::layout {
namespace {

void choose_sizes(MeshRequest &request) {
  const uint64_t count = request.ranks.size();
  uint64_t replicate = request.replicate_size, shard = request.shard_size;
  if (!replicate) replicate = shard ? count / shard : 1;
  if (!shard) shard = count / replicate;
  if (replicate * shard != count)
    fail(FSDP_INVALID_ARGUMENT, "replicate_size {} x shard_size {} is not the {} ranks of the mesh",
         request.replicate_size, request.shard_size, count);
  request.replicate_size = static_cast<uint32_t>(replicate);
  request.shard_size = static_cast<uint32_t>(shard);
}

void check_ranks(const MeshRequest &request) {
  if (request.ranks.empty()) fail(FSDP_INVALID_ARGUMENT, "a mesh of no ranks");
  std::vector<uint32_t> sorted = request.ranks;
  std::sort(sorted.begin(), sorted.end());
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    fail(FSDP_INVALID_ARGUMENT, "rank {} is in the mesh twice", *twice);
}

// The number of ranks per host on the shard axis that begins at `first`. Returns 0 unless all hosts of the axis have
// equally many ranks, and these are neighbours.
uint32_t ranks_per_host(const MeshRequest &request, uint32_t first) {
  const auto host = [&](uint32_t i) { return request.hosts[first + i]; };
  uint32_t together = 1;
  while (together < request.shard_size && host(together) == host(0)) ++together;
  std::unordered_set<uint32_t> seen;
  for (uint32_t begin = 0; begin < request.shard_size; begin += together) {
    if (!seen.insert(host(begin)).second) return 0;
    for (uint32_t i = begin; i < begin + together; ++i)
      if (i >= request.shard_size || host(i) != host(begin)) return 0;
  }
  return together;
}

uint32_t choose_inner(const MeshRequest &request) {
  uint32_t inner = 0;
  for (uint32_t replica = 0; replica < request.replicate_size; ++replica) {
    const uint32_t first = replica * request.shard_size;
    const uint32_t together = ranks_per_host(request, first);
    if (together == 0 || (inner && together != inner))
      fail(FSDP_UNSUPPORTED,
           "the shard axis of ranks {} to {} lies unevenly on its hosts; each host must hold the same number of "
           "neighbouring "
           "ranks of it",
           request.ranks[first], request.ranks[first + request.shard_size - 1]);
    inner = together;
  }
  if (inner < request.shard_size && request.replicate_size > 1)
    fail(FSDP_UNSUPPORTED,
         "{} replicas of a shard axis that lies on {} hosts; let a shard axis of {} ranks lie on one host, or have one "
         "replica",
         request.replicate_size, request.shard_size / inner, request.shard_size);
  return inner;
}

void check_block(const Mesh &mesh, uint32_t block) {
  if (block == 0) return;
  if (mesh.shard_size % block)
    fail(FSDP_INVALID_ARGUMENT, "reduction_block_size {} does not divide the shard axis of {} ranks", block,
         mesh.shard_size);
  if (mesh.outer == OuterAxis::shard && block != mesh.inner_size)
    fail(FSDP_UNSUPPORTED,
         "reduction_block_size {}, but a shard axis over hosts is added host by host, in blocks of {}", block,
         mesh.inner_size);
}

}  // namespace

std::vector<uint32_t> Mesh::inner_ranks(uint32_t rank) const {
  const auto first = ranks.begin() + outer_index(rank) * inner_size;
  return {first, first + inner_size};
}

std::vector<uint32_t> Mesh::outer_ranks(uint32_t rank) const {
  std::vector<uint32_t> list;
  for (uint32_t o = 0; o < outer_size; ++o) list.push_back(ranks[o * inner_size + inner(rank)]);
  return list;
}

Mesh arrange_mesh(MeshRequest request) {
  check_ranks(request);
  choose_sizes(request);
  Mesh mesh;
  mesh.replicate_size = request.replicate_size;
  mesh.shard_size = request.shard_size;
  mesh.inner_size = choose_inner(request);
  mesh.outer_size = static_cast<uint32_t>(request.ranks.size()) / mesh.inner_size;
  if (mesh.replicate_size > 1)
    mesh.outer = OuterAxis::replicate;
  else if (mesh.outer_size > 1)
    mesh.outer = OuterAxis::shard;
  check_block(mesh, request.reduction_block);
  if (mesh.outer != OuterAxis::shard && request.reduction_block < mesh.inner_size)
    mesh.reduction_block = request.reduction_block;
  mesh.ranks = std::move(request.ranks);
  return mesh;
}

uint32_t Mesh::index_of(uint32_t world_rank, const char *call) const {
  const auto found = std::find(ranks.begin(), ranks.end(), world_rank);
  if (found == ranks.end())
    fail(FSDP_INVALID_ARGUMENT, "{}: rank {} is not one of the {} ranks of the mesh", call, world_rank, ranks.size());
  return static_cast<uint32_t>(found - ranks.begin());
}

Mesh one_axis(uint32_t ranks) {
  MeshRequest request;
  request.ranks.resize(ranks);
  std::iota(request.ranks.begin(), request.ranks.end(), 0U);
  request.hosts.assign(ranks, 0);
  return arrange_mesh(std::move(request));
}

}  // namespace fsdp::layout
