// SPDX-License-Identifier: Apache-2.0
// The two ends of a TCP connection prove to each other that they know the job secret, over nonces of both, before
// anything else is read. Each step has one fixed size, so a stranger makes the other end keep 88 bytes at most.
//
//   host -> guest   Challenge   at once
//   guest -> host   Answer      proves the secret over both nonces
//   host -> guest   Proof       so does the host
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "membership/join/wire.h"
#include "membership/wire/endpoint.h"

namespace fsdp::membership {

enum class Role { host, guest };  // who listens; who connects

// One end's part, never waiting. The label says what the connection is for: both ends must give the same.
class Handshake {
 public:
  enum class State { waiting, proven, failed };

  // The secret's text outlives this object.
  Handshake(Role role, std::string_view secret, const std::string &label);
  // Reads and sends what is possible now, and not a byte beyond the handshake.
  State advance(const Fd &socket);
  State state() const noexcept { return state_; }
  const std::string &problem() const noexcept { return problem_; }  // of a failed one
  // Of one that is proven: for what follows it on this connection alone.
  StreamKeys keys() const;
  bool ended() const noexcept { return ended_; }      // the connection did: it has not failed by what came
  bool has_heard() const noexcept { return heard_; }  // something has come
  bool of_another_version() const noexcept { return other_version_; }
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
  State state_ = State::waiting;
  std::string problem_;
  bool other_version_ = false, ended_ = false, heard_ = false;
  Nonce host_nonce_{}, guest_nonce_{};
  std::array<std::byte, sizeof(wire::Answer)> in_{}, out_{};
  bool challenged_ = false;        // a guest: the challenge has come
  size_t expected_ = 0, got_ = 0;  // of in_; 0 expected: the last message is on its way out
  size_t out_bytes_ = 0, sent_ = 0;
};

// The whole handshake on a connected, nonblocking socket. Empty if both ends know the secret; else why not (also when
// the limit is over). keys: those of the connection. ended: set if it was the connection, or the limit, and nothing
// that came. Throws only what the waiter does.
std::string prove(const Fd &socket, Role role, std::string_view secret, const std::string &label, const Limit &limit,
                  StreamKeys *keys = nullptr, bool *ended = nullptr);

}  // namespace fsdp::membership
