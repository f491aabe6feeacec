// SPDX-License-Identifier: Apache-2.0
// What a rank brings to the rendezvous for ranks of other hosts: how its messages and, should it lead its node, the
// other leaders reach it.
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
#include "transport/descriptors.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport {

// It points to what others hold: its writer's data, or the bytes that it was read from.
struct RankCard {
  NetChoice asked = NetChoice::automatic;
  std::span<const std::byte> tcp = {}, ucx = {};  // Net::address of each that there is
  std::string_view leader = {};                   // LeaderListener::address
  std::string_view obstacle = {};                 // why there is no ucx
  Descriptors descriptors = {};                   // of its process
  NetProtection protection = {};
  uint32_t ucx_major = 0;                 // of what ucx is of
  std::span<const std::byte> nonce = {};  // rank 0's is the job's
};

std::vector<std::byte> write_card(const RankCard &card);
// A peer wrote it: empty if it is not one.
std::optional<RankCard> read_card(std::span<const std::byte> bytes);

// Over what the ranks of a job send each other messages: once for all of them, by what each has brought.

struct NetDecision {
  bool ucx = false;
  std::string reason;  // for a log: what is used and why
};

// Hears what each rank has brought, in their order, and keeps of it what its decision is made of. UCX where all ranks
// ask for it, or where they leave it open and each has hardware for it and the same major version.
class NetCensus {
 public:
  // host: the rank's, for messages.
  void hear(const RankCard &card, std::string_view host);
  // Throws MISMATCH where ranks ask for different ones, or have different versions of UCX and ask for it, UNSUPPORTED
  // naming the first that lacks what all ask for.
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
  std::optional<NetAnswer> zero_;                              // rank 0's
  size_t nonce_bytes_ = 0;                                     // of its nonce
  std::array<std::optional<NetAnswer>, questions> different_;  // the first that answers otherwise than rank 0
  std::optional<NetAnswer> without_ucx_;                       // the first
  std::optional<NetAnswer> other_ucx_;                         // the first whose UCX need not understand rank 0's
};

// Which ranks need how many descriptors for a job over several hosts.

// Of the rank that leads this host; no other one needs any. For the job itself: a model's meshes need more, counted
// when it is sealed.
DescriptorNeed need_of_leader(uint32_t node, uint32_t node_count);
// FSDP_SYSTEM, naming a rank that may not have as many as it needs.
std::optional<Error> find_shortage_of(uint32_t rank, std::string_view host, const Descriptors &has,
                                      const DescriptorNeed &need);

// What a rank keeps of the cards of all.

struct JobCards {
  NetDecision net;
  NetAddresses addresses;            // by rank, of what was decided for
  std::vector<std::string> leaders;  // Card::leader, by host
  std::vector<std::byte> nonce;      // the job's
};

// All ranks read the same cards, so none has to be told of what is wrong with them. It is thrown, naming the first rank
// that has brought no card, cannot be reached as the others can, or lacks descriptors.
JobCards read_cards(const Roster &roster);

}  // namespace fsdp::transport
