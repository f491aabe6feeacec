// SPDX-License-Identifier: Apache-2.0
// What the caller enqueued and a stream has not done yet. Launches are used again, so that a training step allocates
// nothing.
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

// The additions of messages on the host, whichever way they travel: so their bits are equal.

// to = s0, += s1, ... or, to accumulate, to += s0, += s1, ..., where rank r's values are at base + r * stride: the same
// additions whatever pieces the values come in.
void add_in_rank_order(const std::byte *base, uint64_t stride, uint32_t ranks, float *to, uint64_t count,
                       bool accumulate);

// What a rank says its n-th collective is. Ranks compare them when they meet, so that ranks that call different things
// get an error that names both calls.

enum class Operation : uint32_t { all_gather = 1, reduce_scatter, all_reduce, broadcast, barrier };

const char *operation_name(Operation operation) noexcept;

// Lies in shared memory: of fixed layout, and no peer's copy is trusted.
struct Fingerprint {
  Operation operation;
  uint32_t what;
  uint64_t elements;  // bytes if dtype is 0
  uint64_t hash;      // of all that must agree, also each span's length
  uint64_t call;      // of a call made of several collectives: its number + 1; else 0
  fsdp_dtype dtype;
  char name[52];  // may be cut; with its note

  void start(Operation operation, const Tag &tag) noexcept;
  static Fingerprint of(Operation operation, const Tag &tag) noexcept {
    Fingerprint call{};
    call.start(operation, tag);
    return call;
  }
  void add_span(fsdp_dtype dtype, fsdp_dtype wire_dtype, uint64_t count) noexcept;
  // The collectives that this call is made of are named as it is.
  void number_call(uint64_t number) noexcept;
  // "reduce_scatter of 'a' (#3, float32, 1024 elements)". number: the collective's
  std::string text(uint64_t number) const;
};

// What every transport says of its collectives alike, so that ranks compare them alike, and how sums are cut into one
// slice a rank.

// The elements of a sum, by rank: equal slices, but that the last ones may be shorter, or empty.
class Slices {
 public:
  Slices(uint64_t count, uint32_t ranks) : count_(count), slice_((count + ranks - 1) / ranks) {}
  uint64_t longest() const noexcept { return slice_; }
  uint64_t begin(uint32_t rank) const noexcept { return std::min(rank * slice_, count_); }
  uint64_t length(uint32_t rank) const noexcept { return begin(rank + 1) - begin(rank); }

 private:
  uint64_t count_, slice_;
};

// reduce_scatter, or all_reduce where they go everywhere. INTERNAL if these sums are not what the shape allows.
Operation operation_of(std::span<const Sum> sums, bool accumulate, const Shape &shape, uint32_t ranks, const Tag &tag);
// INTERNAL if there is none.
void require_root(uint32_t root, uint32_t ranks);

// Here, since small calls feel each call of theirs.
inline void describe(Fingerprint &call, const Gather &gather) noexcept { call.add_span(0, 0, gather.bytes); }
inline void describe(Fingerprint &call, const Sum &sum) noexcept { call.add_span(sum.dtype, sum.wire, sum.count); }
template <class Span>
void describe(Fingerprint &call, std::span<const Span> spans) noexcept {
  for (const Span &span : spans) describe(call, span);
}
inline void describe_broadcast(Fingerprint &call, uint64_t bytes, uint32_t root) noexcept {
  call.add_span(0, static_cast<fsdp_dtype>(root), bytes);  // roots must agree
}

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
