// SPDX-License-Identifier: Apache-2.0
#include "engine/lr_scales.h"

#include <cstring>
#include <span>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"

namespace fsdp::engine {
namespace {

std::vector<double> list(const memory::ModelSpec &spec) {
  std::vector<double> lr_scales;
  for (const memory::GroupSpec &group : spec.groups)
    for (const memory::ParamSpec &param : group.params) lr_scales.push_back(param.lr_scale);
  return lr_scales;
}

// One that came short is not told.
double lr_scale_at(const std::vector<std::byte> &bytes, size_t index) {
  double lr_scale = -1;
  if ((index + 1) * sizeof lr_scale <= bytes.size())
    std::memcpy(&lr_scale, bytes.data() + index * sizeof lr_scale, sizeof lr_scale);
  return lr_scale;
}

}  // namespace

uint64_t hash_lr_scales(const memory::ModelSpec &spec) noexcept {
  uint64_t hash = 0;
  for (const memory::GroupSpec &group : spec.groups)
    for (const memory::ParamSpec &param : group.params) hash = XXH64(&param.lr_scale, sizeof param.lr_scale, hash);
  return hash;
}

std::string compare_lr_scales(const memory::ModelSpec &spec, transport::Team &team, uint32_t first, uint32_t odd) {
  std::vector<double> mine;
  if (team.rank() == first || team.rank() == odd) mine = list(spec);
  const auto all = team.all_gather(std::as_bytes(std::span(mine)), "lr_scales that differ");
  size_t index = 0;
  for (const memory::GroupSpec &group : spec.groups)
    for (const memory::ParamSpec &param : group.params) {
      const double of_odd = lr_scale_at(all[odd], index), of_first = lr_scale_at(all[first], index);
      if (of_odd != of_first)
        return format_text("rank {} has lr_scale {} for parameter '{}' of group '{}', rank {} {}", team.world_rank(odd),
                           of_odd, param.name, group.name, team.world_rank(first), of_first);
      ++index;
    }
  return format_text("rank {} has other lr_scales than rank {}", team.world_rank(odd), team.world_rank(first));
}

}  // namespace fsdp::engine
