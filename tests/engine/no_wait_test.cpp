// SPDX-License-Identifier: Apache-2.0
// Callers that do not wait: if peers have not read a gradient buffer yet, the call returns BUSY and changes nothing.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <set>

#include "harness.h"
#include "held_up.h"

using namespace harness;

namespace {

constexpr uint32_t no_wait = FSDP_GRAD_NO_WAIT;

std::vector<float> values_of(const Rank &rank, size_t group, size_t param) {
  return std::vector<float>(rank.def(group).params[param].count(),
                            static_cast<float>(1 + rank.rank + 4 * group + 16 * param));
}

fsdp_status put(Rank &rank, size_t group, size_t param, uint32_t flags) {
  const std::vector<float> values = values_of(rank, group, param);
  return fsdp_put_grad(rank.groups[group], param, values.data(), FSDP_FLOAT32, values.size(), flags, nullptr);
}

// All parameters of a group at once, and what they point to is written.
fsdp_status acquire_all(Rank &rank, size_t group, uint32_t flags) {
  const size_t count = rank.def(group).params.size();
  std::vector<fsdp_tensor> grads(count, fsdp_tensor(FSDP_TENSOR_INIT));
  std::vector<int32_t> accumulate(count, 7);
  const fsdp_status status = fsdp_acquire_grads(rank.groups[group], flags, nullptr, grads.data(), count,
                                                sizeof(fsdp_tensor), accumulate.data());
  for (size_t p = 0; p < count; ++p) {
    if (status) REQUIRE(grads[p].data == nullptr && accumulate[p] == 7);
    if (status) continue;
    const std::vector<float> values = values_of(rank, group, p);
    REQUIRE(grads[p].element_count == values.size() && accumulate[p] == 0);
    std::copy(values.begin(), values.end(), static_cast<float *>(grads[p].data));
  }
  return status;
}

fsdp_status acquire(Rank &rank, size_t group, uint32_t flags) {
  fsdp_tensor grad = FSDP_TENSOR_INIT;
  int32_t accumulate = 7;
  const fsdp_status status = fsdp_acquire_grad(rank.groups[group], 0, flags, nullptr, &grad, &accumulate);
  if (status) REQUIRE(grad.data == nullptr && accumulate == 7);
  if (status) return status;
  const std::vector<float> values = values_of(rank, group, 0);
  std::copy(values.begin(), values.end(), static_cast<float *>(grad.data));
  return status;
}

void give(Rank &rank, size_t group) {
  for (size_t p = 0; p < rank.def(group).params.size(); ++p) FSDP(put(rank, group, p, 0));
  FSDP(fsdp_reduce_grad(rank.groups[group], FSDP_LAST, nullptr));
}

// Every main gradient is the sum of what the ranks gave.
void expect_sums(Rank &rank) {
  FSDP(fsdp_finish_grads(rank.model, 1, 0, nullptr));
  for (const fsdp_shard &shard : rank.shards()) {
    size_t group = 0;
    while (rank.groups[group] != shard.group) ++group;
    float sum = 0;
    for (uint32_t r = 0; r < rank.setup.ranks; ++r)
      sum += static_cast<float>(1 + r + 4 * group + 16 * shard.param_index);
    for (uint64_t i = 0; i < shard.element_count; ++i) REQUIRE(main_grad(shard)[i] == sum);
  }
  FSDP(fsdp_discard_step(rank.model, nullptr));
}

Scenario setup_of(fsdp_strategy strategy, uint32_t ranks, fsdp_unshard_mode mode = FSDP_UNSHARD_COPIED) {
  Scenario setup = scenario_of(strategy, ranks, mode);
  setup.model.reduce_policy = FSDP_REDUCE_POLICY_EACH;
  setup.model.grad_op = FSDP_GRAD_OP_SUM;
  setup.groups = equal_groups(6, 16, 8);
  for (GroupDef &group : setup.groups) group.params.push_back({group.name + ".b", {8}});
  return setup;
}

// The last rank goes on when the first rank has nothing more to do without it.
void run_with_late_rank(
    const Scenario &setup, const std::function<void(Rank &rank, std::atomic<bool> &go)> &first,
    const std::function<void(Rank &rank)> &others = [](Rank &rank) {
      for (size_t g = rank.groups.size(); g-- > 0;) give(rank, g);
    }) {
  std::atomic<bool> go{false};
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    if (r + 1 == setup.ranks) await(go);
    r == 0 ? first(rank, go) : others(rank);
    expect_sums(rank);
    FSDP(fsdp_close_context(context));
  });
}

