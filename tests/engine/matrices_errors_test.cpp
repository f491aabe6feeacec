// SPDX-License-Identifier: Apache-2.0
// Whole matrices with wrong calls, discarded steps, and ranks that stay away or die.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "death.h"
#include "matrices.h"

namespace harness::matrices {
namespace {

// -- misuse --

void expect_refused(fsdp_status status, const std::vector<std::string> &words) {
  require_error(status, FSDP_INVALID_STATE, words);
}

TEST(MatricesErrors, AreCollectedInsideTheWindowAndGivenBackBeforeAnythingElse) {
  const Scenario setup = scenario_of({.ranks = 2});
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    fsdp_matrix given = FSDP_MATRIX_INIT;
    expect_refused(fsdp_collect_matrices(rank.model, nullptr, stream()), {"window is closed"});
    expect_refused(fsdp_next_matrix(rank.model, stream(), &given), {"fsdp_collect_matrices"});
    expect_refused(fsdp_return_matrices(rank.model, stream()), {"fsdp_collect_matrices"});
    FSDP(fsdp_begin_update(rank.model, stream()));
    expect_refused(fsdp_collect_matrices(rank.model, nullptr, stream()), {"no gradients"});
    publish(rank);
    give_whole_grads(rank);
    collect(rank);
    double norm = 0;
    expect_refused(fsdp_collect_matrices(rank.model, nullptr, stream()), {"fsdp_return_matrices"});
    expect_refused(fsdp_publish_weights(rank.model, stream()), {"fsdp_return_matrices"});
    expect_refused(fsdp_step_adamw(rank.model, 0.1, nullptr, stream()), {"fsdp_return_matrices"});
    expect_refused(fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm), {"fsdp_return_matrices"});
    expect_refused(fsdp_clip_grads(rank.model, nullptr, 1, stream(), &norm), {"fsdp_return_matrices"});
    expect_refused(fsdp_scale_grads(rank.model, 2, stream()), {"fsdp_return_matrices"});
    std::vector<float> values(40);
    expect_refused(fsdp_read_param(rank.groups[0], 0, values.data(), FSDP_FLOAT32, 40, FSDP_EVERY_RANK, 0),
                   {"fsdp_return_matrices"});
    expect_refused(fsdp_read_state(rank.groups[0], 0, "exp_avg", values.data(), FSDP_FLOAT32, 40, FSDP_EVERY_RANK, 0),
                   {"fsdp_return_matrices"});
    expect_refused(fsdp_close_context(context), {"collected and not returned"});
    expect_refused(fsdp_set_param_trainable(rank.groups[0], 0, 0), {"fsdp_return_matrices"});
    FSDP(fsdp_next_matrix(rank.model, stream(), &given));
    REQUIRE(given.data);
    expect_refused(fsdp_return_matrices(rank.model, stream()),
                   {"fsdp_next_matrix", "has not come to matrix", "parameter '"});
    change_matrices(rank);
    FSDP(fsdp_next_matrix(rank.model, stream(), &given));
    REQUIRE(!given.data && given.count == 0);
    FSDP(fsdp_return_matrices(rank.model, stream()));
    FSDP(fsdp_get_grad_norm(rank.model, nullptr, stream(), &norm));
    FSDP(fsdp_step_adamw(rank.model, 0.1, nullptr, stream()));
    FSDP(fsdp_close_context(context));
  });
}

TEST(MatricesErrors, OfAnUnknownPlaneAreRefused) {
  Scenario setup = scenario_of({.ranks = 1});
  setup.model.optimizer = FSDP_OPTIMIZER_ADAMW_8BIT;
  setup.model.main_storage = FSDP_MAIN_SPLIT16;
  setup.groups[0].params[0].shape = {128, 64};
  setup.set_dtype(FSDP_BFLOAT16);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    give_whole_grads(rank);
    const auto refused = [&](const char *source, const char *target, fsdp_dtype dtype,
                             const std::vector<std::string> &words) {
      fsdp_matrix_options options = FSDP_MATRIX_OPTIONS_INIT;
      options.source = source, options.target = target, options.dtype = dtype;
      require_error(fsdp_collect_matrices(rank.model, &options, stream()), FSDP_INVALID_ARGUMENT, words);
    };
    refused("momentum", nullptr, 0, {"source is 'momentum'", "'exp_avg'", "'main_weight'"});
    refused(nullptr, "momentum", 0, {"target is 'momentum'"});
    refused("exp_avg", nullptr, 0, {"'exp_avg'", "'up'", "codes"});
    refused("main_weight", nullptr, 0, {"FSDP_MAIN_SPLIT16"});
    refused(nullptr, nullptr, FSDP_UINT8, {"dtype"});
    publish(rank);
    FSDP(fsdp_close_context(context));
  });
}

