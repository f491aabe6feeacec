// SPDX-License-Identifier: Apache-2.0
// All memory of a sealed model on this rank: the regions of its plan, and the planes in these regions. The constructor
// allocates and populates everything; nothing moves afterwards.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device/device.h"
#include "device/memory_limit.h"
#include "engine/runtime/home_file.h"
#include "engine/runtime/plane.h"
#include "engine/runtime/teams.h"
#include "memory/model_plan.h"
#include "transport/team.h"

namespace fsdp::engine {

// The bytes that a rank with these places, one in each mesh, will allocate in the host's memory, including memory that
// it allocates for its whole axis, without bytes in a file. The check for room needs them before anything is allocated,
// because without room the kernel kills processes.
uint64_t host_bytes(const memory::ModelPlan &plan, bool host_memory,
                    std::span<const memory::InnerPlace> places) noexcept;
// Collective: throws OUT_OF_MEMORY, the same on every rank, if ranks that share a cgroup together need more memory than
// the cgroup has free.
void check_room(transport::Team &team, uint64_t bytes, const std::vector<device::MemoryLimit> &limits);
// The error text if memory for FSDP_ROLE_GRAD cannot be passed in, because the plan keeps gradients that peers read.
inline constexpr auto grad_arena_refusal =
    "fsdp_set_arena: main grads of groups with FSDP_STRATEGY_NO_SHARD or FSDP_REDUCE_POLICY_LAST lie in memory that "
    "peers map; "
    "FSDP_ROLE_GRAD cannot be handed in for this model";

// Do peers read main gradients in place? If they do, the caller cannot pass in memory for these gradients.
bool keeps_read_grads(const memory::ModelPlan &plan);

// Memory that the caller passed in for a role.
struct CallerArena {
  std::byte *data = nullptr;
  uint64_t size_bytes = 0;
};

class Storage {
 public:
  // Collective over all ranks of the model. `early` is an error that keeps this rank from going on; every rank then
  // throws it.
  Storage(const memory::ModelSpec &spec, const memory::ModelPlan &plan, const std::map<fsdp_role, CallerArena> &callers,
          const std::vector<Teams> &teams, device::Device &device, std::optional<Error> early = {});

  const std::vector<Bucket> &buckets() const { return buckets_; }
  const Region &region(memory::RegionId id, uint32_t mesh = 0) const {
    return regions_[memory::ModelPlan::number_of(id, mesh)];
  }
  // own_part() is this rank's part, for writing; part_of() is the part of any inner rank, for reading.
  std::byte *own_part(memory::RegionId id, uint32_t mesh = 0) const { return region(id, mesh).data; }
  const std::byte *part_of(memory::RegionId id, uint32_t mesh, uint32_t inner_rank) const;
  // Collective: registers private memory that collectives of the team will use.
  void register_with(transport::Team &team) const;
  // Debug mode, if the arena can protect pages: sets what this rank may do with the full gradient of a part. Peers read
  // the gradient through their own views.
  void set_grad_access(const memory::PartPlan &part, Access access) const;
  bool protects_grads(uint32_t mesh) const;
  // Debug mode, if the arena can protect pages: sets whether the caller may read a group's weights in shared memory.
  void show_compute(const memory::PiecePlan &piece, bool readable) const;
  // restores(): can this object undo writes into views of a group's weights? restore() undoes them.
  bool restores(const memory::PiecePlan &piece) const;
  void restore(const memory::PiecePlan &piece) const;
  void restore_all() const;
  // full_grad() is the memory in which this rank writes the full gradient of a part. shown_compute() is the memory in
  // which the caller reads a group's weights.
  std::span<const std::byte> full_grad(const memory::PartPlan &part) const;
  std::span<const std::byte> shown_compute(const memory::PiecePlan &piece) const;
  // The file of planes that are at home in one; NULL: there are none.
  const std::shared_ptr<HomeFile> &home_file() const { return home_file_; }
  bool is_in_file(const void *address) const noexcept { return home_file_ && home_file_->contains(address); }
  // Like Device::transfer(), also if one of the addresses is in the file.
  void transfer(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) const;
  // From now on, these functions pass each error of the file to `failed`. Other ranks may wait for this rank in a
  // collective call, so they must learn of the error.
  void tell_file_errors(std::function<void(const Error &)> failed) { file_failed_ = std::move(failed); }
  // Does work on the file, and passes errors of the disk on in the same way.
  template <class Body>
  void attempt_on_file(Body &&body) const {
    try {
      body();
    } catch (Error &error) {
      if (error.status == FSDP_SYSTEM && file_failed_) {
        error.message = format_text("rank {}: {}; the context has failed: make a new one, and load the last checkpoint",
                                    error.rank, error.message);
        file_failed_(error);
      }
      throw;
    }
  }
  // Bytes by role as the allocators report them; [0] is the sum.
  const memory::RoleBytes &allocated_bytes() const { return allocated_; }

 private:
  // The bytes that this rank needs in the host's memory, without memory that the caller has passed in.
  uint64_t needed_bytes() const;
  const CallerArena *handed_in(const memory::RegionPlan &plan) const;
  void allocate_own(const memory::RegionPlan &plan, Region &region);
  void take_from_caller(const memory::RegionPlan &plan, const CallerArena &arena, Region &region) const;
  void transfer_file(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) const;
  void make_home_file(const memory::RegionPlan &plan, Region &region);
  void allocate_all_own();
  void allocate_arenas(uint32_t mesh);
  void allocate_grads(uint32_t mesh);
  View view_of(const memory::RegionPlan &plan) const;
  void allocate_parts(const memory::RegionPlan &plan, uint64_t bytes_behind = 0);
  void allocate_common(const memory::RegionPlan &plan);
  std::vector<transport::Range> own_ranges(const memory::RegionPlan &plan) const;
  void clear(std::byte *data, uint64_t bytes) const;
  void place(const memory::BucketPlan &plan, Bucket &bucket) const;
  Region &region_of(const memory::RegionPlan &plan) {
    return regions_[memory::ModelPlan::number_of(plan.id, plan.mesh)];
  }
  // The inner ranks that read a region.
  transport::Team &team_of(const memory::RegionPlan &plan) const {
    return plan.on_host ? *teams_[plan.mesh].inner : *teams_[plan.mesh].inner_data;
  }
  // The offset of this rank's part from the first byte that the arena has for the region.
  uint64_t own_offset(const memory::GroupBytes &bytes) const {
    const Region &held = region(bytes.region, bytes.mesh);
    return held.arena_offset + teams_[bytes.mesh].inner->rank() * held.stride + bytes.offset;
  }
  uint64_t &allocated(const memory::RegionPlan &plan) { return allocated_[static_cast<size_t>(plan.role)]; }

  const memory::ModelSpec &spec_;
  const memory::ModelPlan &plan_;
  const std::map<fsdp_role, CallerArena> &callers_;
  const std::vector<Teams> &teams_;  // by mesh
  device::Device &device_;
  memory::RoleBytes allocated_{};
  std::vector<Region> regions_;            // in the plan's order
  std::unique_ptr<device::Memory> acted_;  // see TeamMemory
  std::shared_ptr<HomeFile> home_file_;
  std::function<void(const Error &)> file_failed_;
  std::vector<Bucket> buckets_;
};

}  // namespace fsdp::engine
