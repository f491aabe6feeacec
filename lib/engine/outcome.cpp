// SPDX-License-Identifier: Apache-2.0
#include "engine/outcome.h"

#include <new>
#include <span>
#include <string_view>

#include "transport/exchange.h"

namespace fsdp::engine {

std::optional<Error> catch_error(const std::function<void()> &body) {
  try {
    body();
    return {};
  } catch (const Error &error) {
    return error;
  } catch (const std::bad_alloc &) {
    return Error(FSDP_OUT_OF_MEMORY, "the heap is exhausted");
  } catch (const std::exception &error) {
    return Error(FSDP_INTERNAL, error.what());
  }
}

void share_outcome(transport::Team &team, const std::optional<Error> &mine) {
  const transport::Ballot told = team.agree({.troubled = mine.has_value()}, "fsdp_seal_model");
  if (told.troubled == transport::Ballot::nobody) return;
  std::string message;
  if (mine && told.troubled == team.rank()) message = format_text("{:02}{}", mine->status, mine->message);
  const auto all = team.all_gather(std::as_bytes(std::span(message)), "fsdp_seal_model");
  transport::await_readers(team);
  const uint32_t r = told.troubled;
  const std::string_view text(reinterpret_cast<const char *>(all[r].data()), all[r].size());
  Error error((text[0] - '0') * 10 + (text[1] - '0'), format_text("rank {}: {}", team.world_rank(r), text.substr(2)),
              static_cast<int32_t>(team.world_rank(r)));
  if (r == team.rank()) error.origin = mine->origin, error.origin_code = mine->origin_code;
  throw error;
}

}  // namespace fsdp::engine
