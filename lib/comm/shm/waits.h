// SPDX-License-Identifier: Apache-2.0
// What each rank's caller waits for, shown to the others while it waits long. Two callers that wait for each other in
// different calls would do so until their timeout; this is how they find out.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::comm {

class Awaited;

// A rank's entry, written by that rank alone. All zero bytes: it does not wait.
struct alignas(64) WaitEntry {
  std::atomic<uint64_t> looks;     // number of the wait << 32 | looks around since it began; 0 looks: none, or not yet
  std::atomic<uint32_t> for_rank;  // the first that it misses
  std::atomic<uint32_t> late;      // 1: of another node, whose leader writes it here
  char text[236];                  // written before the first look
};

// One wait of this rank's caller.
class ShownWait {
 public:
  // entries[r] is rank r's.
  ShownWait(WaitEntry *entries, uint32_t world_size, uint32_t rank)
      : entries_(entries), world_size_(world_size), rank_(rank) {}
  ~ShownWait();
  ShownWait(const ShownWait &) = delete;
  ShownWait &operator=(const ShownWait &) = delete;

  // Called from time to time. Returns a rank whose caller waits for this one, which waits for it.
  std::optional<uint32_t> look(const Awaited &awaited, const char *call);
  std::string text(uint32_t rank) const;  // that rank's, as it shows it

 private:
  void show(const Awaited &awaited, const char *call);

  WaitEntry *entries_;
  uint32_t world_size_, rank_;
  bool shown_ = false;
  uint32_t suspect_ = UINT32_MAX;
  uint64_t suspect_looks_ = 0;
};

}  // namespace fsdp::comm