// The calls that returned BUSY before the late rank was released. It is released when a call stays BUSY.
class Polls {
 public:
  explicit Polls(std::atomic<bool> &go) : go_(go) {}
  void until_it_works(const std::function<fsdp_status()> &call) {
    for (const double begin = now();; pause_ms(1)) {
      const fsdp_status status = call();
      if (status == FSDP_OK) return;
      REQUIRE(status == FSDP_BUSY && now() - begin < 60);
      busy_ += !go_;
      if (now() - begin > 0.02) go_ = true;
    }
  }
  int busy() const { return busy_; }

 private:
  std::atomic<bool> &go_;
  int busy_ = 0;
};

// Each of the three calls, in every kind of world.
void expect_all_come(const Scenario &setup) {
  run_with_late_rank(setup, [](Rank &rank, std::atomic<bool> &go) {
    Polls polls(go);
    for (size_t g = rank.groups.size(); g-- > 0;) {
      if (g % 3 == 0) polls.until_it_works([&] { return acquire_all(rank, g, no_wait); });
      if (g % 3 == 1) polls.until_it_works([&] { return acquire(rank, g, no_wait); });
      for (size_t p = g % 3 == 2 ? 0 : 1; p < 2 && g % 3; ++p)
        polls.until_it_works([&] { return put(rank, g, p, no_wait); });
      FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
    }
    REQUIRE(polls.busy() > 0);
    REQUIRE(rank.stats().peak_pending_grad_groups <= 2);
  });
}

TEST(NoWait, IsBusyUntilPeersHaveReadAndThenWorks) {
  Sample sample(3);
  for (const fsdp_strategy strategy :
       {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
    for (const uint32_t ranks : {2u, 3u})
      for (const auto mode : {FSDP_UNSHARD_MAPPED, FSDP_UNSHARD_COPIED})
        for (const bool debug : {false, true}) {
          if (!sample.takes_next()) continue;
          SCOPED_TRACE(testing::Message() << "strategy " << strategy << ", ranks " << ranks << ", debug " << debug);
          Scenario setup = setup_of(strategy, ranks, mode);
          if (debug) setup.context.flags = FSDP_CONTEXT_DEBUG;
          expect_all_come(setup);
        }
}

// Every rank asks until it has what it needs.
void run_polling(const Scenario &setup) {
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    std::atomic<bool> go{true};
    Polls polls(go);
    for (size_t g = rank.groups.size(); g-- > 0;) {
      polls.until_it_works([&] { return acquire_all(rank, g, no_wait); });
      FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
    }
    expect_sums(rank);
    FSDP(fsdp_close_context(context));
  });
}

// Over two axes, and between acted hosts.
TEST(NoWait, IsBusyUntilPeersOfTwoAxesHaveRead) {
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS})
    for (const int kind : {0, 1, 2}) {
      Scenario setup = setup_of(strategy, 4);
      SCOPED_TRACE(testing::Message() << "strategy " << strategy << ", kind " << kind);
      if (kind < 2)
        setup.mesh.replicate_size = setup.mesh.shard_size = 2;
      else
        setup.context.ranks_per_host = 2;
      if (kind == 1) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
      if (kind == 2) {  // the late rank is far away: sums of hosts take turns
        expect_all_come(setup);
        setup.context.ranks_per_host = 1;
        setup.ranks = 2;
        expect_all_come(setup);
        continue;
      }
      // Replicas meet in the last contribution alone: a late one holds up its own.
      run_polling(setup);
    }
}

// fsdp_reduce_grad has waited.
TEST(NoWait, WithoutOverlapTheReduceWaits) {
  Scenario setup = setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.context.flags = FSDP_CONTEXT_NO_OVERLAP;
  run_polling(setup);
}

