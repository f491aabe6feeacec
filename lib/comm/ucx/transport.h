// SPDX-License-Identifier: Apache-2.0
// One rank's UCX worker: endpoints to peers, messages out and in. A thread of its own moves everything on, so that
// peers get what a rank owes them while its caller computes, and everything here happens under one mutex.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "comm/shm/seat.h"
#include "comm/ucx/wire.h"
#include "comm/ucx/worker.h"

namespace fsdp::comm::ucx {

// Where a chunk goes. NULL: nowhere, it is dropped.
struct Place {
  std::byte *to = nullptr;
};

// Who sends and receives under one key. All calls come with the transport's mutex held.
class Receiver {
 public:
  virtual void control(const Header &header, const void *payload, uint64_t bytes) = 0;
  virtual Place place(const Header &header, uint64_t bytes) = 0;
  virtual void arrived(const Header &header) = 0;
  virtual void lost(const Header &header) = 0;    // what place() had a place for
  virtual void sent(Kind kind, uint32_t to) = 0;  // or given up
  virtual void peer_failed(uint32_t world_rank) = 0;
  // After messages came or went: what more there is to send.
  virtual void move_on() = 0;

 protected:
  ~Receiver() = default;
};

// Of two ranks the lower one connects and says hello, and the other one then connects and says so too; then they greet
// each other in the same order, and nothing else is sent before. So a connection that is refused is tried again without
// loss. The greetings alone would do for that. But the first message with a header has UCX shake hands, and UCX 1.13
// ends the process (assertion in ucp_request.c) if the other side dies before the answer to that has a connection to go
// by. Hellos need no handshake, and who has got one knows that the other's connection stands.
class Transport {
 public:
  // chunk_bytes: of the largest message.
  Transport(uint32_t rank, uint64_t chunk_bytes);
  ~Transport();
  Transport(const Transport &) = delete;
  Transport &operator=(const Transport &) = delete;

  uint32_t rank() const noexcept { return rank_; }
  const std::vector<std::byte> &address() const noexcept { return worker_.address(); }
  const std::string &warnings() const noexcept { return worker_.warnings(); }
  void join(std::vector<std::vector<std::byte>> addresses, std::shared_ptr<Seat> seat);

  // The thread that moves everything on lets others go first.
  std::unique_lock<std::mutex> lock() noexcept;
  std::condition_variable &changed() noexcept { return changed_; }

  // -- with the mutex held --
  void add(uint64_t key, Receiver &receiver);
  void remove(uint64_t key) noexcept;
  // Have both greeted?
  bool connected(uint32_t world_rank) const noexcept { return peers_[world_rank].open; }
  // Connects to this rank if that is this rank's part, and it has not yet.
  void greet(uint32_t world_rank);
  // payload is copied. Without effect if the peer has failed.
  void send_control(uint32_t to, Header header, const void *payload, uint64_t bytes, Receiver &receiver);
  // There is memory for one message more: what follows does not throw.
  void prepare();
  // data stays as it is until receiver.sent(). Only to who has sent something.
  void send_data(uint32_t to, Header header, const void *data, Receiver &receiver);
  // text empty: it has not failed.
  struct Loss {
    std::string text;
    ucs_status_t status = UCS_OK;
    uint64_t order = 0;  // who failed first of all is not one that gave up because of another
  };
  const Loss &loss_of(uint32_t world_rank) const noexcept { return peers_[world_rank].loss; }
  // Gives up all that is under way to this peer.
  void cut(uint32_t world_rank) noexcept;
  void wake() noexcept { worker_.wake(); }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t most_early = 16384;  // as many as a job may have ranks
  static constexpr uint64_t payload_most = sizeof(Fingerprint);
  // A message under way, in either direction.
  struct Message {
    Transport *transport;
    Header header;
    alignas(8) std::byte payload[payload_most];
    uint64_t payload_bytes;
    Receiver *receiver;
    uint32_t to;
  };
  struct Peer {
    std::vector<std::byte> address;
    ucp_ep_h endpoint = nullptr;
    Loss loss;
    bool open = false;                // both have greeted
    bool heard = false;               // it said hello
    bool greeted = false;             // it greeted
    bool refused = false;             // to be tried again
    Clock::time_point tried, expiry;  // of connecting
    std::chrono::milliseconds pause{};
    std::vector<Message *> waiting;  // until it is open
    uint32_t held = 0;
    uint32_t index = 0;
    Transport *transport = nullptr;
  };
  struct Held {
    Header header;
    std::vector<std::byte> payload;
  };

  void start_thread();
  void stop() noexcept;
  void run() noexcept;
  bool move();
  Receiver *find(uint64_t key) noexcept;
  void hold(const Header &header, const void *payload, uint64_t bytes);
  void answer_for_nobody();
  void fail_context() noexcept;

  // -- connections --
  bool connect(uint32_t to);
  void close(Peer &peer) noexcept;
  void send_hello(Peer &peer);
  void read_hellos();
  void take_hello(uint32_t from);
  void send_greeting(Peer &peer);
  void take_greeting(uint32_t from);
  void open(Peer &peer);
  void see_to_connections();
  void lose(Peer &peer, ucs_status_t status, const char *what) noexcept;
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

  uint32_t rank_;
  Worker worker_;
  const Api &api_;
  std::shared_ptr<Seat> seat_;
  std::mutex mutex_;
  std::atomic<int> wanting_{0};
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::map<uint64_t, Receiver *> receivers_;
  std::set<uint64_t> removed_;
  std::vector<Held> held_;
  std::vector<Header> questions_;   // to receivers that do not exist here
  std::set<uint32_t> early_;        // said hello before this rank joined
  std::vector<uint32_t> unopened_;  // greeted, or refused: something is to be done
  std::vector<std::unique_ptr<Message>> messages_;
  std::vector<Message *> free_;
  uint64_t losses_ = 0;
  Clock::time_point changed_at_ = Clock::now();  // when a connection was last begun, made or lost
  bool stopping_ = false;
  pthread_t thread_{};
};

}  // namespace fsdp::comm::ucx
