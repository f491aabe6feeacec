// SPDX-License-Identifier: Apache-2.0
// Chunks: the parts of shards that come from the home file to memory for the caller's own optimizer, and go back. A
// pass goes through all segments of the file (gradients/home_update.h) with planes that the caller can update.
#pragma once

#include <string>
#include <vector>

#include "engine/gradients/optimizer.h"

namespace fsdp::engine {

// `count` elements of a shard from element `first` on. A plane that is in the file has an address in its segment.
struct ShardChunk {
  const Shard *shard = nullptr;
  uint64_t first = 0, count = 0;
  std::byte *main_weight = nullptr;
  float *main_grad = nullptr;
};

class ShardChunks {
 public:
  ShardChunks(Runtime &runtime, Optimizer &optimizer);

  // Writes the last chunk, after the caller's work on it, and brings the next one. Returns NULL, and ends the pass,
  // when all chunks are written; the call after that begins a pass. Blocks for the disk.
  const ShardChunk *next(fsdp_stream stream);
  // Returns a state of the chunk that was given last. Throws INVALID_STATE if no chunk is given.
  StatePart state(std::string_view name, const char *call) const;
  // Says why the step cannot be discarded now; empty if it can.
  std::string find_written() const;
  // Called when the window has closed.
  void close() noexcept { was_given_ = false; }

 private:
  using ShardPart = HomeUpdate::ShardPart;
  bool takes(const ShardPart &part) const;
  void begin();
  void await_work() const;
  const ShardChunk *advance(device::Stream &caller);
  void give(const ShardPart &part, device::Stream &caller);
  template <class T>
  T *bring(T *address) const;

  Runtime &runtime_;
  Optimizer &optimizer_;
  HomeUpdate *home_;                                         // NULL: nothing is in a file
  std::vector<HomeSegment> segments_;                        // of this pass
  std::vector<const HomeUpdate::PlannedSegment *> planned_;  // the same, with their parts
  size_t segment_ = 0, part_ = 0;                            // the next segment, and the next part of the one in memory
  const HomeView *view_ = nullptr;                           // the segment in memory
  ShardChunk given_;
  fsdp_stream stream_ = nullptr;  // on which the caller works on the chunk
  bool was_given_ = false;        // has a chunk been given in this window?
};

}  // namespace fsdp::engine
