// SPDX-License-Identifier: Apache-2.0
// Tests promises of every transport: waits for a slow rank, ends of rounds, and the end of calls when a rank does not
// come.
#include <functional>
#include <latch>

#include "collectives_bodies.h"
#include "transport/call/round.h"

namespace fsdp::transport::test {
namespace {

// -- waits --

// The others must get the bytes that the slow rank writes at the last moment. Their bytes must stay unchanged until all
// ranks have read them.
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
        if (!one.in_place) rig.stream->fill(one.from.own, 0xFF, 4 * one.count);
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

// Delays the stream if it runs tasks, otherwise the thread that enqueues.
void linger(Rig &rig) {
  const auto nap = [] { std::this_thread::sleep_for(late / 10); };
  if (rig.stream->runs_tasks())
    rig.stream->run(nap);
  else
    nap();
}

// A rank meets the others when its own reads have ended, as in the engine, and the memory that it read is overwritten
// at once. One rank is slow to write, another is slow to read.
TEST_P(Conformance, AReaderHasTheVersionThatItAwaitedUntilTheRanksMeet) {
  run(3, [](Rig &rig) {
    const auto versions = rig.team->create_versions("weights");
    require(rig.team->traits().gathers_are_collective != static_cast<bool>(versions),
            "versions exist if and only if gathers are not collective");
    const Block own = rig.block(1024), whole = rig.block(3 * 1024);
    const Gather gather{own.at(), whole.own, 1024};
    for (uint32_t version = 1; version <= 12; ++version) {
      if (rig.me() == version % 3) std::this_thread::sleep_for(late / 10);
      std::memset(own.own, static_cast<int>(version * 3 + rig.me()), 1024);
      if (versions) versions->publish(version, *rig.stream);
      if (versions) versions->await(version, *rig.stream, "a version");
      if (rig.me() == (version + 1) % 3) linger(rig);
      rig.collectives->gather_stable({&gather, 1}, {1, "read"}, *rig.stream);
      rig.finish();
      // Mapped parts are read in the place where they were written.
      for (uint32_t r = 0; versions && !rig.plain() && r < rig.size(); ++r)
        require_byte(own.at(1000).of(r)[0], static_cast<std::byte>(version * 3 + r), "a mapped version", r);
      rig.rank.meet();
      std::memset(own.own, 0xFF, 1024);
      for (uint64_t i = 0; i < 3 * 1024; ++i)
        require_byte(whole.own[i], static_cast<std::byte>(version * 3 + i / 1024), "a version", i);
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

// Runs when all ranks have met. Where rounds end with steps, one rank reaches the new round when the others already
// wait for it.
void start_round(Rig &rig) {
  rig.rank.meet();
  const bool enters = rig.team->traits().step_ends_round;
  if (enters && rig.me() == 0) std::this_thread::sleep_for(late);
  rig.collectives->next_round();
  if (!enters) rig.rank.meet();
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

// Ends a round as a discarded step does: all ranks abort the work that they cannot take back.
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

// One rank abandons the round instead of making the call.
void abandon_call(Rig &rig, uint32_t quitter, const std::function<void()> &call) {
  const auto start = std::chrono::steady_clock::now();
  if (rig.me() != quitter) call();
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
}

TEST_P(Conformance, ARoundThatOneRankAbandonsEndsAndTheNextOneWorks) {
  run(3, [](Rig &rig) {
    for (uint32_t quitter = 0; quitter < rig.size(); ++quitter) {
      Summing one(rig, {}, 3 * 20'000, false);
      one.fill(rig);
      check_sum(rig, {}, 3 * 10, false, false);
      abandon_call(rig, quitter, [&] { rig.collectives->sum({&one.sum, 1}, false, {1, "left"}, *rig.stream); });
      check_sum(rig, {}, 3 * 5000, false, true);
      require(!rig.collectives->broken(), "a new round is not broken");
    }
  });
}

TEST_P(Conformance, AnExchangeThatOneRankAbandonsEndsAndTheNextRoundWorks) {
  run(3, [](Rig &rig) {
    for (uint32_t quitter = 0; quitter < rig.size(); ++quitter) {
      const Exchanging one(rig, uneven_routes(rig.size(), 300'000), quitter);
      check_exchange(rig, uneven_routes(rig.size(), 10));
      abandon_call(rig, quitter, [&] { one.enqueue(rig, "left"); });
      one.fill(rig);
      rig.finish(one.enqueue(rig, "again"));
      one.check(rig);
      require(!rig.collectives->broken(), "a new round is not broken");
      rig.rank.meet();
    }
  });
}

// All ranks have made the call, and one abandons it while bytes are in transit. Memory behind the targets stays
// unchanged.
TEST_P(Conformance, AnExchangeIsAbandonedInItsMiddle) {
  run(3, [](Rig &rig) {
    for (uint32_t round = 0; round < 4; ++round) {
      const Exchanging one(rig, uneven_routes(rig.size(), 300'000), round);
      rig.rank.meet();
      one.enqueue(rig, "left");
      std::this_thread::sleep_for(round * std::chrono::microseconds(500));
      if (rig.me() == round % 3 || rig.transport.compares_later)
        rig.collectives->abandon();
      else
        rig.collectives->quiesce();
      end_abandoned(rig);
      for (const Move &move : one.moves)
        if (move.to) require_byte(move.to[move.bytes], std::byte{77}, "behind a move", move.bytes);
      start_round(rig);
      one.fill(rig);
      rig.finish(one.enqueue(rig, "again"));
      one.check(rig);
      rig.rank.meet();
    }
  });
}

// Rank 2 had enqueued all, and then gave up because of rank 1. A third rank passes on the former, late.
TEST(RoundState, WhatIsPassedOnLateChangesNoBlame) {
  const auto word = [](uint64_t round, uint64_t blamed, uint64_t flags) { return round << 32 | blamed << 8 | flags; };
  const uint64_t enqueued_all = word(7, 2, RoundState::enqueued_all),
                 followed = word(7, 1, RoundState::enqueued_all | RoundState::abandoned);
  EXPECT_EQ(RoundState::merge(followed, enqueued_all), followed);
  EXPECT_EQ(RoundState::merge(enqueued_all, word(7, 1, RoundState::abandoned)), followed);
  EXPECT_EQ(RoundState::merge(followed, word(8, 2, RoundState::enqueued_all)), word(8, 2, RoundState::enqueued_all));
  EXPECT_FALSE(RoundState::discards(followed, 2));
}

// Rank 0 discards because rank 1 did. Rank 2 learns of both at once, and its error names rank 1.
TEST_P(Conformance, TheFirstRankToDiscardIsNamedNotOneThatFollows) {
  if (GetParam().compares_later) GTEST_SKIP() << "the engine's ranks tell each other why";
  run(3, [](Rig &rig) {
    for (int round = 0; round < 3; ++round) {
      Summing one(rig, {}, 3 * 1000, false);
      one.fill(rig);
      const auto call = [&] {
        rig.collectives->sum({&one.sum, 1}, false, {1, "left"}, *rig.stream);
        rig.finish();
      };
      if (rig.me() == 1) rig.collectives->abandon();
      if (rig.me() == 0) call();
      if (rig.me() == 0) rig.collectives->abandon();
      rig.rank.meet();
      if (rig.me() == 2) call();
      if (rig.me() != 1) {
        const auto broken = rig.collectives->broken();
        require(broken && broken->rank == 1, broken ? broken->message : "not broken");
      }
      end_abandoned(rig);
      start_round(rig);
    }
  });
}

// -- failures --

struct Ends {
  fsdp_status status;
  std::string text;
  double seconds;
};

// Tells how the call ends on each rank. A rank whose call did not fail has "no error".
std::vector<Ends> ends_of(const Transport &transport, const std::function<void(Rig &)> &body,
                          uint32_t timeout_ms = RankOptions().timeout_ms) {
  std::vector<Ends> ends(3);
  RankOptions options = options_of(transport);
  options.timeout_ms = timeout_ms;
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
      options);
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

// Lists of moves differ by the bytes of a move, by its target, or by its source.
TEST_P(Conformance, ExchangesThatDifferAreNamedOnEveryRank) {
  if (GetParam().compares_later) GTEST_SKIP() << "the engine's ranks compare what they have called";
  struct Difference {
    Route other;
    const char *bytes;
  };
  for (const Difference &difference : {Difference{{0, 1, 12}, "17"}, {{0, 2, 8}, "13"}, {{2, 1, 8}, "13"}}) {
    const auto ends = ends_of(GetParam(), [&](Rig &rig) {
      const Route same{2, 0, 5}, usual{0, 1, 8};
      const Exchanging one(rig, {same, rig.me() == 1 ? difference.other : usual}, 0);
      rig.finish(one.enqueue(rig, "a"));
    });
    const std::string theirs = fmt::format("rank 1 called exchange of 'a' (#1, {} bytes)", difference.bytes);
    for (const Ends &end : ends) {
      EXPECT_EQ(end.status, FSDP_MISMATCH) << end.text;
      EXPECT_NE(end.text.find(theirs), std::string::npos) << end.text;
      const bool is_named = end.text.find("rank 0 called exchange of 'a' (#1, 13 bytes)") != std::string::npos ||
                            end.text.find("rank 2 called exchange of 'a' (#1, 13 bytes)") != std::string::npos;
      EXPECT_TRUE(is_named) << end.text;
      EXPECT_LT(end.seconds, patience_seconds);
    }
  }
}

// All moves end, but the ranks disagree about a move without bytes.
TEST_P(Conformance, RanksThatMakeDifferentExchangesDoNotEndAlike) {
  if (!GetParam().compares_later) GTEST_SKIP() << "the call itself compares";
  run(3, [](Rig &rig) {
    for (const bool differs : {false, true}) {
      const Exchanging one(rig, {{2, 0, 5}, {0, rig.me() == 1 && differs ? 2u : 1u, 0}}, 0);
      rig.finish(one.enqueue(rig));
      one.check(rig);
      require(rig.team->ends_alike() != differs, differs ? "a difference is not seen" : "the same calls differ");
    }
    rig.collectives->abandon();
    end_abandoned(rig);
    start_round(rig);
    check_exchange(rig, uneven_routes(3, 10));
  });
}

TEST_P(Conformance, ARankThatDoesNotComeToAnExchangeIsNamed) {
  if (GetParam().compares_later) GTEST_SKIP() << "NCCL does not say for which rank it waits";
  std::latch over(2);
  const auto ends = ends_of(
      GetParam(),
      [&](Rig &rig) {
        const Exchanging one(rig, {{0, 2, 8}}, 0);
        if (rig.me() == 1) return over.wait();
        one.enqueue(rig, "missed");
        while (!rig.rank.failure.failed()) std::this_thread::sleep_for(late / 10);  // the wait for a GPU names no rank
        over.count_down();
        rig.rank.failure.check();
      },
      1500);
  for (const uint32_t r : {0, 2}) {
    EXPECT_EQ(ends[r].status, FSDP_TIMEOUT) << ends[r].text;
    EXPECT_NE(ends[r].text.find("exchange of 'missed' (#1, 8 bytes): rank 1 has not come"), std::string::npos)
        << ends[r].text;
  }
}

TEST_P(Conformance, ARankThatEndsItsRoundWithoutAnExchangeIsNamed) {
  if (GetParam().compares_later) GTEST_SKIP() << "the engine's ranks compare what they have called";
  run(3, [](Rig &rig) {
    const Exchanging one(rig, {{0, 2, 8}}, 0);
    if (rig.me() != 1) one.enqueue(rig, "missed");
    rig.collectives->quiesce();
    rig.finish();
    const auto broken = rig.collectives->broken();
    if (rig.me() != 1)
      require(broken && broken->status == FSDP_MISMATCH &&
                  broken->message.find("rank 1 finished the step without exchange of 'missed' (#0, 8 bytes)") == 0,
              broken ? broken->message : "not broken");
    start_round(rig);
    check_exchange(rig, {{0, 2, 8}});
  });
}

TEST_P(Conformance, WhenARankFailsEveryCallEnds) {
  const auto ends = ends_of(GetParam(), [](Rig &rig) {
    const Summing one(rig, {}, 3 * 20'000, false);
    rig.rank.meet();
    if (rig.me() == 1) {
      rig.rank.world->abort("an error of its own");
      // In this rig ranks on other hosts learn only that the rank is gone, because the job's verdict is not sent to
      // them.
      rig.rank.failure.set(Error(FSDP_SYSTEM, "an error of its own"));
      throw Error(FSDP_SYSTEM, "an error of its own");
    }
    rig.sum(one.sum);
  });
  EXPECT_EQ(ends[1].text, "an error of its own");
  for (const uint32_t r : {0, 2}) {
    EXPECT_EQ(ends[r].status, FSDP_PEER_FAILED) << ends[r].text;
    EXPECT_NE(ends[r].text.find("rank 1"), std::string::npos) << ends[r].text;
    EXPECT_LT(ends[r].seconds, patience_seconds);
  }
}

}  // namespace
}  // namespace fsdp::transport::test
