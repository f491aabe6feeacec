// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/gate.h"

namespace fsdp::comm {
namespace {

// The note of a rank's word: the value that a stream of its own comes to, since its caller has enqueued that.
constexpr uint32_t called = 0;

class AwaitedGate final : public AwaitedWords {
 public:
  AwaitedGate(const Words &words, uint64_t value, const char *what) : AwaitedWords(words, value), what_(what) {}
  bool misses_caller(uint32_t world_rank) const override {
    for (uint32_t r = 0; r < words_.size(); ++r)
      if (words_.world_rank(r) == world_rank)
        return misses(world_rank) && words_[r].notes[called].load(std::memory_order_acquire) < target_;
    return false;
  }
  std::string text() const override { return what_; }

 private:
  const char *what_;
};

}  // namespace

ShmGate::ShmGate(std::shared_ptr<Seat> seat, uint32_t rank, std::vector<uint32_t> ranks, Mapping memory)
    : seat_(std::move(seat)),
      rank_(rank),
      ranks_(std::move(ranks)),
      memory_(std::move(memory)),
      words_(memory_.data(), sizeof(Word), ranks_) {}

void ShmGate::arrive(uint64_t value) {
  Word &word = words_[rank_];
  if (word.value.load(std::memory_order_relaxed) < value) word.raise(value);
}

void ShmGate::arrive(uint64_t value, device::Stream &stream) {
  stream.run([this, value] { arrive(value); });
  words_[rank_].notes[called].store(value, std::memory_order_release);
}

void ShmGate::await(uint64_t value, const char *what) {
  AwaitedGate awaited(words_, value, what);
  seat_->watch.wait(awaited);
}

}  // namespace fsdp::comm
