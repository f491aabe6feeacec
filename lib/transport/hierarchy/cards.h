// SPDX-License-Identifier: Apache-2.0
// A rank's card: its data for ranks of other hosts, which it sends at the rendezvous. It tells how messages reach the
// rank and, if the rank leads its node, how the other leaders reach it.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "membership/join/roster.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport {

// A card refers to memory that it does not own: its writer's data, or the bytes from which it was read.
struct RankCard {
  NetChoice asked = NetChoice::automatic;
  std::span<const std::byte> tcp = {}, ucx = {};  // Net::address of each available Net
  std::string_view leader = {};                   // LeaderListener::address
  std::string_view obstacle = {};                 // reason why UCX is not available
  Descriptors descriptors = {};                   // descriptors of the rank's process
  NetProtection protection = {};
  uint32_t ucx_major = 0;                 // major version of UCX
  std::span<const std::byte> nonce = {};  // the nonce of rank 0 is the job's
};

std::vector<std::byte> write_card(const RankCard &card);
// Reads a card that a peer wrote. Returns nothing if the bytes are not a card.
std::optional<RankCard> read_card(std::span<const std::byte> bytes);

// The choice of the Net for messages between the ranks of a job. It is the same for all ranks, because it follows from
// their cards.
struct NetDecision {
  bool ucx = false;
  std::string reason;  // for a log: the Net that is used, and the reason
};
// Reads the card of each rank, in the order of the ranks, and keeps what the decision needs. UCX is used if all ranks
// ask for it, or if they leave the choice open and all have hardware for it and the same major version.
class NetCensus {
 public:
  // Adds the card of the next rank. `host` is the rank's host, for messages.
  void hear(const RankCard &card, std::string_view host);
  // Throws MISMATCH if ranks ask for different Nets, or ask for UCX and have different versions of it. Throws
  // UNSUPPORTED, naming the first such rank, if a rank lacks the Net that all ask for.
  NetDecision decide() const;

 private:
  struct NetAnswer {
    uint32_t rank;
    std::string host;
    NetChoice asked;
    NetProtection protection;
    uint32_t ucx_major;
    std::string obstacle;
    std::string text() const;  // "rank 2 (c)"
  };
  enum Question { asked, checksum, encryption, questions };
  static const char *word_of(Question question, NetChoice asked, const NetProtection &protection);
  void check_equal(Question question) const;
  std::string ucx_difference() const;
  NetDecision choose() const;

  uint32_t count_ = 0;
  std::optional<NetAnswer> zero_;                              // rank 0's answer
  size_t nonce_bytes_ = 0;                                     // length of rank 0's nonce
  std::array<std::optional<NetAnswer>, questions> different_;  // the first rank that answers differently from rank 0
  std::optional<NetAnswer> without_ucx_;                       // the first rank without UCX
  std::optional<NetAnswer> other_ucx_;                         // the first rank whose UCX may not fit rank 0's
};

// The descriptors that the leader of host `node` needs for a job over several hosts; other ranks need none. Only the
// job itself is counted. The meshes of a model need more descriptors, which are counted when the model is sealed.
DescriptorNeed need_of_leader(uint32_t node, uint32_t node_count);
// Returns FSDP_SYSTEM, naming the rank, if the rank may not open as many descriptors as it needs.
std::optional<Error> find_shortage_of(uint32_t rank, std::string_view host, const Descriptors &has,
                                      const DescriptorNeed &need);

// The data of all cards that a rank keeps.
struct JobCards {
  NetDecision net;
  NetAddresses addresses;            // addresses of all ranks in the chosen Net
  std::vector<std::string> leaders;  // RankCard::leader, by host
  std::vector<std::byte> nonce;      // the job's nonce
};
// All ranks read the same cards, so all find the same errors. Throws an error that names the first rank that has sent
// no card, cannot be reached as the others can, or lacks descriptors.
JobCards read_cards(const Roster &roster);

}  // namespace fsdp::transport
