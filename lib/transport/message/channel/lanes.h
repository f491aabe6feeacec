// SPDX-License-Identifier: Apache-2.0
// The messages between this rank and its peers for one key: each rank's call, the chunks of the running call, the ends
// of rounds, and the questions of callers. A rank first sends its peers its call. A peer with the same call sends the
// chunks for which there are places, and later chunks when it is told that places are free again. So every chunk that
// arrives is awaited, and a rank with a different call has written nothing into the memory of other ranks' callers. The
// message of a short call arrives in a box (short_calls.h), and not in the memory of a caller.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "transport/call/round.h"
#include "transport/message/channel/call.h"
#include "transport/message/channel/short_calls.h"
#include "transport/message/channel/transport.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport::messages {

// All functions are called with the transport's mutex held, unless a comment says otherwise.
class Lanes final : private Receiver {
 public:
  struct LaneHello {
    uint64_t round = 0, number = 0, chunk_bytes = 0;
    Fingerprint fingerprint{};
  };

  // `sums_on` allocates the scratch memory for sums; NULL: no call sums. `short_bytes` is the limit of short calls
  // (ShortCalls::fits()); 0: none is short. Constructor and destructor are called without the mutex.
  Lanes(Transport &transport, std::vector<uint32_t> ranks, uint64_t key, uint64_t chunk_bytes, uint64_t short_bytes,
        device::Device *sums_on, const std::string &what);
  ~Lanes();
  Lanes(const Lanes &) = delete;
  Lanes &operator=(const Lanes &) = delete;

  // -- constant or atomic data, read without the mutex --
  uint32_t size() const noexcept { return static_cast<uint32_t>(ranks_.size()); }
  uint32_t rank() const noexcept { return rank_; }
  const std::vector<uint32_t> &ranks() const noexcept { return ranks_; }
  uint64_t chunk_bytes() const noexcept { return chunk_bytes_; }
  // Returns size() if the rank is none of these ranks.
  uint32_t lane_of(uint32_t world_rank) const noexcept;
  Round &round() noexcept { return round_; }
  const Round &round() const noexcept { return round_; }
  uint64_t sent_bytes() const noexcept { return sent_bytes_.load(std::memory_order_relaxed); }
  // True if there may be work for the thread that runs the call.
  std::atomic<bool> &attention() noexcept { return attention_; }

  // -- the running call --
  // Packs the message of a short call. Returns whether the call is short. Without the mutex, before start().
  bool prepare(const Launch &launch) noexcept;
  void start(const Launch &launch);
  // Once done() is true, a short call has all its parts: choose_boxes() notes where they are, and finish() puts or adds
  // them, without the mutex.
  void choose_boxes() noexcept {
    if (short_) shorts_.choose(call_.launch());
  }
  void finish() noexcept {
    if (short_) shorts_.unpack(call_.launch());
  }
  // Raises this rank's own phase.
  void raise_phase(const Launch &launch, Phase phase) noexcept;
  void stop() noexcept { active_ = false; }
  const Call &call() const noexcept { return call_; }
  bool met(uint32_t r) const noexcept { return lanes_[r].met; }
  bool different(uint32_t r) const noexcept { return lanes_[r].different; }
  bool sends_to(uint32_t r) const noexcept { return lanes_[r].in_flight > 0; }
  const LaneHello &hello_of(uint32_t r, uint64_t number) const noexcept {
    return lanes_[r].hellos[number % hellos_kept];
  }
  // Has this peer not sent the call yet, or are bytes from it missing?
  bool misses(uint32_t r) const noexcept { return r != rank_ && (!lanes_[r].met || misses_data(r)); }
  bool can_sum() const noexcept;
  bool done() const noexcept;
  // Does no message read or write the memory of a call?
  bool nothing_in_flight() const noexcept { return sending_ == 0 && receiving_ == 0; }
  // Is a message of a short call arriving: from any rank, from rank r?
  bool arriving() const noexcept { return shorts_.arriving(); }
  bool arriving_from(uint32_t r) const noexcept { return shorts_.arriving_from(r); }
  // From now on no message arrives in this object's memory. Nothing may be arriving.
  void retire() noexcept { transport_.remove(key_); }
  // next_sum() is the number of the chunk to sum next, if can_sum() is true. row() is the memory with the ranks' parts
  // of a chunk, one after the other. The thread that runs the call calls both, without the mutex.
  uint64_t next_sum() const noexcept { return summed_; }
  std::byte *row(uint64_t chunk) noexcept { return scratch_->data() + chunk % window_ * size() * chunk_bytes_; }
  // Called when the chunk is summed, so its places are free.
  void end_sum();

