// SPDX-License-Identifier: Apache-2.0
// The two ends of a connection, TCP or unix, prove to each other that they know the job secret, over nonces of both,
// before they read anything else. Each step has a fixed size, so an end stores at most 88 bytes for a stranger.
//
//   host -> guest   Challenge   at once
//   guest -> host   Answer      proves the guest's secret over both nonces
//   host -> guest   Proof       proves the host's secret over both nonces
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "membership/wire/endpoint.h"
#include "membership/wire/secret.h"

// The messages of a handshake, and the head of every packet between the ranks of a host (join/guest.h). Fixed layouts,
// checked for size, magic, version and kind before use.
namespace fsdp::membership::wire {

constexpr char magic[8] = {'f', 's', 'd', 'p', 'm', 'e', 'e', 't'};
constexpr uint32_t version = 1;

enum class PacketKind : uint32_t { challenge = 1, answer, proof, join, refused, peer, start, report, verdict };

struct PacketHead {
  char magic[8];
  uint32_t version;
  PacketKind kind;
};

struct Challenge {
  static constexpr PacketKind kind = PacketKind::challenge;
  PacketHead head;
  Nonce nonce;
};
struct Answer {
  static constexpr PacketKind kind = PacketKind::answer;
  PacketHead head;
  Nonce nonce;
  Digest digest;
};
struct Proof {
  static constexpr PacketKind kind = PacketKind::proof;
  PacketHead head;
  Digest digest;
};
constexpr size_t longest = 4096;  // maximum bytes of a packet

template <class M>
M make() {
  static_assert(std::is_trivially_copyable_v<M> && sizeof(M) <= longest);
  M message{};
  std::memcpy(message.head.magic, magic, sizeof magic);
  message.head.version = version;
  message.head.kind = M::kind;
  return message;
}

// `label` names the purpose of a connection; among the ranks of one host it is empty.
inline Digest guest_digest(std::string_view secret, const Nonce &host, const Nonce &guest,
                           const std::string &label = {}) {
  return authenticate(secret, "libfsdp guest" + label, {host, guest});
}
inline Digest host_digest(std::string_view secret, const Nonce &host, const Nonce &guest,
                          const std::string &label = {}) {
  return authenticate(secret, "libfsdp host" + label, {host, guest});
}

}  // namespace fsdp::membership::wire

namespace fsdp::membership {

enum class Role { host, guest };  // host: the listening end; guest: the connecting end
// The progress of an exchange with the other end. An exchange never waits.
enum class IoState { waiting, done, failed };

// One end of a handshake; never waits. `label` names the purpose of the connection: both ends must have the same label.
class Handshake {
 public:
  // The secret's text must outlive this object.
  Handshake(Role role, std::string_view secret, const std::string &label);
  // Reads and sends what is possible now, and reads no byte after the handshake.
  IoState advance(const Fd &socket);
  IoState state() const noexcept { return state_; }
  const std::string &problem() const noexcept { return problem_; }  // why the handshake failed
  // After a successful handshake: the keys for the later frames of this connection only.
  StreamKeys keys() const;
  bool ended() const noexcept { return ended_; }      // the connection ended; no wrong bytes came
  bool has_heard() const noexcept { return heard_; }  // have any bytes arrived?
  bool wants_to_send() const noexcept { return sent_ < out_bytes_; }

 private:
  void hear_challenge();
  void hear_answer();
  void hear_proof();
  template <class M>
  void say(const M &message);
  template <class M>
  bool check_head(M &message);
  bool send(const Fd &socket);
  bool receive(const Fd &socket);
  void refuse(std::string problem);

  Role role_;
  std::string_view secret_;
  std::string label_;
  IoState state_ = IoState::waiting;
  std::string problem_;
  bool ended_ = false, heard_ = false;
  Nonce host_nonce_{}, guest_nonce_{};
  std::array<std::byte, sizeof(wire::Answer)> in_{}, out_{};
  bool challenged_ = false;        // this guest has the challenge
  size_t expected_ = 0, got_ = 0;  // bytes of in_; expected_ is 0 while the last message is being sent
  size_t out_bytes_ = 0, sent_ = 0;
};

// Runs the whole handshake on a connected, nonblocking socket. Returns an empty text if both ends know the secret; else
// says what failed (also if the limit is over). `keys` gets the connection's keys. `ended` is set if the cause was the
// end of the connection or the limit, and not wrong bytes. Throws only the waiter's errors.
std::string prove(const Fd &socket, Role role, std::string_view secret, const std::string &label, const Limit &limit,
                  StreamKeys *keys = nullptr, bool *ended = nullptr);

}  // namespace fsdp::membership
