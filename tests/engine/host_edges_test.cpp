// SPDX-License-Identifier: Apache-2.0
// On the host, each test checks one edge of the order: what must come after a late rank or a late stream of the
// library. Whole programs would not show a missing edge. docs/contracts/streams-and-threads.md lists the edges.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <string>

#include "../library_threads.h"
#include "held_up.h"

using namespace harness;

namespace {

enum class Axis { replicas, divided, hosts };
constexpr Axis axes[] = {Axis::replicas, Axis::divided, Axis::hosts};

// Two outer ranks, and so many inner ones.
Scenario outer_scenario(Axis axis, uint32_t inner, fsdp_strategy strategy, fsdp_unshard_mode mode) {
  Scenario setup = scenario_of(strategy, 2 * inner, mode);
  if (axis == Axis::hosts) {
    setup.context.ranks_per_host = inner;
  } else {
    setup.mesh.replicate_size = 2;
    setup.mesh.shard_size = inner;
  }
  if (axis == Axis::divided) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
  return setup;
}

void expect_weights(Rank &rank, float expected) {
  const bool whole = rank.setup.model.strategy != FSDP_STRATEGY_OPTIM_GRADS_PARAMS;
  for (size_t g = rank.groups.size(); g-- > 0;) {
    if (!whole) FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
    for (size_t p = 0; p < rank.def(g).params.size(); ++p)
      for (const float seen : rank.view(g, p, FSDP_EVAL)) REQUIRE(seen == expected);
    if (!whole) FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
  }
}

// The gather is short, but waits for weights that the last rank has not published yet.
TEST(HostEdges, AGatherThatWaitsForPeersIsItsStreams) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_COPIED);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  HeldUp::arm(setup);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_begin_update(rank.model, nullptr));
    HeldUp::enter(r == 1);
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    const uint64_t before = fsdp::test::sleeps_of("fsdp-gather");
    FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
    if (r == 0) REQUIRE(fsdp::test::sleeps_of("fsdp-gather") > before);
    FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
    FSDP(fsdp_close_context(context));  // the first rank keeps its threads until then
  });
}

