// SPDX-License-Identifier: Apache-2.0
#include "engine/gradients/given_grads.h"

#include <algorithm>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace fsdp::engine {
namespace {

constexpr size_t bits_per_word = 64;

}  // namespace

GivenGrads::GivenGrads(Runtime &runtime) : runtime_(runtime) {
  for (const Group &group : runtime.groups)
    for (uint32_t p = 0; p < group.places.size(); ++p)
      if (runtime.param(group, p).skips_missing()) params_.push_back({group.index, p});
  bits_.resize((params_.size() + bits_per_word - 1) / bits_per_word);
  all_.resize(bits_.size() * runtime.team().size());
}

void GivenGrads::pack() noexcept {
  std::ranges::fill(bits_, uint64_t{0});
  for (size_t i = 0; i < params_.size(); ++i)
    bits_[i / bits_per_word] |= uint64_t{given(params_[i])} << i % bits_per_word;
}

uint64_t GivenGrads::hash() noexcept {
  if (!any()) return 0;
  pack();
  return XXH3_64bits(bits_.data(), bits_.size() * sizeof bits_[0]);
}

void GivenGrads::share() {
  constexpr auto what = "the parameters that have gradients";
  const uint64_t bytes = bits_.size() * sizeof bits_[0];
  const WaitSpan span(runtime_, WaitKind::peers);
  const trace::FlightScope flight(*runtime_.flights.meetings, what, bytes);
  runtime_.team().all_gather(bits_.data(), bytes, all_.data(), what);
  for (const MeshComms &mesh_comms : runtime_.comms) {
    std::ranges::fill(bits_, uint64_t{0});
    for (const uint32_t rank : mesh_comms.members)
      for (size_t w = 0; w < bits_.size(); ++w) bits_[w] |= all_[rank * bits_.size() + w];
    for (size_t i = 0; i < params_.size(); ++i)
      if (&runtime_.comms_of(runtime_.groups[params_[i].group]) == &mesh_comms)
        given(params_[i]) = bits_[i / bits_per_word] >> i % bits_per_word & 1;
  }
}

}  // namespace fsdp::engine
