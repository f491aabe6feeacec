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

void agree_on(Team &team, const std::string &what, const std::string &said) {
  struct Said {
    char text[501] = {};
  } mine;
  said.copy(mine.text, sizeof mine.text - 1);
  std::vector<Said> all(team.size());
  team.exchange_fixed(&mine, sizeof mine, all.data(), what.c_str());
  const std::string_view first = all[0].text;
  const auto other = std::ranges::find_if(all, [&](const Said &one) { return one.text != first; });
  if (other == all.end()) return;
  await_readers(team);
  const uint32_t rank = team.world_rank(static_cast<uint32_t>(other - all.begin()));
  Error error(FSDP_MISMATCH, format_text("{} differs: rank {} says {}, and rank {} says {}", what, team.world_rank(0),
                                         first, rank, other->text));
  error.rank = static_cast<int32_t>(rank);
  throw error;
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