// A prefetch that is not used pulls from the peers all the same, and they write in their next update window: it opens
// on no rank before all pulls have ended.
TEST(HostEdges, NoWindowOpensWhileADroppedPrefetchPulls) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_COPIED);
  setup.model.flags = FSDP_MODEL_NO_PREFETCH;
  setup.prefetch_small_groups();
  std::atomic<uint32_t> loaded{0};
  std::atomic<bool> standing{false};
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (++loaded; loaded < setup.ranks;) pause_ms(1);
    std::unique_ptr<StandStill> still;
    if (r == 0) still = std::make_unique<StandStill>("fsdp-gather", setup.ranks, 300);
    if (r == 0) standing = true;
    await(standing);
    FSDP(fsdp_prefetch(rank.groups[0], FSDP_FORWARD, 0, nullptr));
    FSDP(fsdp_begin_update(rank.model, nullptr));
    REQUIRE(!StandStill::stands());
    REQUIRE(rank.stats().dropped_prefetches == 1);
    FSDP(fsdp_publish_weights(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

// The last rank is held up after the meeting. A rank of the other host waits for its part, and a neighbour of that one
// for both.
TEST(HostEdges, AVersionRisesAfterThePartsOfOtherHosts) {
  for (const Axis axis : {Axis::divided, Axis::hosts})
    for (const uint32_t inner : {1u, 2u})
      for (const fsdp_strategy strategy : std::span(strategies).subspan(1))
        for (const fsdp_unshard_mode mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED}) {
          Scenario setup = outer_scenario(axis, inner, strategy, mode);
          setup.set_dtype(FSDP_BFLOAT16);
          HeldUp::arm(setup);
          run_threads(setup, [&](uint32_t r, fsdp_context *context) {
            Rank rank(context, setup);
            rank.load();
            FSDP(fsdp_begin_update(rank.model, nullptr));
            for (const fsdp_shard &shard : rank.shards()) std::fill_n(main_weight(shard), shard.element_count, 7.0f);
            HeldUp::enter(r + 1 == setup.ranks);
            FSDP(fsdp_publish_weights(rank.model, nullptr));
            expect_weights(rank, 7.0f);
            FSDP(fsdp_close_context(context));
          });
        }
}

// The library's streams take their time, and nothing but this call waits for them.
TEST(HostEdges, MainGradsAreWholeWhenFinishReturns) {
  for (const Axis axis : axes)
    for (const uint32_t inner : {1u, 2u})
      for (const fsdp_strategy strategy : strategies) {
        Scenario setup = outer_scenario(axis, inner, strategy, FSDP_UNSHARD_COPIED);
        setup.model.grad_op = FSDP_GRAD_OP_SUM;
        setup.context.debug_delay_us = 5000;
        run_threads(setup, [&](uint32_t r, fsdp_context *context) {
          Rank rank(context, setup);
          rank.load();
          reduce_all(rank, static_cast<float>(r + 1));
          FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
          const auto sum = static_cast<float>(setup.ranks * (setup.ranks + 1) / 2);
          for (const fsdp_shard &shard : rank.shards())
            for (uint64_t i = 0; i < shard.element_count; ++i) REQUIRE(main_grad(shard)[i] == sum);
          FSDP(fsdp_discard_step(rank.model, nullptr));
          FSDP(fsdp_close_context(context));
        });
      }
}

// Its peers wait for it over the outer axis, which must stop waiting. Then all ranks know which reduce is missing on
// which rank, and no context has failed.
TEST(HostEdges, AReduceThatAReplicaForgetsEndsTheStepAlone) {
  for (const Axis axis : axes)
    for (const uint32_t inner : {1u, 2u})
      for (const fsdp_strategy strategy : strategies) {
        Scenario setup = outer_scenario(axis, inner, strategy, FSDP_UNSHARD_COPIED);
        setup.steps = 1;
        const auto expected = reference(setup).weights;
        run_threads(setup, [&](uint32_t r, fsdp_context *context) {
          Rank rank(context, setup);
          rank.load();
          for (size_t g = rank.groups.size(); g-- > (r == 1 ? 1u : 0u);) backward_group(rank, g, 7, 0, nullptr);
          require_error(fsdp_finish_grads(rank.model, 1, 0, nullptr), FSDP_INVALID_STATE,
                        {"rank 1", "'embed'", "fsdp_reduce_grad", "fsdp_discard_step"});
          fsdp_error error = FSDP_ERROR_INIT;
          FSDP(fsdp_get_context_error(context, &error));
          REQUIRE(error.status == FSDP_OK);
          FSDP(fsdp_discard_step(rank.model, nullptr));
          clean_step(rank, 0);
          REQUIRE(same_bits(rank.read_all(), expected));
          FSDP(fsdp_close_context(context));
        });
      }
}

// Rank 1 is held up while all ranks discard a step, and the others are in the next round of reduces before it.
TEST(HostEdges, ARoundOfReducesWaitsForALateRank) {
  for (const uint32_t inner : {1u, 2u})
    for (const fsdp_strategy strategy : strategies) {
      Scenario setup = inner == 1 ? scenario_of(strategy, 3, FSDP_UNSHARD_COPIED)
                                  : outer_scenario(Axis::divided, inner, strategy, FSDP_UNSHARD_COPIED);
      setup.steps = 1;
      const auto expected = reference(setup).weights;
      HeldUp::arm(setup);
      std::atomic<uint32_t> through{0};
      run_threads(setup, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        for (size_t g = rank.groups.size(); g-- > (r == 1 ? 2u : 1u);) backward_group(rank, g, 7, 0, nullptr);
        // A rank that gives the step up releases all gradients at once, also those that others still read, for nothing.
        for (++through; through < setup.ranks;) pause_ms(1);
        HeldUp::enter(r == 1);
        FSDP(fsdp_discard_step(rank.model, nullptr));
        clean_step(rank, 0);
        REQUIRE(same_bits(rank.read_all(), expected));
        FSDP(fsdp_close_context(context));
      });
    }
}

// Comes to the meeting, and stays there until the other has seen its timeout.
struct Stays {
  static inline thread_local bool mine = false;
  static inline std::atomic<bool> now{false}, over{false};
  static int32_t hook(void *) {
    if (!std::exchange(mine, false)) return 0;
    now = true;
    for (const double begin = harness::now(); !over && harness::now() - begin < 60;) pause_ms(1);
    return 0;
  }
};

// The errors of ranks 0 and 1 if rank 1 is late with a part that rank 0 waits for on a stream that stands still for a
// moment.
std::array<fsdp_error, 2> publish_with_a_late_part(Axis axis) {
  Scenario setup = outer_scenario(axis, 1, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, FSDP_UNSHARD_COPIED);
  setup.context.timeout_ms = 2000;
  setup.context.interrupted = Stays::hook;
  Stays::now = Stays::over = false;
  std::array<fsdp_error, 2> told = {{FSDP_ERROR_INIT, FSDP_ERROR_INIT}};
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_begin_update(rank.model, nullptr));
    if (r == 1)
      Stays::mine = true;
    else
      await(Stays::now);
    std::unique_ptr<StandStill> still;
    if (r == 0) still = std::make_unique<StandStill>("fsdp-outer", setup.ranks, 50);
    const fsdp_status status = fsdp_publish_weights(rank.model, nullptr);
    Stays::over = true;
    REQUIRE(status != FSDP_OK);
    FSDP(fsdp_get_last_error(context, &told[r]));
  });
  return told;
}