// One rank has no peers, so it can only wait for its own copies.
TEST(NoWait, WorksOnOneRank) {
  for (const uint32_t flags : {0u, FSDP_MODEL_FORCE_COMMUNICATION + 0u}) {
    Scenario setup = setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 1);
    setup.model.flags = flags;
    run_polling(setup);
  }
}

struct Counters {
  explicit Counters(const Rank &rank) : stats(rank.stats()) {}
  bool operator==(const Counters &other) const {
    return stats.pending_grad_groups == other.stats.pending_grad_groups &&
           stats.peak_pending_grad_groups == other.stats.peak_pending_grad_groups &&
           stats.reduces == other.stats.reduces && stats.reduce_wait_ns == other.stats.reduce_wait_ns &&
           stats.peer_wait_ns == other.stats.peer_wait_ns;
  }
  Stats stats;
};

// The error says which buffer is awaited, of which group, and for which group. The rank goes on with something else.
TEST(NoWait, BusyChangesNothingAndSaysWhatIsAwaited) {
  run_with_late_rank(setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2), [](Rank &rank, std::atomic<bool> &go) {
    give(rank, 5);
    give(rank, 4);
    const Counters before(rank);
    REQUIRE(before.stats.pending_grad_groups == 2);
    const auto expect_busy = [&](fsdp_status status, const std::string &call) {
      require_error(status, FSDP_BUSY,
                    {call + ": group 'layer.3' needs a full gradient buffer", "peers have not read that of group ",
                     "'layer.5'", "without FSDP_GRAD_NO_WAIT"});
      fsdp_error error = FSDP_ERROR_INIT;
      FSDP(fsdp_get_last_error(rank.context, &error));
      REQUIRE(error.status == FSDP_BUSY && !error.context_failed && error.rank == -1);
      REQUIRE(Counters(rank) == before);
    };
    for (int turn = 0; turn < 3; ++turn) {
      expect_busy(acquire(rank, 3, no_wait), "fsdp_acquire_grad");
      expect_busy(acquire(rank, 3, no_wait | FSDP_GRAD_ZEROED), "fsdp_acquire_grad");
      expect_busy(acquire_all(rank, 3, no_wait), "fsdp_acquire_grads");
      expect_busy(put(rank, 3, 1, no_wait), "fsdp_put_grad");
      expect_busy(fsdp_put_grad(rank.groups[3], 0, nullptr, 0, 0, no_wait, nullptr), "fsdp_put_grad");
      // Nothing of it is open.
      require_error(fsdp_complete_grad(rank.groups[3], 0, 0, nullptr), FSDP_INVALID_STATE, {"has no gradient"});
      require_error(fsdp_reduce_grad(rank.groups[3], 0, nullptr), FSDP_INVALID_STATE,
                    {"no gradient for 'layer.3.w', 'layer.3.b'"});
    }
    FSDP(fsdp_unshard(rank.groups[2], FSDP_BACKWARD, 0, nullptr));
    REQUIRE(rank.view(2, 0, FSDP_BACKWARD)[3] == initial_weight(rank.setup.ordinal(2, 0), 3));
    FSDP(fsdp_reshard(rank.groups[2], FSDP_BACKWARD, 0, nullptr));
    go = true;
    give(rank, 3);  // waits
    Polls(go).until_it_works([&] { return acquire_all(rank, 2, no_wait); });
    FSDP(fsdp_reduce_grad(rank.groups[2], FSDP_LAST, nullptr));
    give(rank, 1);
    give(rank, 0);
  });
}

// A second parameter of a group that is open, or a second time the same, needs no buffer.
TEST(NoWait, IsNotBusyWhereTheBufferIsLentAlready) {
  run_with_late_rank(setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2), [](Rank &rank, std::atomic<bool> &go) {
    give(rank, 5);
    FSDP(acquire(rank, 4, no_wait));
    require_error(put(rank, 3, 0, no_wait), FSDP_BUSY, {"'layer.5'"});
    FSDP(put(rank, 4, 1, no_wait));
    FSDP(put(rank, 4, 1, no_wait));
    std::vector<float> less = values_of(rank, 4, 1);
    for (float &value : less) value = -value;
    FSDP(fsdp_put_grad(rank.groups[4], 1, less.data(), FSDP_FLOAT32, less.size(), no_wait, nullptr));
    FSDP(fsdp_reduce_grad(rank.groups[4], FSDP_LAST, nullptr));
    go = true;
    for (size_t g = 4; g-- > 0;) give(rank, g);
  });
}

