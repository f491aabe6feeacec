// SPDX-License-Identifier: Apache-2.0
#include "engine/gradients/shard_states.h"

#include <string>

namespace fsdp::engine {
namespace {

constexpr std::string_view scales_suffix = ".absmax";

bool is_coded(const Shard &shard, size_t state) {
  return shard.bucket->plan->coded_states && state < memory::adamw_states;
}

bool names_scales(std::string_view name, std::string_view state) {
  return name.size() == state.size() + scales_suffix.size() && name.starts_with(state) && name.ends_with(scales_suffix);
}

StatePart state_part(const Runtime &runtime, const Shard &shard, PlaneKind kind, size_t index) {
  const Plane &plane = shard.bucket->plane(kind, static_cast<uint32_t>(index));
  return {plane.at(runtime.slice_of(plane, shard.tensor, plane.plan->owned)),
          kind == PlaneKind::state ? &shard.slice.count : &shard.scale_count, plane.dtype()};
}

std::string list_states(const Runtime &runtime, const Shard &shard) {
  std::string known;
  const auto &states = runtime.spec.states;
  for (size_t s = 0; s < states.size(); ++s) {
    if (!runtime.spec.has_state(shard.param(runtime), states[s])) continue;
    known += format_text("{}'{}'", known.empty() ? "" : ", ", states[s].name);
    if (is_coded(shard, s)) known += format_text(", '{}{}'", states[s].name, scales_suffix);
  }
  return known.empty() ? "none" : known;
}

}  // namespace

StatePart find_state(const Runtime &runtime, const Shard &shard, std::string_view name, const char *call) {
  const auto &states = runtime.spec.states;
  for (size_t s = 0; s < states.size(); ++s) {
    if (!runtime.spec.has_state(shard.param(runtime), states[s])) continue;
    if (states[s].name == name) return state_part(runtime, shard, PlaneKind::state, s);
    if (is_coded(shard, s) && names_scales(name, states[s].name))
      return state_part(runtime, shard, PlaneKind::state_scales, s);
  }
  fail(FSDP_INVALID_ARGUMENT, "{}: the shard of '{}' has no optimizer state '{}'; it has: {}", call,
       shard.param(runtime).name, name, list_states(runtime, shard));
}

}  // namespace fsdp::engine
