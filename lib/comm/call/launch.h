// SPDX-License-Identifier: Apache-2.0
// What the caller enqueued and a stream has not done yet. Launches are used again, so that a training step allocates
// nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "comm/call/fingerprint.h"
#include "comm/communicator.h"

namespace fsdp::comm {

// One span of any of the collectives.
struct Piece {
  Source from;
  Source whole;  // all_reduce
  std::byte *to;
  uint64_t count;  // bytes of a gather, elements of a shard of a reduction
  fsdp_dtype dtype;
  fsdp_dtype wire_dtype;
  float factor;
  bool accumulate;
  const std::byte *values = nullptr;  // a worker's: what this rank brings
};

struct Launch;

// Moves the bytes of launches that ShmCommunicator only compares and puts in order.
class Worker {
 public:
  // All ranks are in this launch. False: it was given up.
  virtual bool work(const Launch &launch) = 0;

 protected:
  ~Worker() = default;
};

struct Launch {
  void start(Operation of, const Tag &tag) noexcept {
    operation = of;
    fingerprint.start(of, tag);
  }

  Operation operation;      // what is done
  Fingerprint fingerprint;  // what messages call it
  uint64_t round = 0;
  uint64_t number = 0;  // in the round, from 0
  uint32_t root = 0;    // broadcast
  Worker *worker = nullptr;
  std::vector<Piece> pieces;
  std::atomic<bool> busy{false};  // set by the caller, cleared by the stream
};

class LaunchPool {
 public:
  LaunchPool();
  // A free launch without pieces, with room for piece_count. Only the caller's thread takes.
  Launch &take(uint64_t piece_count);

 private:
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

}  // namespace fsdp::comm
