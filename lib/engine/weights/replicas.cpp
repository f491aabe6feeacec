// SPDX-License-Identifier: Apache-2.0
// fsdp_check_replicas compares hashes of data that several ranks store alike. Each rank sends three numbers, one for
// each set of ranks that may hold the same data. If these differ, two ranks send their hashes of every plane to find
// the first parameter that differs.
#include "engine/weights/replicas.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/dtype.h"
#include "engine/weights/quantizer.h"

namespace fsdp::engine {
namespace {

// Which ranks of the mesh have the same elements: all ranks, those with the same inner index, or those with the same
// slot.
enum class Holders : uint32_t { all, inner, slot };
constexpr uint32_t holder_kinds = 3;

// The elements of a parameter that this rank and others store in one plane.
struct Replica {
  const Group *group = nullptr;
  uint32_t param_index = 0;
  std::string what;
  Holders holders = Holders::all;
  uint64_t hash = 0;
};

struct Difference {
  uint32_t usual = 0, odd = 0, agreeing = 0;  // two ranks of the mesh; the number of ranks equal to `usual`
  Holders holders = Holders::all;
};

using Sums = std::array<uint64_t, holder_kinds>;  // the sums of a rank by kind of holders

uint32_t share_of(const layout::Mesh &mesh, Holders holders, uint32_t rank) {
  return holders == Holders::all ? 0 : holders == Holders::inner ? mesh.inner(rank) : mesh.slot(rank);
}

bool has_peers(const layout::Mesh &mesh, Holders holders) {
  return holders == Holders::all     ? mesh.size() > 1
         : holders == Holders::inner ? mesh.outer_size > 1
                                     : mesh.slots() < mesh.size();
}

// Hashes a plane. Memory of a device, and a file, are copied to the host's memory in pieces.
uint64_t hash_plane(const Runtime &runtime, const std::byte *data, fsdp_dtype dtype, uint64_t count) {
  const uint64_t element = dtype_size(dtype);
  if (runtime.context.device_traits().host_memory && !runtime.storage->is_in_file(data))
    return XXH3_64bits(data, count * element);
  constexpr uint64_t piece_bytes = uint64_t{1} << 20;
  std::vector<std::byte> piece(std::min(piece_bytes, count * element));
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  for (uint64_t done = 0; done < count;) {
    const uint64_t now = std::min(count - done, piece_bytes / element);
    runtime.storage->transfer(piece.data(), dtype, data + done * element, dtype, now);
    XXH3_64bits_update(&state, piece.data(), now * element);
    done += now;
  }
  return XXH3_64bits_digest(&state);
}

std::string describe(const Runtime &runtime, const memory::PlanePlan &plane) {
  switch (plane.kind) {
    case PlaneKind::main: return "main weights";
    case PlaneKind::rest: return "rests of main weights";
    case PlaneKind::compute_scales: return "scales of compute weights";
    case PlaneKind::state_scales: return "scales of optimizer state '" + runtime.spec.states[plane.index].name + "'";
    case PlaneKind::state: return "optimizer state '" + runtime.spec.states[plane.index].name + "'";
    default: return "compute weights";
  }
}

Holders holders_of(Extent extent) {
  return extent == Extent::whole ? Holders::all : extent == Extent::group ? Holders::inner : Holders::slot;
}

// Lists the replicas of a mesh. All ranks of the mesh get the same list, except for the hashes.
std::vector<Replica> list_replicas(const Runtime &runtime, const MeshComms &comms) {
  std::vector<Replica> replicas;
  const auto list = [&](const PlaneSlice &own) {
    const memory::PlanePlan &plane = *own.plane.plan;
    if (plane.again || &runtime.comms_of(own.group) != &comms) return;
    // Ranks of one host map the same memory, so each rank checks only its own part.
    const bool common = runtime.plan.region(plane).reach == memory::Reach::common;
    const Extent kept = common ? plane.owned : plane.extent;
    if (!has_peers(comms.mesh, holders_of(kept))) return;
    const layout::Slice slice = runtime.slice_of(own.plane, own.tensor, kept);
    const uint64_t hash = slice.count == 0 ? 0 : hash_plane(runtime, own.plane.at(slice), plane.dtype, slice.count);
    replicas.push_back({&own.group, own.param_index, describe(runtime, plane), holders_of(kept), hash});
  };
  for_each_slice(runtime,
                 {PlaneKind::main, PlaneKind::rest, PlaneKind::state, PlaneKind::state_scales, PlaneKind::compute,
                  PlaneKind::compute_scales},
                 list);
  return replicas;
}

Sums sum_up(const std::vector<Replica> &replicas) {
  Sums sums{};
  for (const Replica &replica : replicas) {
    uint64_t &sum = sums[static_cast<uint32_t>(replica.holders)];
    sum = XXH64(&replica.hash, sizeof replica.hash, sum);
  }
  return sums;
}

// Finds the lowest rank that differs from the first rank with the same share. If more ranks agree with that rank than
// with the first one, the first rank counts as the odd one.
std::optional<Difference> find_difference(const layout::Mesh &mesh, const std::vector<Sums> &all, Holders holders) {
  const auto sum = [&](uint32_t rank) { return all[rank][static_cast<uint32_t>(holders)]; };
  std::vector<uint32_t> first(mesh.size(), UINT32_MAX);  // by share
  for (uint32_t rank = 0; rank < mesh.size(); ++rank) {
    const uint32_t share = share_of(mesh, holders, rank);
    if (first[share] == UINT32_MAX) first[share] = rank;
    if (sum(rank) == sum(first[share])) continue;
    Difference found{first[share], rank, 0, holders};
    uint32_t like_odd = 0;
    for (uint32_t other = 0; other < mesh.size(); ++other) {
      if (share_of(mesh, holders, other) != share) continue;
      found.agreeing += sum(other) == sum(found.usual);
      like_odd += sum(other) == sum(found.odd);
    }
    if (like_odd > found.agreeing) std::swap(found.usual, found.odd), found.agreeing = like_odd;
    return found;
  }
  return {};
}

[[noreturn]] void report(const Runtime &runtime, transport::Team &team, const std::vector<Replica> &replicas,
                         const Difference &found, const char *call) {
  std::vector<uint64_t> mine;
  if (team.rank() == found.usual || team.rank() == found.odd)
    for (const Replica &replica : replicas) mine.push_back(replica.hash);
  const auto all = team.all_gather(std::as_bytes(std::span(mine)), call);
  const auto hash = [&](uint32_t rank, size_t i) {
    uint64_t value = 0;
    if ((i + 1) * sizeof value <= all[rank].size())
      std::memcpy(&value, all[rank].data() + i * sizeof value, sizeof value);
    return value;
  };
  const uint32_t usual = team.world_rank(found.usual), odd = team.world_rank(found.odd);
  for (size_t i = 0; i < replicas.size(); ++i)
    if (replicas[i].holders == found.holders && hash(found.usual, i) != hash(found.odd, i))
      fail_rank(
          FSDP_MISMATCH, static_cast<int32_t>(odd),
          "{}: model {}: parameter '{}' of group '{}': the {} of rank {} have the hash {:016x}, those of rank {} have "
          "{:016x} ({} rank(s) agree with the latter)",
          call, runtime.number(), runtime.param(*replicas[i].group, replicas[i].param_index).name,
          replicas[i].group->name(), replicas[i].what, odd, hash(found.odd, i), usual, hash(found.usual, i),
          found.agreeing);
  fail(FSDP_INTERNAL, "{}: hashes of equal planes differ", call);
}

void compare(const Runtime &runtime, const MeshComms &comms, const char *call) {
  transport::Team &team = *comms.teams.all;
  const std::vector<Replica> replicas = list_replicas(runtime, comms);
  const Sums mine = sum_up(replicas);
  std::vector<Sums> all(team.size());
  team.all_gather(&mine, sizeof mine, all.data(), call);
  for (const Holders holders : {Holders::all, Holders::inner, Holders::slot})
    if (const auto found = find_difference(comms.mesh, all, holders)) report(runtime, team, replicas, *found, call);
}

}  // namespace

void check_replicas(Runtime &runtime, fsdp_stream stream) {
  constexpr auto call = "fsdp_check_replicas";
  runtime.step.require_weights(call);
  runtime.require_eager(call);
  device::Stream &caller = runtime.caller_stream(stream, call);
  const CallSpan span(runtime, "check_replicas");
  runtime.await_version();
  runtime.join_window(caller);
  runtime.synchronize(caller);
  if (runtime.comms.size() == 1) return compare(runtime, runtime.model_comms(), call);
  // All ranks of all meshes throw the error about a difference in one mesh.
  for (const MeshComms &mesh_comms : runtime.comms)
    transport::attempt_together(runtime.team(), call, [&] { compare(runtime, mesh_comms, call); });
}

}  // namespace fsdp::engine
