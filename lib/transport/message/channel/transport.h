// SPDX-License-Identifier: Apache-2.0
// A transport carries messages between one rank and ranks of other hosts: tcp/ or ucx/. Its background thread sends and
// receives, so that peers get their data while this rank's caller computes. All calls between channels and the
// transport happen under one mutex.
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
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "transport/call/launch.h"
#include "transport/net.h"

namespace fsdp::transport::messages {

// The format of messages between hosts. The bootstrap has checked that all hosts have the same byte order and the same
// version of the library. Apart from that nothing in a message is trusted.
enum class Kind : uint32_t {
  call = 1,  // the sender is in a collective, and its buffers are ready for the first chunks; payload: the fingerprint,
             // and in a short call all that the sender gives; `chunk`: size of a chunk
  credit,    // the sender has summed the chunks before `chunk`, so their places are free
  data,     // payload: one chunk. In Stage::whole: the payload of a short call, for a peer that got the call without it
  ended,    // payload: Ended
  ask,      // asks which collectives the receiver's caller has enqueued; `chunk` is the time of the question
  answer,   // answers `ask`: `chunk` is the time of the question again, `bytes` is RoundState::ended.called
  greeting  // UCX's first message with a header, in either direction; see UcxTransport
};

enum class Stage : uint32_t { reduce, gather, whole };

struct Header {
  uint32_t magic;
  Kind kind;
  uint32_t from;  // the sender's rank in the job
  Stage stage;
  uint64_t key;
  uint64_t round;
  uint64_t number;
  uint64_t chunk;
  uint64_t bytes;  // length of the payload of a call or of data
  uint64_t call;   // Fingerprint::hash of the collective to which the message belongs
};
// The maximum payload of a message that has no place.
constexpr uint64_t longest_control = sizeof(Fingerprint);
// Does a receiver find a place for the payload of the message before it arrives?
inline bool has_place(const Header &header) noexcept {
  return header.kind == Kind::data || (header.kind == Kind::call && header.bytes > longest_control);
}
constexpr uint32_t header_magic = 0x66736406;

// How a rank has ended its round: RoundState::ended, and the phase that it has reached.
struct EndState {
  uint64_t last;
  uint64_t flags;
  uint64_t phase;
};
// The sender's state and, if another rank caused the end, the state of that rank. This message may overtake the other
// rank's own message, and all ranks must name the same cause.
struct Ended {
  EndState own;
  uint64_t cause;  // index of that rank among the channel's ranks
  EndState of_cause;
};

// The interface between the users of messages under one key and the transport.

// The place of a chunk. `to` is NULL if the chunk is dropped. `misfit`: a peer that follows the protocol never sends
// this chunk.
struct Place {
  std::byte *to = nullptr;
  bool misfit = false;
};

// All functions are called with the transport's mutex held.
class Receiver {
 public:
  virtual void control(const Header &header, const void *payload, uint64_t bytes) = 0;
  virtual Place place(const Header &header, uint64_t bytes) = 0;
  virtual void arrived(const Header &header) = 0;
  virtual void lost(const Header &header) = 0;    // a chunk for which place() gave a place will not arrive
  virtual void sent(Kind kind, uint32_t to) = 0;  // a message was sent or given up
  virtual void peer_failed(uint32_t world_rank) = 0;
  // Called after messages arrived or were sent: sends what can be sent now.
  virtual void move_on() = 0;

 protected:
  ~Receiver() = default;
};

// A transport's receivers by key, and the messages for receivers that do not exist yet. Used under the transport's
// mutex.
class Receivers {
 public:
  // Until the size of the job is set, messages of any rank are kept.
  void set_world_size(size_t world_size) { held_count_by_sender_.resize(world_size); }
  // Adds a receiver, and passes it the messages that were kept for it. Throws INTERNAL if there is, or was, a receiver
  // with this key.
  void add(uint64_t key, Receiver &receiver, uint32_t rank);
  void remove(uint64_t key) noexcept;
  // Returns NULL if there is no receiver.
  Receiver *find(uint64_t key) const noexcept;
  // Keeps a message for a key without a receiver. Returns false if its sender has sent more such messages than it may.
  bool keep(const Header &header, const void *payload, uint64_t bytes);
  // Returns the questions to keys without a receiver. The transport answers that no collective was enqueued.
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
  std::set<uint64_t> known_;  // keys of all receivers, including those that were removed
  std::vector<Held> held_;
  std::vector<uint32_t> held_count_by_sender_;  // number of kept messages, by sender
  std::vector<Header> questions_;
};

// The answer of a rank that has no channel with the question's key.
inline Header answer_without_channel(const Header &question, uint32_t rank) noexcept {
  Header answer = question;
  answer.kind = Kind::answer;
  answer.from = rank;
  answer.bytes = 0;  // no collective was enqueued
  return answer;
}

// The reason why a peer cannot be reached.
struct PeerLoss {
  std::string text;  // empty: the peer can be reached
  int32_t origin = 0, code = 0;
  // Position among the peers that this rank has lost, from 1. The peer with the lowest order is blamed, because later
  // losses may be consequences of the first.
  uint64_t order = 0;
};
struct TransportTraits {
  bool in_order;              // data to one peer arrives in the order in which it was sent
  bool cut_always_completes;  // after cut() all transfers under way end, even if other processes do not respond
  bool calls_carry_data;      // send_data() may send messages of short calls
};

class Transport {
 public:
  explicit Transport(uint32_t rank) : rank_(rank) {}
  virtual ~Transport() = default;
  Transport(const Transport &) = delete;
  Transport &operator=(const Transport &) = delete;