TEST(MatricesErrors, WithOtherOptionsOnARankAreAMismatch) {
  Scenario setup = scenario_of({.ranks = 2});
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    give_whole_grads(rank);
    fsdp_matrix_options options = FSDP_MATRIX_OPTIONS_INIT;
    options.dtype = r ? FSDP_BFLOAT16 : FSDP_FLOAT32;
    require_error(fsdp_collect_matrices(rank.model, &options, stream()), FSDP_MISMATCH,
                  {"ranks 0 and 1 gave another source, target or dtype"});
    FSDP(fsdp_discard_step(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

TEST(MatricesErrors, OfAModelThatDeclaresNoneCannotBeCollected) {
  Scenario setup = harness::scenario_of(FSDP_STRATEGY_OPTIM, 1);
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    FSDP(fsdp_begin_update(rank.model, stream()));
    expect_refused(fsdp_collect_matrices(rank.model, nullptr, stream()), {"fsdp_param.matrix"});
    publish(rank);
    FSDP(fsdp_close_context(context));
  });
}

// -- discarded steps --

TEST(MatricesErrors, OfADiscardedStepLeaveNothing) {
  for (const Shape &shape : {Shape{3, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::one, 1, 512},
                             Shape{4, FSDP_STRATEGY_OPTIM_GRADS, Axis::hfsdp, 2, 512}}) {
    const Scenario setup = scenario_of(shape);
    Whole whole(setup.groups);
    std::atomic<int> refused{0};  // matrices of waves that the discarding rank did not send
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      // Once a rank has given a step up, another rank may still copy rows of a wave while their owner writes rows of a
      // later wave in their place. These rows are thrown away with the step, but ThreadSanitizer sees a race between
      // threads of the library, which tests/tsan.supp cannot tell from others.
      const uint32_t spoilers = is_thread_sanitized() ? 0 : shape.ranks;
      for (uint32_t spoiler = 0; spoiler < spoilers; ++spoiler) {
        give_whole_grads(rank);
        collect(rank);
        fsdp_matrix given = FSDP_MATRIX_INIT;
        if (r != spoiler) {
          fsdp_status status = FSDP_OK;
          do status = fsdp_next_matrix(rank.model, stream(), &given);
          while (status == FSDP_OK && given.data);
          refused += status != FSDP_OK;
          if (status == FSDP_OK) status = fsdp_return_matrices(rank.model, stream());
          require_error(status, FSDP_INVALID_STATE, {"fsdp_discard_step"});
        }
        FSDP(fsdp_discard_step(rank.model, stream()));
      }
      give_whole_grads(rank);
      collect(rank);
      change_matrices(rank);
      FSDP(fsdp_return_matrices(rank.model, stream()));
      FSDP(fsdp_discard_step(rank.model, stream()));
      give_whole_grads(rank);
      collect(rank);
      change_matrices(rank);
      FSDP(fsdp_return_matrices(rank.model, stream()));
      add_shards(rank, whole, nullptr);
      publish(rank);
      FSDP(fsdp_close_context(context));
    });
    if (!on_gpu() && !is_thread_sanitized()) {  // there the rows come in stream order, and fsdp_return_matrices finds
                                                // that they have not come
      EXPECT_GT(refused, 0) << shape.text() << ": fsdp_next_matrix gave rows that have not come";
    }
    EXPECT_TRUE(same_bits(whole.values(), change_alone(setup.groups, whole_grads(setup)))) << shape.text();
  }
}

TEST(MatricesErrors, ThatHaveWrittenWeightsCannotBeDiscarded) {
  const Scenario setup = scenario_of({.ranks = 2});
  run_threads(setup, [&](uint32_t, fsdp_context *context) {
    Rank rank(context, setup);
    rank.load();
    give_whole_grads(rank);
    collect(rank, nullptr, "main_weight");
    expect_refused(fsdp_discard_step(rank.model, stream()), {"fsdp_return_matrices"});
    change_matrices(rank);
    FSDP(fsdp_return_matrices(rank.model, stream()));
    expect_refused(fsdp_discard_step(rank.model, stream()), {"written main weights", "fsdp_publish_weights"});
    publish(rank);
    give_whole_grads(rank);
    FSDP(fsdp_discard_step(rank.model, stream()));
    FSDP(fsdp_close_context(context));
  });
}

