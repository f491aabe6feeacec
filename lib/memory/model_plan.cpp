// SPDX-License-Identifier: Apache-2.0

#include "memory/model_plan.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/error.h"
#include "layout/flat_layout.h"
#include "memory/home_plan.h"
#include "memory/place_planes.h"
#include "memory/plane.h"

namespace fsdp::memory {

namespace {

// Checks that the bytes of each parameter's largest plane do not overflow: on one rank, the fp32 shard of a trainable
// parameter is the whole parameter.
void check_params(const GroupSpec &group) {
  for (const ParamSpec &param : group.params)
    plan_part("parameter", param.name, [&] {
      checked_multiply(param.element_count, dtype_size(param.frozen() ? param.dtype : FSDP_FLOAT32), "bytes");
    });
}

constexpr size_t max_planes = 10;  // enough for AdamW; more planes only cost a reallocation

BucketPlan make_bucket(const ModelSpec &spec, uint32_t group_index, std::vector<uint32_t> params) {
  const GroupSpec &group = spec.groups[group_index];
  const ParamSpec &first = group.params[params.front()];
  BucketPlan bucket;
  bucket.planes.reserve(max_planes);
  bucket.group = group_index;
  bucket.mesh = group.mesh;
  bucket.piece = first.piece;
  bucket.dtype = first.dtype;
  bucket.quantization = first.quantization;
  bucket.frozen = first.frozen();
  bucket.coded_states = first.coded_states;
  bucket.main_storage = main_storage_of(group, first.dtype);
  bucket.grad_dtype = group.grad_dtype ? group.grad_dtype : first.dtype;
  bucket.wire_dtype = group.reduce_dtype ? group.reduce_dtype : bucket.grad_dtype;
  std::vector<layout::TensorSpec> tensors;
  for (const uint32_t index : params) tensors.push_back(tensor_of(group.params[index]));
  bucket.layout = layout::build_flat_layout(tensors, spec.mesh_of(group).slots());
  if (bucket.quantization)
    bucket.scale_layout = std::make_shared<const layout::FlatLayout>(
        scales_whole_tensors(bucket.quantization) ? layout::build_tensor_scale_layout(bucket.layout)
                                                  : layout::build_scale_layout(bucket.layout, tensors));
  if (bucket.coded_states) {
    for (size_t t = 0; t < params.size(); ++t) tensors[t] = coded_tensor_of(group.params[params[t]]);
    bucket.state_layout =
        std::make_shared<const layout::FlatLayout>(layout::build_scale_layout(bucket.layout, tensors));
  }
  bucket.slices = spec.mesh_of(group).slices();
  bucket.params = std::move(params);
  return bucket;
}

void make_parts(const GroupSpec &group, std::span<const uint32_t> part_of, uint32_t group_index, ModelPlan &plan) {
  GroupPlan &of_group = plan.groups[group_index];
  of_group.first_part = static_cast<uint32_t>(plan.parts.size());
  of_group.part_count = 1;
  for (const uint32_t part : part_of) of_group.part_count = std::max(of_group.part_count, part + 1);
  plan.parts.resize(plan.parts.size() + of_group.part_count);
  for (PartPlan &part : plan.parts_of(of_group)) part.group = group_index;
  for (uint32_t i = 0; i < part_of.size(); ++i)
    if (!group.params[i].frozen()) plan.parts_of(of_group)[part_of[i]].params.push_back(i);
}

// One bucket for each (dtype, trainability, quantization, coded states, optimizer, piece, part) of the group, in order
// of first appearance.
void split_group(const ModelSpec &spec, const GradCut &cut, uint32_t group_index, ModelPlan &plan) {
  const GroupSpec &group = spec.groups[group_index];
  const std::vector<uint32_t> part_of = cut_group(group, cut);
  make_parts(group, part_of, group_index, plan);
  using Kind = std::tuple<fsdp_dtype, bool, fsdp_quantization, bool, bool, uint32_t, uint32_t>;
  constexpr size_t part_in_kind = 6;
  std::vector<std::pair<Kind, std::vector<uint32_t>>> kinds;
  for (uint32_t i = 0; i < group.params.size(); ++i) {
    const ParamSpec &param = group.params[i];
    const Kind kind{param.dtype,       param.frozen(), param.quantization, param.coded_states,
                    param.by_caller(), param.piece,    part_of[i]};
    auto found = std::find_if(kinds.begin(), kinds.end(), [&](const auto &entry) { return entry.first == kind; });
    if (found == kinds.end()) found = kinds.insert(kinds.end(), {kind, {}});
    found->second.push_back(i);
  }
  for (auto &[kind, params] : kinds) {
    const auto number = static_cast<uint32_t>(plan.buckets.size());
    GroupPlan &of_group = plan.groups[group_index];
    of_group.buckets.push_back(number);
    plan.buckets.push_back(make_bucket(spec, group_index, std::move(params)));
    const BucketPlan &bucket = plan.buckets[number];
    PiecePlan &piece = of_group.pieces[bucket.piece];
    piece.buckets.push_back(number);
    piece.element_count += bucket.layout.used_count;
    piece.padding_count += bucket.layout.full_count - bucket.layout.used_count;
    if (!bucket.frozen) plan.parts_of(of_group)[std::get<part_in_kind>(kind)].buckets.push_back(number);
  }
}

// The sort key of a plane: its kind, then its slot, then its index.
uint32_t place_in_list(const PlanePlan &plane) {
  return static_cast<uint32_t>(plane.kind) << 24 | uint32_t{plane.slot} << 16 | plane.index;
}

void plan_group(const ModelSpec &spec, const GradCut &cut, ModelPlan &plan, uint32_t group) {
  check_params(spec.groups[group]);
  const auto &params = spec.groups[group].params;
  plan.groups[group].pieces.resize(spec.groups[group].piece_count());
  if (std::ranges::any_of(params, &ParamSpec::quantized))
    for (const ParamSpec &param : params) plan.groups[group].scale_shapes.push_back(scale_shapes(param));
  split_group(spec, cut, group, plan);
  place_compute(spec, plan, group);
  place_grads(spec, plan, group);
  for (const PartPlan &part : plan.parts_of(plan.groups[group])) place_sent(spec, plan, part);
}

void count_elements(ModelPlan &plan) {
  for (const BucketPlan &bucket : plan.buckets) {
    plan.element_count = checked_add(plan.element_count, bucket.layout.used_count, "elements of the model");
    plan.padding_count =
        checked_add(plan.padding_count, bucket.layout.full_count - bucket.layout.used_count, "padding of the model");
    plan.layout_hash = plan.layout_hash * 0x9E3779B97F4A7C15ull + bucket.layout.hash;
  }
}

}  // namespace

layout::Slice slice_of(const layout::FlatLayout &layout, uint64_t tensor, Extent extent, const layout::Mesh &mesh,
                       uint32_t rank) {
  const uint32_t slices = mesh.slices();
  switch (extent) {
    case Extent::whole: return {0, layout.tensors[tensor].full_offset, 0, layout.tensors[tensor].count, 0};
    case Extent::group: return layout.slice(tensor, mesh.inner(rank) * slices, slices, slices);
    default: return layout.slice(tensor, mesh.slot(rank), 1, slices);
  }
}

const PlanePlan *BucketPlan::find(PlaneKind kind, uint32_t index) const {
  const auto found = std::find_if(planes.begin(), planes.end(),
                                  [&](const PlanePlan &plane) { return plane.kind == kind && plane.index == index; });
  return found == planes.end() ? nullptr : &*found;
}

uint64_t BucketPlan::bytes(const PlanePlan &plane, const char *what) const {
  return checked_multiply(count(plane), dtype_size(plane.dtype), what);
}

RoleBytes ModelPlan::role_bytes(std::span<const InnerPlace> places) const {
  RoleBytes bytes{};
  for (const RegionPlan &region : regions) {
    const InnerPlace &place = places[region.mesh];
    checked_multiply(region.own_bytes, place.ranks, region.what);
    uint64_t &sum = bytes[static_cast<size_t>(region.role)];
    sum = checked_add(sum, region.bytes_of(place.rank, place.ranks), region.what);
  }
  for (size_t role = 1; role < bytes.size(); ++role)
    bytes[0] = checked_add(bytes[0], bytes[role], "a rank's bytes in all roles");
  return bytes;
}

namespace {

class NameSearch {
 public:
  void add(const ParamSpec &param, const GroupSpec &group, const ModelSpec &spec) {
    const std::string owner = format_text("parameter '{}' of group '{}'", param.name, group.name);
    if (!param.frozen() || !param.quantized())
      take(param.name, owner);
    else
      for (const PlanePlan &plane : published_planes(param.dtype, param.quantization))
        take(stored_name(param, plane), format_text("plane {} of {}", plane_name(plane), owner));
    for (size_t s = 0; s < spec.states.size(); ++s) {
      const StateSpec &state = spec.states[s];
      if (!spec.has_state(param, state)) continue;
      const std::string what = format_text("state {} of {}", state.name, owner);
      const bool coded = param.coded_states && s < adamw_states;
      take(coded ? coded_name(param, state, false) : stored_name(param, state), what);
      if (coded) take(coded_name(param, state, true), "the scales of " + what);
    }
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

// Finds names that two tensors of the model would share in a checkpoint. Such a model could be trained but not saved.
std::vector<std::string> find_shared_names(const ModelSpec &spec) {
  NameSearch search;
  for (const GroupSpec &group : spec.groups)
    for (const ParamSpec &param : group.params) search.add(param, group, spec);
  return std::move(search.shared);
}

}  // namespace

std::vector<std::string> find_violations(const ModelSpec &spec) {
  std::vector<std::string> violations;
  ScheduleSpec schedule;
  schedule.kind = spec.schedule;
  schedule.visits = spec.visits;
  schedule.groups.reserve(spec.groups.size());
  for (const GroupSpec &group : spec.groups) {
    if (group.resident && spec.schedule == FSDP_SCHEDULE_INTERLEAVED)
      violations.push_back(
          format_text("group '{}' is RESIDENT, but FSDP_SCHEDULE_INTERLEAVED keeps forward and backward weights "
                      "apart; drop the flag or choose another schedule",
                      group.name));
    if (spec.plane_policy == FSDP_PLANES_BY_PHASE_AND_RECOMPUTE && spec.schedule == FSDP_SCHEDULE_INTERLEAVED &&
        has_forms(group))
      violations.push_back(format_text(
          "group '{}' has planes by phase, but FSDP_SCHEDULE_INTERLEAVED has no buffer for what a RECOMPUTE "
          "in a BACKWARD visit reads; take FSDP_PLANES_BY_PHASE, FSDP_PLANES_BOTH or another schedule",
          group.name));
    if (spec.schedule == FSDP_SCHEDULE_ANY && (group.resident || group.root))
      violations.push_back(format_text(
          "group '{}' is {}, but FSDP_SCHEDULE_ANY knows no order of visits; drop the flag, and keep a hold "
          "of the group as long as its weights are to stay",
          group.name, group.root ? "ROOT" : "RESIDENT"));
    else if (group.root && spec.schedule != FSDP_SCHEDULE_SEQUENTIAL)
      violations.push_back(
          format_text("group '{}' is ROOT, but only FSDP_SCHEDULE_SEQUENTIAL visits such a group first and last; drop "
                      "the flag, or name its visits with FSDP_SCHEDULE_VISITS",
                      group.name));
    for (const ParamSpec &param : group.params) {
      if (auto misfit = find_misfit(param, group.name)) violations.push_back(std::move(*misfit));
      if (group.mesh > 0 && scales_whole_tensors(param.quantization))
        violations.push_back(format_text(
            "parameter '{}' of group '{}': FSDP_QUANTIZE_FP8 finds one scale over the model's mesh, and the group has "
            "another mesh or outer_strategy; take FSDP_QUANTIZE_FP8_BLOCK or FSDP_QUANTIZE_MXFP8",
            param.name, group.name));
      if (auto misfit = find_storage_misfit(param, group)) violations.push_back(std::move(*misfit));
      if (auto misfit = find_matrix_misfit(param, group, spec.matrix_bytes)) violations.push_back(std::move(*misfit));
    }
    ScheduledGroup scheduled;
    scheduled.trainable = group.trainable();
    scheduled.piece_count = group.piece_count();
    schedule.groups.push_back(scheduled);
  }
  if (const uint64_t count = count_matrices(spec); count > max_matrices)
    violations.push_back(format_text("the model has {} matrices, more than {}", count, max_matrices));
  for (std::string &violation : find_home_violations(spec)) violations.push_back(std::move(violation));
  for (std::string &shared : find_shared_names(spec)) violations.push_back(std::move(shared));
  for (std::string &violation : find_violations(schedule)) violations.push_back(std::move(violation));
  return violations;
}

namespace {

ModelPlan plan_cut(const ModelSpec &spec, const GradCut &cut) {
  ModelPlan plan;
  name_regions(plan, spec.meshes.size());
  plan.groups.resize(spec.groups.size());
  plan.buckets.reserve(spec.groups.size());
  for (uint32_t g = 0; g < spec.groups.size(); ++g) {
    plan_part("group", spec.groups[g].name, [&] { plan_group(spec, cut, plan, g); });
    plan.param_count += spec.groups[g].params.size();
  }
  for (BucketPlan &bucket : plan.buckets) {
    plan_part("group", spec.groups[bucket.group].name, [&] { place_optimizer_planes(spec, plan, bucket); });
    std::ranges::sort(bucket.planes, {}, place_in_list);
    for (PlanePlan &plane : bucket.planes) plane.mesh = static_cast<uint16_t>(bucket.mesh);
  }
  place_pools(spec, cut, plan);
  count_elements(plan);
  size_scratch(spec, plan);
  return plan;
}

struct FittingCut {
  GradCut cut;
  ModelPlan plan;
};

uint64_t pool_bytes(const ModelPlan &plan) {
  uint64_t bytes = 0;
  for (const RegionPlan &region : plan.regions)
    if (region.id == RegionId::lent_grads && plan.grad_pool.size_bytes)
      bytes = checked_add(bytes, region.bytes, region.what);
  return bytes;
}

// The bytes of the smallest cut that would be tried with this limit; nothing if no cut fits.
std::optional<uint64_t> find_smallest(ModelSpec &spec, uint64_t limit) {
  spec.max_pending_bytes = limit;
  uint64_t least = UINT64_MAX;
  for (const GradCut &cut : list_cuts(spec)) least = std::min(least, pool_bytes(plan_cut(spec, cut)));
  return least <= limit ? std::optional(least) : std::nullopt;
}

bool is_enough(ModelSpec &spec, uint64_t limit) {
  spec.max_pending_bytes = limit;
  return std::ranges::any_of(list_cuts(spec),
                             [&](const GradCut &cut) { return pool_bytes(plan_cut(spec, cut)) <= limit; });
}

// Searches between an insufficient and a sufficient limit. Returns a sufficient limit that would be insufficient with
// one byte less.
uint64_t bisect_limits(ModelSpec &spec, uint64_t too_little, uint64_t enough) {
  while (enough - too_little > 1) {
    const uint64_t middle = too_little + (enough - too_little) / 2;
    (is_enough(spec, middle) ? enough : too_little) = middle;
  }
  return enough;
}

// Starts from the sufficient limit `bytes`, and returns the least sufficient limit that it finds. The spec's own limit
// is insufficient. Which cuts are tried depends on the limit: a cut that fits one limit may not be tried when the limit
// is the cut's own size.
uint64_t find_least(const ModelSpec &spec, uint64_t bytes) {
  ModelSpec smaller = spec;
  const uint64_t too_little = spec.max_pending_bytes;
  while (bytes - 1 > too_little) {
    const auto fits = find_smallest(smaller, bytes - 1);
    if (!fits) break;
    if (*fits <= too_little || !is_enough(smaller, *fits))
      return bisect_limits(smaller, std::max(*fits, too_little), bytes - 1);
    bytes = *fits;
  }
  return bytes;
}

// Of the cuts that fit, those with the most gradients alive at once. If the first of them divides no group, the others
// are not needed.
std::vector<FittingCut> find_fitting_cuts(const ModelSpec &spec) {
  std::vector<FittingCut> fitting;
  uint64_t bytes = 0;
  for (const GradCut &cut : list_cuts(spec)) {
    const auto suffices = [&](const FittingCut &one) {
      return cut.pending != one.cut.pending || one.plan.parts.size() == one.plan.groups.size();
    };
    if (!fitting.empty() && suffices(fitting.front())) break;
    ModelPlan plan = plan_cut(spec, cut);
    bytes = pool_bytes(plan);
    if (bytes <= spec.max_pending_bytes) fitting.push_back({cut, std::move(plan)});
  }
  if (fitting.empty()) refuse_pending_bytes(spec, find_least(spec, bytes));
  return fitting;
}

// The first fitting cut whose padding exceeds the least padding by at most 1 % of the elements.
FittingCut choose_cut(const ModelSpec &spec) {
  std::vector<FittingCut> fitting = find_fitting_cuts(spec);
  uint64_t least = UINT64_MAX;
  for (const FittingCut &one : fitting) least = std::min(least, one.plan.padding_count);
  const auto pads_little = [&](const FittingCut &one) {
    return one.plan.padding_count - least <= one.plan.element_count / 100;
  };
  return std::move(*std::ranges::find_if(fitting, pads_little));
}

// In debug mode each part has its own buffer, but groups are divided in the same way as without debug mode.
ModelPlan plan_best_cut(const ModelSpec &spec) {
  if (!spec.max_pending_bytes) return plan_cut(spec, {spec.pending_groups()});
  if (!spec.debug) return choose_cut(spec).plan;
  ModelSpec usual = spec;
  usual.debug = false;
  return plan_cut(spec, choose_cut(usual).cut);
}

}  // namespace

ModelPlan plan_model(const ModelSpec &spec) {
  ModelPlan plan = plan_best_cut(spec);
  plan_part("the matrices", [&] { plan_matrices(spec, plan); });
  // Computes the largest sums now, so that a later request for them cannot fail.
  std::vector<InnerPlace> first;
  for (const layout::Mesh &mesh : spec.meshes) first.push_back({0, mesh.inner_size});
  plan.role_bytes(first);
  return plan;
}

// Checks the promises of a model plan, without the code that makes the plan.

namespace {

std::string check_bucket(const BucketPlan &bucket, const GroupSpec &group) {
  std::vector<layout::TensorSpec> tensors;
  for (const uint32_t index : bucket.params) tensors.push_back(tensor_of(group.params[index]));
  std::string broken = validate(bucket.layout, tensors);
  if (broken.empty() && bucket.quantization)
    broken = scales_whole_tensors(bucket.quantization) ? validate_tensor_scales(bucket.layout, *bucket.scale_layout)
                                                       : validate_scales(bucket.layout, *bucket.scale_layout, tensors);
  if (broken.empty() && bucket.coded_states) {
    for (size_t t = 0; t < tensors.size(); ++t) tensors[t] = coded_tensor_of(group.params[bucket.params[t]]);
    broken = validate_scales(bucket.layout, *bucket.state_layout, tensors);
  }
  return broken.empty() ? broken : format_text("a bucket of group '{}': {}", group.name, broken);
}

std::string check_pool(const char *name, const PoolPlan &pool, std::span<const PoolRequest> requests) {
  const std::string broken = validate(pool, requests);
  return broken.empty() ? broken : format_text("the pool of {}: {}", name, broken);
}

// Does the plane keep its bytes in a region as long as the model exists? Pools and buffers that take turns are checked
// separately.
bool lies_alone(const PlanePlan &plane) {
  return !plane.again && plane.region != RegionId::gathered && plane.region != RegionId::lent_grads &&
         !takes_turns(plane.kind) && plane.region != RegionId::rounded && plane.region != RegionId::received;
}

struct Lies {
  const RegionPlan *region;
  uint64_t begin, end;
  const BucketPlan *bucket;
};

std::string check_planes(const ModelPlan &plan, const ModelSpec &spec) {
  std::vector<Lies> all;
  for (const BucketPlan &bucket : plan.buckets)
    for (const PlanePlan &plane : bucket.planes) {
      const RegionPlan &region = plan.region(plane);
      const uint64_t bytes = bucket.count(plane) * dtype_size(plane.dtype);
      if (plane.offset > region.bytes || bytes > region.bytes - plane.offset)
        return format_text("a plane of group '{}' ends at byte {} of {}, which have {}", spec.groups[bucket.group].name,
                           plane.offset + bytes, region.what, region.bytes);
      const uint64_t turn = region.bytes / partial_turns;
      if (takes_turns(plane.kind) &&
          (plane.offset < plane.index * turn || plane.offset + bytes > (plane.index + 1) * turn))
        return format_text("the sums in turn {} of group '{}' lie in those of another turn", plane.index,
                           spec.groups[bucket.group].name);
      if (lies_alone(plane)) all.push_back({&region, plane.offset, plane.offset + bytes, &bucket});
    }
  std::ranges::stable_sort(all, {}, [](const Lies &one) { return std::tuple(one.region, one.begin, one.end); });
  for (size_t i = 1; i < all.size(); ++i)
    if (all[i].region == all[i - 1].region && all[i].begin < all[i - 1].end)
      return format_text("planes of the groups '{}' and '{}' share bytes of {}",
                         spec.groups[all[i - 1].bucket->group].name, spec.groups[all[i].bucket->group].name,
                         all[i].region->what);
  return {};
}

}  // namespace

std::string validate(const ModelPlan &plan, const ModelSpec &spec) {
  for (const BucketPlan &bucket : plan.buckets)
    if (std::string broken = check_bucket(bucket, spec.groups[bucket.group]); !broken.empty()) return broken;
  if (std::string broken = check_planes(plan, spec); !broken.empty()) return broken;
  if (std::string broken = check_pool("gathered weights", plan.gather_pool, plan.visits.gathered); !broken.empty())
    return broken;
  return check_pool("full gradients", plan.grad_pool, plan.visits.grads);
}

}  // namespace fsdp::memory
