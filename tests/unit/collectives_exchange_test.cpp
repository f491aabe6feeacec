// SPDX-License-Identifier: Apache-2.0
// Tests promises of every transport about exchanges, in which each pair of ranks moves different bytes.
#include <array>
#include <random>

#include "collectives_bodies.h"
#include "transport/call/launch.h"

namespace fsdp::transport::test {
namespace {

TEST_P(Conformance, AnExchangeMovesDifferentBytesBetweenEachPair) {
  for (const uint32_t size : {1, 2, 3, 4})
    run(size, [](Rig &rig) {
      for (const uint64_t bytes : {1, 128, 9001}) check_exchange(rig, uneven_routes(rig.size(), bytes), bytes);
    });
}

TEST_P(Conformance, AnExchangeMayHaveNothingToMove) {
  for (const uint32_t size : {1, 2, 3, 4})
    run(size, [](Rig &rig) {
      check_exchange(rig, {});
      rig.finish(rig.collectives->exchange({}, {}, {1, "nothing"}, *rig.stream));
      std::vector<Route> all;
      for (uint32_t source = 0; source < rig.size(); ++source)
        for (uint32_t target = 0; target < rig.size(); ++target) all.push_back({source, target, 0});
      check_exchange(rig, all);
    });
}

// This also holds if a rank moves its bytes to the place where they already are.
TEST_P(Conformance, AMoveToItsOwnSourceCopies) {
  for (const uint32_t size : {1, 3})
    run(size, [](Rig &rig) {
      std::vector<Route> own;
      for (uint32_t r = 0; r < rig.size(); ++r)
        for (const uint64_t bytes : {r + 1, 40'000 * r + 7}) own.push_back({r, r, bytes});
      check_exchange(rig, own);
      const Block still = rig.block(100);
      std::memset(still.own, 5, 100);
      const Move move{0, 0, 10, 20, still.own + 10};
      rig.finish(rig.collectives->exchange(still.at(), {&move, 1}, {1, "still"}, *rig.stream));
      for (uint64_t i = 0; i < 100; ++i) require_byte(still.own[i], std::byte{5}, "a move in place", i);
      rig.rank.meet();
    });
}

TEST_P(Conformance, AnExchangeOfManySmallMovesIsOneCall) {
  for (const uint32_t size : {1, 2, 3, 4})
    run(size, [](Rig &rig) {
      std::mt19937 random(rig.size());  // the same moves on all ranks
      const auto below = [&](uint32_t end) { return static_cast<uint32_t>(random() % end); };
      std::vector<Route> routes;
      for (int i = 0; i < 500; ++i) routes.push_back({below(rig.size()), below(rig.size()), below(200)});
      check_exchange(rig, routes);
    });
}

// Makes more moves than NCCL accepts in one launch.
TEST_P(Conformance, AnExchangeHasAsManyMovesAsItsCallerWants) {
  run(2, [](Rig &rig) {
    std::vector<Route> routes;
    for (uint32_t i = 0; i < 6000; ++i) routes.push_back({i % 2, (i / 2) % 2, 1 + i % 5});
    check_exchange(rig, routes);
  });
}

// The bytes exceed the halves of relays, chunks of messages and slots of staging, and are not a multiple of them.
TEST_P(Conformance, AnExchangeMovesMoreThanAnyChunkHolds) {
  constexpr uint64_t mib = uint64_t{1} << 20;
  for (const uint32_t size : {1, 2, 3, 4})
    run(size, [](Rig &rig) {
      const uint32_t last = rig.size() - 1;
      check_exchange(rig, {{last, 0, 3 * mib + 5}, {0, last, 700'001}, {0, 0, 2 * mib + 1}, {last, 0, 300'000}});
    });
}

TEST_P(Conformance, ManyTargetsReadTheSameBytesOfASource) {
  run(3, [](Rig &rig) {
    std::vector<Route> routes;
    for (uint32_t source = 0; source < rig.size(); ++source)
      for (uint32_t target = 0; target < rig.size(); ++target) routes.push_back({source, target, 20'000 + source});
    check_exchange(rig, routes, 9, Exchanging::Sources::same);
  });
}

// One rank is slow to write its bytes, and each rank overwrites them as soon as they are released. Other calls lie
// between the exchanges.
TEST_P(Conformance, AnExchangeReadsItsSourcesUntilTheyAreReleased) {
  run(3, [](Rig &rig) {
    const Exchanging one(rig, uneven_routes(rig.size(), 30'000), 4);
    Summing sum(rig, {}, 3 * 1000, false);
    Gathering gathering(rig, 5000, false, 8);
    for (uint32_t turn = 0; turn < 2 * rig.size(); ++turn) {
      std::memset(one.from->own, 0xFF, one.from_bytes);
      rig.rank.meet();
      if (rig.me() == turn % rig.size()) std::this_thread::sleep_for(late);
      one.fill(rig);
      sum.fill(rig);
      std::memset(gathering.whole.own, 77, 3 * 5000 + 1);
      const Ticket exchanged = one.enqueue(rig);
      const Ticket gathered = rig.collectives->gather({&gathering.gather, 1}, {1, "between"}, *rig.stream);
      if (turn % 2) rig.collectives->await_release(exchanged, *rig.stream);
      if (turn % 2) rig.stream->fill(one.from->own, 0xFF, one.from_bytes);
      const Ticket summed = rig.collectives->sum({&sum.sum, 1}, false, {1, "between"}, *rig.stream);
      const Ticket again = rig.collectives->exchange({}, {}, {1, "between"}, *rig.stream);
      for (const Ticket ticket : {exchanged, gathered, summed, again})
        rig.collectives->await_release(ticket, *rig.stream);
      rig.stream->fill(one.from->own, 0xFF, one.from_bytes);
      rig.finish();
      require(rig.collectives->released(exchanged), "an exchange that was awaited is released");
      one.check(rig);
      sum.check(rig, false);
      gathering.check(rig);
      rig.rank.meet();
    }
  });
}

TEST_P(Conformance, DelaysChangeNoByteOfAnExchange) {
  run(3, [](Rig &rig) { check_exchange(rig, uneven_routes(rig.size(), 20'000)); }, {.delay_us = 100, .delay_seed = 7});
}

// The exchange also waits for ranks that move nothing.
TEST_P(Conformance, AnExchangeWaitsForAllRanks) {
  if (GetParam().compares_later) GTEST_SKIP() << "NCCL's messages wait only for the two ranks that they are between";
  std::atomic<uint32_t> come{0};
  run(3, [&](Rig &rig) {
    for (uint32_t turn = 0; turn < 3; ++turn) {
      const Exchanging one(rig, {{turn, (turn + 1) % 3, 100}}, turn);
      rig.rank.meet();
      if (rig.me() == (turn + 2) % 3) std::this_thread::sleep_for(late);
      ++come;
      rig.finish(one.enqueue(rig));
      require(come >= 3 * (turn + 1), fmt::format("exchange {} with {} calls", turn, come.load()));
      one.check(rig);
    }
  });
}

// Each byte is sent once, to its target. Where ranks read each other's memory, nothing is sent.
TEST_P(Conformance, AnExchangeSendsBytesOnlyToTheirTargets) {
  run(3, [](Rig &rig) {
    const Exchanging one(rig, uneven_routes(rig.size(), 70'000), 1);
    const uint64_t before = rig.collectives->sent_bytes();
    rig.finish(one.enqueue(rig));
    const uint64_t sent = rig.collectives->sent_bytes() - before;
    const uint64_t wanted = rig.plain() || rig.transport.nccl ? one.sent_by(rig.me()) : 0;
    require(sent == wanted, fmt::format("{} bytes and not {}", sent, wanted));
    rig.rank.meet();
  });
}

// Places count the bytes that a source sends to others. Moves of other ranks take room there, too.
TEST(Launch, HasTheMovesOfItsRank) {
  std::byte to[4];
  const std::vector<Move> moves = {{1, 0, 50, 5, nullptr}, {1, 1, 9, 90, to}, {0, 1, 7, 0, to + 1},
                                   {1, 2, 0, 8, nullptr},  {0, 2, 1, 3, to},  {2, 1, 30, 4, to + 2}};
  Launch launch;
  launch.start(Operation::exchange, {1, "moved"});
  launch.add(Part::alone(to), moves, 1, 3);
  EXPECT_EQ(count_moves(moves, 1), 4);
  ASSERT_EQ(launch.pieces.size(), 4);
  EXPECT_EQ(launch.sent, (std::vector<uint64_t>{3, 13, 4}));
  const std::array<uint64_t, 4> counts = {5, 90, 8, 4}, places = {0, 5, 5, 0};
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(launch.pieces[i].count, counts[i]) << i;
    EXPECT_EQ(launch.pieces[i].place, places[i]) << i;
  }
  EXPECT_EQ(launch.fingerprint.text(3), "exchange of 'moved' (#3, 110 bytes)");
}

TEST(LaunchPool, CallsOfDifferentLengthsUseTheSameLaunch) {
  LaunchPool pool;
  const Launch *first = nullptr;
  for (uint64_t count = 33; count <= 64; ++count) {
    Launch &launch = pool.take(Operation::exchange, {1, "moved"}, count);
    const LaunchReturn guard(launch);
    if (!first) first = &launch;
    EXPECT_EQ(&launch, first) << count;
  }
}

TEST_P(Conformance, RefusesMovesOfRanksThatTheTeamDoesNotHave) {
  run(2, [](Rig &rig) {
    const Block block = rig.block(64);
    const auto refused = [&](const Part &from, const Move &move, const char *text) {
      const Error error = error_of([&] { rig.collectives->exchange(from, {&move, 1}, {1, "refused"}, *rig.stream); });
      require(error.status == FSDP_INTERNAL && error.message.find(text) != std::string::npos, error.message);
    };
    refused(block.at(), {2, 0, 0, 8, block.own}, "a move of 'refused' from rank 2 to rank 0 of 2");
    refused(block.at(), {1, 7, 0, 0, block.own}, "a move of 'refused' from rank 1 to rank 7 of 2");
    if (!rig.plain()) refused(Part::alone(block.own), {0, 1, 0, 8, block.own + 16}, "no other rank reads");
    check_exchange(rig, {{0, 1, 8}});
  });
}

}  // namespace
}  // namespace fsdp::transport::test
