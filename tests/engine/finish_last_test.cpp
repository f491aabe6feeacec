// SPDX-License-Identifier: Apache-2.0
// Steps whose contributions end in fsdp_finish_grads (FSDP_LAST) have the bits of steps whose contributions end one by
// one. Also tested are groups without gradients, and calls that are refused.
#include <gtest/gtest.h>

#include "every_setup.h"

using namespace harness;

namespace {

constexpr auto step_modes = {0u, FSDP_CONTEXT_DEBUG + 0u, FSDP_CONTEXT_NO_OVERLAP + 0u};

// Sums of 16 bits too, frozen parameters, one and several micro-batches.
TEST(FinishLast, HasTheReferencesBits) {
  unsigned number = 0;
  for_every_setup(7, step_modes, [&](Scenario setup) {
    setup.ends_late = true;
    setup.microbatches = number++ % 3 + 1;
    setup.clip = 0.5;
    setup.scale = 0.75;
    setup.groups[0].params[0].flags = FSDP_PARAM_FROZEN;
    setup.groups[1].params[0].dtype = FSDP_BFLOAT16;
    setup.groups[2].params[1].flags = FSDP_PARAM_FROZEN;
    EXPECT_EQ(difference(setup, train_threads(setup)), "");
  });
}

TEST(FinishLast, ByPartsHasTheReferencesBits) {
  for (const Axes axes : every_axes)
    for (const fsdp_strategy strategy :
         {FSDP_STRATEGY_NO_SHARD, FSDP_STRATEGY_OPTIM_GRADS, FSDP_STRATEGY_OPTIM_GRADS_PARAMS}) {
      Scenario setup = setup_over(axes, strategy, axes == Axes::one ? 2 : 4);
      setup.model.reduce_policy = FSDP_REDUCE_POLICY_EACH;
      setup.groups = equal_groups(3, 64, 32);
      for (GroupDef &group : setup.groups) group.params.push_back({group.name + ".v", {64, 32}});
      setup.model.max_pending_bytes = 2 * group_bytes;
      setup.ends_late = setup.complete = true;
      setup.microbatches = 2;
      SCOPED_TRACE(testing::Message() << "strategy " << strategy << ", axes " << static_cast<int>(axes));
      const auto outcomes = train_threads(setup);
      EXPECT_EQ(difference(setup, outcomes), "");
      EXPECT_GT(outcomes[0].stats.reduces, setup.steps * setup.microbatches * setup.groups.size());
    }
}

std::vector<std::vector<float>> shard_grads(const Rank &rank) {
  std::vector<std::vector<float>> grads;
  for (const fsdp_shard &shard : rank.shards()) {
    grads.emplace_back(shard.element_count);
    copy_out(grads.back().data(), shard.main_grad, shard.element_count * sizeof(float));
  }
  return grads;
}

// A step in which group `left_out` has `given` contributions, and every other group one. A number beyond all groups
// leaves out none.
void half_step(Rank &rank, size_t left_out, uint32_t given, bool zeros) {
  for (size_t g = rank.groups.size(); g-- > 0;) {
    const bool chosen = g == left_out;
    for (uint32_t m = 0; m < (chosen ? given : 1); ++m) {
      put_all(rank, g, static_cast<float>(rank.rank + g + m + 1));
      FSDP(fsdp_reduce_grad(rank.groups[g], zeros && m + 1 == (chosen ? given : 1) ? FSDP_LAST : 0, stream()));
    }
    if (!zeros || !chosen || given) continue;
    for (size_t p = 0; p < rank.def(g).params.size(); ++p)
      FSDP(fsdp_put_grad(rank.groups[g], p, nullptr, 0, 0, 0, stream()));
    FSDP(fsdp_reduce_grad(rank.groups[g], FSDP_LAST, stream()));
  }
}

// A group without contributions, in the first step or a later one, counts as if it had been given zeros. It does not
// matter which other groups were given, or how often.
TEST(FinishLast, CountsMissingGradientsAsZeros) {
  for_every_setup(9, step_modes, [&](Scenario setup) {
    setup.model.grad_op = FSDP_GRAD_OP_SUM;
    const size_t left_out = setup.ranks % setup.groups.size();
    std::vector<std::vector<float>> grads[2][4], weights[2];
    for (const bool zeros : {true, false})
      run_threads(setup, [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        for (const uint32_t given : {0u, 2u, 0u}) {
          half_step(rank, left_out, given, zeros);
          FSDP(fsdp_finish_grads(rank.model, 1, zeros ? 0 : FSDP_LAST, stream()));
          const auto now = shard_grads(rank);
          for (size_t s = 0; s < now.size(); ++s)
            if (rank.shards()[s].group == rank.groups[left_out] && given == 0)
              REQUIRE(now[s] == std::vector<float>(now[s].size(), 0));
          grads[zeros][r].insert(grads[zeros][r].end(), now.begin(), now.end());
          update(rank);
        }
        const auto read = rank.read_all();
        if (r == 0) weights[zeros] = read;
        FSDP(fsdp_close_context(context));
      });
    for (uint32_t r = 0; r < setup.ranks; ++r) EXPECT_TRUE(same_bits(grads[0][r], grads[1][r])) << "rank " << r;
    EXPECT_TRUE(same_bits(weights[0], weights[1]));
  });
}

// No group was given anything; by parts too.
TEST(FinishLast, WithoutContributionsIsAStepOfZeros) {
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{12} * 1024}) {
    Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
    setup.model.max_pending_bytes = bytes;
    run_threads(setup, [&](uint32_t, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      const auto before = rank.read_all();
      FSDP(fsdp_finish_grads(rank.model, 1, FSDP_LAST, stream()));
      double norm = -1;
      FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm));
      REQUIRE(norm == 0);
      REQUIRE(rank.stats().peak_pending_grad_groups <= 2);
      FSDP(fsdp_step_adamw(rank.model, 0.01, nullptr, stream()));
      REQUIRE(same_bits(rank.read_all(), before));
      FSDP(fsdp_close_context(context));
    });
  }
}