// If more buffers are lent than there are, no wait would help: this is still an error, also beside buffers that are
// awaited.
TEST(NoWait, IsInvalidWhereTooManyAreLent) {
  run_with_late_rank(
      setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2),
      [](Rank &rank, std::atomic<bool> &go) {
        FSDP(acquire_all(rank, 5, no_wait));
        FSDP(acquire_all(rank, 4, no_wait));
        const auto expect_full = [&](fsdp_status status) {
          require_error(status, FSDP_INVALID_STATE, {"all 2 are lent to 'layer.4', 'layer.5'"});
        };
        expect_full(acquire(rank, 3, no_wait));
        expect_full(acquire_all(rank, 3, no_wait));
        expect_full(put(rank, 3, 0, no_wait));
        // Also where the buffer is lent that it shares, and another one is awaited.
        FSDP(fsdp_reduce_grad(rank.groups[4], FSDP_LAST, nullptr));
        require_error(acquire(rank, 3, no_wait), FSDP_INVALID_STATE,
                      {"the gradient buffer that is lent to group 'layer.5'"});
        go = true;
        FSDP(fsdp_reduce_grad(rank.groups[5], FSDP_LAST, nullptr));
        for (size_t g = 4; g-- > 0;) give(rank, g);
      },
      [](Rank &rank) {
        for (const size_t g : {4u, 5u, 3u, 2u, 1u, 0u}) give(rank, g);
      });
}

// Another buffer is free, but the group's own buffer, or the one that it shares, is awaited.
TEST(NoWait, IsBusyWhereTheVeryBufferIsAwaited) {
  const auto give_one = [](Rank &rank, size_t group, uint32_t flags) {
    for (size_t p = 0; p < 2; ++p) FSDP(put(rank, group, p, 0));
    FSDP(fsdp_reduce_grad(rank.groups[group], flags, nullptr));
  };
  run_with_late_rank(
      setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2),
      [&](Rank &rank, std::atomic<bool> &go) {
        give_one(rank, 5, 0);
        REQUIRE(rank.stats().pending_grad_groups == 1);
        require_error(acquire(rank, 5, no_wait), FSDP_BUSY, {"group 'layer.5' needs", "that of group 'layer.5'"});
        require_error(acquire_all(rank, 5, no_wait), FSDP_BUSY, {"group 'layer.5' needs", "that of group 'layer.5'"});
        require_error(acquire(rank, 3, no_wait), FSDP_BUSY, {"group 'layer.3' needs", "that of group 'layer.5'"});
        FSDP(acquire_all(rank, 4, no_wait));
        go = true;
        FSDP(fsdp_reduce_grad(rank.groups[4], FSDP_LAST, nullptr));
        for (size_t p = 0; p < 2; ++p) FSDP(fsdp_put_grad(rank.groups[5], p, nullptr, 0, 0, 0, nullptr));
        FSDP(fsdp_reduce_grad(rank.groups[5], FSDP_LAST, nullptr));
        for (size_t g = 4; g-- > 0;) give(rank, g);
      },
      [&](Rank &rank) {
        give_one(rank, 5, 0);
        give(rank, 4);
        for (size_t p = 0; p < 2; ++p) FSDP(fsdp_put_grad(rank.groups[5], p, nullptr, 0, 0, 0, nullptr));
        FSDP(fsdp_reduce_grad(rank.groups[5], FSDP_LAST, nullptr));
        for (size_t g = 4; g-- > 0;) give(rank, g);
      });
}

// The step takes no more gradients of this group, which is reported before anything is awaited.
TEST(NoWait, IsInvalidWhereTheGroupHasEnded) {
  run_with_late_rank(setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2), [](Rank &rank, std::atomic<bool> &go) {
    give(rank, 5);
    give(rank, 4);
    for (const fsdp_status status :
         {acquire(rank, 5, no_wait), acquire_all(rank, 5, no_wait), put(rank, 5, 0, no_wait)})
      REQUIRE(status == FSDP_INVALID_STATE);
    go = true;
    for (size_t g = 4; g-- > 0;) give(rank, g);
  });
}

