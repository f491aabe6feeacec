// SPDX-License-Identifier: Apache-2.0
// Accepts connections from strangers and returns those whose other end has proven the job secret. Every listener of the
// library has an Acceptor: the listeners of a host's ranks, of the rendezvous, of leaders and for messages.
//
//   listener --> stranger (its handshake is under way) --> AuthenticatedSocket
//                   |
//                   +--> refused, with a line in the log: the proof was wrong, or did not come within proof_time
//
// Never waits, and reads only the fixed number of bytes of the handshake from a stranger.
#pragma once

#include <poll.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <list>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "membership/wire/endpoint.h"
#include "membership/wire/handshake.h"

namespace fsdp::membership {

// Warnings about refused connections. A stranger that connects again and again cannot fill the log: after a few lines
// one line is written in ten seconds, with the number of refusals that were not logged.
class RefusalLog {
 public:
  using Clock = std::chrono::steady_clock;
  using Log = std::function<void(fsdp_log_level, const std::string &)>;
  static constexpr uint32_t lines_at_once = 8;
  static constexpr auto line_time = std::chrono::seconds(10);

  // `what`: the kind of connection, such as "a connection for messages". An empty log writes nothing; an empty `from`
  // is left out.
  explicit RefusalLog(std::string what, Log log = {}) : what_(std::move(what)), log_(std::move(log)) {}
  void set_log(Log log) { log_ = std::move(log); }
  void note(const std::string &from, const std::string &why, Clock::time_point now = Clock::now());

 private:
  bool may_write(Clock::time_point now) noexcept;

  std::string what_;
  Log log_;
  uint32_t lines_left_ = lines_at_once;
  Clock::time_point refilled_{};
  uint64_t unwritten_ = 0;
};

class Acceptor {
 public:
  using Clock = std::chrono::steady_clock;
  // Each stranger has at least least_time to prove the secret, which is a round trip to another continent, however many
  // strangers connect. Only an address with more than half of all places may lose some of them sooner.
  static constexpr auto least_time = std::chrono::milliseconds(250);
  static constexpr auto proof_time = std::chrono::seconds(5);
  // If there was no descriptor for a new connection for this long, strangers are not the cause, because none keeps a
  // descriptor for as long.
  static constexpr auto shortage_time = std::chrono::seconds(7);
  // Time for the first message after the proof, because the machine that has proven the secret may be slow.
  static constexpr auto message_time = std::chrono::seconds(20);

  // A connection whose other end knows the secret.
  struct AuthenticatedSocket {
    Fd socket;
    std::string from;  // "10.0.0.7:51200", for messages
    StreamKeys keys;
  };

  // The number of simultaneous strangers: a quarter of the descriptors that this process may have, from 128 to 512.
  static size_t usual_places();
  // Makes the epoll descriptor that an acceptor needs, for callers that need it before they listen.
  static Fd make_events();

  // `label`: the purpose of the connections; both ends must have the same label. The secret's text and the log must
  // outlive this object.
  Acceptor(std::string_view secret, std::string label, RefusalLog *log = nullptr, size_t places = usual_places(),
           Fd events = make_events());
  ~Acceptor() = default;
  Acceptor(const Acceptor &) = delete;
  Acceptor &operator=(const Acceptor &) = delete;

  // `listener`: a listening TCP or unix socket, which must outlive this object. Unix connections of other users are
  // closed.
  void listen(const Fd &listener);
  // Accepts as many new connections as there are places, continues handshakes, and returns the connections that have
  // proven the secret. `takes`: if false, new connections wait in the kernel.
  std::vector<AuthenticatedSocket> look(bool takes = true);

  // Readable when look() has something to do other than to refuse late strangers. While the acceptor is crowded,
  // callers should not poll the descriptor, but call look() at their usual period. A flood then costs only a look per
  // period.
  int descriptor() const noexcept { return events_.get(); }
  bool crowded() const noexcept;
  void add_polls(std::vector<pollfd> &polls) const;
  // True if only a new connection gives look() something to do. If it is false, the caller must look regularly.
  bool idle() const noexcept { return strangers_.empty() && watched_; }

  // Tells whether connections could not be accepted, for lack of descriptors or of memory.
  const AcceptPause &pause() const noexcept { return pause_; }
  // Describes the connection that was refused last because of bytes that its other end sent, such as the proof of
  // another secret. For messages about missing ranks: "10.0.0.7:51200: the peer has another job secret". Empty if there
  // was none.
  const std::string &last_failure() const noexcept { return last_failure_; }

 private:
  struct Stranger {
    Fd socket;
    Endpoint from;
    std::string address;  // without the port
    Handshake handshake;
    Clock::time_point since;
  };
  using Place = std::list<Stranger>::iterator;

  void continue_handshakes(std::vector<AuthenticatedSocket> &arrivals);
  void accept(std::vector<AuthenticatedSocket> &arrivals);
  bool take_from(const Fd &listener);
  bool has_room();
  bool make_room();
  Place find_oldest_of_most();
  // Returns the place after `stranger`.
  Place advance(Place stranger, std::vector<AuthenticatedSocket> &arrivals);
  Place refuse(Place stranger, const std::string &why);
  void watch_listeners(bool wanted) noexcept;

  std::string_view secret_;
  std::string label_;
  RefusalLog *log_;
  const size_t places_;
  Fd events_;  // epoll of the strangers, and of the listeners while they are watched
  std::vector<const Fd *> listeners_;
  bool watched_ = false;
  std::list<Stranger> strangers_;  // the oldest first
  AcceptPause pause_;
  std::string last_failure_;
};

}  // namespace fsdp::membership
