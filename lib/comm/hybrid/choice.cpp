// SPDX-License-Identifier: Apache-2.0
#include "comm/hybrid/choice.h"

#include <cstdlib>

#include "base/error.h"

namespace fsdp::comm {
namespace {

constexpr const char *names[] = {"auto", "tcp", "ucx"};

const char *name_of(NetChoice choice) { return names[static_cast<size_t>(choice)]; }

void check_equal(std::span<const Card> cards, std::span<const std::string> hosts) {
  for (size_t r = 1; r < cards.size(); ++r)
    if (cards[r].asked != cards[0].asked)
      fail_rank(FSDP_MISMATCH, static_cast<int32_t>(r),
                "FSDP_NET is '{}' on rank 0 ({}) and '{}' on rank {} ({}): it must be the same everywhere",
                name_of(cards[0].asked), hosts[0], name_of(cards[r].asked), r, hosts[r]);
}

size_t first_without_ucx(std::span<const Card> cards) {
  size_t r = 0;
  while (r < cards.size() && !cards[r].ucx.empty()) ++r;
  return r;
}

}  // namespace

NetChoice read_net_choice() {
  const char *text = std::getenv("FSDP_NET");
  if (!text || !*text) return NetChoice::automatic;
  for (const NetChoice choice : {NetChoice::automatic, NetChoice::tcp, NetChoice::ucx})
    if (std::string(text) == name_of(choice)) return choice;
  fail(FSDP_INVALID_ARGUMENT, "FSDP_NET is '{}': auto, tcp or ucx is expected", text);
}

NetDecision decide_net(std::span<const Card> cards, std::span<const std::string> hosts) {
  check_equal(cards, hosts);
  const NetChoice asked = cards[0].asked;
  if (asked == NetChoice::tcp) return {false, "messages between hosts over TCP (FSDP_NET=tcp)"};
  const size_t without = first_without_ucx(cards);
  if (asked == NetChoice::ucx) {
    if (without < cards.size())
      fail_rank(FSDP_UNSUPPORTED, static_cast<int32_t>(without),
                "rank {} ({}) cannot send messages to other hosts by UCX, as FSDP_NET=ucx asks: {}", without,
                hosts[without], cards[without].obstacle);
    return {true, "messages between hosts by UCX (FSDP_NET=ucx)"};
  }
  if (without == cards.size()) return {true, "messages between hosts by UCX: all have RDMA (FSDP_NET=tcp for TCP)"};
  return {false,
          format_text("messages between hosts over TCP: rank {} ({}) has no RDMA for UCX{}{} (FSDP_NET=ucx to insist)",
                      without, hosts[without], cards[without].obstacle.empty() ? "" : ", ", cards[without].obstacle)};
}

}  // namespace fsdp::comm
