// SPDX-License-Identifier: Apache-2.0
// Ranks that declared different models must learn it at the seal, not from wrong numbers later. Each writes its
// declaration as lines; a hash tells whether all agree, and only if not the lines travel to find the first difference.
#include <algorithm>
#include <string>
#include <vector>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/dtype.h"
#include "engine/declaration.h"
#include "transport/exchange.h"

namespace fsdp::engine {
namespace {

std::string describe_param(const memory::GroupSpec &group, const memory::ParamSpec &param) {
  const std::string box = param.is_box() ? format_text(" from [{}] on of [{}]", fmt::join(param.global_offset, ", "),
                                                       fmt::join(param.global_shape, ", "))
                                         : "";
  return format_text(
      "parameter '{}' of group '{}': shape [{}]{}, dtype {}, flags {:#x}, granule {} x {}, lr_scale {}{}{}", param.name,
      group.name, fmt::join(param.shape, ", "), box, dtype_name(param.dtype), param.flags, param.granule,
      param.granule_rows, param.lr_scale,
      param.quantized() ? format_text(", quantization {}", quantization_name(param.quantization)) : "",
      param.skips_missing() ? ", FSDP_MISSING_GRAD_SKIP" : "");
}

void describe_group(std::vector<std::string> &lines, const memory::GroupSpec &group) {
  lines.push_back(format_text(
      "group '{}': strategy {}, grad dtype {}, reduce dtype {}, reduce policy {}, resident {}, root {}", group.name,
      group.strategy, group.grad_dtype, group.reduce_dtype, group.reduce_policy, group.resident, group.root));
  for (const auto &param : group.params) lines.push_back(describe_param(group, param));
}

std::vector<std::string> describe_declaration(const memory::ModelSpec &spec, const memory::ModelPlan &plan) {
  std::vector<std::string> lines;
  lines.push_back(format_text("mesh: replicate {} x shard {}, {} a host, outer axis {}, reduction block {}, ranks {}",
                              spec.mesh.replicate_size, spec.mesh.shard_size, spec.mesh.inner_size,
                              static_cast<int>(spec.mesh.outer), spec.mesh.reduction_block,
                              fmt::join(spec.mesh.ranks, ", ")));
  lines.push_back(
      format_text("policy: debug {}, unshard mode {}, grad op {}, grad factor {}, prefetches {}, prefetch depth {}, "
                  "prefetch bytes {}, "
                  "max pending groups {}, max pending bytes {}, force communication {}, GPUs {}, device transport {}, "
                  "save staging bytes {}, "
                  "scale rounding {}, quantize from {}, scale rule {}, plane policy {}, private views {}",
                  spec.debug, spec.unshard_mode, spec.grad_op, spec.grad_factor, spec.prefetches, spec.prefetch_depth,
                  spec.prefetch_bytes, spec.max_pending_groups, spec.max_pending_bytes, spec.force_communication,
                  !spec.host_memory, spec.device_transport, spec.save_staging_bytes, spec.scale_rounding,
                  dtype_name(spec.quantize_from), spec.scale_rule, spec.plane_policy, spec.private_views));
  lines.push_back(
      format_text("schedule: kind {}, {} visits, {} held groups", spec.schedule, spec.visits.size(), spec.held_groups));
  for (const auto &visit : spec.visits)
    lines.push_back(format_text("visit: group {}, phase {}", visit.group_index, visit.phase));
  for (const auto &state : spec.states)
    lines.push_back(format_text("optimizer state '{}': {}", state.name, dtype_name(state.dtype)));
  for (const auto &group : spec.groups) describe_group(lines, group);
  lines.push_back(format_text("number of groups: {}", spec.groups.size()));
  lines.push_back(format_text("layout hash: {:016x}", plan.layout_hash));
  return lines;
}

std::string join(const std::vector<std::string> &lines) {
  std::string text;
  for (const auto &line : lines) text.append(line).push_back('\n');
  return text;
}

std::string_view line_of(std::string_view text, size_t index) {
  for (; index; --index) {
    const size_t end = text.find('\n');
    if (end == text.npos) return "(nothing)";
    text.remove_prefix(end + 1);
  }
  if (text.empty()) return "(nothing)";
  return text.substr(0, text.find('\n'));
}

size_t first_difference(std::string_view a, std::string_view b) {
  size_t line = 0;
  for (size_t i = 0; i < std::min(a.size(), b.size()) && a[i] == b[i]; ++i) line += a[i] == '\n';
  return line;
}

// Two whole lines with the longest names are more than a message holds: then the start and what differs.
std::string excerpt(std::string_view line, std::string_view other) {
  constexpr size_t most = 400, head = 120, lead = 40;
  if (line.size() <= most) return std::string(line);
  const auto same =
      static_cast<size_t>(std::mismatch(line.begin(), line.end(), other.begin(), other.end()).first - line.begin());
  const size_t from = std::max(head, same - std::min(same, lead));
  return format_text("{}{}{}", line.substr(0, head), from > head ? "..." : "", line.substr(from, most - head));
}

// The same on every rank: the lowest rank that differs from rank 0, and where.
[[noreturn]] void report_difference(transport::Team &team, const std::string &mine, uint32_t model) {
  const auto all = team.all_gather(std::as_bytes(std::span(mine)), "comparing declarations");
  const auto text = [&](size_t r) {
    return std::string_view(reinterpret_cast<const char *>(all[r].data()), all[r].size());
  };
  transport::await_readers(team);
  for (uint32_t r = 1; r < all.size(); ++r) {
    if (text(r) == text(0)) continue;
    const size_t line = first_difference(text(0), text(r));
    const std::string_view usual = line_of(text(0), line), odd = line_of(text(r), line);
    const uint32_t zero = team.world_rank(0), other = team.world_rank(r);
    fail_rank(FSDP_MISMATCH, static_cast<int32_t>(other),
              "fsdp_seal_model: model {}: ranks declared it differently; the first difference is: rank {} has {}; rank "
              "{} has {}",
              model, zero, excerpt(usual, odd), other, excerpt(odd, usual));
  }
  fail(FSDP_INTERNAL, "fsdp_seal_model: hashes of equal declarations differ");
}

}  // namespace

void verify_declarations(transport::Team &team, const memory::ModelSpec &spec, const memory::ModelPlan &plan,
                         uint32_t model) {
  const std::string mine = join(describe_declaration(spec, plan));
  const uint64_t hash = XXH64(mine.data(), mine.size(), 0);
  if (!team.agree({.same = hash}, "fsdp_seal_model: declarations").agreed()) report_difference(team, mine, model);
}

}  // namespace fsdp::engine