  // Tells peers that this rank has ended its round.
  void tell_end();
  // If it is time, asks this peer which collectives its caller has enqueued. Returns true if a recent answer says that
  // the caller has not enqueued this one. All times grow with the size of the job, `world_size`.
  bool misses_caller(uint32_t r, const Launch &launch, uint32_t world_size);

 private:
  // A peer is at most one call ahead.
  static constexpr uint64_t hellos_kept = 4;
  struct Lane {
    LaneHello hellos[hellos_kept];
    bool met, different;
    bool short_sent;  // this rank's data of the short call was passed to the transport
    uint64_t reduce_sent, reduce_allowed, gather_sent, gather_arrived;
    std::vector<uint64_t> arrived;  // for each place: chunk + 1 that has arrived in the reduce stage
    uint32_t in_flight = 0;
    bool peer_is_ready = false;              // the peer has created its channel
    uint64_t asked_ns = 0, answered_ns = 0;  // times of the last question, and of the last question that was answered
    uint32_t asked = 0;                      // number of questions in a row
    uint64_t question_ns = 0;                // the peer's question that this rank must answer
  };

  // -- Receiver --
  void control(const Header &header, const void *payload, uint64_t bytes) override;
  Place place(const Header &header, uint64_t bytes) override;
  void arrived(const Header &header) override;
  void lost(const Header &header) override;
  void sent(Kind kind, uint32_t to) override;
  void peer_failed(uint32_t) override { attention_.store(true, std::memory_order_release); }
  void move_on() override;

  uint64_t places_bytes() const noexcept { return window_ * size() * chunk_bytes_; }
  Place place_of_sum(uint32_t r, const Header &header) noexcept;
  Header header(Kind kind) const noexcept;
  bool is_active(const Header &header) const noexcept;
  void announce(const Launch &launch);
  void post_whole(uint32_t r, Header header);
  void tell(const Header &header, const void *payload, uint64_t bytes);
  void take_hello(uint32_t r, const Header &header, const void *payload);
  EndState end_state(uint32_t r) const noexcept;
  uint32_t cause_of_end() const noexcept;
  void take_whole(const Header &header);
  void take_end(uint32_t r, const EndState &ended) noexcept;
  void ask(uint32_t r, uint64_t times);
  void take_question(uint32_t r, const Header &header) noexcept;
  void answer_questions();
  void take_answer(uint32_t r, const Header &header) noexcept;
  void meet(Lane &lane, const LaneHello &hello) noexcept;
  uint64_t gather_allowed(uint32_t r) const noexcept;
  void post(uint32_t r);
  void post_chunk(uint32_t r, Stage stage, uint64_t chunk);
  bool misses_data(uint32_t r) const noexcept;

  Transport &transport_;
  std::vector<uint32_t> ranks_;
  uint32_t rank_;
  uint64_t key_, chunk_bytes_, window_;
  std::unique_ptr<device::Memory> scratch_;  // places of chunks, then boxes of short calls
  std::vector<std::byte> boxes_;             // boxes of short calls without sums
  ShortCalls shorts_;
  std::unique_ptr<RoundState[]> states_;
  Round round_;
  std::vector<Lane> lanes_;
  Call call_;
  bool active_ = false;
  bool short_ = false;  // the running call is short
  uint64_t summed_ = 0;
  uint32_t sending_ = 0, receiving_ = 0;
  bool questions_ = false;
  std::atomic<bool> attention_{false};
  std::atomic<uint64_t> sent_bytes_{0};
};

}  // namespace fsdp::transport::messages