// A group that was reduced with FSDP_LAST is not reduced again: its bits and the number of reduces stay the same.
TEST(FinishLast, LeavesGroupsThatHaveEnded) {
  for (const Axes axes : every_axes)
    for (const fsdp_strategy strategy : strategies) {
      Scenario setup = setup_over(axes, strategy, 2);
      setup.microbatches = 2;
      const auto expected = reference(setup).weights;
      SCOPED_TRACE(testing::Message() << "strategy " << strategy << ", axes " << static_cast<int>(axes));
      run_threads(setup, [&](uint32_t, fsdp_context *context) {
        Scenario own = setup;
        Rank rank(context, own);
        rank.load();
        for (uint32_t step = 0; step < setup.steps; ++step) {
          for (uint32_t m = 0; m < 2; ++m)
            for (size_t g = rank.groups.size(); g-- > 0;) {
              own.ends_late = g % 2;
              backward_group(rank, g, step, m, nullptr);
            }
          const Stats before = rank.stats();
          FSDP(fsdp_finish_grads(rank.model, 1, FSDP_LAST, stream()));
          const Stats after = rank.stats();
          const bool delayed = strategy == FSDP_STRATEGY_OPTIM || strategy == FSDP_STRATEGY_NO_SHARD;
          if (setup.context.ranks_per_host == 0 && setup.mesh.replicate_size == 0)
            REQUIRE(after.reduces - before.reduces == (delayed ? 2 : 0));
          update(rank);
        }
        REQUIRE(same_bits(rank.read_all(), expected));
        FSDP(fsdp_close_context(context));
      });
    }
}

// Ranks that made different numbers of contributions get an error, as without the flag.
TEST(FinishLast, ComparesTheNumberOfContributions) {
  Scenario setup = setup_over(Axes::hsdp, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 2);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (uint32_t m = 0; m < r + 1; ++m) {
      put_all(rank, 1, 1);
      FSDP(fsdp_reduce_grad(rank.groups[1], 0, nullptr));
    }
    require_error(fsdp_finish_grads(rank.model, 1, FSDP_LAST, nullptr), FSDP_MISMATCH,
                  {"rank 1 reduced 5 contributions of groups in this step, rank 0 reduced 4"});
    FSDP(fsdp_discard_step(rank.model, nullptr));
    FSDP(fsdp_close_context(context));
  });
}

