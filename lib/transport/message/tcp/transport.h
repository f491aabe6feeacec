// SPDX-License-Identifier: Apache-2.0
// One rank's connections over TCP: one to each peer that it sends to or hears from. The lower rank of the two connects.
//
//   a channel --(mutex)--> Peer::queued --> thread --> Link --> socket
//   socket --> thread --> Link --(mutex)--> a channel's control(), place(), arrived()
//
// The thread reads and writes without the mutex, and locks it for calls of channels. A thread that sends a short
// message writes it itself if nothing is queued before it. No wait of a rank depends on another rank's reading: the
// thread reads everything that arrives into places that channels have reserved, or drops it.
#pragma once

#include <pthread.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "base/fd.h"
#include "membership/seat.h"
#include "membership/wire/endpoint.h"
#include "transport/message/channel/transport.h"
#include "transport/message/tcp/peers.h"
#include "transport/names.h"

namespace fsdp::transport::tcp {

class TcpTransport final : public messages::Transport, private Sink {
 public:
  // `address` is the numeric address of the interface to listen at.
  TcpTransport(uint32_t rank, const std::string &address, NetProtection protection);
  ~TcpTransport() override;

  messages::TransportTraits traits() const noexcept override { return {true, true}; }
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
  bool begin_round();
  void do_round();
  void await_events();
  void take_event(uint64_t tag, uint32_t events);
  void write(uint32_t r);
  void read(uint32_t r);
  bool watch(int fd, uint64_t tag, uint32_t events, int operation) noexcept;
  void introduce();
  void take_arrivals();
  void let_in(Introduction &other);
  void see_to_dial(uint32_t r);
  // Are connections being made, or about to be made?
  bool forms() const noexcept {
    return dials_ > 0 || !introductions_.empty() || (joined_ && !watched_) || (acceptor_ && !acceptor_->idle());
  }
  int forming_ms() const noexcept;
  void fail_context(const Error &error) noexcept;

  NetProtection protection_;
  std::optional<TlsLibrary> tls_;
  std::string warnings_;
  Fd listener_, events_, wake_;
  std::shared_ptr<Seat> seat_;
  JobNames names_;
  uint32_t user_timeout_ms_ = 0;
  Peers peers_;  // empty until this rank has joined
  std::vector<uint32_t> dirty_;
  uint64_t losses_ = 0;
  bool asleep_ = false;  // the thread sleeps, or is about to
  bool stopping_ = false;
  Clock::time_point stop_since_{};
  // -- used only by the thread --
  std::vector<uint32_t> writers_;  // peers with something to write
  std::vector<Header> sent_;
  std::vector<uint32_t> fresh_;  // peers whose first bytes may already have been read with their introduction
  Fd acceptor_events_ = Acceptor::make_events();  // used until there is an acceptor
  std::optional<Acceptor>
      acceptor_;          // made once this rank has joined: before, it does not know for which rank secrets are proven
  bool watched_ = false;  // events of the acceptor wake the thread
  std::vector<std::unique_ptr<Introduction>> introductions_;  // introductions of peers that connected to this rank
  std::vector<uint32_t> dialed_;                              // peers to which this rank connects
  size_t dials_ = 0;
  RefusalLog refusals_{"a connection for messages"};
  bool joined_ = false;       // the peers are known
  size_t world_size_ = 0;     // number of ranks
  bool introducing_ = false;  // an introduction has work to do
  Clock::time_point introduced_at_{};
  Clock::time_point moved_at_{};
  bool moved_ = false, sleeps_ = false, stops_ = false;
  pthread_t thread_{};
};

}  // namespace fsdp::transport::tcp
