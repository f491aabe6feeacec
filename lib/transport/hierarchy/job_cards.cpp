// SPDX-License-Identifier: Apache-2.0
#include "transport/hierarchy/job_cards.h"

#include <optional>

#include "base/error.h"
#include "membership/wire/endpoint.h"
#include "transport/hierarchy/card.h"
#include "transport/hierarchy/descriptors.h"
#include "transport/names.h"

namespace fsdp::transport {
namespace {

Card card_in(const message::Entry &entry) {
  const auto card = read_card(entry.card);
  if (!card)
    fail_rank(FSDP_MISMATCH, static_cast<int32_t>(entry.rank),
              "rank {} ({}) brought something to the rendezvous that is no card", entry.rank, entry.host);
  return *card;
}

// Of a rank that is never sent to nobody would notice.
void check_address(const message::Entry &entry, std::span<const std::byte> tcp) {
  const std::string_view address(reinterpret_cast<const char *>(tcp.data()), tcp.size());
  if (address.empty() || is_address(address)) return;
  fail_rank(FSDP_MISMATCH, static_cast<int32_t>(entry.rank),
            "rank {} ({}) says that messages reach it at '{}', which is no address", entry.rank, entry.host,
            message::name_of(std::string(address), message::most_name_bytes));
}

NetAddresses ucx_addresses(const Roster &roster) {
  NetAddresses addresses;
  addresses.reserve(roster.size());
  roster.for_each([&](const message::Entry &entry, bool) { addresses.add(card_in(entry).ucx); });
  return addresses;
}

}  // namespace

JobCards read_cards(const Roster &roster) {
  JobCards cards;
  NetCensus census;
  std::optional<Error> shortage;
  cards.leaders.reserve(roster.node_count());
  cards.addresses.reserve(roster.size());
  roster.for_each([&](const message::Entry &entry, bool leads) {
    const Card card = card_in(entry);
    check_address(entry, card.tcp);
    census.hear(card, entry.host);
    const DescriptorNeed need = leads ? need_of_leader(entry.node, roster.node_count()) : DescriptorNeed();
    if (!shortage) shortage = find_shortage_of(entry.rank, entry.host, card.descriptors, need);
    if (leads) cards.leaders.emplace_back(card.leader);
    if (entry.rank == 0) cards.nonce.assign(card.nonce.begin(), card.nonce.end());
    cards.addresses.add(card.tcp);
  });
  cards.net = census.decide();
  if (shortage) throw Error(*shortage);
  if (cards.net.ucx) cards.addresses = ucx_addresses(roster);
  return cards;
}

}  // namespace fsdp::transport
