// SPDX-License-Identifier: Apache-2.0
// The version that each rank of a host has published: one word per rank, in memory that all ranks map.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mapping.h"
#include "base/word.h"
#include "membership/liveness/watch.h"
#include "membership/seat.h"
#include "transport/exchange.h"
#include "transport/names.h"

namespace fsdp::transport {

// One word for each rank of a team, and the wait until all words have reached a value.

// The words lie at base + r * stride; ranks[r] is the rank of the job.
class Words {
 public:
  Words() = default;
  Words(std::byte *base, uint64_t stride, std::span<const uint32_t> ranks)
      : base_(base), stride_(stride), ranks_(ranks) {}

  uint32_t size() const noexcept { return static_cast<uint32_t>(ranks_.size()); }
  uint32_t world_rank(uint32_t r) const noexcept { return ranks_[r]; }
  Word &operator[](uint32_t r) const noexcept { return *reinterpret_cast<Word *>(base_ + r * stride_); }
  bool reached(uint64_t target) const noexcept {
    for (uint32_t r = 0; r < size(); ++r)
      if (!(*this)[r].reached(target)) return false;
    return true;
  }

 private:
  std::byte *base_ = nullptr;
  uint64_t stride_ = 0;
  std::span<const uint32_t> ranks_;
};

class AwaitedWords : public Awaited {
 public:
  AwaitedWords(const Words &words, uint64_t target) : words_(words), target_(target) {}

  bool come() override {
    for (; at_ < words_.size(); ++at_) {
      if (!words_[at_].reached(target_)) return false;
      met(at_);
    }
    return true;
  }
  void sleep(uint32_t ms) override { words_[at_].sleep_below(target_, ms); }
  bool misses(uint32_t world_rank) const override {
    for (uint32_t r = at_; r < words_.size(); ++r)
      if (words_.world_rank(r) == world_rank) return !words_[r].reached(target_);
    return false;
  }
  // Among the ranks that have not reached the target, is this rank the furthest behind?
  bool lags(uint32_t world_rank) const override {
    uint64_t least = target_, its = target_;
    for (uint32_t r = 0; r < words_.size(); ++r) {
      const uint64_t value = words_[r].value.load(std::memory_order_acquire);
      least = std::min(least, value);
      if (words_.world_rank(r) == world_rank) its = value;
    }
    return its < target_ && its == least;
  }

 protected:
  // Called once for each rank of the team, in order, when the rank has reached the target.
  virtual void met(uint32_t) {}
  ~AwaitedWords() = default;

  const Words &words_;
  uint64_t target_;
  uint32_t at_ = 0;
};

class ShmVersions final : public Versions {
 public:
  static uint64_t size_bytes(uint32_t team_size) { return team_size * sizeof(Word); }
  ShmVersions(std::shared_ptr<Seat> seat, uint32_t rank, std::vector<uint32_t> ranks, Mapping memory);

  void publish(uint64_t version, device::Stream &writer) override;
  bool ready(uint64_t version) const noexcept override { return words_.reached(version); }
  void await(uint64_t version, device::Stream &reader, const char *what) override;

 private:
  void raise(uint64_t version);
  void wait(uint64_t version, const char *what);

  std::shared_ptr<Seat> seat_;
  uint32_t rank_;
  std::vector<uint32_t> ranks_;
  Mapping memory_;
  Words words_;
};

}  // namespace fsdp::transport