// Of a group in parts the first part could be lent and the second not, so none is lent. In debug mode, where each part
// has its own place, the only reason is a lack of buffers.
void expect_all_or_nothing(uint32_t flags) {
  Scenario setup = setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  setup.context.flags = flags;
  setup.groups = equal_groups(2, 64, 32);
  for (GroupDef &group : setup.groups) group.params.push_back({group.name + ".v", {64, 32}});
  setup.model.max_pending_bytes = 2 * group_bytes;
  std::atomic<bool> one_is_read{false}, seen{false};
  run_with_late_rank(
      setup,
      [&](Rank &rank, std::atomic<bool> &go) {
        for (const size_t p : {0u, 1u}) {
          FSDP(put(rank, 1, p, no_wait));
          FSDP(fsdp_complete_grad(rank.groups[1], p, 0, nullptr));
        }
        FSDP(fsdp_reduce_grad(rank.groups[1], FSDP_LAST, nullptr));
        go = true;  // it reduces one part, and reads that
        await(one_is_read);
        for (const double begin = now(); now() - begin < 0.02; pause_ms(1)) {
          require_error(acquire_all(rank, 0, no_wait), FSDP_BUSY,
                        {"fsdp_acquire_grads: group 'layer.0: layer.0.v' needs", "'layer.1: layer.1.v'"});
          REQUIRE(rank.stats().pending_grad_groups == 2);
          require_error(fsdp_reduce_grad(rank.groups[0], 0, nullptr), FSDP_INVALID_STATE,
                        {"no gradient for 'layer.0.w', 'layer.0.v'"});
        }
        seen = true;
        Polls(go).until_it_works([&] { return acquire_all(rank, 0, no_wait); });
        FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, nullptr));
      },
      [&](Rank &rank) {
        FSDP(put(rank, 1, 0, 0));
        FSDP(fsdp_complete_grad(rank.groups[1], 0, 0, nullptr));
        FSDP(put(rank, 1, 1, 0));
        FSDP(put(rank, 0, 0, 0));  // waits until both have read the part
        one_is_read = true;
        await(seen);
        FSDP(fsdp_reduce_grad(rank.groups[1], FSDP_LAST, nullptr));
        FSDP(put(rank, 0, 1, 0));
        FSDP(fsdp_reduce_grad(rank.groups[0], FSDP_LAST, nullptr));
      });
}

TEST(NoWait, OfAGroupLendsAllOrNothing) {
  for (const uint32_t flags : {0u, FSDP_CONTEXT_DEBUG + 0u}) expect_all_or_nothing(flags);
}

// Gradients that are added up in place have a buffer of their own.
TEST(NoWait, IsNeverBusyWhereBuffersAreKept) {
  for (const fsdp_strategy strategy : {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM}) {
    Scenario setup = setup_of(strategy, 2);
    setup.model.reduce_policy = FSDP_REDUCE_POLICY_LAST;
    run_with_late_rank(setup, [](Rank &rank, std::atomic<bool> &go) {
      for (size_t g = rank.groups.size(); g-- > 0;) {
        FSDP(acquire_all(rank, g, no_wait));
        FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, nullptr));
      }
      go = true;
    });
  }
}

// If a peer is gone, the error is not BUSY.
TEST(NoWait, TellsThatAPeerHasFailed) {
  const Scenario setup = setup_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  std::atomic<bool> polled{false};
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        if (r == 1) {
          await(polled);
          FSDP(fsdp_abort_context(context, "it has seen enough"));
          return;
        }
        give(rank, 5);
        give(rank, 4);
        fsdp_status status = acquire(rank, 3, no_wait);
        REQUIRE(status == FSDP_BUSY);
        polled = true;
        for (const double begin = now(); status == FSDP_BUSY && now() - begin < 60; pause_ms(1))
          status = acquire(rank, 3, no_wait);
        require_error(status, FSDP_PEER_FAILED, {"rank 1", "it has seen enough"});
      },
      &errors);
  for (const std::string &error : errors) EXPECT_EQ(error, "");
}

}  // namespace
