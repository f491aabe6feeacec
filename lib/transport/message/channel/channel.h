// SPDX-License-Identifier: Apache-2.0
// The collectives of one key, one after the other. A rank first tells its peers what it calls. A peer that calls the
// same sends the chunks for which there is a place, and later ones as it hears that the places are free again: no chunk
// comes that nobody waits for, and who calls something else has written nothing anywhere.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "membership/seat.h"
#include "transport/call/round.h"
#include "transport/message/channel/call.h"
#include "transport/message/channel/transport.h"
#include "transport/names.h"
#include "transport/net.h"

namespace fsdp::transport::messages {

inline void raise(Word &word, uint64_t to) noexcept {
  if (!word.reached(to)) word.raise(to);
}

class Channel final : private Receiver {
 public:
  // sums_on: allocates the scratch memory of calls that sum; NULL: no call does.
  Channel(Transport &transport, std::shared_ptr<Seat> seat, std::vector<uint32_t> ranks, uint64_t key,
          uint64_t chunk_bytes, device::Device *sums_on, const std::string &what);
  ~Channel();
  Channel(const Channel &) = delete;
  Channel &operator=(const Channel &) = delete;

  uint32_t size() const noexcept { return static_cast<uint32_t>(ranks_.size()); }
  const std::vector<uint32_t> &ranks() const noexcept { return ranks_; }
  Round &round() noexcept { return round_; }
  const Round &round() const noexcept { return round_; }
  uint64_t sent_bytes() const noexcept { return sent_bytes_.load(std::memory_order_relaxed); }
  // Tells peers that this rank has ended its round. Any thread.
  void tell_end();
  // Does the launch. False: it was given up, and its round is broken. on_caller: of an exchange.
  bool run(const Launch &launch, bool on_caller);

 private:
  struct Hello {
    uint64_t round = 0, number = 0, chunk_bytes = 0;
    Fingerprint fingerprint{};
  };
  // A peer is at most one call ahead.
  static constexpr uint64_t hellos_kept = 4;
  struct Lane {
    Hello hellos[hellos_kept];
    bool met, different;
    uint64_t reduce_sent, reduce_allowed, gather_sent, gather_arrived;
    std::vector<uint64_t> arrived;  // one for each place: chunk + 1 of the reduce stage
    uint32_t in_flight = 0;
    uint64_t asked_ns = 0, answered_ns = 0;  // when the last question was asked, and the last that has an answer
    uint32_t asked = 0;                      // so often in a row
    uint64_t question_ns = 0;                // the peer's, to be answered
  };
  class AwaitedCall;
  class AwaitedQuiet;

  // -- Receiver: with the mutex held, as all that follows unless it says otherwise --
  void control(const Header &header, const void *payload, uint64_t bytes) override;
  Place place(const Header &header, uint64_t bytes) override;
  void arrived(const Header &header) override;
  void lost(const Header &) override { --receiving_; }
  void sent(Kind kind, uint32_t to) override;
  void peer_failed(uint32_t) override { attention_.store(true, std::memory_order_release); }
  void move_on() override;

  Place place_of_sum(uint32_t r, const Header &header) noexcept;
  uint32_t lane_of(uint32_t world_rank) const noexcept;
  Header header(Kind kind) const noexcept;
  bool is_active(const Header &header) const noexcept;
  void tell(const Header &header, const void *payload, uint64_t bytes);
  void take_hello(uint32_t r, const Header &header, const void *payload);
  EndWords end_words(uint32_t r) const noexcept;
  uint32_t cause_of_end() const noexcept;
  void take_end(uint32_t r, const EndWords &ended) noexcept;
  void ask(uint32_t r);
  void take_question(uint32_t r, const Header &header) noexcept;
  void answer_questions();
  void take_answer(uint32_t r, const Header &header) noexcept;
  void meet(Lane &lane, const Hello &hello) noexcept;
  uint64_t gather_allowed() const noexcept;
  void post(uint32_t r);
  void post_chunk(uint32_t r, Stage stage, uint64_t chunk);
  bool misses_data(uint32_t r) const noexcept;
  bool misses(uint32_t r) const noexcept { return r != rank_ && (!lanes_[r].met || misses_data(r)); }
  bool can_sum() const noexcept;
  bool done() const noexcept;
  bool quiet() const noexcept { return sending_ == 0 && receiving_ == 0; }

  // Without the mutex.
  void begin(const Launch &launch);
  void sum_next();
  void add_chunk(std::byte *row, const ByteSpan &own, const ByteSpan &to, bool accumulate) const;
  void give_up(const Launch &launch);
  void drop() noexcept;
  // Has this peer's caller not enqueued the launch that is run, as far as is known for sure?
  bool misses_caller(uint32_t world_rank, const Launch &launch, bool on_caller);
  void look();
  std::chrono::milliseconds verdict_time() const noexcept;
  [[noreturn]] void condemn_different(uint32_t r);

  Transport &transport_;
  std::shared_ptr<Seat> seat_;
  std::vector<uint32_t> ranks_;
  uint32_t rank_;
  uint64_t key_, chunk_bytes_, window_;
  std::unique_ptr<device::Memory> scratch_;
  std::unique_ptr<RoundWords[]> words_;
  Round round_;
  std::vector<Lane> lanes_;
  Call call_;
  bool active_ = false;
  uint64_t summed_ = 0;
  uint32_t sending_ = 0, receiving_ = 0;
  bool questions_ = false;
  std::chrono::steady_clock::time_point failed_since_{};
  std::atomic<bool> attention_{false};  // there may be something for the thread that runs the call
  std::atomic<uint64_t> sent_bytes_{0};
};

}  // namespace fsdp::transport::messages
