// SPDX-License-Identifier: Apache-2.0
// Bodies that the tests of every transport share. They compare gathers and sums with plain loops.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "collectives_rig.h"

namespace fsdp::transport::test {

constexpr auto late = std::chrono::milliseconds(20);  // the pause of a slow rank

class Conformance : public testing::TestWithParam<Transport> {
 protected:
  static void run(uint32_t size, const std::function<void(Rig &)> &body, const device::Options &device = {}) {
    const auto problems = run_threads(
        size,
        [&](Rank &rank) {
          {
            Rig rig(rank, GetParam());
            body(rig);
            rank.meet();
          }
          rank.leave();
        },
        options_of(GetParam(), device));
    for (size_t r = 0; r < problems.size(); ++r) EXPECT_EQ(problems[r], "") << "rank " << r;
  }
};

inline void require_byte(std::byte found, std::byte wanted, const char *what, uint64_t i) {
  if (found != wanted) require(false, fmt::format("{}: byte {} is {}", what, i, std::to_integer<int>(found)));
}

// -- gathers --

inline std::byte byte_of(uint32_t rank, uint64_t i, uint64_t salt) {
  return static_cast<std::byte>((i * 2654435761 >> 7) + rank * 31 + salt);
}

struct Gathering {
  Gathering(Rig &rig, uint64_t bytes, bool in_place, uint64_t salt)
      : from(rig.block(bytes)), whole(rig.block(bytes * rig.size() + 1)), bytes(bytes), salt(salt) {
    std::memset(whole.own, 77, bytes * rig.size() + 1);
    std::byte *own = in_place ? whole.own + rig.me() * bytes : from.own;
    for (uint64_t i = 0; i < bytes; ++i) own[i] = byte_of(rig.me(), i, salt);
    gather = {in_place ? whole.at().slice(bytes, rig.me()) : from.at(), whole.own, bytes};
    if (in_place && gather.from.own != own) require(false, "a slice of a part");
  }
  void check(Rig &rig) const {
    for (uint32_t r = 0; r < rig.size(); ++r)
      for (uint64_t i = 0; i < bytes; ++i)
        require_byte(whole.own[r * bytes + i], byte_of(r, i, salt), "a gather", r * bytes + i);
    require_byte(whole.own[rig.size() * bytes], std::byte{77}, "behind a gather", rig.size() * bytes);
  }
  Block from, whole;
  uint64_t bytes, salt;
  Gather gather;
};

inline void check_gathers(Rig &rig, bool stable, bool in_place, uint64_t salt) {
  std::vector<Gathering> all;
  std::vector<Gather> gathers;
  for (const uint64_t bytes : {0, 1, 4096, 0, 30'001, 7}) {
    all.emplace_back(rig, bytes, in_place, salt++);
    gathers.push_back(all.back().gather);
  }
  rig.rank.meet();  // the parts do not change meanwhile
  if (stable)
    rig.collectives->gather_stable(gathers, {1, "gathered"}, *rig.stream);
  else
    rig.finish(rig.collectives->gather(gathers, {1, "gathered"}, *rig.stream));
  rig.finish();
  for (const Gathering &one : all) one.check(rig);
  rig.rank.meet();
}

// -- exchanges --

struct Route {
  uint32_t source, target;
  uint64_t bytes;
};

// Each move reads its own bytes, unless all read the same. At its target its place is followed by a guard byte.
struct Exchanging {
  enum class Sources { apart, same };

  Exchanging(Rig &rig, std::vector<Route> the_routes, uint64_t salt, Sources sources = Sources::apart)
      : routes(std::move(the_routes)), salt(salt) {
    std::vector<uint64_t> read(rig.size()), written(rig.size());
    for (const Route &route : routes) {
      const uint64_t offset = sources == Sources::same ? 5 : read[route.source] + 3;
      moves.push_back({route.source, route.target, offset, route.bytes, nullptr});
      read[route.source] = std::max(read[route.source], offset + route.bytes);
      places.push_back(written[route.target]);
      written[route.target] += route.bytes + 1;
    }
    from_bytes = *std::max_element(read.begin(), read.end());
    to_bytes = *std::max_element(written.begin(), written.end());
    from.emplace(rig.block(from_bytes));
    to.emplace(rig.block(to_bytes));
    for (size_t i = 0; i < moves.size(); ++i)
      if (moves[i].target == rig.me()) moves[i].to = to->own + places[i];
    fill(rig);
  }
  void fill(const Rig &rig) const {
    for (uint64_t i = 0; i < from_bytes; ++i) from->own[i] = byte_of(rig.me(), i, salt);
    std::memset(to->own, 77, to_bytes);
  }
  Ticket enqueue(Rig &rig, const char *name = "exchanged") const {
    return rig.collectives->exchange(from->at(), moves, {1, name}, *rig.stream);
  }
  void check(const Rig &rig) const {
    for (size_t i = 0; i < moves.size(); ++i) {
      if (moves[i].target != rig.me()) continue;
      for (uint64_t b = 0; b < moves[i].bytes; ++b)
        require_byte(moves[i].to[b], byte_of(moves[i].source, moves[i].offset + b, salt), "a move", b);
      require_byte(moves[i].to[moves[i].bytes], std::byte{77}, "behind a move", moves[i].bytes);
    }
  }
  void check_sources(const Rig &rig) const {
    for (uint64_t i = 0; i < from_bytes; ++i)
      require_byte(from->own[i], byte_of(rig.me(), i, salt), "a source of moves", i);
  }
  // Counts the bytes that the rank sends to others.
  uint64_t sent_by(uint32_t rank) const {
    uint64_t bytes = 0;
    for (const Route &route : routes)
      if (route.source == rank && route.target != rank) bytes += route.bytes;
    return bytes;
  }

  std::vector<Route> routes;
  uint64_t salt;
  std::vector<Move> moves;
  std::vector<uint64_t> places;
  uint64_t from_bytes = 0, to_bytes = 0;
  std::optional<Block> from, to;
};

inline void check_exchange(Rig &rig, std::vector<Route> routes, uint64_t salt = 0,
                           Exchanging::Sources sources = Exchanging::Sources::apart) {
  const Exchanging one(rig, std::move(routes), salt, sources);
  rig.finish(one.enqueue(rig));
  one.check(rig);
  one.check_sources(rig);
  rig.rank.meet();
}

// Rank 0 receives from all and sends nothing to others; the last rank does the reverse. Some moves have no bytes.
inline std::vector<Route> uneven_routes(uint32_t size, uint64_t bytes) {
  std::vector<Route> routes;
  for (uint32_t turn = 0; turn < 2; ++turn)
    for (uint32_t target = 0; target < size; ++target)
      for (uint32_t source = 0; source < size; ++source) {
        const bool barred = source != target && (source == 0 || target == size - 1);
        if (!barred) routes.push_back({source, target, (source * 7 + target * 3 + turn) % 4 * bytes + turn});
      }
  return routes;
}

// -- sums --

struct Addends {
  fsdp_dtype dtype = FSDP_FLOAT32, wire = FSDP_FLOAT32;
  float factor = 1;
};

// A transport with its own order of additions gets whole numbers, because their sum is the same in any order. It may do
// this only in fp32.
inline float addend(const Rig &rig, const Addends &kind, uint32_t rank, uint64_t i) {
  if (rig.transport.own_order && std::min(dtype_size(kind.dtype), dtype_size(kind.wire)) == 4)
    return static_cast<float>((rank * 7 + i * 3) % 17) - 5;
  return fsdp::test::round_to(rough_value(rank, i, 3), kind.dtype);
}

// A sum is written to its own memory or over its addends, and goes to all ranks or only to this rank's slice.
enum class Target { elsewhere, in_place };

struct Summing {
  Summing(Rig &rig, const Addends &kind, uint64_t count, bool everywhere, Target target = Target::elsewhere)
      : kind(kind),
        count(count),
        everywhere(everywhere),
        in_place(target == Target::in_place || (everywhere && rig.plain())),
        from(rig.block(4 * count)),
        result(rig.block(4 * count + 4)),
        rounded(rig.block(4 * count)),
        received(rig.block(4 * count)) {
    const Part own = everywhere ? from.at() : from.at().slice(4 * (count / rig.size()), rig.me());
    sum = {from.at(), in_place ? own : result.at(), kind.dtype, kind.wire, count, kind.factor, everywhere};
    if (rig.transport.on_gpu && sum.sent_dtype() != kind.dtype) sum.rounded = rounded.own;
    if (rig.transport.on_gpu) sum.received = received.own;
  }
  // Returns the value to which a sum is added. If all ranks get the sum, the value is that of the rank that has the
  // slice.
  static float before(uint32_t rank, uint64_t i) { return static_cast<float>(3 + i % 5 + 8 * rank); }
  void fill(const Rig &rig) {
    for (uint64_t i = 0; i < count; ++i) fsdp::test::write(from.own, kind.dtype, i, addend(rig, kind, rig.me(), i));
    for (uint64_t i = 0; i <= count; ++i) result.floats()[i] = before(rig.me(), i);
  }
  // The ranks of a block are added and scaled, and then added to the result. In a plain sum each rank is a block.
  float expected(const Rig &rig, uint64_t i, float result, bool accumulate) const {
    const uint32_t block = rig.plain() ? 1 : rig.block_ranks();
    for (uint32_t first = 0; first < rig.size(); first += block) {
      float sum = 0;
      for (uint32_t r = first; r < std::min(first + block, rig.size()); ++r) {
        const float value = fsdp::test::round_to(addend(rig, kind, r, i), kind.wire);
        sum = r == first ? value : sum + value;
      }
      result = first || accumulate ? result + sum * kind.factor : sum * kind.factor;
    }
    return result;
  }
  void check(const Rig &rig, bool accumulate) const {
    const uint64_t own = everywhere ? 0 : rig.me() * (count / rig.size()),
                   length = everywhere ? count : count / rig.size();
    const float *found = sum.to.floats();
    const auto owner = [&](uint64_t i) {
      return everywhere ? static_cast<uint32_t>(i * rig.size() / count) : rig.me();
    };
    for (uint64_t i = 0; i < length; ++i)
      if (const float wanted = expected(rig, own + i, before(owner(i), i), accumulate);
          !fsdp::test::same(found[i], wanted))
        require(false, fmt::format("{} as {}, {} elements: element {} is {}, not {}", dtype_name(kind.dtype),
                                   dtype_name(kind.wire), count, i, found[i], wanted));
    if (!in_place) require(found[length] == before(rig.me(), length), "a sum wrote past its end");
  }

  Addends kind;
  uint64_t count;
  bool everywhere, in_place;
  Block from, result, rounded, received;
  Sum sum;
};

inline void check_sum(Rig &rig, const Addends &kind, uint64_t count, bool everywhere, bool accumulate,
                      Target target = Target::elsewhere) {
  Summing one(rig, kind, count, everywhere, target);
  one.fill(rig);
  rig.sum(one.sum, accumulate);
  one.check(rig, accumulate);
  rig.rank.meet();
}

}  // namespace fsdp::transport::test
