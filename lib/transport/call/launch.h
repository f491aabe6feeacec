// SPDX-License-Identifier: Apache-2.0
// What the caller enqueued and a stream has not done yet. Launches are used again, so that a training step allocates
// nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "transport/call/describe.h"

namespace fsdp::transport {

// One gather, sum or broadcast of a call.
struct Piece {
  Part from, to;
  uint64_t count;  // bytes of a rank in a gather, of all in a broadcast; elements of a sum
  fsdp_dtype dtype = FSDP_FLOAT32, wire = FSDP_FLOAT32;
  float factor = 1;
  bool accumulate = false;
};

struct Launch {
  void start(Operation of, const Tag &tag) noexcept {
    operation = of;
    fingerprint.start(of, tag);
  }
  // What is done, and what messages call it. The caller has room for so many pieces.
  void add(std::span<const Gather> gathers) {
    for (const Gather &gather : gathers) {
      pieces.push_back({gather.from, Part::alone(gather.to), gather.bytes});
      describe(fingerprint, gather);
    }
  }
  void add(std::span<const Sum> sums, bool accumulate) {
    for (const Sum &sum : sums) {
      pieces.push_back({sum.from, sum.to, sum.count, sum.dtype, sum.wire, sum.factor, accumulate});
      describe(fingerprint, sum);
    }
  }
  void add_broadcast(const Part &data, uint64_t bytes, uint32_t from_root) {
    root = from_root;
    pieces.push_back({data, data, bytes});
    describe_broadcast(fingerprint, bytes, root);
  }

  Operation operation;      // what is done
  Fingerprint fingerprint;  // what messages call it
  uint64_t round = 0;
  uint64_t number = 0;  // in the round, from 0
  uint32_t root = 0;    // broadcast
  std::vector<Piece> pieces;
  std::atomic<bool> busy{false};  // set by the caller, cleared by the stream
};

class LaunchPool {
 public:
  LaunchPool();
  // A free launch without pieces, with room for piece_count. Only the caller's thread takes.
  Launch &take(Operation operation, const Tag &tag, uint64_t piece_count);

 private:
  Launch &find(uint64_t piece_count);

  std::vector<std::unique_ptr<Launch>> launches_;
};

// Gives a launch back at the end of its task, whatever ends it.
class LaunchReturn {
 public:
  explicit LaunchReturn(Launch &launch) : launch_(launch) {}
  ~LaunchReturn() { launch_.busy.store(false, std::memory_order_release); }
  LaunchReturn(const LaunchReturn &) = delete;
  LaunchReturn &operator=(const LaunchReturn &) = delete;

 private:
  Launch &launch_;
};

}  // namespace fsdp::transport
