// SPDX-License-Identifier: Apache-2.0
#include "comm/outcome.h"

#include <cstring>
#include <new>
#include <vector>

namespace fsdp::comm {
namespace {

// As ranks exchange it.
struct Outcome {
  fsdp_status status = FSDP_OK;
  fsdp_origin origin = FSDP_ORIGIN_FSDP;
  int64_t code = 0;
  char text[496] = {};
};
static_assert(sizeof(Outcome) == 512);

Outcome attempt(const std::function<void()> &step) noexcept {
  Outcome outcome;
  const auto set = [&](fsdp_status status, const char *text) {
    outcome.status = status;
    std::strncpy(outcome.text, text, sizeof outcome.text - 1);
  };
  try {
    step();
  } catch (const Error &error) {
    set(error.status, error.what());
    outcome.origin = error.origin;
    outcome.code = error.origin_code;
  } catch (const std::bad_alloc &) {
    set(FSDP_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception &error) {
    set(FSDP_INTERNAL, error.what());
  }
  return outcome;
}

}  // namespace

void attempt_together(Team &team, const std::string &what, const std::function<void()> &step) {
  const Outcome mine = attempt(step);
  std::vector<Outcome> all(team.size());
  team.exchange_fixed(&mine, sizeof mine, all.data(), what.c_str());
  for (uint32_t r = 0; r < team.size(); ++r) {
    const Outcome &of = all[r];
    if (of.status == FSDP_OK) continue;
    const std::string text(of.text, ::strnlen(of.text, sizeof of.text));
    throw Error(of.status, format_text("rank {}: {}", team.world_rank(r), text),
                static_cast<int32_t>(team.world_rank(r)), of.origin, of.code);
  }
}

}  // namespace fsdp::comm
