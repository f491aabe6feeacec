// SPDX-License-Identifier: Apache-2.0
#include "memory/grad_parts.h"

#include <algorithm>
#include <string>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/error.h"
#include "layout/flat_layout.h"

namespace fsdp::memory {
namespace {

bool takes_turns(const GroupSpec &group) { return group.reduce_policy != FSDP_REDUCE_POLICY_LAST; }

// The bytes of one parameter's gradient in a layout, apart from the rounding of the ranks' slices.
uint64_t grad_bytes(const GroupSpec &group, const ParamSpec &param) {
  const uint64_t elements = round_up(param.element_count, layout::alignment, "elements of a full gradient");
  return checked_multiply(elements, dtype_size(group.grad_dtype ? group.grad_dtype : param.dtype), "full gradients");
}

struct Largest {
  const GroupSpec *group = nullptr;
  const ParamSpec *param = nullptr;
  uint64_t bytes = 0;
  uint32_t count = 0;  // number of parameters whose gradients take turns
};

template <class Visit>
void for_each_turn(const GroupSpec &group, Visit &&visit) {
  if (!takes_turns(group)) return;
  for (const ParamSpec &param : group.params)
    if (!param.frozen()) visit(param, grad_bytes(group, param));
}

Largest find_largest(const ModelSpec &spec) {
  Largest largest;
  for (const GroupSpec &group : spec.groups)
    for_each_turn(group, [&](const ParamSpec &param, uint64_t bytes) {
      ++largest.count;
      if (bytes > largest.bytes) largest.group = &group, largest.param = &param, largest.bytes = bytes;
    });
  return largest;
}

// Do at least half of the groups stay whole? Groups with parameters much larger than all others are the exception.
bool keeps_most_whole(const ModelSpec &spec, uint64_t part_bytes) {
  size_t groups = 0, whole = 0;
  for (const GroupSpec &group : spec.groups) {
    uint64_t bytes = 0;
    for_each_turn(group, [&](const ParamSpec &, uint64_t own) { bytes = checked_add(bytes, own, "full gradients"); });
    groups += bytes != 0;
    whole += bytes != 0 && bytes <= part_bytes;
  }
  return 2 * whole >= groups;
}

}  // namespace

// Tries two kinds of sizes for parts: equal shares of the limit, and the rest of the limit beside the largest
// parameter. Also tries smaller sizes, because some runs pad more than others. If each share had room only for one
// large parameter, the small parameters beside it would be cut off. Each of them would cost a reduce, and two large
// gradients would hardly ever be alive at once.
std::vector<GradCut> list_cuts(const ModelSpec &spec) {
  const Largest largest = find_largest(spec);
  const uint64_t limit = spec.max_pending_bytes;
  std::vector<GradCut> cuts;
  const auto add = [&](uint32_t pending, uint64_t bytes) {
    for (const uint64_t eighths : {8, 7, 6}) cuts.push_back({pending, bytes / 8 * eighths + bytes % 8});
  };
  for (uint32_t pending = std::clamp(spec.max_pending_groups, 1u, std::max(largest.count, 1u)); pending > 1;
       pending = pending > 4 ? pending / 2 : pending - 1) {
    const uint64_t share = limit / pending;
    if (share >= largest.bytes)
      add(pending, share);
    else if (limit > largest.bytes && keeps_most_whole(spec, (limit - largest.bytes) / (pending - 1)))
      add(pending, (limit - largest.bytes) / (pending - 1));
  }
  add(1, limit);
  // Gradients that stay open, such as those of root groups, may leave only a part of the limit.
  for (uint64_t bytes = limit / 2, turns = 6; turns-- > 0 && bytes >= largest.bytes / 8; bytes /= 2)
    cuts.push_back({1, bytes});
  cuts.push_back({1, 0});
  return cuts;
}

// Begins to cut at the last parameter, where a backward pass begins.
std::vector<uint32_t> cut_group(const GroupSpec &group, const GradCut &cut) {
  std::vector<uint32_t> part_of(group.params.size(), 0);
  if (!takes_turns(group) || cut.part_bytes == UINT64_MAX) return part_of;
  uint32_t part = 0;
  uint64_t bytes = 0;
  for (size_t i = group.params.size(); i-- > 0;) {
    if (group.params[i].frozen()) continue;
    const uint64_t own = grad_bytes(group, group.params[i]);
    if (bytes && (bytes >= cut.part_bytes || own > cut.part_bytes - bytes)) ++part, bytes = 0;
    part_of[i] = part;
    bytes = checked_add(bytes, own, "full gradients");
  }
  for (size_t i = 0; i < part_of.size(); ++i) part_of[i] = group.params[i].frozen() ? 0 : part - part_of[i];
  return part_of;
}

void refuse_pending_bytes(const ModelSpec &spec, uint64_t least_bytes) {
  const Largest largest = find_largest(spec);
  std::string roots;
  for (const GroupSpec &group : spec.groups)
    if (group.root && group.trainable() && takes_turns(group))
      roots += format_text("{}'{}'", roots.empty() ? "; besides, those of root groups are all alive at once: " : ", ",
                           group.name);
  fail(FSDP_INVALID_ARGUMENT,
       "max_pending_bytes is {}, which is too little: the largest full gradient that cannot be divided is that of "
       "parameter '{}' of group '{}' with {} bytes{}, and the least that would do for this model, padding included, is "
       "{}",
       spec.max_pending_bytes, largest.param->name, largest.group->name, largest.bytes, roots, least_bytes);
}

}  // namespace fsdp::memory
