// SPDX-License-Identifier: Apache-2.0
// Calls that the caller has enqueued and a stream has not finished yet. Launches are reused, so a training step
// allocates nothing.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transport/collectives.h"

namespace fsdp::transport {

// The order in which messages are added on the host. It is the same for all transports, so that the bits are equal.

// Computes to = s0, to += s1, ... or, if `accumulate`, to += s0, to += s1, ... The values s_r of rank r are at base + r
// * stride. The additions are the same however the values are divided into pieces.
void add_in_rank_order(const std::byte *base, uint64_t stride, uint32_t ranks, float *to, uint64_t count,
                       bool accumulate);

// Describes a rank's n-th collective. Ranks compare fingerprints when they synchronize, so that ranks that make
// different calls get an error that names both calls.

enum class Operation : uint32_t { all_gather = 1, reduce_scatter, all_reduce, broadcast, barrier, exchange };

const char *operation_name(Operation operation) noexcept;

// Its layout is fixed, because it is in shared memory, and the copy of a peer is not trusted.
struct Fingerprint {
  Operation operation;
  uint32_t what;
  uint64_t elements;  // bytes if dtype is 0
  uint64_t hash;      // hash of all data that must agree, including the length of each span
  uint64_t call;      // number + 1 of the call that consists of several collectives; 0: the call is one collective
  fsdp_dtype dtype;
  char name[52];  // the name and its note; may be cut

  void start(Operation operation, const Tag &tag) noexcept;
  static Fingerprint of(Operation operation, const Tag &tag) noexcept {
    Fingerprint call{};
    call.start(operation, tag);
    return call;
  }
  void add_span(fsdp_dtype dtype, fsdp_dtype wire_dtype, uint64_t count) noexcept;
  void add_move(const Move &move) noexcept;
  // Sets the number of a call that consists of several collectives; messages then name the call instead of the
  // collectives.
  void number_call(uint64_t number) noexcept;
  // Returns "reduce_scatter of 'a' (#3, float32, 1024 elements)". `number` is the collective's number.
  std::string text(uint64_t number) const;

 private:
  void add(fsdp_dtype dtype, uint64_t kind, uint64_t count) noexcept;
};

// How every transport describes its collectives, so that ranks compare them in one way, and how sums are divided into
// one slice per rank.

// The elements of a sum, divided by rank into equal slices; the last slices may be shorter or empty.
class Slices {
 public:
  Slices(uint64_t count, uint32_t ranks) : count_(count), slice_((count + ranks - 1) / ranks) {}
  uint64_t longest() const noexcept { return slice_; }
  uint64_t begin(uint32_t rank) const noexcept { return std::min(rank * slice_, count_); }
  uint64_t length(uint32_t rank) const noexcept { return begin(rank + 1) - begin(rank); }

 private:
  uint64_t count_, slice_;
};

// Returns reduce_scatter, or all_reduce if the sums go everywhere. Throws INTERNAL if the shape does not allow these
// sums.
Operation operation_of(std::span<const Sum> sums, bool accumulate, const Shape &shape, uint32_t ranks, const Tag &tag);
// Throws INTERNAL if there is no such rank.
void require_root(uint32_t root, uint32_t ranks);
// Throws INTERNAL if a move names a rank that the team does not have, or if the shape does not allow reading the part.
void require_moves(const Part &from, std::span<const Move> moves, const Shape &shape, uint32_t ranks, const Tag &tag);
// Returns the number of moves that carry bytes from this rank or to it.
uint64_t count_moves(std::span<const Move> moves, uint32_t rank) noexcept;

// These functions are inline, because each function call counts for small collectives.
inline void describe(Fingerprint &call, const Gather &gather) noexcept { call.add_span(0, 0, gather.bytes); }
inline void describe(Fingerprint &call, const Sum &sum) noexcept { call.add_span(sum.dtype, sum.wire, sum.count); }
inline void describe(Fingerprint &call, const Move &move) noexcept { call.add_move(move); }
template <class Span>
void describe(Fingerprint &call, std::span<const Span> spans) noexcept {
  for (const Span &span : spans) describe(call, span);
}
inline void describe_broadcast(Fingerprint &call, uint64_t bytes, uint32_t root) noexcept {
  call.add_span(0, static_cast<fsdp_dtype>(root), bytes);  // roots must agree
}

// One gather, sum, broadcast or move in a call.
struct Piece {
  Part from, to;
  uint64_t count;  // bytes per rank of a gather, all bytes of a broadcast or of a move, or elements of a sum
  fsdp_dtype dtype = FSDP_FLOAT32, wire = FSDP_FLOAT32;
  float factor = 1;
  bool accumulate = false;
  uint32_t source = 0, target = 0;  // the ranks of a move
  uint64_t place = 0;               // number of bytes that the source of a move sends to other ranks before this move
  uint64_t results_bytes = 0;       // of a sum, as in device::RankSum
};

struct Launch {
  void start(Operation of, const Tag &tag) noexcept {
    operation = of;
    begun = false;
    fingerprint.start(of, tag);
  }
  // These functions add the pieces of a call. take() has reserved the room for them.
  void add(std::span<const Gather> gathers) {
    for (const Gather &gather : gathers) {
      pieces.push_back({gather.from, Part::alone(gather.to), gather.bytes});
      describe(fingerprint, gather);
    }
  }
  void add(std::span<const Sum> sums, bool accumulate) {
    for (const Sum &sum : sums) {
      pieces.push_back({.from = sum.from,
                        .to = sum.to,
                        .count = sum.count,
                        .dtype = sum.dtype,
                        .wire = sum.wire,
                        .factor = sum.factor,
                        .accumulate = accumulate,
                        .results_bytes = sum.results_bytes});
      describe(fingerprint, sum);
    }
  }
  void add_broadcast(const Part &data, uint64_t bytes, uint32_t from_root) {
    root = from_root;
    pieces.push_back({data, data, bytes});
    describe_broadcast(fingerprint, bytes, root);
  }
  // Describes all moves, and adds those from or to `rank`, the number of this rank.
  void add(const Part &from, std::span<const Move> moves, uint32_t rank, uint32_t ranks);

  Operation operation;      // the kind of collective
  Fingerprint fingerprint;  // its name in messages
  uint64_t round = 0;
  uint64_t number = 0;  // number in the round, from 0
  uint32_t root = 0;    // root of a broadcast
  bool begun = false;   // begin() has told the peers that this rank has come
  std::vector<Piece> pieces;
  std::vector<uint64_t> sent;     // by rank: bytes that the moves carry from the rank to other ranks
  std::atomic<bool> busy{false};  // set by the caller, cleared by the stream
};

class LaunchPool {
 public:
  LaunchPool();
  // Returns a free launch without pieces, with room for piece_count. Only the caller's thread calls this.
  Launch &take(Operation operation, const Tag &tag, uint64_t piece_count);

 private:
  Launch &find(uint64_t piece_count);

  std::vector<std::unique_ptr<Launch>> launches_;
};

// Returns a launch to the pool at the end of its task, however the task ends.
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
