// SPDX-License-Identifier: Apache-2.0
// One rank's connections over TCP: one to each peer with which it exchanges messages. Of the two ranks, the lower one
// connects.
//
//   a channel --(mutex)--> Peer::queued --> thread --> Link --> socket
//   socket --> thread --> Link --(mutex)--> a channel's control(), place(), arrived()
//
// The thread reads and writes without the mutex, and locks it for calls of channels. A thread that sends a short
// message writes it itself if nothing is queued before it. No wait of a rank depends on another rank's reading, because
// the thread reads everything that arrives into places that channels have reserved, or drops it.
//
// A thread that waits for a short call drives the connections while the background thread sleeps (begin_driving()). So
// no message is handed from one thread to the other. Below, "the thread" is the one that drives; only one does at any
// time.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "membership/seat.h"
#include "membership/wire/endpoint.h"
#include "transport/message/channel/transport.h"
#include "transport/message/tcp/introduction.h"
#include "transport/message/tcp/link.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport::tcp {

// The other ranks of a job, as one rank sees them over TCP: the addresses of all, and the state of those few with which
// it exchanges messages.

// Returns the address of FSDP_NET_INTERFACE (an interface's name or a numeric address), of the same family as `address`
// if the interface has one. If the variable is not set, returns `address`, through which this rank reached the
// rendezvous. Throws INVALID_ARGUMENT, which lists the existing interfaces.
Endpoint find_interface(const std::string &address);

struct Peer {
  using Clock = std::chrono::steady_clock;

  // -- under the mutex --
  messages::PeerLoss loss;
  bool expected = false;  // a connection with the peer is needed, and will then stay
  bool greeting = false;  // this rank connects to the peer
  bool open = false;      // both ranks have greeted
  bool writing = false;   // the thread writes, so no caller may
  bool closing = false;   // the thread must end all transfers under way
  bool dirty = false;     // the peer is in dirty_
  uint64_t sequence = 0;
  std::vector<OutFrame> queued;
  Endpoint place;            // the address at which this rank connects to the peer
  Clock::time_point expiry;  // time at which connecting is given up
  // The thread makes and ends the link under the mutex. Only the thread reads and writes it, without the mutex.
  std::unique_ptr<Link> link;
  // -- used only by the thread --
  std::unique_ptr<Introduction> dialing;
  Clock::time_point redial;
  std::chrono::milliseconds pause{};
  bool blocked = false;  // the socket accepts no more bytes at the moment
};
// The thread finds peers that it knows without the mutex, while callers make other peers under the mutex. So the peers
// must not move in memory.
class Peers {
 public:
  void set_addresses(NetAddresses addresses) {
    peers_.reserve(addresses.size());  // only a few of these pages are ever written
    numbers_.assign(addresses.size(), 0);
    addresses_ = std::move(addresses);
  }
  uint32_t size() const noexcept { return addresses_.size(); }
  bool empty() const noexcept { return numbers_.empty(); }
  // The address at which the rank listens, according to its card; empty: its card has none.
  std::string_view address(uint32_t rank) const noexcept {
    const auto bytes = addresses_[rank];
    return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
  }
  // Returns NULL if no message was ever sent to the rank or expected from it.
  const Peer *find(uint32_t rank) const noexcept { return numbers_[rank] ? &known(rank) : nullptr; }
  // Makes the peer if it does not exist. An existing peer is found without an allocation.
  Peer &operator[](uint32_t rank) {
    if (!numbers_[rank]) {
      peers_.push_back(std::make_unique<Peer>());
      numbers_[rank] = static_cast<uint16_t>(peers_.size());
    }
    return known(rank);
  }
  // Calls `ask` for each existing peer until it returns false. Returns whether it returned true for all.
  template <class Ask>
  bool all_of(Ask &&ask) const {
    return std::ranges::all_of(peers_, [&](const auto &peer) { return ask(*peer); });
  }

 private:
  Peer &known(uint32_t rank) const noexcept { return *peers_.data()[numbers_[rank] - 1]; }

  NetAddresses addresses_;
  std::vector<uint16_t> numbers_;  // for each rank: its position in peers_, from 1 on; 0: it is not in peers_
  std::vector<std::unique_ptr<Peer>> peers_;
};
static_assert(max_ranks < UINT16_MAX);

class TcpTransport final : public messages::Transport, private Sink {
 public:
  // `address` is the numeric address of the interface to listen at.
  TcpTransport(uint32_t rank, const std::string &address, NetProtection protection);
  ~TcpTransport() override;

  messages::TransportTraits traits() const noexcept override { return {true, true, true}; }
  std::vector<std::byte> address() const override;
  const std::string &warnings() const noexcept override { return warnings_; }
  void join(NetJob job, std::shared_ptr<Seat> seat) override;

