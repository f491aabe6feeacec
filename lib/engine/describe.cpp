// SPDX-License-Identifier: Apache-2.0
// Names are the only free text in it.
#include "engine/describe.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <span>

#include "base/dtype.h"
#include "base/error.h"
#include "base/json.h"

namespace fsdp::engine {
namespace {

using Out = std::back_insert_iterator<std::string>;

// What is published of quantized parameters, as fsdp_get_plane names it; bytes of the whole buffers, with padding.
void describe_planes(Out out, const memory::BucketPlan &bucket) {
  fmt::format_to(out, "\"quantization\": \"{}\", \"planes\": [", quantization_name(bucket.quantization));
  const char *separator = "";
  for (const memory::PlanePlan &plane : bucket.planes) {
    if (!memory::is_published(plane.kind)) continue;
    memory::PlanePlan whole = plane;
    whole.extent = memory::Extent::whole;
    fmt::format_to(out, "{}{{\"name\": \"{}\", \"dtype\": \"{}\", \"full_bytes\": {}}}", separator,
                   memory::plane_name(plane), dtype_name(plane.dtype), bucket.bytes(whole, "a plane"));
    separator = ", ";
  }
  fmt::format_to(out, "], ");
}

void describe_bucket(Out out, const memory::GroupSpec &group, const memory::BucketPlan &bucket) {
  fmt::format_to(out, "{{\"dtype\": \"{}\", \"grad_dtype\": \"{}\", \"reduce_dtype\": \"{}\", \"frozen\": {}, ",
                 dtype_name(bucket.dtype), dtype_name(bucket.grad_dtype), dtype_name(bucket.wire_dtype), bucket.frozen);
  if (bucket.quantization) describe_planes(out, bucket);
  fmt::format_to(out, "\"shard_count\": {}, \"full_count\": {}, \"padding_count\": {}, \"sub_buckets\": [",
                 bucket.layout.shard_count, bucket.layout.full_count,
                 bucket.layout.full_count - bucket.layout.used_count);
  for (size_t s = 0; s < bucket.layout.sub_buckets.size(); ++s) {
    const auto &sub = bucket.layout.sub_buckets[s];
    fmt::format_to(out, "{}{{\"granule\": {}, \"shard_count\": {}, \"full_offset\": {}}}", s ? ", " : "", sub.granule,
                   sub.shard_count, sub.full_offset);
  }
  fmt::format_to(out, "], \"parameters\": [");
  for (size_t t = 0; t < bucket.params.size(); ++t) {
    const auto &param = group.params[bucket.params[t]];
    fmt::format_to(out, "{}\n      {{\"name\": {}, \"shape\": [{}], \"full_offset\": {}, \"granule\": {}", t ? "," : "",
                   quote_json(param.name), fmt::join(param.shape, ", "), bucket.layout.tensors[t].full_offset,
                   bucket.layout.tensors[t].granule);
    if (param.is_box())
      fmt::format_to(out, ", \"global_shape\": [{}], \"global_offset\": [{}]", fmt::join(param.global_shape, ", "),
                     fmt::join(param.global_offset, ", "));
    fmt::format_to(out, "}}");
  }
  fmt::format_to(out, "]}}");
}

// Where full gradients are lent by parts, which are as many slots of the pool.
void describe_parts(Out out, const memory::GroupSpec &group, std::span<const memory::PartPlan> parts, uint64_t behind) {
  fmt::format_to(out, "\"full_grad_parts\": [");
  for (const memory::PartPlan &part : parts) {
    fmt::format_to(out, "{}{{\"bytes\": {}, \"offset\": {}, \"parameters\": [", &part == parts.data() ? "" : ", ",
                   part.full_grad.bytes, part.full_grad.offset + behind);
    for (const uint32_t param : part.params)
      fmt::format_to(out, "{}{}", param == part.params.front() ? "" : ", ", quote_json(group.params[param].name));
    fmt::format_to(out, "]}}");
  }
  fmt::format_to(out, "], ");
}

void describe_group(Out out, const memory::ModelSpec &spec, const memory::ModelPlan &plan, size_t g) {
  const memory::GroupPlan &group = plan.groups[g];
  const bool lent = group.trainable && !group.persistent_grad;
  const uint64_t behind = lent ? plan.region(memory::RegionId::kept_grads).bytes : 0;
  const auto parts = plan.parts_of(group);
  uint64_t full_grad_bytes = 0;
  for (const memory::PartPlan &part : parts) full_grad_bytes += part.full_grad.bytes;
  fmt::format_to(out,
                 "  {{\"name\": {}, \"strategy\": {}, \"compute_offset\": {}, \"gathered_bytes\": {}, "
                 "\"full_grad_bytes\": {}, \"full_grad_offset\": {}, ",
                 quote_json(spec.groups[g].name), spec.groups[g].strategy, group.compute.offset, group.gathered_bytes,
                 full_grad_bytes, parts.front().full_grad.offset + behind);
  if (parts.size() > 1) describe_parts(out, spec.groups[g], parts, behind);
  fmt::format_to(out, "\"buckets\": [");
  for (size_t b = 0; b < group.buckets.size(); ++b) {
    if (b) fmt::format_to(out, ",\n    ");
    describe_bucket(out, spec.groups[g], plan.buckets[group.buckets[b]]);
  }
  fmt::format_to(out, "]}}");
}

}  // namespace

std::string describe(const memory::ModelSpec &spec, const memory::ModelPlan &plan) {
  std::string text;
  const Out out = std::back_inserter(text);
  fmt::format_to(out,
                 "{{\"layout_hash\": \"{:016x}\", \"replicate_size\": {}, \"shard_size\": {}, \"elements\": {}, "
                 "\"padding\": {},\n",
                 plan.layout_hash, spec.mesh.replicate_size, spec.mesh.shard_size, plan.element_count,
                 plan.padding_count);
  fmt::format_to(out, "\"gather_pool\": {{\"bytes\": {}, \"lower_bound_bytes\": {}, \"slots\": [{}]}},\n",
                 plan.gather_pool.size_bytes, plan.gather_pool.lower_bound_bytes,
                 fmt::join(plan.gather_pool.slots, ", "));
  fmt::format_to(out, "\"grad_pool\": {{\"bytes\": {}, \"lower_bound_bytes\": {}, \"slots\": [{}]}},\n\"groups\": [\n",
                 plan.grad_pool.size_bytes, plan.grad_pool.lower_bound_bytes, fmt::join(plan.grad_pool.slots, ", "));
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    if (g) fmt::format_to(out, ",\n");
    describe_group(out, spec, plan, g);
  }
  text += "\n]}\n";
  return text;
}

std::string describe_mesh(const memory::ModelSpec &spec) {
  std::string text = format_text("{} ranks, replicate {} x shard {}", spec.mesh.size(), spec.mesh.replicate_size,
                                 spec.mesh.shard_size);
  constexpr const char *names[] = {"no_shard", "optim", "optim_grads", "optim_grads_params"};
  for (const fsdp_strategy strategy :
       {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
    if (const auto count = std::ranges::count(spec.groups, strategy, &memory::GroupSpec::strategy))
      text += format_text(", {} groups {}", count, names[strategy - FSDP_STRATEGY_NO_SHARD]);
  return text;
}

}  // namespace fsdp::engine