// A peer that cannot end the step may still sum what this rank gave, and then discards the sum (tests/tsan.supp).
[[gnu::noinline]] fsdp_status finish_spoilt_step(Rank &rank) {
  const SanitizerFrame frame;
  return fsdp_finish_grads(rank.model, 1, FSDP_LAST, nullptr);
}

TEST(FinishLast, NamesGradientsThatAreOpen) {
  for (const fsdp_strategy strategy : strategies) {
    const Scenario setup = scenario_of(strategy, 2);
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      for (int turn = 0; turn < 2; ++turn) {
        put_all(rank, 3, 1);
        FSDP(fsdp_reduce_grad(rank.groups[3], 0, nullptr));
        if (r == 1) put_all(rank, 2, 1);
        require_error(finish_spoilt_step(rank), FSDP_INVALID_STATE,
                      {"rank 1: group 'layer.1' has gradients that were acquired but not reduced: call "
                       "fsdp_reduce_grad",
                       "fsdp_discard_step"});
        REQUIRE(last_message().find("without FSDP_LAST") == std::string::npos);
        REQUIRE(last_message().find("was not reduced") == std::string::npos);
        FSDP(fsdp_discard_step(rank.model, nullptr));
      }
      clean_step(rank, 0);
      FSDP(fsdp_close_context(context));
    });
  }
}

// All ranks must give the flag, also where it would change nothing.
TEST(FinishLast, MustBeGivenByAllRanks) {
  for (const Axes axes : every_axes)
    for (const fsdp_strategy strategy : strategies)
      for (const bool ended : {false, true})
        for (const uint32_t gives : {0u, 1u}) {
          Scenario setup = setup_over(axes, strategy, 2);
          setup.steps = 1;
          const auto expected = reference(setup).weights;
          run_threads(setup, [&](uint32_t r, fsdp_context *context) {
            Rank rank(context, setup);
            rank.load();
            for (size_t g = rank.groups.size(); g-- > 0;) {
              put_all(rank, g, 1);
              FSDP(fsdp_reduce_grad(rank.groups[g], ended ? FSDP_LAST : 0, nullptr));
            }
            require_error(fsdp_finish_grads(rank.model, 1, r == gives ? FSDP_LAST : 0, nullptr), FSDP_MISMATCH,
                          {gives ? "rank 1 gave fsdp_finish_grads FSDP_LAST, rank 0 did not"
                                 : "rank 0 gave fsdp_finish_grads FSDP_LAST, rank 1 did not",
                           "call fsdp_discard_step on every rank"});
            FSDP(fsdp_discard_step(rank.model, nullptr));
            clean_step(rank, 0);
            FSDP(fsdp_check_replicas(rank.model, 0, nullptr));
            REQUIRE(same_bits(rank.read_all(), expected));
            FSDP(fsdp_close_context(context));
          });
        }
}

// A hold that is left keeps the step from ending, and nothing was reduced before that error.
TEST(FinishLast, IsRefusedWhileWeightsAreHeld) {
  const Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM, 2);
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    for (size_t g = rank.groups.size(); g-- > 0;) {
      put_all(rank, g, 1);
      FSDP(fsdp_reduce_grad(rank.groups[g], 0, nullptr));
    }
    if (r == 0) FSDP(fsdp_unshard(rank.groups[1], FSDP_EVAL, 0, nullptr));
    const uint64_t before = rank.stats().reduces;
    require_error(fsdp_finish_grads(rank.model, 1, FSDP_LAST, nullptr), FSDP_INVALID_STATE, {"layer.0", "EVAL"});
    if (r == 0) REQUIRE(rank.stats().reduces == before);
    FSDP(fsdp_discard_step(rank.model, nullptr));
    clean_step(rank, 0);
    FSDP(fsdp_close_context(context));
  });
}

}  // namespace
