// SPDX-License-Identifier: Apache-2.0
// What carries the messages of one rank to ranks of other hosts and back: tcp/ or ucx/. A thread of its own moves
// everything on, so that peers get what a rank owes them while its caller computes, and everything that channels see
// happens under one mutex.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/message/channel/receivers.h"
#include "transport/net.h"

namespace fsdp::transport::messages {

// Why a peer cannot be reached.
struct Loss {
  std::string text;  // empty: it can
  int32_t origin = 0, code = 0;
  uint64_t order = 0;  // who failed first of all is not one that gave up because of another
};

struct TransportTraits {
  bool in_order;     // the data to one peer comes as it was sent
  bool cuts_surely;  // after cut() all that was under way ends, whatever others do
};

class Transport {
 public:
  explicit Transport(uint32_t rank) : rank_(rank) {}
  virtual ~Transport() = default;
  Transport(const Transport &) = delete;
  Transport &operator=(const Transport &) = delete;

  uint32_t rank() const noexcept { return rank_; }
  virtual TransportTraits traits() const noexcept = 0;
  // As Net.
  virtual std::vector<std::byte> address() const = 0;
  virtual const std::string &warnings() const noexcept = 0;
  virtual uint32_t library_major() const noexcept { return 0; }
  virtual void join(NetJob job, std::shared_ptr<Seat> seat) = 0;

  // The thread that moves everything on lets others go first.
  std::unique_lock<std::mutex> lock() noexcept {
    wanting_.fetch_add(1, std::memory_order_relaxed);
    std::unique_lock lock(mutex_);
    wanting_.fetch_sub(1, std::memory_order_relaxed);
    return lock;
  }
  // More ranks will be sent to, or heard from. Throws FSDP_SYSTEM if this process may not have the descriptors.
  virtual void expect(std::span<const uint32_t>) {}  // here: how many it needs only its library knows
  std::condition_variable &changed() noexcept { return changed_; }

  // -- with the mutex held --
  virtual void add(uint64_t key, Receiver &receiver) { receivers_.add(key, receiver, rank_); }
  virtual void remove(uint64_t key) noexcept { receivers_.remove(key); }
  // Have both greeted?
  virtual bool connected(uint32_t world_rank) const noexcept = 0;
  // Connects to this rank if that is this rank's part, and it has not yet.
  virtual void greet(uint32_t world_rank) = 0;
  // payload is copied, at most longest_control bytes. Without effect if the peer has failed.
  virtual void send_control(uint32_t to, const Header &header, const void *payload, uint64_t bytes) = 0;
  // There is memory for one message more: what follows does not throw.
  virtual void prepare(uint32_t to) = 0;
  // header.bytes bytes of data, which stay as they are until the receiver of that key hears sent(). Only to who has
  // sent something.
  virtual void send_data(uint32_t to, const Header &header, const void *data) = 0;
  virtual const Loss &loss_of(uint32_t world_rank) const noexcept = 0;
  // Gives up all that is under way to and from this peer: soon, and each receiver hears of it.
  virtual void cut(uint32_t world_rank) noexcept = 0;
  virtual void wake() noexcept = 0;

 protected:
  // By the thread that moves everything on. A mutex alone would let it have that again and again while others wait.
  void let_others_go_first() const noexcept {
    for (int i = 0; i < 100 && wanting_.load(std::memory_order_relaxed) > 0; ++i) ::sched_yield();
  }

  const uint32_t rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Receivers receivers_;

 private:
  std::atomic<int> wanting_{0};
};

}  // namespace fsdp::transport::messages
