// SPDX-License-Identifier: Apache-2.0
// Meshes of two axes in the cases that other tests leave out: frozen and mixed groups, discarded steps, visits right
// after a publish, models on a part of the ranks.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "harness.h"

using namespace harness;

namespace {

enum class Kind { hsdp, hfsdp, hosts };

Scenario make_setup(Kind kind, uint32_t outer, uint32_t inner, fsdp_strategy strategy) {
  Scenario setup = scenario_of(strategy, outer * inner);
  if (kind == Kind::hosts) {
    setup.context.ranks_per_host = inner;
  } else {
    setup.mesh.replicate_size = outer;
    setup.mesh.shard_size = inner;
  }
  if (kind == Kind::hfsdp) setup.model.outer_strategy = FSDP_OUTER_OPTIM;
  return setup;
}

void expect_reference(const Scenario &setup, const std::string &what) {
  SCOPED_TRACE(what);
  const auto outcomes = train_threads(setup);
  EXPECT_EQ(difference(setup, outcomes), "");
  for (size_t r = 0; r < outcomes.size(); ++r)
    for (int role = 0; role <= last_role; ++role)
      EXPECT_EQ(outcomes[r].memory.role_bytes[role], outcomes[r].stats.allocated_bytes[role]) << "role " << role;
}

// Frozen, mixed dtypes in a group, every policy, debug mode.
TEST(OuterAxis, MixedGroupsMatchTheReference) {
  Sample sample(5);
  for (const Kind kind : {Kind::hsdp, Kind::hfsdp, Kind::hosts})
    for (const uint32_t inner : {1u, 2u})
      for (const fsdp_strategy strategy : strategies)
        for (const fsdp_reduce_policy policy : {FSDP_REDUCE_POLICY_EACH, FSDP_REDUCE_POLICY_LAST})
          for (const uint32_t flags : {0u, 1u, 2u}) {
            if (strategy == FSDP_STRATEGY_OPTIM && policy == FSDP_REDUCE_POLICY_EACH) continue;
            if (!sample.takes_next()) continue;
            Scenario setup = make_setup(kind, 2, inner, strategy);
            setup.model.reduce_policy = policy;
            setup.microbatches = 3;
            setup.clip = 0.5;
            setup.eval = true;
            setup.recompute = true;
            setup.groups[0].params[0].flags = FSDP_PARAM_FROZEN;
            setup.groups[1].params[0].dtype = FSDP_BFLOAT16;
            setup.groups[1].params[2].dtype = FSDP_BFLOAT16;
            setup.groups[2].params[1].flags = FSDP_PARAM_FROZEN;
            setup.groups[2].params[2].dtype = FSDP_BFLOAT16;
            if (flags & 1) setup.model.flags = FSDP_MODEL_FORCE_COMMUNICATION;
            if (flags & 2) setup.context.flags = FSDP_CONTEXT_DEBUG, setup.model.unshard_mode = FSDP_UNSHARD_MAPPED;
            expect_reference(setup, "kind " + std::to_string(static_cast<int>(kind)) + " inner " +
                                        std::to_string(inner) + " strategy " + std::to_string(strategy) + " policy " +
                                        std::to_string(policy) + " flags " + std::to_string(flags));
          }
}

// Each rank once discards a step in its middle. This is a separate function because tests/tsan.supp names it.
[[gnu::noinline]] void train_after_discarded_steps(Rank &rank) {
  const SanitizerFrame frame;
  for (uint32_t step = 0; step < rank.setup.steps; ++step) {
    for (uint32_t spoiler = 0; spoiler < rank.setup.ranks; ++spoiler) {
      const bool spoils = rank.rank == spoiler;
      for (size_t g = rank.groups.size(); g-- > (spoils ? 2 : 0);) backward_group(rank, g, step + 50, 0, nullptr);
      if (!spoils) REQUIRE(fsdp_finish_grads(rank.model, 1, 0, nullptr) != FSDP_OK);
      FSDP(fsdp_discard_step(rank.model, nullptr));
    }
    clean_step(rank, step);
  }
}

// A step is discarded by one rank in its middle, again and again; the next steps are as if it had never been.
TEST(OuterAxis, DiscardedStepsLeaveNothing) {
  for (const Kind kind : {Kind::hsdp, Kind::hfsdp, Kind::hosts})
    for (const uint32_t inner : {1u, 2u})
      for (const fsdp_strategy strategy : strategies) {
        Scenario setup = make_setup(kind, 2, inner, strategy);
        setup.steps = 6;
        const auto expected = reference(setup).weights;
        run_threads(setup, [&](uint32_t, fsdp_context *context) {
          Rank rank(context, setup);
          rank.load();
          train_after_discarded_steps(rank);
          REQUIRE(same_bits(rank.read_all(), expected));
          FSDP(fsdp_close_context(context));
        });
      }
}

// Weights that the strategy keeps whole may be read at once when the publish returns.
TEST(OuterAxis, WholeWeightsAreThereWhenAPublishReturns) {
  Sample sample(3);
  for (const Kind kind : {Kind::hfsdp, Kind::hosts})
    for (const uint32_t inner : {1u, 2u})
      for (const fsdp_strategy strategy : {FSDP_STRATEGY_OPTIM, FSDP_STRATEGY_OPTIM_GRADS}) {
        if (!sample.takes_next()) continue;
        Scenario setup = make_setup(kind, 2, inner, strategy);
        const uint64_t rows = is_sanitized() ? 128 : 512;  // all of which are late under a sanitizer, too
        setup.groups = equal_groups(4, rows, 1024);
        run_threads(setup, [&](uint32_t, fsdp_context *context) {
          Rank rank(context, setup);
          for (uint32_t version = 0; version < 4; ++version) {
            if (version) FSDP(fsdp_begin_update(rank.model, nullptr));
            for (size_t g = 0; g < rank.groups.size(); ++g) {
              const std::vector<float> data(rows * 1024, static_cast<float>(version + g + 1));
              FSDP(fsdp_load_param(rank.groups[g], 0, data.data(), FSDP_FLOAT32, data.size(), FSDP_EVERY_RANK, 0));
            }
            FSDP(fsdp_publish_weights(rank.model, nullptr));
            for (size_t g = rank.groups.size(); g-- > 0;) {
              const std::vector<float> wanted(rows * 1024, static_cast<float>(version + g + 1));
              REQUIRE(same_bits({rank.view(g, 0, FSDP_EVAL)}, {wanted}));
            }
          }
          FSDP(fsdp_close_context(context));
        });
      }
}

// Parameters from a root on any rank.
TEST(OuterAxis, ParametersComeFromAnyRank) {
  Sample sample(5);
  for (const Kind kind : {Kind::hsdp, Kind::hfsdp, Kind::hosts})
    for (const uint32_t inner : {1u, 2u})
      for (const fsdp_strategy strategy : strategies) {
        if (!sample.takes_next()) continue;
        Scenario setup = make_setup(kind, 2, inner, strategy);
        setup.groups[0].params[0].shape = {700, 200};  // more than one chunk
        setup.groups[2].params[0].flags = FSDP_PARAM_FROZEN;
        setup.groups[1].params[2].dtype = FSDP_BFLOAT16;
        run_threads(setup, [&](uint32_t r, fsdp_context *context) {
          Rank rank(context, setup);
          for (uint32_t root = 0; root < setup.ranks; ++root) {
            if (root) FSDP(fsdp_begin_update(rank.model, nullptr));
            for (size_t g = 0; g < rank.groups.size(); ++g)
              for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
                std::vector<float> data(rank.def(g).params[p].count(), -1);
                if (r == root)
                  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>((i * 7 + root + g) % 128);
                FSDP(fsdp_load_param(rank.groups[g], p, r == root ? data.data() : nullptr, FSDP_FLOAT32, data.size(),
                                     static_cast<int32_t>(root), 0));
              }
            FSDP(fsdp_publish_weights(rank.model, nullptr));
            for (size_t g = 0; g < rank.groups.size(); ++g) {
              FSDP(fsdp_unshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
              for (size_t p = 0; p < rank.def(g).params.size(); ++p) {
                std::vector<float> wanted(rank.def(g).params[p].count());
                for (size_t i = 0; i < wanted.size(); ++i) wanted[i] = static_cast<float>((i * 7 + root + g) % 128);
                REQUIRE(same_bits({rank.view(g, p, FSDP_EVAL), rank.read(g, p)}, {wanted, wanted}));
              }
              FSDP(fsdp_reshard(rank.groups[g], FSDP_EVAL, 0, nullptr));
            }
          }
          FSDP(fsdp_close_context(context));
        });
      }
}

// Between hosts one communicator has room for 4 chunks of 1 MiB from each rank; on one host three have 512 KiB each.
TEST(OuterAxis, PlansCountWhatMessagesBetweenHostsNeed) {
  uint64_t staging[2] = {};
  for (const uint32_t ranks_per_host : {0u, 2u}) {
    Scenario setup = make_setup(Kind::hsdp, 2, 2, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
    setup.context.ranks_per_host = ranks_per_host;
    fsdp_context *context = nullptr;
    FSDP(fsdp_create_plan_context(4, 1, &setup.context, &context));
    {
      Rank rank(context, setup);
      const Memory memory = memory_of(rank.model, 1);
      staging[ranks_per_host != 0] = memory.role_bytes[FSDP_ROLE_STAGING];
    }
    fsdp_destroy_context(context);
  }
  // 34 chunks of 60 KiB (2 MiB) and two messages of short calls (64 KiB and a head) of both ranks, instead of three
  // times two halves of staging memory.
  EXPECT_EQ(staging[1] + 3 * (512u << 10), staging[0] + 2 * 34 * (60u << 10) + 2 * 2 * ((64u << 10) + 128));
}

// Acted hosts hold the same memory as real ones: the bytes that a planning context reports, on every rank and in every
// role.
TEST(OuterAxis, ARunOnActedHostsHoldsWhatItsPlanSays) {
  for (const Kind kind : {Kind::hsdp, Kind::hfsdp, Kind::hosts})
    for (const uint32_t ranks_per_host : {1u, 2u}) {
      Scenario setup = make_setup(kind, 2, ranks_per_host, FSDP_STRATEGY_OPTIM_GRADS_PARAMS);
      setup.context.ranks_per_host = ranks_per_host;
      setup.steps = 1;
      const auto outcomes = train_threads(setup);
      for (uint32_t r = 0; r < outcomes.size(); ++r) {
        fsdp_context *context = nullptr;
        FSDP(fsdp_create_plan_context(setup.ranks, r, &setup.context, &context));
        Memory planned;
        {
          Rank rank(context, setup);
          planned = memory_of(rank.model, r);
        }
        fsdp_destroy_context(context);
        for (int role = 0; role <= last_role; ++role) {
          EXPECT_EQ(planned.role_bytes[role], outcomes[r].stats.allocated_bytes[role])
              << "kind " << static_cast<int>(kind) << ", " << ranks_per_host << " a host, rank " << r << ", role "
              << role;
          EXPECT_EQ(planned.role_bytes[role], outcomes[r].memory.role_bytes[role]) << "role " << role;
        }
      }
    }
}

// A mesh need not be one that the whole world could have.
TEST(Meshes, MayLeaveOutRanksThatMakeTheWorldUneven) {
  Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 3);
  setup.context.ranks_per_host = 2;
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    const uint32_t near[] = {0, 1}, far[] = {2};
    Scenario own = setup;
    own.mesh.ranks = r < 2 ? near : far;
    own.mesh.rank_count = r < 2 ? 2 : 1;
    own.mesh.shard_size = own.mesh.rank_count;
    own.steps = 1;
    own.model.grad_op = FSDP_GRAD_OP_SUM;
    Outcome outcome;
    {
      Rank rank(context, own);
      train(rank, outcome);
    }
    FSDP(fsdp_close_context(context));
    // Sums of ranks 0 and 1 are those of a job of two; rank 2's are its own gradients.
    Scenario alone = own;
    alone.ranks = own.mesh.rank_count;
    if (r < 2) {
      alone.context.ranks_per_host = 0;
      REQUIRE(same_bits(outcome.weights, reference(alone).weights));
      return;
    }
    for (size_t p = 0; p < outcome.grads.size(); ++p)
      for (size_t i = 0; i < outcome.grads[p].size(); ++i) {
        const auto ordinal = static_cast<uint32_t>(p);
        REQUIRE(outcome.grads[p][i] == gradient(2, 0, 0, ordinal, i, initial_weight(ordinal, i)));
      }
  });
}

// Before any rank waits for an axis that the others do not have.
TEST(Meshes, ThatDifferBetweenProcessesAreNamed) {
  const std::string name = "outer-" + std::to_string(::getpid());
  std::vector<pid_t> ranks;
  for (uint32_t r = 0; r < 4; ++r) {
    ranks.push_back(::fork());
    if (ranks.back()) continue;
    try {
      Scenario setup = scenario_of(FSDP_STRATEGY_OPTIM_GRADS_PARAMS, 4);
      if (r == 3) setup.mesh.replicate_size = 2;
      const Rank rank(join(setup, r, name), setup);
    } catch (const Failure &failure) {
      ::_exit(failure.status == FSDP_MISMATCH && failure.message.find("mesh: replicate 2") != std::string::npos ? 0
                                                                                                                : 1);
    }
    ::_exit(2);
  }
  for (const pid_t pid : ranks) {
    int status = -1;
    ::waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

}  // namespace
