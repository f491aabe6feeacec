// SPDX-License-Identifier: Apache-2.0

#include "engine/runtime/param_settings.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/error.h"

namespace fsdp::engine {
namespace {

template <typename T>
uint64_t hash_of(const memory::ModelSpec &spec, T memory::ParamSpec::*setting) noexcept {
  uint64_t hash = 0;
  for (const memory::GroupSpec &group : spec.groups)
    for (const memory::ParamSpec &param : group.params) hash = XXH64(&(param.*setting), sizeof(T), hash);
  return hash;
}

// The value at `index`, or `missing` if the rank's bytes are too short.
template <typename T>
T value_at(const std::vector<std::byte> &bytes, size_t index, T missing) {
  if ((index + 1) * sizeof(T) > bytes.size()) return missing;
  if constexpr (std::is_same_v<T, bool>) return bytes[index] != std::byte{0};
  T value;
  std::memcpy(&value, bytes.data() + index * sizeof(T), sizeof value);
  return value;
}

template <typename T>
struct SettingDifference {
  const char *param, *group;
  T first, odd;
};

// Finds the first parameter for which two ranks have different values. Collective: both ranks send their values of all
// parameters. Returns an empty text if all values are equal.
template <typename T>
std::optional<SettingDifference<T>> find_difference(const memory::ModelSpec &spec, T memory::ParamSpec::*setting,
                                                    T missing, transport::Team &team, uint32_t first, uint32_t odd,
                                                    const char *what) {
  std::vector<std::byte> mine;
  if (team.rank() == first || team.rank() == odd)
    for (const memory::GroupSpec &group : spec.groups)
      for (const memory::ParamSpec &param : group.params) {
        const auto bytes = std::as_bytes(std::span(&(param.*setting), 1));
        mine.insert(mine.end(), bytes.begin(), bytes.end());
      }
  const auto all = team.all_gather(mine, what);
  size_t index = 0;
  for (const memory::GroupSpec &group : spec.groups)
    for (const memory::ParamSpec &param : group.params) {
      const T by_first = value_at(all[first], index, missing), by_odd = value_at(all[odd], index, missing);
      if (by_first != by_odd) return SettingDifference<T>{param.name.c_str(), group.name.c_str(), by_first, by_odd};
      ++index;
    }
  return {};
}

}  // namespace

uint64_t hash_trained(const memory::ModelSpec &spec) noexcept { return hash_of(spec, &memory::ParamSpec::trained); }

uint64_t hash_lr_scales(const memory::ModelSpec &spec) noexcept { return hash_of(spec, &memory::ParamSpec::lr_scale); }

bool trains_all(const memory::ModelSpec &spec) noexcept {
  return std::ranges::all_of(spec.groups, [](const memory::GroupSpec &group) {
    return std::ranges::all_of(group.params, &memory::ParamSpec::trained);
  });
}

std::string compare_trained(const memory::ModelSpec &spec, transport::Team &team, uint32_t first, uint32_t odd) {
  const auto found = find_difference(spec, &memory::ParamSpec::trained, false, team, first, odd,
                                     "parameters that are trained on some ranks only");
  if (!found)
    return format_text("rank {} trains other parameters than rank {} (fsdp_set_param_trainable)", team.world_rank(odd),
                       team.world_rank(first));
  return format_text("rank {} {} parameter '{}' of group '{}', rank {} {} (fsdp_set_param_trainable)",
                     team.world_rank(odd), found->odd ? "trains" : "does not train", found->param, found->group,
                     team.world_rank(first), found->first ? "does" : "does not");
}

std::string compare_lr_scales(const memory::ModelSpec &spec, transport::Team &team, uint32_t first, uint32_t odd) {
  const auto found =
      find_difference(spec, &memory::ParamSpec::lr_scale, -1.0, team, first, odd, "lr_scales that differ");
  if (!found)
    return format_text("rank {} has other lr_scales than rank {}", team.world_rank(odd), team.world_rank(first));
  return format_text("rank {} has lr_scale {} for parameter '{}' of group '{}', rank {} {}", team.world_rank(odd),
                     found->odd, found->param, found->group, team.world_rank(first), found->first);
}

}  // namespace fsdp::engine
