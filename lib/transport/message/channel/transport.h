// SPDX-License-Identifier: Apache-2.0
// What carries the messages of one rank to ranks of other hosts and back: tcp/ or ucx/. A thread of its own moves
// everything on, so that peers get what a rank owes them while its caller computes, and everything that channels see
// happens under one mutex.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transport/call/launch.h"
#include "transport/net.h"

namespace fsdp::transport::messages {

// What messages between hosts look like. All hosts have the same byte order and the same version of the library, which
// the bootstrap has compared; nothing that a message says is trusted beyond that.

enum class Kind : uint32_t {
  call = 1,  // this rank is in a collective; payload: its fingerprint. Its buffers are ready for the first chunks
  credit,    // it has summed the chunks before `chunk`: their places are free
  data,      // payload: one chunk
  ended,     // payload: Ended
  ask,       // what has the receiver's caller enqueued? chunk: when it was asked
  answer,    // chunk: of the question; bytes: RoundWords::ended.called
  greeting   // UCX's first message with a header, in either direction; see UcxTransport
};

enum class Stage : uint32_t { reduce, gather };

struct Header {
  uint32_t magic;
  Kind kind;
  uint32_t from;  // rank of the job
  Stage stage;
  uint64_t key;
  uint64_t round;
  uint64_t number;
  uint64_t chunk;
  uint64_t bytes;  // of data; of a chunk in a call
  uint64_t call;   // Fingerprint::hash of the collective that this is of
};
// The longest payload of a message that is no data.
constexpr uint64_t longest_control = sizeof(Fingerprint);
constexpr uint32_t header_magic = 0x66736406;

// RoundWords of a rank, and how far it had come when it wrote them.
struct EndWords {
  uint64_t last;
  uint64_t flags;
  uint64_t phase;
};
// The sender's own, and those of the rank that it ended for, if there is one: this message may overtake that rank's,
// and all ranks are to name the same cause.
struct Ended {
  EndWords own;
  uint64_t cause;  // place among the ranks
  EndWords of_cause;
};

// The sender and receiver of messages under one key.

// Where a chunk goes. NULL: nowhere, it is dropped. misfit: no peer that keeps to the protocol sends this.
struct Place {
  std::byte *to = nullptr;
  bool misfit = false;
};

// All calls come with the transport's mutex held.
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

// A transport's receivers by key, and what comes for one that does not exist here yet, or no more. Under the
// transport's mutex.

class Receivers {
 public:
  // world_size: until it is set, messages of any rank are kept.
  void set_world_size(size_t world_size) { held_of_.resize(world_size); }
  // What was kept for it comes first. Throws INTERNAL if there is, or was, one with this key.
  void add(uint64_t key, Receiver &receiver, uint32_t rank);
  void remove(uint64_t key) noexcept;
  // NULL: there is none.
  Receiver *find(uint64_t key) const noexcept;
  // For a key without a receiver. False: its sender has sent more of these than it may.
  bool keep(const Header &header, const void *payload, uint64_t bytes);
  // Questions to keys without a receiver: the transport answers them that nothing was called.
  std::vector<Header> take_questions() noexcept { return std::exchange(questions_, {}); }
  bool has_questions() const noexcept { return !questions_.empty(); }

  template <class Do>
  void each(Do &&act) const {
    for (const auto &[key, receiver] : receivers_) act(*receiver);
  }

 private:
  struct Held {
    Header header;
    std::vector<std::byte> payload;
  };

  std::map<uint64_t, Receiver *> receivers_;
  std::set<uint64_t> known_;  // also those that are gone
  std::vector<Held> held_;
  std::vector<uint32_t> held_of_;  // how many, by sender
  std::vector<Header> questions_;
};

// That a rank which has no such channel gives to a question.
inline Header answer_of_nobody(const Header &question, uint32_t rank) noexcept {
  Header answer = question;
  answer.kind = Kind::answer;
  answer.from = rank;
  answer.bytes = 0;  // nothing was called
  return answer;
}

// Why a peer cannot be reached.
struct Loss {
  std::string text;  // empty: it can
  int32_t origin = 0, code = 0;
  uint64_t order = 0;  // the first rank that failed is not one that gave up because of another
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
  // header.bytes bytes of data, which stay as they are until the receiver of that key hears sent(). Only to a peer that
  // has sent something.
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
