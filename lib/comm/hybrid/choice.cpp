// SPDX-License-Identifier: Apache-2.0
#include "comm/hybrid/choice.h"

#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "comm/bootstrap/secret.h"

namespace fsdp::comm {
namespace {

constexpr const char *names[] = {"auto", "tcp", "ucx"};

const char *name_of(NetChoice choice) { return names[static_cast<size_t>(choice)]; }

constexpr const char *checksums[] = {"none", "crc32c"};
constexpr const char *encryptions[] = {"off", "on"};

const char *checksum_of(const Card &card) { return checksums[card.protection.checksum]; }
const char *encryption_of(const Card &card) { return encryptions[card.protection.encryption]; }
const char *asked_of(const Card &card) { return name_of(card.asked); }

// value_of: the variable's on the rank with this card.
void check_equal(const char *variable, const char *(*value_of)(const Card &), std::span<const Card> cards,
                 std::span<const std::string> hosts) {
  const std::string_view wanted = value_of(cards[0]);
  for (size_t r = 1; r < cards.size(); ++r)
    if (value_of(cards[r]) != wanted)
      fail_rank(FSDP_MISMATCH, static_cast<int32_t>(r),
                "{} is '{}' on rank 0 ({}) and '{}' on rank {} ({}): it must be the same everywhere", variable, wanted,
                hosts[0], value_of(cards[r]), r, hosts[r]);
}

// Is this variable the second of the words? The first one is the default.
bool read_switch(const char *variable, const char *text, const char *const (&words)[2]) {
  const std::string_view word(text && *text ? text : words[0]);
  if (word != words[0] && word != words[1])
    fail(FSDP_INVALID_ARGUMENT, "{} is '{}': {} or {} is expected", variable, word, words[0], words[1]);
  return word == words[1];
}

size_t first_without_ucx(std::span<const Card> cards) {
  size_t r = 0;
  while (r < cards.size() && !cards[r].ucx.empty()) ++r;
  return r;
}

// The first whose UCX need not understand rank 0's.
size_t first_of_another_ucx(std::span<const Card> cards) {
  size_t r = 0;
  while (r < cards.size() && cards[r].ucx_major == cards[0].ucx_major) ++r;
  return r;
}

std::string ucx_difference(std::span<const Card> cards, std::span<const std::string> hosts, size_t r) {
  return format_text("rank 0 ({}) has UCX {} and rank {} ({}) has UCX {}", hosts[0], cards[0].ucx_major, r, hosts[r],
                     cards[r].ucx_major);
}

NetDecision choose_net(std::span<const Card> cards, std::span<const std::string> hosts, size_t without, size_t other) {
  if (without < cards.size())
    return {false, format_text(
                       "messages between hosts over TCP: rank {} ({}) has no RDMA for UCX{}{} (FSDP_NET=ucx to insist)",
                       without, hosts[without], cards[without].obstacle.empty() ? "" : ", ", cards[without].obstacle)};
  if (other < cards.size()) return {false, "messages between hosts over TCP: " + ucx_difference(cards, hosts, other)};
  return {true, "messages between hosts by UCX: all have RDMA (FSDP_NET=tcp for TCP)"};
}

}  // namespace

NetChoice read_net_choice() {
  const char *text = std::getenv("FSDP_NET");
  if (!text || !*text) return NetChoice::automatic;
  for (const NetChoice choice : {NetChoice::automatic, NetChoice::tcp, NetChoice::ucx})
    if (std::string(text) == name_of(choice)) return choice;
  fail(FSDP_INVALID_ARGUMENT, "FSDP_NET is '{}': auto, tcp or ucx is expected", text);
}

NetProtection read_net_protection() {
  return {read_switch("FSDP_NET_CHECKSUM", std::getenv("FSDP_NET_CHECKSUM"), checksums),
          read_switch("FSDP_NET_ENCRYPTION", std::getenv("FSDP_NET_ENCRYPTION"), encryptions)};
}

NetDecision decide_net(std::span<const Card> cards, std::span<const std::string> hosts) {
  check_equal("FSDP_NET", asked_of, cards, hosts);
  check_equal("FSDP_NET_CHECKSUM", checksum_of, cards, hosts);
  check_equal("FSDP_NET_ENCRYPTION", encryption_of, cards, hosts);
  if (cards[0].protection.encryption && cards[0].nonce.size() != sizeof(Nonce))
    fail_rank(FSDP_MISMATCH, 0, "rank 0 ({}) has brought {} random bytes for FSDP_NET_ENCRYPTION=on, {} are expected",
              hosts[0], cards[0].nonce.size(), sizeof(Nonce));
  const NetChoice asked = cards[0].asked;
  if (asked == NetChoice::tcp) return {false, "messages between hosts over TCP (FSDP_NET=tcp)"};
  const size_t without = first_without_ucx(cards), other = first_of_another_ucx(cards);
  if (asked == NetChoice::ucx) {
    if (without < cards.size())
      fail_rank(FSDP_UNSUPPORTED, static_cast<int32_t>(without),
                "rank {} ({}) cannot send messages to other hosts by UCX, as FSDP_NET=ucx asks: {}", without,
                hosts[without], cards[without].obstacle);
    if (other < cards.size())
      fail_rank(FSDP_MISMATCH, static_cast<int32_t>(other),
                "{}: FSDP_NET=ucx needs the same major version everywhere (FSDP_NET=tcp needs none)",
                ucx_difference(cards, hosts, other));
    return {true, "messages between hosts by UCX (FSDP_NET=ucx)"};
  }
  return choose_net(cards, hosts, without, other);
}

}  // namespace fsdp::comm
