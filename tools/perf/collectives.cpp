// SPDX-License-Identifier: Apache-2.0
// The collectives of shared memory, on the calling thread. A reduction's result is fp32 whatever its input is: main
// gradients are.
#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/dtype.h"
#include "perf/bench.h"
#include "perf/peer.h"

namespace perf {
namespace {

using fsdp::dtype_size;
using fsdp::device::Memory;
using fsdp::transport::Arena;
using fsdp::transport::Collectives;
using fsdp::transport::Part;
using fsdp::transport::Range;

constexpr double gather_bus(uint32_t ranks) { return (ranks - 1.0) / ranks; }

// The full buffers of all ranks, n bytes each, follow one another in one arena; each rank writes its own.
struct Buffers {
  Buffers(Bench &bench, uint64_t bytes) : rank(bench.rank()), size(bench.size()), bytes(bytes) {
    const Range own{rank * bytes, bytes};
    arena = bench.member.team->create_arena(size * bytes, {&own, 1}, "buffers of the measurement");
    communicator = bench.member.team->create_collectives("measurement");
  }
  std::byte *mine() const { return arena->writable() + rank * bytes; }
  uint64_t part() const { return bytes / size; }
  Part in_stride(uint64_t stride) const { return Part::in(*arena, 0, stride, rank); }
  Part whole() const { return in_stride(bytes); }

  uint32_t rank, size;
  uint64_t bytes;
  std::unique_ptr<Arena> arena;
  std::unique_ptr<Collectives> communicator;
};

// What rank r holds at byte i of its part: the low bits of both, so that a misplaced byte shows.
std::byte pattern(uint32_t r, uint64_t i) { return std::byte(static_cast<unsigned char>(31 * r + i + (i >> 8))); }

class AllGather {
 public:
  AllGather(Bench &bench, uint64_t bytes, bool in_place) : bench_(bench), buffers_(bench, bytes), in_place_(in_place) {
    if (!in_place) out_ = bench.member.device->allocate(bytes, "gathered");
  }
  void operator()() {
    // Rank r's part is at its own place in its own buffer, or at the front if the gather copies elsewhere.
    const fsdp::transport::Gather span{buffers_.in_stride(buffers_.bytes + (in_place_ ? buffers_.part() : 0)), target(),
                                       buffers_.part()};
    buffers_.communicator->gather({&span, 1}, {0, "all_gather"}, bench_.stream());
  }
  uint64_t check() {
    std::byte *own = buffers_.mine() + (in_place_ ? buffers_.rank * buffers_.part() : 0);
    std::memset(target(), 0xEE, in_place_ ? 0 : buffers_.bytes);
    for (uint64_t i = 0; i < buffers_.part(); ++i) own[i] = pattern(buffers_.rank, i);
    (*this)();
    uint64_t wrong = 0;
    for (uint32_t r = 0; r < buffers_.size; ++r)
      for (uint64_t i = 0; i < buffers_.part(); ++i) wrong += target()[r * buffers_.part() + i] != pattern(r, i);
    bench_.lab.meet();  // no rank writes a part again before all have read it
    return bench_.lab.sum(wrong);
  }

 private:
  std::byte *target() const { return in_place_ ? buffers_.mine() : out_->data(); }

  Bench &bench_;
  Buffers buffers_;
  bool in_place_;
  std::unique_ptr<Memory> out_;
};

struct Reduction {
  const char *name;
  fsdp_dtype dtype, wire_dtype;
};
constexpr Reduction reductions[] = {
    {"fp32", FSDP_FLOAT32, FSDP_FLOAT32},
    {"bf16", FSDP_BFLOAT16, FSDP_BFLOAT16},
    {"fp32 as bf16", FSDP_FLOAT32, FSDP_BFLOAT16},
};

float expected_sum(uint32_t ranks, uint64_t i) {
  float sum = 0;
  for (uint32_t r = 0; r < ranks; ++r) sum += addend(r, i);
  return sum;
}

void fill(Bench &bench, const Buffers &buffers, fsdp_dtype dtype) {
  const uint64_t count = buffers.bytes / dtype_size(dtype);
  std::vector<float> values(count);
  for (uint64_t i = 0; i < count; ++i) values[i] = addend(buffers.rank, i);
  bench.stream().cast(buffers.mine(), dtype, values.data(), FSDP_FLOAT32, count);
}

class ReduceScatter {
 public:
  // own: into this rank's slice of its own buffer.
  ReduceScatter(Bench &bench, uint64_t bytes, const Reduction &kind, bool own)
      : bench_(bench), buffers_(bench, bytes), kind_(kind), count_(bytes / dtype_size(kind.dtype) / bench.size()) {
    if (!own) memory_ = bench.member.device->allocate(count_ * sizeof(float), "reduced");
    out_ = own ? reinterpret_cast<float *>(buffers_.mine()) + bench.rank() * count_
               : reinterpret_cast<float *>(memory_->data());
  }
  void operator()() {
    const fsdp::transport::Sum span{.from = buffers_.whole(),
                                    .to = Part::alone(out_),
                                    .dtype = kind_.dtype,
                                    .wire = kind_.wire_dtype,
                                    .count = count_ * buffers_.size};
    buffers_.communicator->sum({&span, 1}, false, {0, "reduce_scatter"}, bench_.stream());
  }
  uint64_t check() {
    fill(bench_, buffers_, kind_.dtype);
    (*this)();
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < count_; ++i) wrong += out_[i] != expected_sum(buffers_.size, buffers_.rank * count_ + i);
    bench_.lab.meet();
    return bench_.lab.sum(wrong);
  }