  void expect(std::span<const uint32_t> ranks) override;

  // -- with the mutex held --
  bool connected(uint32_t world_rank) const noexcept override;
  void greet(uint32_t world_rank) override;
  void send_control(uint32_t to, const messages::Header &header, const void *payload, uint64_t bytes) override;
  void prepare(uint32_t to) override;
  void send_data(uint32_t to, const messages::Header &header, const void *data) override;
  const messages::PeerLoss &loss_of(uint32_t world_rank) const noexcept override;
  void cut(uint32_t world_rank) noexcept override;
  void wake() noexcept override;

  // -- without the mutex --
  bool begin_driving() noexcept override;
  void drive(std::span<const uint32_t> ranks, uint32_t ms) noexcept override;
  void end_driving() noexcept override;

 private:
  using Clock = std::chrono::steady_clock;
  using Header = messages::Header;
  // -- Sink: called by the thread, without the mutex --
  bool control(const Header &header, const std::byte *payload, uint64_t bytes) override;
  messages::Place place(const Header &header) override;
  void arrived(const Header &header) override;

  // -- with the mutex held --
  void mark(uint32_t r);
  void queue(uint32_t to, OutFrame &frame);
  void fail_peer(uint32_t r, const std::string &text, int code) noexcept;
  void give_up(const OutFrame &frame, uint32_t to) noexcept;
  static void say_last_words(Peer &peer) noexcept;
  void close(uint32_t r);
  void look_at(uint32_t r);
  void open(uint32_t r, Introduction &known);
  void answer_for_nobody();
  bool may_stop() const noexcept;

  // -- the thread --
  void start_thread();
  void run() noexcept;
  template <class Act>
  void guarded(Act &&act) noexcept;
  bool begin_round();
  void handle_dirty_peers();
  bool can_write() const noexcept;
  void sleep();
  void do_round(int ms);
  void take_events(int ms);
  void take_event(uint64_t tag, uint32_t events);
  void write(uint32_t r);
  void read(uint32_t r);
  bool watch(int fd, uint64_t tag, uint32_t events, int operation) noexcept;
  void watch_events(bool wanted) noexcept;
  bool extend_rest() noexcept;
  void set_timer() noexcept;
  void introduce();
  void take_arrivals();
  void let_in(Introduction &other);
  void see_to_dial(uint32_t r);
  // Are connections being made, or will they be made soon?
  bool forms() const noexcept {
    return dials_ > 0 || !introductions_.empty() || (joined_ && !watched_) || (acceptor_ && !acceptor_->idle());
  }
  int forming_ms() const noexcept;
  void fail_context(const Error &error) noexcept;

  NetProtection protection_;
  std::optional<TlsLibrary> tls_;
  std::string warnings_;
  Fd listener_, events_, wake_;
  // What the background thread sleeps on: wake_, timer_, and events_ if watching_ is true.
  Fd sleep_, timer_;
  std::shared_ptr<Seat> seat_;
  JobNames names_;
  uint32_t user_timeout_ms_ = 0;
  Peers peers_;  // empty until this rank has joined
  std::vector<uint32_t> dirty_;
  uint64_t losses_ = 0;
  std::atomic<bool> asleep_{false};  // the thread sleeps, or is about to; changed only under the mutex
  bool watching_ = true;             // events of connections wake the background thread
  bool timed_ = false;               // the timer is set
  bool driven_ = false;              // a thread that waits for a call drives
  Clock::time_point driven_at_{};    // when a thread last stopped driving
  std::condition_variable undriven_;
  bool stopping_ = false;
  Clock::time_point stop_since_{};
  // -- used only by the thread --
  std::vector<uint32_t> writers_;  // peers with something to write
  std::vector<Header> sent_;
  std::vector<uint32_t> fresh_;  // peers whose first bytes may already have been read with their introduction
  Fd acceptor_events_ = Acceptor::make_events();  // used before there is an acceptor
  std::optional<Acceptor>
      acceptor_;          // made when this rank has joined, because before that it does not know the label for proofs
  bool watched_ = false;  // events of the acceptor wake the thread
  std::vector<std::unique_ptr<Introduction>> introductions_;  // introductions of peers that connected to this rank
  std::vector<uint32_t> dialed_;                              // peers to which this rank connects
  size_t dials_ = 0;
  RefusalLog refusals_{"a connection for messages"};
  bool joined_ = false;       // the peers are known
  size_t world_size_ = 0;     // number of ranks
  bool introducing_ = false;  // an introduction has work to do
  Clock::time_point introduced_at_{};
  Clock::time_point moved_at_{}, looked_at_{};
  int sleep_ms_ = 0;  // how long the background thread sleeps before its next round
  bool moved_ = false, stops_ = false;
  pthread_t thread_{};
};

}  // namespace fsdp::transport::tcp
