// SPDX-License-Identifier: Apache-2.0
#include "memory/stored_names.h"

#include <unordered_map>

#include "base/error.h"
#include "memory/plane.h"

namespace fsdp::memory {
namespace {

class NameSearch {
 public:
  void add(const ParamSpec &param, const GroupSpec &group, const std::vector<StateSpec> &states) {
    const std::string owner = format_text("parameter '{}' of group '{}'", param.name, group.name);
    if (!param.frozen() || !param.quantized())
      take(param.name, owner);
    else
      for (const PlanePlan &plane : published_planes(param.dtype, param.quantization))
        take(stored_name(param, plane), format_text("plane {} of {}", plane_name(plane), owner));
    if (param.frozen()) return;
    for (const StateSpec &state : states)
      take(stored_name(param, state), format_text("state {} of {}", state.name, owner));
  }

  std::vector<std::string> shared;

 private:
  void take(const std::string &name, const std::string &what) {
    const auto [found, is_new] = owners_.emplace(name, what);
    if (!is_new)
      shared.push_back(format_text("{} and {} would both be '{}' in a checkpoint, which has each name once",
                                   found->second, what, name));
  }

  std::unordered_map<std::string, std::string> owners_;
};

}  // namespace

std::string stored_name(const ParamSpec &param, const PlanePlan &plane) {
  return format_text("{}.{}", param.name, plane_name(plane));
}

std::string stored_name(const ParamSpec &param, const StateSpec &state) {
  return format_text("state.{}.{}", param.name, state.name);
}

std::vector<std::string> find_shared_names(const ModelSpec &spec) {
  NameSearch search;
  for (const GroupSpec &group : spec.groups)
    for (const ParamSpec &param : group.params) search.add(param, group, spec.states);
  return std::move(search.shared);
}

}  // namespace fsdp::memory