 private:
  Bench &bench_;
  Buffers buffers_;
  Reduction kind_;
  uint64_t count_;
  std::unique_ptr<Memory> memory_;
  float *out_;
};

class AllReduce {
 public:
  AllReduce(Bench &bench, uint64_t bytes) : bench_(bench), buffers_(bench, bytes), whole_(bench, bytes) {}
  void operator()() {
    const fsdp::transport::Sum span{.from = buffers_.whole(),
                                    .to = whole_.whole(),
                                    .count = buffers_.bytes / sizeof(float) / buffers_.size * buffers_.size,
                                    .everywhere = true};
    const auto ticket = buffers_.communicator->sum({&span, 1}, false, {0, "all_reduce"}, bench_.stream());
    // The next run writes memory that peers may still be reading in this one.
    buffers_.communicator->await_release(ticket, bench_.stream());
  }
  uint64_t check() {
    fill(bench_, buffers_, FSDP_FLOAT32);
    (*this)();
    uint64_t wrong = 0;
    const auto *out = reinterpret_cast<const float *>(whole_.mine());
    for (uint64_t i = 0; i < whole_.bytes / sizeof(float); ++i) wrong += out[i] != expected_sum(buffers_.size, i);
    bench_.lab.meet();
    return bench_.lab.sum(wrong);
  }

 private:
  Bench &bench_;
  Buffers buffers_, whole_;
};

// Below this size what is measured is how fast ranks find each other, not how fast bytes move.
constexpr uint64_t latency_bytes = 4096;

template <class Operation>
void report(Bench &bench, Operation &operation, const char *name, const char *variant, const char *dtype,
            uint64_t bytes, double bus_factor, std::optional<PeerCall> peer) {
  const uint64_t wrong = bench.request.check ? operation.check() : 0;
  const Work work = [&] { operation(); };
  const auto finish = [&](const Measured &measured, const char *reference) {
    Line line = make_line(bench, name, variant, dtype, bytes, measured);
    line.bus_factor = bus_factor;
    line.reference = reference;
    line.checked = bench.request.check;
    line.wrong = wrong;
    bench.report.add(line);
  };
  if (bytes <= latency_bytes && bench.size() > 1) return finish(measure_latency(bench, work, peer), "flag one-way");
  CopyReference copy(bench, bytes);
  finish(measure(
             bench, work, [&] { copy(); }, peer),
         copy.name());
}

template <class Each>
void for_sizes(Bench &bench, Each &&each) {
  for (const uint64_t bytes : bench.request.shared_sizes()) each(bytes);
}

}  // namespace

void run_all_gather(Bench &bench) {
  for (const bool in_place : {true, false})
    for_sizes(bench, [&](uint64_t bytes) {
      AllGather operation(bench, bytes, in_place);
      report(bench, operation, "all_gather", in_place ? "in place" : "out of place", "bytes", bytes,
             gather_bus(bench.size()),
             PeerCall{in_place ? PeerOperation::all_gather_in_place : PeerOperation::all_gather, bytes});
    });
}

void run_reduce_scatter(Bench &bench) {
  for (const Reduction &kind : reductions)
    for (const bool own : {false, true}) {
      if (own && dtype_size(kind.dtype) != sizeof(float)) continue;  // the sum is wider than its place
      for_sizes(bench, [&](uint64_t bytes) {
        ReduceScatter operation(bench, bytes, kind, own);
        std::optional<PeerCall> peer;
        if (kind.dtype == FSDP_FLOAT32 && kind.wire_dtype == FSDP_FLOAT32)  // MPI knows no bf16
          peer = own ? PeerCall{PeerOperation::reduce_scatter_in_place, bytes,
                                PeerOperation::reduce_scatter_block_in_place}
                     : PeerCall{PeerOperation::reduce_scatter, bytes, PeerOperation::reduce_scatter_block};
        report(bench, operation, "reduce_scatter", own ? "own buffer" : "other buffer", kind.name, bytes,
               gather_bus(bench.size()), peer);
      });
    }
}

void run_all_reduce(Bench &bench) {
  for_sizes(bench, [&](uint64_t bytes) {
    AllReduce operation(bench, bytes);
    report(bench, operation, "all_reduce", "", "fp32", bytes, 2 * gather_bus(bench.size()),
           PeerCall{PeerOperation::all_reduce, bytes});
  });
}

void run_barrier(Bench &bench) {
  auto communicator = bench.member.team->create_collectives("measurement");
  const Work work = [&] {
    // Returns when all ranks have called it: a barrier has nothing to read afterwards.
    communicator->barrier({0, "barrier"}, bench.stream());
  };
  const Measured measured = measure_latency(bench, work, PeerCall{PeerOperation::barrier, 0});
  Line line = make_line(bench, "barrier", "", "", 0, measured);
  line.reference = "flag one-way";
  bench.report.add(line);
}

}  // namespace perf
