// SPDX-License-Identifier: Apache-2.0
// Layers of [10, 4] dense weights and [6, 4] expert weights, with gradients that are exact in fp32. The tests of
// experts compare with numbers that numpy has computed from them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "harness.h"

namespace expert_layers {

template <typename Whole>
std::vector<float> values_of(uint64_t count, const Whole &whole, float divisor) {
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = static_cast<float>(whole(static_cast<int64_t>(i))) / divisor;
  return values;
}

inline std::vector<float> dense_grad(uint32_t rank) {
  return values_of(
      40, [rank](int64_t i) { return (7 * i + 3 * rank) % 11 - 5; }, 4);
}

inline std::vector<float> expert_grad(uint32_t rank) {
  return values_of(
      24, [rank](int64_t i) { return (5 * i + 2 * rank) % 13 - 6; }, 2);
}

inline uint32_t crc_of(const std::vector<float> &values) {
  uint32_t crc = ~0u;
  for (const std::byte byte : std::as_bytes(std::span(values))) {
    crc ^= std::to_integer<uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
  }
  return ~crc;
}

// Gives every parameter its weights, and publishes.
inline void load_layers(harness::Rank &rank) {
  for (size_t g = 0; g < rank.groups.size(); ++g) {
    const auto weights = values_of(
        rank.def(g).params[0].count(), [](int64_t i) { return 3 * i % 17 - 8; }, 8);
    FSDP(fsdp_load_param(rank.groups[g], 0, weights.data(), FSDP_FLOAT32, weights.size(), FSDP_EVERY_RANK, 0));
  }
  FSDP(fsdp_publish_weights(rank.model, nullptr));
}

}  // namespace expert_layers
