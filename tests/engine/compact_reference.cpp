// SPDX-License-Identifier: Apache-2.0
#include "compact_reference.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "element.h"

namespace harness {

fsdp_main_storage storage_of(const Scenario &setup, const GroupDef &group, const ParamDef &param) {
  if (param.dtype != FSDP_BFLOAT16 || param.flags & FSDP_PARAM_FROZEN) return FSDP_MAIN_FLOAT32;
  if (group.options.main_storage) return group.options.main_storage;
  return setup.model.main_storage ? setup.model.main_storage : FSDP_MAIN_FLOAT32;
}

bool has_codes(const Scenario &setup, const ParamDef &param) {
  return setup.model.optimizer == FSDP_OPTIMIZER_ADAMW_8BIT && !param.by_caller() && param.count() >= 4096;
}

// Adds half a unit of the last place of bf16 to the magnitude, and drops the lower 16 bits.
float upper_half(float value) {
  if (!std::isfinite(value)) return value;
  const auto bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>((bits + 0x8000) & 0xffff0000);
}

namespace {

using Counter = std::array<uint32_t, 4>;

// Philox 4x32-10 of Salmon et al. 2011.
Counter philox(Counter counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = 0xD2511F53ull * counter[0], second = 0xCD9E8D57ull * counter[2];
    counter = {static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(second),
               static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(first)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// The map has the middles of equal parts of [0.1, 1] in seven decades. Each decade has twice as many parts as the one
// below.
std::vector<double> make_map(bool is_signed) {
  std::vector<double> map{0, 1};
  for (int decade = 0; decade < 7; ++decade) {
    const int parts = is_signed ? 1 << decade : 2 << decade;
    const auto edge = [&](int k) { return k == parts ? 1.0 : 0.1 + k * (0.9 / parts); };
    for (int k = 0; k < parts; ++k) {
      const double middle = std::pow(10.0, decade - 6) * ((edge(k) + edge(k + 1)) / 2);
      map.push_back(middle);
      if (is_signed) map.push_back(-middle);
    }
  }
  for (double &number : map) number = static_cast<float>(number);
  std::ranges::sort(map);
  return map;
}

size_t nearest(const std::vector<double> &map, float ratio) {
  size_t best = 0;
  for (size_t code = 1; code < map.size(); ++code)
    if (std::abs(ratio - map[code]) < std::abs(ratio - map[best])) best = code;
  return best;
}

}  // namespace

float round_randomly(float value, uint64_t seed, const std::string &name, uint64_t element, uint64_t step) {
  if (!std::isfinite(value)) return round_to(value, FSDP_BFLOAT16);
  const uint64_t group = element / 8, half = element % 8;
  const Counter random =
      philox({static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
              static_cast<uint32_t>(XXH64(name.data(), name.size(), 0)), static_cast<uint32_t>(step)},
             {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint32_t bits = random[half / 2] >> (half % 2 ? 16 : 0) & 0xffff;
  const uint32_t sum = std::bit_cast<uint32_t>(value) + bits;
  const float rounded = std::bit_cast<float>(sum & 0xffff0000);
  return std::isfinite(rounded) ? rounded : std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0xffff0000);
}

void encode_and_decode(std::vector<float> &state, bool is_signed) {
  static const std::vector<double> maps[] = {make_map(false), make_map(true)};
  const std::vector<double> &map = maps[is_signed];
  for (size_t first = 0; first < state.size(); first += 256) {
    const size_t end = std::min(first + 256, state.size());
    float scale = 1e-12f;
    for (size_t i = first; i < end; ++i) scale = std::max(scale, std::abs(state[i]));
    for (size_t i = first; i < end; ++i) {
      size_t code = nearest(map, state[i] / scale);
      if (!is_signed && state[i] > 0) code = std::max<size_t>(code, 1);
      state[i] = static_cast<float>(map[code]) * scale;
    }
  }
}

}  // namespace harness