// After weights were written a difference cannot be undone, and the context says so at once.
TEST(MatricesErrors, ADifferenceAfterWeightsWereWrittenIsFatal) {
  for (const bool again : {false, true}) {
    const Scenario setup = scenario_of({.ranks = 2});
    run_threads(setup, [&](uint32_t r, fsdp_context *context) {
      Rank rank(context, setup);
      rank.load();
      give_whole_grads(rank);
      collect(rank, nullptr, "main_weight");
      change_matrices(rank);
      FSDP(fsdp_return_matrices(rank.model, stream()));
      fsdp_matrix_options options = FSDP_MATRIX_OPTIONS_INIT;
      options.dtype = r ? FSDP_BFLOAT16 : FSDP_FLOAT32;
      const fsdp_status status = again ? fsdp_collect_matrices(rank.model, &options, stream())
                                       : fsdp_step_adamw(rank.model, r ? 0.1 : 0.2, nullptr, stream());
      require_error(status, FSDP_MISMATCH, {"main weights may have been written", "the context has failed"});
      REQUIRE(fsdp_publish_weights(rank.model, stream()) != FSDP_OK);
    });
  }
}

TEST(MatricesErrors, ADifferenceBeforeTheFirstPublishNamesTheCallToRepeat) {
  Scenario setup = scenario_of({.ranks = 2});
  run_threads(setup, [&](uint32_t r, fsdp_context *context) {
    Rank rank(context, setup);
    fsdp_matrix_options options = FSDP_MATRIX_OPTIONS_INIT;
    options.source = "main_weight";
    options.dtype = r ? FSDP_BFLOAT16 : FSDP_FLOAT32;
    require_error(fsdp_collect_matrices(rank.model, &options, stream()), FSDP_MISMATCH,
                  {"call fsdp_collect_matrices again"});
    collect(rank, "main_weight");
    change_matrices(rank);
    FSDP(fsdp_return_matrices(rank.model, stream()));
    publish(rank);
    FSDP(fsdp_close_context(context));
  });
}

// -- ranks that do not come --

TEST(MatricesErrors, ThatARankDoesNotGiveBackAreATimeoutThatNamesIt) {
  Scenario setup = scenario_of({3, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::one, 1, 512});
  setup.context.timeout_ms = 1500;
  std::atomic<int> named{0};
  std::atomic<bool> over{false};
  std::vector<std::string> errors;
  run_threads(
      setup,
      [&](uint32_t r, fsdp_context *context) {
        Rank rank(context, setup);
        rank.load();
        give_whole_grads(rank);
        collect(rank);
        if (r == 1) {
          while (!over) pause_ms(5);
          return;
        }
        fsdp_matrix given = FSDP_MATRIX_INIT;
        fsdp_status status = FSDP_OK;
        do status = fsdp_next_matrix(rank.model, stream(), &given);
        while (status == FSDP_OK && given.data);
        if (status == FSDP_OK) status = fsdp_return_matrices(rank.model, stream());
        fsdp_error error = FSDP_ERROR_INIT;
        FSDP(fsdp_get_last_error(context, &error));
        if (status == FSDP_TIMEOUT && error.rank == 1) ++named;
        if (++named >= 2) over = true;
      },
      &errors);
  over = true;
  EXPECT_GE(named, 2);
}

// -- death --

// Trains until a rank dies in the middle of its matrices. Returns 0 if the error names that rank.
int change_until_death(const Scenario &setup, uint32_t r, uint32_t victim, const std::string &rendezvous) {
  fsdp_context *context = nullptr;
  try {
    context = join(setup, r, rendezvous);
    Rank rank(context, setup);
    rank.load();
    for (int calls = 0;;) {
      give_whole_grads(rank);
      collect(rank);
      change_matrices(rank, [&](const fsdp_matrix &) {
        if (++calls == 6 && r == victim) ::raise(SIGKILL);
      });
      FSDP(fsdp_return_matrices(rank.model, stream()));
      publish(rank);
    }
  } catch (const Failure &failure) {
    const bool named = failure.status == FSDP_PEER_FAILED && failure.rank == static_cast<int32_t>(victim);
    fsdp_destroy_context(context);
    return named ? 0 : 1;
  }
}

TEST(MatricesDeath, ARankThatDiesInAWaveIsNamedAtOnce) {
  for (const Shape &shape : {Shape{3, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::one, 1, 512},
                             Shape{4, FSDP_STRATEGY_OPTIM_GRADS_PARAMS, Axis::hfsdp, 2, 512}})
    for (const uint32_t victim : {0u, shape.ranks - 1}) {
      const Scenario setup = scenario_of(shape);
      const std::string rendezvous = "matrices-" + std::to_string(::getpid()) + "-" + std::to_string(victim);
      std::vector<pid_t> children;
      for (uint32_t r = 0; r < shape.ranks; ++r)
        if (children.push_back(::fork()), children.back() == 0)
          ::_exit(change_until_death(setup, r, victim, rendezvous));
      const double began = now();
      for (uint32_t r = 0; r < shape.ranks; ++r) {
        int status = 0;
        ASSERT_EQ(::waitpid(children[r], &status, 0), children[r]);
        if (r == victim)
          EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        else
          EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << " of " << shape.text();
      }
      EXPECT_LT(now() - began, at_once + 5);
    }
}

}  // namespace
}  // namespace harness::matrices
