// SPDX-License-Identifier: Apache-2.0
// What every transport promises (comm/collectives.h), each against plain loops: bytes and bits, waits, rounds, and how
// it ends when a rank does not come. A transport that is added is a row in collectives_rig.h.
#include <gtest/gtest.h>

#include "collectives_rig.h"

namespace fsdp::comm::test {
namespace {

using fsdp::test::read;
using fsdp::test::round_to;
using fsdp::test::write;
constexpr auto late = std::chrono::milliseconds(20);

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
INSTANTIATE_TEST_SUITE_P(Transports, Conformance, testing::ValuesIn(transports),
                         [](const auto &info) { return std::string(info.param.name); });

void require_byte(std::byte found, std::byte wanted, const char *what, uint64_t i) {
  if (found != wanted) require(false, fmt::format("{}: byte {} is {}", what, i, std::to_integer<int>(found)));
}

// -- gathers --

std::byte byte_of(uint32_t rank, uint64_t i, uint64_t salt) {
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

void check_gathers(Rig &rig, bool stable, bool in_place, uint64_t salt) {
  std::vector<Gathering> all;
  std::vector<Gather> gathers;
  for (const uint64_t bytes : {0, 1, 4096, 0, 30'001, 7}) {
    all.emplace_back(rig, bytes, in_place, salt++);
    gathers.push_back(all.back().gather);
  }
  rig.rank.meet();  // the parts are stable
  if (stable)
    rig.collectives->gather_stable(gathers, {1, "gathered"}, *rig.stream);
  else
    rig.finish(rig.collectives->gather(gathers, {1, "gathered"}, *rig.stream));
  rig.finish();
  for (const Gathering &one : all) one.check(rig);
  rig.rank.meet();
}

TEST_P(Conformance, GathersPartsOfAnyLength) {
  for (const uint32_t size : {1, 3})
    run(size, [](Rig &rig) {
      for (const bool stable : {false, true})
        for (const bool in_place : {false, true}) check_gathers(rig, stable, in_place, 10 * stable + 100 * in_place);
    });
}

TEST_P(Conformance, BroadcastsFromEachRank) {
  run(3, [](Rig &rig) {
    for (uint32_t root = 0; root < rig.size(); ++root)
      for (const uint64_t bytes : {1, 40'001}) {
        const Block data = rig.block(bytes);
        for (uint64_t i = 0; i < bytes; ++i) data.own[i] = rig.me() == root ? byte_of(root, i, bytes) : std::byte{0};
        rig.finish(rig.collectives->broadcast(data.at(), bytes, root, {1, "shown"}, *rig.stream));
        for (uint64_t i = 0; i < bytes; ++i) require_byte(data.own[i], byte_of(root, i, bytes), "a broadcast", i);
        rig.rank.meet();
      }
    const Error error = error_of([&] {
      rig.collectives->broadcast(rig.block(64).at(), 1, rig.size(), {1, "of nobody"}, *rig.stream);
    });
    require(error.message.find("broadcast from rank 3 of 3") != std::string::npos, error.message);
  });
}

// -- sums --

struct Addends {
  fsdp_dtype dtype = FSDP_FLOAT32, wire = FSDP_FLOAT32;
  float factor = 1;
};

// Of an order of its own whole numbers, which any order adds alike.
float addend(const Rig &rig, fsdp_dtype dtype, uint32_t rank, uint64_t i) {
  if (rig.transport.own_order) return static_cast<float>((rank * 7 + i * 3) % 17) - 5;
  return round_to(rough_value(rank, i, 3), dtype);
}

struct Summing {
  Summing(Rig &rig, const Addends &kind, uint64_t count, bool everywhere)
      : kind(kind),
        count(count),
        everywhere(everywhere),
        from(rig.block(4 * count)),
        result(rig.block(4 * count + 4)),
        rounded(rig.block(4 * count)),
        received(rig.block(4 * count)) {
    sum = {from.at(), in_place(rig) ? from.at() : result.at(), kind.dtype, kind.wire, count, kind.factor, everywhere};
    if (rig.transport.on_gpu && sum.sent_dtype() != kind.dtype) sum.rounded = rounded.own;
    if (rig.transport.on_gpu) sum.received = received.own;
  }
  // What is there when a sum is added to it.
  static float before(uint64_t i) { return static_cast<float>(3 + i % 5); }
  bool in_place(const Rig &rig) const { return everywhere && rig.plain(); }
  void fill(const Rig &rig) {
    for (uint64_t i = 0; i < count; ++i) write(from.own, kind.dtype, i, addend(rig, kind.dtype, rig.me(), i));
    for (uint64_t i = 0; i <= count; ++i) result.floats()[i] = before(i);
  }
  // A block's ranks are added, scaled, and then added to what is there: of plain sums each rank is a block.
  float expected(const Rig &rig, uint64_t i, float result, bool accumulate) const {
    const uint32_t block = rig.plain() ? 1 : rig.block_ranks();
    for (uint32_t first = 0; first < rig.size(); first += block) {
      float sum = 0;
      for (uint32_t r = first; r < std::min(first + block, rig.size()); ++r) {
        const float value = round_to(addend(rig, kind.dtype, r, i), kind.wire);
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
    for (uint64_t i = 0; i < length; ++i)
      if (const float wanted = expected(rig, own + i, before(i), accumulate); !fsdp::test::same(found[i], wanted))
        require(false, fmt::format("{} as {}, {} elements: element {} is {}, not {}", dtype_name(kind.dtype),
                                   dtype_name(kind.wire), count, i, found[i], wanted));
    if (!in_place(rig)) require(found[length] == before(length), "a sum wrote past its end");
  }

  Addends kind;
  uint64_t count;
  bool everywhere;
  Block from, result, rounded, received;
  Sum sum;
};

void check_sum(Rig &rig, const Addends &kind, uint64_t count, bool everywhere, bool accumulate) {
  Summing one(rig, kind, count, everywhere);
  one.fill(rig);
  rig.sum(one.sum, accumulate);
  one.check(rig, accumulate);
  rig.rank.meet();
}

TEST_P(Conformance, SumsItsSliceInRankOrder) {
  for (const uint32_t size : {1, 2, 4})
    run(size, [](Rig &rig) {
      for (const uint64_t slice : {0, 1, 257, 9001})
        for (const bool accumulate : {false, true}) check_sum(rig, {}, slice * rig.size(), false, accumulate);
    });
}

// Without arenas a slice may be shorter, or empty.
TEST_P(Conformance, SumsEverywhere) {
  run(3, [](Rig &rig) {
    for (const uint64_t count : {3, 2001, 30'000}) {
      check_sum(rig, {}, count, true, false);
      if (!rig.plain()) check_sum(rig, {.factor = 0.5F}, count, true, true);
      if (rig.plain()) check_sum(rig, {}, count + 1, true, false);
    }
    if (rig.plain()) check_sum(rig, {}, 1, true, false);
  });
}

TEST_P(Conformance, RoundsToWhatTravelsAndScales) {
  run(3, [](Rig &rig) {
    if (rig.plain()) return;
    for (const fsdp_dtype dtype : {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16})
      for (const fsdp_dtype wire : {FSDP_FLOAT32, FSDP_BFLOAT16, FSDP_FLOAT16})
        for (const bool everywhere : {false, true})
          check_sum(rig, {dtype, wire, 0.5F}, 3 * 700, everywhere, !everywhere);
  });
}

TEST_P(Conformance, ManySumsAreOneCall) {
  run(3, [](Rig &rig) {
    std::vector<Summing> all;
    std::vector<Sum> sums;
    for (const uint64_t slice : {5, 0, 4000, 1, 333}) {
      all.emplace_back(rig, Addends(), 3 * slice, false);
      all.back().fill(rig);
      sums.push_back(all.back().sum);
    }
    rig.finish(rig.collectives->sum(sums, true, {1, "many"}, *rig.stream));
    for (const Summing &one : all) one.check(rig, true);
    rig.finish(rig.collectives->sum({}, false, {1, "none"}, *rig.stream));
    rig.finish(rig.collectives->gather({}, {1, "none"}, *rig.stream));
  });
}

TEST_P(Conformance, RefusesSumsThatItsShapeHasNot) {
  run(2, [](Rig &rig) {
    const auto refused = [&](const std::vector<Sum> &sums, bool accumulate, const char *text) {
      const Error error = error_of([&] {
        rig.collectives->sum(sums, accumulate, {1, "refused"}, *rig.stream);
        rig.finish();
      });
      require(error.status == FSDP_INTERNAL && error.message.find(text) != std::string::npos, error.message);
    };
    const Summing one(rig, {}, 64, false), whole(rig, {}, 64, true);
    Sum odd = one.sum;
    odd.count = 63;
    refused({odd}, false, "no equal slices of 2 ranks");
    refused({one.sum, whole.sum}, false, "everywhere and to their ranks alone");
    if (!rig.plain()) return;
    Sum scaled = one.sum, narrow = one.sum, moved = whole.sum;
    scaled.factor = 2;
    narrow.wire = FSDP_BFLOAT16;
    moved.to = one.result.at();
    refused({scaled}, false, "float32 sent as float32, times 2");
    refused({narrow}, false, "float32 sent as bfloat16");
    refused({moved}, false, "not in place");
    refused({whole.sum}, true, "not in place");
  });
}

// -- waits --

// The others must have what the slow rank writes at the last moment, and it what they had until all had read it.
TEST_P(Conformance, ASlowRankIsWaitedForAndReadsWhatWasThere) {
  run(3, [](Rig &rig) {
    for (uint32_t slow = 0; slow < rig.size(); ++slow)
      for (const bool everywhere : {false, true}) {
        Summing one(rig, {}, 3 * 1000, everywhere);
        std::memset(one.from.own, 0xFF, 4 * one.count);
        rig.rank.meet();
        if (rig.me() == slow) std::this_thread::sleep_for(late);
        one.fill(rig);
        const Ticket ticket = rig.collectives->sum({&one.sum, 1}, false, {1, "late"}, *rig.stream);
        rig.collectives->await_release(ticket, *rig.stream);
        if (!one.in_place(rig)) rig.stream->fill(one.from.own, 0xFF, 4 * one.count);
        rig.finish();
        require(rig.collectives->released(ticket), "what was awaited is released");
        one.check(rig, false);
        rig.rank.meet();
      }
  });
}

TEST_P(Conformance, ABarrierWaitsForAll) {
  std::atomic<uint32_t> come{0};
  run(3, [&](Rig &rig) {
    for (uint32_t turn = 0; turn < 3; ++turn) {
      if (rig.me() == turn) std::this_thread::sleep_for(late);
      ++come;
      rig.finish(rig.collectives->barrier({turn, "met"}, *rig.stream));
      require(come >= 3 * (turn + 1), fmt::format("barrier {} with {} calls", turn, come.load()));
    }
  });
}

// A writer waits for its readers before it writes the next version, whoever is slow.
TEST_P(Conformance, AReaderSeesTheVersionThatItAwaited) {
  run(3, [](Rig &rig) {
    const bool meets = rig.team->traits().gathers_meet || rig.plain();
    const auto written = meets ? nullptr : rig.team->create_gate("written");
    const auto left = meets ? nullptr : rig.team->create_gate("left");
    const Block own = rig.block(1024), whole = rig.block(3 * 1024);
    const Gather gather{own.at(), whole.own, 1024};
    for (uint32_t version = 1; version <= 12; ++version) {
      if (left) left->await(version - 1, "the readers of the last version");
      if (rig.me() == version % 3) std::this_thread::sleep_for(late / 10);
      std::memset(own.own, static_cast<int>(version * 3 + rig.me()), 1024);
      if (written) written->arrive(version, *rig.stream);
      if (written) written->await(version, "a version");
      if (rig.me() == (version + 1) % 3) std::this_thread::sleep_for(late / 10);
      rig.collectives->gather_stable({&gather, 1}, {1, "read"}, *rig.stream);
      rig.finish();
      for (uint64_t i = 0; i < 3 * 1024; ++i)
        require_byte(whole.own[i], static_cast<std::byte>(version * 3 + i / 1024), "a version", i);
      for (uint32_t r = 0; left && r < rig.size(); ++r)  // mapped: where it was written
        require_byte(own.at(1000).of(r)[0], static_cast<std::byte>(version * 3 + r), "a mapped version", r);
      if (left) left->arrive(version);
    }
  });
}

TEST_P(Conformance, DelaysChangeNoBit) {
  run(3,
      [](Rig &rig) {
        for (const bool accumulate : {false, true}) check_sum(rig, {}, 3 * 5000, false, accumulate);
        check_gathers(rig, true, false, 5);
        check_sum(rig, {}, 3 * 5000, true, false);
      },
      {.delay_us = 100, .delay_seed = 7});
}

// -- the end of a round --

void start_round(Rig &rig) {
  rig.rank.meet();
  rig.collectives->next_round();
  rig.rank.meet();
}

TEST_P(Conformance, AfterQuiesceNothingIsEnqueuedInTheRound) {
  run(2, [](Rig &rig) {
    for (int round = 0; round < 3; ++round) {
      check_sum(rig, {}, 2 * 100, false, false);
      rig.collectives->quiesce();
      const Error error = error_of([&] { rig.collectives->barrier({1, "too late"}, *rig.stream); });
      require(error.status == FSDP_INTERNAL, error.message);
      start_round(rig);
    }
    require(!rig.collectives->broken(), "broken without a reason");
  });
}

// What cannot be taken back is cut, on all ranks: as a step is discarded.
void end_abandoned(Rig &rig) {
  const char sound = rig.team->ends_alike();
  std::vector<char> all(rig.size());
  rig.rank.team->all_gather(&sound, 1, all.data(), "sound");
  if (std::find(all.begin(), all.end(), 0) != all.end()) {
    rig.team->cut();
    rig.team->renew();
  }
  rig.finish();
}

TEST_P(Conformance, ARoundThatOneRankAbandonsEndsAndTheNextOneWorks) {
  run(3, [](Rig &rig) {
    for (uint32_t quitter = 0; quitter < rig.size(); ++quitter) {
      const auto start = std::chrono::steady_clock::now();
      Summing one(rig, {}, 3 * 20'000, false);
      one.fill(rig);
      check_sum(rig, {}, 3 * 10, false, false);
      if (rig.me() != quitter) rig.collectives->sum({&one.sum, 1}, false, {1, "left"}, *rig.stream);
      if (rig.me() == quitter) std::this_thread::sleep_for(late);
      const bool told = !rig.transport.compares_later;
      if (rig.me() == quitter || !told)
        rig.collectives->abandon();
      else
        rig.collectives->quiesce();
      end_abandoned(rig);
      require(seconds_since(start) < patience_seconds, "an abandoned round ended late");
      const auto broken = rig.collectives->broken();
      if (told && rig.me() != quitter)
        require(broken && broken->status == FSDP_INVALID_STATE && broken->rank == static_cast<int32_t>(quitter),
                broken ? broken->message : "not broken");
      start_round(rig);
      check_sum(rig, {}, 3 * 5000, false, true);
      require(!rig.collectives->broken(), "a new round is not broken");
    }
  });
}

// -- failures --

struct Ends {
  fsdp_status status;
  std::string text;
  double seconds;
};

// How the call ends on each rank; on one without an end it is "no error".
std::vector<Ends> ends_of(const Transport &transport, const std::function<void(Rig &)> &body) {
  std::vector<Ends> ends(3);
  run_threads(
      3,
      [&](Rank &rank) {
        Rig rig(rank, transport);
        check_sum(rig, {}, 3 * 10, false, false);
        const auto start = std::chrono::steady_clock::now();
        try {
          body(rig);
          rig.finish();
          if (auto broken = rig.collectives->broken()) throw *std::move(broken);
        } catch (const Error &error) {
          ends[rank.rank()] = {error.status, error.message, seconds_since(start)};
          throw;
        }
        ends[rank.rank()] = {FSDP_OK, "no error", seconds_since(start)};
      },
      options_of(transport));
  return ends;
}

TEST_P(Conformance, CallsThatDifferAreNamedOnEveryRank) {
  if (GetParam().compares_later) GTEST_SKIP() << "the engine's ranks compare what they have called";
  const auto ends = ends_of(GetParam(), [](Rig &rig) {
    const Summing one(rig, {}, rig.me() == 1 ? 3 * 4 : 3 * 8, false);
    rig.sum(one.sum, false, "a");
  });
  for (const Ends &end : ends) {
    EXPECT_EQ(end.status, FSDP_MISMATCH) << end.text;
    EXPECT_NE(end.text.find("rank 1 called reduce_scatter of 'a' (#1, float32, 12 elements)"), std::string::npos)
        << end.text;
    EXPECT_NE(end.text.find("called reduce_scatter of 'a' (#1, float32, 24 elements)"), std::string::npos) << end.text;
    EXPECT_LT(end.seconds, patience_seconds);
  }
}

TEST_P(Conformance, WhenARankFailsEveryCallEnds) {
  const auto ends = ends_of(GetParam(), [](Rig &rig) {
    const Summing one(rig, {}, 3 * 20'000, false);
    rig.rank.meet();
    if (rig.me() == 1) {
      rig.rank.world->abort("an error of its own");  // ranks on other hosts hear that it is gone
      throw Error(FSDP_SYSTEM, "an error of its own");
    }
    rig.sum(one.sum);
  });
  EXPECT_EQ(ends[1].text, "an error of its own");
  for (const uint32_t r : {0, 2}) {
    // Over GPUs and hosts its last word is that it gives the round up, which comes before its end.
    const bool given_up = GetParam().over_net && GetParam().on_gpu && ends[r].status == FSDP_INVALID_STATE;
    EXPECT_TRUE(given_up || ends[r].status == FSDP_PEER_FAILED) << ends[r].text;
    EXPECT_NE(ends[r].text.find("rank 1"), std::string::npos) << ends[r].text;
    EXPECT_LT(ends[r].seconds, patience_seconds);
  }
}

}  // namespace
}  // namespace fsdp::comm::test
