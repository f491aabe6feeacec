// SPDX-License-Identifier: Apache-2.0
// The messages of the bootstrap: fixed layouts, one packet each, checked for size, magic, version and kind before use.
//
//   rank 0 -> rank r   Challenge         at once
//   r -> 0             Answer            proves the secret over both nonces
//   0 -> r             Proof             so does rank 0; only now is anything else read
//   r -> 0             Join              with r's pidfd and the way into its mailbox; or Refusal: r cannot join
//   0 -> r             Refusal, or when all have joined: one Peer a rank, with its descriptors, and Start
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "membership/wire/secret.h"

namespace fsdp::membership::wire {

constexpr char magic[8] = {'f', 's', 'd', 'p', 'm', 'e', 'e', 't'};
constexpr uint32_t version = 1;

enum class Kind : uint32_t { challenge = 1, answer, proof, join, refusal, peer, start };

struct Head {
  char magic[8];
  uint32_t version;
  Kind kind;
};

struct Challenge {
  static constexpr Kind kind = Kind::challenge;
  Head head;
  Nonce nonce;
};
struct Answer {
  static constexpr Kind kind = Kind::answer;
  Head head;
  Nonce nonce;
  Digest digest;
};
struct Proof {
  static constexpr Kind kind = Kind::proof;
  Head head;
  Digest digest;
};
struct Join {
  static constexpr Kind kind = Kind::join;
  Head head;
  uint32_t rank, world_size;
  uint32_t wire_version;
  char library[28];  // as much of it as there is room for
};
struct Refusal {
  static constexpr Kind kind = Kind::refusal;
  Head head;
  int32_t status, rank;
  char text[480];
};
struct Peer {
  static constexpr Kind kind = Kind::peer;
  Head head;
  uint32_t rank, world_size;
};
struct Start {
  static constexpr Kind kind = Kind::start;
  Head head;
};
constexpr size_t longest = sizeof(Refusal);

template <class M>
M make() {
  static_assert(std::is_trivially_copyable_v<M> && sizeof(M) <= longest);
  M message{};
  std::memcpy(message.head.magic, magic, sizeof magic);
  message.head.version = version;
  message.head.kind = M::kind;
  return message;
}

inline Refusal make_refusal(int32_t status, int32_t rank, std::string_view text) {
  auto refusal = make<Refusal>();
  refusal.status = status;
  refusal.rank = rank;
  text.copy(refusal.text, sizeof refusal.text - 1);
  return refusal;
}

// The label says what a connection is for; the ranks of one host have none.
inline Digest guest_digest(std::string_view secret, const Nonce &host, const Nonce &guest,
                           const std::string &label = {}) {
  return authenticate(secret, "libfsdp guest" + label, {host, guest});
}
inline Digest host_digest(std::string_view secret, const Nonce &host, const Nonce &guest,
                          const std::string &label = {}) {
  return authenticate(secret, "libfsdp host" + label, {host, guest});
}

}  // namespace fsdp::membership::wire
