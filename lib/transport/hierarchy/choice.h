// SPDX-License-Identifier: Apache-2.0
// Over what the ranks of a job send each other messages: once for all of them, by what each has brought.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "transport/hierarchy/card.h"

namespace fsdp::transport {

struct NetDecision {
  bool ucx = false;
  std::string reason;  // for a log: what is used and why
};

// Hears what each rank has brought, in their order, and keeps of it what its decision is made of. UCX where all ranks
// ask for it, or where they leave it open and each has hardware for it and the same major version.
class NetCensus {
 public:
  // host: the rank's, for messages.
  void hear(const Card &card, std::string_view host);
  // Throws MISMATCH where ranks ask for different ones, or have different versions of UCX and ask for it, UNSUPPORTED
  // naming the first that lacks what all ask for.
  NetDecision decide() const;

 private:
  struct Answer {
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
  std::optional<Answer> zero_;                              // rank 0's
  size_t nonce_bytes_ = 0;                                  // of its nonce
  std::array<std::optional<Answer>, questions> different_;  // the first that answers otherwise than rank 0
  std::optional<Answer> without_ucx_;                       // the first
  std::optional<Answer> other_ucx_;                         // the first whose UCX need not understand rank 0's
};

}  // namespace fsdp::transport
