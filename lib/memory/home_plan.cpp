// SPDX-License-Identifier: Apache-2.0
#include "memory/home_plan.h"

#include <algorithm>
#include <numeric>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/text.h"

namespace fsdp::memory {
namespace {

constexpr auto turns_name = "segments of a file";

// A plane of all slots has this rank's elements in pieces, one in each sub-bucket. A piece may end inside of two pages.
uint64_t cut_pages(const BucketPlan &bucket) {
  const auto cut = [](const PlanePlan &plane) { return plane.in_file() && plane.extent == Extent::group; };
  return std::ranges::any_of(bucket.planes, cut) ? 2 * io_alignment * bucket.layout.sub_buckets.size() : 0;
}

uint64_t turn_of(const ModelSpec &spec, const BucketPlan &bucket) {
  const std::vector<uint64_t> sizes = home_planes(bucket);
  if (sizes.empty()) return 0;
  const uint64_t count = spec.groups[bucket.group].strategy == FSDP_STRATEGY_NO_SHARD ? bucket.layout.full_count
                                                                                      : bucket.layout.shard_count;
  const uint64_t elements = std::min(segment_elements(sizes, spec.homes.turn_bytes), count);
  return checked_add(home_bytes(sizes, elements), cut_pages(bucket), turns_name);
}

}  // namespace

uint64_t segment_elements(std::span<const uint64_t> element_bytes, uint64_t turn_bytes) {
  const uint64_t all = std::accumulate(element_bytes.begin(), element_bytes.end(), uint64_t{0});
  const uint64_t step = io_alignment / *std::ranges::min_element(element_bytes);
  return std::max(turn_bytes / all / step * step, step);
}

uint64_t home_bytes(std::span<const uint64_t> element_bytes, uint64_t count) {
  uint64_t bytes = 0;
  for (const uint64_t size : element_bytes)
    bytes =
        checked_add(bytes, round_up(checked_multiply(count, size, turns_name), io_alignment, turns_name), turns_name);
  return bytes;
}

std::vector<uint64_t> home_planes(const BucketPlan &bucket) {
  std::vector<uint64_t> sizes;
  for (const PlanePlan &plane : bucket.planes)
    if (plane.in_file()) sizes.push_back(dtype_size(plane.dtype));
  return sizes;
}

bool has_home(const BucketPlan &bucket) { return std::ranges::any_of(bucket.planes, &PlanePlan::in_file); }

uint64_t turn_bytes_of(const ModelSpec &spec, const ModelPlan &plan) {
  uint64_t bytes = 0;
  for (const BucketPlan &bucket : plan.buckets) bytes = std::max(bytes, turn_of(spec, bucket));
  return bytes;
}

namespace {

const char *home_name(fsdp_home home) { return home == FSDP_HOME_FILE ? "FSDP_HOME_FILE" : "FSDP_HOME_HOST"; }

// Does any parameter have main weights that are not its compute weights?
bool has_separate_main(const ModelSpec &spec) {
  for (const GroupSpec &group : spec.groups)
    for (const ParamSpec &param : group.params)
      if (!param.frozen() && param.dtype != FSDP_FLOAT32 && main_storage_of(group, param.dtype) != FSDP_MAIN_NONE)
        return true;
  return false;
}

// Does any parameter have main grads with memory of their own?
bool has_separate_grads(const ModelSpec &spec) {
  for (const GroupSpec &group : spec.groups)
    for (const ParamSpec &param : group.params)
      if (!param.frozen() && group.strategy != FSDP_STRATEGY_NO_SHARD &&
          !sums_in_full_grads(spec, group, group.grad_dtype ? group.grad_dtype : param.dtype))
        return true;
  return false;
}

bool has_states(const ModelSpec &spec) {
  for (const GroupSpec &group : spec.groups)
    for (const ParamSpec &param : group.params)
      if (spec.state_count(param)) return true;
  return false;
}

}  // namespace

std::vector<std::string> find_home_violations(const ModelSpec &spec) {
  std::vector<std::string> violations;
  if (spec.homes.main != FSDP_HOME_DEVICE && !has_separate_main(spec))
    violations.push_back(format_text(
        "main_home is {}, but no parameter has main weights apart from its compute weights: parameters in float32 are "
        "their own main weights, and FSDP_MAIN_NONE has none; leave main_home 0",
        home_name(spec.homes.main)));
  if (spec.homes.state != FSDP_HOME_DEVICE && !has_states(spec))
    violations.push_back(format_text("state_home is {}, but no parameter has an optimizer state; leave state_home 0",
                                     home_name(spec.homes.state)));
  if (spec.homes.grad != FSDP_HOME_DEVICE && !has_separate_grads(spec))
    violations.push_back(format_text(
        "grad_home is {}, but no parameter has main grads with memory of their own: FSDP_STRATEGY_NO_SHARD keeps them "
        "where peers read them, and FSDP_REDUCE_POLICY_LAST sums gradients in float32 in place; leave grad_home 0",
        home_name(spec.homes.grad)));
  if (spec.homes.main != FSDP_HOME_FILE) return violations;
  for (const GroupSpec &group : spec.groups)
    for (const ParamSpec &param : group.params)
      if (param.quantized() && !param.frozen())
        violations.push_back(format_text(
            "parameter '{}' of group '{}' is quantized, and its codes are made from main weights in memory: main_home "
            "cannot be FSDP_HOME_FILE; state_home can",
            param.name, group.name));
  return violations;
}

}  // namespace fsdp::memory
