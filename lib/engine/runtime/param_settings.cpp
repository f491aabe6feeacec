// SPDX-License-Identifier: Apache-2.0

#include "engine/runtime/param_settings.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"

namespace fsdp::engine {
namespace {

std::vector<uint8_t> list_trained(const memory::ModelSpec &spec) {
  std::vector<uint8_t> trained;
  for (const memory::GroupSpec &group : spec.groups)
    for (const memory::ParamSpec &param : group.params) trained.push_back(param.trained);
  return trained;
}

// One that came short is not trained.
bool trained_at(const std::vector<std::byte> &bytes, size_t index) {
  return index < bytes.size() && bytes[index] != std::byte{0};
}

}  // namespace

uint64_t hash_trained(const memory::ModelSpec &spec) noexcept {
  uint64_t hash = 0;
  for (const memory::GroupSpec &group : spec.groups)
    for (const memory::ParamSpec &param : group.params) hash = XXH64(&param.trained, sizeof param.trained, hash);
  return hash;
}

bool trains_all(const memory::ModelSpec &spec) noexcept {
  return std::ranges::all_of(spec.groups, [](const memory::GroupSpec &group) {
    return std::ranges::all_of(group.params, &memory::ParamSpec::trained);
  });
}

std::string compare_trained(const memory::ModelSpec &spec, transport::Team &team, uint32_t first, uint32_t odd) {
  std::vector<uint8_t> mine;
  if (team.rank() == first || team.rank() == odd) mine = list_trained(spec);
  const auto all = team.all_gather(std::as_bytes(std::span(mine)), "parameters that are trained on some ranks only");
  size_t index = 0;
  for (const memory::GroupSpec &group : spec.groups)
    for (const memory::ParamSpec &param : group.params) {
      const bool by_odd = trained_at(all[odd], index), by_first = trained_at(all[first], index);
      if (by_odd != by_first)
        return format_text("rank {} {} parameter '{}' of group '{}', rank {} {} (fsdp_set_param_trainable)",
                           team.world_rank(odd), by_odd ? "trains" : "does not train", param.name, group.name,
                           team.world_rank(first), by_first ? "does" : "does not");
      ++index;
    }
  return format_text("rank {} trains other parameters than rank {} (fsdp_set_param_trainable)", team.world_rank(odd),
                     team.world_rank(first));
}

}  // namespace fsdp::engine

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
