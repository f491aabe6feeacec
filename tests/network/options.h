// SPDX-License-Identifier: Apache-2.0
// The driver's options for a rank: words of the form name=value.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

#include "../engine/harness.h"

namespace network {

class Options {
 public:
  Options(int count, char **words) {
    for (int i = 1; i < count; ++i) {
      const std::string word = words[i];
      const size_t equals = word.find('=');
      if (equals == word.npos) throw std::runtime_error("not name=value: " + word);
      values_[word.substr(0, equals)] = word.substr(equals + 1);
    }
  }
  std::string text(const std::string &name) const {
    const auto found = values_.find(name);
    return found == values_.end() ? "" : found->second;
  }
  uint32_t number(const std::string &name, uint32_t otherwise) const {
    const std::string value = text(name);
    return value.empty() ? otherwise : static_cast<uint32_t>(std::stoul(value));
  }

 private:
  std::map<std::string, std::string> values_;
};

// Makes parameters of each kind of codes and one of numbers, in as many groups as without codes.
inline std::vector<harness::GroupDef> quantized_groups() {
  const auto of = [](const char *name, std::vector<uint64_t> shape, fsdp_quantization quantization) {
    return harness::quantized({name, std::move(shape), FSDP_BFLOAT16}, quantization);
  };
  return {
      {"mx", {of("mx", {160, 64}, FSDP_QUANTIZE_MXFP8), {"bias", {24}, FSDP_BFLOAT16}}},
      {"scaled", {of("scaled", {37, 24}, FSDP_QUANTIZE_FP8), of("one", {1, 77}, FSDP_QUANTIZE_FP8)}},
      {"blocks", {of("blocks", {300, 150}, FSDP_QUANTIZE_FP8_BLOCK), of("stack", {3, 32, 32}, FSDP_QUANTIZE_MXFP8)}},
      {"usual", {{"usual", {24, 24}, FSDP_BFLOAT16}}}};
}

inline harness::Scenario scenario_from(const Options &options) {
  harness::Scenario scenario = harness::scenario_of(
      static_cast<fsdp_strategy>(options.number("strategy", FSDP_STRATEGY_OPTIM_GRADS_PARAMS)),
      options.number("threads", 1), options.text("mode") == "copied" ? FSDP_UNSHARD_COPIED : FSDP_UNSHARD_MAPPED);
  scenario.context.timeout_ms = options.number("timeout", 20'000);
  scenario.context.heartbeat_timeout_ms = options.number("heartbeat", 0);
  scenario.context.ranks_per_host = options.number("ranks_per_host", 0);
  scenario.mesh.replicate_size = options.number("replicate", 0);
  scenario.mesh.shard_size = options.number("shard", 0);
  scenario.mesh.reduction_block_size = options.number("block", 0);
  if (options.text("outer") == "hfsdp") scenario.model.outer_strategy = FSDP_OUTER_OPTIM;
  if (options.number("wide", 0)) scenario.groups = harness::equal_groups(4, 512, 512);
  if (options.number("quantized", 0)) {
    scenario.groups = quantized_groups();
    scenario.model.grad_dtype = FSDP_FLOAT32;
  }
  for (size_t g = 1; g < scenario.groups.size(); g += 2) scenario.groups[g].meshes = options.number("experts", 1);
  scenario.steps = options.number("steps", 3);
  scenario.microbatches = options.number("microbatches", 2);
  scenario.clip = 0.5;
  if (options.text("dtype") == "bf16") {
    scenario.set_dtype(FSDP_BFLOAT16);
    scenario.model.grad_dtype = FSDP_FLOAT32;
  }
  return scenario;
}

}  // namespace network
