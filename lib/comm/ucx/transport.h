// SPDX-License-Identifier: Apache-2.0
// One rank's UCX worker: endpoints to peers, messages out and in. A thread of its own moves everything on, so that
// peers get what a rank owes them while its caller computes, and everything here happens under one mutex.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "comm/ucx/api.h"
#include "comm/ucx/wire.h"

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

class Transport {
 public:
  explicit Transport(uint32_t rank);
  ~Transport();
  Transport(const Transport &) = delete;
  Transport &operator=(const Transport &) = delete;

  uint32_t rank() const noexcept { return rank_; }
  const std::vector<std::byte> &address() const noexcept { return address_; }
  void join(std::vector<std::vector<std::byte>> addresses);

  // The thread that moves everything on lets others go first.
  std::unique_lock<std::mutex> lock() noexcept;
  std::condition_variable &changed() noexcept { return changed_; }

  // -- with the mutex held --
  void add(uint64_t key, Receiver &receiver);
  void remove(uint64_t key) noexcept;
  // payload is copied. Without effect if the peer has failed.
  void send_control(uint32_t to, Header header, const void *payload, uint64_t bytes, Receiver &receiver) noexcept;
  // data stays as it is until receiver.sent().
  void send_data(uint32_t to, Header header, const void *data, Receiver &receiver) noexcept;
  // Empty: it has not failed.
  const std::string &failure_of(uint32_t world_rank) const noexcept { return peers_[world_rank].failure; }
  // Who failed first of all is not one that gave up because of another.
  uint64_t failure_order(uint32_t world_rank) const noexcept { return peers_[world_rank].failure_order; }
  // Gives up all that is under way to this peer.
  void cut(uint32_t world_rank) noexcept;
  void wake() noexcept { api_.ucp_worker_signal(worker_); }

 private:
  static constexpr uint64_t payload_most = sizeof(Fingerprint);
  struct Peer {
    std::vector<std::byte> address;
    ucp_ep_h endpoint = nullptr;
    std::string failure;
    uint64_t failure_order = 0;
    uint32_t held = 0;
    uint32_t index = 0;
    Transport *transport = nullptr;
  };
  // A message under way, in either direction.
  struct Message {
    Transport *transport;
    Header header;
    alignas(8) std::byte payload[payload_most];
    Receiver *receiver;
    uint32_t to;
  };
  struct Held {
    Header header;
    std::vector<std::byte> payload;
  };

  void start_worker();
  void stop() noexcept;
  void run() noexcept;
  bool move() noexcept;
  bool connect(uint32_t to) noexcept;
  void send(uint32_t to, Message &message, const void *data, uint64_t bytes) noexcept;
  void fail_peer(uint32_t rank, ucs_status_t status, const char *what) noexcept;
  Message &take(const Header &header, Receiver &receiver);
  void give_back(Message &message) noexcept { free_.push_back(&message); }
  Receiver *find(uint64_t key) noexcept;
  void hold(const Header &header, const void *payload, uint64_t bytes);
  ucs_status_t receive(const Header &header, void *data, uint64_t bytes, bool is_descriptor);
  void check(ucs_status_t status, const char *what) const;
  void await_request(ucs_status_ptr_t request, int ms) noexcept;

  static ucs_status_t on_message(void *self, const void *header, size_t header_bytes, void *data, size_t bytes,
                                 const ucp_am_recv_param_t *param);
  static void on_sent(void *request, ucs_status_t status, void *message);
  static void on_received(void *request, ucs_status_t status, size_t bytes, void *message);
  static void on_failure(void *peer, ucp_ep_h endpoint, ucs_status_t status);

  Api api_;
  uint32_t rank_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::vector<std::byte> address_;
  std::mutex mutex_;
  std::atomic<int> wanting_{0};
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::map<uint64_t, Receiver *> receivers_;
  std::set<uint64_t> removed_;
  std::vector<Held> held_;
  std::vector<std::unique_ptr<Message>> messages_;
  std::vector<Message *> free_;
  uint64_t failures_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace fsdp::comm::ucx
