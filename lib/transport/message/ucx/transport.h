// SPDX-License-Identifier: Apache-2.0
// One rank's UCX worker: endpoints to peers, and sent and received messages. A background thread drives the worker, so
// that peers get their data while this rank's caller computes. Everything in this class happens under one mutex.
#pragma once

#include <pthread.h>

#include <chrono>
#include <memory>
#include <set>
#include <vector>

#include "membership/seat.h"
#include "transport/message/channel/transport.h"
#include "transport/message/ucx/worker.h"
#include "transport/names.h"

namespace fsdp::transport::ucx {

using messages::Header;
using messages::header_magic;
using messages::Kind;
using messages::longest_control;
using messages::PeerLoss;
using messages::Place;
using messages::Receiver;

// The tag of a hello, which has no other content; see UcxTransport.
constexpr uint64_t hello_tag(uint32_t from) { return uint64_t{header_magic} << 32 | from; }

// The lower of two ranks connects and sends a hello; the other rank then connects and sends a hello back. Then they
// greet each other in the same order, and nothing else is sent before that. So a refused connection is tried again
// without loss. For that alone the greetings would be enough, but at the first message with a header UCX makes a
// handshake. UCX 1.13 ends the process (assertion in ucp_request.c) if the other side dies before a connection exists
// for the answer to the handshake. Hellos need no handshake, and a rank that has received one knows that the other's
// connection exists.
class UcxTransport final : public messages::Transport {
 public:
  // `chunk_bytes` is the size of the largest message; `guarded` is the argument of create_ucx_net().
  UcxTransport(uint32_t rank, uint64_t chunk_bytes, bool guarded);
  ~UcxTransport() override;

  messages::TransportTraits traits() const noexcept override { return {false, false, false}; }
  std::vector<std::byte> address() const override { return worker_.address(); }
  const std::string &warnings() const noexcept override { return worker_.warnings(); }
  uint32_t library_major() const noexcept override { return worker_.api().major; }
  void join(NetJob job, std::shared_ptr<Seat> seat) override;

  // -- with the mutex held --
  void remove(uint64_t key) noexcept override;
  bool connected(uint32_t world_rank) const noexcept override { return peers_[world_rank].open; }
  void greet(uint32_t world_rank) override;
  void send_control(uint32_t to, const Header &header, const void *payload, uint64_t bytes) override;
  void prepare(uint32_t) override { prepare(); }
  void send_data(uint32_t to, const Header &header, const void *data) override;
  const PeerLoss &loss_of(uint32_t world_rank) const noexcept override { return peers_[world_rank].loss; }
  void cut(uint32_t world_rank) noexcept override;
  void wake() noexcept override { worker_.wake(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t max_early = 16384;  // the maximum number of ranks in a job
  // A message under way, in either direction.
  struct Message {
    UcxTransport *transport;
    Header header;
    alignas(8) std::byte payload[longest_control];
    uint64_t payload_bytes;
    Receiver *receiver;
    uint32_t to;
  };
  struct UcxPeer {
    std::vector<std::byte> address;
    ucp_ep_h endpoint = nullptr;
    PeerLoss loss;
    bool open = false;                // both ranks have greeted
    bool heard = false;               // the peer sent a hello
    bool greeted = false;             // the peer sent a greeting
    bool refused = false;             // the connection must be tried again
    Clock::time_point tried, expiry;  // time of the last attempt to connect, and time at which connecting is given up
    std::chrono::milliseconds pause{};
    std::vector<Message *> waiting;  // messages to send once the peer is open
    uint32_t index = 0;
    UcxTransport *transport = nullptr;
  };
  void start_thread();
  void stop() noexcept;
  void run() noexcept;
  void prepare();
  bool move();
  void answer_kept_questions();
  void fail_context() noexcept;

  // -- connections --
  bool connect(uint32_t to);
  void close(UcxPeer &peer) noexcept;
  void send_hello(UcxPeer &peer);
  void read_hellos();
  void take_hello(uint32_t from);
  void send_greeting(UcxPeer &peer);
  void take_greeting(uint32_t from);
  void open(UcxPeer &peer);
  void see_to_connections();
  void lose(UcxPeer &peer, ucs_status_t status, const char *what) noexcept;
  void fail_peer(uint32_t rank, ucs_status_t status, const char *what) noexcept;

  // -- messages --
  Message &take(const Header &header, Receiver *receiver);
  void give_back(Message &message) noexcept { free_.push_back(&message); }
  void send(uint32_t to, Message &message, const void *data, uint64_t bytes);
  ucs_status_t receive(const Header &header, void *data, uint64_t bytes, bool is_descriptor);

  static ucs_status_t on_message(void *self, const void *header, size_t header_bytes, void *data, size_t bytes,
                                 const ucp_am_recv_param_t *param);
  static void on_sent(void *request, ucs_status_t status, void *message);
  static void on_received(void *request, ucs_status_t status, size_t bytes, void *message);
  static void on_failure(void *peer, ucp_ep_h endpoint, ucs_status_t status);

  Worker worker_;
  const Api &api_;
  std::shared_ptr<Seat> seat_;
  std::vector<UcxPeer> peers_;
  std::set<uint32_t> early_;        // peers that sent a hello before this rank joined
  std::vector<uint32_t> unopened_;  // peers that greeted or were refused, and must be handled
  std::vector<std::unique_ptr<Message>> messages_;
  std::vector<Message *> free_;
  uint64_t losses_ = 0;
  Clock::time_point changed_at_ = Clock::now();  // time when a connection was last begun, made or lost
  bool stopping_ = false;
  pthread_t thread_{};
};

}  // namespace fsdp::transport::ucx