  uint32_t rank() const noexcept { return rank_; }
  virtual TransportTraits traits() const noexcept = 0;
  // As in Net.
  virtual std::vector<std::byte> address() const = 0;
  virtual const std::string &warnings() const noexcept = 0;
  virtual uint32_t library_major() const noexcept { return 0; }
  virtual void join(NetJob job, std::shared_ptr<Seat> seat) = 0;

  // Locks the mutex. The background thread lets threads that call lock() go first.
  std::unique_lock<std::mutex> lock() noexcept {
    wanting_.fetch_add(1, std::memory_order_relaxed);
    std::unique_lock lock(mutex_);
    wanting_.fetch_sub(1, std::memory_order_relaxed);
    return lock;
  }
  // Announces that messages will be exchanged with these ranks, too. Throws FSDP_SYSTEM if this process may not open
  // enough descriptors. By default nothing is checked, because only the transport's library knows how many it needs.
  virtual void expect(std::span<const uint32_t>) {}
  std::condition_variable &changed() noexcept { return changed_; }

  // -- with the mutex held --
  virtual void add(uint64_t key, Receiver &receiver) { receivers_.add(key, receiver, rank_); }
  virtual void remove(uint64_t key) noexcept { receivers_.remove(key); }
  // Have this rank and the peer greeted each other?
  virtual bool connected(uint32_t world_rank) const noexcept = 0;
  // Connects to the peer, if this rank is the one that connects and it has not done so yet.
  virtual void greet(uint32_t world_rank) = 0;
  // Copies the payload, which has at most longest_control bytes. Has no effect if the peer has failed.
  virtual void send_control(uint32_t to, const Header &header, const void *payload, uint64_t bytes) = 0;
  // Reserves memory for one more message, so that the next send does not throw.
  virtual void prepare(uint32_t to) = 0;
  // Sends header.bytes bytes of data, which must not change until the receiver of that key is called with sent(). The
  // peer must have sent a message before.
  virtual void send_data(uint32_t to, const Header &header, const void *data) = 0;
  virtual const PeerLoss &loss_of(uint32_t world_rank) const noexcept = 0;
  // Gives up all messages under way to and from this peer. This happens soon after the call, and each receiver is told.
  virtual void cut(uint32_t world_rank) noexcept = 0;
  virtual void wake() noexcept = 0;

  // -- without the mutex: a thread sends and receives in place of the background thread --
  // Returns false if the background thread is busy, another thread drives, or only the background thread can drive.
  virtual bool begin_driving() noexcept { return false; }
  // Sends and receives what is there. Waits at most `ms` if nothing is there. If `ms` is 0, it may read only from the
  // connections with `ranks`, which may include this rank.
  virtual void drive([[maybe_unused]] std::span<const uint32_t> ranks, [[maybe_unused]] uint32_t ms) noexcept {}
  virtual void end_driving() noexcept {}

 protected:
  // Is a short call under way? Then the background thread sleeps as soon as it has nothing to do, so that the thread of
  // the call can drive.
  bool has_short_calls() const noexcept { return short_calls_.load(std::memory_order_relaxed) > 0; }
  bool has_calls() const noexcept { return calls_.load(std::memory_order_relaxed) > 0; }
  // Called by the background thread, which could otherwise lock the mutex again and again while others wait.
  void let_others_go_first() const noexcept {
    for (int i = 0; i < 100 && wanting_.load(std::memory_order_relaxed) > 0; ++i) ::sched_yield();
  }

  const uint32_t rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Receivers receivers_;

 private:
  friend class CallUnderWay;
  std::atomic<int> wanting_{0};
  std::atomic<int> calls_{0}, short_calls_{0};
};

// Exists while a thread runs a call. The thread of a short call drives the transport as soon as it can.
class CallUnderWay {
 public:
  CallUnderWay(Transport &transport, bool is_short) noexcept : transport_(transport), short_(is_short) {
    transport_.calls_.fetch_add(1, std::memory_order_relaxed);
    if (short_) transport_.short_calls_.fetch_add(1, std::memory_order_relaxed);
    try_to_drive();
  }
  ~CallUnderWay() {
    transport_.calls_.fetch_sub(1, std::memory_order_relaxed);
    stop_driving();
  }
  CallUnderWay(const CallUnderWay &) = delete;
  CallUnderWay &operator=(const CallUnderWay &) = delete;

  // Begins to drive if it can. Returns whether this thread drives.
  bool try_to_drive() noexcept { return drives_ = drives_ || (short_ && transport_.begin_driving()); }
  void drive(std::span<const uint32_t> ranks, uint32_t ms) noexcept { transport_.drive(ranks, ms); }
  void stop_driving() noexcept {
    if (std::exchange(short_, false)) transport_.short_calls_.fetch_sub(1, std::memory_order_relaxed);
    if (std::exchange(drives_, false)) transport_.end_driving();
  }

 private:
  Transport &transport_;
  bool short_, drives_ = false;
};

}  // namespace fsdp::transport::messages
