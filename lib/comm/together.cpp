// SPDX-License-Identifier: Apache-2.0
#include "comm/together.h"

#include <algorithm>
#include <vector>

namespace fsdp::comm {

void attempt_together(Team &team, const std::string &what, const std::function<void()> &step) {
  const Outcome mine = Outcome::of(step);
  std::vector<Outcome> all(team.size());
  team.exchange_fixed(&mine, sizeof mine, all.data(), what.c_str());
  check_outcomes(team, all);
}

void check_outcomes(Team &team, std::span<const Outcome> outcomes) {
  const auto failed = std::ranges::find_if(outcomes, [](const Outcome &one) { return one.status != FSDP_OK; });
  if (failed == outcomes.end()) return;
  await_readers(team);
  failed->check(team.world_rank(static_cast<uint32_t>(failed - outcomes.begin())));
}

void await_readers(Team &team) noexcept {
  try {
    const uint8_t here = 1;
    std::vector<uint8_t> all(team.size());
    team.exchange_fixed(&here, sizeof here, all.data(), "the end of what failed");
  } catch (...) {
  }
}

}  // namespace fsdp::comm
