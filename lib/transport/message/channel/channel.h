// SPDX-License-Identifier: Apache-2.0
// The collectives of one key, one after the other: what the thread of a call does. It waits, sums, gives up, and says
// which rank is to blame. lanes.h has what goes between the ranks meanwhile.
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
  // sums_on: allocates the scratch memory of calls that sum; NULL: no call does.
  Channel(Transport &transport, std::shared_ptr<Seat> seat, std::vector<uint32_t> ranks, uint64_t key,
          uint64_t chunk_bytes, device::Device *sums_on, const std::string &what);
  ~Channel() { drop(); }
  Channel(const Channel &) = delete;
  Channel &operator=(const Channel &) = delete;

  uint32_t size() const noexcept { return lanes_.size(); }
  const std::vector<uint32_t> &ranks() const noexcept { return lanes_.ranks(); }
  Round &round() noexcept { return lanes_.round(); }
  const Round &round() const noexcept { return lanes_.round(); }
  uint64_t sent_bytes() const noexcept { return lanes_.sent_bytes(); }
  // Tells peers that this rank has ended its round. Any thread.
  void tell_end();
  // Does the launch. False: it was given up, and its round is broken. on_caller: of an exchange.
  bool run(const Launch &launch, bool on_caller);

 private:
  class AwaitedCall;
  class AwaitedQuiet;

  // Without the mutex, as all that follows.
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
  Lanes lanes_;
  std::chrono::steady_clock::time_point failed_since_{};
};

}  // namespace fsdp::transport::messages
