// SPDX-License-Identifier: Apache-2.0

#include "transport/hierarchy/cards.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "base/settings.h"
#include "membership/tree/plan.h"
#include "membership/wire/endpoint.h"
#include "membership/wire/secret.h"
#include "transport/hierarchy/team.h"
#include "transport/names.h"

namespace fsdp::transport {

namespace {

constexpr size_t longest_leader = 64, longest_obstacle = 1024, longest_nonce = 64;

uint32_t length_of(size_t size) { return static_cast<uint32_t>(size); }

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

struct CardHead {
  NetChoice asked;
  uint32_t tcp, ucx, leader;  // lengths of parts; the rest of the card is the obstacle
  uint32_t nonce;
  Descriptors descriptors;
  uint32_t checksum, encryption, ucx_major;
};

}  // namespace

// The head, then all parts.
std::vector<std::byte> write_card(const RankCard &card) {
  const auto &[checksum, encryption] = card.protection;
  const CardHead head{card.asked,
                      length_of(card.tcp.size()),
                      length_of(card.ucx.size()),
                      length_of(card.leader.size()),
                      length_of(card.nonce.size()),
                      card.descriptors,
                      checksum,
                      encryption,
                      card.ucx_major};
  std::vector<std::byte> bytes;
  const auto add = [&](std::span<const std::byte> part) { bytes.insert(bytes.end(), part.begin(), part.end()); };
  add(std::as_bytes(std::span(&head, 1)));
  add(card.tcp);
  add(card.ucx);
  add(card.nonce);
  add(std::as_bytes(std::span(card.leader)));
  add(std::as_bytes(std::span(card.obstacle.substr(0, longest_obstacle))));
  return bytes;
}

std::optional<RankCard> read_card(std::span<const std::byte> bytes) {
  CardHead head;
  if (bytes.size() < sizeof head) return {};
  std::memcpy(&head, bytes.data(), sizeof head);
  bytes = bytes.subspan(sizeof head);
  const uint64_t tcp = head.tcp, ucx = head.ucx, leader = head.leader, nonce = head.nonce;
  if (head.asked > NetChoice::ucx || tcp + ucx + nonce + leader > bytes.size() || leader > longest_leader ||
      tcp > longest_leader || nonce > longest_nonce || bytes.size() - tcp - ucx - nonce - leader > longest_obstacle)
    return {};
  RankCard card;
  card.asked = head.asked;
  card.descriptors = head.descriptors;
  card.ucx_major = head.ucx_major;
  card.protection = {head.checksum != 0, head.encryption != 0};
  const auto take = [&bytes](uint64_t length) {
    const auto part = bytes.first(length);
    bytes = bytes.subspan(length);
    return part;
  };
  card.tcp = take(tcp);
  card.ucx = take(ucx);
  card.nonce = take(nonce);
  card.leader = text_of(bytes.first(leader));
  card.obstacle = text_of(bytes.subspan(leader));
  return card;
}

namespace {

constexpr const char *names[] = {"auto", "tcp", "ucx"};
constexpr const char *checksums[] = {"none", "crc32c"};
constexpr const char *encryptions[] = {"off", "on"};
constexpr const char *variables[] = {"FSDP_NET", "FSDP_NET_CHECKSUM", "FSDP_NET_ENCRYPTION"};

const char *name_of(NetChoice choice) { return names[static_cast<size_t>(choice)]; }

// Is the variable's value the second of the words? The first word is the default.
bool read_switch(const char *variable, const char *text, const char *const (&words)[2]) {
  const std::string_view word(text && *text ? text : words[0]);
  if (word != words[0] && word != words[1])
    fail(FSDP_INVALID_ARGUMENT, "{} is '{}': {} or {} is expected", variable, word, words[0], words[1]);
  return word == words[1];
}

}  // namespace

NetChoice read_net_choice() {
  const char *text = setting("FSDP_NET");
  if (!text || !*text) return NetChoice::automatic;
  for (const NetChoice choice : {NetChoice::automatic, NetChoice::tcp, NetChoice::ucx})
    if (std::string(text) == name_of(choice)) return choice;
  fail(FSDP_INVALID_ARGUMENT, "FSDP_NET is '{}': auto, tcp or ucx is expected", text);
}

NetProtection read_net_protection() {
  return {read_switch("FSDP_NET_CHECKSUM", setting("FSDP_NET_CHECKSUM"), checksums),
          read_switch("FSDP_NET_ENCRYPTION", setting("FSDP_NET_ENCRYPTION"), encryptions)};
}

const char *NetCensus::word_of(Question question, NetChoice asked, const NetProtection &protection) {
  if (question == Question::asked) return name_of(asked);
  return question == checksum ? checksums[protection.checksum] : encryptions[protection.encryption];
}

std::string NetCensus::NetAnswer::text() const { return format_text("rank {} ({})", rank, host); }

void NetCensus::hear(const RankCard &card, std::string_view host) {
  const auto keep = [&](std::optional<NetAnswer> &first) {
    if (!first)
      first =
          NetAnswer{count_, std::string(host), card.asked, card.protection, card.ucx_major, std::string(card.obstacle)};
  };
  if (count_ == 0) nonce_bytes_ = card.nonce.size();
  keep(zero_);
  if (card.asked != zero_->asked) keep(different_[asked]);
  if (card.protection.checksum != zero_->protection.checksum) keep(different_[checksum]);
  if (card.protection.encryption != zero_->protection.encryption) keep(different_[encryption]);
  if (card.ucx.empty()) keep(without_ucx_);
  if (card.ucx_major != zero_->ucx_major) keep(other_ucx_);
  ++count_;
}

void NetCensus::check_equal(Question question) const {
  const auto &other = different_[question];
  if (!other) return;
  fail_rank(FSDP_MISMATCH, static_cast<int32_t>(other->rank),
            "{} is '{}' on {} and '{}' on {}: it must be the same everywhere", variables[question],
            word_of(question, zero_->asked, zero_->protection), zero_->text(),
            word_of(question, other->asked, other->protection), other->text());
}

std::string NetCensus::ucx_difference() const {
  return format_text("{} has UCX {} and {} has UCX {}", zero_->text(), zero_->ucx_major, other_ucx_->text(),
                     other_ucx_->ucx_major);
}

NetDecision NetCensus::choose() const {
  if (without_ucx_)
    return {false,
            format_text("messages between hosts over TCP: {} has no RDMA for UCX{}{} (FSDP_NET=ucx to insist)",
                        without_ucx_->text(), without_ucx_->obstacle.empty() ? "" : ", ", without_ucx_->obstacle)};
  if (other_ucx_) return {false, "messages between hosts over TCP: " + ucx_difference()};
  return {true, "messages between hosts by UCX: all have RDMA (FSDP_NET=tcp for TCP)"};
}

NetDecision NetCensus::decide() const {
  for (const Question question : {asked, checksum, encryption}) check_equal(question);
  if (zero_->protection.encryption && nonce_bytes_ != sizeof(Nonce))
    fail_rank(FSDP_MISMATCH, 0, "{} has brought {} random bytes for FSDP_NET_ENCRYPTION=on, {} are expected",
              zero_->text(), nonce_bytes_, sizeof(Nonce));
  if (zero_->asked == NetChoice::tcp) return {false, "messages between hosts over TCP (FSDP_NET=tcp)"};
  if (zero_->asked == NetChoice::automatic) return choose();
  if (without_ucx_)
    fail_rank(FSDP_UNSUPPORTED, static_cast<int32_t>(without_ucx_->rank),
              "{} cannot send messages to other hosts by UCX, as FSDP_NET=ucx asks: {}", without_ucx_->text(),
              without_ucx_->obstacle);
  if (other_ucx_)
    fail_rank(FSDP_MISMATCH, static_cast<int32_t>(other_ucx_->rank),
              "{}: FSDP_NET=ucx needs the same major version everywhere (FSDP_NET=tcp needs none)", ucx_difference());
  return {true, "messages between hosts by UCX (FSDP_NET=ucx)"};
}

namespace {

RankCard card_in(const message::RosterEntry &entry) {
  const auto card = read_card(entry.card);
  if (!card)
    fail_rank(FSDP_MISMATCH, static_cast<int32_t>(entry.rank),
              "rank {} ({}) brought something to the rendezvous that is no card", entry.rank, entry.host);
  return *card;
}

// Checks the address here, because otherwise a bad address of a rank to which nothing is sent would go unnoticed.
void check_address(const message::RosterEntry &entry, std::span<const std::byte> tcp) {
  const std::string_view address(reinterpret_cast<const char *>(tcp.data()), tcp.size());
  if (address.empty() || is_address(address)) return;
  fail_rank(FSDP_MISMATCH, static_cast<int32_t>(entry.rank),
            "rank {} ({}) says that messages reach it at '{}', which is no address", entry.rank, entry.host,
            message::name_of(std::string(address), message::max_name_bytes));
}

NetAddresses ucx_addresses(const Roster &roster) {
  NetAddresses addresses;
  addresses.reserve(roster.size());
  roster.for_each([&](const message::RosterEntry &entry, bool) { addresses.add(card_in(entry).ucx); });
  return addresses;
}

}  // namespace

JobCards read_cards(const Roster &roster) {
  JobCards cards;
  NetCensus census;
  std::optional<Error> shortage;
  cards.leaders.reserve(roster.node_count());
  cards.addresses.reserve(roster.size());
  roster.for_each([&](const message::RosterEntry &entry, bool leads) {
    const RankCard card = card_in(entry);
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

// When all ranks exchange, the lowest rank of a host acts for the host.
DescriptorNeed need_of_leader(uint32_t node, uint32_t node_count) {
  const uint32_t neighbours = child_count_in_tree(node, node_count) + (node != 0);
  return {neighbours + (node_count > 2 ? max_refugees + refuge_count : 0),
          neighbours_in_circles(node, node_count, circle_size_of(node_count))};
}

std::optional<Error> find_shortage_of(uint32_t rank, std::string_view host, const Descriptors &has,
                                      const DescriptorNeed &need) {
  const std::string shortage = find_shortage(has, need);
  if (shortage.empty()) return {};
  return Error(FSDP_SYSTEM, format_text("rank {} ({}): {}", rank, host, shortage), static_cast<int32_t>(rank),
               FSDP_ORIGIN_OS, EMFILE);
}

}  // namespace fsdp::transport
