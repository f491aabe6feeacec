// SPDX-License-Identifier: Apache-2.0
#include "rank.h"

#include <algorithm>
#include <limits>

namespace fuzz {

Rank::Rank(uint64_t seed, Elsewhere &elsewhere)
    : random(seed), elsewhere_(elsewhere), memory_(2 * buffer_bytes + 4096) {
  const auto first = reinterpret_cast<uintptr_t>(memory_.data());
  arena = memory_.data() + (4096 - first % 4096) % 4096;
  buffer = arena + buffer_bytes;
}

// Chooses more often the numbers at which programs go wrong.
uint64_t Rank::nonsense() {
  static constexpr uint64_t edges[] = {0,          1,          2,          3,          4,          7,
                                       8,          255,        256,        512,        4095,       4096,
                                       4097,       1u << 31,   UINT32_MAX, 1ull << 32, 1ull << 40, 1ull << 62,
                                       1ull << 63, UINT64_MAX, 1u << 19,   0x7FFFFFFF, 1u << 13,   17};
  switch (random.below(4)) {
    case 0: return random.next();
    case 1: return uint64_t{1} << random.below(64);
    case 2: return random.below(64);
    default: return edges[random.below(std::size(edges))];
  }
}

double Rank::real(double sensible) {
  using Limits = std::numeric_limits<double>;
  static constexpr double edges[] = {0.0,
                                     -0.0,
                                     1.0,
                                     -1.0,
                                     0.5,
                                     1e-8,
                                     1e308,
                                     -1e308,
                                     Limits::denorm_min(),
                                     Limits::infinity(),
                                     -Limits::infinity(),
                                     Limits::quiet_NaN()};
  return wild() ? edges[random.below(std::size(edges))] : sensible;
}

int32_t Rank::choice(int32_t last) {
  return exactly(static_cast<int32_t>(random.below(static_cast<uint64_t>(last) + 1)));
}

uint32_t Rank::flags(uint32_t legal) {
  const uint32_t some = random.one_in(2) ? 0 : static_cast<uint32_t>(random.next()) & legal;
  return wild() ? some | 1u << random.below(32) : some;
}

const char *Rank::name() {
  if (!wild()) return (name_ = "n" + std::to_string(names_++)).c_str();
  switch (random.below(6)) {
    case 0: return nullptr;
    case 1: name_ = ""; break;
    case 2: name_ = std::string(random.below(400), 'a'); break;
    case 3: name_ = "\xC0\x80\xFF"; break;
    case 4: name_ = "n0"; break;
    default: name_ = std::string(random.below(260), static_cast<char>(random.below(255) + 1)); break;
  }
  return name_.c_str();
}

void *Rank::any(Kind kind) {
  const auto &some = alive[kind];
  return some.empty() ? nullptr : some[random.below(some.size())];
}

void *Rank::handle(Kind kind, void *aimed) {
  if (!wild()) return aimed;
  switch (random.below(5)) {
    case 0: return nullptr;
    case 1: return any(static_cast<Kind>(random.below(kind_count)));
    case 2: return elsewhere_.handles[random.below(elsewhere_.handles.size())].load();
    case 3: return reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(any(kind)) ^ uint64_t{1} << random.below(64));
    default: return reinterpret_cast<void *>(nonsense());
  }
}

void Rank::add(Kind kind, void *handle) {
  alive[kind].push_back(handle);
  elsewhere_.handles[random.below(elsewhere_.handles.size())].store(handle);
}

void Rank::aim_anywhere() {
  aim.context = static_cast<fsdp_context *>(any(a_context));
  aim.model = static_cast<fsdp_model *>(any(a_model));
  aim.group = static_cast<fsdp_group *>(any(a_group));
  const uint64_t count = param_count();
  aim.param = count ? random.below(count) : 0;
  aim.phase = static_cast<fsdp_phase>(1 + random.below(4));
  aim.flags = 0;
}

ParamFacts Rank::param() const {
  const auto found = groups.find(aim.group);
  if (found == groups.end() || aim.param >= found->second.params.size()) return {1, FSDP_FLOAT32, false};
  return found->second.params[aim.param];
}

uint64_t Rank::param_count() const {
  const auto found = groups.find(aim.group);
  return found == groups.end() ? 0 : found->second.params.size();
}

std::vector<ParamFacts> Rank::trainable(const fsdp_model *model) const {
  std::vector<ParamFacts> facts;
  for (const void *group : alive[a_group]) {
    const auto found = groups.find(group);
    if (found == groups.end() || found->second.model != model) continue;
    std::ranges::copy_if(found->second.params, std::back_inserter(facts),
                         [](const auto &param) { return !param.frozen; });
  }
  return facts;
}

}  // namespace fuzz