// Rank 0 first waits for that stream, which knows which rank is missing, so rank 0 does not blame itself.
TEST(HostEdges, ARankThatWaitsForAPartOfAnotherHostDoesNotBlameItself) {
  for (const Axis axis : {Axis::divided, Axis::hosts}) {
    auto told = publish_with_a_late_part(axis);
    // If a busy machine holds the stream up for 500 ms, it counts as idle, so the test is repeated then.
    for (int tries = 1; tries < 5 && std::string(told[0].message).find("did nothing for") != std::string::npos; ++tries)
      told = publish_with_a_late_part(axis);
    for (const fsdp_error &error : told) {
      EXPECT_EQ(error.status, FSDP_TIMEOUT) << error.message;
      EXPECT_NE(error.rank, 0) << error.message;
    }
  }
}

// Each rank's part needs several pieces of the staging memory.
Scenario staged_scenario() {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2, FSDP_UNSHARD_MAPPED);
  setup.groups = equal_groups(1, 2048, 1024);
  return setup;
}

std::vector<float> numbers_from(float first) {
  std::vector<float> values(2048 * 1024);
  for (size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i);
  return values;
}

// late: rank 1 comes to the load or the read after the other, or first, to be held up when both have met there.
enum class Comes { late, held };
void come(Comes how, uint32_t rank) {
  if (how == Comes::held) return HeldUp::enter(rank == 1);
  if (rank == 1) pause_ms(150);
}

// The root is late, or a rank that takes from it.
TEST(HostEdges, AParameterIsLoadedPieceByPiece) {
  for (const Comes how : {Comes::late, Comes::held}) {
    Scenario setup = staged_scenario();
    HeldUp::arm(setup);
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      FSDP(fsdp_begin_update(rank.model, nullptr));
      const std::vector<float> values = numbers_from(1);
      const uint32_t root = how == Comes::late ? 1 : 0;
      come(how, r);
      FSDP(fsdp_load_param(rank.groups[0], 0, r == root ? values.data() : nullptr, FSDP_FLOAT32, values.size(),
                           static_cast<int32_t>(root), 0));
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      FSDP(fsdp_unshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
      REQUIRE(rank.view(0, 0, FSDP_EVAL) == values);
      FSDP(fsdp_reshard(rank.groups[0], FSDP_EVAL, 0, nullptr));
      FSDP(fsdp_close_context(context));
    });
  }
}

// The owner of a part is late, or a rank that reads it.
TEST(HostEdges, AParameterIsReadPieceByPiece) {
  for (const Comes how : {Comes::late, Comes::held}) {
    Scenario setup = staged_scenario();
    HeldUp::arm(setup);
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      const std::vector<float> values = numbers_from(3);
      FSDP(fsdp_load_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, values.size(), FSDP_EVERY_RANK, 0));
      FSDP(fsdp_publish_weights(rank.model, nullptr));
      come(how, r);
      REQUIRE(rank.read(0, 0) == values);
      FSDP(fsdp_close_context(context));
    });
  }
}

// How many threads with this name have the policy.
uint32_t count_threads(const std::string &name, int policy) {
  uint32_t count = 0;
  for (const auto &task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string thread_name;
    std::getline(std::ifstream(task.path() / "comm"), thread_name);
    count += thread_name == name && ::sched_getscheduler(std::stoi(task.path().filename())) == policy;
  }
  return count;
}

// During this scope, the calling thread and threads that it starts run on two cores, if there are two.
class TwoCores {
 public:
  TwoCores() {
    REQUIRE(::sched_getaffinity(0, sizeof before_, &before_) == 0);
    cpu_set_t two;
    CPU_ZERO(&two);
    for (size_t cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&two) < 2; ++cpu)
      if (CPU_ISSET(cpu, &before_)) CPU_SET(cpu, &two);
    enough_ = CPU_COUNT(&two) == 2;
    REQUIRE(::sched_setaffinity(0, sizeof two, &two) == 0);
  }
  ~TwoCores() { ::sched_setaffinity(0, sizeof before_, &before_); }
  TwoCores(const TwoCores &) = delete;
  TwoCores &operator=(const TwoCores &) = delete;
  bool enough() const { return enough_; }

 private:
  cpu_set_t before_;
  bool enough_ = false;
};

// One rank has two cores, two ranks have one each, and three ranks share two.
TEST(HostEdges, StreamsGiveWayWhereEachRankHasOneCore) {
  const TwoCores cores;
  if (!cores.enough()) GTEST_SKIP() << "this machine has one core";
  for (const uint32_t ranks : {1u, 2u, 3u}) {
    SCOPED_TRACE(testing::Message() << ranks << " ranks");
    const uint32_t giving_way = ranks == 2 ? ranks : 0;
    const auto wanted = [&] {
      return count_threads("fsdp-reduce", SCHED_BATCH) == giving_way &&
             count_threads("fsdp-reduce", SCHED_OTHER) == ranks - giving_way;
    };
    const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, ranks);
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      // A thread sets its policy after it has started.
      for (const double begin = now(); r == 0 && !wanted(); pause_ms(1)) REQUIRE(now() - begin < 30);
      rank.load();
      FSDP(fsdp_close_context(context));
    });
  }
}

}  // namespace
