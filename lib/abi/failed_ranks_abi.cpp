// SPDX-License-Identifier: Apache-2.0
#include "abi/boundary.h"

using namespace fsdp;
using namespace fsdp::abi;

namespace {

std::vector<uint32_t> failed_ranks(const engine::Context &context) {
  context.look_for_failure();
  const auto failure = context.failure().get();
  if (!failure) return {};
  if (failure->ranks.empty() && failure->rank >= 0) return {static_cast<uint32_t>(failure->rank)};
  return failure->ranks;
}

}  // namespace

extern "C" fsdp_status fsdp_get_failed_ranks(const fsdp_context *context, uint32_t *ranks, uint64_t *rank_count) {
  constexpr auto call = "fsdp_get_failed_ranks";
  return guard([&] {
    check_pointer(rank_count, call, "rank_count");
    const auto held = acquire(context, call);
    const std::vector<uint32_t> failed = failed_ranks(*held);
    const uint64_t room = std::exchange(*rank_count, failed.size());
    if (!ranks) return;
    if (room < failed.size())
      fail(FSDP_INVALID_ARGUMENT, "{}: there is room for {} ranks, {} have failed", call, room, failed.size());
    std::copy(failed.begin(), failed.end(), ranks);
  });
}
