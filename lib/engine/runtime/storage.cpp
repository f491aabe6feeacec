// SPDX-License-Identifier: Apache-2.0

#include "engine/runtime/storage.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>

#include "base/error.h"

namespace fsdp::engine {

namespace {

// The memory that one rank needs, and the limit that applies to it. Ranks exchange claims as bytes.
struct Claim {
  WireText<40> boot;  // the kernel's boot id, because ranks of one host may count as ranks of several hosts
  uint64_t device = 0, inode = 0;
  uint64_t limit_bytes = 0, used_bytes = 0, reclaimable_bytes = 0, free_bytes = 0;
  uint64_t bytes = 0;
  WireText<256> path;  // cut at the end if longer

  auto key() const { return std::tuple(boot.view(), device, inode); }
};

std::vector<Claim> make_claims(uint64_t bytes, const std::vector<device::MemoryLimit> &limits) {
  std::string boot;
  if (!limits.empty()) std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  std::vector<Claim> claims;
  for (const device::MemoryLimit &limit : limits) {
    Claim claim;
    claim.boot.set(boot);
    claim.path.set(limit.path);
    claim.device = limit.device;
    claim.inode = limit.inode;
    claim.limit_bytes = limit.limit_bytes;
    claim.used_bytes = limit.used_bytes;
    claim.reclaimable_bytes = limit.reclaimable_bytes;
    claim.free_bytes = limit.free_bytes();
    claim.bytes = bytes;
    claims.push_back(claim);
  }
  return claims;
}

// Sums that do not fit into 64 bits become the largest number, which is more than any memory. If a rank threw an error
// here, the others would wait for it.
constexpr uint64_t no_room = std::numeric_limits<uint64_t>::max();
uint64_t saturated_add(uint64_t a, uint64_t b) noexcept { return a > no_room - b ? no_room : a + b; }
uint64_t saturated_multiply(uint64_t a, uint64_t b) noexcept { return b && a > no_room / b ? no_room : a * b; }

// The sum over all ranks under one limit.
struct ClaimSum {
  Claim first;
  uint32_t rank = 0, ranks = 0;  // the first rank, and the number of ranks
  uint64_t bytes = 0;
};

std::vector<ClaimSum> add_claims(transport::Team &team, const std::vector<std::vector<std::byte>> &all) {
  std::vector<ClaimSum> sums;
  for (uint32_t r = 0; r < all.size(); ++r)
    for (size_t at = 0; at + sizeof(Claim) <= all[r].size(); at += sizeof(Claim)) {
      Claim claim;
      std::memcpy(&claim, all[r].data() + at, sizeof claim);
      auto sum = sums.begin();
      while (sum != sums.end() && sum->first.key() != claim.key()) ++sum;
      if (sum == sums.end()) sum = sums.insert(sum, ClaimSum{claim, team.world_rank(r), 0, 0});
      ++sum->ranks;
      sum->bytes = saturated_add(sum->bytes, claim.bytes);
    }
  return sums;
}

}  // namespace

uint64_t host_bytes(const memory::ModelPlan &plan, bool host_memory,
                    std::span<const memory::InnerPlace> places) noexcept {
  uint64_t bytes = 0;
  for (const memory::RegionPlan &region : plan.regions) {
    const memory::InnerPlace &place = places[region.mesh];
    if (!region.on_host && (!host_memory || region.by_comm)) continue;
    if (region.id == memory::RegionId::home) continue;  // on the disk
    if (region.reach == memory::Reach::own)
      bytes = saturated_add(bytes, region.bytes);
    else if (place.rank == 0)
      bytes = saturated_add(
          bytes, region.reach == memory::Reach::common ? region.bytes : saturated_multiply(region.bytes, place.ranks));
  }
  return bytes;
}

void check_room(transport::Team &team, uint64_t bytes, const std::vector<device::MemoryLimit> &limits) {
  const std::vector<Claim> claims = make_claims(bytes, limits);
  const auto all = team.all_gather(std::as_bytes(std::span(claims)), "the room for the model");
  for (const ClaimSum &sum : add_claims(team, all))
    if (sum.bytes > sum.first.free_bytes)
      fail(FSDP_OUT_OF_MEMORY,
           "fsdp_seal_model: {} rank(s) of one host, the first of them rank {}, need {} bytes together; their memory "
           "cgroup {} "
           "has {} bytes free (limit {}, used {}, of which {} are file cache)",
           sum.ranks, sum.rank, sum.bytes, sum.first.path.view(), sum.first.free_bytes, sum.first.limit_bytes,
           sum.first.used_bytes, sum.first.reclaimable_bytes);
}

namespace {

static_assert(sizeof(device::AdamW) <= memory::adamw_step_bytes);

using memory::Reach;
using memory::RegionId;

}  // namespace

bool keeps_read_grads(const memory::ModelPlan &plan) {
  return std::ranges::any_of(plan.regions, [](const memory::RegionPlan &region) {
    return region.id == RegionId::kept_grads && region.bytes > 0;
  });
}

Storage::Storage(const memory::ModelSpec &spec, const memory::ModelPlan &plan,
                 const std::map<fsdp_role, CallerArena> &callers, const std::vector<Teams> &teams,
                 device::Device &device, std::optional<Error> early)
    : spec_(spec), plan_(plan), callers_(callers), teams_(teams), device_(device), regions_(plan.regions.size()) {
  transport::Team &all = *teams.front().all;
  std::vector<device::MemoryLimit> limits;
  const auto unread = capture_error([&] { limits = device::read_memory_limits(); });
  if (!early) early = unread;
  check_room(all, needed_bytes(), limits);
  // Private memory comes first. A rank that cannot get it must report that before other ranks wait for this rank in a
  // collective.
  if (!early) early = capture_error([this] { allocate_all_own(); });
  transport::share_error(all, early, "fsdp_seal_model");
  // The ranks of one inner axis fail together, and the ranks of the other axes and meshes must learn of the failure.
  for (uint32_t mesh = 0; mesh < teams.size(); ++mesh)
    if (teams.size() == 1 && !teams.front().outer)
      allocate_arenas(mesh);
    else
      transport::attempt_together(all, "fsdp_seal_model", [&] { allocate_arenas(mesh); });
  for (const memory::RegionPlan &region : plan_.regions)
    if (region.by_comm) allocated(region) += region.bytes;  // the outer axis and the device's teams allocated it
  buckets_.resize(plan_.buckets.size());
  for (size_t b = 0; b < buckets_.size(); ++b) place(plan_.buckets[b], buckets_[b]);
  for (size_t role = 1; role < allocated_.size(); ++role) allocated_[0] += allocated_[role];
}

const CallerArena *Storage::handed_in(const memory::RegionPlan &plan) const {
  const auto caller = callers_.find(plan.role);
  return plan.reach == Reach::own && caller != callers_.end() ? &caller->second : nullptr;
}

uint64_t Storage::needed_bytes() const {
  std::vector<memory::InnerPlace> places;
  for (const Teams &mesh_teams : teams_) places.push_back({mesh_teams.inner->rank(), mesh_teams.inner->size()});
  uint64_t bytes = host_bytes(plan_, device_.traits().host_memory, places);
  if (!device_.traits().host_memory) return bytes;
  for (const memory::RegionPlan &region : plan_.regions)
    if (handed_in(region)) bytes -= region.bytes;
  return bytes;
}

void Storage::clear(std::byte *data, uint64_t bytes) const {
  device::Stream &stream = device_.caller_stream(nullptr);
  stream.fill(data, 0, bytes);
  const auto cleared = device_.create_event();
  stream.record(*cleared);
  device_.synchronize(*cleared);
}

void Storage::take_from_caller(const memory::RegionPlan &plan, const CallerArena &arena, Region &region) const {
  if (arena.size_bytes < plan.bytes)
    fail(FSDP_INVALID_ARGUMENT, "fsdp_set_arena: the arena for {} has {} bytes, the model needs {} on rank {}",
         plan.what, arena.size_bytes, plan.bytes, teams_.front().all->world_rank(teams_.front().all->rank()));
  region.data = arena.data;
  clear(region.data, plan.bytes);
}

void Storage::allocate_own(const memory::RegionPlan &plan, Region &region) {
  if (const CallerArena *arena = handed_in(plan)) {
    take_from_caller(plan, *arena, region);
  } else {
    region.memory =
        plan.on_host ? device_.allocate_host(plan.bytes, plan.what) : device_.allocate(plan.bytes, plan.what);
    region.data = region.memory->data();
  }
  region.view = region.shown = region.data;
  allocated(plan) += plan.bytes;
}

void Storage::make_home_file(const memory::RegionPlan &plan, Region &region) {
  const transport::Team &all = *teams_.front().all;
  device_.count_allocation(plan.bytes, plan.what);
  home_file_ = std::make_shared<HomeFile>(spec_.homes.directory, plan.bytes, all.world_rank(all.rank()));
  region.data = home_file_->data();
  region.view = region.shown = region.data;
  allocated(plan) += plan.bytes;
}

void Storage::transfer(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype, uint64_t count) const {
  if (!is_in_file(to) && !is_in_file(from)) return device_.transfer(to, to_dtype, from, from_dtype, count);
  attempt_on_file([&] { transfer_file(to, to_dtype, from, from_dtype, count); });
}

void Storage::transfer_file(void *to, fsdp_dtype to_dtype, const void *from, fsdp_dtype from_dtype,
                            uint64_t count) const {
  constexpr uint64_t piece_bytes = uint64_t{1} << 20;
  const fsdp_dtype stored = is_in_file(to) ? to_dtype : from_dtype;
  const uint64_t step = piece_bytes / dtype_size(stored);
  std::vector<std::byte> piece(std::min(step, count) * dtype_size(stored));
  auto *const into = static_cast<std::byte *>(to);
  const auto *const out_of = static_cast<const std::byte *>(from);
  for (uint64_t done = 0; done < count; done += step) {
    const uint64_t some = std::min(step, count - done);
    const auto bytes = std::span(piece).first(some * dtype_size(stored));
    std::byte *const there = into + done * dtype_size(to_dtype);
    const std::byte *const here = out_of + done * dtype_size(from_dtype);
    if (is_in_file(to)) {
      device_.transfer(bytes.data(), to_dtype, here, from_dtype, some);
      home_file_->write(there, bytes);
    } else {
      home_file_->read(here, bytes);
      device_.transfer(there, to_dtype, bytes.data(), from_dtype, some);
    }
  }
}

void Storage::allocate_all_own() {
  if (callers_.contains(FSDP_ROLE_GRAD) && keeps_read_grads(plan_)) fail(FSDP_UNSUPPORTED, "{}", grad_arena_refusal);
  for (size_t r = 0; r < regions_.size(); ++r)
    if (const memory::RegionPlan &plan = plan_.regions[r]; plan.reach == Reach::own && !plan.by_comm && plan.bytes)
      plan.id == RegionId::home ? make_home_file(plan, regions_[r]) : allocate_own(plan, regions_[r]);
  if (plan_.acted_message_bytes) acted_ = device_.allocate_host(plan_.acted_message_bytes, "messages of acted hosts");
}

void Storage::register_with(transport::Team &team) const {
  for (size_t r = 0; r < regions_.size(); ++r)
    if (const memory::RegionPlan &plan = plan_.regions[r]; plan.registered && plan.bytes)
      team.register_memory(regions_[r].data, plan.bytes, plan.what);
}

void Storage::allocate_arenas(uint32_t mesh) {
  allocate_common(plan_.region(RegionId::mapped_compute, mesh));
  allocate_parts(plan_.region(RegionId::whole_compute, mesh));
  allocate_parts(plan_.region(RegionId::sharded_compute, mesh));
  allocate_grads(mesh);
  if (mesh == 0) {
    allocate_parts(plan_.region(RegionId::device_norms));
    if (const memory::RegionPlan &amaxes = plan_.region(RegionId::amaxes); amaxes.reach == Reach::parts)
      allocate_parts(amaxes);
  }
  allocate_parts(plan_.region(RegionId::matrices, mesh));
  allocate_parts(plan_.region(RegionId::staging, mesh));
}

// The pool of full gradients comes after the persistent full gradients, in the same arena.
void Storage::allocate_grads(uint32_t mesh) {
  const memory::RegionPlan &kept = plan_.region(RegionId::kept_grads, mesh);
  const memory::RegionPlan &lent = plan_.region(RegionId::lent_grads, mesh);
  allocate_parts(kept, lent.bytes);
  const Region &first = region_of(kept);
  if (!first.arena) return;
  region_of(lent) = {
      nullptr,    first.arena, first.data + kept.bytes, first.view + kept.bytes, first.shown + kept.bytes,
      kept.bytes, first.stride};
  allocated(kept) -= lent.bytes;
  allocated(lent) += lent.bytes;
}

// The caller's view of a region. Compute weights are shown; if all of them are copied into a pool, the pool's buffers
// are shown.
View Storage::view_of(const memory::RegionPlan &plan) const {
  const bool shown = plan.id == RegionId::whole_compute ||
                     (plan.id == RegionId::mapped_compute && spec_.mapped(spec_.meshes[plan.mesh]));
  return shown && spec_.private_views ? View::copy_on_write : View::read_only;
}

void Storage::allocate_parts(const memory::RegionPlan &plan, uint64_t bytes_behind) {
  if (plan.bytes + bytes_behind == 0) return;
  transport::Team &team = team_of(plan);
  Region &region = region_of(plan);
  region.arena = team.create_parts(plan.bytes + bytes_behind, plan.what, view_of(plan));
  region.stride = plan.bytes + bytes_behind;
  region.data = region.arena->writable() + team.rank() * region.stride;
  region.view = region.arena->data() + team.rank() * region.stride;
  region.shown = region.arena->shown() + team.rank() * region.stride;
  allocated(plan) += region.arena->size_bytes() / team.size();
}

// The ranges of a region that this rank writes: its slices of every sub-bucket.
std::vector<transport::Range> Storage::own_ranges(const memory::RegionPlan &plan) const {
  std::vector<transport::Range> own;
  const uint32_t rank = team_of(plan).rank();
  for (const memory::BucketPlan &bucket : plan_.buckets)
    for (const memory::PlanePlan &plane : bucket.planes) {
      if (!memory::is_published(plane.kind) || &plan_.region(plane) != &plan) continue;
      const uint64_t number = dtype_size(plane.dtype);
      for (const layout::SubBucket &sub : bucket.layout_of(plane).sub_buckets) {
        const uint64_t count = sub.shard_count * bucket.slices;
        if (count) own.push_back({plane.offset + (sub.full_offset + rank * count) * number, count * number});
      }
    }
  return own;
}

// Allocates a region that ranks share. The first rank also counts the bytes that belong to no rank.
void Storage::allocate_common(const memory::RegionPlan &plan) {
  if (plan.bytes == 0) return;
  transport::Team &team = team_of(plan);
  const std::vector<transport::Range> own = own_ranges(plan);
  Region &region = region_of(plan);
  region.arena = team.create_arena(plan.bytes, own, plan.what, view_of(plan));
  region.data = region.arena->writable();
  region.view = region.arena->data();
  region.shown = region.arena->shown();
  uint64_t own_bytes = 0;
  for (const transport::Range &range : own) own_bytes += range.bytes;
  allocated(plan) += own_bytes + (team.rank() == 0 ? region.arena->size_bytes() - own_bytes * team.size() : 0);
}

const std::byte *Storage::part_of(RegionId id, uint32_t mesh, uint32_t inner_rank) const {
  const Region &held = region(id, mesh);
  return held.arena->data() + held.arena_offset + inner_rank * held.stride;
}

void Storage::show_compute(const memory::PiecePlan &piece, bool readable) const {
  const Region &held = region(piece.compute.region, piece.compute.mesh);
  if (!held.arena || !held.arena->protects()) return;
  held.arena->protect(own_offset(piece.compute), piece.compute.bytes, readable);
}

bool Storage::restores(const memory::PiecePlan &piece) const {
  const Region &held = region(piece.compute.region, piece.compute.mesh);
  return !piece.compute.bytes ? spec_.private_views : held.arena && held.arena->restores();
}

void Storage::restore(const memory::PiecePlan &piece) const {
  const Region &held = region(piece.compute.region, piece.compute.mesh);
  if (piece.compute.bytes) held.arena->restore(own_offset(piece.compute), piece.compute.bytes);
}

void Storage::restore_all() const {
  for (const memory::RegionPlan &plan : plan_.regions) {
    if (plan.id != RegionId::mapped_compute && plan.id != RegionId::whole_compute) continue;
    if (const Region &held = region(plan.id, plan.mesh); held.arena && held.arena->restores())
      held.arena->restore(own_offset({.region = plan.id, .mesh = plan.mesh}), plan.bytes);
  }
}

void Storage::set_grad_access(const memory::PartPlan &part, Access access) const {
  if (part.full_grad.bytes && protects_grads(part.full_grad.mesh))
    region(part.full_grad.region, part.full_grad.mesh)
        .arena->protect_own(own_offset(part.full_grad), part.full_grad.bytes, access);
}

bool Storage::protects_grads(uint32_t mesh) const {
  const Region &held = region(memory::RegionId::kept_grads, mesh);
  return held.arena && held.arena->protects();
}

std::span<const std::byte> Storage::full_grad(const memory::PartPlan &part) const {
  return {own_part(part.full_grad.region, part.full_grad.mesh) + part.full_grad.offset, part.full_grad.bytes};
}

std::span<const std::byte> Storage::shown_compute(const memory::PiecePlan &piece) const {
  return {region(piece.compute.region, piece.compute.mesh).shown + piece.compute.offset, piece.compute.bytes};
}

void Storage::place(const memory::BucketPlan &plan, Bucket &bucket) const {
  bucket.plan = &plan;
  bucket.planes.reserve(plan.planes.size());
  for (const memory::PlanePlan &row : plan.planes) {
    const Region &held = region(row.region, row.mesh);
    Plane plane{&row,
                &plan.layout_of(row),
                held.data + row.offset,
                held.view + row.offset,
                held.shown + row.offset,
                held.part().at(row.offset)};
    bucket.planes.push_back(plane);
    const Plane *&first = bucket.first[static_cast<size_t>(row.kind)];
    if (!first) first = &bucket.planes.back();
  }
}

}  // namespace fsdp::engine
