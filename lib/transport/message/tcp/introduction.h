// SPDX-License-Identifier: Apache-2.0
// A connection from its first packet until both ends know which two ranks it connects. Of the two ranks, the lower one
// connects.
//
//   both         prove the job's secret (membership/wire/handshake.h), for this purpose, to this rank
//   connecting   Greeting: from which rank to which
//   the other    Greeting back
//   both         with FSDP_NET_ENCRYPTION=on: TLS with a key of the job for these two ranks, and within it a Binding,
//                which proves the secret again, over a value that only the two ends of this TLS connection know
//
// Until the secret is proven, only the fixed 88 bytes of the proof are read. After that, only the greeting is read
// until it is complete.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "membership/wire/acceptor.h"
#include "membership/wire/endpoint.h"
#include "membership/wire/handshake.h"
#include "transport/message/tcp/tls.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport::tcp {

// The data that both ends of all connections have. The destructor wipes the key; the secret is wiped with its last
// copy.
struct JobNames {
  Secret secret;
  std::string name;
  uint32_t rank = 0, world_size = 0;
  NetProtection protection = {};
  const TlsLibrary *tls = nullptr;  // set if connections are encrypted
  Digest key = {};                  // the key of this job, if connections are encrypted
  ~JobNames();
  // The label with which a connection to this rank proves the secret.
  std::string label(uint32_t to) const;
};

struct Greeting {
  uint32_t magic, version, byte_order, world_size, from, to, checksum, encryption;
};
// The first message within TLS. It proves that the connection is the same as before.
using Binding = Digest;

class Introduction {
 public:
  using Clock = std::chrono::steady_clock;

  // Connects to a peer. This end must have sent its greeting by `deadline`. From then on the other end may have
  // accepted the connection, and would report a hang-up as the end of this rank. So the other end has until `last` to
  // answer.
  Introduction(const JobNames &job, uint32_t to, const Endpoint &place, Clock::time_point deadline,
               Clock::time_point last);
  // Takes a connection from an end that has proven the secret. The introduction must be complete by `deadline`.
  Introduction(const JobNames &job, Acceptor::AuthenticatedSocket arrival, Clock::time_point deadline);
  ~Introduction() { hang_up(); }
  Introduction(const Introduction &) = delete;
  Introduction &operator=(const Introduction &) = delete;

  // Reads and writes what is possible now, and never waits.
  IoState advance();
  const Fd &socket() const noexcept { return socket_; }
  bool wants_room() const noexcept;  // true: it waits for room to write; false: it waits for bytes to read
  Clock::time_point deadline() const noexcept { return deadline_; }
  // Says why the introduction failed. final(): another attempt would fail in the same way.
  const std::string &problem() const noexcept { return problem_; }
  int code() const noexcept { return code_; }
  bool final() const noexcept { return final_; }
  // The address of an end that has connected, "10.0.0.7:51200".
  const std::string &from() const noexcept { return from_; }
  // The other rank, once the introduction is done.
  uint32_t peer() const noexcept { return peer_; }
  Fd take_socket() noexcept { return std::move(socket_); }
  std::unique_ptr<Tls> take_tls() noexcept { return std::move(tls_); }  // NULL: the connection is not encrypted

 private:
  void hang_up() noexcept;  // ends the connection even if a child of this process has the socket
  IoState fail_with(std::string problem, int code, bool final);
  IoState connect();
  IoState prove();
  Clock::time_point limit() const noexcept;
  IoState greet();
  bool write_greeting();
  bool read_greeting();
  Greeting own_greeting() const noexcept;
  IoState encrypt();
  IoState bind();
  bool write_binding();
  bool read_binding();
  Binding binding_of(Role role) const;

  const JobNames &job_;
  Role role_;
  uint32_t peer_ = 0;
  Endpoint place_;
  std::string from_;
  Clock::time_point deadline_, last_;
  Fd socket_;
  bool connecting_ = false;
  std::optional<Handshake> handshake_;  // only on the connecting end; on the other end the Acceptor has it
  std::array<std::byte, sizeof(Greeting)> in_{}, out_{};
  size_t got_ = 0, gone_ = 0, out_bytes_ = 0;
  bool spoken_ = false;  // this end's greeting was sent
  bool greeted_ = false, shaken_ = false, bound_ = false;
  std::unique_ptr<Tls> tls_;
  Binding own_binding_{}, said_binding_{};
  std::string problem_;
  int code_ = 0;
  bool final_ = false;
};

}  // namespace fsdp::transport::tcp
