// SPDX-License-Identifier: Apache-2.0
#include "comm/shm/gate.h"

namespace fsdp::comm {
namespace {

class AwaitedGate final : public AwaitedWords {
 public:
  AwaitedGate(const Words &words, uint64_t value, const char *what) : AwaitedWords(words, value), what_(what) {}
  bool needs_callers() const override { return true; }
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

void ShmGate::await(uint64_t value, const char *what) {
  AwaitedGate awaited(words_, value, what);
  seat_->watch.wait(awaited);
}

}  // namespace fsdp::comm
