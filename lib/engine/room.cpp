// SPDX-License-Identifier: Apache-2.0
#include "engine/room.h"

#include <cstring>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <tuple>

namespace fsdp::engine {
namespace {

// What one rank needs under one limit. It travels as it is.
struct Claim {
  char boot[40] = {};  // of the kernel: ranks of one host may count as ranks of several
  uint64_t device = 0, inode = 0;
  uint64_t limit_bytes = 0, used_bytes = 0, reclaimable_bytes = 0, free_bytes = 0;
  uint64_t bytes = 0;
  char path[256] = {};  // cut at the end if longer

  auto key() const { return std::tuple(std::string_view(boot, ::strnlen(boot, sizeof boot)), device, inode); }
};

std::vector<Claim> make_claims(uint64_t bytes, const std::vector<device::MemoryLimit> &limits) {
  std::string boot;
  if (!limits.empty()) std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  std::vector<Claim> claims;
  for (const device::MemoryLimit &limit : limits) {
    Claim claim;
    boot.copy(claim.boot, sizeof claim.boot - 1);
    limit.path.copy(claim.path, sizeof claim.path - 1);
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

// More than 64 bits is more than there is anywhere; a rank that threw here would leave the others waiting.
constexpr uint64_t no_room = std::numeric_limits<uint64_t>::max();
uint64_t saturated_add(uint64_t a, uint64_t b) noexcept { return a > no_room - b ? no_room : a + b; }
uint64_t saturated_multiply(uint64_t a, uint64_t b) noexcept { return b && a > no_room / b ? no_room : a * b; }

// Of all ranks that live under one limit.
struct ClaimSum {
  Claim first;
  uint32_t rank = 0, ranks = 0;  // the first one; how many
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

uint64_t host_bytes(const memory::ModelPlan &plan, bool host_memory, uint32_t inner, uint32_t inner_size) noexcept {
  uint64_t bytes = 0;
  for (const memory::RegionPlan &region : plan.regions) {
    if (!region.on_host && (!host_memory || region.by_comm)) continue;
    if (region.reach == memory::Reach::own)
      bytes = saturated_add(bytes, region.bytes);
    else if (inner == 0)
      bytes = saturated_add(
          bytes, region.reach == memory::Reach::common ? region.bytes : saturated_multiply(region.bytes, inner_size));
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
           sum.ranks, sum.rank, sum.bytes, sum.first.path, sum.first.free_bytes, sum.first.limit_bytes,
           sum.first.used_bytes, sum.first.reclaimable_bytes);
}

}  // namespace fsdp::engine
