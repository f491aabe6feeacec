// SPDX-License-Identifier: Apache-2.0

#include "transport/shm/versions.h"

namespace fsdp::transport {

namespace {

// The index of a note of a rank's word: the version that the rank's caller has enqueued on a stream.
constexpr uint32_t called = 0;

class AwaitedVersion final : public AwaitedWords {
 public:
  AwaitedVersion(const Words &words, uint64_t version, const char *what) : AwaitedWords(words, version), what_(what) {}
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

ShmVersions::ShmVersions(std::shared_ptr<Seat> seat, uint32_t rank, std::vector<uint32_t> ranks, Mapping memory)
    : seat_(std::move(seat)),
      rank_(rank),
      ranks_(std::move(ranks)),
      memory_(std::move(memory)),
      words_(memory_.data(), sizeof(Word), ranks_) {}

void ShmVersions::raise(uint64_t version) {
  Word &word = words_[rank_];
  if (word.value.load(std::memory_order_relaxed) < version) word.raise(version);
}

// If the writer is the calling thread, the version is published when this returns, and needs no note.
void ShmVersions::publish(uint64_t version, device::Stream &writer) {
  if (writer.is_calling_thread()) return raise(version);
  writer.run([this, version] { raise(version); });
  words_[rank_].notes[called].store(version, std::memory_order_release);
}

void ShmVersions::wait(uint64_t version, const char *what) {
  AwaitedVersion awaited(words_, version, what);
  seat_->watch.wait(awaited);
}

void ShmVersions::await(uint64_t version, device::Stream &reader, const char *what) {
  if (reader.is_calling_thread()) return wait(version, what);
  reader.run([this, version, what] { wait(version, what); });
}

}  // namespace fsdp::transport
