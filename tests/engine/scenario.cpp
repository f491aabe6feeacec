// SPDX-License-Identifier: Apache-2.0
#include "harness.h"

namespace harness {
namespace {

uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9ull;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// In [-1, 1), a multiple of 2^-16: exact in every arithmetic used here.
float noise(uint64_t key) { return static_cast<float>(static_cast<int32_t>(mix(key) >> 47) - 65536) / 65536.0f; }

}  // namespace

void Scenario::set_dtype(fsdp_dtype dtype) {
  for (GroupDef &group : groups)
    for (ParamDef &param : group.params) param.dtype = dtype;
}

uint32_t Scenario::ordinal(size_t group, size_t param) const {
  size_t before = 0;
  for (size_t g = 0; g < group; ++g) before += groups[g].params.size();
  return static_cast<uint32_t>(before + param);
}

std::vector<GroupDef> odd_groups() {
  std::vector<GroupDef> groups;
  groups.push_back({"embed", {{"embed.w", {37, 24}}}});
  groups.push_back({"layer.0",
                    {{"l0.wq", {24, 24}},
                     {"l0.bias", {24}, FSDP_FLOAT32, FSDP_PARAM_NO_DECAY},
                     {"l0.w1", {51, 24}},
                     {"l0.scalar", {}}}});
  groups.push_back({"layer.1",
                    {{"l1.wide", {2, 1000}},
                     {"l1.tall", {129, 3}},
                     {"l1.block", {70, 8}, FSDP_FLOAT32, 0, FSDP_GRANULE_BLOCK, 32}}});
  groups.push_back({"head",
                    {{"head.whole", {9, 40}, FSDP_FLOAT32, 0, FSDP_GRANULE_TENSOR},
                     {"head.norm", {24}, FSDP_FLOAT32, 0, 0, 0, 0.5}}});
  return groups;
}

std::vector<GroupDef> equal_groups(uint32_t count, uint64_t rows, uint64_t columns) {
  std::vector<GroupDef> groups;
  for (uint32_t g = 0; g < count; ++g) {
    const std::string name = "layer." + std::to_string(g);
    groups.push_back({name, {{name + ".w", {rows, columns}}}});
  }
  return groups;
}

std::vector<fsdp_visit> visits_of_pieces(const std::vector<GroupDef> &groups) {
  std::vector<fsdp_visit> visits;
  for (uint32_t g = 0; g < groups.size(); ++g)
    for (uint32_t p = 0; p < groups[g].pieces(); ++p) visits.push_back({g, FSDP_FORWARD, FSDP_PIECE(p)});
  for (size_t i = visits.size(); i-- > 0;) visits.push_back({visits[i].group_index, FSDP_BACKWARD, visits[i].piece});
  return visits;
}

Scenario scenario_of(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode) {
  Scenario scenario;
  scenario.ranks = ranks;
  scenario.context.timeout_ms = 20'000;
  scenario.model.strategy = strategy;
  scenario.model.unshard_mode = mode;
  scenario.groups = odd_groups();
  return scenario;
}

Scenario debug_scenario(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode) {
  Scenario scenario = scenario_of(strategy, ranks, mode);
  scenario.context.flags = FSDP_CONTEXT_DEBUG;
  return scenario;
}

float initial_weight(uint32_t param, uint64_t element) { return noise(mix(param * 7919ull + 1) + element); }

float gradient(uint32_t rank, uint32_t step, uint32_t microbatch, uint32_t param, uint64_t element, float weight) {
  const uint64_t key = mix(mix(mix(rank + 1ull) + step * 131ull + microbatch) + param) + element;
  return 0.25f * weight + noise(key);
}

}  // namespace harness
