// SPDX-License-Identifier: Apache-2.0
// The collectives of one key, one after the other: the work of the thread that runs a call. It waits, sums, gives up,
// and finds the rank to blame. lanes.h has the messages between the ranks.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "membership/seat.h"
#include "transport/message/channel/lanes.h"
#include "transport/names.h"

namespace fsdp::transport::messages {

class Channel {
 public:
  // See Lanes.
  Channel(Transport &transport, std::shared_ptr<Seat> seat, std::vector<uint32_t> ranks, uint64_t key,
          uint64_t chunk_bytes, uint64_t short_bytes, device::Device *sums_on, const std::string &what);
  ~Channel();
  Channel(const Channel &) = delete;
  Channel &operator=(const Channel &) = delete;

  uint32_t size() const noexcept { return lanes_.size(); }
  uint32_t rank() const noexcept { return lanes_.rank(); }
  const std::vector<uint32_t> &ranks() const noexcept { return lanes_.ranks(); }
  Round &round() noexcept { return lanes_.round(); }
  const Round &round() const noexcept { return lanes_.round(); }
  uint64_t sent_bytes() const noexcept { return lanes_.sent_bytes(); }
  // Tells peers that this rank has ended its round. May be called by any thread.
  void tell_end();
  // Runs the launch. Returns false if the launch was given up and its round is broken. `on_caller`: the launch is an
  // exchange, which runs on the caller's thread.
  bool run(const Launch &launch, bool on_caller);

 private:
  class AwaitedCall;
  class AwaitedNothingInFlight;

  // Called without the mutex, like all functions below.
  void begin(const Launch &launch);
  void sum_next();
  void add_chunk(std::byte *row, const ByteSpan &own, const ByteSpan &to, bool accumulate) const;
  void give_up(const Launch &launch);
  void drop() noexcept;
  // Is it certain that this peer's caller has not enqueued the running launch?
  bool misses_caller(uint32_t world_rank, const Launch &launch, bool on_caller);
  void look();
  std::chrono::milliseconds verdict_time() const noexcept;
  [[noreturn]] void condemn_different(uint32_t r);

  Transport &transport_;
  std::shared_ptr<Seat> seat_;
  Lanes lanes_;
  std::chrono::steady_clock::time_point failed_since_{};
};

}  // namespace fsdp::transport::messages
